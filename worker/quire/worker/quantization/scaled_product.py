"""Products on a GPU with weights of 8 bits as the checkpoint has them, whatever shares a scale.

Steps of few rows multiply by the weight in one kernel; more rows by the weight that another kernel dequantizes, in the
library's product. Inputs are multiplied as they are, or as their rounding left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.scaled_linear import ScaledWeight, find_column_tile, scaled_dequantize, scaled_linear
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import takes
from quire.worker.quantization.product_trial import find_fault
from quire.worker.quantization.scaled_linear import ScaledLinear


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """The product with a weight. All layers of a model share the workspace."""

    weight: ScaledWeight
    workspace: SkinnyWorkspace

    def multiply(self, rows: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See PackedProduct."""
        if takes(rows):
            return scaled_linear(rows, self.weight, bias=bias, workspace=self.workspace, out=out)
        result = F.linear(rows, scaled_dequantize(self.weight, rows.dtype), bias)
        return result if out is None else out.copy_(result)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """See PackedProduct."""
        return scaled_dequantize(self.weight, dtype)


def try_scaled(layers: Sequence[ScaledLinear], dtype: torch.dtype) -> str | None:
    """Let layers with a weight on a GPU multiply it as it is; their inputs have this dtype.

    A product of each size is compared with the layer's own, which also compiles the kernels. Returns the reason if a
    layer goes on dequantizing; None if all is well. Waits for the device.
    """
    fitting = [each for each in layers if find_column_tile(each.in_features, each.form.block) is not None]
    if fitting:
        workspace = SkinnyWorkspace.allocate(next(fitting[0].buffers()).device)
        kinds = {(each.in_features, each.out_features, each.form, each.bias is None): each for each in fitting}
        for layer in kinds.values():
            fault = find_fault(layer, ScaledProduct(_weight(layer), workspace), dtype)
            if fault is not None:
                return f"a product of 8 bits, {layer.in_features} to {layer.out_features}, {fault}"
        for layer in fitting:
            layer.use_kernel(ScaledProduct(_weight(layer), workspace))
    unfit = next((each for each in layers if each.product is None), None)
    return None if unfit is None else f"no kernel for blocks of {unfit.form.block[1]} columns"


def _weight(layer: ScaledLinear) -> ScaledWeight:
    """The layer's tensors, not copied."""
    numbers, scales, block = layer.get_buffer(layer.form.weight), layer.get_buffer(layer.form.scale), layer.form.block
    return ScaledWeight(numbers, scales.reshape(1, 1) if block == (0, 0) else scales, block)
