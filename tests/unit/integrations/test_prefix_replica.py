"""PrefixReplica: consumers that apply its changes have the blocks that a prompt can find, whatever cachemgr sends."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from hashlib import sha256

import pytest

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.integrations.kv_events.layout import Layout
from quire.integrations.kv_events.replica import (
    ROOT,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CachedBlock,
    Change,
    PrefixReplica,
    ReplicaStatistics,
)

FREE, ACTIVE = pb.BLOCK_STATE_FREE, pb.BLOCK_STATE_ACTIVE
STORED, REMOVED, CHANGED = pb.BLOCK_EVENT_KIND_STORED, pb.BLOCK_EVENT_KIND_REMOVED, pb.BLOCK_EVENT_KIND_CHANGED


def hash_of(*names: int) -> bytes:
    """Return the prefix hash of blocks by their names."""
    return sha256(bytes(names)).digest() if names else ROOT


def stored(block_id: int, *names: int, tenant: str = "alice", salt: bytes = b"", layer_group: int = 0) -> pb.BlockEvent:
    """A block with the content `names[-1]`, behind blocks with the others."""
    block = pb.Block(
        block_id=block_id, state=ACTIVE, prefix_hash=hash_of(*names), tenant=tenant, layer_group=layer_group
    )
    tokens = [names[-1], names[-1]]
    parent = hash_of(*names[:-1])
    return pb.BlockEvent(kind=STORED, block=block, token_ids=tokens, salt=salt, parent_prefix_hash=parent)


def removed(block_id: int) -> pb.BlockEvent:
    return pb.BlockEvent(kind=REMOVED, block=pb.Block(block_id=block_id, state=FREE))


def answer(*events: pb.BlockEvent, cleared: bool = False, is_part: bool = False) -> pb.WatchBlocksResponse:
    return pb.WatchBlocksResponse(epoch=1, cleared=cleared, events=events, cursor="" if is_part else "c")


def chain(*names: int, after: tuple[int, ...] = (), tenant: str = "alice", salt: bytes = b"") -> BlocksStored:
    """The change that stores blocks of one chain."""
    paths = [(*after, *names[: end + 1]) for end in range(len(names))]
    blocks = tuple(CachedBlock(hash_of(*path), array("i", [path[-1], path[-1]])) for path in paths)
    return BlocksStored(hash_of(*after), blocks, tenant, salt)


class Consumer:
    """An index of prefix hashes, as a router keeps it. Refuses what its rules do not allow."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case AllCleared():
                    self.parents.clear()
                case BlocksStored(parent_hash, blocks):
                    assert blocks
                    assert parent_hash == ROOT or parent_hash in self.parents, "a block comes after its parent"
                    for block in blocks:
                        assert block.prefix_hash not in self.parents, "a block is stored once"
                        self.parents[block.prefix_hash] = parent_hash
                        parent_hash = block.prefix_hash
                case BlocksRemoved(prefix_hashes):
                    for prefix_hash in prefix_hashes:
                        assert prefix_hash not in self.parents.values(), "a block goes before its parent"
                        del self.parents[prefix_hash]


def test_blocks_of_a_chain_are_one_change() -> None:
    replica = PrefixReplica()
    changes = replica.apply(answer(stored(1, 1), stored(2, 1, 2), stored(3, 1, 2, 3), stored(4, 1, 4), cleared=True))
    assert changes == [AllCleared(), chain(1, 2, 3), chain(4, after=(1,))]


def test_a_block_is_stored_once_all_before_it_are() -> None:
    replica = PrefixReplica()
    assert replica.apply(answer(stored(3, 1, 2, 3))) == []
    assert replica.apply(answer(stored(2, 1, 2))) == []
    assert replica.statistics().num_stranded == 2
    assert replica.apply(answer(stored(1, 1))) == [chain(1, 2, 3)]
    assert (replica.statistics().num_published, replica.statistics().num_stranded) == (3, 0)


def test_blocks_behind_a_removed_one_are_removed_before_it_and_come_back_with_it() -> None:
    replica = PrefixReplica()
    replica.apply(answer(stored(1, 1), stored(2, 1, 2), stored(3, 1, 2, 3)))
    assert replica.apply(answer(removed(2))) == [BlocksRemoved((hash_of(1, 2, 3), hash_of(1, 2)))]
    assert replica.apply(answer(stored(9, 1, 2))) == [chain(2, 3, after=(1,))]


def test_a_prefix_that_moves_to_another_block_is_no_change() -> None:
    replica = PrefixReplica()
    replica.apply(answer(stored(1, 1), stored(2, 1, 2)))
    assert replica.apply(answer(removed(1), stored(5, 1))) == []
    assert replica.apply(answer(stored(6, 1))) == []  # the journal can tell of a block later than of the next one
    assert replica.apply(answer(removed(5))) == []
    assert replica.apply(answer(removed(6))) == [BlocksRemoved((hash_of(1, 2), hash_of(1)))]


def test_new_content_of_a_block_removes_the_old_one() -> None:
    replica = PrefixReplica()
    replica.apply(answer(stored(1, 1)))
    assert replica.apply(answer(stored(1, 2))) == [chain(2), BlocksRemoved((hash_of(1),))]


def test_changes_of_state_and_repeated_events_are_no_changes() -> None:
    replica = PrefixReplica()
    replica.apply(answer(stored(1, 1)))
    held = pb.BlockEvent(kind=CHANGED, block=pb.Block(block_id=1, state=ACTIVE, prefix_hash=hash_of(1)))
    new = pb.BlockEvent(kind=CHANGED, block=pb.Block(block_id=2, state=ACTIVE))
    assert replica.apply(answer(held, new, stored(1, 1), removed(3))) == []


def test_tenant_and_salt_are_those_of_the_chain() -> None:
    replica = PrefixReplica()
    events = stored(1, 1, tenant="bob", salt=b"s"), stored(2, 1, 2, tenant="bob", salt=b"s")
    assert replica.apply(answer(*events)) == [chain(1, 2, tenant="bob", salt=b"s")]


def test_blocks_without_tokens_are_counted_and_not_published() -> None:
    replica = PrefixReplica()
    unknown = stored(1, 1)
    unknown.ClearField("token_ids")
    unknown.ClearField("parent_prefix_hash")
    assert replica.apply(answer(unknown, stored(2, 1, 2))) == []
    assert replica.statistics().num_unknown == 1
    assert replica.apply(answer(stored(1, 1))) == [chain(1, 2)]
    assert replica.statistics().num_unknown == 0


def test_a_late_consumer_gets_all_chains() -> None:
    replica = PrefixReplica()
    replica.apply(answer(stored(1, 1), stored(2, 1, 2), stored(3, 3), stored(4, 1, 4), stored(5, 9, 9)))
    assert list(replica.chains()) == [chain(1, 2), chain(4, after=(1,)), chain(3)]
    assert replica.clear() == [AllCleared()]
    assert list(replica.chains()) == []


class Pool:
    """Blocks with prefixes, drawn at random. A prefix is in one block at a time; the journal is that of a watch."""

    def __init__(self, draw: random.Random, num_blocks: int) -> None:
        self.draw = draw
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.num_blocks = num_blocks
        self.journal: list[int] = []

    def step(self) -> None:
        block_id = self.draw.randrange(self.num_blocks)
        self.prefix_of.pop(block_id, None)
        names = tuple(self.draw.randrange(2) for _ in range(self.draw.randint(1, 4)))
        if self.draw.random() < 0.6 and names not in self.prefix_of.values():
            self.prefix_of[block_id] = names
        self.journal.append(block_id)

    def event(self, block_id: int) -> pb.BlockEvent:
        return stored(block_id, *names) if (names := self.prefix_of.get(block_id)) else removed(block_id)

    def answers(self) -> Iterable[pb.WatchBlocksResponse]:
        """The changes since the last call, in parts; each has the state of now, and each block at most once."""
        while self.journal:
            size = self.draw.randint(1, len(self.journal))
            part, self.journal = self.journal[:size], self.journal[size:]
            yield answer(*map(self.event, dict.fromkeys(part)))

    def snapshot(self) -> Iterable[pb.WatchBlocksResponse]:
        self.journal.clear()
        held = sorted(self.prefix_of)
        half = len(held) // 2
        yield answer(*map(self.event, held[:half]), cleared=True)
        yield answer(*map(self.event, held[half:]))

    def findable(self) -> set[bytes]:
        prefixes = set(self.prefix_of.values())
        return {hash_of(*names) for names in prefixes if all(names[:end] in prefixes for end in range(1, len(names)))}


@pytest.mark.parametrize("seed", range(40))
def test_consumers_know_what_can_be_found(seed: int) -> None:
    draw = random.Random(seed)
    pool, replica, consumer = Pool(draw, draw.choice([4, 12, 40])), PrefixReplica(), Consumer()
    for _ in range(60):
        for _ in range(draw.randrange(20)):
            pool.step()
        for each in pool.snapshot() if draw.random() < 0.1 else pool.answers():
            consumer.apply(replica.apply(each))
        assert set(consumer.parents) == pool.findable()
        late = Consumer()
        late.apply(replica.chains())
        assert late.parents == consumer.parents
        assert replica.statistics().num_published == len(consumer.parents)


# -- moments ------------------------------------------------------------------------------------------------------


def test_parts_of_a_moment_are_one_list_of_changes() -> None:
    replica = PrefixReplica()
    assert replica.apply(answer(stored(1, 1), cleared=True, is_part=True)) == []
    assert list(replica.chains()) == []
    assert replica.apply(answer(stored(2, 1, 2), is_part=True)) == []
    assert replica.apply(answer()) == [AllCleared(), chain(1, 2)]
    assert replica.apply(answer(removed(1), is_part=True)) == []
    assert replica.apply(answer(stored(3, 1))) == [], "the content has moved to another block"


def test_what_is_cleared_within_a_moment_is_not_stored_later() -> None:
    replica = PrefixReplica()
    replica.apply(answer(stored(1, 1), cleared=True, is_part=True))
    assert replica.clear() == [AllCleared()]
    assert replica.apply(answer()) == []
    assert replica.statistics().num_published == 0


# -- layer groups -------------------------------------------------------------------------------------------------

FULL, WINDOW = (LayerGroupKind.FULL, 0), (LayerGroupKind.SLIDING, 5)
"""With blocks of two tokens, a token behind a full block sees the last two blocks of the window's group."""


def with_groups(*groups: tuple[LayerGroupKind, int]) -> PrefixReplica:
    return PrefixReplica(Layout(2, groups))


def test_a_prefix_is_published_when_every_group_has_what_the_next_token_sees() -> None:
    replica = with_groups(FULL, WINDOW)
    assert replica.apply(answer(stored(1, 1), stored(2, 1, 2), stored(3, 1, 2, 3))) == []
    assert replica.statistics().num_stranded == 3
    window = [stored(12, 1, 2, layer_group=1), stored(13, 1, 2, 3, layer_group=1)]
    assert replica.apply(answer(*window)) == [chain(1, 2, 3)]
    assert replica.apply(answer(removed(12))) == [BlocksRemoved((hash_of(1, 2, 3), hash_of(1, 2), hash_of(1)))]
    assert replica.apply(answer(stored(11, 1, layer_group=1))) == [chain(1)]
    assert replica.apply(answer(removed(1))) == [BlocksRemoved((hash_of(1),))]


def test_a_block_of_a_full_group_that_is_missing_strands_what_follows() -> None:
    replica = with_groups(FULL, WINDOW)
    both = [
        stored(number + 10 * group, 1, *range(2, number + 1), layer_group=group)
        for number in (1, 2, 3)
        for group in (0, 1)
    ]
    assert replica.apply(answer(*both)) == [chain(1, 2, 3)]
    assert replica.apply(answer(removed(2))) == [BlocksRemoved((hash_of(1, 2, 3), hash_of(1, 2)))]
    assert replica.apply(answer(stored(2, 1, 2))) == [chain(2, 3, after=(1,))]


def test_evicted_blocks_behind_the_only_window_stay_while_a_prompt_finds_what_follows() -> None:
    replica = with_groups(WINDOW)
    blocks = [stored(number, *range(1, number + 1)) for number in (1, 2, 3, 4)]
    assert replica.apply(answer(*blocks)) == [chain(1, 2, 3, 4)]
    assert replica.apply(answer(removed(1), removed(2))) == []
    assert replica.statistics() == ReplicaStatistics(num_published=4, num_stranded=0, num_unknown=0)
    late = Consumer()
    late.apply(replica.chains())
    assert set(late.parents) == {hash_of(*range(1, number + 1)) for number in (1, 2, 3, 4)}
    all_of_it = tuple(hash_of(*range(1, number + 1)) for number in (4, 3, 2, 1))
    assert replica.apply(answer(removed(3))) == [BlocksRemoved(all_of_it)]
    assert replica.statistics() == ReplicaStatistics(num_published=0, num_stranded=1, num_unknown=0)
    assert replica.apply(answer(blocks[2])) == [chain(1, 2, 3, 4)]
    replica.apply(answer(removed(3), removed(4)))
    assert replica.apply(answer(blocks[2], blocks[3])) == [], "nothing was cached behind blocks 1 and 2 meanwhile"
    assert replica.statistics().num_unconnected == 2


def test_blocks_that_follow_unknown_ones_are_counted() -> None:
    replica = with_groups(WINDOW)
    assert replica.apply(answer(stored(3, 1, 2, 3), stored(4, 1, 2, 3, 4), cleared=True)) == [AllCleared()]
    assert replica.statistics() == ReplicaStatistics(0, 0, 0, num_unconnected=2)
    assert replica.apply(answer(stored(2, 1, 2))) == []
    assert replica.apply(answer(stored(1, 1))) == [chain(1, 2, 3, 4)]
    assert replica.statistics().num_unconnected == 0


def test_the_same_content_in_two_groups_is_two_holders() -> None:
    replica = with_groups(FULL, FULL)
    assert replica.apply(answer(stored(1, 1))) == []
    assert replica.apply(answer(stored(2, 1, layer_group=1))) == [chain(1)]
    assert replica.apply(answer(stored(1, 1, layer_group=1))) == [BlocksRemoved((hash_of(1),))]
    assert replica.statistics() == ReplicaStatistics(0, 1, 0)
