"""A simulated process that keeps a copy of the list of pools, by WatchPools, and copies of all pools' blocks, by
WatchBlocks. It goes on after every break."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from replica import BlockReplica, BrokenPromise, PoolReplica, chain_of, num_found, numbers_of
from robustness.simulation.cachemgr import ADDRESS, SimulatedCachemgr
from robustness.simulation.workload import requests
from robustness.simulation.world import Process

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.service.messages import encode_geometry, encode_pool, int32_bytes
from quire.client.cache_client import CacheClient
from quire.client.errors import CursorExpired, NotFound, OutOfRoom, Unavailable

AGAIN_S = 0.05


class SimulatedWatcher:
    """One start of a watcher: its copies are lost with it."""

    def __init__(self, process: Process, pools: list[str]) -> None:
        self.process = process
        self._list = PoolReplica()
        self._replicas = {pool: BlockReplica() for pool in pools}
        process.spawn(self._follow_list())
        for pool in pools:
            process.spawn(self._follow(pool))

    async def terminate(self) -> None:
        """SIGTERM: it keeps nothing."""
        self.process.end()

    async def _follow_list(self) -> None:
        cache = CacheClient(ADDRESS)
        while True:
            self._list.begin()
            try:
                async for answer in cache.watch_pools():
                    self._list.apply(answer)
            except (Unavailable, OutOfRoom):
                await asyncio.sleep(AGAIN_S)
            except BrokenPromise as broken:
                self.process.world.fail(f"{self.process.name}: {broken}", broken)
                return

    async def _follow(self, pool: str) -> None:
        cache, replica = CacheClient(ADDRESS), self._replicas[pool]
        while True:
            try:
                async for answer in cache.watch_blocks(pool, cursor=replica.begin()):
                    replica.apply(answer)
            except CursorExpired:
                replica.expire()
            except (Unavailable, NotFound, OutOfRoom):
                await asyncio.sleep(AGAIN_S)
            except BrokenPromise as broken:
                self.process.world.fail(f"{self.process.name}: {broken}", broken)
                return

    def left(self, cachemgr: SimulatedCachemgr) -> list[str]:
        """List the changes that its copies do not have yet, and wrong copies that have everything."""
        of_list = self._left_of_list(cachemgr)
        return of_list + [what for pool in cachemgr.catalog.pools() for what in self._left_of(pool)]

    def _left_of_list(self, cachemgr: SimulatedCachemgr) -> list[str]:
        if not self._list.is_complete:
            return ["a list of pools in part"]
        try:
            self._list.check(map(encode_pool, cachemgr.catalog.pools()), is_last=True)
        except BrokenPromise as broken:
            return [str(broken)]
        return []

    def _left_of(self, pool: AttachedPool) -> list[str]:
        replica, inspector = self._replicas[pool.ledger.pool], pool.ledger.inspector
        if replica.epoch != pool.ledger.epoch or not replica.cursor:
            return ["a copy of another epoch"]
        if numbers_of(replica.cursor) != [inspector.num_changes()]:
            return ["changes that a watcher was not told"]
        page, _ = inspector.list_blocks(0, 10_000, state=None, tenant=None, lease_id=None)
        blocks = cache_service_pb2.ListBlocksResponse.FromString(page).blocks
        held = {each.block_id: each for each in blocks if each.state != cache_service_pb2.BLOCK_STATE_FREE}
        try:
            replica.check(held, is_last=True)
        except BrokenPromise as broken:
            return [str(broken)]
        return self._wrong_finds(pool, replica)

    @staticmethod
    def _wrong_finds(pool: AttachedPool, replica: BlockReplica) -> list[str]:
        geometry, known, found = encode_geometry(pool.ledger.geometry), replica.prefixes(), []
        chains = _chains(geometry.SerializeToString(deterministic=True))
        for number, (request, hashes) in enumerate(zip(requests(), chains, strict=True)):
            copied = num_found(hashes, known, geometry)
            told, *_below = pool.ledger.inspector.cached_tokens(
                int32_bytes(request.prompt), salt=request.cache.salt, tenant=request.params.tenant
            )
            if copied != told:
                found.append(f"request {number}: {told} tokens are found, and {copied} in a watcher's copy")
        return found


@lru_cache(maxsize=32)
def _chains(geometry: bytes) -> list[list[bytes]]:
    """The prefix hashes of all requests' prompts, in a pool of this geometry."""
    pool = attach_pb2.PoolGeometry.FromString(geometry)
    return [
        chain_of(each.prompt[:-1], tenant=each.params.tenant, salt=each.cache.salt, geometry=pool)
        for each in requests()
    ]
