"""The calls of CacheService that make, renew and end leases."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from itertools import chain
from typing import Any

import grpc

from quire.cache.v1 import cache_service_pb2
from quire.cache.v1.lease_bounds import DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S
from quire.cachemgr.bounds import MAX_LEASE_ANSWERS, Drain, LeaseCounts, overloaded
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import CallRefused, Reason, invalid, refuse
from quire.cachemgr.service import messages
from quire.cachemgr.service.attachments import Attachments, pool_detached
from quire.cachemgr.service.expiry import Expiry
from quire.cachemgr.service.pools import VisiblePools
from quire.cachemgr.service.statuses import refusing
from quire.serving.access import caller

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

OPEN_LEASE_TIMEOUT_S = 5.0
REMEMBER_LEASES_S = 300.0


class LeaseAnswers:
    """CreateLease calls by tenant and request_id, those still running included, for REMEMBER_LEASES_S.

    At most `limit` of them: then the oldest answered one is dropped for the next.
    """

    def __init__(self, limit: int = MAX_LEASE_ANSWERS) -> None:
        self._limit = limit
        self._calls: OrderedDict[
            tuple[str, str], tuple[bytes, float, asyncio.Future[cache_service_pb2.CreateLeaseResponse]]
        ] = OrderedDict()

    def recall(
        self, request: cache_service_pb2.CreateLeaseRequest, tenant: str, now: float
    ) -> asyncio.Future[cache_service_pb2.CreateLeaseResponse] | None:
        """Return the tenant's call with this request_id; one that failed does not count.

        Raises CallRefused (REQUEST_ID_REUSED; OVERLOADED if there is no room to keep another one).
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


class Leasing:
    """Leases from their making to their end.

    max_leases      of all tenants together, those being fenced included
    max_leases_of   of one tenant; None: as many as there may be of all
    """

    def __init__(
        self,
        catalog: Catalog,
        pools: VisiblePools,
        attachments: Attachments,
        expiry: Expiry,
        drain: Drain,
        clock: Callable[[], float],
        *,
        max_leases: int,
        max_leases_of: Callable[[str], int | None],
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._attachments = attachments
        self._expiry = expiry
        self._drain = drain
        self._clock = clock
        self._lease_answers = LeaseAnswers()
        self._lease_counts = LeaseCounts(
            lambda lease_id: catalog.tenant_of(lease_id) is not None, limit=max_leases, tenant_limit=max_leases_of
        )
        for lease in chain.from_iterable(pool.ledger.inspector.leases() for pool in catalog.pools()):
            self._lease_counts.add(lease.lease_id, lease.tenant)

    @refusing
    async def CreateLease(  # noqa: N802
        self, request: cache_service_pb2.CreateLeaseRequest, context: Context
    ) -> cache_service_pb2.CreateLeaseResponse:
        self._drain.refuse_new()
        messages.check_request_id(request.request_id)
        tenant = caller().name
        answer = self._lease_answers.recall(request, tenant, self._clock())
        if answer is None:
            answer = asyncio.ensure_future(self._create_lease(request))
            self._lease_answers.remember(request, tenant, answer, self._clock())
        response = await asyncio.shield(answer)
        self._pools.own_pool(response.lease_id).ledger.inspector.lease(
            response.lease_id
        )  # refused if the lease has ended since
        return response

    async def _create_lease(
        self, request: cache_service_pb2.CreateLeaseRequest
    ) -> cache_service_pb2.CreateLeaseResponse:
        ttl_s = messages.seconds_of(request.ttl) if request.HasField("ttl") else DEFAULT_TTL_S
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise CallRefused(invalid("ttl", f"{ttl_s} s", f"{MIN_TTL_S:g} s to {MAX_TTL_S:g} s"))
        pool = self._pools.pool(request.pool)
        if not pool.is_attached:
            raise pool_detached(pool)
        lease_id, tenant, now = secrets.token_hex(16), caller().name, self._clock()
        self._lease_counts.refuse_another(tenant, now)
        self._catalog.open_lease(pool, lease_id, ttl_s=ttl_s, now=now, tenant=tenant)
        self._lease_counts.add(lease_id, tenant)
        self._expiry.lease_added()
        try:
            async with asyncio.timeout(min(OPEN_LEASE_TIMEOUT_S, ttl_s / 2)):
                await self._attachments.open_lease(pool, lease_id)
        except TimeoutError:
            self._end_lease(lease_id)
            raise pool_detached(pool) from None
        self._catalog.pool_of(lease_id).ledger.renew_lease(lease_id, now=self._clock())
        log.info("lease created lease=%s pool=%s ttl_s=%g", lease_id[:8], pool.ledger.pool, ttl_s)
        return self._encode_created(lease_id)

    def _encode_created(self, lease_id: str) -> cache_service_pb2.CreateLeaseResponse:
        pool = self._pools.pool_of(lease_id)
        response = cache_service_pb2.CreateLeaseResponse(
            lease_id=lease_id,
            pool=pool.ledger.pool,
            epoch=pool.ledger.epoch,
            term=pool.term,
            geometry=messages.encode_geometry(pool.ledger.geometry),
            worker_address=pool.worker_address,
        )
        response.expire_time.FromNanoseconds(self._wall_clock_ns(pool.ledger.inspector.lease(lease_id).expires_at))
        return response

    @refusing
    async def RenewLease(  # noqa: N802
        self, request: cache_service_pb2.RenewLeaseRequest, context: Context
    ) -> cache_service_pb2.RenewLeaseResponse:
        ledger = self._pools.own_pool(request.lease_id).ledger
        lease = ledger.renew_lease(request.lease_id, now=self._clock())
        response = cache_service_pb2.RenewLeaseResponse()
        response.expire_time.FromNanoseconds(self._wall_clock_ns(lease.expires_at))
        return response

    @refusing
    async def DeleteLease(  # noqa: N802
        self, request: cache_service_pb2.DeleteLeaseRequest, context: Context
    ) -> cache_service_pb2.DeleteLeaseResponse:
        if self._pools.is_own(request.lease_id):
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

    def _wall_clock_ns(self, at: float) -> int:
        return int((at + self._pools.wall_clock_offset_s()) * 1e9)
