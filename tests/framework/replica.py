"""Copies of a pool's blocks and of the list of pools, made of the answers of WatchBlocks and WatchPools. Pure.

They know what a watch promises. The promise has six words. docs/reference/watch.md has a sentence for each.
BrokenPromise names the word that an answer, or a copy, breaks:

ordered         a later answer is never of an earlier moment
unique          a change is told once
reliable        no change is left out
atomic          with each answer that ends a moment, the copy is what ListBlocks or ListPools says at that moment
resumable       a watch of blocks with a cursor goes on after it; each watch of pools begins with all of them
bounded delay   a change is told in time; the caller has the times, and raises it

`BlockReplica.find` is LookupPrefix on the copy, by the words of docs/protocol.md alone: no code of the product computes
the hashes or the windows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import lt
from typing import Any

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb

FREE = pb.BLOCK_STATE_FREE
STORED, REMOVED, CHANGED = pb.BLOCK_EVENT_KIND_STORED, pb.BLOCK_EVENT_KIND_REMOVED, pb.BLOCK_EVENT_KIND_CHANGED

HOST, DISK = pb.MEDIUM_HOST, pb.MEDIUM_DISK
IN_POOL = pb.MEDIUM_UNSPECIFIED
"""The medium of events of the pool's blocks."""

Place = tuple[int, int]
"""A medium and a block there."""
HasChanged = Callable[[Place, int], bool]
"""Returns True if a block has changed since a number of changes of its medium."""


class BrokenPromise(AssertionError):
    """A word of the watch's promise does not hold."""

    def __init__(self, word: str, what: str) -> None:
        super().__init__(f"{word}: {what}")
        self.word = word


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a findable block, as an event had it."""

    token_ids: tuple[int, ...]
    salt: bytes
    parent_hash: bytes


def numbers_of(cursor: str) -> list[int]:
    """Return the numbers of changes before a cursor, of the pool and of each medium of copies."""
    return [int(cursor[begin : begin + 16], 16) for begin in range(16, len(cursor), 16)]


@dataclass
class Comparison:
    """Copies at the ends of moments, compared with what is listed then."""

    what: str
    wrong: set[Any] = field(default_factory=set)
    """The entries that differed at the last end of a moment."""

    def check(self, copy: Mapping[Any, Any], listed: Mapping[Any, Any], *, is_last: bool) -> None:
        """Compare a copy with the list. Raises BrokenPromise.

        is_last   all changes were told. Otherwise an entry that differs is judged with the next end of a moment: a
                  change that comes with it was cut off its moment, one that does not was left out.
        """
        wrong = {each for each in copy.keys() | listed.keys() if copy.get(each) != listed.get(each)}
        if cut := self.wrong - wrong:
            raise BrokenPromise(
                "atomic", f"{self.what} {sorted(cut)} were not as listed at the end of a moment, and are at the next"
            )
        if wrong and (is_last or wrong & self.wrong):
            raise BrokenPromise("reliable", f"{self.what} {sorted(wrong)} are not as they are listed")
        self.wrong = wrong


@dataclass
class PoolReplica:
    """The copy of the list, through any number of watches: `begin` each one, then `apply` its answers in order."""

    pools: dict[str, pb.Pool] = field(default_factory=dict)
    is_complete: bool = False
    num_answers: int = 0
    _is_first: bool = True
    _past_epochs: set[tuple[int, str, int]] = field(default_factory=set)
    _told_until: dict[str, int] = field(default_factory=dict)
    """By pool, the number of changes when it was told last in this watch."""
    _comparison: Comparison = field(default_factory=lambda: Comparison("pools"))

    def begin(self) -> None:
        """A new watch begins."""
        self._is_first, self.is_complete = True, False

    def apply(
        self,
        answer: pb.WatchPoolsResponse,
        *,
        num_changes: int | None = None,
        has_changed: Callable[[str, int], bool] | None = None,
    ) -> None:
        """Apply an answer. Raises BrokenPromise.

        num_changes   of the list, when the answer was made
        has_changed   finds pools that are told without a change since a number; without it only those told at once
        """
        if answer.cleared != self._is_first:
            raise BrokenPromise("resumable", f"cleared: {answer.cleared}, the first answer: {self._is_first}")
        self._is_first = False
        self.num_answers += 1
        if answer.cleared:
            self.pools.clear()
            self._told_until.clear()
            self._comparison.wrong.clear()
        names = [pool.name for pool in answer.pools]
        if len(set(names)) < len(names):
            raise BrokenPromise("unique", f"an answer has a pool twice: {sorted(names)}")
        for pool in answer.pools:
            self._check_order(pool)
            since = self._told_until.get(pool.name)
            if has_changed is not None and since is not None and not has_changed(pool.name, since):
                raise BrokenPromise("unique", f"pool {pool.name} has not changed since it was told")
            self.pools[pool.name] = pool
        if num_changes is not None:
            self._told_until.update(dict.fromkeys(names, num_changes))
        self.is_complete = answer.complete

    def _check_order(self, pool: pb.Pool) -> None:
        known = self.pools.get(pool.name)
        if known is not None and known.term > pool.term:
            raise BrokenPromise("ordered", f"term {pool.term} of pool {pool.name} after {known.term}")
        if (pool.term, pool.name, pool.epoch) in self._past_epochs:
            raise BrokenPromise("ordered", f"epoch {pool.epoch} of pool {pool.name} comes back")
        if known is not None and known.epoch != pool.epoch:
            self._past_epochs.add((known.term, known.name, known.epoch))

    def check(self, listed: Iterable[pb.Pool], *, is_last: bool = False) -> None:
        """Compare with ListPools at the end of a moment. Raises BrokenPromise."""
        self._comparison.check(self.pools, {pool.name: without_counts(pool) for pool in listed}, is_last=is_last)


def without_counts(pool: pb.Pool) -> pb.Pool:
    """Return a pool as a watch tells it."""
    told = pb.Pool()
    told.CopyFrom(pool)
    for name in ("block_counts", "lease_count", "sequence_count", "host_block_counts"):
        told.ClearField(name)
    return told


@dataclass
class BlockReplica:
    """The copy, through any number of watches: `begin` each one with `cursor`, then `apply` its answers in order."""

    media: Sequence[int] = (IN_POOL,)
    """Of its watches, in the order of their cursors' numbers."""
    blocks: dict[int, pb.Block] = field(default_factory=dict)
    copies: dict[Place, pb.Block] = field(default_factory=dict)
    """Copies of evicted blocks."""
    contents: dict[int, Content] = field(default_factory=dict)
    cursor: str = ""
    epoch: int | None = None
    num_answers: int = 0
    _past_epochs: set[int] = field(default_factory=set)
    _is_first: bool = True
    _told_until: dict[Place, int] = field(default_factory=dict)
    """Of the blocks that were told since the last cursor: the number of changes then."""
    _comparison: Comparison = field(default_factory=lambda: Comparison("blocks"))
    _comparison_of_copies: Comparison = field(default_factory=lambda: Comparison("copies"))

    def begin(self) -> str:
        """Return the cursor of a new watch: that of the last answer which had one."""
        self._is_first = True
        self._told_until.clear()
        return self.cursor

    def expire(self) -> None:
        """The cursor was refused: the next watch begins with a snapshot."""
        self.cursor = ""

    def apply(
        self,
        answer: pb.WatchBlocksResponse,
        *,
        num_changes: Mapping[int, int] | None = None,
        has_changed: HasChanged | None = None,
    ) -> None:
        """Apply an answer. Raises BrokenPromise.

        num_changes   by medium, when the answer was made
        has_changed   finds events about nothing; without it and num_changes only a block that is told twice at once
        """
        self._begin_epoch(answer)
        self._is_first = False
        self.num_answers += 1
        told = [(event.medium, event.block.block_id) for event in answer.events]
        if len(set(told)) < len(told):
            raise BrokenPromise("unique", f"an answer has a block twice: {sorted(told)}")
        for place, event in zip(told, answer.events, strict=True):
            if place[0] not in self.media:
                raise BrokenPromise("reliable", f"an event is about medium {place[0]}, asked for were {self.media}")
            if has_changed is not None:
                self._check_is_news(place, has_changed, cleared=answer.cleared)
            if event.medium == IN_POOL:
                self._apply_event(event)
            else:
                self._apply_copy(place, event)
        if num_changes is not None:
            self._told_until.update({place: num_changes[place[0]] for place in told})
        if answer.cursor:
            self._end_moment(answer.cursor)

    def _begin_epoch(self, answer: pb.WatchBlocksResponse) -> None:
        if not answer.cleared:
            if self.epoch != answer.epoch:
                raise BrokenPromise("ordered", f"epoch {answer.epoch} goes on, the copy is of {self.epoch}")
            return
        if answer.epoch in self._past_epochs:
            raise BrokenPromise("ordered", f"epoch {answer.epoch} comes back")
        if self.cursor and answer.epoch == self.epoch:
            raise BrokenPromise("resumable", f"a snapshot of epoch {answer.epoch} in place of what follows the cursor")
        if self.epoch not in (None, answer.epoch):
            self._past_epochs.add(self.epoch or 0)
        self.epoch, self.cursor = answer.epoch, ""
        for each in (self.blocks, self.contents, self.copies, self._told_until):
            each.clear()
        for comparison in (self._comparison, self._comparison_of_copies):
            comparison.wrong.clear()

    def _check_is_news(self, place: Place, has_changed: HasChanged, *, cleared: bool) -> None:
        if place in self._told_until:
            since = self._told_until[place]
        elif self.cursor and not cleared:
            since = numbers_of(self.cursor)[self.media.index(place[0])]
        else:
            return  # of a snapshot
        if not has_changed(place, since):
            raise BrokenPromise("unique", f"block {place[1]} of medium {place[0]} has not changed since it was told")

    def _apply_copy(self, place: Place, event: pb.BlockEvent) -> None:
        block = event.block
        is_gone = event.kind == REMOVED and block == pb.Block(block_id=block.block_id, state=FREE)
        is_there = event.kind == STORED and block.state == pb.BLOCK_STATE_CACHED and block.prefix_hash
        if not (is_gone or is_there) or event.token_ids:
            raise BrokenPromise("reliable", f"event {event.kind} of a copy in {place}, which is {block}")
        self.copies.pop(place, None)
        if is_there:
            self.copies[place] = block

    def _apply_event(self, event: pb.BlockEvent) -> None:
        block = event.block
        block_id = block.block_id
        known = self.blocks.get(block_id)
        has_content = bool(block.prefix_hash)
        if event.kind not in (STORED, REMOVED, CHANGED) or (
            event.kind != CHANGED and has_content == (event.kind == REMOVED)
        ):
            raise BrokenPromise("reliable", f"event {event.kind} of block {block_id}, content: {has_content}")
        if event.kind == CHANGED and block.prefix_hash != (known.prefix_hash if known else b""):
            raise BrokenPromise("reliable", f"the content of block {block_id} changed, and no event said so")
        if block.state == FREE and block != pb.Block(block_id=block_id, state=FREE):
            raise BrokenPromise("reliable", f"block {block_id} is free, and its event says more")
        if event.kind != CHANGED:
            self.contents.pop(block_id, None)
        if event.token_ids:
            self.contents[block_id] = Content(tuple(event.token_ids), event.salt, event.parent_prefix_hash)
        if block.state == FREE:
            self.blocks.pop(block_id, None)
            self.contents.pop(block_id, None)
        else:
            self.blocks[block_id] = block

    def _end_moment(self, cursor: str) -> None:
        numbers, before = numbers_of(cursor), numbers_of(self.cursor)
        if len(numbers) != len(self.media):
            raise BrokenPromise("resumable", f"cursor {cursor} is not one of {len(self.media)} media")
        if self.cursor and (numbers == before or any(map(lt, numbers, before))):
            raise BrokenPromise("ordered", f"cursor {cursor} after {self.cursor}")
        self.cursor = cursor
        self._told_until.clear()

    def check(
        self, listed: Mapping[int, pb.Block], copies: Mapping[Place, pb.Block] | None = None, *, is_last: bool = False
    ) -> None:
        """Compare with ListBlocks, and with copies, at the moment of the last cursor. Raises BrokenPromise."""
        self._comparison.check(self.blocks, listed, is_last=is_last)
        self._comparison_of_copies.check(self.copies, copies or {}, is_last=is_last)

    def find(self, token_ids: Sequence[int], *, tenant: str, salt: bytes, geometry: attach_pb2.PoolGeometry) -> int:
        """Return what LookupPrefix finds of a prompt, in tokens."""
        hashes = chain_of(token_ids[: len(token_ids) - 1], tenant=tenant, salt=salt, geometry=geometry)
        return num_found(hashes, self.prefixes(), geometry)

    def prefixes(self) -> set[tuple[int, bytes]]:
        """Return the layer groups and the prefix hashes of its blocks."""
        return {(block.layer_group, block.prefix_hash) for block in self.blocks.values() if block.prefix_hash}


def num_found(hashes: Sequence[bytes], known: set[tuple[int, bytes]], geometry: attach_pb2.PoolGeometry) -> int:
    """Return how many tokens of a prompt's full blocks are found if these prefixes are known."""
    size = geometry.block_size_tokens
    groups = geometry.layer_groups or [attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_FULL)]
    for num_blocks in range(len(hashes), 0, -1):
        firsts = [first_seen(group, num_blocks * size) // size for group in groups]
        needed = [(number, each) for number, first in enumerate(firsts) for each in hashes[first:num_blocks]]
        if known.issuperset(needed):
            return num_blocks * size
    return 0


def chain_of(token_ids: Sequence[int], *, tenant: str, salt: bytes, geometry: attach_pb2.PoolGeometry) -> list[bytes]:
    """Return the prefix hashes of a prompt's full blocks."""
    root = sha256(b"quire prefix v1")
    for part in (tenant.encode(), salt, geometry.model_fingerprint.encode()):
        root.update(struct.pack("<Q", len(part)) + part)
    parent, hashes, size = root.digest(), [], geometry.block_size_tokens
    for first in range(0, len(token_ids) - size + 1, size):
        parent = sha256(parent + struct.pack(f"<{size}i", *token_ids[first : first + size])).digest()
        hashes.append(parent)
    return hashes


def first_seen(group: attach_pb2.LayerGroup, position: int) -> int:
    """Return the first position that a token at a position sees in a group's layers."""
    window = group.window_token_count
    match group.kind:
        case attach_pb2.LAYER_GROUP_KIND_SLIDING:
            return max(0, position + 1 - window)
        case attach_pb2.LAYER_GROUP_KIND_CHUNKED:
            return position - position % window
    return 0
