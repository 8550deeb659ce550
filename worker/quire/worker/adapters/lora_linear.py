"""A linear layer with the updates of several adapters, and which tokens of a step take which.

A step's tokens are packed, and those of one adapter need not lie together. A layer computes its base for all tokens,
and then adds the updates, in one of two ways:

    by adapter    for each adapter in the step two small products of its tokens. Other tokens take part in none
    at once       two batched products for all adapters of a rank, each with its tokens: the shorter ones are filled up

The second way has few operations, each of which takes some microseconds on a CPU. It is for few tokens of several
adapters: decode steps.

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
MOST_FILLED = 2
"""Most places at once, in tokens of the step."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A layer's updates of one rank r, of n adapters. The adapters' updates are views of its memory.

    numbers    the adapters, in their order
    a          [n, r, K]
    b          [n, r, N]
    """

    numbers: tuple[int, ...]
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """The tokens of n adapters in a step, m places for each.

    tokens     [n * m] int64: those of each adapter; places without one have token 0
    of_token   [T] int64: the place of each token; 0 for a token of another adapter or of none
    without    [T, 1] bool: True for these tokens; None if there are none
    """

    tokens: Tensor
    of_token: Tensor
    without: Tensor | None


@dataclass(slots=True)
class Routing:
    """The tokens of each adapter in the forward that runs now. All layers of a model share one."""

    groups: Sequence[AdapterTokens] = ()
    num_tokens: int | None = None
    """Tokens of the step; None: any number."""
    _places: dict[tuple[int, ...], Places | None] = field(default_factory=dict)

    @contextmanager
    def routed(self, groups: Sequence[AdapterTokens], num_tokens: int | None) -> Iterator[None]:
        """Route forwards within so."""
        before = self.groups, self.num_tokens
        self.groups, self.num_tokens, self._places = groups, num_tokens, {}
        try:
            yield
        finally:
            self.groups, self.num_tokens = before
            self._places = {}

    def places(self, numbers: tuple[int, ...], num_tokens: int) -> Places | None:
        """Return the places of the tokens of these adapters; None if their updates are better added by adapter.

        They are found once a step for all layers with these adapters.
        """
        if numbers not in self._places:
            self._places[numbers] = self._find_places(numbers, num_tokens)
        return self._places[numbers]

    def _find_places(self, numbers: tuple[int, ...], num_tokens: int) -> Places | None:
        tokens = {each.adapter: _indices(each.tokens, num_tokens) for each in self.groups if each.adapter in numbers}
        # The updates of all are read: at least half of them have to be in the step.
        if len(tokens) < 2 or num_tokens > MAX_TOKENS_AT_ONCE or 2 * len(tokens) < len(numbers):
            return None
        most = max(map(len, tokens.values()))
        if len(numbers) * most > MOST_FILLED * num_tokens:
            return None
        places: list[int] = []
        of_token = [-1] * num_tokens
        for number in numbers:
            own = tokens.get(number, ())
            for place, token in enumerate(own, len(places)):
                of_token[token] = place
            places += [*own, *[0] * (most - len(own))]
        found = torch.tensor(of_token)
        without = (found < 0)[:, None] if -1 in of_token else None
        return Places(torch.tensor(places), found.clamp_(min=0), without)


def _indices(tokens: slice | Tensor, num_tokens: int) -> Sequence[int]:
    return range(num_tokens)[tokens] if isinstance(tokens, slice) else tokens.tolist()


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
        self._updates: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacks: tuple[Stack, ...] = ()

    def add(self, adapter: int, a: Tensor, b: Tensor) -> None:
        """Add an adapter's update, b @ a: a [r, K], b [N, r], in the dtype of the layer's results.

        Cost: copies all updates of the layer.
        """
        self._lay_out({**self._updates, adapter: (a, b.t())})

    def remove(self, adapter: int) -> None:
        """Remove an adapter's update. Cost: copies the others."""
        self._lay_out({number: update for number, update in self._updates.items() if number != adapter})

    def _lay_out(self, updates: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Stack updates a [r, K] and b [r, N] of the same rank; each one's parts are views of the same memory."""
        if self._by_tile:
            self._updates = {number: (a.clone(), b.contiguous()) for number, (a, b) in updates.items()}
            return
        stacks: list[Stack] = []
        laid_out: dict[int, tuple[Tensor, Tensor]] = {}
        for rank in {len(a): None for a, _ in updates.values()}:
            chosen = {number: update for number, update in updates.items() if len(update[0]) == rank}
            stack = Stack(tuple(chosen), *(torch.stack(parts) for parts in zip(*chosen.values(), strict=True)))
            laid_out.update(zip(stack.numbers, zip(stack.a, stack.b, strict=True), strict=True))
            stacks.append(stack)
        self._updates, self._stacks = laid_out, tuple(stacks)

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
        for stack in self._stacks:
            places = self._routing.places(stack.numbers, len(input))
            if places is not None:
                _add_at_once(stack, places, input, output)
                present = [group for group in present if group.adapter not in stack.numbers]
        for group in present:
            a, b = self._updates[group.adapter]
            if isinstance(group.tokens, slice):
                output[group.tokens].addmm_(F.linear(input[group.tokens], a), b)
            else:
                output.index_add_(0, group.tokens, F.linear(input.index_select(0, group.tokens), a) @ b)


def _add_at_once(stack: Stack, places: Places, input: Tensor, output: Tensor) -> None:
    chosen = input.index_select(0, places.tokens).view(len(stack.numbers), -1, input.shape[-1])
    updates = torch.bmm(torch.bmm(chosen, stack.a.mT), stack.b).view(-1, output.shape[-1])
    updates = updates.index_select(0, places.of_token)
    if places.without is not None:
        # Not a product with 0, which keeps another token's overflow.
        updates.masked_fill_(places.without, 0)
    output.add_(updates)
