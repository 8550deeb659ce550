"""A session of the engine between two failures: a lease on a pool, and the worker of that pool."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.client.cache_client import CacheApi, keep_lease_alive
from quire.client.channel import RetryPolicy, retried
from quire.client.engine.grammar import Grammar
from quire.client.engine.messages import decode_granted_step, encode_grammar, encode_plan, encode_step
from quire.client.engine.scheduling.plans import GrantedStep, Plan, StepInFlight
from quire.client.errors import LeaseLost, OutOfRoom, ProtocolViolation, QuireError, Unavailable, WorkerUnavailable
from quire.client.worker_client import StepAnswer, WorkerApi
from quire.compute.v1 import worker_service_pb2

ConnectWorker = Callable[[str], WorkerApi]

_REPETITIONS = RetryPolicy(max_attempts=2**31)
_MAX_GRAMMAR_CHECKS = 8
"""Grammars that one engine has at the worker at a time; the worker's queue is for those of several engines."""
_OVERLOADED = RetryPolicy(max_attempts=16)
# Leases that are not deleted within this time expire by themselves.
_CLOSE_TIMEOUT_S = 2.0


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
        self._ttl_s = ttl_s
        self._num_plans = 0
        self._step_number = 0  # of the last plan
        self._loop = asyncio.get_running_loop()
        self._grammar_checks = asyncio.Semaphore(_MAX_GRAMMAR_CHECKS)
        self._on_renewal()
        self.pool = lease.pool
        self.epoch = lease.epoch
        self.geometry: attach_pb2.PoolGeometry = lease.geometry
        self.model = worker_service_pb2.GetModelResponse()
        self._keeper = asyncio.create_task(
            keep_lease_alive(
                cache,
                lease.lease_id,
                ttl_s=ttl_s,
                last_renewal=lambda: self._renewed_at,
                on_renewal=self._on_renewal,
            )
        )

    def _on_renewal(self) -> None:
        self._renewed_at = self._loop.time()

    @classmethod
    async def open(cls, cache: CacheApi, connect_worker: ConnectWorker, *, pool: str, ttl_s: float) -> "Session":
        """Create a lease and keep it alive until close; ask its worker for the model."""
        lease = await cache.create_lease(pool, ttl_s=ttl_s)
        session = cls(cache, connect_worker, lease=lease, ttl_s=ttl_s)
        try:
            session.model = await session._worker.get_model()
        except Unavailable as error:
            await session.close()
            raise WorkerUnavailable(
                error.message, reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s
            ) from error
        except BaseException:
            await session.close()
            raise
        return session

    def request_of(self, plan: Plan) -> cache_service_pb2.PlanStepRequest:
        """Return the request for a plan. Its request_id is new, so that repeated requests are applied once."""
        self._num_plans += 1
        return encode_plan(plan, lease_id=self._lease_id, epoch=self.epoch, request_id=str(self._num_plans))

    async def plan(self, request: cache_service_pb2.PlanStepRequest) -> tuple[GrantedStep, grant_pb2.SignedGrant]:
        """Ask cachemgr for a step. Raises LeaseLost, EpochChanged, OutOfRoom, Unavailable, ProtocolViolation."""
        if self._keeper.done():
            raise LeaseLost("the lease was lost while it was idle")
        response = await self._cache.plan(request)
        if response.step_number != self._step_number + 1:
            raise ProtocolViolation(f"a plan is for step {response.step_number}, behind {self._step_number}")
        self._step_number += 1
        self._on_renewal()
        return decode_granted_step(response, pool=self.pool, epoch=self.epoch), response.grant

    async def plan_again(
        self, request: cache_service_pb2.PlanStepRequest, error: Unavailable, *, until: float
    ) -> tuple[GrantedStep, grant_pb2.SignedGrant]:
        """Repeat a plan that got this error instead of an answer, as long as the lease can be valid.

        until is the loop's time at which to give up anyway. Raises what plan raises; Unavailable only at the end.
        """
        for delay_s in _REPETITIONS.delays_s():
            end = min(until, self._renewed_at + self._ttl_s)
            left_s = end - self._loop.time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, max(delay_s, error.retry_after_s or 0.0)))
            try:
                async with asyncio.timeout_at(end):
                    return await self.plan(request)
            except Unavailable as another:
                error = another
            except TimeoutError:
                continue
        raise error

    async def check_grammar(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> float:
        """Ask the worker to compile a grammar, and to make the mask behind these generated tokens.

        Waits while this engine's other grammars, or those of other engines, are being compiled. Masks behind generated
        tokens do not wait for those. Returns and raises what WorkerApi.check_grammar does.
        """
        message = encode_grammar(grammar)
        async with contextlib.nullcontext() if output_token_ids else self._grammar_checks:
            return await retried(
                lambda: self._worker.check_grammar(message, output_token_ids), _OVERLOADED, after=OutOfRoom
            )

    async def run(self, step: StepInFlight, grant: grant_pb2.SignedGrant, *, skip: bool = False) -> StepAnswer:
        """Send a step to the worker, to be run or to be skipped."""
        return await self._worker.run(encode_step(step, grant, skip=skip))

    async def follow_epoch(self) -> bool:
        """Continue in the pool's current epoch, under the same lease. Returns False if the epoch is not a new one."""
        pool = await self._cache.get_pool(self.pool)
        if pool.epoch == self.epoch:
            return False
        self._worker = self._connect_worker(pool.worker_address)
        self.epoch, self.geometry = pool.epoch, pool.geometry
        self._step_number = 0
        self.model = await self._worker.get_model()
        return True

    async def refresh_model(self) -> worker_service_pb2.GetModelResponse:
        """Ask the worker for its model again; return it. Its adapters may be others now."""
        self.model = await self._worker.get_model()
        return self.model

    async def load_adapter(self, name: str, path: str) -> worker_service_pb2.LoadAdapterResponse:
        """Have the worker load an adapter from a folder of its machine."""
        return await self._worker.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> bool:
        """Have the worker unload an adapter; return False if there was none."""
        return await self._worker.unload_adapter(name)

    async def close(self) -> None:
        """Give the lease back; if that fails it runs out by itself."""
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._cache.delete_lease(self._lease_id)
        except (QuireError, TimeoutError):
            return
