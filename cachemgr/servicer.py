"""CacheService: every handler decodes, calls the core, encodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

import grpc

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr import messages
from quire.cachemgr._core import StepPlan
from quire.cachemgr.attachments import Attachments, pool_detached
from quire.cachemgr.bounds import (
    MAX_ATTACHMENTS,
    MAX_LEASE_ANSWERS,
    MAX_LEASES,
    MAX_WAITING_ADMISSIONS,
    MAX_WATCHES,
    LeaseCounts,
    Places,
    overloaded,
)
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.errors import CallRefused, Reason, invalid, refuse
from quire.cachemgr.grants import sign_grant
from quire.cachemgr.inspection import refusing
from quire.cachemgr.keeping import Keeping
from quire.cachemgr.leases import TICK_S, UNNOTICED_S, HeldTime
from quire.cachemgr.statuses import to_error_status
from quire.serving.access import caller
from quire.serving.errors import CallEnded

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_TTL_S = 30.0
MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
OPEN_LEASE_TIMEOUT_S = 5.0
REMEMBER_LEASES_S = 300.0


class LeaseAnswers:
    """CreateLease calls by tenant and request_id, those still running included, for REMEMBER_LEASES_S.

    At most `limit` of them: then the oldest that is answered is forgotten for the next.
    """

    def __init__(self, limit: int = MAX_LEASE_ANSWERS) -> None:
        self._limit = limit
        self._calls: OrderedDict[
            tuple[str, str], tuple[bytes, float, asyncio.Future[cache_service_pb2.CreateLeaseResponse]]
        ] = OrderedDict()

    def recall(
        self, request: cache_service_pb2.CreateLeaseRequest, tenant: str, now: float
    ) -> asyncio.Future[cache_service_pb2.CreateLeaseResponse] | None:
        """The tenant's call with this request_id; one that failed does not count.

        Raises CallRefused (REQUEST_ID_REUSED; OVERLOADED if there is no room to remember another one).
        """
        while self._calls and next(iter(self._calls.values()))[1] < now - REMEMBER_LEASES_S:
            self._calls.popitem(last=False)
        key = tenant, request.request_id
        if key not in self._calls:
            if request.request_id:
                self._make_room()
            return None
        digest, _, answer = self._calls[key]
        if answer.done() and (answer.cancelled() or answer.exception() is not None):
            del self._calls[key]
            return None
        if digest != self._digest(request):
            message = f"request_id {request.request_id!r} was used for another call"
            raise CallRefused(refuse(Reason.REQUEST_ID_REUSED, message, request_id=request.request_id))
        return answer

    def remember(
        self,
        request: cache_service_pb2.CreateLeaseRequest,
        tenant: str,
        answer: asyncio.Future[cache_service_pb2.CreateLeaseResponse],
        now: float,
    ) -> None:
        if request.request_id:
            self._calls[tenant, request.request_id] = (self._digest(request), now, answer)

    def __len__(self) -> int:
        return len(self._calls)

    def _make_room(self) -> None:
        if len(self._calls) < self._limit:
            return
        answered = next((key for key, (_, _, answer) in self._calls.items() if answer.done()), None)
        if answered is None:
            raise overloaded("leases being made", self._limit)
        del self._calls[answered]

    @staticmethod
    def _digest(request: cache_service_pb2.CreateLeaseRequest) -> bytes:
        return sha256(request.SerializeToString(deterministic=True)).digest()


class Turns:
    """Admissions one by one, one per turn of the event loop, first come first served.

    A decode step or a report that became ready meanwhile goes between two of them instead of behind them all.
    """

    def __init__(self, limit: int = MAX_WAITING_ADMISSIONS) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self) -> None:
        """Returns when it is the caller's turn, which lasts until its next await. Raises CallRefused (OVERLOADED)."""
        if len(self._waiting) >= self._limit:
            raise overloaded("admissions waiting for their turn", self._limit)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        turn = self._waiting.popleft()
        if not turn.done():
            turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


@dataclass(frozen=True, slots=True)
class ServicerStatistics:
    """What waits and what is kept, beside the books: each has a bound."""

    num_waiting_admissions: int
    num_lease_answers: int
    num_attachments: int
    num_watches: int
    refused_plans: dict[Reason, int]
    """On streams, as a whole, since the start."""


class CacheServicer(Keeping):
    """The core behind gRPC. Runs on one event loop, which makes every core call atomic.

    max_leases      of all tenants together, those being fenced included
    max_leases_of   of one tenant; None: as many as there may be of all
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_leases: int = MAX_LEASES,
        max_leases_of: Callable[[str], int | None] = lambda tenant: None,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._attachments = Attachments(catalog, clock)
        self._lease_answers = LeaseAnswers()
        self._lease_counts = LeaseCounts(
            lambda lease_id: catalog.tenant_of(lease_id) is not None, limit=max_leases, tenant_limit=max_leases_of
        )
        for lease in chain.from_iterable(pool.ledger.leases() for pool in catalog.pools()):
            self._lease_counts.add(lease.lease_id, lease.tenant)
        self._attachment_places = Places(MAX_ATTACHMENTS, "attachments")
        self._watch_places = Places(MAX_WATCHES, "watches")
        self._leases_changed = asyncio.Event()
        self._is_draining = False
        self._turns = Turns()
        self._refused_plans: Counter[Reason] = Counter()

    def statistics(self) -> ServicerStatistics:
        return ServicerStatistics(
            num_waiting_admissions=len(self._turns),
            num_lease_answers=len(self._lease_answers),
            num_attachments=self._attachment_places.num_taken,
            num_watches=self._watch_places.num_taken,
            refused_plans=dict(self._refused_plans),
        )

    def advance(self) -> None:
        """Ends the pins and the advice whose time is over, for what reads the books beside the calls."""
        self._pools("")

    async def drain(self) -> None:
        """No new plans and leases from here on. Those that were answered need nothing more of this process."""
        self._is_draining = True

    async def expire_leases(self) -> None:
        """End leases as their time runs out; runs until cancelled. Time in which the loop was held does not count."""
        held_time = HeldTime(self._clock())
        while True:
            self._leases_changed.clear()
            now = self._clock()
            if held_s := held_time.look(now):
                self._extend_leases(held_s, now)
            for pool in self._catalog.pools():
                for lease in pool.ledger.expire_leases(now - UNNOTICED_S):
                    log.info("lease expired lease=%s pool=%s", lease.lease_id[:8], lease.pool)
                    self._attachments.fence_lease(pool, lease.lease_id)
            times = [expiry for pool in self._catalog.pools() if (expiry := pool.ledger.next_expiry()) is not None]
            if not times:
                await self._leases_changed.wait()
                held_time = HeldTime(self._clock())
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S, max(0.0, min(times) + UNNOTICED_S - self._clock()))):
                    await self._leases_changed.wait()

    def _extend_leases(self, held_s: float, now: float) -> None:
        log.warning("the event loop was held; leases are extended seconds=%.3f", held_s)
        for pool in self._catalog.pools():
            pool.ledger.extend_leases(held_s, now)

    # -- leases ---------------------------------------------------------------------------------------------------

    @refusing
    async def CreateLease(  # noqa: N802
        self, request: cache_service_pb2.CreateLeaseRequest, context: Context
    ) -> cache_service_pb2.CreateLeaseResponse:
        self._refuse_if_draining()
        messages.check_request_id(request.request_id)
        tenant = caller().name
        answer = self._lease_answers.recall(request, tenant, self._clock())
        if answer is None:
            answer = asyncio.ensure_future(self._create_lease(request))
            self._lease_answers.remember(request, tenant, answer, self._clock())
        response = await asyncio.shield(answer)
        self._own_pool(response.lease_id).ledger.lease(response.lease_id)  # refused if the lease has ended since
        return response

    async def _create_lease(
        self, request: cache_service_pb2.CreateLeaseRequest
    ) -> cache_service_pb2.CreateLeaseResponse:
        ttl_s = messages.seconds_of(request.ttl) if request.HasField("ttl") else DEFAULT_TTL_S
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise CallRefused(invalid("ttl", f"{ttl_s} s", f"{MIN_TTL_S:g} s to {MAX_TTL_S:g} s"))
        pool = self._pool(request.pool)
        if not pool.is_attached:
            raise pool_detached(pool)
        lease_id, tenant, now = secrets.token_hex(16), caller().name, self._clock()
        self._lease_counts.refuse_another(tenant, now)
        self._catalog.open_lease(pool, lease_id, ttl_s=ttl_s, now=now, tenant=tenant)
        self._lease_counts.add(lease_id, tenant)
        self._leases_changed.set()
        try:
            async with asyncio.timeout(min(OPEN_LEASE_TIMEOUT_S, ttl_s / 2)):
                await self._attachments.open_lease(pool, lease_id)
        except TimeoutError:
            self._end_lease(lease_id)
            raise pool_detached(pool) from None
        self._catalog.pool_of(lease_id).ledger.lease(lease_id).renew(self._clock())
        log.info("lease created lease=%s pool=%s ttl_s=%g", lease_id[:8], pool.ledger.pool, ttl_s)
        return self._encode_created(lease_id)

    def _encode_created(self, lease_id: str) -> cache_service_pb2.CreateLeaseResponse:
        pool = self._pool_of(lease_id)
        response = cache_service_pb2.CreateLeaseResponse(
            lease_id=lease_id,
            pool=pool.ledger.pool,
            epoch=pool.ledger.epoch,
            term=pool.term,
            geometry=messages.encode_geometry(pool.ledger.geometry),
            worker_address=pool.worker_address,
        )
        response.expire_time.FromNanoseconds(self._wall_clock_ns(pool.ledger.lease(lease_id).expires_at))
        return response

    @refusing
    async def RenewLease(  # noqa: N802
        self, request: cache_service_pb2.RenewLeaseRequest, context: Context
    ) -> cache_service_pb2.RenewLeaseResponse:
        lease = self._own_pool(request.lease_id).ledger.lease(request.lease_id)
        lease.renew(self._clock())
        response = cache_service_pb2.RenewLeaseResponse()
        response.expire_time.FromNanoseconds(self._wall_clock_ns(lease.expires_at))
        return response

    @refusing
    async def DeleteLease(  # noqa: N802
        self, request: cache_service_pb2.DeleteLeaseRequest, context: Context
    ) -> cache_service_pb2.DeleteLeaseResponse:
        if self._is_own(request.lease_id):
            self._end_lease(request.lease_id)
        return cache_service_pb2.DeleteLeaseResponse()

    def _end_lease(self, lease_id: str) -> None:
        try:
            pool = self._catalog.pool_of(lease_id)
        except CallRefused:
            return
        if pool.ledger.end_lease(lease_id):
            log.info("lease ended lease=%s pool=%s", lease_id[:8], pool.ledger.pool)
            self._attachments.fence_lease(pool, lease_id)

    # -- steps ----------------------------------------------------------------------------------------------------

    @refusing
    async def PlanStep(  # noqa: N802
        self, request: cache_service_pb2.PlanStepRequest, context: Context
    ) -> cache_service_pb2.PlanStepResponse:
        answer = cache_service_pb2.PlanStepResponse()
        await self._plan_in_parts(request, answer)
        return answer

    async def PlanSteps(  # noqa: N802
        self, request_iterator: AsyncIterator[cache_service_pb2.PlanStepsRequest], context: Context
    ) -> AsyncIterator[cache_service_pb2.PlanStepsResponse]:
        async for request in request_iterator:
            try:
                answer = cache_service_pb2.PlanStepsResponse()
                await self._plan_in_parts(request.plan, answer.plan)
            except CallRefused as refused:
                self._refused_plans[refused.refusal.reason] += 1
                log.debug("plan refused reason=%s caller=%s", refused.refusal.reason.value, caller().name)
                answer = messages.encode_plan_error(refused.refusal)
            del request  # while the stream waits for the next one
            yield answer

    def plan_step(self, request: cache_service_pb2.PlanStepRequest, answer: cache_service_pb2.PlanStepResponse) -> None:
        """Plans one step and fills an empty answer with it and its signed grant. Raises CallRefused."""
        pool, plan = self._plan(request)
        self._answer(request, pool, plan, answer)

    async def _plan_in_parts(
        self, request: cache_service_pb2.PlanStepRequest, answer: cache_service_pb2.PlanStepResponse
    ) -> None:
        """The same; other calls go on between the parts that can be long."""
        if request.admissions or request.restores:
            await self._turns.turn()
        pool, plan = self._plan(request)
        if plan.has_refusals:
            await asyncio.sleep(0)
        self._answer(request, pool, plan, answer)

    def _plan(self, request: cache_service_pb2.PlanStepRequest) -> tuple[AttachedPool, StepPlan]:
        self._refuse_if_draining()
        pool = self._own_pool(request.lease_id)
        return pool, pool.ledger.plan(messages.known_bytes(request), now=self._clock())

    def _answer(
        self,
        request: cache_service_pb2.PlanStepRequest,
        pool: AttachedPool,
        plan: StepPlan,
        answer: cache_service_pb2.PlanStepResponse,
    ) -> None:
        messages.encode_plan(answer, plan)
        sign_grant(plan, answer.grant, pool, lease_id=request.lease_id)

    # -- workers --------------------------------------------------------------------------------------------------

    async def AttachPool(  # type: ignore[override]  # noqa: N802  # writes to the context, yields nothing
        self, request_iterator: AsyncIterator[attach_pb2.AttachPoolRequest], context: Context
    ) -> None:
        try:
            with self._attachment_places.taken():
                await self._attachments.converse(request_iterator, context.write)
        except CallRefused as refused:
            # A value may be a token that was sampled.
            known = {name: value for name, value in refused.refusal.metadata.items() if name != "value"}
            details = ",".join(f"{name}:{value}" for name, value in known.items())
            log.warning("attachment refused reason=%s details=%s", refused.refusal.reason.value, details)
            raise CallEnded(to_error_status(refused.refusal)) from None

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise CallRefused(refuse(Reason.SHUTTING_DOWN, "cachemgr is shutting down"))

    def _wall_clock_ns(self, at: float) -> int:
        return int((at + self._wall_clock_offset_s()) * 1e9)
