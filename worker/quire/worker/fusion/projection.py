"""The weights of one matrix product, made of those of several modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.worker.quantization.quantized_linear import QuantizedLinear
from quire.worker.quantization.scaled_linear import ScaledLinear

Linear = nn.Linear | Conv1D | QuantizedLinear

Rows = Tensor | tuple[Tensor, Tensor]
"""The input of a product: rows [T, C], or their numbers [T, C] in float8 and their scales [T, 1]."""


class Updates(Protocol):
    """Updates of adapters behind a product."""

    @property
    def is_active(self) -> bool:
        """True if a step runs in which tokens may have adapters."""

    def add_to(self, output: Tensor, input: Tensor) -> None:
        """Add to the product [T, N] the updates for input [T, K], in place."""


class Projection:
    """Several linear modules over one input as one matrix product: rows [N, C] of the weights one after the other.

    The modules' parameters become views of the rows, so that nothing is held twice; that of a Conv1D, which is [C, N],
    a transposed one. A module without a bias beside one that has it gets zeros here and none of its own. Modules that
    multiply in float8 have a scale for each row of the weight too. Modules with packed weights stay products of their
    own, beside each other. Cost: for its duration, a copy of the weights that are merged or transposed.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.updates: Updates | None = None
        """Those of adapters, which AdaptedSteps add; None in a model without slots for adapters."""
        self.packed: tuple[QuantizedLinear, ...] = ()
        """The modules, if they multiply by packed weights; then the weight here is a shape without elements."""
        self.weight_scale: Tensor | None = None
        """[N, 1] float32, if the product is in float8."""
        self.bias: Tensor | None = linears[0].bias
        packed = tuple(linear for linear in linears if isinstance(linear, QuantizedLinear) and linear.product)
        if packed:
            self.packed = packed
            num_rows, num_columns = sum(linear.out_features for linear in packed), packed[0].in_features
            self.weight: Tensor = torch.empty(num_rows, num_columns, device="meta")
            return
        self.weight = _weight(linears[0])
        if isinstance(linears[0], ScaledLinear):
            self.weight_scale = torch.cat([_scale(linear) for linear in linears])
        if len(linears) > 1 or isinstance(linears[0], Conv1D):
            self._merge(linears)

    @property
    def is_plain(self) -> bool:
        """True if the weight is of floats in the model's dtype."""
        return self.weight_scale is None and not self.packed

    def _merge(self, linears: Sequence[Linear]) -> None:
        parts = [_weight(linear) for linear in linears]
        sizes = [part.shape[0] for part in parts]
        self.weight = torch.cat(parts)
        for linear, rows in zip(linears, torch.split(self.weight, sizes), strict=True):
            if isinstance(linear, ScaledLinear):
                linear.register_buffer(linear.form.weight, rows)
            elif not isinstance(linear, QuantizedLinear):
                linear.weight.data = rows.t() if isinstance(linear, Conv1D) else rows
        if len(linears) == 1 or all(linear.bias is None for linear in linears):
            return
        dtype = next(linear.bias.dtype for linear in linears if linear.bias is not None)
        self.bias = torch.cat(
            [
                torch.zeros(size, dtype=dtype, device=self.weight.device) if linear.bias is None else linear.bias
                for linear, size in zip(linears, sizes, strict=True)
            ]
        ).detach()
        for linear, bias in zip(linears, torch.split(self.bias, sizes), strict=True):
            if linear.bias is not None:
                linear.bias.data = bias


def _weight(linear: Linear) -> Tensor:
    """The weight as [N, C]."""
    if isinstance(linear, ScaledLinear):
        return linear.get_buffer(linear.form.weight)
    assert not isinstance(linear, QuantizedLinear), "it multiplies by its packed weight"
    return linear.weight.detach().t() if isinstance(linear, Conv1D) else linear.weight.detach()


def _scale(linear: Linear) -> Tensor:
    assert isinstance(linear, ScaledLinear), "one product is in float8 as a whole"
    return linear.get_buffer(linear.form.scale)
