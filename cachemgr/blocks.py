"""What a block of a pool can be, and how a pool's blocks are counted."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class BlockState(StrEnum):
    """Exactly one of them holds for each block at any time."""

    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"
    RETIRED = "retired"


class BlockCounts(NamedTuple):
    """Blocks by state; they add up to the pool's blocks without the null block."""

    free: int
    cached: int
    active: int
    retired: int


class HostBlockCounts(NamedTuple):
    """Blocks of the host tier by state; they add up to all of them."""

    free: int
    held: int
    retired: int
