"""Bounds of a worker's adapters. Nothing heavy is imported here: the flags have them, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """Most adapters that a worker serves, their largest rank, and the bytes of the weights that it keeps of all."""

    max_adapters: int = 16
    max_rank: int = 128
    max_bytes: int = 4 << 30
    is_by_memory: bool = False
    """True if max_bytes has room for max_adapters of the largest rank, and --max-loras is more."""

    @property
    def count_limit(self) -> str:
        """The flag and its value by which there are no more adapters."""
        return f"--lora-memory {self.max_bytes}" if self.is_by_memory else f"--max-loras {self.max_adapters}"


DEFAULT_BOUNDS = AdapterBounds()
