"""Watches of a catalog's pools, in process: the answers and their times, and the state after the end of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from deadlines import DEADLINE_S
from planning import StepOutcome, StepRequest, plan_step, report_of
from unit.cachemgr.test_looking import admit, attach, cache

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import Ledger
from quire.cachemgr.blocks import BlockShare
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.service.messages import int32_bytes
from quire.cachemgr.service.watch import INTERVAL_S, Changes, Place, View, watch_blocks

ALL = View(tenant=None, with_content=False)
POOL = "p"
EPOCH = 5
Answer = cache_service_pb2.WatchBlocksResponse
Watch = Any


@asynccontextmanager
async def watching(
    catalog: Catalog, view: View = ALL, *, cursor: str = "", clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[Watch]:
    async with aclosing(watch_blocks(catalog, POOL, view, cursor=cursor, clock=clock)) as answers:
        yield answers


async def soon(answers: Watch) -> Answer:
    """The next answer."""
    answer: Answer = await asyncio.wait_for(anext(answers), DEADLINE_S)
    return answer


def told(answer: Answer) -> list[tuple[int, int, int]]:
    return [(event.kind, event.block.block_id, event.block.state) for event in answer.events]


def churn(ledger: Ledger) -> None:
    """Every block changes a few times, and is free again."""
    admit(ledger, "a", 1, *range(16))
    plan_step(ledger, "a", StepRequest(releases=[1]), now=0.0)
    for step in ledger.probe.steps_in_flight("a"):
        ledger.settle(report_of("a", step.step_number, StepOutcome.SKIPPED))


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(1, policy="lru")


@pytest.fixture
def pool(catalog: Catalog) -> AttachedPool:
    """With a lease of alice's and one of bob's."""
    pool = attach(catalog, POOL, epoch=EPOCH)
    for lease_id, tenant in (("a", "alice"), ("b", "bob")):
        catalog.open_lease(pool, lease_id, ttl_s=10.0, now=0.0, tenant=tenant)
    return pool


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_a_snapshot_then_changes_each_with_a_cursor_behind_it(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        cache(pool.ledger, "a", 1, 2, 3)
        async with watching(catalog) as answers:
            first = await soon(answers)
            assert (first.epoch, first.cleared, told(first)) == (EPOCH, True, [(1, 1, 2)])
            admit(pool.ledger, "b", 1, 4)
            second = await soon(answers)
            assert (second.epoch, second.cleared, told(second)) == (EPOCH, False, [(3, 2, 3)])
            assert Place.of(second.cursor) == Place(EPOCH, (pool.ledger.inspector.num_changes(),))
        async with watching(catalog, cursor=first.cursor) as answers:
            assert await soon(answers) == second

    run(test)


def test_changes_that_are_lost_are_not_passed_over(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        changes = Changes(pool.ledger, ALL, (0,))
        while pool.ledger.inspector.num_changes() <= pool.ledger.inspector.num_changes_kept():
            churn(pool.ledger)
        with pytest.raises(CallRefused) as refused:
            changes.next()
        assert refused.value.refusal.reason is Reason.CURSOR_EXPIRED

    run(test)


def test_what_changes_within_a_moment_is_told_together(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with watching(catalog) as answers:
            await soon(answers)
            admit(pool.ledger, "a", 1, 1)
            await soon(answers)
            begun = loop.time()
            following = asyncio.ensure_future(soon(answers))
            for seq_id in range(2, 6):
                admit(pool.ledger, "a", seq_id, 1)
                await asyncio.sleep(0)
            assert [block for _, block, _ in told(await following)] == [2, 3, 4, 5]
            assert loop.time() - begun > INTERVAL_S / 2

    run(test)


def test_an_idle_watch_waits(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        async with watching(catalog) as answers:
            await soon(answers)
            admit(pool.ledger, "a", 1, 1)
            await soon(answers)
            following = asyncio.ensure_future(anext(answers))
            begun = time.process_time()
            done, _ = await asyncio.wait([following], timeout=10 * INTERVAL_S)
            assert not done
            assert time.process_time() - begun < 5 * INTERVAL_S
            following.cancel()
            await asyncio.wait([following])

    run(test)


def test_a_watch_is_told_of_a_pin_that_ends_though_nobody_calls(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        cache(pool.ledger, "a", 1, 2, 3)
        pool.ledger.set_shares(BlockShare(0, 8, 8, 8), {})
        async with watching(catalog, clock=clock) as answers:
            await soon(answers)
            for ttl_s in (0.01, 0.05):
                pool.ledger.pin_prefix(int32_bytes([1, 2, 3]), salt=b"", tenant="alice", ttl_s=ttl_s, now=clock())
                pins = (await soon(answers)).events[-1].block.prefix_pin_count
                assert pins == 1 or pool.ledger.inspector.next_end() is None
                if pins:
                    (ended,) = (await soon(answers)).events
                    assert (ended.block.block_id, ended.block.prefix_pin_count) == (1, 0)

    run(test)


def test_what_was_looked_at_is_not_looked_at_again(pool: AttachedPool) -> None:
    async def test() -> None:
        changed, changes = asyncio.Event(), Changes(pool.ledger, View(None, with_content=False), (0,))
        assert changes.next() is None
        changed.set()
        await changes.pause(changed, lambda: 0.0)
        assert changes.next() is None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changes.pause(changed, lambda: 0.0), 3 * INTERVAL_S)

    run(test)


def test_a_new_epoch_begins_with_a_snapshot_of_it(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        admit(pool.ledger, "a", 1, 1)
        async with watching(catalog) as answers:
            cursor = (await soon(answers)).cursor
            following = asyncio.ensure_future(soon(answers))
            await asyncio.sleep(0)
            pool.is_attached = False
            again = attach(catalog, POOL, epoch=EPOCH + 1)
            answer = await following
            assert (answer.epoch, answer.cleared, told(answer)) == (EPOCH + 1, True, [])
            plan_step(again.ledger, "a", StepRequest(), now=0.0)
            async with watching(catalog, cursor=cursor) as late:
                assert await soon(late) == answer

    run(test)


def test_a_place_that_was_overwritten_is_refused(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        async with watching(catalog) as answers:
            cursor = (await soon(answers)).cursor
            while pool.ledger.inspector.num_changes() <= pool.ledger.inspector.num_changes_kept():
                churn(pool.ledger)
            with pytest.raises(CallRefused) as refused:
                await soon(answers)
            assert refused.value.refusal.reason is Reason.CURSOR_EXPIRED
        async with watching(catalog, cursor=cursor) as answers:
            with pytest.raises(CallRefused):
                await soon(answers)

    run(test)


def test_who_sees_nothing_gets_a_new_cursor_now_and_then(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        async with watching(catalog, View(tenant="bob", with_content=False)) as answers:
            await soon(answers)
            following = asyncio.ensure_future(soon(answers))
            while not following.done():
                churn(pool.ledger)
                await asyncio.sleep(0)
            answer = await following
            assert (list(answer.events), answer.cleared) == ([], False)
            place = Place.of(answer.cursor)
            assert place is not None
            assert place.numbers[0] > pool.ledger.inspector.num_changes_kept() // 4

    run(test)


def test_content_is_told_to_watchers_that_come_late(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        reading = View(tenant="alice", with_content=True)
        async with watching(catalog, reading) as answers:
            await soon(answers)
            cache(pool.ledger, "a", 1, 2, 3)
            (stored, _) = (await soon(answers)).events
            assert list(stored.token_ids) == [1, 2]
        async with watching(catalog) as blind:
            assert not (await soon(blind)).events[0].token_ids
        async with watching(catalog, reading) as late:
            assert list((await soon(late)).events[0].token_ids) == [1, 2]
        pool.ledger.keep_contents(False)
        with pytest.raises(CallRefused) as refused:
            async with watching(catalog, reading) as never:
                await soon(never)
        assert refused.value.refusal.reason == Reason.INVALID_ARGUMENT

    run(test)


def test_nothing_is_left_of_a_watch_that_ended(catalog: Catalog, pool: AttachedPool) -> None:
    async def test() -> None:
        async with watching(catalog) as answers:
            await soon(answers)
            assert len(catalog.listeners(POOL)) == 1
        assert not catalog.listeners(POOL)

    run(test)


def test_a_cursor_is_as_it_was_given() -> None:
    for place in (Place(-(2**63), (0,)), Place(2**63 - 1, (2**64 - 1,)), Place(5, (1, 2, 3))):
        assert Place.of(place.cursor, num_media=len(place.numbers)) == place
    with pytest.raises(CallRefused, match="an earlier answer to the same question"):
        Place.of(Place(5, (1, 2)).cursor)
    assert Place.of("") is None
    with pytest.raises(CallRefused):
        Place.of("0")
