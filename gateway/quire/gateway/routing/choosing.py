"""The choice among the pools of a model, for one request. Pure.

The cost of a pool is in tokens computed before and beside the request, were it sent there:

    tokens of the prompt that the pool does not hold
    tokens of other prompts that wait there to be computed
    tokens that open requests are expected to generate there: steps are shared with them
    an eighth of the tokens in blocks in use, by all clients of the pool; blocks that the request would share left out

So a pool that holds the prompt is chosen until its load exceeds another pool's by more than the prompt costs there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

# A token that is only read by attention, beside one that is computed.
_IN_USE_PART = 8
# Tokens that a sample is expected to generate before any has ended.
_FIRST_GUESS = 256.0


class BlockCounts(Protocol):
    """Blocks of a pool by their state, as in the message of this name."""

    free_count: int
    active_count: int
    retired_count: int
    cached_count: int


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The state of a pool that the choice depends on, in tokens.

    num_cached      of the prompt, found in the prefix cache
    num_pending     of prompts that this router has sent there, and that have no first token yet
    num_expected    that open requests of this router will probably generate there
    num_in_use      room in blocks that sequences of any client hold
    num_available   room in blocks that are free or can be evicted
    """

    num_cached: int = 0
    num_pending: int = 0
    num_expected: float = 0.0
    num_in_use: int = 0
    num_available: int = 0


def cost_of(load: PoolLoad, num_tokens: int) -> tuple[bool, float]:
    """Return the cost of a pool for a prompt of so many tokens; without room for it, more than any other cost."""
    missing = num_tokens - load.num_cached
    held = max(0, load.num_in_use - load.num_cached)
    return missing > load.num_available, missing + load.num_pending + load.num_expected + held / _IN_USE_PART


class OutputLength:
    """The number of tokens that a sample generates, of late."""

    def __init__(self) -> None:
        self._mean = _FIRST_GUESS

    def observe(self, num_tokens: int) -> None:
        """Count a sample that has ended."""
        self._mean += (num_tokens - self._mean) / 16

    def expected(self, max_tokens: int | None, num_samples: int) -> float:
        """Return the tokens that a request will probably generate."""
        each = self._mean if max_tokens is None else min(self._mean, float(max_tokens))
        return each * num_samples


@dataclass(slots=True)
class PoolUse:
    """The open requests of this router in one pool, in tokens."""

    num_pending: int = 0
    num_expected: float = 0.0
    num_open: int = 0

    def load(self, num_cached: int, counts: BlockCounts, block_size: int) -> PoolLoad:
        """Return the load of the pool for a prompt, with the pool's own counts of its blocks."""
        return PoolLoad(
            num_cached=num_cached,
            num_pending=self.num_pending,
            num_expected=self.num_expected,
            num_in_use=block_size * (counts.active_count + counts.retired_count),
            num_available=block_size * (counts.free_count + counts.cached_count),
        )


class OpenRequest:
    """The part of one request in the use of a pool. Enter it before the request begins, leave it when it ends."""

    __slots__ = ("_expected", "_pending", "_use")

    def __init__(self, use: PoolUse, *, num_missing: int, num_expected: float) -> None:
        """Count it. num_missing: tokens of its prompt that the pool does not hold."""
        self._use, self._pending, self._expected = use, num_missing, num_expected
        use.num_open += 1
        use.num_pending += num_missing
        use.num_expected += num_expected

    def begin_output(self) -> None:
        """Record the first token: the prompt is computed."""
        self._use.num_pending -= self._pending
        self._pending = 0

    def leave(self) -> None:
        """Count it no longer."""
        self.begin_output()
        self._use.num_open -= 1
        self._use.num_expected = self._use.num_expected - self._expected if self._use.num_open else 0.0


def cheapest(loads: Iterable[tuple[str, PoolLoad]], num_tokens: int) -> str:
    """Return the name of the pool that costs least; of equals, the first by name. Raises ValueError without pools."""
    return min((*cost_of(load, num_tokens), name) for name, load in loads)[-1]
