# ruff: noqa: N803
"""Paged decode as a tutorial writes it, as a row of the benchmark, to show the gain of quire.kernels.

One program per sequence and query head, so the query heads of a group read the same keys again; the loop over the block
table unrolled; lengths of the table, strides and scale compiled in, so each width of the table compiles anew. Its
softmax is the usual online one, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCKS = 64
"""Longer tables take minutes to compile: the loop over them is unrolled."""


@triton.jit
def _naive_decode(
    q_ptr,  # [n, Hq, D]
    k_ptr,  # [B, S, H, D]
    v_ptr,  # [B, S, H, D]
    out_ptr,  # [n, Hq, D]
    tables_ptr,  # [n, M] int32
    lens_ptr,  # [n] int32
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    dim, slot = tl.arange(0, DIM), tl.arange(0, BLOCK)
    row = (seq * NUM_HEADS + head) * DIM + dim
    q = tl.load(q_ptr + row).to(tl.float32)
    seq_len = tl.load(lens_ptr + seq)
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for index in tl.static_range(WIDTH):
        if index * BLOCK < seq_len:
            block_id = tl.load(tables_ptr + seq * WIDTH + index).to(tl.int64)
            start = block_id * STRIDE_BLOCK + (head // GROUP) * STRIDE_HEAD
            offsets = start + slot[:, None] * STRIDE_SLOT + dim[None, :]
            visible = index * BLOCK + slot < seq_len
            keys = tl.load(k_ptr + offsets, mask=visible[:, None], other=0.0).to(tl.float32)
            values = tl.load(v_ptr + offsets, mask=visible[:, None], other=0.0).to(tl.float32)
            scores = tl.where(visible, tl.sum(q[None, :] * keys, 1) * SCALE, float("-inf"))
            highest = tl.maximum(maximum, tl.max(scores, 0))
            weights = tl.exp(scores - highest)
            decay = tl.exp(maximum - highest)
            total = total * decay + tl.sum(weights, 0)
            acc = acc * decay + tl.sum(weights[:, None] * values, 0)
            maximum = highest
    tl.store(out_ptr + row, (acc / total).to(out_ptr.dtype.element_ty))


def naive_decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, *, block_tables: Tensor, seq_lens: Tensor, scaling: float
) -> None:
    """One query token per sequence over its blocks. Shapes as in quire.kernels.reference.paged_attention.

    Dk = Dv = a power of two; q, out and block_tables contiguous; every length at least 1; k_pool and v_pool of the same
    strides. Raises ValueError for a table of more than MAX_BLOCKS entries.
    """
    width = block_tables.shape[1]
    if width > MAX_BLOCKS:
        raise ValueError(f"a block table of {width} entries, more than {MAX_BLOCKS}, would be unrolled")
    _, block_size, num_kv_heads, dim = k_pool.shape
    _naive_decode[q.shape[:2]](
        q,
        k_pool,
        v_pool,
        out,
        block_tables,
        seq_lens,
        STRIDE_BLOCK=k_pool.stride(0),
        STRIDE_SLOT=k_pool.stride(1),
        STRIDE_HEAD=k_pool.stride(2),
        SCALE=scaling,
        NUM_HEADS=q.shape[1],
        GROUP=q.shape[1] // num_kv_heads,
        BLOCK=block_size,
        DIM=dim,
        WIDTH=width,
        num_warps=4,
    )
