"""The blocks that `quire events` publishes, beside LookupPrefix, for every kind of layer group.

The books, WatchBlocks and the copy are the real ones, in this process and in virtual time. A consumer finds the longest
published prefix of a prompt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from replica import chain_of
from unit.cachemgr.test_watch_promise import BLOCK_SIZE, GROUPS, MAX_EVENTS, POOL, World, geometry_of
from unit.integrations.test_prefix_replica import Consumer
from virtual_time import run_in_virtual_time

from quire.cachemgr.service.messages import encode_geometry, int32_bytes
from quire.cachemgr.service.watch import INTERVAL_S, View, watch_blocks
from quire.integrations.kv_events.layout import Layout
from quire.integrations.kv_events.replica import AllCleared, BlocksStored, Change, PrefixReplica

NUM_STEPS = 400


@dataclass
class Index(Consumer):
    """A consumer that can say which prompt its blocks are of."""

    world: World
    replica: PrefixReplica = field(default_factory=PrefixReplica)
    num_compared: int = 0
    num_more: int = 0
    """Prompts of which the index says more than LookupPrefix."""
    num_unconnected: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.stored: dict[bytes, tuple[list[int], str, bytes]] = {}

    def note(self, changes: list[Change]) -> None:
        self.apply(changes)
        for change in changes:
            if isinstance(change, AllCleared):
                self.stored.clear()
            if isinstance(change, BlocksStored):
                for block in change.blocks:
                    self.stored[block.prefix_hash] = list(block.token_ids), change.tenant, change.salt

    async def follow(self) -> None:
        world = self.world
        view, layout = View(None, with_content=True), Layout.of(encode_geometry(world.geometry))
        watch = watch_blocks(world.catalog, POOL, view, cursor="", clock=world.now, max_events=MAX_EVENTS)
        async with aclosing(watch) as answers:
            async for answer in answers:
                self.replica.layout = layout
                changes = self.replica.apply(answer)
                assert answer.cursor or not changes, "nothing is published before the end of a moment"
                self.note(changes)
                if answer.cursor and answer.epoch == world.ledger.epoch:
                    self.check()

    def check(self) -> None:
        self.num_unconnected = max(self.num_unconnected, self.replica.statistics().num_unconnected)
        for leaf in set(self.parents) - set(self.parents.values()):
            tokens, tenant, salt = self.prompt_of(leaf)
            assert self.looked_up(tokens, tenant, salt) == len(tokens), "the end of a published prefix is found"
        for tenant, salt, tokens in self.world.prompts[-5:]:
            self.compare(tokens, tenant, salt)

    def compare(self, tokens: list[int], tenant: str, salt: bytes) -> None:
        """A prompt that leaves a published prefix at its end, or in a pool without windows, gets the same answer."""
        hashes = chain_of(tokens, tenant=tenant, salt=salt, geometry=encode_geometry(self.world.geometry))
        num_blocks = next((at for at, each in enumerate(hashes) if each not in self.parents), len(hashes))
        found = self.looked_up(tokens, tenant, salt) // BLOCK_SIZE
        if found > num_blocks:
            assert self.is_told_by_nobody(found)
            return
        is_within = num_blocks > 0 and hashes[num_blocks - 1] in self.parents.values()
        assert found == num_blocks or (is_within and self.replica.layout.has_windows)
        self.num_more += found < num_blocks
        self.num_compared += found > 0

    def is_told_by_nobody(self, num_blocks: int) -> bool:
        """True if a prefix of so many blocks needs none, or may follow blocks that the copy was never told of."""
        needs_none = not self.replica.layout.is_found(num_blocks, self.replica.layout.limits)
        return needs_none or self.replica.statistics().num_unconnected > 0

    def prompt_of(self, prefix_hash: bytes) -> tuple[list[int], str, bytes]:
        tokens, tenant, salt = self.stored[prefix_hash]
        while parent := self.parents[prefix_hash]:
            prefix_hash = parent
            tokens = self.stored[parent][0] + tokens
        return tokens, tenant, salt

    def looked_up(self, tokens: list[int], tenant: str, salt: bytes) -> int:
        """The tokens that a prompt finds in the pool."""
        asked = int32_bytes([*tokens, 0])
        return self.world.ledger.inspector.cached_tokens(asked, salt=salt, tenant=tenant)[0]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_published_is_what_prompts_find(groups: str, seed: int) -> None:
    """Each change is told before the next one is made, and nothing is reset, so that the copy knows all tokens.

    Where only chunks are seen, a prompt needs no block of the chunks before its own, and the pool never has them.
    """
    draw = random.Random(f"{groups} {seed}")

    async def test() -> None:
        geometry = geometry_of(GROUPS[groups], num_blocks=draw.choice([17, 29, 49]), num_host_blocks=0)
        world = World(draw, geometry, has_resets=False)
        index = Index(world)
        async with following(index):
            for _ in range(NUM_STEPS):
                world.step()
                await asyncio.sleep(INTERVAL_S * 2)
                if draw.random() < 0.005:
                    world.begin_epoch()
            assert index.num_unconnected == 0 or groups == "only chunks"
            assert index.num_compared > 30
            assert index.num_more == 0 or index.replica.layout.has_windows

    run_in_virtual_time(test())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_that_misses_content_publishes_nothing_that_no_prompt_finds(groups: str, seed: int) -> None:
    """Blocks come and go between two answers, sequences come back from the host tier, and a copy begins late."""
    draw = random.Random(f"{groups} {seed}")

    async def test() -> None:
        world = World(draw, geometry_of(GROUPS[groups], num_blocks=draw.choice([17, 29, 49])))
        early, late = Index(world), Index(world)
        async with following(early):
            for _ in range(NUM_STEPS * 3):
                world.step()
                await asyncio.sleep(draw.choice([0.0, 0.001, 0.03]))
            async with following(late):
                for _ in range(NUM_STEPS // 2):
                    world.step()
                    await asyncio.sleep(draw.choice([0.0, 0.001, 0.03]))
                await asyncio.sleep(INTERVAL_S * 2)
                assert early.num_compared > 30
                assert set(late.parents) <= set(early.parents)
                if early.replica.layout.has_full:
                    assert set(late.parents) == set(early.parents)

    run_in_virtual_time(test())


@asynccontextmanager
async def following(index: Index) -> AsyncIterator[None]:
    """The index follows the pool meanwhile. Raises what it finds wrong."""
    task = asyncio.create_task(index.follow())
    yield
    await asyncio.sleep(0)
    if task.done():
        task.result()
    task.cancel()
    await asyncio.wait([task])
