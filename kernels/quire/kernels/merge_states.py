# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Attention over several sets of keys made one: the merge of partial results by their log-sum-exp.

Attention over the union of disjoint sets of keys is the mean of the attention over each, weighted by the sums of their
exponentials. Used for a prefix that many sequences share, attended to once for all of them, and for context that lies
on several devices. The identity is that of FlashAttention's split-KV and of FlashInfer's cascade.
"""

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
    contiguous,
    in_units,
    layouts,
    next_power_of_2,
    prepared_once,
    require_at_least,
    require_contiguous,
    require_dtype,
    require_last_contiguous,
    require_same_device,
    require_shape,
    round_to,
    stride_unit,
)

# Parts of a row that are loaded together.
PARTS_AT_ONCE = 16

_PARTS_AT_ONCE = tl.constexpr(PARTS_AT_ONCE)


def merge_states(outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
    """Merge K partial results of attention, each over its own keys, and return the result over all keys.

    Sizes: K parts, N tokens, H heads, D head dim of values.
        outs        [K, N, H, D]    fp32/fp16/bf16, D contiguous
        lses        [K, N, H]       float32, contiguous, base 2: log2 of the sum of 2 ** (score * log2(e)) over a
                                    part's keys; -inf for a part without keys: its outs may hold anything
        out         [N, H, D]       where to write, any floating dtype and strides, D contiguous; by default of outs'
                                    dtype, new
        lse         [N, H]          where to write the merged lses, float32, contiguous, or None
        returns     out

    A row with all parts without keys becomes exactly 0, its lse -inf. Raises ValueError if a shape, dtype,
    stride or device does not fit. Cost: reads outs once; one launch of N * H programs, no sync. Equal inputs give
    equal bits, as parts are summed in their order.
    """
    launch = _prepare(*layouts(outs, lses, out, lse))
    num_parts, num_tokens, num_heads, head_dim = outs.shape
    if out is None:
        out = outs.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return out
    launch.run(merge_states_kernel, outs, lses, out, lse, num_parts, num_tokens * num_heads)
    return out


@prepared_once
def _prepare(outs: Layout, lses: Layout, out: Layout | None, lse: Layout | None) -> Launch:
    require_shape("outs", outs, (None, None, None, None))
    num_parts, num_tokens, num_heads, head_dim = outs.shape
    require_at_least("outs.shape[0]", num_parts, 1)
    require_shape("lses", lses, (num_parts, num_tokens, num_heads))
    out = out or contiguous((num_tokens, num_heads, head_dim), outs)
    require_shape("out", out, (num_tokens, num_heads, head_dim))
    for name, tensor in (("outs", outs), ("out", out)):
        require_dtype(name, tensor, FLOAT_DTYPES)
        require_last_contiguous(name, tensor)
    if lse is not None:
        require_shape("lse", lse, (num_tokens, num_heads))
    for name, each in (("lses", lses), ("lse", lse)):
        if each is not None:
            require_dtype(name, each, torch.float32)
            require_contiguous(name, each)
    require_same_device(outs=outs, lses=lses, out=out, lse=lse)
    variant = merge_variant(head_dim=head_dim, has_lse=lse is not None, stride_unit=stride_unit(outs, out))
    strides = (*outs.strides[:3], *out.strides[:2])
    options = {**variant.options, **dependent_options(merge_states_kernel, outs.device)}
    return Launch(grid=(num_tokens, num_heads), strides=strides, options=options)


def merge_variant(*, head_dim: int, has_lse: bool, stride_unit: int) -> Variant:
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "HAS_LSE": has_lse,
        "STRIDE_UNIT": stride_unit,
    }
    return Variant(constants, num_warps=2, num_stages=2)


@triton.jit
def merge_rows(
    outs_ptr, lses_ptr, out_starts, lse_starts, owned, num_parts, out_stride, lse_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge rows [R]: part i of a row lies at outs_ptr + its out_start + i * out_stride, its lse alike.

    Strides are int64, or int32 if PARTS_AT_ONCE of them fit. Returns the rows [R, BLOCK_D] in float32 and their lses
    [R]; zeros and -inf where not owned. PARTS_AT_ONCE parts are on their way together: a part counts for nothing if its
    lse is -inf, whatever it holds.
    """
    parts = tl.arange(0, _PARTS_AT_ONCE)
    dims = tl.arange(0, BLOCK_D)
    highest = tl.full(out_starts.shape, float("-inf"), tl.float32)
    weight_sum = tl.zeros_like(highest)
    total = tl.zeros([out_starts.shape[0], BLOCK_D], tl.float32)
    for base in range(0, num_parts, _PARTS_AT_ONCE):
        loaded = owned[:, None] & (base + parts < num_parts)[None, :]
        lses = tl.load(lses_ptr + lse_starts[:, None] + (parts * lse_stride)[None, :], mask=loaded, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(lses, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - shift)
        weight_sum = weight_sum * decay + tl.sum(tl.exp2(lses - shift[:, None]), 1)
        group = tl.zeros_like(total)
        for part in tl.static_range(_PARTS_AT_ONCE):
            present = owned & (base + part < num_parts)
            lse = tl.load(lses_ptr + lse_starts + part * lse_stride, mask=present, other=float("-inf"))
            rows = tl.load(
                outs_ptr + (out_starts + part * out_stride)[:, None] + dims[None, :],
                mask=present[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            ).to(tl.float32)
            group += tl.exp2(lse - shift)[:, None] * tl.where((lse > float("-inf"))[:, None], rows, 0.0)
        total = total * decay[:, None] + group
        highest = new_highest
        outs_ptr += _PARTS_AT_ONCE * out_stride
        lses_ptr += _PARTS_AT_ONCE * lse_stride
    divisor = tl.where(weight_sum > 0, weight_sum, 1.0)
    return total / divisor[:, None], highest + tl.log2(divisor)


@triton.jit(do_not_specialize=["num_parts", "num_rows", "outs_part_stride"])
def merge_states_kernel(
    outs_ptr,  # [K, N, H, D]
    lses_ptr,  # [K, N, H]
    out_ptr,  # [N, H, D]
    lse_ptr,  # [N, H], None if not HAS_LSE
    num_parts,
    num_rows,  # N * H
    outs_part_stride,
    outs_token_stride,
    outs_head_stride,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LSE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    outs_part_stride = in_units(outs_part_stride, STRIDE_UNIT)
    outs_token_stride = in_units(outs_token_stride, STRIDE_UNIT)
    outs_head_stride = in_units(outs_head_stride, STRIDE_UNIT)
    out_token_stride, out_head_stride = in_units(out_token_stride, STRIDE_UNIT), in_units(out_head_stride, STRIDE_UNIT)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    head = tl.program_id(1)
    lse_row = token * tl.num_programs(1) + head
    row, lse = merge_rows(
        outs_ptr, lses_ptr, token * outs_token_stride + head * outs_head_stride, lse_row, token >= 0,
        num_parts, outs_part_stride, num_rows, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    targets = out_ptr + (token * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
    tl.store(targets, round_to(row, out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
    if HAS_LSE:
        tl.store(lse_ptr + lse_row, lse)
