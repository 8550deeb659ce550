"""One step on the device, and all that has to be there before the first one.

    loading.py          loads a rank: model, pool, host tier, CUDA graphs
    pool_budget.py      the memory that the pool can take
    graph_limit.py      the largest step that is worth CUDA graphs, by the model
    peak_step.py        the GPU memory of the largest step
    warm_up.py          steps that compile every kernel before the worker serves
    model_thread.py     the thread that launches steps in order, and the one that waits for their end
    executor.py         table changes, copies, one forward, one sample
    verify.py           the executor of QUIRE_VERIFY=1, which checks every access
    graphs.py           decode steps as CUDA graphs
    pieces.py           mixed steps as CUDA graphs, but for their attention
    prompt_graphs.py    small steps with prompts as one CUDA graph each
    ranks.py            what the executor asks the ranks of a group
    watchdog.py         ends the process if a step does not end

A step that fails after its grant was applied fails alone; a pool that was damaged begins a new epoch.
"""
