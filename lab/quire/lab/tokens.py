"""The tokens of a request, computed from spans of streams instead of stored. Pure.

A stream is a text without end: a conversation, a document, a block of a trace. The token at a position of a stream is
always the same, so two requests with the same span share a prefix. Tokens of different streams differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY_SIZE = 2**31 - 1
UNUSED_TOKEN = 0
"""In no stream."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Spans one after the other: parallel arrays of streams, first positions and numbers of tokens."""

    streams: Integers
    starts: Integers
    counts: Integers

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int, int]]) -> Content:
        """Content of (stream, first position, number of tokens)."""
        rows = np.array([span for span in spans if span[2]], dtype=np.int64).reshape(-1, 3)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2])

    @property
    def num_tokens(self) -> int:
        """Tokens of all spans."""
        return int(self.counts.sum())

    def cut(self, start: int, stop: int) -> Content:
        """The tokens from `start` to before `stop`, as far as there are any."""
        ends = np.cumsum(self.counts)
        begins = ends - self.counts
        low, high = np.clip(start, begins, ends), np.clip(stop, begins, ends)
        kept = low < high
        return Content(self.streams[kept], (self.starts + low - begins)[kept], (high - low)[kept])

    def __add__(self, other: Content) -> Content:
        pairs = ((self.streams, other.streams), (self.starts, other.starts), (self.counts, other.counts))
        return Content(*(np.concatenate(pair) for pair in pairs))

    def tokens(self) -> NDArray[np.int32]:
        """All tokens. Cost: O(tokens)."""
        ends = np.cumsum(self.counts)
        within = np.arange(self.num_tokens, dtype=np.int64) - np.repeat(ends - self.counts, self.counts)
        positions = (within + np.repeat(self.starts, self.counts)).astype(np.uint64)
        mixed = _mix((np.repeat(self.streams, self.counts).astype(np.uint64) << np.uint64(32)) ^ positions)
        return (mixed % np.uint64(VOCABULARY_SIZE - 1) + np.uint64(1)).astype(np.int32)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
