"""Puts adapters into a loaded model: their layers are replaced by ones that add the updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.adapters.adapter import Adapter, UnsupportedAdapter, Update
from quire.worker.adapters.lora_linear import AdaptableLinear, LoraLinear, Routing
from quire.worker.memory.step_batch import AdapterTokens, StepBatch, tokens_of_adapters


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter that fits the model, as its layers take it: a [r, K] and b [N, r] by the layer's name."""

    name: str
    identity: bytes
    weights: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(part.numel() * part.element_size() for pair in self.weights.values() for part in pair)


class AdaptedModel:
    """The adapters in the layers of a model on a CPU, by their identities.

    numbers     the number by which layers know an identity
    """

    has_slots = False
    """True if adapters lie in slots, and steps have a number for each token: see SlottedModel."""

    def __init__(self, model: Any, *, by_tile: bool = False) -> None:
        """by_tile: have updates with bits that do not depend on the other tokens of a tile."""
        self.numbers: dict[bytes, int] = {}
        self._by_tile = by_tile
        self._routing = Routing()
        self._model = model
        self._placed: dict[bytes, tuple[int, tuple[str, ...]]] = {}  # the number and the layers of each
        self._next_numbers = itertools.count()

    def prepare(self, adapter: Adapter, bounds: AdapterBounds | None = None) -> PreparedAdapter:
        """Compare an adapter with the model, and convert its weights; the model stays as it is. In any thread.

        Raises UnsupportedAdapter if it is not of this model, or has more bytes than the bounds allow. The output layer
        is left as it is: an adapter for it is refused.
        """
        weights = {}
        for name, update in adapter.updates.items():
            self._check_layer(adapter.name, name, update)
            weights[name] = update.scaled(self._model.dtype)
            if not all(torch.isfinite(part).all() for part in weights[name]):
                reason = f"its update of {name}, times its scaling {update.scaling}, is beyond {self._model.dtype}"
                raise UnsupportedAdapter(adapter.name, reason)
        prepared = PreparedAdapter(adapter.name, adapter.identity(), weights)
        if bounds is not None and prepared.num_bytes > bounds.max_bytes:
            reason = f"its weights take {prepared.num_bytes} bytes; --lora-memory is {bounds.max_bytes}"
            raise UnsupportedAdapter(adapter.name, reason)
        return prepared

    def routed(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Apply the adapters of a step to forwards within."""
        groups = tokens_of_adapters(batch.adapters, batch.counts_host) if batch.adapters else ()
        return self._routing.routed(groups, batch.num_tokens)

    def assign(self, batch: StepBatch, adapters: Sequence[int | None]) -> StepBatch:
        """Return the batch with these adapters for its sequences, by number; None: no adapter."""
        return replace(batch, adapters=tuple(adapters))

    def add(self, adapter: PreparedAdapter) -> None:
        """Put an adapter into its layers, between two forwards. No effect if its content is there."""
        for part in self.adding(adapter):
            part()

    def adding(self, adapter: PreparedAdapter) -> list[Callable[[], None]]:
        """Return the parts of add(), about one for each layer, each to be run between two forwards, in this order.

        Each copies the updates of all adapters of its layer. The adapter has a number when all have run.
        """
        identity = adapter.identity
        if identity in self._placed:
            return []
        number, names = self._placed[identity] = next(self._next_numbers), tuple(adapter.weights)

        def add_to(name: str) -> None:
            self._make_adaptable(name).add(number, *adapter.weights[name])

        return [*(partial(add_to, name) for name in names), partial(self.numbers.__setitem__, identity, number)]

    def remove(self, identity: bytes) -> None:
        """Take an adapter out of its layers, between two forwards."""
        for part in self.removing(identity):
            part()

    def removing(self, identity: bytes) -> list[Callable[[], None]]:
        """Return the parts of remove(), as those of add(). All of adding() have run or are queued before them."""
        number, names = self._placed.pop(identity)

        def forget() -> None:
            del self.numbers[identity]

        def remove_from(name: str) -> None:
            self._make_adaptable(name).remove(number)

        return [forget, *(partial(remove_from, name) for name in names)]

    @contextmanager
    def everywhere(self, identity: bytes) -> Iterator[None]:
        """Apply an adapter to all tokens of forwards within that are no steps."""
        with self._routing.routed((AdapterTokens(self.numbers[identity], slice(None)),), None):
            yield

    @contextmanager
    def trial(self) -> Iterator[bytes | None]:
        """Have a random adapter meanwhile, in a model with slots. Gives its identity, else None."""
        yield None

    def _check_layer(self, adapter: str, name: str, update: Update) -> None:
        """Raises UnsupportedAdapter if there is no linear layer of this name, or it has other sizes."""
        model = self._model
        try:
            layer: nn.Module = model.get_submodule(name)
        except AttributeError:
            raise UnsupportedAdapter(adapter, f"{type(model).__name__} has no layer {name}") from None
        if layer is model.get_output_embeddings():
            raise UnsupportedAdapter(adapter, f"{name} is the output layer, for which there are no adapters")
        sizes = sizes_of(layer)
        if sizes is None:
            raise UnsupportedAdapter(adapter, f"{name} is a {type(layer).__name__}, and no linear layer")
        wanted = update.a.shape[1], update.b.shape[0]
        if wanted != sizes:
            found, expected = ("{} inputs and {} outputs".format(*each) for each in (wanted, sizes))
            raise UnsupportedAdapter(adapter, f"it is of another base: {name} has {expected}, and the update {found}")

    def _make_adaptable(self, name: str) -> LoraLinear:
        """Return the layer with room for updates, in its place in the model."""
        layer = self._model.get_submodule(name)
        if isinstance(layer, LoraLinear):
            return layer
        parent, _, child = name.rpartition(".")
        adaptable = LoraLinear(layer, self._routing, by_tile=self._by_tile)
        setattr(self._model.get_submodule(parent) if parent else self._model, child, adaptable)
        return adaptable


def sizes_of(layer: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer of any kind; None of another module."""
    if isinstance(layer, AdaptableLinear):
        return sizes_of(layer.base)
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]
