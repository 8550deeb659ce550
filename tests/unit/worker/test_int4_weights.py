"""Weights of 4 bits, packed anew for the kernels of a GPU: each format's weight stays the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantized_zoo
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quire.worker.quantization import int4_product
from quire.worker.quantization.packed_linear import PackedLinear
from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.quantization.quantizer import use_scheme


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed_int4"])
def test_a_weight_is_packed_to_the_same_one(name: str, tmp_path: Path) -> None:
    """Zero points of each group, columns in another order, and one zero point for all."""
    folder, _ = quantized_zoo.save(name, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    use_scheme(config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    layers = [layer for _, layer in quantized_linears(model) if isinstance(layer, PackedLinear)]
    assert len(layers) == 14
    for layer in layers:
        assert int4_product.fits_kernel(layer)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(int4_product._pack(layer).dequantized(dtype), layer.dequantized(dtype))
