"""Which linear layers of a model are quantized, and as which module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

from quire.worker.quantization.experts import ExpertSizes, LinearExperts, QuantizedExperts
from quire.worker.quantization.quantized_linear import QuantizedLinear


class UnsupportedFormat(ValueError):
    """The checkpoint's format is not one that the worker has; the message says which part of it."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of a checkpoint.

    name        of the format, for people
    make        (name of a layer, the layer) -> the module in its place; None leaves the layer as it is. Raises
                ValueError if the layer's sizes do not fit
    kept        the parts of names of layers that are not quantized; None: the output layer, and what is tied to it
    renamed     tensors with names that no buffer can have: a pattern of their end, and the end of the buffer's name
    experts     (name of a layer of an expert, sizes of all experts) -> the module in place of their tensor, as `make`;
                None: they are plain
    """

    name: str
    make: Callable[[str, nn.Linear], QuantizedLinear | None]
    kept: Sequence[str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    experts: Callable[[str, ExpertSizes], QuantizedExperts | None] | None = None

    @classmethod
    def of_one(cls, name: str, make: Callable[[nn.Linear], QuantizedLinear], kept: Sequence[str] | None) -> Scheme:
        """Return the scheme of a checkpoint with one format, for linear layers and for experts."""
        return cls(name, lambda _, linear: make(linear), kept, experts=lambda _, sizes: LinearExperts(make, sizes))

    def replacement(self, name: str, linear: nn.Linear, kept: Sequence[str]) -> QuantizedLinear | None:
        """Return the module in place of a linear layer; None leaves it. `kept` counts if the scheme names none."""
        return self.make(name, linear) if self._has(name, kept) else None

    def expert_replacement(self, name: str, sizes: ExpertSizes, kept: Sequence[str]) -> QuantizedExperts | None:
        """Return the module in place of a tensor of all experts; `name` is that of an expert's layer."""
        return None if self.experts is None or not self._has(name, kept) else self.experts(name, sizes)

    def _has(self, name: str, kept: Sequence[str]) -> bool:
        return bool(should_convert_module(name, list(kept if self.kept is None else self.kept)))


class Fields:
    """The fields of a quantization_config. Reading a field with an unsupported value raises UnsupportedFormat."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self._name = name
        self._values = values

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field, the default if it is not there or null."""
        value = self._values.get(field)
        return default if value is None else value

    def one_of(self, field: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Return a field that has one of these values."""
        value = self.get(field, default)
        if value not in allowed:
            raise self.unsupported(field, value, f"one of {', '.join(map(str, allowed))}")
        return value

    def group_size(self, field: str = "group_size") -> int:
        """Return the columns of a group: a number above 0, or -1 for all of them."""
        value = self.get(field, -1)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise self.unsupported(field, value, "a number of columns, or -1")
        return value

    def unsupported(self, field: str, value: Any, expected: str) -> UnsupportedFormat:
        """Make the error of a field with a value that is not supported."""
        return UnsupportedFormat(f"{self._name}: {field} is {value!r} and not {expected}")
