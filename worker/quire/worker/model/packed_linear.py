"""Weights of linear layers as a CPU reads them fastest.

A matrix product of few rows, which is what every layer of a decode step is, spends much of its time reordering the
weight on its way into the processor. oneDNN can do that once, ahead. A packed weight replaces the original.

In float32 a call costs some 40 us more than PyTorch's other product. A small weight does not earn that back, so it
stays as it is. Processor time of one thread of an Intel Xeon, in us, plain / packed, weights not in the core's cache:

    weight                1 row          4 rows          8 rows         16 rows        64 rows
    512 x 512, 1 MiB    133 / 177      175 / 195       219 / 239       271 / 309       525 / 558
    1408 x 512, 2.8     325 / 366      619 / 521       712 / 534       649 / 582     1,440 / 1,383
    2048 x 1024, 8      965 / 1,069  1,787 / 1,221   2,255 / 1,376   1,822 / 1,574   3,167 / 2,932
    32000 x 512, 63   5,320 / 5,330 12,000 / 6,680  19,460 / 7,520  12,530 / 9,140  23,470 / 19,790
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.worker.device.rounding import agree

# Greatest difference from the plain product, of the largest result. Beyond it a layer stays as it is.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
# The size from which on a weight is packed.
LEAST_BYTES = {torch.bfloat16: 1, torch.float32: 2 << 20}
# The number of rows that oneDNN packs for. The packing for 16 also suits 1 and 2,048.
EXPECTED_ROWS = 16


class PackedLinear(nn.Module):
    """A linear layer with a packed weight; same arguments and results as nn.Linear, inference only.

    input [..., K], dtype of the weight; returns [..., N]. `weight` has shape and dtype, but its elements can't be read.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [N, K] and bias [N], on the CPU, bfloat16 or float32. Raises RuntimeError where oneDNN can't."""
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


def pack_linears(model: nn.Module, *, dtypes: Collection[torch.dtype] = tuple(LEAST_BYTES)) -> Packing:
    """Pack the weights of a model's linear layers on a CPU that have one of these dtypes, in place.

    Layers stay as they are where that is not possible, does not pay, or the result would differ by more than rounding:
    another device, a class of its own, a small weight in float32, a processor without bfloat16 products. A tied weight
    stays with the embedding, and its packed copy takes as much memory again.
    """
    num_packed = num_different = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            try:
                packed = _pack(child, dtypes)
            except _Different:
                num_different += 1
                continue
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return Packing(num_packed, num_different)


class _Different(Exception):
    """The packed layer's result differs by more than rounding."""


def _pack(module: nn.Module, dtypes: Collection[torch.dtype]) -> PackedLinear | None:
    """Return the packed layer, None if it stays as it is. Raises _Different."""
    weight = _weight(module)
    if weight is None or weight.device.type != "cpu" or weight.dtype not in dtypes:
        return None
    if weight.nbytes < LEAST_BYTES[weight.dtype]:
        return None
    bias: Any = module.bias
    with torch.inference_mode():
        try:
            if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
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
    return agree(packed(rows), F.linear(rows, weight, bias), tolerance=TOLERANCES[weight.dtype])
