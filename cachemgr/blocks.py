"""The states of a pool's blocks, and a tenant's share of them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class BlockState(StrEnum):
    """The state of a block; each block has exactly one at any time."""

    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"
    RETIRED = "retired"


class BlockShare(NamedTuple):
    """A tenant's share of a pool, in blocks."""

    floor: int
    """It can always hold as many."""
    quota: int
    """While it holds and caches more, its cached blocks are evicted before others'."""
    limit: int
    """It never holds more."""
    pin_budget: int
    """It never pins more."""
