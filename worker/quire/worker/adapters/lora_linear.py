"""A linear layer with the updates of several adapters, and which tokens of a step take which.

A step's tokens are packed, and those of one adapter need not lie together. A layer computes its base for all tokens.
Then it adds each adapter's update to the tokens of that adapter: two small products for each adapter in the step.
Tokens without an adapter take part in none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.memory.step_batch import AdapterTokens


@dataclass(slots=True)
class Routing:
    """The tokens of each adapter in the forward that runs now. All layers of a model share one."""

    groups: Sequence[AdapterTokens] = ()
    num_tokens: int | None = None
    """Tokens of the step; None: any number."""

    @contextmanager
    def routed(self, groups: Sequence[AdapterTokens], num_tokens: int | None) -> Iterator[None]:
        """Route forwards within so."""
        before = self.groups, self.num_tokens
        self.groups, self.num_tokens = groups, num_tokens
        try:
            yield
        finally:
            self.groups, self.num_tokens = before


class LoraLinear(nn.Module):
    """A linear layer and its updates by adapter; same arguments and results as the layer, inference only.

    input [1, T, K] with the tokens of a step in their order; returns [1, T, N]. Cost beside the base's: for each
    adapter in the step two products of its tokens, 2 * r * (K + N) operations a token.
    """

    def __init__(self, base: nn.Module, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self._routing = routing
        self._updates: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, adapter: int, a: Tensor, b: Tensor) -> None:
        """Add an adapter's update, b @ a: a [r, K], b [N, r], in the dtype of the layer's results."""
        self._updates[adapter] = (a, b)

    def remove(self, adapter: int) -> None:
        """Remove an adapter's update."""
        del self._updates[adapter]

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.base(input)
        if self._routing.groups:
            self._add_updates(input.view(-1, input.shape[-1]), output.view(-1, output.shape[-1]))
        return output

    def _add_updates(self, input: Tensor, output: Tensor) -> None:
        """Add to output [T, N] the updates for input [T, K], in place."""
        expected = self._routing.num_tokens
        if expected is not None and len(input) != expected:
            raise ValueError(f"a layer with an adapter has {len(input)} tokens of a step of {expected}")
        for group in self._routing.groups:
            update = self._updates.get(group.adapter)
            if update is None:
                continue
            a, b = update
            if isinstance(group.tokens, slice):
                output[group.tokens].addmm_(F.linear(input[group.tokens], a), b.t())
            else:
                output.index_add_(0, group.tokens, F.linear(F.linear(input.index_select(0, group.tokens), a), b))
