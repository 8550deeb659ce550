"""Float8 as transformers saves it: in blocks, as DeepSeek and Qwen do, per tensor, or per row as FBGEMM does.

Both formats compute inputs in float8 on a GPU. Here inputs stay as they are, as in transformers on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.worker.quantization.scaled_linear import ScaledFormat, ScaledLinear
from quire.worker.quantization.scheme import Fields, Scheme


def read_finegrained(config: Mapping[str, Any]) -> Scheme:
    """Read the format `fp8`: e4m3 with a scale for each block, or one for the tensor."""
    fields = Fields("fp8", config)
    fields.one_of("scale_fmt", ("float",), "float")
    fields.one_of("fmt", ("e4m3",), "e4m3")
    block = _block(fields)
    form = ScaledFormat("fp8", torch.float8_e4m3fn, block, scale="weight_scale_inv", is_scalar=True)
    name = f"fp8, blocks of {block[0]} x {block[1]}" if block[0] else "fp8, a scale for each tensor"
    return _scheme(name, form, fields)


def _scheme(name: str, form: ScaledFormat, fields: Fields) -> Scheme:
    def make(linear: nn.Linear) -> ScaledLinear:
        return ScaledLinear(linear, form)

    return Scheme.of_one(name, make, fields.get("modules_to_not_convert"))


def _block(fields: Fields) -> tuple[int, int]:
    size = fields.get("weight_block_size")
    if size is None:
        return (0, 0)
    if len(size) != 2 or not all(isinstance(each, int) and each > 0 for each in size):
        raise fields.unsupported("weight_block_size", size, "two sizes above 0")
    return (size[0], size[1])


def read_fbgemm(config: Mapping[str, Any]) -> Scheme:
    """Read the format `fbgemm_fp8`: e4m3 with a scale for each row."""
    form = ScaledFormat("fbgemm_fp8", torch.float8_e4m3fn)
    return _scheme("fbgemm_fp8", form, Fields("fbgemm_fp8", config))
