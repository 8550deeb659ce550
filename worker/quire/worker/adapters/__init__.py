"""LoRA adapters: small updates of a model's linear layers, many of them on one base.

    PEFT's folder  ->  read_adapter()  ->  Adapter  ->  prepare()  ->  AdaptedModel.add(), checked by the model's
    self-check  ->  AdapterTable, from which requests can name it

The files, in that order:

    peft_checkpoint     reads and checks a folder that PEFT saved
    adapter             an adapter in memory, and its identity
    lora_linear         a linear layer with the updates of several adapters, and which tokens of a step take which
    adapted_model       puts adapters into a loaded model
    slotted_linear      on a GPU: products with updates in slots of fixed memory
    slotted_model       puts adapters into the slots of a loaded model
    adapter_table       the names that are served, within the bounds
"""
