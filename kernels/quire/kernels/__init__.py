"""Triton kernels with their launchers, one file a family. They know tensors alone; only worker and tests import them.

    launcher    checks shapes, dtypes and devices, chooses a configuration
    kernel      trusts its launcher

In the order in which a step runs them:

    launching.py        the parts that all launchers share
    dependent_launch.py starts of kernels before the kernel in front has ended
    fixed_tiles.py      the switch to tiles that do not depend on the batch
    block_copy.py       copies of blocks within the pool
    offload.py          copies of blocks to the host tier and back
    step_ring.py        the begin and the end of a decode step that is one graph
    ring_layout.py      the ring in the host's memory that it reads
    decode_plan.py      the work list of a step's decode attention
    add_rmsnorm.py      the norm before each half of a layer
    activation.py       SiLU and GELU, at the end of another kernel
    product_parts.py    the parts that all products share
    skinny_linear.py    products of few rows, with norm in front, activation or residual behind
    skinny_tiling.py    their division among programs
    fixed_linear.py     products of any number of rows in one tile shape
    lora.py             updates of LoRA adapters behind a product, by the slot of each row
    rope_table.py       cosines and sines by position
    qkv_prologue.py     norm, rope and cache write, between the QKV projection and attention
    cache_write.py      keys and values to their slots, where there is no prologue
    paged_prefill.py    attention of prompts
    paged_decode.py     attention of a few queries per sequence, in splits
    merge_states.py     attention over several sets of keys made one
    silu_mul.py         the middle of a gated MLP
    gumbel.py           noise of tokens, and the draw
    sampler.py          from logits to tokens

reference.py, reference_prologue.py and reference_elementwise.py define correct results, in float64.
"""
