"""A copy of what is in the host tier and on the disk, which turns the answers of WatchBlocks into changes. Pure.

Copies of evicted blocks are known by their prefix hash alone: cachemgr keeps no tokens of them. So all that can be
found are published, also those that no prompt reaches because a block before them is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from quire.cache.v1 import cache_service_pb2 as pb

Medium: TypeAlias = "pb.Medium.ValueType"
MAX_HASHES = 4_096
"""Of one change."""


@dataclass(frozen=True, slots=True)
class CopiesStored:
    """Prefix hashes of copies that can be found now, in any order."""

    medium: Medium
    prefix_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CopiesRemoved:
    """Prefix hashes of copies that can't be found there any more."""

    medium: Medium
    prefix_hashes: tuple[bytes, ...]


CopyChange = CopiesStored | CopiesRemoved
Content = tuple[Medium, bytes]


class CopyReplica:
    """The copy: the prefix hash in each block of the media."""

    def __init__(self, media: Iterable[Medium] = ()) -> None:
        """Of these media; of none, it stays empty."""
        self.media = tuple(media)
        self._content_of: dict[tuple[Medium, int], bytes] = {}
        """By medium and block."""
        self._num_blocks: Counter[Content] = Counter()
        self._published: dict[Content, None] = {}
        self._touched: dict[Content, None] = {}
        """Those with another number of blocks than at the last moment."""

    def clear(self) -> None:
        """Forget every copy; consumers are told by AllCleared."""
        for each in (self._content_of, self._num_blocks, self._published, self._touched):
            each.clear()

    def enter(self, event: pb.BlockEvent) -> None:
        """Enter the event of a copy."""
        place = event.medium, event.block.block_id
        if before := self._content_of.pop(place, b""):
            self._count((event.medium, before), -1)
        if prefix_hash := event.block.prefix_hash:
            self._content_of[place] = prefix_hash
            self._count((event.medium, prefix_hash), 1)

    def _count(self, content: Content, change: int) -> None:
        self._num_blocks[content] += change
        self._touched[content] = None

    @property
    def has_changed(self) -> bool:
        """True if an event was entered since the last moment."""
        return bool(self._touched)

    def end_moment(self) -> list[CopyChange]:
        """Return the changes since the last moment."""
        stored = [each for each in self._touched if self._num_blocks[each] and each not in self._published]
        removed = [each for each in self._touched if not self._num_blocks[each] and each in self._published]
        for content in [each for each in self._touched if not self._num_blocks[each]]:
            del self._num_blocks[content]
        self._touched.clear()
        self._published.update(dict.fromkeys(stored))
        for content in removed:
            del self._published[content]
        changes: list[CopyChange] = [CopiesStored(*each) for each in _by_medium(stored)]
        return changes + [CopiesRemoved(*each) for each in _by_medium(removed)]

    def all(self) -> Iterator[CopiesStored]:
        """Yield all copies, for a consumer that has none."""
        yield from (CopiesStored(*each) for each in _by_medium(self._published))


def _by_medium(contents: Iterable[Content]) -> Iterator[tuple[Medium, tuple[bytes, ...]]]:
    """Yield the prefix hashes of each medium, at most MAX_HASHES together."""
    hashes: dict[Medium, list[bytes]] = {}
    for medium, prefix_hash in contents:
        hashes.setdefault(medium, []).append(prefix_hash)
    for medium, those in hashes.items():
        for first in range(0, len(those), MAX_HASHES):
            yield medium, tuple(those[first : first + MAX_HASHES])
