"""Scales of keys and values that a checkpoint has, k_scale and v_scale of an attention module: one for each layer.

llm-compressor saves them with a kv_cache_scheme. A pool in float8 uses them, others don't.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quire.worker.quantization.scheme import Fields

KINDS = ("k_scale", "v_scale")
_NAME = re.compile(r"^(?P<module>.+?)(?P<projection>\.[kv]_proj)?\.(?P<kind>[kv]_scale)$")


def check_kv_scheme(fields: Fields) -> None:
    """Raises UnsupportedFormat for a kv_cache_scheme of other numbers than e4m3 with a scale for each layer."""
    found = fields.get("kv_cache_scheme")
    if not found:
        return
    scheme = Fields("kv_cache_scheme", found)
    scheme.one_of("num_bits", (8,))
    scheme.one_of("type", ("float",))
    scheme.one_of("strategy", ("tensor",), "tensor")
    scheme.one_of("symmetric", (True,), True)
    scheme.one_of("dynamic", (False,), False)


def hold_kv_scales(model: Any, files: Iterable[str]) -> None:
    """Make buffers for the scales that the files of a checkpoint have, in the modules that they are of."""
    modules = dict(model.named_modules())
    for path in files:
        if not path.endswith(".safetensors"):
            continue
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (the file is no mapping)
                module_name, _, kind = name.rpartition(".")
                if kind in KINDS and module_name in modules:
                    shape = tuple(tensors.get_slice(name).get_shape())
                    modules[module_name].register_buffer(kind, torch.empty(shape, device="meta"))


def find_kv_scales(model: Any) -> Mapping[tuple[int, str], Tensor]:
    """Return the scales of a loaded checkpoint, by the layer's index and one of KINDS."""
    found = {}
    for name, tensor in model.named_buffers():
        match = _NAME.match(name)
        if match is not None:
            found[getattr(model.get_submodule(match["module"]), "layer_idx", -1), match["kind"]] = tensor
    return found
