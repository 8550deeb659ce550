"""Changes of a pool as batches of KV events: divided, numbered, and replaced by a snapshot for slow subscribers.

A stream begins with a snapshot of the pool's blocks, and so does each recovery: when the pool has a new epoch or no
worker, and when a subscriber reads too slowly. So no cursor and no history is kept. smg takes the sequence numbers of a
snapshot as they are, so that each stream counts from 1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from smg_grpc_proto.generated import common_pb2

from quire.integrations.kv_events.replica import ROOT, AllCleared, BlocksRemoved, BlocksStored, Change

log = logging.getLogger(__name__)

MAX_UNSENT_TOKENS = 1_000_000
"""Tokens of stored blocks, and removed blocks, that wait for a subscriber. With more it gets a new snapshot."""

# Tokens of stored blocks, and removed blocks, in a message: at most 640 KiB.
_MAX_BATCH_TOKENS = 65_536


class Subscriber:
    """The changes that a stream of KV events has not sent yet."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._num_unsent_tokens = 0
        self.needs_snapshot = True
        self.news = asyncio.Event()

    def put(self, changes: Iterable[Change]) -> None:
        """Add changes. A subscriber that needs a snapshot anyway, or is told to clear, gets them with the snapshot."""
        self.news.set()
        for change in changes:
            self.needs_snapshot = self.needs_snapshot or isinstance(change, AllCleared)
            if not self.needs_snapshot:
                self._changes.append(change)
                self._num_unsent_tokens += _size_of(change)
        if self._num_unsent_tokens > MAX_UNSENT_TOKENS:
            log.warning("a subscriber of KV events reads too slowly: it gets a snapshot")
            self.needs_snapshot = True
        if self.needs_snapshot:
            self.take()

    def take(self) -> list[Change]:
        """Return the changes, and begin anew."""
        taken, self._changes = self._changes, []
        self._num_unsent_tokens = 0
        return taken


class EventBatches:
    """The batches of one stream, numbered from 1, each with a load record."""

    def __init__(self) -> None:
        self._sequence_number = 0
        self._num_events = 0
        self._num_records = 0

    def snapshot(self, chains: Iterable[BlocksStored], load: Any) -> Iterator[Any]:
        """Yield the chunks of a snapshot, one at least. They replace all blocks that the subscriber knows."""
        pieces = list(_pieces(chains)) or [[]]
        num_blocks = sum(len(change.blocks) for piece in pieces for change in piece if isinstance(change, BlocksStored))
        for index, piece in enumerate(pieces):
            events = [] if index else [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
            events += [_encode_change(change, event_id=0) for change in piece]
            chunk = common_pb2.KvSnapshotChunk(index=index, count=len(pieces), blocks=num_blocks)
            yield self._batch(events, load, snapshot=chunk)

    def changes(self, changes: Iterable[Change], load: Any) -> Iterator[Any]:
        """Yield the batches of some changes."""
        for piece in _pieces(changes):
            events = []
            for change in piece:
                self._num_events += 1
                events.append(_encode_change(change, event_id=self._num_events))
            yield self._batch(events, load)

    def heartbeat(self, load: Any) -> Any:
        """Return a batch with a load record alone; it has the number of the batch before it."""
        load.load_only = True
        self._sequence_number -= 1
        return self._batch([], load)

    def _batch(self, events: list[Any], load: Any, *, snapshot: Any = None) -> Any:
        self._sequence_number += 1
        self._num_records += 1
        load.sample = self._num_records
        return common_pb2.KvEventBatch(
            sequence_number=self._sequence_number,
            timestamp=time.time(),
            events=events,
            dp_rank=0,
            snapshot=snapshot,
            load=load,
        )


def _hash_of(prefix_hash: bytes) -> int:
    return int.from_bytes(prefix_hash[:8], "big", signed=True)


def _size_of(change: Change) -> int:
    """Return the tokens of stored blocks, or the number of removed ones."""
    match change:
        case BlocksStored(blocks=blocks):
            return sum(len(block.token_ids) for block in blocks)
        case BlocksRemoved(prefix_hashes=hashes):
            return len(hashes)
        case AllCleared():
            return 0


def _pieces(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Yield the changes in lists of at most _MAX_BATCH_TOKENS; longer changes are divided."""
    piece: list[Change] = []
    room = _MAX_BATCH_TOKENS
    for part in (part for change in changes for part in _divided(change)):
        size = _size_of(part)
        if piece and size > room:
            yield piece
            piece, room = [], _MAX_BATCH_TOKENS
        piece.append(part)
        room -= size
    if piece:
        yield piece


def _divided(change: Change) -> Iterator[Change]:
    match change:
        case BlocksStored(blocks=blocks):
            count = max(1, _MAX_BATCH_TOKENS // len(blocks[0].token_ids))
            for first in range(0, len(blocks), count):
                parent = blocks[first - 1].prefix_hash if first else change.parent_hash
                yield replace(change, parent_hash=parent, blocks=blocks[first : first + count])
        case BlocksRemoved(prefix_hashes=hashes):
            for first in range(0, len(hashes), _MAX_BATCH_TOKENS):
                yield BlocksRemoved(hashes[first : first + _MAX_BATCH_TOKENS])
        case AllCleared():
            yield change


def _encode_change(change: Change, *, event_id: int) -> Any:
    match change:
        case BlocksStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_encode_stored(change))
        case BlocksRemoved(prefix_hashes=hashes):
            removed = common_pb2.KvBlocksRemoved(
                block_hashes=list(map(_hash_of, hashes)), tier=common_pb2.KV_CACHE_TIER_DEVICE
            )
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case AllCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _encode_stored(change: BlocksStored) -> Any:
    """Return a message. A salt keeps blocks from requests of smg, which have none."""
    return common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=_hash_of(block.prefix_hash), token_ids=block.token_ids, block_size=len(block.token_ids)
            )
            for block in change.blocks
        ],
        parent_block_hash=None if change.parent_hash == ROOT else _hash_of(change.parent_hash),
        tier=common_pb2.KV_CACHE_TIER_DEVICE,
        cache_salt=change.salt.hex() or None,
    )
