"""The memory that steps work on: blocks of keys and values, and tables that say where a sequence's blocks are.

    layer_spec.py       the sizes and the mask of a layer's attention
    layer_groups.py     layers that keep the same positions share a block table
    pool_size.py        the number of blocks, from the flags and the free memory
    kv_pool.py          the tensors of all layers, in blocks
    kept_pool.py        the header and the checksums beside the tensors, in memory that outlives the worker
    host_pool.py        blocks of offloaded sequences, in the machine's memory
    state_slots.py      states that a model keeps per sequence and not per token
    sequence_table.py   block tables and last sampled tokens on the device, one row per sequence
    step_batch.py       the tokens of one step, with their positions and slots
    step_ring.py        the inputs and tokens of decode steps that are one graph

The pool has bytes, not owners: a step is checked before it comes here.
"""
