"""The weights of one matrix product, made of those of several modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Projection:
    """Several nn.Linear over one input as one matrix product: rows of the weights one after the other.

    The modules' parameters become views of the merged ones, so that nothing is held twice; a module without a bias
    beside one that has it gets zeros here and none of its own. Cost: for its duration, a copy of these weights.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.weight: Tensor = linears[0].weight
        self.bias: Tensor | None = linears[0].bias
        if len(linears) > 1:
            self._merge(linears)

    def _merge(self, linears: Sequence[nn.Linear]) -> None:
        sizes = [linear.out_features for linear in linears]
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        for linear, rows in zip(linears, torch.split(self.weight, sizes), strict=True):
            linear.weight.data = rows
        if all(linear.bias is None for linear in linears):
            return
        self.bias = torch.cat(
            [self.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        ).detach()
        for linear, part in zip(linears, torch.split(self.bias, sizes), strict=True):
            if linear.bias is not None:
                linear.bias.data = part
