"""A watcher of a pool: its copy of the blocks has to become what the books say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import Ledger
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.service.watch import View, watch_blocks

AGAIN_S = 0.05
SENDING_S = 0.0005
"""The books go on while an answer is sent."""
EVERYTHING = View(tenant=None, with_content=False)

Blocks = dict[int, cache_service_pb2.Block]


class Watcher:
    """Follows a pool of one start of cachemgr, in its process, as WatchBlocks answers."""

    def __init__(self, catalog: Catalog, pool: str, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._pool = pool
        self._clock = clock
        self._blocks: Blocks = {}
        self._cursor = ""

    async def run(self) -> None:
        """Watch, also when the pool is not there yet or the place is lost, until cancelled."""
        while True:
            try:
                changes = watch_blocks(self._catalog, self._pool, EVERYTHING, cursor=self._cursor, clock=self._clock)
                async for answer in changes:
                    self._take(answer)
                    await asyncio.sleep(SENDING_S)
            except CallRefused:
                self._cursor = ""
                await asyncio.sleep(AGAIN_S)

    def _take(self, answer: cache_service_pb2.WatchBlocksResponse) -> None:
        if answer.cleared:
            self._blocks.clear()
        _apply(answer, self._blocks)
        self._cursor = answer.cursor or self._cursor

    def left(self) -> list[str]:
        """What the copy has wrong. Changes are told within a while."""
        if all(pool.ledger.pool != self._pool for pool in self._catalog.pools()):
            return []
        known = blocks_of(self._catalog.pool(self._pool).ledger)
        wrong = [number for number in {*known, *self._blocks} if known.get(number) != self._blocks.get(number)]
        return [f"a watcher of {self._pool} is wrong about blocks {sorted(wrong)}"] if wrong else []


def blocks_of(ledger: Ledger) -> Blocks:
    """All blocks that are not free, as the books have them."""
    events, _ = ledger.inspector.snapshot(0, ledger.geometry.num_blocks, tenant=None, with_content=False)
    blocks: Blocks = {}
    _apply(cache_service_pb2.WatchBlocksResponse.FromString(events), blocks)
    return blocks


def _apply(answer: cache_service_pb2.WatchBlocksResponse, blocks: Blocks) -> None:
    for event in answer.events:
        if event.block.state == cache_service_pb2.BLOCK_STATE_FREE:
            blocks.pop(event.block.block_id, None)
        else:
            blocks[event.block.block_id] = event.block
