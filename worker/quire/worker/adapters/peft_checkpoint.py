"""Reads an adapter as PEFT saves it: adapter_config.json, and adapter_model.safetensors.

Weights are named base_model.model.LAYER.lora_A.weight and ....lora_B.weight. What the two files say beyond plain LoRA
is refused by name: an adapter without it would give other tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.worker.adapter_bounds import DEFAULT_BOUNDS, AdapterBounds
from quire.worker.adapters.adapter import Adapter, UnsupportedAdapter, Update
from quire.worker.unsupported_model import first_line

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_WEIGHT = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
# Fields with a meaning beyond plain LoRA. Each must be absent, null, false or empty.
_NEEDS_MORE = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "use_qalora",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
)
# Ways to initialise that leave the base as it is; others change the base's weights, too.
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", None)


def read_adapter(name: str, folder: Path, bounds: AdapterBounds = DEFAULT_BOUNDS) -> Adapter:
    """Read the adapter in a folder. Raises UnsupportedAdapter if a file is missing, damaged or asks for more than LoRA,
    or if it is beyond the bounds of one adapter.

    Its layers are not compared with a model's here. Cost: reads the weights once.
    """
    config = _Config(name, _read_config(name, folder / CONFIG_FILE), bounds.max_rank)
    config.check()
    layers: dict[str, dict[str, Tensor]] = {}
    for weight, tensor in _read_weights(name, folder / WEIGHTS_FILE, bounds).items():
        match = _WEIGHT.fullmatch(weight)
        if match is None:
            raise UnsupportedAdapter(name, f"its weight {weight} is not lora_A or lora_B of a linear layer")
        _check_weight(name, weight, tensor)
        layers.setdefault(match["layer"], {})[match["part"]] = tensor
    if not layers:
        raise UnsupportedAdapter(name, f"{WEIGHTS_FILE} has no weights")
    return Adapter(name, {layer: _update(name, layer, parts, config) for layer, parts in layers.items()})


def _read_config(name: str, path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UnsupportedAdapter(name, f"{path.name} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UnsupportedAdapter(name, f"{path.name} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedAdapter(name, f"{path.name} is no JSON: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise UnsupportedAdapter(name, f"{path.name} is no JSON object")
    return config


def _read_weights(name: str, path: Path, bounds: AdapterBounds) -> dict[str, Tensor]:
    if not path.is_file():
        raise UnsupportedAdapter(name, f"there is no file {path.name}")
    try:
        # A file of float32 may be twice what is kept, in 16 bits. A larger one is not read.
        if (size := path.stat().st_size) > 2 * bounds.max_bytes + _MAX_HEADER_BYTES:
            limit = f"--lora-memory {bounds.max_bytes} keeps no adapter of that size"
            raise UnsupportedAdapter(name, f"{path.name} has {size} bytes; {limit}")
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise UnsupportedAdapter(name, f"{path.name} is damaged: {first_line(error)}") from error


def _check_weight(name: str, weight: str, tensor: Tensor) -> None:
    if tensor.dim() != 2 or not tensor.numel():
        raise UnsupportedAdapter(name, f"its weight {weight} has the shape {tuple(tensor.shape)}, and no matrix")
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise UnsupportedAdapter(name, f"its weight {weight} is {tensor.dtype}, and not one of {allowed}")
    if not torch.isfinite(tensor).all():
        raise UnsupportedAdapter(name, f"its weight {weight} has elements that are no finite numbers")


def _update(name: str, layer: str, parts: Mapping[str, Tensor], config: _Config) -> Update:
    missing = {"A", "B"} - parts.keys()
    if missing:
        raise UnsupportedAdapter(name, f"its layer {layer} has no lora_{missing.pop()}.weight")
    a, b = parts["A"], parts["B"]
    rank = config.rank(layer)
    if a.shape[0] != rank or b.shape[1] != rank:
        shapes = f"lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}"
        raise UnsupportedAdapter(name, f"its layer {layer} has {shapes}, and {CONFIG_FILE} says rank {rank}")
    return Update(a, b, config.scaling(layer, rank))


class _Config:
    """The fields of adapter_config.json that LoRA reads."""

    def __init__(self, name: str, fields: Mapping[str, Any], max_rank: int) -> None:
        self._name = name
        self._max_rank = max_rank
        self._fields = fields

    def check(self) -> None:
        """Raise UnsupportedAdapter for what is not plain LoRA."""
        kind = self._fields.get("peft_type")
        if kind != "LORA":
            raise self._refusal("peft_type", kind, "LORA")
        if self._fields.get("bias", "none") != "none":
            raise self._refusal("bias", self._fields["bias"], "none")
        for field in _NEEDS_MORE:
            if self._fields.get(field):
                raise self._refusal(field, self._fields[field], "unset")
        initialisation = self._fields.get("init_lora_weights")
        if initialisation not in _INITIALISATIONS:
            raise self._refusal("init_lora_weights", initialisation, "one that leaves the base's weights as they are")

    def rank(self, layer: str) -> int:
        """Return the rank of a layer's update. Raises UnsupportedAdapter for one out of range."""
        rank = self._of_layer("rank_pattern", "r", layer)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= self._max_rank:
            raise self._refusal("r", rank, f"1 to {self._max_rank}, --max-lora-rank")
        return rank

    def scaling(self, layer: str, rank: int) -> float:
        """Return the factor of a layer's update. Raises UnsupportedAdapter for one that is no finite number."""
        alpha = self._of_layer("alpha_pattern", "lora_alpha", layer)
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not math.isfinite(alpha):
            raise self._refusal("lora_alpha", alpha, "a finite number")
        return float(alpha / math.sqrt(rank) if self._fields.get("use_rslora") else alpha / rank)

    def _of_layer(self, patterns: str, field: str, layer: str) -> Any:
        """Return a field's value for a layer: the first pattern that is the end of its name has another one."""
        table = self._fields.get(patterns) or {}
        if not isinstance(table, dict):
            raise self._refusal(patterns, table, "an object")
        for pattern, value in table.items():
            try:
                if re.fullmatch(rf"(.*\.)?({pattern})", layer):
                    return value
            except re.error as error:
                raise self._refusal(patterns, pattern, f"a regular expression ({error})") from error
        return self._fields.get(field)

    def _refusal(self, field: str, value: object, limit: str) -> UnsupportedAdapter:
        return UnsupportedAdapter(self._name, f"{field} in {CONFIG_FILE} is {value!r}; must be {limit}")
