"""A lease on a pool and the worker of that pool: what the engine holds between two failures."""

import asyncio
from collections.abc import Callable

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.client.cache_client import CacheApi, keep_lease_alive
from quire.client.errors import LeaseLost, QuireError
from quire.client.messages import decode_outcome, encode_plan, encode_step
from quire.client.scheduler import Plan, PlanOutcome, Step
from quire.client.worker_client import StepAnswer, WorkerApi
from quire.compute.v1 import worker_service_pb2

ConnectWorker = Callable[[str], WorkerApi]


class Session:
    """Open it with `open`, end it with `close`. Methods raise QuireError."""

    def __init__(
        self,
        cache: CacheApi,
        connect_worker: ConnectWorker,
        *,
        lease: cache_service_pb2.CreateLeaseResponse,
        ttl_s: float,
    ) -> None:
        """For `open`."""
        self._cache = cache
        self._connect_worker = connect_worker
        self._worker = connect_worker(lease.worker_address)
        self._lease_id = lease.lease_id
        self._num_plans = 0
        self._renewed_at = asyncio.get_running_loop().time()
        self.pool = lease.pool
        self.epoch = lease.epoch
        self.geometry: attach_pb2.PoolGeometry = lease.geometry
        self.model = worker_service_pb2.GetModelResponse()
        self._keeper = asyncio.create_task(
            keep_lease_alive(cache, lease.lease_id, ttl_s=ttl_s, last_renewal=lambda: self._renewed_at)
        )

    @classmethod
    async def open(cls, cache: CacheApi, connect_worker: ConnectWorker, *, pool: str, ttl_s: float) -> "Session":
        """A new lease, kept alive until close; and what its worker serves."""
        lease = await cache.create_lease(pool, ttl_s=ttl_s)
        session = cls(cache, connect_worker, lease=lease, ttl_s=ttl_s)
        try:
            session.model = await session._worker.get_model()
        except BaseException:
            await session.close()
            raise
        return session

    async def plan(self, plan: Plan) -> tuple[PlanOutcome, grant_pb2.SignedGrant]:
        """Ask cachemgr for a step. Raises LeaseLost, EpochChanged, OutOfRoom, Unavailable, ProtocolViolation."""
        if self._keeper.done():
            raise LeaseLost("the lease was lost while it was idle")
        self._num_plans += 1
        request = encode_plan(plan, lease_id=self._lease_id, epoch=self.epoch, request_id=str(self._num_plans))
        response = await self._cache.plan(request)
        self._renewed_at = asyncio.get_running_loop().time()
        return decode_outcome(response), response.grant

    async def run(self, step: Step, grant: grant_pb2.SignedGrant) -> StepAnswer:
        """Send a step to the worker."""
        return await self._worker.run(encode_step(step, grant))

    async def follow_epoch(self) -> bool:
        """Go on with the pool's present epoch, under the same lease. Returns whether there is a new one."""
        pool = await self._cache.get_pool(self.pool)
        if pool.epoch == self.epoch:
            return False
        self._worker = self._connect_worker(pool.worker_address)
        self.epoch, self.geometry = pool.epoch, pool.geometry
        self.model = await self._worker.get_model()
        return True

    async def close(self) -> None:
        """Give the lease back; if that fails it runs out by itself."""
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        try:
            await self._cache.delete_lease(self._lease_id)
        except QuireError:
            return
