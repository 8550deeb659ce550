"""The words of the promise of WatchPools, each with its tests: copies of a random list of pools, in virtual time.

The catalog and WatchPools are the real ones, in this process. `framework/replica.py` says which word is broken. The
list's changes are found by comparing it before and after each thing that happens, without the journal.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from replica import BrokenPromise, PoolReplica, without_counts
from virtual_time import run_in_virtual_time

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr.catalog import AttachedPool, Catalog, Registration
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.pool_journal import PoolJournal
from quire.cachemgr.service.messages import encode_pool
from quire.cachemgr.service.watch import INTERVAL_S
from quire.cachemgr.service.watch_pools import watch_pools

NAMES = "abcdefg"
MAX_POOLS = 3
"""Of one answer: a snapshot has several."""
TOLERANCE_S = 1e-9
REST_S = 1.0
ADAPTERS: tuple[dict[str, bytes] | None, ...] = (None, {}, {"x": b"1" * 32}, {"x": b"2" * 32, "y": b"1" * 32})


def geometry(num_blocks: int = 9) -> Geometry:
    return Geometry(
        block_size=2,
        num_blocks=num_blocks,
        block_bytes=64,
        max_sequences=4,
        max_sequence_tokens=16,
        vocab_size=10,
        model="m",
        model_fingerprint="f",
    )


@dataclass
class World:
    """A catalog, and everything that changes its list, by seed."""

    draw: random.Random
    catalog: Catalog = field(default_factory=lambda: Catalog(1, verify=True))
    epochs: dict[str, int] = field(default_factory=dict)
    num_leases: int = 0
    changes: list[tuple[float, str]] = field(default_factory=list)
    """The time and the pool of each change that a watch tells."""

    def listed(self) -> list[pb.Pool]:
        return [encode_pool(pool) for pool in self.catalog.pools()]

    def do(self, happen: Callable[[], None]) -> None:
        """One thing happens, and its changes are noted."""
        before = {pool.name: without_counts(pool) for pool in self.listed()}
        happen()
        now = asyncio.get_running_loop().time()
        for pool in self.listed():
            if before.get(pool.name) != without_counts(pool):
                self.changes.append((now, pool.name))

    def has_changed(self, name: str, since: int) -> bool:
        return any(changed == name for _, changed in self.changes[since:])

    def step(self) -> None:
        draw, name = self.draw, self.draw.choice(NAMES)
        pool = next((each for each in self.catalog.pools() if each.ledger.pool == name), None)
        if pool is None:
            self.do(lambda: self.attach(name, new=True))
        elif not pool.is_attached:
            self.do(lambda: self.attach(name, new=draw.random() < 0.4, address=draw.choice("12")))
        else:
            happens: list[Callable[[], None]] = [
                lambda: self.catalog.detach(pool),
                lambda: self.attach(name, address=draw.choice("12")),  # on a newer stream
                lambda: self.catalog.set_adapters(pool, draw.choice(ADAPTERS)),
                lambda: self.open_lease(pool),
            ]
            self.do(draw.choice(happens))

    def attach(self, name: str, *, new: bool = False, address: str = "1") -> AttachedPool:
        epoch = self.epochs[name] = self.epochs.get(name, 0) + new
        registration = Registration(
            name, epoch, 0, 0, geometry(8 + epoch), address, adapters=self.draw.choice(ADAPTERS)
        )
        attached = self.catalog.register(registration, signing_key=b"k")
        assert isinstance(attached, AttachedPool)
        return attached

    def open_lease(self, pool: AttachedPool) -> None:
        """Changes the pool's counts alone."""
        self.num_leases += 1
        self.catalog.open_lease(pool, f"lease {self.num_leases}", ttl_s=1e9, now=0.0)


@dataclass
class Watcher:
    """A copy of the list, and the watches that keep it. Slow ones read slowly, stop, and go on."""

    world: World
    is_prompt: bool = True
    replica: PoolReplica = field(default_factory=PoolReplica)
    num_told: int = 0
    num_watches: int = 0
    num_parts: int = 0

    async def run(self) -> None:
        while True:
            await self.watch()
            await self.rest()

    async def rest(self) -> None:
        if not self.is_prompt:
            await asyncio.sleep(self.world.draw.choice([0.0, 0.01, 0.08]))

    async def watch(self) -> None:
        num_answers = 1 << 60 if self.is_prompt else self.world.draw.randint(1, 12)
        self.num_watches += 1
        self.replica.begin()
        async with aclosing(watch_pools(self.world.catalog, max_pools=MAX_POOLS)) as answers:
            async for answer in answers:
                self.take(answer)
                num_answers -= 1
                if num_answers <= 0:
                    return
                await self.rest()

    def take(self, answer: pb.WatchPoolsResponse) -> None:
        """Apply an answer at the moment when it was made."""
        world = self.world
        assert len(answer.pools) <= MAX_POOLS
        self.replica.apply(answer, num_changes=len(world.changes), has_changed=world.has_changed)
        if not answer.complete:
            self.num_parts += 1
            return
        self.replica.check(world.listed())
        now = asyncio.get_running_loop().time()
        late = [name for time, name in world.changes[self.num_told :] if now - time > INTERVAL_S + TOLERANCE_S]
        if late and self.is_prompt:
            raise BrokenPromise("bounded delay", f"changes of {late} are told after {now} s")
        self.num_told = len(world.changes)


async def live(world: World, watchers: list[Watcher], happen: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Let things happen while the watchers watch. In the end every copy is what is listed."""
    tasks = [asyncio.create_task(watcher.run()) for watcher in watchers]
    happening = asyncio.create_task(happen())
    try:
        await asyncio.wait([happening, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, happening):
            if task.done():
                task.result()
        await asyncio.sleep(REST_S)
        for watcher in watchers:
            if watcher.is_prompt:
                assert watcher.replica.is_complete
                watcher.replica.check(world.listed(), is_last=True)
    finally:
        for task in (*tasks, happening):
            task.cancel()
        await asyncio.wait([*tasks, happening])


@pytest.mark.parametrize("seed", range(8))
def test_all_words_hold_whatever_happens(seed: int) -> None:
    draw = random.Random(seed)

    async def test() -> None:
        world = World(draw)
        prompt, slow = Watcher(world), Watcher(world, is_prompt=False)

        async def happen() -> None:
            for _ in range(1500):
                world.step()
                await asyncio.sleep(draw.choice([0.0, 0.0, 0.001, 0.03]))

        await live(world, [prompt, slow], happen)
        assert prompt.replica.num_answers > 200
        assert (prompt.num_watches, slow.num_watches > 20) == (1, True)
        assert min(prompt.num_parts, slow.num_parts) > 20

    run_in_virtual_time(test())


# -- one word at a time -------------------------------------------------------------------------------------------


def told(answer: pb.WatchPoolsResponse) -> tuple[bool, list[str], bool]:
    return answer.cleared, [pool.name for pool in answer.pools], answer.complete


def test_an_empty_list_is_told_at_once_and_complete() -> None:
    async def test() -> None:
        async with aclosing(watch_pools(Catalog(1))) as answers:
            assert told(await anext(answers)) == (True, [], True)

    run_in_virtual_time(test())


def test_many_changes_of_a_pool_are_one_for_a_reader_that_is_busy() -> None:
    """Slow readers cost no memory: the answer after a pause has each pool once, as it is then."""

    async def test() -> None:
        world = World(random.Random(1))
        a, b = (world.attach(name, new=True) for name in "ab")
        async with aclosing(watch_pools(world.catalog)) as answers:
            assert told(await anext(answers)) == (True, ["a", "b"], True)
            for _ in range(1000):
                world.catalog.detach(b)
                world.catalog.detach(a)
                b = world.attach("b")
            answer = await anext(answers)
            assert told(answer) == (False, ["a", "b"], True)
            assert [pool.attached for pool in answer.pools] == [False, True]
            assert len(world.catalog.journal.since(0)) == 2

    run_in_virtual_time(test())


def test_a_pool_that_changes_between_the_parts_is_told_again_and_the_moment_ends_after_it() -> None:
    async def test() -> None:
        world = World(random.Random(1))
        pools = {name: world.attach(name, new=True) for name in "abcd"}
        async with aclosing(watch_pools(world.catalog, max_pools=3)) as answers:
            assert told(await anext(answers)) == (True, ["a", "b", "c"], False)
            world.catalog.detach(pools["a"])
            world.catalog.detach(pools["d"])
            assert told(await anext(answers)) == (False, ["a", "d"], True)

    run_in_virtual_time(test())


def test_counts_are_neither_told_nor_a_change() -> None:
    async def test() -> None:
        world = World(random.Random(1))
        pool = world.attach("a", new=True)
        async with aclosing(watch_pools(world.catalog)) as answers:
            (first,) = (await anext(answers)).pools
            assert first == without_counts(first) != encode_pool(pool)
            world.open_lease(pool)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(answers), REST_S)

    run_in_virtual_time(test())


def test_recovered_pools_are_in_the_first_answer(tmp_path: Path) -> None:
    """Resumable: after a warm restart the list is as before, without its workers."""

    async def test() -> None:
        saved = []

        def begin_state(pool: Any) -> Path:
            saved.append(pool)
            return tmp_path

        before = World(random.Random(1), Catalog(1, begin_state=begin_state))
        before.attach("a", new=True)
        after = Catalog(2)
        after.recover(saved[0], tmp_path, now=0.0)
        async with aclosing(watch_pools(after)) as answers:
            (pool,) = (await anext(answers)).pools
            assert (pool.name, pool.epoch, pool.attached) == ("a", 1, False)

    run_in_virtual_time(test())


def test_nothing_is_left_of_a_watch_that_ended() -> None:
    async def test() -> None:
        catalog = Catalog(1)
        async with aclosing(watch_pools(catalog)) as answers:
            await anext(answers)
            assert len(catalog.journal.listeners) == 1
        assert not catalog.journal.listeners

    run_in_virtual_time(test())


def test_the_journal_has_the_last_change_of_each_pool_alone() -> None:
    journal = PoolJournal()
    for name in "abac":
        journal.touch(name)
    assert journal.since(0) == [("b", 2), ("a", 3), ("c", 4)]
    assert journal.since(2) == [("a", 3), ("c", 4)]
    assert journal.since(4) == []


# -- the judge ----------------------------------------------------------------------------------------------------


def answer(*pools: pb.Pool, cleared: bool = False, complete: bool = True) -> pb.WatchPoolsResponse:
    return pb.WatchPoolsResponse(cleared=cleared, pools=pools, complete=complete)


def one(epoch: int = 1, term: int = 1, **fields: Any) -> pb.Pool:
    return pb.Pool(name="a", epoch=epoch, term=term, **fields)


BEGUN = answer(one(), cleared=True)
BROKEN: dict[str, tuple[str, list[tuple[pb.WatchPoolsResponse, list[pb.Pool]]]]] = {
    "the first answer does not clear": ("resumable", [(answer(one()), [one()])]),
    "a later one does": ("resumable", [(BEGUN, [one()]), (BEGUN, [one()])]),
    "a term goes back": ("ordered", [(answer(one(term=2), cleared=True), [one(term=2)]), (answer(one()), [one()])]),
    "an epoch comes back": (
        "ordered",
        [(BEGUN, [one()]), (answer(one(2)), [one(2)]), (answer(one(1)), [one(1)])],
    ),
    "a pool twice": ("unique", [(answer(one(), one(), cleared=True), [one()])]),
    "a change is told again": ("unique", [(BEGUN, [one()]), (answer(one()), [one()])]),
    "a change is left out": ("reliable", [(BEGUN, []), (answer(), [])]),
    "a moment is cut": ("atomic", [(BEGUN, [one(attached=True)]), (answer(one(attached=True)), [one(attached=True)])]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_broken_word_is_named(what: str) -> None:
    word, moments = BROKEN[what]
    replica = PoolReplica()
    with pytest.raises(BrokenPromise) as broken:  # noqa: PT012
        for told_now, listed in moments:
            has_changed = word != "unique"
            replica.apply(told_now, num_changes=1, has_changed=lambda name, since, changed=has_changed: changed)
            replica.check(listed)
    assert broken.value.word == word
