"""The trial of a product on a GPU, before a layer uses it."""

from __future__ import annotations

import torch
from triton.errors import TritonError  # type: ignore[import-untyped]

from quire.kernels.split_sums import MAX_ROWS
from quire.worker.device.rounding import agree
from quire.worker.quantization.quantized_linear import PackedProduct, QuantizedLinear, dequantizing

TOLERANCE = 2e-2
"""Greatest difference of a product from that of the dequantized weight, of the largest result."""

TRIED_ROWS = (1, 17, 33, MAX_ROWS + 1)
"""One number of rows of each code that the kernels are compiled to."""


def find_fault(layer: QuantizedLinear, product: PackedProduct, dtype: torch.dtype) -> str | None:
    """Return what is wrong with a product in place of a layer's own, for inputs of a dtype; None if it is the same.

    Compiles its kernels, and waits for the device.
    """
    device = next(layer.buffers()).device
    for num_rows in TRIED_ROWS:
        generator = torch.Generator().manual_seed(num_rows)
        rows = torch.randn(num_rows, layer.in_features, generator=generator).to(device, dtype)
        with dequantizing():
            expected = layer(rows)
        try:
            found = product.multiply(layer.inputs.round(rows, layer), layer.bias)
        except (RuntimeError, ValueError, TritonError) as error:
            return f"fails: {(str(error) or repr(error)).splitlines()[0]}"
        if not agree(found, expected, tolerance=TOLERANCE):
            return "is wrong"
    return None
