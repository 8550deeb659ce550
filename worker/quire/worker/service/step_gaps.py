"""The time between two steps in which the device neither ran a forward nor sampled, counted in buckets."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
"""Upper limits of the buckets; one more has longer gaps."""


class StepGaps:
    """Gaps since the process started. Adding one costs a search of 16 numbers."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, gap_s: float) -> None:
        """Count a gap between two steps that were computed one after the other."""
        self._counts[bisect_left(BOUNDS_S, gap_s)] += 1
        self.sum_s += gap_s

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets as Prometheus has them: the upper limit, and the gaps up to it."""
        limits = (*map(str, BOUNDS_S), "+Inf")
        return list(zip(limits, map(float, accumulate(self._counts)), strict=True))
