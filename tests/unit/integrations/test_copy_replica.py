"""Copies in the host tier and on the disk, as consumers of `quire events` know them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import aclosing

import pytest
from unit.cachemgr.test_watch_promise import MAX_EVENTS, MEDIA, POOL, World, copies_of, geometry_of, numbers_now
from virtual_time import run_in_virtual_time

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr.service.watch import View, watch_blocks
from quire.integrations.kv_events import copies
from quire.integrations.kv_events.copies import CopiesRemoved, CopiesStored, CopyChange, CopyReplica
from quire.integrations.kv_events.replica import PrefixReplica

HOST, DISK = pb.MEDIUM_HOST, pb.MEDIUM_DISK


def stored(block_id: int, name: bytes, medium: pb.Medium.ValueType = HOST) -> pb.BlockEvent:
    block = pb.Block(block_id=block_id, state=pb.BLOCK_STATE_CACHED, prefix_hash=name)
    return pb.BlockEvent(kind=pb.BLOCK_EVENT_KIND_STORED, medium=medium, block=block)


def removed(block_id: int) -> pb.BlockEvent:
    block = pb.Block(block_id=block_id, state=pb.BLOCK_STATE_FREE)
    return pb.BlockEvent(kind=pb.BLOCK_EVENT_KIND_REMOVED, medium=HOST, block=block)


def entered(replica: CopyReplica, *events: pb.BlockEvent) -> list[CopyChange]:
    """The changes of a moment with these events."""
    for event in events:
        replica.enter(event)
    return replica.end_moment()


def test_a_copy_is_told_once_in_each_place() -> None:
    replica = CopyReplica([HOST, DISK])
    changes = entered(replica, stored(0, b"a"), stored(1, b"b"), stored(0, b"a", DISK))
    assert changes == [CopiesStored(HOST, (b"a", b"b")), CopiesStored(DISK, (b"a",))]
    assert entered(replica, stored(2, b"a"), removed(0)) == [], "it has moved"
    assert entered(replica, stored(1, b"c"), removed(2)) == [
        CopiesStored(HOST, (b"c",)),
        CopiesRemoved(HOST, (b"b", b"a")),
    ]
    assert list(replica.all()) == [CopiesStored(DISK, (b"a",)), CopiesStored(HOST, (b"c",))]


def test_a_part_of_a_moment_is_not_published() -> None:
    replica = CopyReplica([HOST])
    replica.enter(stored(0, b"a"))
    assert (list(replica.all()), replica.has_changed) == ([], True)
    replica.clear()
    assert (replica.end_moment(), replica.has_changed) == ([], False)


def test_many_copies_are_several_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_HASHES", 2)
    changes = entered(CopyReplica([HOST]), *(stored(number, b"%d" % number) for number in range(5)))
    assert [len(change.prefix_hashes) for change in changes] == [2, 2, 1]


def applied(known: set[tuple[int, bytes]], changes: Iterable[CopyChange]) -> None:
    """A consumer applies changes, none of which tells it what it knows."""
    for change in changes:
        contents = {(change.medium, each) for each in change.prefix_hashes}
        if isinstance(change, CopiesStored):
            assert not contents & known
            known |= contents
        else:
            assert contents <= known
            known -= contents


@pytest.mark.parametrize("seed", range(2))
def test_consumers_know_the_copies_of_a_pool_that_changes_at_random(seed: int) -> None:
    draw = random.Random(seed)

    async def test() -> None:
        world, replica, prefixes = (
            World(draw, geometry_of((), num_blocks=29)),
            CopyReplica([HOST, DISK]),
            PrefixReplica(),
        )
        known: set[tuple[int, bytes]] = set()
        seen: set[int] = set()
        view = View(None, with_content=True, media=MEDIA)
        answers = watch_blocks(world.catalog, POOL, view, cursor="", clock=world.now, max_events=MAX_EVENTS)
        async with aclosing(answers):
            for number in range(150):
                before = numbers_now(world.ledger)
                for _ in range(draw.randrange(8)):
                    world.step()
                if number % 50 == 30:
                    world.begin_epoch()
                if number and numbers_now(world.ledger) == before:
                    continue
                async for answer in answers:
                    if answer.cleared:
                        replica.clear()
                        known.clear()
                    for event in answer.events:
                        if event.medium:
                            replica.enter(event)
                    prefixes.apply(answer)
                    if answer.cursor:
                        break
                applied(known, replica.end_moment())
                listed = copies_of(world.ledger, None, MEDIA)
                assert known == {(medium, block.prefix_hash) for (medium, _), block in listed.items()}
                late: set[tuple[int, bytes]] = set()
                applied(late, replica.all())
                assert late == known
                seen |= {medium for medium, _ in known}
                await asyncio.sleep(0)
        assert seen == {HOST, DISK}

    run_in_virtual_time(test())
