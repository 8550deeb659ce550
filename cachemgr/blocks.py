"""What a block of a pool can be, and how many a tenant may take."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class BlockState(StrEnum):
    """Exactly one of them holds for each block at any time."""

    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"
    RETIRED = "retired"


class BlockShare(NamedTuple):
    """What a tenant may take of a pool, in blocks."""

    floor: int
    """It can always hold as many."""
    quota: int
    """While it holds and caches more, its cached blocks are evicted before others'."""
    limit: int
    """It never holds more."""
    pin_budget: int
    """It never pins more."""
