"""The cost of operations against unrelated sizes: the pool, other leases, sequences, cached chains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from core import Core, Crowd
from own_rows import empty_step
from workload import ROWS, Rows

BASE_BLOCKS = 100_000
Series = dict[str, dict[int, dict[str, list[float]]]]

AXES: dict[str, tuple[tuple[int, ...], Callable[[int], tuple[int, Crowd]]]] = {
    "blocks in the pool": ((1_000, 10_000, 100_000, 1_000_000), lambda count: (count, Crowd())),
    "leases": ((1, 10, 100, 1_000), lambda count: (BASE_BLOCKS, Crowd(num_leases=count))),
    "sequences of the lease": ((10, 100, 1_000, 10_000), lambda count: (BASE_BLOCKS, Crowd(num_sequences=count))),
    "cached chains": ((10, 100, 1_000, 5_000), lambda count: (BASE_BLOCKS, Crowd(num_chains=count))),
}
"""Values of each axis, and the pool and its crowd for one. From 10,000 blocks on, half of a pool is cached prompts."""


def num_points() -> int:
    return sum(len(counts) for counts, _ in AXES.values())


def points() -> Iterator[tuple[str, int, int, Crowd]]:
    """Axis, value, blocks, crowd."""
    for axis, (counts, situation) in AXES.items():
        for count in counts:
            yield axis, count, *situation(count)


def measure_point(num_blocks: int, crowd: Crowd, *, repeats: int) -> dict[str, list[float]]:
    core = Core(num_blocks, crowd)
    rows = Rows(core, num_blocks, repeats=repeats)
    samples = empty_step(rows, core)
    for name in ROWS:
        if name != "full" or crowd == Crowd():
            samples[name] = getattr(rows, name)()
    return samples


def growth(series: dict[int, dict[str, list[float]]], row: str, *, base: int) -> float | None:
    """Cost at the largest value over that at `base`; None if the row was not measured."""
    if row not in series[base]:
        return None
    return statistics.median(series[max(series)][row]) / statistics.median(series[base][row])
