# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Matrix products with a weight of 4 bits: of few rows with the weight as it is, of more with what it stands for.

    weight[n, k] = scale[group of k, n] * (number[n, k] - zero[group of k, n])

A byte has two numbers of one group, half a group apart. So a tile of bytes [outputs, half a group] is two tiles of
numbers without a move between threads, and a group is two products. A number less its zero point is a small integer,
which every float dtype has exactly. The scale multiplies the group's sum, in float32, and not each weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    ceil_div,
    dot,
    layouts,
    prepared_once,
    require_contiguous,
    require_dtype,
    require_in,
    require_same_device,
    require_shape,
    round_to,
)
from quire.kernels.product_parts import write_out
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import OUTPUTS, add_parts, check_rows, plan_tiles

GROUP_SIZES = (128, 64, 32)
"""Columns of a group that the kernel takes."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight of N rows and K columns in groups of S columns. All tensors are contiguous.

    packed  [N, K / 2]  uint8: byte j of a group has number j in its low bits, and number S / 2 + j in the high ones
    scales  [K / S, N]  float32
    zeros   [K / S, N]  uint8
    order   [K]         int32, the column of the input for each column here; None: the same
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None
    group_size: int

    @classmethod
    def pack(
        cls, numbers: Tensor, scales: Tensor, zeros: Tensor | int, *, group_of_column: Tensor | None = None
    ) -> Int4Weight:
        """Pack numbers [N, K] of 0 to 15, scales [N, G], and zero points [N, G] of 0 to 255 or one for all.

        group_of_column [K]: None if groups are of neighbours. Raises ValueError if the kernel has no such groups.
        """
        num_columns, num_groups = numbers.shape[1], scales.shape[1]
        group_size = find_group_size(num_columns, num_groups, group_of_column)
        if group_size is None:
            raise ValueError(f"{num_groups} groups of {num_columns} columns: no equal groups of a multiple of 32")
        order = None
        if group_of_column is not None and is_reordered(group_of_column):
            order = torch.argsort(group_of_column, stable=True)
            numbers = numbers[:, order]
        halves = numbers.to(torch.uint8).view(len(numbers), -1, 2, group_size // 2)
        repeats = num_columns // group_size // num_groups
        zeros = zeros if isinstance(zeros, Tensor) else torch.full_like(scales, zeros)
        by_group = [each.t().repeat_interleave(repeats, 0) for each in (scales.float(), zeros.to(torch.uint8))]
        return cls(
            (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous(),
            by_group[0].contiguous(),
            by_group[1].contiguous(),
            None if order is None else order.to(torch.int32),
            group_size,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: N * K / 2 of numbers, and 5 * N * K / S of scales and zero points."""
        tensors = (self.packed, self.scales, self.zeros, self.order)
        return sum(each.nbytes for each in tensors if each is not None)

    def copy(self) -> Int4Weight:
        """Return the same weight in memory of its own."""
        order = None if self.order is None else self.order.clone()
        return Int4Weight(self.packed.clone(), self.scales.clone(), self.zeros.clone(), order, self.group_size)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, [N, K], rounded once, in torch."""
        grouped = self.packed.view(len(self.packed), -1, self.group_size // 2)
        numbers = torch.cat((grouped & 15, grouped >> 4), -1).float()
        weight = (numbers - self.zeros.t()[..., None].float()) * self.scales.t()[..., None]
        flat = weight.to(dtype).flatten(1)
        if self.order is None:
            return flat
        return torch.empty_like(flat).index_copy_(1, self.order.long(), flat)


def find_group_size(num_columns: int, num_groups: int, group_of_column: Tensor | None = None) -> int | None:
    """Return the columns of the kernel's groups for a weight's own groups, which they divide; None if none do."""
    size = num_columns // num_groups
    if group_of_column is not None and not has_equal_groups(group_of_column, num_groups):
        return None
    return next((each for each in GROUP_SIZES if size % each == 0 and size * num_groups == num_columns), None)


def has_equal_groups(group_of_column: Tensor, num_groups: int) -> bool:
    """True if each group has as many columns as any other. Waits for the device."""
    counts = group_of_column.bincount(minlength=num_groups)
    return bool((counts == counts[0]).all())


def is_reordered(group_of_column: Tensor) -> bool:
    """True if a column is of an earlier group than its left neighbour. Waits for the device."""
    return bool((group_of_column.diff() < 0).any())


def int4_linear(
    x: Tensor,
    weight: Int4Weight,
    *,
    bias: Tensor | None = None,
    workspace: SkinnyWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x weight^T + bias.

    Sizes: M rows, 1 to MAX_ROWS; K inputs; N outputs.
        x               [M, K]  fp32/fp16/bf16, K contiguous
        bias            [N]     fp32/fp16/bf16, contiguous
        workspace               for sums that several programs share; None: none are shared
        out, returns    [M, N]  dtype of x, N contiguous. None allocates

    Sums are float32, and rounded once. Raises ValueError if a shape, stride, dtype or device is another. No sync.
    Cost: one launch; reads weight.num_bytes once (for more than 32 rows twice, from the L2 cache), and x once per
    program.
    """
    parts, tickets = (None, None) if workspace is None else (workspace.parts, workspace.tickets)
    launch = _prepare(
        weight.group_size,
        *layouts(x, weight.packed, weight.scales, weight.zeros, weight.order, bias, parts, tickets, out),
    )
    num_outputs, num_groups = len(weight.packed), len(weight.scales)
    out = x.new_empty(len(x), num_outputs) if out is None else out
    order, bias = (weight.zeros if weight.order is None else weight.order), (x if bias is None else bias)
    launch.run(
        int4_linear_kernel,
        *(x, weight.packed, weight.scales, weight.zeros, order, bias, out),
        *((out, out) if workspace is None else (parts, tickets)),
        *(len(x), num_outputs, num_groups),
    )
    return out


def int4_dequantize(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] for many rows, rounded once; its columns are in the packed order, see Int4Weight.order.

    dtype is fp32/fp16/bf16. No sync. Cost: one launch; reads weight.num_bytes, and writes N * K elements.
    """
    launch = _prepare_dequantize(weight.group_size, dtype, *layouts(weight.packed, weight.scales, weight.zeros))
    num_outputs, num_groups = len(weight.packed), len(weight.scales)
    out = torch.empty(num_outputs, num_groups * weight.group_size, dtype=dtype, device=weight.packed.device)
    launch.run(int4_dequantize_kernel, weight.packed, weight.scales, weight.zeros, out, num_outputs, num_groups)
    return out


@prepared_once
def _prepare(
    group_size: int,
    x: Layout,
    packed: Layout,
    scales: Layout,
    zeros: Layout,
    order: Layout | None,
    bias: Layout | None,
    parts: Layout | None,
    tickets: Layout | None,
    out: Layout | None,
) -> Launch:
    num_outputs, num_groups = _check_weight(group_size, packed, scales, zeros)
    out = check_rows(x, num_outputs, bias, out)
    num_inputs = x.shape[1]
    require_shape("packed", packed, (num_outputs, num_inputs // 2))
    if order is not None:
        require_shape("order", order, (num_inputs,))
        require_dtype("order", order, torch.int32)
        require_contiguous("order", order)
    require_same_device(x=x, packed=packed, scales=scales, zeros=zeros, order=order, bias=bias, out=out)
    tiles = plan_tiles(x, num_outputs, num_groups, (parts, tickets))
    return Launch(
        grid=tiles.grid,
        strides=(ceil_div(num_groups, tiles.split), x.stride(0), out.stride(0)),
        options={
            "GROUP": group_size,
            "ROWS": tiles.rows,
            "OUTPUTS": OUTPUTS,
            "SPLIT": tiles.split,
            "STAGES": 4 if order is None else 3,
            "HAS_ORDER": order is not None,
            "HAS_BIAS": bias is not None,
            "num_warps": 4,
            **dependent_options(int4_linear_kernel, x.device),
        },
    )


def _check_weight(group_size: int, packed: Layout, scales: Layout, zeros: Layout) -> tuple[int, int]:
    """Return the numbers of outputs and of groups."""
    require_in("group_size", group_size, GROUP_SIZES)
    require_dtype("packed", packed, torch.uint8)
    require_shape("packed", packed, (None, None))
    num_outputs, num_groups = packed.shape[0], packed.shape[1] * 2 // group_size
    for name, tensor, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.uint8)):
        require_shape(name, tensor, (num_groups, num_outputs))
        require_dtype(name, tensor, dtype)
    for name, tensor in (("packed", packed), ("scales", scales), ("zeros", zeros)):
        require_contiguous(name, tensor)
    return num_outputs, num_groups


@prepared_once
def _prepare_dequantize(group_size: int, dtype: torch.dtype, packed: Layout, scales: Layout, zeros: Layout) -> Launch:
    require_in("dtype", dtype, FLOAT_DTYPES)
    num_outputs, num_groups = _check_weight(group_size, packed, scales, zeros)
    require_same_device(packed=packed, scales=scales, zeros=zeros)
    return Launch(
        grid=(ceil_div(num_outputs, OUTPUTS), num_groups),
        strides=(),
        options={
            "GROUP": group_size,
            "OUTPUTS": OUTPUTS,
            "num_warps": 4,
            **dependent_options(int4_dequantize_kernel, packed.device),
        },
    )


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_groups", "groups_per_part"])
def int4_linear_kernel(
    x_ptr,  # [M, K]
    packed_ptr,  # [N, K / 2]
    scales_ptr,  # [K / GROUP, N]
    zeros_ptr,  # [K / GROUP, N]
    order_ptr,  # [K]
    bias_ptr,  # [N]
    out_ptr,  # [M, N]
    parts_ptr,  # [tiles, row tiles, SPLIT, ROWS, OUTPUTS] float32
    tickets_ptr,  # [tiles, row tiles] int32, zero before and after
    num_rows,
    num_outputs,
    num_groups,
    groups_per_part,
    stride_x,
    stride_out,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    half: tl.constexpr = GROUP // 2
    tile = tl.program_id(1)
    part = tl.program_id(2)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, half)
    all_n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows and outputs beyond the last one repeat it: they need no mask, and are not stored.
    n = tl.minimum(all_n, num_outputs - 1)
    weights = packed_ptr + n[:, None].to(tl.int64) * (num_groups * half) + k[None, :]
    rows = x_ptr + tl.minimum(m, num_rows - 1) * stride_x.to(tl.int64)
    wait_for_earlier_kernels(PDL)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = part * groups_per_part
    for group in tl.range(first, tl.minimum(first + groups_per_part, num_groups), num_stages=STAGES):
        both = tl.load(weights + group * half, eviction_policy="evict_first").to(tl.int32)
        at = group * num_outputs + n
        scale = tl.load(scales_ptr + at)
        zero = tl.load(zeros_ptr + at).to(tl.int32)[:, None]
        low = group * GROUP + k
        high = low + half
        if HAS_ORDER:
            low = tl.load(order_ptr + low)
            high = tl.load(order_ptr + high)
        x_low = tl.load(rows + low[None, :])
        x_high = tl.load(rows + high[None, :])
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        sums = dot(x_low, tl.trans(((both & 15) - zero).to(tl.float32).to(dtype)))
        sums += dot(x_high, tl.trans(((both >> 4) - zero).to(tl.float32).to(dtype)))
        total += sums * scale[None, :]
    total, is_last = add_parts(total, parts_ptr, tickets_ptr, ROWS, OUTPUTS, SPLIT)
    if not is_last:
        return
    write_out(
        total, total, m, all_n[None, :], num_rows, num_outputs, bias_ptr, out_ptr, out_ptr,
        0, stride_out, HAS_BIAS, False, False, "none",
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_outputs", "num_groups"])
def int4_dequantize_kernel(
    packed_ptr,  # [N, K / 2]
    scales_ptr,  # [K / GROUP, N]
    zeros_ptr,  # [K / GROUP, N]
    out_ptr,  # [N, K]
    num_outputs,
    num_groups,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    half: tl.constexpr = GROUP // 2
    group = tl.program_id(1)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n < num_outputs
    k = tl.arange(0, half)[None, :]
    rows = n[:, None].to(tl.int64) * num_groups + group
    wait_for_earlier_kernels(PDL)
    both = tl.load(packed_ptr + rows * half + k, mask=inside[:, None], other=0).to(tl.int32)
    scale = tl.load(scales_ptr + group * num_outputs + n, mask=inside, other=0.0)[:, None]
    zero = tl.load(zeros_ptr + group * num_outputs + n, mask=inside, other=0).to(tl.int32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + rows * GROUP + k
    tl.store(out, round_to(((both & 15) - zero).to(tl.float32) * scale, dtype), mask=inside[:, None])
    tl.store(out + half, round_to(((both >> 4) - zero).to(tl.float32) * scale, dtype), mask=inside[:, None])
