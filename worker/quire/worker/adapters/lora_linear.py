"""A linear layer with the updates of several adapters, and which tokens of a step take which.

A step's tokens are packed, and those of one adapter need not lie together. A layer computes its base for all tokens,
and then adds the updates, in one of two ways:

    by adapter    for each adapter in the step two small products of its tokens. Other tokens take part in none
    at once       two products of all tokens with all adapters of the layer, side by side. Between the two, what a token
                  has of other adapters than its own is set to 0

The second way has few operations, each of which takes some microseconds on a CPU, and wastes arithmetic. It is for few
tokens of several adapters: decode steps.

In a model that computes in tiles an update's bits must not depend on the other tokens of a tile. There each adapter has
memory of its own, and both products are of all tokens of the tile: only their shape changes the bits of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.memory.step_batch import AdapterTokens

MAX_TOKENS_AT_ONCE = 64
"""Most tokens of a step for which the updates of several adapters are added at once."""

Layout = tuple[tuple[int, int], ...]
"""The adapters of a layer, side by side: the number and the rank of each."""


@dataclass(slots=True)
class Routing:
    """The tokens of each adapter in the forward that runs now. All layers of a model share one."""

    groups: Sequence[AdapterTokens] = ()
    num_tokens: int | None = None
    """Tokens of the step; None: any number."""
    _foreign: dict[Layout, Tensor] = field(default_factory=dict)

    @contextmanager
    def routed(self, groups: Sequence[AdapterTokens], num_tokens: int | None) -> Iterator[None]:
        """Route forwards within so."""
        before = self.groups, self.num_tokens
        self.groups, self.num_tokens, self._foreign = groups, num_tokens, {}
        try:
            yield
        finally:
            self.groups, self.num_tokens = before
            self._foreign = {}

    def foreign(self, layout: Layout, num_tokens: int) -> Tensor:
        """Return a mask [T, R] for adapters of R ranks together: True where the rank is not of the token's adapter.

        It is made once a step for all layers with this layout.
        """
        mask = self._foreign.get(layout)
        if mask is None:
            mask = torch.ones(num_tokens, sum(rank for _, rank in layout), dtype=torch.bool)
            places = {group.adapter: group.tokens for group in self.groups}
            start = 0
            for adapter, rank in layout:
                if adapter in places:
                    mask[places[adapter], start : start + rank] = False
                start += rank
            self._foreign[layout] = mask
        return mask


class AdaptableLinear(nn.Module):
    """A linear layer in the place of another one, its base."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


class LoraLinear(AdaptableLinear):
    """A linear layer and its updates by adapter; same arguments and results as the layer, inference only.

    input [1, T, K] with the tokens of a step in their order; returns [1, T, N]. Cost beside the base's, in operations a
    token: 2 * r * (K + N) for its own adapter; at once, with r the sum of all adapters' ranks.
    """

    def __init__(self, base: nn.Module, routing: Routing, *, by_tile: bool = False) -> None:
        super().__init__(base)
        self._routing = routing
        self._by_tile = by_tile
        self._layout: Layout = ()
        self._updates: dict[int, tuple[Tensor, Tensor]] = {}
        self._a = self._b = torch.empty(0)

    def add(self, adapter: int, a: Tensor, b: Tensor) -> None:
        """Add an adapter's update, b @ a: a [r, K], b [N, r], in the dtype of the layer's results.

        Cost: copies all updates of the layer.
        """
        self._lay_out({**self._updates, adapter: (a, b.t())})

    def remove(self, adapter: int) -> None:
        """Remove an adapter's update. Cost: copies the others."""
        self._lay_out({number: update for number, update in self._updates.items() if number != adapter})

    def _lay_out(self, updates: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Put updates side by side; each one's a [r, K] and b [r, N] are parts of the same memory."""
        if self._by_tile:
            self._updates = {number: (a.clone(), b.contiguous()) for number, (a, b) in updates.items()}
            return
        if not updates:
            self._layout, self._updates, self._a, self._b = (), {}, torch.empty(0), torch.empty(0)
            return
        self._layout = tuple((number, len(a)) for number, (a, _) in updates.items())
        self._a, self._b = (torch.cat(parts) for parts in zip(*updates.values(), strict=True))
        ranks = [rank for _, rank in self._layout]
        laid_out = zip(torch.split(self._a, ranks), torch.split(self._b, ranks), strict=True)
        self._updates = dict(zip(updates, laid_out, strict=True))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.base(input)
        if self._routing.groups and self._updates:
            self._add_updates(input.view(-1, input.shape[-1]), output.view(-1, output.shape[-1]))
        return output

    def _add_updates(self, input: Tensor, output: Tensor) -> None:
        """Add to output [T, N] the updates for input [T, K], in place."""
        expected = self._routing.num_tokens
        if expected is not None and len(input) != expected:
            raise ValueError(f"a layer with an adapter has {len(input)} tokens of a step of {expected}")
        present = [group for group in self._routing.groups if group.adapter in self._updates]
        if self._by_tile:
            for group in present:
                a, b = self._updates[group.adapter]
                output[group.tokens] += (F.linear(input, a) @ b)[group.tokens]
            return
        # At once, all adapters of the layer are read: at least half of them have to be in the step.
        if len(present) > 1 and len(input) <= MAX_TOKENS_AT_ONCE and 2 * len(present) >= len(self._layout):
            shrunk = F.linear(input, self._a)
            # Not a product with 0, which keeps another adapter's overflow.
            shrunk.masked_fill_(self._routing.foreign(self._layout, len(input)), 0)
            output.addmm_(shrunk, self._b)
            return
        for group in present:
            a, b = self._updates[group.adapter]
            if isinstance(group.tokens, slice):
                output[group.tokens].addmm_(F.linear(input[group.tokens], a), b)
            else:
                output.index_add_(0, group.tokens, F.linear(input.index_select(0, group.tokens), a) @ b)
