"""Changes of a pool as batches of KV events: divided, numbered, and replaced by a snapshot for slow subscribers."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from smg_grpc_proto.generated import common_pb2

from quire.integrations.kv_events.replica import ROOT, AllCleared, BlocksRemoved, BlocksStored, CachedBlock
from quire.integrations.shepherd import events
from quire.integrations.shepherd.events import MAX_UNSENT_TOKENS, EventBatches, Subscriber

BLOCK_SIZE = 16
# As long as no message may be: the limit of many gRPC clients.
MAX_BATCH_BYTES = 4 * 2**20


def chain(length: int, *, name: str = "a", salt: bytes = b"") -> BlocksStored:
    """Return a chain of blocks from a root."""
    blocks = tuple(
        CachedBlock(hashlib.sha256(f"{name}{i}".encode()).digest(), range(i, i + BLOCK_SIZE)) for i in range(length)
    )
    return BlocksStored(ROOT, blocks, "", salt)


def load() -> Any:
    return common_pb2.EngineLoad(running_requests=1)


def test_a_long_chain_is_divided_and_stays_one_chain() -> None:
    stored = chain(20_000)
    batches = list(EventBatches().changes([stored], load()))
    assert len(batches) > 1
    assert all(batch.ByteSize() < MAX_BATCH_BYTES for batch in batches)
    assert [batch.sequence_number for batch in batches] == list(range(1, len(batches) + 1))
    events = [event.stored for batch in batches for event in batch.events]
    blocks = [block for event in events for block in event.blocks]
    assert [list(block.token_ids) for block in blocks] == [list(block.token_ids) for block in stored.blocks]
    assert not events[0].HasField("parent_block_hash")
    for before, after in itertools.pairwise(events):
        assert after.parent_block_hash == before.blocks[-1].block_hash
    assert {block.block_hash < 0 for block in blocks} == {True, False}


def test_many_removals_are_divided() -> None:
    hashes = tuple(block.prefix_hash for block in chain(100_000).blocks)
    batches = list(EventBatches().changes([BlocksRemoved(hashes)], load()))
    assert all(batch.ByteSize() < MAX_BATCH_BYTES for batch in batches)
    removed = [each for batch in batches for event in batch.events for each in event.removed.block_hashes]
    assert len(removed) == len(set(removed)) == len(hashes)


def test_a_snapshot_begins_with_a_clear_and_counts_its_chunks() -> None:
    stream = EventBatches()
    chunks = list(stream.snapshot([chain(6_000), chain(10, name="b")], load()))
    assert [(chunk.snapshot.index, chunk.snapshot.count) for chunk in chunks] == [(0, 2), (1, 2)]
    assert {chunk.snapshot.blocks for chunk in chunks} == {6_010}
    cleared = [event.HasField("cleared") for chunk in chunks for event in chunk.events]
    assert cleared[0]
    assert not any(cleared[1:])
    (empty,) = stream.snapshot([], load())
    assert (empty.sequence_number, empty.snapshot.count, empty.snapshot.blocks) == (3, 1, 0)
    assert empty.events[0].HasField("cleared")


def test_a_record_alone_repeats_the_number_of_the_batch_before_it() -> None:
    stream = EventBatches()
    (batch,) = stream.changes([chain(1)], load())
    records = [stream.heartbeat(load()) for _ in range(2)]
    assert [each.sequence_number for each in records] == [batch.sequence_number] * 2
    assert [each.load.sample for each in (batch, *records)] == [1, 2, 3]
    assert [each.load.load_only for each in (batch, *records)] == [False, True, True]


def test_blocks_with_a_salt_are_kept_from_requests_without_one() -> None:
    (batch,) = EventBatches().changes([chain(1), chain(1, name="b", salt=b"\xffs")], load())
    assert [event.stored.cache_salt for event in batch.events] == ["", "ff73"]
    assert not batch.events[0].stored.HasField("cache_salt")


def test_a_subscriber_gets_a_snapshot_first_and_after_each_clear() -> None:
    subscriber = Subscriber()
    subscriber.put([chain(1)])
    assert subscriber.needs_snapshot
    assert subscriber.take() == []
    subscriber.needs_snapshot = False
    subscriber.put([chain(2)])
    assert subscriber.take() == [chain(2)]
    subscriber.put([chain(3), AllCleared(), chain(1)])
    assert subscriber.needs_snapshot
    assert subscriber.take() == []


def test_a_slow_subscriber_gets_a_snapshot_instead_of_a_growing_list() -> None:
    subscriber = Subscriber()
    subscriber.needs_snapshot = False
    change = chain(1_000)
    num_puts = 0
    while not subscriber.needs_snapshot:
        subscriber.put([change])
        num_puts += 1
    assert (num_puts - 1) * events._size_of(change) <= MAX_UNSENT_TOKENS < num_puts * events._size_of(change)
    assert subscriber.take() == []
