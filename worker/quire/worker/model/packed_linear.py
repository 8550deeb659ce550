"""Weights of linear layers in bfloat16 as a CPU reads them fastest.

A matrix product of few rows, which is what every layer of a decode step is, spends much of its time reordering the
weight on its way into the processor. oneDNN can do that once, ahead. A packed weight replaces the original. In
float32 it does not pay: for a single row PyTorch's other product is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Greatest difference from the plain product, of the largest result. Beyond it a layer stays as it is.
TOLERANCE = 2e-2
# The number of rows that oneDNN packs for. The packing for 16 also suits 1 and 2,048.
EXPECTED_ROWS = 16


class PackedLinear(nn.Module):
    """A linear layer with a packed weight; same arguments and results as nn.Linear, inference only.

    input [..., K], dtype of the weight; returns [..., N]. `weight` has shape and dtype, but its elements can't be read.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [N, K] and bias [N], on the CPU, bfloat16. Raises RuntimeError where oneDNN can't."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), EXPECTED_ROWS)

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@dataclass(frozen=True, slots=True)
class Packing:
    """Linear layers that were packed, and those that could have been but for their results."""

    num_packed: int
    num_different: int = 0


def pack_linears(model: nn.Module) -> Packing:
    """Pack the weights of a model's linear layers on a CPU, in place.

    Layers stay as they are where that is not possible, or the result would differ by more than rounding: another device
    or dtype, a class of its own, a processor without bfloat16 products. A tied weight stays with the embedding, and its
    packed copy takes as much memory again.
    """
    num_packed = num_different = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            try:
                packed = _pack(child)
            except _Different:
                num_different += 1
                continue
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return Packing(num_packed, num_different)


class _Different(Exception):
    """The packed layer's result differs by more than rounding."""


def _pack(module: nn.Module) -> PackedLinear | None:
    """Return the packed layer, None if it can't be packed here. Raises _Different."""
    weight = _weight(module)
    if weight is None or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not weight.numel():
        return None
    bias: Any = module.bias
    with torch.inference_mode():
        try:
            if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                return None
            packed = PackedLinear(weight, bias)
            agrees = _agrees(packed, weight, bias)
        except (RuntimeError, AttributeError):  # built without oneDNN, or without this operation
            return None
    if not agrees:
        raise _Different
    return packed


def _weight(module: nn.Module) -> Tensor | None:
    """[N, K], if the layer is one that can be replaced."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:
        return module.weight.detach().t()
    return None


def _agrees(packed: PackedLinear, weight: Tensor, bias: Tensor | None) -> bool:
    rows = torch.linspace(-1, 1, 3 * weight.shape[1]).sin().view(3, -1).to(weight.dtype)
    expected = F.linear(rows, weight, bias).float()
    difference = (packed(rows).float() - expected).abs().max()
    return bool(difference <= TOLERANCE * expected.abs().max().clamp_min(1e-6))
