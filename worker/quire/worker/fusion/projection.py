"""The weights of one matrix product, made of those of several modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


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
    a transposed one. A module without a bias beside one that has it gets zeros here and none of its own. Cost: for its
    duration, a copy of the weights that are merged or transposed.
    """

    def __init__(self, linears: Sequence[nn.Linear | Conv1D]) -> None:
        self.linears = tuple(linears)
        self.updates: Updates | None = None
        """Those of adapters, which AdaptedSteps add; None in a model without slots for adapters."""
        self.weight: Tensor = linears[0].weight
        self.bias: Tensor | None = linears[0].bias
        if len(linears) > 1 or isinstance(linears[0], Conv1D):
            self._merge(linears)

    def _merge(self, linears: Sequence[nn.Linear | Conv1D]) -> None:
        parts = [_rows(linear) for linear in linears]
        sizes = [part.shape[0] for part in parts]
        self.weight = torch.cat(parts)
        for linear, rows in zip(linears, torch.split(self.weight, sizes), strict=True):
            linear.weight.data = rows.t() if isinstance(linear, Conv1D) else rows
        if len(linears) == 1 or all(linear.bias is None for linear in linears):
            return
        self.bias = torch.cat(
            [
                self.weight.new_zeros(size) if linear.bias is None else linear.bias
                for linear, size in zip(linears, sizes, strict=True)
            ]
        ).detach()
        for linear, bias in zip(linears, torch.split(self.bias, sizes), strict=True):
            if linear.bias is not None:
                linear.bias.data = bias


def _rows(linear: nn.Linear | Conv1D) -> Tensor:
    """The weight as [N, C]."""
    weight = linear.weight.detach()
    return weight.t() if isinstance(linear, Conv1D) else weight
