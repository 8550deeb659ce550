# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The middle of a gated MLP, silu(gate) * up or with GELU, in one pass over the output of one merged projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import ACTIVATIONS, Activation, activate
from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.float8_rows import as_float8, empty_rows, plan_rows, require_columns
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    ceil_div,
    contiguous,
    layouts,
    prepared_once,
    require_dtype,
    require_in,
    require_last_contiguous,
    require_same_device,
    require_shape,
    round_to,
)

# 16 bytes a thread of a 16-bit dtype.
_COLUMNS = 1024
_NUM_WARPS = 4


@triton.jit
def silu_mul_kernel(
    gate_ptr,  # [N, C]
    up_ptr,  # [N, C]
    out_ptr,  # [N, C]
    num_columns,
    stride_gate,
    stride_up,
    stride_out,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(out_ptr + row * stride_out + columns, round_to(y, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_float8_kernel(
    gate_ptr,  # [N, C]
    up_ptr,  # [N, C]
    out_ptr,  # [N, C] float8
    scales_ptr,  # [N] float32
    num_columns,
    stride_gate,
    stride_up,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < num_columns
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    numbers, scale = as_float8(round_to(activate(gate, ACTIVATION) * up, dtype).to(tl.float32), dtype)
    tl.store(out_ptr + row * num_columns + columns, numbers, mask=inside)
    tl.store(scales_ptr + row + tl.zeros([1, 1], tl.int32), scale)


def plan_launch() -> tuple[dict[str, int | bool], int, int]:
    """Return (constexprs, num_warps, num_stages), the same for all sizes."""
    return {"COLUMNS": _COLUMNS}, _NUM_WARPS, 1


def silu_mul(gate: Tensor, up: Tensor, *, activation: Activation = "silu", out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, where silu(x) = x / (1 + exp(-x)), or the product with another activation of the gate.

    Sizes: N rows, C columns (intermediate size). One merged projection's [N, 2C] comes as its .chunk(2, -1).
        gate, up        [N, C]  fp32/fp16/bf16 alike, C contiguous, rows at any stride
        activation              of ACTIVATIONS; gelu by the error function, gelu_tanh by its approximation
        out, returns    [N, C]  dtype of gate; may be gate or up itself. None allocates

    All arithmetic is float32, rounded once. Raises ValueError if a shape, stride, dtype, device or the activation is
    another. No sync.
    Cost: one launch; moves 3 * N * C * itemsize bytes.
    """
    launch = _prepare(activation, *layouts(gate, up, out))
    out = gate.new_empty(gate.shape) if out is None else out
    if 0 in launch.grid:
        return out
    launch.run(silu_mul_kernel, gate, up, out, gate.shape[1])
    return out


def silu_mul_float8(gate: Tensor, up: Tensor, *, activation: Activation = "silu") -> tuple[Tensor, Tensor]:
    """The same as rows in float8: numbers [N, C] and scales [N, 1], see float8_rows(). C is at most MAX_COLUMNS there.

    Cost: one launch; writes a byte for each element.
    """
    launch = _prepare_float8(activation, *layouts(gate, up))
    numbers, scales = empty_rows(gate, gate.shape[1])
    if len(gate):
        launch.run(silu_mul_float8_kernel, gate, up, numbers, scales, gate.shape[1])
    return numbers, scales


@prepared_once
def _prepare_float8(activation: Activation, gate: Layout, up: Layout) -> Launch:
    _check(activation, gate, up, None)
    require_columns("gate", gate)
    columns, num_warps = plan_rows(gate.shape[1])
    return Launch(
        grid=(gate.shape[0],),
        strides=(gate.stride(0), up.stride(0)),
        options={
            "COLUMNS": columns,
            "ACTIVATION": activation,
            **dependent_options(silu_mul_float8_kernel, gate.device),
            "num_warps": num_warps,
            "num_stages": 1,
        },
    )


@prepared_once
def _prepare(activation: Activation, gate: Layout, up: Layout, out: Layout | None) -> Launch:
    out = out or contiguous(gate.shape, gate)
    _check(activation, gate, up, out)
    num_rows, num_columns = gate.shape
    constexprs, num_warps, num_stages = plan_launch()
    return Launch(
        grid=(num_rows, ceil_div(num_columns, _COLUMNS)),
        strides=(gate.stride(0), up.stride(0), out.stride(0)),
        options={
            **constexprs,
            "ACTIVATION": activation,
            **dependent_options(silu_mul_kernel, gate.device),
            "num_warps": num_warps,
            "num_stages": num_stages,
        },
    )


def _check(activation: Activation, gate: Layout, up: Layout, out: Layout | None) -> None:
    require_in("activation", activation, ACTIVATIONS)
    require_shape("gate", gate, (None, None))
    require_dtype("gate", gate, FLOAT_DTYPES)
    require_last_contiguous("gate", gate)
    for name, tensor in (("up", up), ("out", out)):
        if tensor is not None:
            require_shape(name, tensor, gate.shape)
            require_dtype(name, tensor, gate.dtype)
            require_last_contiguous(name, tensor)
    require_same_device(gate=gate, up=up, out=out)
