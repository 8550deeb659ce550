# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The activations of MLPs, for the kernels that have one at their end."""

from __future__ import annotations

from typing import Literal, get_args

import triton
import triton.language as tl

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of x, float32, and 0 for the most negative: none of the forms divides inf by inf."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    else:
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
        exponent = x
        if ACTIVATION == "gelu_tanh":
            exponent = _TWICE_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-exponent))
    return y
