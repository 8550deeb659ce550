"""Quantization of a model with plain weights, once they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.worker.quantization.inputs import InputRounding
from quire.worker.quantization.quantized_module import count_layer_weights
from quire.worker.quantization.quantizer import replace_linears
from quire.worker.quantization.scaled_linear import ScaledFormat, ScaledLinear
from quire.worker.quantization.scheme import Scheme, UnsupportedFormat

DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The kinds, and the dtype of weights and inputs: a scale for each row of a weight, and for each token's input."""
LEAST_SHARE = 0.5
"""Part of a model's weights, embeddings left out, that linear layers must have."""


def quantize_at_load(model: Any, kind: str, inputs: InputRounding | None = None) -> None:
    """Quantize the linear layers of a model to 8 bits, in place, but for the output layer.

    inputs None: those of products are rounded too, with a scale for each token. Each weight is freed when its layer is
    quantized. Raises UnsupportedFormat if most weights are not in linear layers, as those of experts; the model can't
    be used then.
    """
    form = ScaledFormat(f"{kind} at load", DTYPES[kind])
    rounding = inputs or InputRounding(form.dtype)

    def quantized(_: str, linear: nn.Linear) -> ScaledLinear:
        layer = ScaledLinear(linear, form, rounding)
        layer.quantize(linear.weight.detach())
        return layer

    replace_linears(model, Scheme(form.name, quantized))
    num_quantized, num_plain = count_layer_weights(model)
    share = num_quantized / max(1, num_quantized + num_plain)
    if share < LEAST_SHARE:
        raise UnsupportedFormat(f"only {share:.0%} of its weights are in linear layers")
