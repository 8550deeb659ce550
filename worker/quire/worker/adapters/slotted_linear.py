"""Products on a GPU that add the updates of adapters in slots of fixed memory.

Steps have a number for each token: 1 + the slot of its adapter, or 0. So a step of any adapters is the same launches,
and a captured one goes on when the adapters in the slots are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.lora import MOST_FEW_ROWS, LoraSlots, add_updates
from quire.worker.adapters.lora_linear import AdaptableLinear
from quire.worker.device.transfer import send


@dataclass(slots=True)
class SlotRouting:
    """The adapters of the forward that runs now. All layers of a model share one.

    adapters    [T] int64, of a step: see StepBatch.adapter_slots
    everywhere  the slot of all tokens of a forward that is no step, computed in torch: what steps are compared with
    """

    adapters: Tensor | None = None
    everywhere: int | None = None

    @contextmanager
    def routed(self, adapters: Tensor | None, everywhere: int | None = None) -> Iterator[None]:
        """Route forwards within so."""
        before = self.adapters, self.everywhere
        self.adapters, self.everywhere = adapters, everywhere
        try:
            yield
        finally:
            self.adapters, self.everywhere = before


class SlottedProduct:
    """The updates of the linear layers that are one product, or of a single layer: its parts, in order."""

    def __init__(self, slots: LoraSlots, routing: SlotRouting) -> None:
        self._slots = slots
        self._parts = [slots.part(part) for part in range(len(slots.sizes))] if len(slots.sizes) > 1 else [slots]
        self._routing = routing
        self._ranks: dict[tuple[int, int], int] = {}

    @property
    def is_active(self) -> bool:
        """True if a step runs in which tokens may have adapters."""
        return self._routing.adapters is not None

    def add_to(self, output: Tensor, input: Tensor) -> None:
        """Add to the product [T, N] of a step the updates for input [T, K], in place."""
        assert self._routing.adapters is not None, "the caller has looked"
        add_updates(output, input, self._slots, self._routing.adapters)

    def add_part(self, part: int, output: Tensor, input: Tensor) -> None:
        """The same of one part. Without an adapter here, input may be some of the tokens, or of another dtype."""
        adapters, slot = self._routing.adapters, self._routing.everywhere
        if slot is not None:
            if rank := self._ranks.get((slot, part)):
                slots = self._parts[part]
                output.addmm_(F.linear(input, slots.a[slot, 0, :rank]), slots.b[slot, :, :rank].t())
            return
        if adapters is None:
            return
        if len(input) == len(adapters) and input.dtype == self._slots.a.dtype:
            add_updates(output, input, self._parts[part], adapters)
        elif any(each == part for _, each in self._ranks):
            raise ValueError(f"a layer with an adapter has {len(input)} tokens of a step of {len(adapters)}")

    def put(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Fill a slot of a part, behind all launches so far: a [r, K], b [N, r] of the host. No sync."""
        slots, rank = self._parts[part], len(a)
        padded = torch.zeros(slots.b.shape[1:], dtype=b.dtype)
        padded[:, :rank] = b
        send(a.contiguous(), slots.a[slot, 0, :rank])
        send(padded, slots.b[slot])
        send(torch.tensor([rank], dtype=torch.int32), slots.ranks[slot])
        self._ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        """Empty a slot, behind all launches so far. No sync."""
        self._slots.ranks[slot].zero_()
        self._ranks = {place: rank for place, rank in self._ranks.items() if place[0] != slot}

    def compile(self) -> None:
        """Launch what steps launch, for tokens without an adapter."""
        slots = self._slots
        for num_rows in (1, MOST_FEW_ROWS + 1):
            adapters = torch.zeros(num_rows, dtype=torch.int64, device=slots.a.device)
            input = slots.a.new_zeros(num_rows, slots.a.shape[3])
            add_updates(input.new_zeros(num_rows, sum(slots.sizes)), input, slots, adapters)


class SlottedLinear(AdaptableLinear):
    """A linear layer that is a part of a product; same arguments and results as the layer, inference only."""

    def __init__(self, base: nn.Module, product: SlottedProduct, part: int) -> None:
        super().__init__(base)
        self._product = product
        self._part = part

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.base(input)
        self._product.add_part(self._part, output.view(-1, output.shape[-1]), input.reshape(-1, input.shape[-1]))
        return output
