"""Products on a GPU with weights of 4 bits as they are packed, whatever the format of the checkpoint.

Each layer's weight is packed anew at start, to one form for all formats (quire.kernels.int4_linear). Steps of few rows
multiply by it in one kernel; more rows by the weight that another kernel dequantizes, in the library's product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.int4_linear import Int4Weight, find_group_size, int4_dequantize, int4_linear
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import takes
from quire.worker.quantization.packed_linear import PackedLinear
from quire.worker.quantization.product_trial import find_fault


@dataclass(frozen=True, slots=True)
class Int4Product:
    """The product with a weight. All layers of a model share the workspace."""

    weight: Int4Weight
    workspace: SkinnyWorkspace

    def multiply(self, rows: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See PackedProduct."""
        if takes(rows):
            return int4_linear(rows, self.weight, bias=bias, workspace=self.workspace, out=out)
        order = self.weight.order
        ordered = rows if order is None else rows.index_select(1, order)
        result = F.linear(ordered, int4_dequantize(self.weight, rows.dtype), bias)
        return result if out is None else out.copy_(result)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """See PackedProduct."""
        return self.weight.dequantized(dtype)


def fits_kernel(layer: PackedLinear) -> bool:
    """True if there are kernels for a weight of such numbers and groups. Waits for the device."""
    return layer.bits == 4 and find_group_size(layer.in_features, layer.num_groups, layer.groups()) is not None


def try_int4(layers: Sequence[PackedLinear], dtype: torch.dtype) -> str | None:
    """Let layers with a weight on a GPU multiply it as it is packed; their inputs have this dtype.

    A product of each size is compared with the layer's own, which also compiles the kernels. Then each layer is packed
    anew, and its weight must stay the same in each bit. Returns the reason if a layer goes on dequantizing; None if all
    is well. Waits for the device. Cost: for its duration, the unpacked weight of a layer.
    """
    layers = [layer for layer in layers if layer.product is None]
    fitting = [layer for layer in layers if fits_kernel(layer)]
    unfit = next((layer for layer in layers if layer not in fitting), None)
    if fitting:
        workspace = SkinnyWorkspace.allocate(next(fitting[0].buffers()).device)
        sizes = {(each.in_features, each.out_features, each.bias is None): each for each in fitting}
        for layer in sizes.values():
            fault = find_fault(layer, Int4Product(_pack(layer), workspace), dtype)
            if fault is not None:
                return f"a product of 4 bits, {layer.in_features} to {layer.out_features}, {fault}"
        for layer in fitting:
            weight = _pack(layer)
            if not torch.equal(weight.dequantized(dtype), layer.dequantized(dtype)):
                return f"a weight of 4 bits, {layer.in_features} to {layer.out_features}, was packed to another one"
            layer.use_kernel(Int4Product(weight, workspace))
    if unfit is None:
        return None
    return f"no kernel for {unfit.bits} bits in groups of {unfit.group_size}"


def _pack(layer: PackedLinear) -> Int4Weight:
    return Int4Weight.pack(layer.numbers(), layer.group_scales(), layer.zero_points(), group_of_column=layer.groups())
