"""Lengths of the sequences of one step, where they are not at the same point."""

from __future__ import annotations


def evenly(first: int, last: int, count: int) -> list[int]:
    """Lengths from the first to the last in equal steps, rounded down; the first alone if there is one."""
    return [first + (last - first) * number // max(1, count - 1) for number in range(count)]


def lengths_around(mean: int, count: int) -> list[int]:
    """Lengths with this mean, from a quarter of it on in equal steps; the mean alone if there is one."""
    return [mean] if count == 1 else evenly(mean // 4, 2 * mean - mean // 4, count)
