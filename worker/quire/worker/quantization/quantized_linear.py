"""A linear layer with a weight that is not one tensor of floats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.quantization.inputs import KEEP, InputRounding
from quire.worker.quantization.quantized_module import QuantizedModule

_dequantizing: ContextVar[bool] = ContextVar("dequantizing", default=False)


@contextmanager
def dequantizing() -> Iterator[None]:
    """Let layers with a PackedProduct multiply by the dequantized weight: what kernels are compared with."""
    token = _dequantizing.set(True)
    try:
        yield
    finally:
        _dequantizing.reset(token)


class PackedProduct(Protocol):
    """A weight as kernels of a GPU take it, and products with it."""

    def multiply(self, rows: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return the product [T, N] of rows [T, K]; in `out`, with rows of any stride, if it is given."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, [N, K]."""


class QuantizedLinear(QuantizedModule):
    """A linear layer that dequantizes its weight for each product; same arguments and results as nn.Linear.

    input [..., K], any float dtype; returns [..., N] of that dtype. Cost beside the product: reads the packed weight,
    and writes and reads N * K elements of the input's dtype.
    """

    product: PackedProduct | None = None
    """Multiplies in place of the dequantized weight: see use_kernel()."""

    def __init__(self, linear: nn.Linear, inputs: InputRounding = KEEP) -> None:
        """`linear` is the layer that this one replaces: it has the sizes, and the bias."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.inputs = inputs

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, [N, K]."""
        raise NotImplementedError

    def use_kernel(self, product: PackedProduct) -> None:
        """Multiply by a product with the same weight from here on."""
        self.product = product

    @property
    def multiplies_packed(self) -> bool:
        return self.product is not None

    def forward(self, input: Tensor) -> Tensor:
        rounded = self.inputs.round(input, self)
        if self.product is None or _dequantizing.get():
            return F.linear(rounded, self.dequantized(input.dtype), self.bias)
        rows = rounded.reshape(-1, self.in_features)
        return self.product.multiply(rows, self.bias).view(*input.shape[:-1], self.out_features)

    def multiply_into(self, out: Tensor, rows: Tensor) -> None:
        """Write the product of rows [T, K] to out [T, N], with rows of any stride."""
        if self.product is None or _dequantizing.get():
            out.copy_(self(rows))
        else:
            self.product.multiply(self.inputs.round(rows, self), self.bias, out)

    @property
    def num_weights(self) -> int:
        """See QuantizedModule.num_weights."""
        return self.in_features * self.out_features

    def extra_repr(self) -> str:
        return f"{self.dequantizer}, in_features={self.in_features}, out_features={self.out_features}"


def quantized_linears(model: Any) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantized layers of a model, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
