"""An operator of a pool with a disk: has content reset, and repeats the call until it has succeeded."""

from __future__ import annotations

import asyncio

from robustness.simulation.cachemgr import ADDRESS
from robustness.simulation.worker_disk import Copies
from robustness.simulation.world import Process

from quire.client.cache_client import CacheClient
from quire.client.errors import QuireError

AGAIN_S = 0.1


class Reset:
    """A reset of a tenant's content in a pool, or of all; in a process of its own, which ends with it."""

    def __init__(self, process: Process, pool: str, tenant: str | None, copies: Copies) -> None:
        self.pool = pool
        self.is_done = False
        self._process = process
        self._tenant = tenant
        self._copies = copies
        process.spawn(self._reset())

    async def _reset(self) -> None:
        cache = CacheClient(ADDRESS)
        while not self.is_done:
            before = self._copies.num_writes
            try:
                await cache.reset_prefix_cache(self.pool, tenant=self._tenant)
            except QuireError:  # of a pool that is not there, or of a worker that can't erase
                await asyncio.sleep(AGAIN_S)
                continue
            self._copies.erase(self._tenant, before)
            self.is_done = True
        self._process.end()
