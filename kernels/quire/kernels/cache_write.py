# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Write one step's keys and values into the block pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    Variant,
    ceil_div,
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

# The largest finite number of float8_e4m3fn. A cast of more is NaN in torch and this number on the GPU.
FP8_MAX = 448.0

_FP8_MAX = tl.constexpr(FP8_MAX)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Scatter one step's keys and values into the block pool, in place.

    Sizes: N tokens, H kv heads, Dk and Dv head dims, B blocks, S block size (tokens).
        k, v            [N, H, Dk], [N, H, Dv]          fp32, fp16 or bf16, last dim contiguous, any other strides
        k_pool, v_pool  [B, S, H, Dk], [B, S, H, Dv]    dtype of k, or float8_e4m3fn; last dim contiguous
        slot_mapping    [N]                             int64, contiguous, slot = block_id * S + offset; -1 skips
        kv_scales       [2, H]                          float32, contiguous, of keys and of values: an fp8 pool holds
                                                        k / scale, beyond +-448 saturated. None: 1
    Slots other than -1 must be distinct and in the pool; a program does not check it.
    Raises ValueError if a shape, dtype, stride or device differs.
    Cost: moves 2 * N * H * (Dk + Dv) elements; no allocation, no sync. Without fp8 equal to reference.write_kv bit for
    bit.
    """
    launch = _prepare(*layouts(k, v, k_pool, v_pool, slot_mapping, kv_scales))
    num_tokens = k.shape[0]
    if num_tokens == 0:
        return
    launch.run(write_kv_kernel, k, v, k_pool, v_pool, slot_mapping, kv_scales, num_tokens)


@prepared_once
def _prepare(
    k: Layout, v: Layout, k_pool: Layout, v_pool: Layout, slot_mapping: Layout, kv_scales: Layout | None
) -> Launch:
    _check(k, v, k_pool, v_pool, slot_mapping)
    require_kv_scales(kv_scales, k_pool)
    num_tokens, num_heads, head_dim_k = k.shape
    num_rows = num_tokens * num_heads
    variant = write_variant(
        num_rows=num_rows,
        num_kv_heads=num_heads,
        head_dim_k=head_dim_k,
        head_dim_v=v.shape[2],
        block_size=k_pool.shape[1],
        stride_unit=stride_unit(k, v, k_pool, v_pool),
        multiprocessors=num_multiprocessors(k.device),
    )
    return Launch(
        grid=(ceil_div(num_rows, variant.constants["BLOCK_ROWS"]),),
        strides=(*k.strides[:2], *v.strides[:2], *k_pool.strides[:3], *v_pool.strides[:3]),
        options={**variant.options, **dependent_options(write_kv_kernel, k.device)},
    )


def write_variant(
    *,
    num_rows: int,
    num_kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    block_size: int,
    stride_unit: int,
    multiprocessors: int,
) -> Variant:
    """The compiled variant of write_kv_kernel; a row is one head of one token.

    8 rows a program spread a decode step over the GPU, 32 keep more bytes on their way.
    """
    constants = {
        "NUM_HEADS": num_kv_heads,
        "HEAD_DIM_K": head_dim_k,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_DK": next_power_of_2(head_dim_k),
        "BLOCK_DV": next_power_of_2(head_dim_v),
        "BLOCK_SIZE": block_size,
        "BLOCK_ROWS": 32 if num_rows >= 4 * 32 * multiprocessors else 8,
        "STRIDE_UNIT": stride_unit,
    }
    return Variant(constants, num_warps=4, num_stages=2)


def _check(k: Layout, v: Layout, k_pool: Layout, v_pool: Layout, slot_mapping: Layout) -> None:
    require_pool(k_pool, v_pool)
    num_tokens = slot_mapping.shape[0] if slot_mapping.dim() else None
    require_shape("slot_mapping", slot_mapping, (num_tokens,))
    for name, tokens, pool in (("k", k, k_pool), ("v", v, v_pool)):
        require_shape(name, tokens, (num_tokens, *pool.shape[2:]))
        require_dtype(name, tokens, FLOAT_DTYPES if pool.dtype == torch.float8_e4m3fn else pool.dtype)
        require_last_contiguous(name, tokens)
    require_dtype("v", v, k.dtype)
    require_dtype("slot_mapping", slot_mapping, torch.int64)
    require_contiguous("slot_mapping", slot_mapping)
    require_same_device(k=k, v=v, k_pool=k_pool, v_pool=v_pool, slot_mapping=slot_mapping)


@triton.jit
def to_pool_dtype(x, scale, dtype: tl.constexpr):
    """x in the pool's dtype: as it is, or for an fp8 pool x / scale, saturated; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) / scale, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _copy_rows(source, target, row_mask, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy one row of D from each pointer of source to the one of target."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = row_mask[:, None] & (dims < HEAD_DIM)
    x = tl.load(source[:, None] + dims, mask=mask)
    tl.store(target[:, None] + dims, to_pool_dtype(x, scale, target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr", "kv_scales_ptr"])
def write_kv_kernel(
    k_ptr,  # [N, H, Dk]
    v_ptr,  # [N, H, Dv]
    k_pool_ptr,  # [B, S, H, Dk]
    v_pool_ptr,  # [B, S, H, Dv]
    slot_mapping_ptr,  # [N]
    kv_scales_ptr,  # [2, H] or None
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_pool_block_stride,
    k_pool_slot_stride,
    k_pool_head_stride,
    v_pool_block_stride,
    v_pool_slot_stride,
    v_pool_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    k_token_stride, k_head_stride = in_units(k_token_stride, STRIDE_UNIT), in_units(k_head_stride, STRIDE_UNIT)
    v_token_stride, v_head_stride = in_units(v_token_stride, STRIDE_UNIT), in_units(v_head_stride, STRIDE_UNIT)
    k_pool_block_stride = in_units(k_pool_block_stride, STRIDE_UNIT)
    k_pool_slot_stride = in_units(k_pool_slot_stride, STRIDE_UNIT)
    k_pool_head_stride = in_units(k_pool_head_stride, STRIDE_UNIT)
    v_pool_block_stride = in_units(v_pool_block_stride, STRIDE_UNIT)
    v_pool_slot_stride = in_units(v_pool_slot_stride, STRIDE_UNIT)
    v_pool_head_stride = in_units(v_pool_head_stride, STRIDE_UNIT)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = (rows // NUM_HEADS).to(tl.int64)
    heads = (rows % NUM_HEADS).to(tl.int64)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    block_ids, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    k_rows = k_ptr + tokens * k_token_stride + heads * k_head_stride
    v_rows = v_ptr + tokens * v_token_stride + heads * v_head_stride
    k_slots = block_ids * k_pool_block_stride + offsets * k_pool_slot_stride + heads * k_pool_head_stride
    v_slots = block_ids * v_pool_block_stride + offsets * v_pool_slot_stride + heads * v_pool_head_stride
    k_scale = tl.full([BLOCK_ROWS, 1], 1.0, tl.float32)
    v_scale = k_scale
    if kv_scales_ptr is not None:
        k_scale = tl.load(kv_scales_ptr + heads)[:, None]
        v_scale = tl.load(kv_scales_ptr + NUM_HEADS + heads)[:, None]
    _copy_rows(k_rows, k_pool_ptr + k_slots, slots >= 0, k_scale, HEAD_DIM_K, BLOCK_DK)
    _copy_rows(v_rows, v_pool_ptr + v_slots, slots >= 0, v_scale, HEAD_DIM_V, BLOCK_DV)
