# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The steps between the QKV projection and attention, in one launch: qk-norm, rotary embedding, and the write to the
pool.

A program takes one head of a few tokens, and does with it what this head needs: query heads are normalised, rotated and
go to q, key heads go to their slots instead, value heads go there as they are. All heads of the same tokens run next to
one another, so that each row of the projection is read as one piece. HPC-Ops, vLLM and SGLang fuse the same three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cache_write import to_pool_dtype
from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.fixed_tiles import are_fixed_tiles_used
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    Variant,
    ceil_div,
    contiguous,
    in_units,
    layouts,
    next_power_of_2,
    num_multiprocessors,
    prepared_once,
    require_contiguous,
    require_dtype,
    require_kv_scales,
    require_last_contiguous,
    require_pool,
    require_same_device,
    require_shape,
    stride_unit,
)


def qkv_prologue(
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    slot_mapping: Tensor,
    positions: Tensor,
    rope_table: Tensor | None,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate one step's queries and keys, write keys and values to the pool, and return the queries.

    Sizes: N tokens, Hq query heads, H kv heads, D head dim, B blocks, S block size, P positions, R rotated dims.
        qkv             [N, (Hq + 2 * H) * D]   fp32, fp16 or bf16, last dim contiguous: all query heads, all key heads,
                                                all value heads
        k_pool, v_pool  [B, S, H, D]            one of KV_DTYPES, also another than that of qkv; last dim contiguous,
                                                any other strides
        slot_mapping    [N]                     int64, contiguous, slot = block_id * S + offset; -1 writes no key and
                                                no value
        positions       [N]                     int64, contiguous, 0 .. P - 1
        rope_table      [P, R]                  float32, contiguous, see rope_table.py; None rotates nothing.
                                                R is even and at most D; dims from R on are not rotated
        interleaved                             pairs are dims 2i and 2i + 1 instead of i and i + R / 2
        q_norm_weight, k_norm_weight    [D]     one dtype, contiguous: RMS norm of each head before the rotation. None
                                                for neither. Models that scale by 1 + weight pass that
        kv_scales       [2, H]                  float32, contiguous, of keys and of values: an fp8 pool holds k / scale,
                                                beyond +-448 saturated. None: 1
        out             [N, Hq, D]              dtype of qkv, last dim contiguous, apart from qkv; made if None
        returns         out

    All in float32, rounded once, at the end. Slots other than -1 must be distinct and in the pool, positions in the
    table; a program does not check it. Raises ValueError if a shape, dtype, stride or device differs.
    Cost: reads qkv once and writes as many elements; no sync.
    """
    per_token = (slot_mapping, positions)
    weights = (rope_table, q_norm_weight, k_norm_weight)
    launch = _prepare(*layouts(qkv, k_pool, v_pool, *per_token, *weights, kv_scales, out), interleaved)
    num_tokens, width = qkv.shape
    if out is None:
        num_kv_heads, head_dim = k_pool.shape[2:]
        out = qkv.new_empty(num_tokens, width // head_dim - 2 * num_kv_heads, head_dim)
    if num_tokens == 0:
        return out
    launch.run(
        qkv_prologue_kernel,
        qkv, out, k_pool, v_pool, *per_token, *weights, kv_scales, num_tokens, eps,
    )  # fmt: skip
    return out


@prepared_once
def _prepare(
    qkv: Layout,
    k_pool: Layout,
    v_pool: Layout,
    slot_mapping: Layout,
    positions: Layout,
    rope_table: Layout | None,
    q_norm_weight: Layout | None,
    k_norm_weight: Layout | None,
    kv_scales: Layout | None,
    out: Layout | None,
    interleaved: bool,
) -> Launch:
    _check(qkv, k_pool, v_pool, slot_mapping, positions, rope_table, q_norm_weight, k_norm_weight)
    require_kv_scales(kv_scales, k_pool)
    num_kv_heads, head_dim = k_pool.shape[2:]
    num_tokens, num_query_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = _checked_out(out, contiguous((num_tokens, num_query_heads, head_dim), qkv))
    variant = prologue_variant(
        num_tokens=num_tokens,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=0 if rope_table is None else rope_table.shape[1],
        block_size=k_pool.shape[1],
        has_norm=q_norm_weight is not None,
        interleaved=interleaved,
        stride_unit=stride_unit(qkv, out, k_pool, v_pool),
        multiprocessors=num_multiprocessors(qkv.device),
        is_fixed=are_fixed_tiles_used(),
    )
    return Launch(
        grid=(ceil_div(num_tokens, variant.constants["BLOCK_TOKENS"]) * (num_query_heads + 2 * num_kv_heads),),
        strides=(qkv.stride(0), *out.strides[:2], *k_pool.strides[:3], *v_pool.strides[:3]),
        options={**variant.options, **dependent_options(qkv_prologue_kernel, qkv.device)},
    )


def prologue_variant(
    *,
    num_tokens: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    has_norm: bool,
    interleaved: bool,
    stride_unit: int,
    multiprocessors: int,
    is_fixed: bool = False,
) -> Variant:
    """The compiled variant of qkv_prologue_kernel; is_fixed: one for any number of tokens.

    4 tokens of a head keep one warp busy and spread a decode step over the GPU, 32 keep more bytes on their way.
    """
    num_programs = num_tokens * (num_query_heads + 2 * num_kv_heads) // 32
    large = num_programs >= 4 * multiprocessors and not is_fixed
    constants = {
        "NUM_QUERY_HEADS": num_query_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "BLOCK_HALF": next_power_of_2(max(rotary_dim // 2, 1)),
        "BLOCK_REST": next_power_of_2(max(head_dim - rotary_dim, 1)),
        "BLOCK_SIZE": block_size,
        "BLOCK_TOKENS": 32 if large else 4,
        "HAS_NORM": has_norm,
        "INTERLEAVED": interleaved,
        "STRIDE_UNIT": stride_unit,
    }
    return Variant(constants, num_warps=4 if large else 1, num_stages=2)


def _check(
    qkv: Layout,
    k_pool: Layout,
    v_pool: Layout,
    slot_mapping: Layout,
    positions: Layout,
    rope_table: Layout | None,
    q_norm_weight: Layout | None,
    k_norm_weight: Layout | None,
) -> None:
    require_pool(k_pool, v_pool)
    require_shape("v_pool", v_pool, k_pool.shape)
    require_shape("qkv", qkv, (None, None))
    require_dtype("qkv", qkv, FLOAT_DTYPES)
    require_last_contiguous("qkv", qkv)
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_pool.shape[2:]
    if width % head_dim or width // head_dim <= 2 * num_kv_heads:
        raise ValueError(f"qkv has {width} columns, not query heads and {2 * num_kv_heads} more of {head_dim} each")
    for name, per_token in (("slot_mapping", slot_mapping), ("positions", positions)):
        require_shape(name, per_token, (num_tokens,))
        require_dtype(name, per_token, torch.int64)
        require_contiguous(name, per_token)
    if rope_table is not None:
        _check_rope_table(rope_table, head_dim)
    _check_norms(q_norm_weight, k_norm_weight, head_dim)
    require_same_device(
        qkv=qkv,
        k_pool=k_pool,
        v_pool=v_pool,
        slot_mapping=slot_mapping,
        positions=positions,
        rope_table=rope_table,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
    )


def _checked_out(out: Layout | None, new: Layout) -> Layout:
    """The layout of a new tensor, if none was given; a given one must be like it but for its strides."""
    if out is None:
        return new
    require_shape("out", out, new.shape)
    require_dtype("out", out, new.dtype)
    require_last_contiguous("out", out)
    require_same_device(qkv=new, out=out)
    return out


def _check_rope_table(rope_table: Layout, head_dim: int) -> None:
    require_shape("rope_table", rope_table, (None, None))
    require_dtype("rope_table", rope_table, torch.float32)
    require_contiguous("rope_table", rope_table)
    if rope_table.shape[1] % 2 or not 0 < rope_table.shape[1] <= head_dim:
        raise ValueError(f"rope_table has {rope_table.shape[1]} columns, not an even number in 2 .. {head_dim}")


def _check_norms(q_norm_weight: Layout | None, k_norm_weight: Layout | None, head_dim: int) -> None:
    if q_norm_weight is None and k_norm_weight is None:
        return
    if q_norm_weight is None or k_norm_weight is None:
        raise ValueError("one of q_norm_weight and k_norm_weight is None, the other is not")
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        require_shape(name, weight, (head_dim,))
        require_dtype(name, weight, FLOAT_DTYPES)
        require_contiguous(name, weight)
    require_dtype("k_norm_weight", k_norm_weight, q_norm_weight.dtype)


@triton.jit
def _load(rows, row_mask, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns FIRST .. FIRST + SIZE - 1 of each row in float32, [rows, BLOCK], zero from SIZE on."""
    dims = tl.arange(0, BLOCK)[None, :]
    return tl.load(rows[:, None] + FIRST + dims, mask=row_mask[:, None] & (dims < SIZE), other=0.0).to(tl.float32)


@triton.jit
def _store(rows, row_mask, x, scale, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    dims = tl.arange(0, BLOCK)[None, :]
    x = to_pool_dtype(x, scale, rows.dtype.element_ty)
    tl.store(rows[:, None] + FIRST + dims, x, mask=row_mask[:, None] & (dims < SIZE))


@triton.jit
def _load_pairs(rows, row_mask, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of each pair that is rotated, 2 x [rows, BLOCK]."""
    if INTERLEAVED:
        both = _load(rows, row_mask, 0, 2 * HALF, 2 * BLOCK)
        first, second = tl.split(tl.reshape(both, [rows.shape[0], BLOCK, 2]))
    else:
        first = _load(rows, row_mask, 0, HALF, BLOCK)
        second = _load(rows, row_mask, HALF, HALF, BLOCK)
    return first, second


@triton.jit
def _store_head(
    rows, row_mask, first, second, rest, scale,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        _store(rows, row_mask, tl.interleave(first, second), scale, 0, 2 * HALF, 2 * BLOCK_HALF)
    else:
        _store(rows, row_mask, first, scale, 0, HALF, BLOCK_HALF)
        _store(rows, row_mask, second, scale, HALF, HALF, BLOCK_HALF)
    _store(rows, row_mask, rest, scale, 2 * HALF, REST, BLOCK_REST)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "positions_ptr", "kv_scales_ptr"],
)
def qkv_prologue_kernel(
    qkv_ptr,  # [N, (Hq + 2 * H) * D]
    q_ptr,  # [N, Hq, D]
    k_pool_ptr,  # [B, S, H, D]
    v_pool_ptr,  # [B, S, H, D]
    slot_mapping_ptr,  # [N]
    positions_ptr,  # [N]
    rope_table_ptr,  # [P, R], None if ROTARY_DIM is 0
    q_weight_ptr,  # [D], None if not HAS_NORM
    k_weight_ptr,  # [D], None if not HAS_NORM
    kv_scales_ptr,  # [2, H] or None
    num_tokens,
    eps,
    qkv_token_stride,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    qkv_token_stride = in_units(qkv_token_stride, STRIDE_UNIT)
    q_token_stride, q_head_stride = in_units(q_token_stride, STRIDE_UNIT), in_units(q_head_stride, STRIDE_UNIT)
    k_block_stride, k_slot_stride = in_units(k_block_stride, STRIDE_UNIT), in_units(k_slot_stride, STRIDE_UNIT)
    v_block_stride, v_slot_stride = in_units(v_block_stride, STRIDE_UNIT), in_units(v_slot_stride, STRIDE_UNIT)
    k_head_stride, v_head_stride = in_units(k_head_stride, STRIDE_UNIT), in_units(v_head_stride, STRIDE_UNIT)
    half: tl.constexpr = ROTARY_DIM // 2
    num_rest: tl.constexpr = HEAD_DIM - ROTARY_DIM
    num_heads = NUM_QUERY_HEADS + 2 * NUM_KV_HEADS
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    tokens = (tl.program_id(0) // num_heads).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_mask = tokens < num_tokens
    if HAS_NORM:
        weight_ptr = q_weight_ptr
        if head >= NUM_QUERY_HEADS:
            weight_ptr = k_weight_ptr
        weights = weight_ptr + tl.arange(0, 1)
        has_weight = tl.arange(0, 1) + head < NUM_QUERY_HEADS + NUM_KV_HEADS
        first_weight, second_weight = _load_pairs(weights, has_weight, half, BLOCK_HALF, INTERLEAVED)
        rest_weight = _load(weights, has_weight, ROTARY_DIM, num_rest, BLOCK_REST)
    wait_for_earlier_kernels(PDL)
    slots = tl.load(slot_mapping_ptr + tokens, mask=token_mask, other=-1)
    block_ids, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    rows = qkv_ptr + tokens * qkv_token_stride + head * HEAD_DIM

    if head >= NUM_QUERY_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_QUERY_HEADS - NUM_KV_HEADS
        v_rows = v_pool_ptr + block_ids * v_block_stride + offsets * v_slot_stride + kv_head * v_head_stride
        v_scale = 1.0
        if kv_scales_ptr is not None:
            v_scale = tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
        _store(v_rows, slots >= 0, _load(rows, token_mask, 0, HEAD_DIM, BLOCK_D), v_scale, 0, HEAD_DIM, BLOCK_D)
        return

    first, second = _load_pairs(rows, token_mask, half, BLOCK_HALF, INTERLEAVED)
    rest = _load(rows, token_mask, ROTARY_DIM, num_rest, BLOCK_REST)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = first * factor * first_weight
        second = second * factor * second_weight
        rest = rest * factor * rest_weight
    if ROTARY_DIM > 0:
        positions = tl.load(positions_ptr + tokens, mask=token_mask, other=0).to(tl.int64)
        table_rows = rope_table_ptr + positions * ROTARY_DIM
        cos = _load(table_rows, token_mask, 0, half, BLOCK_HALF)
        sin = _load(table_rows, token_mask, half, half, BLOCK_HALF)
        first, second = first * cos - second * sin, second * cos + first * sin

    if head < NUM_QUERY_HEADS:
        q_rows = q_ptr + tokens * q_token_stride + head * q_head_stride
        _store_head(q_rows, token_mask, first, second, rest, 1.0, half, num_rest, BLOCK_HALF, BLOCK_REST, INTERLEAVED)
    else:
        kv_head = head - NUM_QUERY_HEADS
        k_rows = k_pool_ptr + block_ids * k_block_stride + offsets * k_slot_stride + kv_head * k_head_stride
        k_scale = 1.0
        if kv_scales_ptr is not None:
            k_scale = tl.load(kv_scales_ptr + kv_head)
        _store_head(
            k_rows, slots >= 0, first, second, rest, k_scale, half, num_rest, BLOCK_HALF, BLOCK_REST, INTERLEAVED
        )
