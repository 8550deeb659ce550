"""Routers: the choice of a pool for each request.

A router is a class with a method `place`. It is made once per run, with a random.Random that the run has seeded.
Those with a name:

    cost               the gateway's: quire.gateway.routing.choosing, unchanged
    round-robin        each pool in turn
    least-loaded       the pool with the fewest open requests
    power-of-two       the less loaded of two pools drawn at random
    prefix             the pool that holds most of the prompt, whatever its load
    consistent-hash    a ring of hashes of a prompt's first tokens
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from quire.gateway.routing.choosing import PoolLoad, cheapest


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as a router sees it.

    token_ids    of the prompt
    session      the number of its conversation
    max_tokens   as the caller gave it; None: it gave none
    at_s         the time, from the beginning of the run
    """

    token_ids: Sequence[int]
    tenant: str
    session: int
    max_tokens: int | None
    at_s: float


class PoolState(Protocol):
    """A pool as a router sees it.

    name           sorts as the pools' order
    num_open       requests that were sent there and have not ended
    num_pending    tokens of their prompts that were not there at their arrival, of those without a first token
    num_cached     tokens of the arriving prompt that the pool would find. Cost: a lookup in the pool's books
    load           all that the gateway's router knows of it; includes the lookup
    """

    @property
    def name(self) -> str: ...
    @property
    def num_open(self) -> int: ...
    @property
    def num_pending(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def load(self) -> PoolLoad: ...


class Router(Protocol):
    """The interface."""

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return one of the pools. They are in the same order each time."""
        ...


class ByCost:
    """The gateway's router: where the request costs least, by the pool's prefix cache and load."""

    def __init__(self, generator: random.Random) -> None:
        """Nothing is random."""

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return the cheapest pool; of equals, the first by name."""
        if len(pools) == 1:
            return pools[0]
        by_name = {pool.name: pool for pool in pools}
        return by_name[cheapest(((pool.name, pool.load) for pool in pools), len(request.token_ids))]


class RoundRobin:
    """Each pool in turn."""

    def __init__(self, generator: random.Random) -> None:
        self._next = -1

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return the pool after the last one."""
        self._next = (self._next + 1) % len(pools)
        return pools[self._next]


class LeastLoaded:
    """The fewest open requests."""

    def __init__(self, generator: random.Random) -> None:
        """Nothing is random."""

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return the pool with the fewest; of equals, the first."""
        return min(pools, key=_by_open)


class PowerOfTwo:
    """Two pools at random, and the less loaded of them."""

    def __init__(self, generator: random.Random) -> None:
        self._random = generator

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return one of two."""
        return min(self._random.sample(pools, min(2, len(pools))), key=_by_open)


class ByPrefix:
    """Most of the prompt; of equals, the fewest open requests."""

    def __init__(self, generator: random.Random) -> None:
        """Nothing is random."""

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return the pool that holds most."""
        return min(pools, key=lambda pool: (-pool.num_cached, pool.num_open))


class ConsistentHash:
    """A ring of points, several for each pool; a prompt goes to the next point after the hash of its first tokens."""

    _NUM_TOKENS, _NUM_POINTS = 256, 64

    def __init__(self, generator: random.Random) -> None:
        self._ring: list[tuple[int, int]] = []

    def place(self, request: Arrival, pools: Sequence[PoolState]) -> PoolState:
        """Return the pool of the next point."""
        if not self._ring:
            names = (
                (index, f"{pool.name}/{point}") for index, pool in enumerate(pools) for point in range(self._NUM_POINTS)
            )
            self._ring = sorted((_hash(name.encode()), index) for index, name in names)
        first = b"".join(token.to_bytes(4, "little") for token in request.token_ids[: self._NUM_TOKENS])
        at = bisect(self._ring, (_hash(first), len(pools)))
        return pools[self._ring[at % len(self._ring)][1]]


def _by_open(pool: PoolState) -> int:
    return pool.num_open


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


ROUTERS: Mapping[str, type[Router]] = MappingProxyType(
    {
        "cost": ByCost,
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "power-of-two": PowerOfTwo,
        "prefix": ByPrefix,
        "consistent-hash": ConsistentHash,
    }
)
