# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The parts that all kernels of products x W^T share: the checks of their arguments, their loads, and their end."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.activation import ACTIVATIONS, Activation, activate
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Layout,
    require_contiguous,
    require_dtype,
    require_in,
    require_last_contiguous,
    require_same_device,
    require_shape,
    round_to,
)


def check_product(
    gated: bool,
    activation: Activation | None,
    x: Layout,
    weight: Layout,
    bias: Layout | None,
    residual: Layout | None,
    out: Layout | None,
) -> int:
    """Return the number of outputs. Raise ValueError for arguments that no product takes.

    x               [M, K]  fp32/fp16/bf16, K contiguous
    weight          [N, K]  dtype of x, contiguous; gated: [2 * N, K]
    bias            [N]     fp32/fp16/bf16, contiguous; gated: [2 * N]
    residual, out   [M, N]  dtype of x, N contiguous; no residual with an activation
    """
    if activation is not None:
        require_in("activation", activation, ACTIVATIONS)
        if residual is not None:
            raise ValueError("residual is not taken together with gated or an activation")
    require_shape("x", x, (None, None))
    require_dtype("x", x, FLOAT_DTYPES)
    require_last_contiguous("x", x)
    require_shape("weight", weight, (None, x.shape[1]))
    require_dtype("weight", weight, x.dtype)
    require_contiguous("weight", weight)
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if bias is not None:
        require_vector("bias", bias, weight.shape[0])
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            require_shape(name, tensor, (x.shape[0], num_outputs))
            require_dtype(name, tensor, x.dtype)
            require_last_contiguous(name, tensor)
    require_same_device(x=x, weight=weight, bias=bias, residual=residual, out=out)
    return num_outputs


def require_vector(name: str, vector: Layout, size: int) -> None:
    """Raise ValueError unless it is [size], of floats and contiguous."""
    require_shape(name, vector, (size,))
    require_dtype(name, vector, FLOAT_DTYPES)
    require_contiguous(name, vector)


@triton.jit
def write_out(
    total,  # [ROWS, OUTPUTS] float32
    up,  # the same; read with a gate alone
    m,
    n,
    num_rows,
    num_outputs,
    bias_ptr,
    residual_ptr,
    out_ptr,
    stride_residual,
    stride_out,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Bias, rounding, activation, gate and residual of a tile of sums, and its store. m [ROWS, 1], n [1, OUTPUTS]."""
    inside = (m < num_rows) & (n < num_outputs)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)
    y = round_to(total, out_ptr.dtype.element_ty)
    if ACTIVATION != "none":
        activated = activate(y.to(tl.float32), ACTIVATION)
        if GATED:
            if HAS_BIAS:
                up += tl.load(bias_ptr + num_outputs + n, mask=n < num_outputs, other=0.0).to(tl.float32)
            activated *= round_to(up, out_ptr.dtype.element_ty).to(tl.float32)
        y = round_to(activated, out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m * stride_residual + n, mask=inside, other=0.0)
        y = round_to(y.to(tl.float32) + residual.to(tl.float32), out_ptr.dtype.element_ty)
    tl.store(out_ptr + m * stride_out + n, y, mask=inside)


@triton.jit
def load_inputs(pointers, k, num_inputs, EVEN: tl.constexpr):
    """Values at inputs k, which has the dimensions of the pointers, and zeros beyond the last input."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=k < num_inputs, other=0.0)
