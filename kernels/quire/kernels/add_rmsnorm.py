# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""RMSNorm of a residual stream, with the addition before it: two reads and two writes of a row, one launch.

A program takes whole rows: one if they are long, several if they are as short as a head. All arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.float8_rows import as_float8, empty_rows
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    ceil_div,
    contiguous,
    layouts,
    next_power_of_2,
    prepared_once,
    require_contiguous,
    require_dtype,
    require_last_contiguous,
    require_same_device,
    require_shape,
    round_to,
)

MAX_HIDDEN_SIZE = 32768

# Elements a program takes at least, and how many a thread takes until a program has MAX_WARPS.
_MIN_TILE = 1024
_ELEMENTS_PER_THREAD = 8
_MAX_WARPS = 16


@triton.jit(do_not_specialize=["num_rows"])
def add_rmsnorm_kernel(
    x_ptr,  # [N, C]
    residual_ptr,  # [N, C]
    weight_ptr,  # [C]
    out_ptr,  # [N, C]
    scales_ptr,  # [N] float32, if out is in float8
    num_rows,
    num_columns,
    eps,
    weight_offset,
    stride_x,
    stride_residual,
    stride_out,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(PDL)
    x = tl.load(x_ptr + rows * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_pointers = residual_ptr + rows * stride_residual + columns
        x += tl.load(residual_pointers, mask=inside, other=0.0).to(tl.float32)
        total = round_to(x, residual_ptr.dtype.element_ty)
        tl.store(residual_pointers, total, mask=inside)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, 1, keep_dims=True) / num_columns
    y = x * tl.rsqrt(mean_square + eps) * (weight + weight_offset)
    y = round_to(y, x_ptr.dtype.element_ty)
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        y, scale = as_float8(y.to(tl.float32), x_ptr.dtype.element_ty)
        tl.store(scales_ptr + rows, scale, mask=rows < num_rows)
    tl.store(out_ptr + rows * stride_out + columns, y, mask=inside)


def plan_launch(num_columns: int, *, has_residual: bool) -> tuple[dict[str, int | bool], int, int]:
    """Return (constexprs, num_warps, num_stages) for rows of so many columns."""
    columns = next_power_of_2(num_columns)
    rows = max(1, _MIN_TILE // columns)
    num_warps = min(_MAX_WARPS, max(1, rows * columns // (32 * _ELEMENTS_PER_THREAD)))
    return {"HAS_RESIDUAL": has_residual, "ROWS": rows, "COLUMNS": columns}, num_warps, 1


def add_rmsnorm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Add x to the residual stream, in place, and return its RMSNorm: y / sqrt(mean(y^2) + eps) * (weight + offset).

    Sizes: N rows, C columns (hidden size, or head dim for a norm per head), C at most MAX_HIDDEN_SIZE.
        x               [N, C]  fp32/fp16/bf16, C contiguous, rows at any stride
        weight          [C]     fp32/fp16/bf16, contiguous
        residual        [N, C]  dtype of x, C contiguous; becomes residual + x, rounded to its dtype. None: y is x
        weight_offset           1 where the weight is stored as its difference from 1 (Gemma)
        out, returns    [N, C]  dtype of x; may be x itself. None allocates

    The norm is of the rounded sum, so that it agrees with the residual as a later reader gets it.
    Raises ValueError if a shape, stride, dtype or device is another. No sync.
    Cost: one launch; reads and writes every row once, (4 with a residual, else 2) * N * C * itemsize bytes.
    """
    launch = _prepare(x.dtype, *layouts(x, weight, residual, out))
    out = x.new_empty(x.shape) if out is None else out
    _run(launch, x, weight, residual, out, out, eps, weight_offset)
    return out


def add_rmsnorm_float8(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same with the norm as rows in float8: numbers [N, C] and scales [N, 1], see float8_rows().

    Cost: one launch; writes a byte for each element of the norm.
    """
    launch = _prepare(torch.float8_e4m3fn, *layouts(x, weight, residual, None))
    numbers, scales = empty_rows(x, x.shape[1])
    _run(launch, x, weight, residual, numbers, scales, eps, weight_offset)
    return numbers, scales


def _run(
    launch: Launch,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    out: Tensor,
    scales: Tensor,
    eps: float,
    weight_offset: float,
) -> None:
    num_rows, num_columns = x.shape
    if num_rows:
        launch.run(
            add_rmsnorm_kernel,
            x, x if residual is None else residual, weight, out, scales,
            num_rows, num_columns, float(eps), float(weight_offset),
        )  # fmt: skip


@prepared_once
def _prepare(dtype: torch.dtype, x: Layout, weight: Layout, residual: Layout | None, out: Layout | None) -> Launch:
    """The launch for a norm of this dtype; the layout of `out` has that of x."""
    out = out or contiguous(x.shape, x)
    _check(x, weight, residual, out)
    constexprs, num_warps, num_stages = plan_launch(x.shape[1], has_residual=residual is not None)
    return Launch(
        grid=(ceil_div(x.shape[0], int(constexprs["ROWS"])),),
        strides=(x.stride(0), (x if residual is None else residual).stride(0), out.stride(0)),
        options={
            **constexprs,
            **dependent_options(add_rmsnorm_kernel, x.device),
            "num_warps": num_warps,
            "num_stages": num_stages,
        },
    )


def _check(x: Layout, weight: Layout, residual: Layout | None, out: Layout) -> None:
    require_shape("x", x, (None, None))
    require_dtype("x", x, FLOAT_DTYPES)
    require_shape("weight", weight, (x.shape[1],))
    require_dtype("weight", weight, FLOAT_DTYPES)
    require_contiguous("weight", weight)
    if not 0 < x.shape[1] <= MAX_HIDDEN_SIZE:
        raise ValueError(f"x has {x.shape[1]} columns, not 1 .. {MAX_HIDDEN_SIZE}")
    require_last_contiguous("x", x)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            require_shape(name, tensor, x.shape)
            require_dtype(name, tensor, x.dtype)
            require_last_contiguous(name, tensor)
    require_same_device(x=x, weight=weight, residual=residual, out=out)
