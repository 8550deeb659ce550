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
    """Blocks that the tenant can always hold."""
    quota: int
    """While the tenant holds and caches more, its cached blocks are evicted before others'."""
    limit: int
    """The tenant never holds more."""
    pin_budget: int
    """The tenant never pins more."""
    keep_limit: int = 0
    """Breakpoints of the tenant's prompts never keep more."""
