"""Bounds of a worker's adapters. Nothing heavy is imported here: the flags have them, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """Most adapters that a worker serves, their largest rank, and the bytes of the weights that it keeps of all."""

    max_adapters: int = 16
    max_rank: int = 128
    max_bytes: int = 4 << 30


DEFAULT_BOUNDS = AdapterBounds()
