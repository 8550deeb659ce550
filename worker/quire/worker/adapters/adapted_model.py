"""Puts adapters into a loaded model: their layers are replaced by ones that add the updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.worker.adapters.adapter import Adapter, UnsupportedAdapter, Update
from quire.worker.adapters.lora_linear import LoraLinear, Routing
from quire.worker.memory.step_batch import AdapterTokens


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """The adapters of a model.

    names       the identity of each name
    numbers     the number by which layers know an identity
    """

    names: Mapping[str, bytes] = field(default_factory=dict)
    numbers: Mapping[bytes, int] = field(default_factory=dict)
    routing: Routing = field(default_factory=Routing)

    @contextmanager
    def everywhere(self, name: str) -> Iterator[int]:
        """Apply an adapter to all tokens of forwards within that are no steps; gives its number."""
        number = self.numbers[self.names[name]]
        with self.routing.routed((AdapterTokens(number, slice(None)),), None):
            yield number


def adapt(model: Any, adapters: Sequence[Adapter]) -> AdaptedModel:
    """Add adapters to a model on a CPU, in place. Raises UnsupportedAdapter if one is not of this model.

    The output layer is left as it is: an adapter for it is refused.
    """
    names, numbers, routing = {each.name: each.identity() for each in adapters}, dict[bytes, int](), Routing()
    for adapter in adapters:
        layers = {name: _layer(model, adapter.name, name, update) for name, update in adapter.updates.items()}
        identity = names[adapter.name]
        if identity in numbers:
            continue  # another name of the same content
        numbers[identity] = len(numbers)
        for name, layer in layers.items():
            linear = _make_adaptable(model, name, layer, routing)
            linear.add(numbers[identity], *adapter.updates[name].scaled(model.dtype))
    return AdaptedModel(names, numbers, routing)


def _layer(model: Any, adapter: str, name: str, update: Update) -> nn.Module:
    """Return the linear layer of this name. Raises UnsupportedAdapter if there is none, or it has other sizes."""
    try:
        layer: nn.Module = model.get_submodule(name)
    except AttributeError:
        raise UnsupportedAdapter(adapter, f"{type(model).__name__} has no layer {name}") from None
    if layer is model.get_output_embeddings():
        raise UnsupportedAdapter(adapter, f"{name} is the output layer, for which there are no adapters")
    sizes = _sizes(layer)
    if sizes is None:
        raise UnsupportedAdapter(adapter, f"{name} is a {type(layer).__name__}, and no linear layer")
    wanted = update.a.shape[1], update.b.shape[0]
    if wanted != sizes:
        found, expected = ("{} inputs and {} outputs".format(*each) for each in (wanted, sizes))
        raise UnsupportedAdapter(adapter, f"it is of another base: {name} has {expected}, and the update {found}")
    return layer


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer of any kind; None of another module."""
    if isinstance(layer, LoraLinear):
        return _sizes(layer.base)
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def _make_adaptable(model: Any, name: str, layer: nn.Module, routing: Routing) -> LoraLinear:
    """Return the layer with room for updates, in its place in the model."""
    if isinstance(layer, LoraLinear):
        return layer
    parent, _, child = name.rpartition(".")
    adaptable = LoraLinear(layer, routing)
    setattr(model.get_submodule(parent) if parent else model, child, adaptable)
    return adaptable
