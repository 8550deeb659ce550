"""Adapters on a GPU: each in a slot of fixed memory beside the linear layers of a model, all of which have slots.

The memory is taken when the worker starts, for so many adapters of the largest rank. To load one is to copy it into a
free slot. One slot more than adapters that are served is for an adapter that is being checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from quire.kernels.lora import LoraSlots, padded_rank
from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.adapters.adapted_model import AdaptedModel, PreparedAdapter, sizes_of
from quire.worker.adapters.slotted_linear import SlotRouting, SlottedLinear, SlottedProduct
from quire.worker.device.transfer import indices
from quire.worker.memory.step_batch import StepBatch

TRIAL_RANK = 16
"""Largest rank of the random adapter that forwards are checked with."""


class FusedProduct(Protocol):
    """A product of some linear layers over one input, computed at once."""

    @property
    def linears(self) -> Sequence[nn.Module]:
        """The layers, in the order of their outputs."""

    updates: Any


class SlottedModel(AdaptedModel):
    """The adapters of a model on a GPU, or wherever kernels run. `numbers` are their slots."""

    has_slots = True

    def __init__(self, model: Any, bounds: AdapterBounds, fused: Iterable[FusedProduct]) -> None:
        """`fused` are products of several linear layers, which get their updates here.

        Raises ValueError if --lora-memory has no room for two adapters of the largest rank. Cost: that memory.
        """
        super().__init__(model)
        self._slot_routing = SlotRouting()
        layers = _linear_layers(model)
        self.slot_bytes = _bytes_of_slot(layers.values(), rank=padded_rank(bounds.max_rank), dtype=model.dtype)
        num_slots = min(bounds.max_adapters + 1, bounds.max_bytes // self.slot_bytes)
        if num_slots < 2:
            raise ValueError(
                f"--lora-memory {bounds.max_bytes}: two adapters of --max-lora-rank {bounds.max_rank} take "
                f"{2 * self.slot_bytes} bytes, one of them for an adapter that is loaded"
            )
        self.bounds = replace(bounds, max_adapters=num_slots - 1, is_by_memory=num_slots <= bounds.max_adapters)
        """As many adapters as there is memory for."""
        self._free = list(range(num_slots))
        self._products: dict[str, tuple[SlottedProduct, int]] = {}
        names = {id(layer): name for name, layer in layers.items()}
        for each in fused:
            each.updates = self._add_product([names[id(linear)] for linear in each.linears], layers, num_slots)
        for name in layers:
            if name not in self._products:
                self._add_product([name], layers, num_slots)
        for name, layer in layers.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SlottedLinear(layer, *self._products[name]))
        self._trial = self._draw_trial(layers)

    def _add_product(self, names: Sequence[str], layers: dict[str, nn.Module], num_slots: int) -> SlottedProduct:
        sizes = [_require_sizes(layers[name]) for name in names]
        slots = LoraSlots.allocate(
            num_slots,
            max_rank=self.bounds.max_rank,
            num_inputs=sizes[0][0],
            sizes=[num_outputs for _, num_outputs in sizes],
            dtype=self._model.dtype,
            device=self._model.device,
        )
        product = SlottedProduct(slots, self._slot_routing)
        product.compile()
        self._products.update({name: (product, part) for part, name in enumerate(names)})
        return product

    def _draw_trial(self, layers: dict[str, nn.Module]) -> PreparedAdapter:
        rank, weights = min(TRIAL_RANK, self.bounds.max_rank), {}
        generator = torch.Generator().manual_seed(0)
        for name, layer in layers.items():
            num_inputs, num_outputs = _require_sizes(layer)
            a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * 0.1 * rank**-0.5
            weights[name] = a.to(self._model.dtype), b.to(self._model.dtype)
        return PreparedAdapter("of the self-check", bytes(32), weights)

    def routed(self, batch: StepBatch) -> AbstractContextManager[None]:
        """See AdaptedModel.routed."""
        return self._slot_routing.routed(batch.adapter_slots)

    def assign(self, batch: StepBatch, adapters: Sequence[int | None]) -> StepBatch:
        """See AdaptedModel.assign."""
        of_seqs = [0 if slot is None else 1 + slot for slot in adapters]
        of_tokens = np.array(of_seqs).repeat(batch.counts_host)
        return replace(batch, adapter_slots=indices(of_tokens, batch.positions.device))

    def adding(self, adapter: PreparedAdapter) -> list[Callable[[], None]]:
        """See AdaptedModel.adding. Each part copies the update of a layer to the device."""
        identity = adapter.identity
        if identity in self._placed:
            return []
        slot, names = self._placed[identity] = self._free.pop(), tuple(adapter.weights)

        def put(name: str) -> None:
            product, part = self._products[name]
            product.put(slot, part, *adapter.weights[name])

        return [*(partial(put, name) for name in names), partial(self.numbers.__setitem__, identity, slot)]

    def removing(self, identity: bytes) -> list[Callable[[], None]]:
        """See AdaptedModel.removing. The slot is free at once: what fills it runs behind these parts."""
        slot, names = self._placed.pop(identity)
        self._free.append(slot)

        def forget() -> None:
            del self.numbers[identity]

        return [forget, *(partial(self._products[name][0].clear, slot) for name in names)]

    @contextmanager
    def everywhere(self, identity: bytes) -> Iterator[None]:
        """See AdaptedModel.everywhere. The updates are computed in torch, and not by the kernels of steps."""
        with self._slot_routing.routed(None, self.numbers[identity]):
            yield

    @contextmanager
    def trial(self) -> Iterator[bytes | None]:
        """See AdaptedModel.trial. It has updates of all layers. Only before there are requests."""
        self.add(self._trial)
        try:
            yield self._trial.identity
        finally:
            self.remove(self._trial.identity)


def _linear_layers(model: Any) -> dict[str, nn.Module]:
    """Return the linear layers but the output layer, by name."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    return {name: each for name, each in named if each is not head and sizes_of(each) is not None}


def _require_sizes(layer: nn.Module) -> tuple[int, int]:
    sizes = sizes_of(layer)
    assert sizes is not None, "it is one of _linear_layers()"
    return sizes


def _bytes_of_slot(layers: Iterable[nn.Module], *, rank: int, dtype: torch.dtype) -> int:
    return sum(sum(_require_sizes(layer)) for layer in layers) * rank * dtype.itemsize
