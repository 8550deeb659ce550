"""WatchPools: all pools, then those that change, for clients that keep a copy of the list.

The snapshot is the answer about all changes since the first one. So a watch is a number: the changes that its reader
was told of. A pool that changes several times while the reader is busy is told once, as it is then.

A complete answer ends a moment: a copy that has all answers up to it is equal to ListPools at that moment. A moment of
more than MAX_POOLS pools has several answers, and other calls go on between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Set

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.service.messages import encode_pool_without_counts
from quire.cachemgr.service.watch import INTERVAL_S, listening

MAX_POOLS = 100
"""Pools of one answer: some 30 kB, and 20 MB if each has as many adapters as it can have."""


async def watch_pools(
    catalog: Catalog, *, max_pools: int = MAX_POOLS, shown_adapters: Callable[[], Set[str] | None] = lambda: None
) -> AsyncGenerator[cache_service_pb2.WatchPoolsResponse, None]:
    """Answers of at most `max_pools` pools until it is closed, with the adapters that are shown then. None: all."""
    journal, loop = catalog.journal, asyncio.get_running_loop()
    number, is_first = 0, True
    with listening(journal.listeners) as changed:
        while True:
            changed.clear()
            looked_at, told = loop.time(), journal.since(number)[:max_pools]
            number = told[-1][1] if told else number
            is_complete = number == journal.num_changes
            if told or is_first:
                shown = shown_adapters()
                pools = [encode_pool_without_counts(catalog.pool(name), shown_adapters=shown) for name, _ in told]
                yield cache_service_pb2.WatchPoolsResponse(cleared=is_first, pools=pools, complete=is_complete)
                is_first = False
            if is_complete:
                await changed.wait()
                await asyncio.sleep(looked_at + INTERVAL_S - loop.time())
            else:
                await asyncio.sleep(0)  # others' calls go on
