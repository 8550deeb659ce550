# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Rows in float8 with a scale each, as products in float8 take them: the largest element is the largest number.

Norms and activations write their result so, by the functions here, where such a product is all that reads it. Rows that
come from elsewhere are rounded in a launch of their own. The numbers are those of separate operations, bit for bit: a
scale, and an element over it, are rounded to the dtype of the rows first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    FLOAT_DTYPES,
    UPCAST,
    Launch,
    Layout,
    layouts,
    next_power_of_2,
    prepared_once,
    require_dtype,
    require_last_contiguous,
    require_shape,
    round_to,
)

MAX_COLUMNS = 32768

_ELEMENTS_PER_THREAD = 8
_MAX_WARPS = 16
_FLOAT8_MAX = tl.constexpr(448.0)
_STEPS_OF_MULTIPLES = tl.constexpr(1.5 * 2**14)
"""A float32 of this size has steps of 2**-9."""


@triton.jit
def as_float8(y, DTYPE: tl.constexpr):
    """Rows y [ROWS, COLUMNS] of a dtype's numbers, in float32: in float8, and their scales [ROWS, 1]."""
    scale = round_to(tl.div_rn(tl.max(tl.abs(y), 1, keep_dims=True), _FLOAT8_MAX), DTYPE).to(tl.float32)
    scale = tl.where(scale == 0, 1.0, scale)
    scaled = round_to(tl.div_rn(y, scale), DTYPE).to(tl.float32)
    bounded = tl.clamp(scaled, -_FLOAT8_MAX, _FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if UPCAST:
        # Casting to float8, the interpreter rounds some numbers to others than the nearest. So round them before it: to
        # 4 bits, or to multiples of 2**-9.
        bits = bounded.to(tl.int32, bitcast=True)
        few_bits = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        multiples = (bounded + _STEPS_OF_MULTIPLES) - _STEPS_OF_MULTIPLES
        bounded = tl.where(tl.abs(bounded) < 0.015625, multiples, few_bits)
    return bounded.to(tl.float8e4nv), scale


@triton.jit
def float8_rows_kernel(
    x_ptr,  # [T, C]
    out_ptr,  # [T, C] float8
    scales_ptr,  # [T]
    num_columns,
    stride_x,
    stride_out,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < num_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    numbers, scale = as_float8(x, x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + columns, numbers, mask=inside)
    tl.store(scales_ptr + row + tl.zeros([1, 1], tl.int32), scale)


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows x [T, C] as numbers [T, C] float8_e4m3fn, and scales [T, 1] float32.

    x is fp32/fp16/bf16, C contiguous and at most MAX_COLUMNS. Raises ValueError if a shape, stride or dtype is another.
    No sync. Cost: one launch; reads the rows once, and writes a byte for each element.
    """
    launch = _prepare(*layouts(x))
    numbers, scales = empty_rows(x, x.shape[1])
    if len(x):
        launch.run(float8_rows_kernel, x, numbers, scales, x.shape[1])
    return numbers, scales


def empty_rows(x: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return memory for as many rows as x has, and for their scales."""
    numbers = torch.empty(len(x), num_columns, dtype=torch.float8_e4m3fn, device=x.device)
    return numbers, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def require_columns(name: str, x: Layout) -> None:
    """Raise ValueError unless a row [C] fits a program."""
    if not 0 < x.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"{name} has {x.shape[1]} columns, not 1 .. {MAX_COLUMNS}")


def plan_rows(num_columns: int) -> tuple[int, int]:
    """Return the columns of a tile, and the warps of a program with one row of so many columns."""
    columns = next_power_of_2(num_columns)
    return columns, min(_MAX_WARPS, max(1, columns // (32 * _ELEMENTS_PER_THREAD)))


@prepared_once
def _prepare(x: Layout) -> Launch:
    require_shape("x", x, (None, None))
    require_dtype("x", x, FLOAT_DTYPES)
    require_last_contiguous("x", x)
    require_columns("x", x)
    columns, num_warps = plan_rows(x.shape[1])
    return Launch(
        grid=(x.shape[0],),
        strides=(x.stride(0), x.shape[1]),
        options={
            "COLUMNS": columns,
            **dependent_options(float8_rows_kernel, x.device),
            "num_warps": num_warps,
            "num_stages": 1,
        },
    )
