"""The GPU process: it owns the tensors of a pool and runs the steps that cachemgr grants.

A step passes the rooms in this order:

    client      RunStep                                     service     a message
                decoded, checked against the grant          grant       an AcceptedStep, or a Refused
                tables and copies, one forward, one sample  run         a StepResult
                logits                                      model       a transformers model over the pool
                tokens                                      sampling
    client      the tokens, and a report for cachemgr       service

A room imports the rooms below it alone; import-linter holds this order (pyproject.toml):

    service             gRPC, attachment to cachemgr, start and drain of the process
    tensor_parallel     a worker of several ranks
    run                 one step on the device; loading; the model thread
    model               a transformers model, made to run on the pool and checked
    grant, fusion       grants, decoded and accepted or refused; modules replaced by fused ones
    sampling, attention from logits to tokens; the one attention function
    adapters            LoRA updates of linear layers
    memory              the pool's tensors, block tables, the batch of a step, the host tier, layer groups
    device              devices, transfers, captures, traces

Beside them are holder, a process that keeps the pool's memory, and the borrower's side of it; config.py, the settings;
and unsupported_model.py, the refusal of a model.
"""
