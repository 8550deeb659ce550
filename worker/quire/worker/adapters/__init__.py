"""LoRA adapters: small updates of a model's linear layers, many of them on one base.

    PEFT's folder  ->  read_adapter()  ->  Adapter  ->  adapt()  ->  AdaptedModel, checked by the model's self-check

The files, in that order:

    peft_checkpoint     reads and checks a folder that PEFT saved
    adapter             an adapter in memory, and its identity
    lora_linear         a linear layer with the updates of several adapters, and which tokens of a step take which
    adapted_model       puts adapters into a loaded model
"""
