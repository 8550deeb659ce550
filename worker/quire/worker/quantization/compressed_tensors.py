"""compressed-tensors, as llm-compressor saves it: 8 bits with quantized inputs, or integers packed in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.quantization.experts import ExpertSizes, LinearExperts, QuantizedExperts
from quire.worker.quantization.inputs import KEEP, InputRounding
from quire.worker.quantization.kv_cache import check_kv_scheme
from quire.worker.quantization.packed_linear import PackedLinear, unpack
from quire.worker.quantization.quantized_linear import QuantizedLinear
from quire.worker.quantization.scaled_linear import ScaledFormat, ScaledLinear
from quire.worker.quantization.scheme import Fields, Scheme, UnsupportedFormat

NAME = "compressed-tensors"
SCALED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
EIGHT_BIT_TYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
PACKED_FORMAT = "pack-quantized"
PACKED_BITS = (2, 4, 8)

_Maker = Callable[[nn.Linear], QuantizedLinear]


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers with one format: those that a target names, or all nn.Linear."""

    targets: Sequence[str]
    make: _Maker
    make_expert: _Maker
    """Of an expert's layer, with inputs as they are."""

    def has(self, name: str) -> bool:
        return any(_names(target, name) for target in self.targets)


def read_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    """Read the format `compressed-tensors`. A layer has the format of the first group with it."""
    fields = Fields(NAME, config)
    for field in ("sparsity_config", "transform_config"):
        if fields.get(field):
            raise fields.unsupported(field, config[field], "empty")
    check_kv_scheme(fields)
    ignored: Sequence[str] = fields.get("ignore", ())
    groups = [_read_group(fields, group) for group in fields.get("config_groups", {}).values()]
    if not groups:
        raise UnsupportedFormat(f"{NAME}: config_groups is empty")

    def find(name: str) -> _Group | None:
        if any(_names(each, name) for each in ignored):
            return None
        return next((each for each in groups if each.has(name)), None)

    def make(name: str, linear: nn.Linear) -> QuantizedLinear | None:
        group = find(name)
        return None if group is None else group.make(linear)

    def make_experts(name: str, sizes: ExpertSizes) -> QuantizedExperts | None:
        group = find(name)
        return None if group is None else LinearExperts(group.make_expert, sizes)

    formats = {_format_of(fields, group) for group in fields.get("config_groups").values()}
    return Scheme(f"{NAME} {', '.join(sorted(formats))}", make, kept=(), experts=make_experts)


def _names(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target in (name, nn.Linear.__name__)


def _format_of(fields: Fields, group: Mapping[str, Any]) -> str:
    return str(group.get("format") or fields.get("format"))


def _read_group(fields: Fields, group: Mapping[str, Any]) -> _Group:
    known = (*SCALED_FORMATS, PACKED_FORMAT)
    form = _format_of(fields, group)
    if form not in known:
        raise fields.unsupported("format", form, f"one of {', '.join(known)}")
    weights = Fields(f"{NAME} weights", group.get("weights") or {})
    inputs = group.get("input_activations")
    if group.get("output_activations"):
        raise fields.unsupported("output_activations", group["output_activations"], "null")
    targets = group.get("targets", ())
    if form == PACKED_FORMAT:
        make = _read_packed(form, weights, inputs)
        return _Group(targets, make, make)
    scaled, rounding = _read_scaled(form, weights), _read_inputs(inputs)
    return _Group(
        targets,
        lambda linear: ScaledLinear(linear, scaled, rounding),
        lambda linear: ScaledLinear(linear, scaled),
    )


def _read_scaled(form: str, weights: Fields) -> ScaledFormat:
    weights.one_of("num_bits", (8,))
    dtype = EIGHT_BIT_TYPES[weights.one_of("type", tuple(EIGHT_BIT_TYPES))]
    weights.one_of("symmetric", (True,), True)
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy)
    if strategy == "group":
        block = (1, weights.group_size())
    if block is None:
        rows, columns = weights.get("block_structure")
        block = (rows, columns)
    return ScaledFormat(f"{NAME} {form}", dtype, block)


def _read_inputs(config: Mapping[str, Any] | None) -> InputRounding:
    if config is None:
        return KEEP
    fields = Fields(f"{NAME} input_activations", config)
    fields.one_of("num_bits", (8,))
    fields.one_of("symmetric", (True,), True)
    dtype = EIGHT_BIT_TYPES[fields.one_of("type", tuple(EIGHT_BIT_TYPES))]
    if not fields.get("dynamic", False):
        fields.one_of("strategy", ("tensor",))
        return InputRounding(dtype, "layer")
    if fields.one_of("strategy", ("token", "group")) == "group":
        return InputRounding(dtype, "group", fields.group_size())
    return InputRounding(dtype, "token")


def _read_packed(form: str, weights: Fields, inputs: Mapping[str, Any] | None) -> _Maker:
    weights.one_of("type", ("int",), "int")
    bits = weights.one_of("num_bits", PACKED_BITS)
    is_grouped = weights.one_of("strategy", ("channel", "group")) == "group"
    weights.one_of("actorder", (None, "weight", "static"))
    if inputs is not None:
        raise weights.unsupported("input_activations", inputs, f"null, with {PACKED_FORMAT}")
    options = {
        "bits": bits,
        "group_size": weights.group_size() if is_grouped else -1,
        "is_symmetric": bool(weights.get("symmetric", True)),
    }
    return lambda linear: CompressedPackedLinear(linear, **options)


class CompressedPackedLinear(PackedLinear):
    """N rows, K columns, G groups, P numbers in a word; a number is stored plus half of its range.

    weight_packed       [N, K / P]  int32       weight_scale    [N, G]  float32
    weight_zero_point   [N / P, G]  int32       if it is not symmetric
    weight_shape        [2]         int64       N, K
    """

    def __init__(self, linear: nn.Linear, *, bits: int, group_size: int, is_symmetric: bool) -> None:
        super().__init__(linear, f"{NAME} {PACKED_FORMAT}, {bits} bits", bits=bits, group_size=group_size)
        self._is_symmetric = is_symmetric
        self.hold_packed("weight_packed", (self.out_features, self.words(self.in_features, "columns")), torch.int32)
        self.hold("weight_scale", (self.out_features, self.num_groups), torch.float32)
        self.hold("weight_shape", (2,), torch.int64)
        if not is_symmetric:
            self.hold_packed("weight_zero_point", (self.words(self.out_features, "rows"), self.num_groups), torch.int32)

    def numbers(self) -> Tensor:
        return unpack(self.get_buffer("weight_packed"), self.bits)

    def group_scales(self) -> Tensor:
        return self.get_buffer("weight_scale")

    def zero_points(self) -> Tensor | int:
        if self._is_symmetric:
            return 1 << (self.bits - 1)
        return unpack(self.get_buffer("weight_zero_point").t(), self.bits).t()

    def find_fault(self) -> str | None:
        shape = self.get_buffer("weight_shape").tolist()
        if shape != [self.out_features, self.in_features]:
            return f"weight_shape is {shape} and not {[self.out_features, self.in_features]}"
        return super().find_fault()
