# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Matrix products with a weight of 8 bits and its scales: of few rows with the weight as it is, else dequantized.

    weight[n, k] = scale[block of n, block of k] * number[n, k]

A number is an int8 or a float8, both of which float16 and bfloat16 have exactly. Inputs are multiplied as they are. The
scale multiplies the sum of a block's columns, in float32, and not each weight.
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
from quire.kernels.product_parts import load_inputs, write_out
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import OUTPUTS, add_parts, check_rows, plan_tiles

WEIGHT_DTYPES = (torch.int8, torch.float8_e4m3fn)

COLUMN_TILES = (128, 64, 32)
"""Columns of a tile, which has one scale for each row."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight of N rows and K columns in blocks of P rows and Q columns. All tensors are contiguous.

    numbers     [N, K]                              int8 or float8_e4m3fn
    scales      [N / P, K / Q], both rounded up     float32
    block       P and Q; 0: all rows, or all columns
    """

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers.nbytes + self.scales.nbytes


def find_column_tile(num_columns: int, block: tuple[int, int]) -> int | None:
    """Return the columns of a tile, which divide those of a block of the weight; None if the kernels have none."""
    columns = block[1]
    if columns == 0 or columns >= num_columns:
        return COLUMN_TILES[0]
    return next((each for each in COLUMN_TILES if columns % each == 0), None)


def scaled_linear(
    x: Tensor,
    weight: ScaledWeight,
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

    Sums are float32, and rounded once. Raises ValueError if a shape, stride, dtype or device is another, or if no tile
    fits the blocks. No sync. Cost: one launch; reads weight.num_bytes once (for more than 32 rows twice, from the L2
    cache), and x once per program.
    """
    parts, tickets = (None, None) if workspace is None else (workspace.parts, workspace.tickets)
    launch = _prepare(weight.block, *layouts(x, weight.numbers, weight.scales, bias, parts, tickets, out))
    num_outputs, num_inputs = weight.numbers.shape
    out = x.new_empty(len(x), num_outputs) if out is None else out
    launch.run(
        scaled_linear_kernel,
        *(x, weight.numbers, weight.scales, x if bias is None else bias, out),
        *((out, out) if workspace is None else (parts, tickets)),
        *(len(x), num_outputs, num_inputs),
    )
    return out


def scaled_dequantize(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] for many rows, rounded once.

    dtype is fp32/fp16/bf16. No sync. Cost: one launch; reads weight.num_bytes, and writes N * K elements.
    """
    launch = _prepare_dequantize(weight.block, dtype, *layouts(weight.numbers, weight.scales))
    out = torch.empty(weight.numbers.shape, dtype=dtype, device=weight.numbers.device)
    launch.run(scaled_dequantize_kernel, weight.numbers, weight.scales, out, *weight.numbers.shape)
    return out


@prepared_once
def _prepare(
    block: tuple[int, int],
    x: Layout,
    numbers: Layout,
    scales: Layout,
    bias: Layout | None,
    parts: Layout | None,
    tickets: Layout | None,
    out: Layout | None,
) -> Launch:
    columns = _check_weight(block, numbers, scales)
    num_outputs, num_inputs = numbers.shape
    out = check_rows(x, num_outputs, bias, out)
    require_shape("x", x, (None, num_inputs))
    require_same_device(x=x, numbers=numbers, scales=scales, bias=bias, out=out)
    num_steps = ceil_div(num_inputs, columns)
    tiles = plan_tiles(x, num_outputs, num_steps, (parts, tickets))
    return Launch(
        grid=tiles.grid,
        strides=(ceil_div(num_steps, tiles.split), scales.shape[1], x.stride(0), out.stride(0)),
        options={
            "BLOCK_ROWS": block[0],
            "BLOCK_COLUMNS": block[1],
            "COLUMNS": columns,
            "ROWS": tiles.rows,
            "OUTPUTS": OUTPUTS,
            "SPLIT": tiles.split,
            "STAGES": 4,
            "EVEN": num_inputs % columns == 0,
            "HAS_BIAS": bias is not None,
            "num_warps": 4,
            **dependent_options(scaled_linear_kernel, x.device),
        },
    )


@prepared_once
def _prepare_dequantize(block: tuple[int, int], dtype: torch.dtype, numbers: Layout, scales: Layout) -> Launch:
    require_in("dtype", dtype, FLOAT_DTYPES)
    columns = _check_weight(block, numbers, scales)
    num_outputs, num_inputs = numbers.shape
    return Launch(
        grid=(ceil_div(num_outputs, OUTPUTS), ceil_div(num_inputs, columns)),
        strides=(scales.shape[1],),
        options={
            "BLOCK_ROWS": block[0],
            "BLOCK_COLUMNS": block[1],
            "COLUMNS": columns,
            "OUTPUTS": OUTPUTS,
            "num_warps": 4,
            **dependent_options(scaled_dequantize_kernel, numbers.device),
        },
    )


def _check_weight(block: tuple[int, int], numbers: Layout, scales: Layout) -> int:
    """Return the columns of a tile."""
    require_dtype("numbers", numbers, WEIGHT_DTYPES)
    require_shape("numbers", numbers, (None, None))
    require_dtype("scales", scales, torch.float32)
    shape = [ceil_div(size, each or size) for size, each in zip(numbers.shape, block, strict=True)]
    require_shape("scales", scales, (shape[0], shape[1]))
    require_contiguous("numbers", numbers)
    require_contiguous("scales", scales)
    require_same_device(numbers=numbers, scales=scales)
    columns = find_column_tile(numbers.shape[1], block)
    if columns is None:
        raise ValueError(f"blocks of {block[1]} columns are no multiple of {COLUMN_TILES[-1]}")
    return columns


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "steps_per_part", "num_scales"])
def scaled_linear_kernel(
    x_ptr,  # [M, K]
    numbers_ptr,  # [N, K]
    scales_ptr,  # [N / BLOCK_ROWS, K / BLOCK_COLUMNS]
    bias_ptr,  # [N]
    out_ptr,  # [M, N]
    parts_ptr,  # see add_parts
    tickets_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    steps_per_part,
    num_scales,  # of a row of blocks
    stride_x,
    stride_out,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLUMNS)[None, :]
    all_n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows and outputs beyond the last one repeat it: they need no mask, and are not stored.
    n = tl.minimum(all_n, num_outputs - 1)
    weights = numbers_ptr + n[:, None].to(tl.int64) * num_inputs + k
    scales = scales_ptr + _block(n, BLOCK_ROWS) * num_scales
    rows = x_ptr + tl.minimum(m, num_rows - 1) * stride_x.to(tl.int64) + k
    wait_for_earlier_kernels(PDL)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = tl.program_id(2) * steps_per_part * COLUMNS
    last = tl.minimum(first + steps_per_part * COLUMNS, num_inputs)
    for start in tl.range(first, last, COLUMNS, num_stages=STAGES):
        if EVEN:
            numbers = tl.load(weights + start, eviction_policy="evict_first")
        else:
            inside = start + k < num_inputs
            numbers = tl.load(weights + start, mask=inside, other=0.0, eviction_policy="evict_first")
        scale = tl.load(scales + _block(start, BLOCK_COLUMNS))
        x = load_inputs(rows + start, start + k, num_inputs, EVEN)
        total += dot(x, tl.trans(numbers.to(tl.float32).to(x_ptr.dtype.element_ty))) * scale[None, :]
    total, is_last = add_parts(total, parts_ptr, tickets_ptr, ROWS, OUTPUTS, SPLIT)
    if not is_last:
        return
    write_out(
        total, total, m, all_n[None, :], num_rows, num_outputs, bias_ptr, out_ptr, out_ptr,
        0, stride_out, HAS_BIAS, False, False, "none",
    )  # fmt: skip


@triton.jit
def _block(place, SIZE: tl.constexpr):
    """The block of a row or column; SIZE 0: there is one."""
    return place * 0 if SIZE == 0 else place // SIZE


@triton.jit(do_not_specialize=["num_outputs", "num_scales"])
def scaled_dequantize_kernel(
    numbers_ptr,  # [N, K]
    scales_ptr,  # [N / BLOCK_ROWS, K / BLOCK_COLUMNS]
    out_ptr,  # [N, K]
    num_outputs,
    num_inputs,
    num_scales,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = tl.program_id(1) * COLUMNS
    k = start + tl.arange(0, COLUMNS)[None, :]
    inside = (n < num_outputs)[:, None] & (k < num_inputs)
    at = n[:, None].to(tl.int64) * num_inputs + k
    wait_for_earlier_kernels(PDL)
    numbers = tl.load(numbers_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scales = scales_ptr + _block(n, BLOCK_ROWS) * num_scales + _block(start, BLOCK_COLUMNS)
    scale = tl.load(scales, mask=n < num_outputs, other=0.0)[:, None]
    tl.store(out_ptr + at, round_to(numbers * scale, out_ptr.dtype.element_ty), mask=inside)
