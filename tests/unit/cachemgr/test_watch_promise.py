"""The words of the watch's promise, each with its tests: copies of pools that change at random, in virtual time.

The books, the catalog and WatchBlocks are the real ones, in this process. `framework/replica.py` says which word is
broken. Watchers read slowly, stop, and go on from their cursors; there are tenants, pins, advice, resets, epochs, a
host tier, copies of evicted blocks there and on a disk, and pools with every kind of layer group.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pages
import pytest
from planning import (
    Admission,
    CacheUse,
    ExpectedPrompt,
    Fork,
    Planned,
    Restore,
    Retention,
    ReturnHint,
    StepOutcome,
    StepRequest,
    Trim,
    plan_step,
    report_of,
    sequences_of,
)
from replica import DISK, HOST, IN_POOL, BlockReplica, BrokenPromise, Place, numbers_of
from virtual_time import run_in_virtual_time

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import Known, Ledger
from quire.cachemgr.blocks import BlockShare
from quire.cachemgr.catalog import AttachedPool, Catalog, Registration, SavedPool
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry, LayerGroup
from quire.cachemgr.service.messages import encode_geometry, int32_bytes
from quire.cachemgr.service.watch import INTERVAL_S, View, watch_blocks

POOL, TENANTS, SALTS = "p", ("alice", "bob"), (b"", b"s")
BLOCK_SIZE, MAX_TOKENS, VOCAB = 2, 24, 2
MAX_EVENTS = 5
"""Of one answer: most moments have several."""
NUM_STEPS = 700
MEDIA = ("device", "host", "disk")
MEDIUM_NUMBERS = dict(zip(MEDIA, (IN_POOL, HOST, DISK), strict=True))
TTL_S = 1e9
REST_S = 30.0
"""Virtual. In this time slow watchers read all that waits, and all pins and advice end."""
TOLERANCE_S = 1e-9


def group(kind: LayerGroupKind, window: int = 0) -> LayerGroup:
    return LayerGroup(kind, window, num_layers=1)


FULL, SLIDING, CHUNKED = (
    group(LayerGroupKind.FULL),
    group(LayerGroupKind.SLIDING, 5),
    group(LayerGroupKind.CHUNKED, 6),
)
GROUPS: dict[str, tuple[LayerGroup, ...]] = {
    "one full group": (),
    "only a window": (SLIDING,),
    "only chunks": (CHUNKED,),
    "full and window": (FULL, SLIDING),
    "full, full, chunks and a window of one token": (FULL, FULL, CHUNKED, group(LayerGroupKind.SLIDING, 1)),
}


def geometry_of(groups: Sequence[LayerGroup], *, num_blocks: int, num_host_blocks: int = 12) -> Geometry:
    return Geometry(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        block_bytes=64,
        max_sequences=64,
        max_sequence_tokens=MAX_TOKENS,
        vocab_size=VOCAB,
        model="m",
        model_fingerprint="f",
        num_host_blocks=num_host_blocks,
        layer_groups=tuple(groups),
        host_cached_limit=min(8, num_host_blocks),
        num_disk_blocks=min(10, num_host_blocks),
    )


def listed(ledger: Ledger, tenant: str | None) -> dict[int, pb.Block]:
    """ListBlocks without the free ones."""
    page, following = ledger.inspector.list_blocks(0, 10_000, state=None, tenant=tenant, lease_id=None)
    assert following is None
    blocks = pb.ListBlocksResponse.FromString(page).blocks
    return {block.block_id: block for block in blocks if block.state != pb.BLOCK_STATE_FREE}


def copies_of(ledger: Ledger, tenant: str | None, media: Sequence[str]) -> dict[Place, pb.Block]:
    """The copies of evicted blocks in these media, as the books have them."""
    probe = ledger.probe
    of_media = {"host": (HOST, probe.host_copies), "disk": (DISK, probe.disk_copies)}
    return {
        (number, copy): pb.Block(
            block_id=copy, state=pb.BLOCK_STATE_CACHED, prefix_hash=each, layer_group=group, tenant=owner
        )
        for number, copies in (of_media[medium] for medium in media[1:])
        for copy, each, group, owner, is_arriving in copies()
        if not is_arriving and tenant in (None, owner)
    }


def changed_since(ledger: Ledger, medium: str, number: int) -> set[int]:
    """The blocks that changed since a number of changes."""
    events = ledger.inspector.changes(Known(number), 1 << 24, tenant=None, with_content=False, medium=medium)
    assert events is not None
    return {event.block.block_id for event in pb.WatchBlocksResponse.FromString(events).events}


def numbers_now(ledger: Ledger, media: Sequence[str] = MEDIA) -> list[int]:
    """The changes so far, by medium."""
    return [ledger.inspector.num_changes(medium) for medium in media]


@dataclass
class World:
    """One pool, two leases of different tenants, and everything that is done with them, by seed."""

    draw: random.Random
    geometry: Geometry
    has_resets: bool = True
    begin_state: Callable[[SavedPool], Path | None] = lambda saved: None
    epoch: int = 1
    is_over: bool = False
    """Nothing happens any more."""
    num_sequences: int = 0
    prompts: list[tuple[str, bytes, list[int]]] = field(default_factory=list)
    changes: list[tuple[float, list[int]]] = field(default_factory=list)
    """The time of each change of the present epoch, and the numbers of changes after it."""

    def __post_init__(self) -> None:
        policy = self.draw.choice(["lru", "lineage"])
        self.catalog = Catalog(1, policy=policy, verify=True, begin_state=self.begin_state)
        self.pool = self.attach()
        self.in_flight: dict[str, list[Planned]] = {tenant: [] for tenant in TENANTS}
        for tenant in TENANTS:
            self.catalog.open_lease(self.pool, tenant, ttl_s=TTL_S, now=self.now(), tenant=tenant)

    @property
    def ledger(self) -> Ledger:
        return self.pool.ledger

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def attach(self) -> AttachedPool:
        registration = Registration(POOL, self.epoch, 0, 0, self.geometry, "nowhere")
        attached = self.catalog.register(registration, signing_key=b"k")
        assert isinstance(attached, AttachedPool)
        attached.ledger.set_shares(BlockShare(0, self.geometry.num_blocks, self.geometry.num_blocks, 4), {})
        return attached

    def begin_epoch(self) -> None:
        self.pool.is_attached = False
        self.epoch += 1
        self.pool = self.attach()
        self.changes.clear()
        for planned in self.in_flight.values():
            planned.clear()
        if self.geometry.num_disk_blocks:
            self.find_disk()

    def find_disk(self) -> None:
        """The worker of a new epoch says what is on its disk."""
        blocks = self.draw.sample(range(self.geometry.num_disk_blocks), 4)
        content = attach_pb2.DiskContent(
            disk_block_ids=blocks,
            prefix_hashes=self.draw.randbytes(32 * len(blocks)),
            tenants=TENANTS,
            tenant_indexes=[self.draw.randrange(len(TENANTS)) for _ in blocks],
            layer_groups=[self.draw.randrange(max(1, len(self.geometry.layer_groups))) for _ in blocks],
        )
        self.ledger.enter_disk_content(content.SerializeToString())

    def step(self) -> None:
        """One thing happens."""
        happens: dict[Callable[[], None], int] = {
            self.plan: 30,
            self.report: 30,
            self.pin: 3,
            self.unpin: 1,
            self.reset: int(self.has_resets),
            self.obey: 20 if self.geometry.num_disk_blocks else 0,
        }
        before = numbers_now(self.ledger)
        self.draw.choices(list(happens), list(happens.values()))[0]()
        self.note(before)

    def note(self, before: list[int]) -> None:
        if (numbers := numbers_now(self.ledger)) != before:
            self.changes.append((self.now(), numbers))

    def obey(self) -> None:
        """The worker carries out an order about the disk, or fails."""
        if orders := attach_pb2.DiskOrders.FromString(self.ledger.disk_orders(0) or b"").orders:
            number = [self.draw.choice(orders).order_number]
            is_done = self.draw.random() < 0.9
            report = attach_pb2.DiskReport(**{"done_order_numbers" if is_done else "failed_order_numbers": number})
            self.ledger.enter_disk_report(report.SerializeToString())

    def plan(self) -> None:
        draw, tenant = self.draw, self.draw.choice(TENANTS)
        if len(self.in_flight[tenant]) > 3:
            return
        present = sequences_of(self.ledger, tenant)
        in_pool = [each.seq_id for each in present if not each.is_offloaded]
        in_host = [each.seq_id for each in present if each.is_offloaded]
        released = [each.seq_id for each in present if draw.random() < 0.2]
        offloads = [each for each in in_pool if each not in released and draw.random() < 0.1]
        others = [each for each in in_pool if each not in released and each not in offloads]
        extended = [each for each in others if draw.random() < 0.6]
        trimmed = [each for each in others if draw.random() < 0.1]
        forked = [each for each in others if draw.random() < 0.1]
        request = StepRequest(
            releases=released,
            return_hints=[ReturnHint(each, draw.choice([None, 0.1, 5.0])) for each in released[::2]],
            offloads=offloads,
            expected_prompts=[self.expected()] if self.prompts and draw.random() < 0.2 else [],
            trims=[Trim(each, draw.randint(1, 4)) for each in trimmed],
            forks=[Fork(each, [self.new_id()], draw.randint(1, 4)) for each in forked],
            extend_ids=extended,
            extend_token_counts=[1] * len(extended),
            restores=[Restore(each) for each in in_host if each not in released and draw.random() < 0.5],
            admissions=[self.admission(tenant) for _ in range(draw.choice([0, 1, 1, 2]))],
        )
        self.in_flight[tenant].append(plan_step(self.ledger, tenant, request, now=self.now()))

    def new_id(self) -> int:
        self.num_sequences += 1
        return self.num_sequences

    def admission(self, tenant: str) -> Admission:
        draw = self.draw
        tokens, salt = self.prompt(), draw.choice(SALTS)
        self.prompts.append((tenant, salt, tokens))
        ranges = [Retention(4, draw.randint(1, 9), draw.choice([None, 0.03])), Retention(0, draw.randint(1, 9))]
        return Admission(
            self.new_id(),
            int32_bytes(tokens),
            max_compute=draw.choice([0, 0, 3]),
            salt=salt,
            waits_for_prefix=bool(self.geometry.num_disk_blocks) and draw.random() < 0.5,
            retention=draw.choice([[], ranges]),
            cache_use=draw.choice([CacheUse.READ_AND_WRITE] * 5 + [CacheUse.WRITE_ONLY, CacheUse.NONE]),
        )

    def prompt(self) -> list[int]:
        """Half of the prompts begin as an earlier one does."""
        begin = self.draw.choice(self.prompts[-12:])[2] if self.prompts and self.draw.random() < 0.5 else []
        begin = begin[: self.draw.randint(0, len(begin))]
        length = self.draw.randint(len(begin) + 1, MAX_TOKENS - 2) if len(begin) < MAX_TOKENS - 2 else len(begin)
        return begin + [self.draw.randrange(VOCAB) for _ in range(length - len(begin))]

    def expected(self) -> ExpectedPrompt:
        _, salt, tokens = self.draw.choice(self.prompts[-20:])
        return ExpectedPrompt(int32_bytes(tokens), self.draw.choice([0.02, 1.0]), salt)

    def report(self) -> None:
        """The oldest step in flight of a lease ends; if it computes nothing, those behind it fail with it."""
        tenant = self.draw.choice(TENANTS)
        planned = self.in_flight[tenant]
        if planned and self.draw.random() < 0.15:
            for plan in planned:
                self.ledger.settle(report_of(tenant, plan.step_number, StepOutcome.FAILED))
            planned.clear()
        elif planned:
            self.report_first(tenant)

    def report_first(self, tenant: str) -> None:
        """The oldest step in flight of a lease is computed."""
        plan = self.in_flight[tenant].pop(0)
        sampled = [each for each, samples in zip(plan.run_seq_ids, plan.run_samples, strict=True) if samples]
        ends = [start + count for start, count in zip(plan.run_starts, plan.run_token_counts, strict=True)]
        report = report_of(
            *(tenant, plan.step_number, StepOutcome.COMPUTED),
            seq_ids=plan.run_seq_ids,
            token_counts=ends,
            sampled_ids=sampled,
            sampled_tokens=[self.draw.randrange(VOCAB) for _ in sampled],
        )
        self.ledger.settle(report)

    def pin(self) -> None:
        if self.prompts:
            tenant, salt, tokens = self.draw.choice(self.prompts[-20:])
            ttl_s = self.draw.choice([0.03, 5.0])
            with suppress(CallRefused):
                self.ledger.pin_prefix(int32_bytes(tokens), salt=salt, tenant=tenant, ttl_s=ttl_s, now=self.now())

    def unpin(self) -> None:
        for pin in self.ledger.inspector.pins(most=1):
            self.ledger.unpin_prefix(pin.pin_id)

    def reset(self) -> None:
        if self.draw.random() < 0.3:
            self.ledger.reset_prefix_cache(now=self.now())
            return
        reset = self.ledger.begin_reset(self.draw.choice(TENANTS), salt=self.draw.choice([None, *SALTS]))
        while self.ledger.go_on_with_reset(reset, now=self.now()) is not None:
            pass

    def flood(self) -> None:
        """More changes than the journal keeps."""
        end = self.ledger.inspector.num_changes() + self.ledger.inspector.num_changes_kept() + 1
        while self.ledger.inspector.num_changes() < end:
            self.plan()
            self.report()


@dataclass
class Watcher:
    """A copy of what one caller sees, and the watches that keep it."""

    world: World
    tenant: str | None = None
    with_content: bool = True
    is_prompt: bool = True
    """It reads each answer at once, and never stops. Others read slowly, stop, and go on."""
    media: tuple[str, ...] = MEDIA[:1]
    replica: BlockReplica = field(init=False)
    num_told: list[int] = field(init=False)
    """Changes of the epoch that it was told of, by medium."""
    num_resumed: int = 0
    num_expired: int = 0
    num_parts: int = 0
    num_found: int = 0
    copies_seen: Counter[int] = field(default_factory=Counter)
    """By medium, at the ends of moments."""

    def __post_init__(self) -> None:
        self.replica = BlockReplica(media=[MEDIUM_NUMBERS[medium] for medium in self.media])
        self.num_told = [0] * len(self.media)

    def check(self, *, is_last: bool = False) -> None:
        """The copy is what is listed."""
        ledger = self.world.ledger
        self.replica.check(listed(ledger, self.tenant), copies_of(ledger, self.tenant, self.media), is_last=is_last)

    async def run(self) -> None:
        while True:
            try:
                await self.watch()
            except CallRefused as refused:
                if refused.refusal.reason is not Reason.CURSOR_EXPIRED:
                    raise
                self.replica.expire()
                self.num_expired += 1
            await self.rest()

    async def rest(self) -> None:
        if not self.is_prompt:
            await asyncio.sleep(self.world.draw.choice([0.0, 0.01, 0.08]))

    async def watch(self) -> None:
        """One watch, from the last cursor on."""
        world, draw = self.world, self.world.draw
        num_answers = 1 << 60 if self.is_prompt or world.is_over else draw.randint(1, 6)
        self.num_resumed += bool(self.replica.cursor)
        view, clock = View(self.tenant, self.with_content, self.media), world.now
        answers = watch_blocks(
            world.catalog, POOL, view, cursor=self.replica.begin(), clock=clock, max_events=MAX_EVENTS
        )
        async with aclosing(answers):
            async for answer in answers:
                self.take(answer)
                num_answers -= 1
                if not num_answers:
                    return
                await self.rest()

    def take(self, answer: pb.WatchBlocksResponse) -> None:
        """Apply an answer at the moment when it was made."""
        ledger = self.world.ledger
        assert len(answer.events) <= MAX_EVENTS
        if answer.epoch != ledger.epoch:  # a page of a snapshot of books that have ended since
            self.replica.apply(answer)
            return
        if answer.epoch != self.replica.epoch:
            self.num_told = [0] * len(self.media)
        numbers = numbers_now(ledger, self.media)
        names = dict(zip(self.replica.media, self.media, strict=True))
        changed = cache(partial(changed_since, ledger))
        self.replica.apply(
            answer,
            num_changes=dict(zip(self.replica.media, numbers, strict=True)),
            has_changed=lambda place, number: place[1] in changed(names[place[0]], number),
        )
        self.check_contents()
        if not answer.cursor:
            self.num_parts += 1
            return
        self.check()
        self.copies_seen.update(medium for medium, _ in self.replica.copies)
        if self.is_prompt and self.tenant is None:
            self.check_delay(numbers)
        if self.tenant is None:
            self.check_prefixes()

    def check_contents(self) -> None:
        """Tokens, salts and parents come with every content, and make its hash."""
        findable = {each for each, block in self.replica.blocks.items() if block.prefix_hash}
        assert self.replica.contents.keys() == (findable if self.with_content else set())

    def check_delay(self, numbers: list[int]) -> None:
        now = self.world.now()
        for time, made in self.world.changes:
            is_news = any(
                before < number <= last for before, number, last in zip(self.num_told, made, numbers, strict=False)
            )
            if is_news and now - time > INTERVAL_S + TOLERANCE_S:
                raise BrokenPromise(
                    "bounded delay", f"changes {made} were told {now - time:.3f} s after they were made"
                )
        self.num_told = numbers

    def check_prefixes(self) -> None:
        """The copy finds what LookupPrefix finds."""
        ledger, geometry = self.world.ledger, encode_geometry(self.world.geometry)
        for tenant, salt, tokens in self.world.prompts[-4:]:
            asked = [*tokens, 0, 1]
            found = self.replica.find(asked, tenant=tenant, salt=salt, geometry=geometry)
            assert found == ledger.inspector.cached_tokens(int32_bytes(asked), salt=salt, tenant=tenant)[0]
            self.num_found += found


async def live(world: World, watchers: Sequence[Watcher], happen: Callable[[], Awaitable[None]]) -> None:
    """Let things happen while the watchers watch. In the end every copy is what is listed."""

    async def all_things() -> None:
        await happen()
        world.is_over = True
        await asyncio.sleep(REST_S)
        world.ledger.advance(world.now())
        for watcher in watchers:
            watcher.check(is_last=True)

    tasks = [asyncio.create_task(coroutine) for coroutine in (all_things(), *(watcher.run() for watcher in watchers))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def all_watchers(world: World) -> list[Watcher]:
    views = [(None, True), (None, False), ("alice", True), ("bob", False)]
    media = MEDIA if world.geometry.num_disk_blocks else MEDIA[:1]
    return [
        Watcher(world, tenant, with_content, is_prompt, media if with_content else MEDIA[:1])
        for tenant, with_content in views
        for is_prompt in (True, False)
    ]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_all_words_hold_whatever_happens(groups: str, seed: int) -> None:
    draw = random.Random(f"{groups} {seed}")

    async def test() -> None:
        world = World(draw, geometry_of(GROUPS[groups], num_blocks=draw.choice([29, 49])))
        watchers = all_watchers(world)

        async def happen() -> None:
            for _ in range(NUM_STEPS * (2 if GROUPS[groups] else 1)):  # a prompt needs more blocks
                world.step()
                await asyncio.sleep(draw.choice([0.0, 0.0, 0.0, 0.001, 0.03]))
                if draw.random() < 0.005:
                    world.begin_epoch()

        await live(world, watchers, happen)
        assert min(watcher.replica.num_answers for watcher in watchers) > 20
        assert sum(watcher.num_resumed for watcher in watchers) > 50
        assert sum(watcher.num_parts for watcher in watchers) > 50
        assert sum(watcher.num_found for watcher in watchers) > 100
        with_copies = [watcher.copies_seen for watcher in watchers if len(watcher.media) > 1 and watcher.is_prompt]
        assert all(min(seen[HOST], seen[DISK]) > 100 for seen in with_copies), with_copies

    run_in_virtual_time(test())


# -- one word at a time -------------------------------------------------------------------------------------------


def test_a_copy_that_falls_behind_the_journal_begins_again() -> None:
    """Reliable and resumable: no gap, but an error, and a snapshot after it."""
    draw = random.Random(1)

    async def test() -> None:
        world = World(draw, geometry_of((), num_blocks=29))
        slow, prompt = Watcher(world, is_prompt=False), Watcher(world)

        async def happen() -> None:
            for _ in range(3):
                for _ in range(30):
                    world.step()
                    await asyncio.sleep(0.01)
                world.flood()
                await asyncio.sleep(REST_S)

        await live(world, [slow, prompt], happen)
        assert (slow.num_expired, prompt.num_expired) == (3, 3)

    run_in_virtual_time(test())


def is_behind(world: World, replica: BlockReplica) -> bool:
    """True if a watch with the copy's cursor would get an answer."""
    return not replica.cursor or numbers_of(replica.cursor) != numbers_now(world.ledger, MEDIA[:1])


async def read_all(world: World, replica: BlockReplica, tenant: str | None = None) -> list[pb.WatchBlocksResponse]:
    """One watch, from the last cursor to the next one, which nothing disturbs."""
    told = []
    view = View(tenant, with_content=False)
    answers = watch_blocks(world.catalog, POOL, view, cursor=replica.begin(), clock=world.now, max_events=MAX_EVENTS)
    async with aclosing(answers):
        async for answer in answers:
            replica.apply(answer, num_changes={IN_POOL: world.ledger.inspector.num_changes()})
            told.append(answer)
            if answer.cursor:
                return told
    raise AssertionError("it never ends")


def fill(world: World, tenant: str, seq_id: int, num_blocks: int) -> None:
    """A sequence of `tenant` takes so many blocks, each of which is cached when it ends."""
    tokens = [(seq_id >> bit) % 2 for bit in range(BLOCK_SIZE * num_blocks)]
    request = StepRequest(admissions=[Admission(seq_id, int32_bytes(tokens))])
    world.in_flight[tenant].append(plan_step(world.ledger, tenant, request, now=world.now()))


def test_a_moment_of_many_changes_comes_in_parts_without_a_cursor() -> None:
    """Atomic: whatever happens between the parts, the answer with the cursor completes the moment."""

    async def test() -> None:
        world = World(random.Random(1), geometry_of((), num_blocks=49))
        replica = BlockReplica()
        await read_all(world, replica)
        fill(world, "alice", 1, 12)
        told = await read_all(world, replica)
        assert [(len(answer.events), bool(answer.cursor)) for answer in told] == [(5, False), (5, False), (2, True)]
        replica.check(listed(world.ledger, None), is_last=True)

    run_in_virtual_time(test())


def test_a_tenant_that_does_not_see_the_last_change_gets_the_cursor_all_the_same() -> None:
    async def test() -> None:
        world = World(random.Random(1), geometry_of((), num_blocks=49))
        replica = BlockReplica()
        await read_all(world, replica, "alice")
        fill(world, "alice", 1, 6)
        fill(world, "bob", 1, 12)
        told = await read_all(world, replica, "alice")
        assert [(len(answer.events), bool(answer.cursor)) for answer in told] == [(5, False), (1, False), (0, True)]
        replica.check(listed(world.ledger, "alice"), is_last=True)

    run_in_virtual_time(test())


def test_a_block_that_changes_between_the_parts_is_told_once() -> None:
    """Unique: its first event has the state of then, and no event repeats it."""

    async def test() -> None:
        world = World(random.Random(1), geometry_of((), num_blocks=49))
        replica = BlockReplica()
        await read_all(world, replica)
        for seq_id in (1, 2):
            fill(world, "alice", seq_id, 6)
        for _ in range(2):
            world.report_first("alice")
        told = [event.block.block_id for answer in await read_all(world, replica) for event in answer.events]
        assert sorted(told) == sorted(set(told)) == sorted(listed(world.ledger, None))

    run_in_virtual_time(test())


def test_what_came_in_parts_before_a_break_comes_again() -> None:
    """Resumable: the cursor is that of the last complete moment, so nothing between is lost."""

    async def test() -> None:
        world = World(random.Random(1), geometry_of((), num_blocks=49))
        replica = BlockReplica()
        await read_all(world, replica)
        cursor = replica.cursor
        fill(world, "alice", 1, 12)
        view = View(None, with_content=False)
        answers = watch_blocks(
            world.catalog, POOL, view, cursor=replica.begin(), clock=world.now, max_events=MAX_EVENTS
        )
        async with aclosing(answers):
            replica.apply(await anext(answers))
        assert replica.cursor == cursor
        assert len(await read_all(world, replica)) == 3
        replica.check(listed(world.ledger, None), is_last=True)

    run_in_virtual_time(test())


@pytest.mark.parametrize("seed", range(3))
def test_cursors_go_on_after_a_warm_restart(tmp_path: Path, seed: int) -> None:
    """Resumable: the recovered books number their changes as before, the ends of pins and advice included."""
    draw = random.Random(seed)

    async def test() -> None:
        saved: list[SavedPool] = []

        def begin_state(pool: SavedPool) -> Path:
            saved.append(pool)
            return tmp_path

        world = World(draw, geometry_of((FULL, SLIDING), num_blocks=29), begin_state=begin_state)
        replica = BlockReplica()
        for _ in range(6):
            for _ in range(40):
                world.step()
                await asyncio.sleep(draw.choice([0.0, 0.03]))
                if draw.random() < 0.1 and is_behind(world, replica):
                    await read_all(world, replica)
            number = world.ledger.inspector.num_changes()
            world.catalog = Catalog(world.catalog.term + 1, verify=True)
            world.catalog.recover(saved[-1], tmp_path, now=world.now())
            world.pool = world.catalog.pool(POOL)
            assert world.ledger.inspector.num_changes() == number
            world.pin()
            fill(world, "alice", world.new_id(), 1)
            if is_behind(world, replica):
                await read_all(world, replica)
            replica.check(listed(world.ledger, None), is_last=True)
        assert replica.num_answers > 20

    run_in_virtual_time(test())


# -- the page ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
def test_the_page_finds_what_lookup_finds(groups: str) -> None:
    names: dict[str, Any] = {}
    block = pages.block("docs/reference/watch.md", test="tests/unit/cachemgr/test_watch_promise.py")
    exec(block.text, names)
    draw = random.Random(groups)

    async def test() -> None:
        world, num_found = World(draw, geometry_of(GROUPS[groups], num_blocks=49)), 0
        geometry = encode_geometry(world.geometry)
        for _ in range(600):
            world.step()
            tenant, salt, tokens = world.prompts[-1] if world.prompts else ("alice", b"", [1])
            found = names["find"](listed(world.ledger, None), [*tokens, 0, 1], geometry, tenant, salt)
            asked = int32_bytes([*tokens, 0, 1])
            assert found == world.ledger.inspector.cached_tokens(asked, salt=salt, tenant=tenant)[0]
            num_found += found
        assert num_found > 100

    run_in_virtual_time(test())


# -- the judge ----------------------------------------------------------------------------------------------------


def block(
    block_id: int, *, state: pb.BlockState.ValueType = pb.BLOCK_STATE_ACTIVE, prefix_hash: bytes = b""
) -> pb.Block:
    return pb.Block(block_id=block_id, state=state, prefix_hash=prefix_hash)


def told(*blocks: pb.Block, number: int | None = 1, epoch: int = 1, cleared: bool = False) -> pb.WatchBlocksResponse:
    """An answer with these blocks, which only changed, and the cursor of a number."""
    events = [pb.BlockEvent(kind=pb.BLOCK_EVENT_KIND_CHANGED, block=each) for each in blocks]
    cursor = "" if number is None else f"{epoch:016x}{number:016x}"
    return pb.WatchBlocksResponse(epoch=epoch, cleared=cleared, events=events, cursor=cursor)


Judged = Callable[[BlockReplica], None]
BEGUN = told(cleared=True)


def answers(*given: pb.WatchBlocksResponse) -> Judged:
    return lambda replica: [replica.apply(each) for each in (BEGUN, *given)] and None


def compared(*moments: tuple[pb.WatchBlocksResponse, dict[int, pb.Block]], is_last: bool = False) -> Judged:
    def judge(replica: BlockReplica) -> None:
        for answer, listed in moments:
            replica.apply(answer)
            replica.check(listed, is_last=is_last)

    return judge


def news_of(answer: pb.WatchBlocksResponse, *, has_changed: bool) -> Judged:
    def judge(replica: BlockReplica) -> None:
        replica.apply(BEGUN)
        replica.apply(answer, num_changes={IN_POOL: 2}, has_changed=lambda place, number: has_changed)

    return judge


BROKEN: dict[str, tuple[str, Judged]] = {
    "a cursor goes back": ("ordered", answers(told(number=5), told(number=4))),
    "a cursor stays": ("ordered", answers(told(number=5), told(number=5))),
    "an epoch goes on that is not the copy's": ("ordered", answers(told(number=5, epoch=2))),
    "an epoch comes back": ("ordered", answers(told(epoch=2, cleared=True), told(epoch=1, cleared=True))),
    "an answer has a block twice": ("unique", answers(told(block(1), block(1), number=2))),
    "a change is told again": ("unique", news_of(told(block(1), number=2), has_changed=False)),
    "content changes without an event": ("reliable", answers(told(block(1, prefix_hash=b"h"), number=2))),
    "a change is left out": ("reliable", compared((BEGUN, {1: block(1)}), (told(number=2), {1: block(1)}))),
    "the last change is left out": ("reliable", compared((BEGUN, {1: block(1)}), is_last=True)),
    "a moment is cut": ("atomic", compared((BEGUN, {1: block(1)}), (told(block(1), number=2), {1: block(1)}))),
    "a cursor is forgotten": ("resumable", answers(told(number=5), told(number=5, cleared=True))),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_broken_word_is_named(what: str) -> None:
    word, judge = BROKEN[what]
    with pytest.raises(BrokenPromise) as broken:
        judge(BlockReplica())
    assert broken.value.word == word


def test_a_promise_that_is_kept_is_not_blamed() -> None:
    news_of(told(block(1), number=2), has_changed=True)(BlockReplica())
    compared((BEGUN, {}), (told(block(1), number=2), {1: block(1)}), is_last=True)(BlockReplica())
    answers(told(number=None), told(number=5), told(number=1, epoch=2, cleared=True))(BlockReplica())
