"""CacheService: every handler decodes, calls the core, encodes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from hashlib import sha256
from typing import Any

import grpc

from quire.cache.v1 import attach_pb2, cache_service_pb2, cache_service_pb2_grpc
from quire.cachemgr import messages
from quire.cachemgr.attachments import Attachments, pool_detached
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.errors import CallRefused, Reason, invalid, lease_not_found, refuse, sequence_not_found
from quire.cachemgr.grants import sign_grant
from quire.cachemgr.leases import Lease
from quire.cachemgr.statuses import to_error_status
from quire.serving.access import Role, caller
from quire.serving.errors import abort, answering

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_TTL_S = 30.0
MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
OPEN_LEASE_TIMEOUT_S = 5.0
REMEMBER_LEASES_S = 300.0
DEFAULT_PAGE, MAX_PAGE = 100, 1_000
DEFAULT_BLOCK_PAGE, MAX_BLOCK_PAGE = 1_000, 10_000
PAGE_KEY = "[0-9a-f]{24}"
AUDIT_SLICE = 8_192
"""Blocks that are checked without letting other calls go on: a few milliseconds in a pool of a million."""
RESET_SLICE = 1_000
"""Blocks that are made unfindable without letting other calls go on: about a millisecond."""


refusing = answering(CallRefused, lambda refused: to_error_status(refused.refusal))


class LeaseAnswers:
    """CreateLease calls by request_id, those still running included, for REMEMBER_LEASES_S."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, tuple[bytes, float, asyncio.Future[cache_service_pb2.CreateLeaseResponse]]]
        self._calls = OrderedDict()

    def recall(
        self, request: cache_service_pb2.CreateLeaseRequest, now: float
    ) -> asyncio.Future[cache_service_pb2.CreateLeaseResponse] | None:
        """The call with this request_id; one that failed does not count. Raises CallRefused (REQUEST_ID_REUSED)."""
        while self._calls and next(iter(self._calls.values()))[1] < now - REMEMBER_LEASES_S:
            self._calls.popitem(last=False)
        if request.request_id not in self._calls:
            return None
        digest, _, answer = self._calls[request.request_id]
        if answer.done() and (answer.cancelled() or answer.exception() is not None):
            del self._calls[request.request_id]
            return None
        if digest != self._digest(request):
            message = f"request_id {request.request_id!r} was used for another call"
            raise CallRefused(refuse(Reason.REQUEST_ID_REUSED, message, request_id=request.request_id))
        return answer

    def remember(
        self,
        request: cache_service_pb2.CreateLeaseRequest,
        answer: asyncio.Future[cache_service_pb2.CreateLeaseResponse],
        now: float,
    ) -> None:
        if request.request_id:
            self._calls[request.request_id] = (self._digest(request), now, answer)

    @staticmethod
    def _digest(request: cache_service_pb2.CreateLeaseRequest) -> bytes:
        return sha256(request.SerializeToString(deterministic=True)).digest()


class Turns:
    """Admissions one by one, one per turn of the event loop, first come first served.

    A decode step or a report that became ready meanwhile goes between two of them instead of behind them all.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns when it is the caller's turn, which lasts until its next await."""
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


class CacheServicer(cache_service_pb2_grpc.CacheServiceServicer):
    """The core behind gRPC. Runs on one event loop, which makes every core call atomic."""

    def __init__(self, catalog: Catalog, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._clock = clock
        self._attachments = Attachments(catalog)
        self._lease_answers = LeaseAnswers()
        self._leases_changed = asyncio.Event()
        self._is_draining = False
        self._turns = Turns()

    async def drain(self) -> None:
        """No new plans and leases from here on. Those that were answered need nothing more of this process."""
        self._is_draining = True

    async def expire_leases(self) -> None:
        """Ends leases as their time runs out; runs until cancelled."""
        while True:
            self._leases_changed.clear()
            now = self._clock()
            for pool in self._catalog.pools():
                for lease in pool.ledger.expire_leases(now):
                    log.info("lease expired lease=%s pool=%s", lease.lease_id[:8], lease.pool)
                    self._attachments.fence_lease(pool, lease.lease_id)
            times = [expiry for pool in self._catalog.pools() if (expiry := pool.ledger.next_expiry()) is not None]
            delay = max(0.0, min(times) - self._clock()) if times else None
            try:
                async with asyncio.timeout(delay):
                    await self._leases_changed.wait()
            except TimeoutError:
                continue

    # -- leases ---------------------------------------------------------------------------------------------------

    @refusing
    async def CreateLease(  # noqa: N802
        self, request: cache_service_pb2.CreateLeaseRequest, context: Context
    ) -> cache_service_pb2.CreateLeaseResponse:
        self._refuse_if_draining()
        messages.check_request_id(request.request_id)
        answer = self._lease_answers.recall(request, self._clock())
        if answer is None:
            answer = asyncio.ensure_future(self._create_lease(request))
            self._lease_answers.remember(request, answer, self._clock())
        return await asyncio.shield(answer)

    async def _create_lease(
        self, request: cache_service_pb2.CreateLeaseRequest
    ) -> cache_service_pb2.CreateLeaseResponse:
        ttl_s = request.ttl.seconds + request.ttl.nanos / 1e9 if request.HasField("ttl") else DEFAULT_TTL_S
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise CallRefused(invalid("ttl", f"{ttl_s} s", f"{MIN_TTL_S:g} s to {MAX_TTL_S:g} s"))
        pool = self._catalog.pool(request.pool)
        if not pool.is_attached:
            raise pool_detached(pool)
        lease_id = secrets.token_hex(16)
        self._catalog.open_lease(pool, lease_id, ttl_s=ttl_s, now=self._clock(), tenant=caller().name)
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
        pool = self._catalog.pool_of(lease_id)
        response = cache_service_pb2.CreateLeaseResponse(
            lease_id=lease_id,
            pool=pool.ledger.pool,
            epoch=pool.ledger.epoch,
            term=self._catalog.term,
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
        if request.admissions:
            await self._turns.turn()
        answer = cache_service_pb2.PlanStepResponse()
        self.plan_step(request, answer)
        return answer

    async def PlanSteps(  # noqa: N802
        self, request_iterator: AsyncIterator[cache_service_pb2.PlanStepsRequest], context: Context
    ) -> AsyncIterator[cache_service_pb2.PlanStepsResponse]:
        async for request in request_iterator:
            if request.plan.admissions:
                await self._turns.turn()
            try:
                answer = cache_service_pb2.PlanStepsResponse()
                self.plan_step(request.plan, answer.plan)
            except CallRefused as refused:
                answer = messages.encode_plan_error(refused.refusal)
            yield answer

    def plan_step(self, request: cache_service_pb2.PlanStepRequest, answer: cache_service_pb2.PlanStepResponse) -> None:
        """Plans one step and fills an empty answer with it and its signed grant. Raises CallRefused."""
        self._refuse_if_draining()
        pool = self._own_pool(request.lease_id)
        plan = pool.ledger.plan(
            request.lease_id,
            request.epoch,
            messages.decode_plan(request),
            now=self._clock(),
            request_id=request.request_id,
            digest=messages.digest_of(request),
        )
        messages.encode_plan(answer, plan)
        sign_grant(plan, answer.grant, pool, lease_id=request.lease_id, term=self._catalog.term)

    # -- workers --------------------------------------------------------------------------------------------------

    async def AttachPool(  # type: ignore[override]  # noqa: N802  # writes to the context, yields nothing
        self, request_iterator: AsyncIterator[attach_pb2.AttachPoolRequest], context: Context
    ) -> None:
        try:
            await self._attachments.converse(request_iterator, context.write)
        except CallRefused as refused:
            log.warning("attachment refused reason=%s message=%s", refused.refusal.reason.value, refused)
            await abort(context, to_error_status(refused.refusal))

    # -- looking --------------------------------------------------------------------------------------------------

    @refusing
    async def GetPool(  # noqa: N802
        self, request: cache_service_pb2.GetPoolRequest, context: Context
    ) -> cache_service_pb2.GetPoolResponse:
        pool = messages.encode_pool(self._catalog.pool(request.pool), term=self._catalog.term)
        return cache_service_pb2.GetPoolResponse(pool=pool)

    @refusing
    async def ListPools(  # noqa: N802
        self, request: cache_service_pb2.ListPoolsRequest, context: Context
    ) -> cache_service_pb2.ListPoolsResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, messages.POOL_NAME)
        pools = [pool for pool in self._catalog.pools() if pool.ledger.pool > request.page_token]
        response = cache_service_pb2.ListPoolsResponse(
            pools=[messages.encode_pool(pool, term=self._catalog.term) for pool in pools[:limit]]
        )
        if len(pools) > limit:
            response.next_page_token = pools[limit - 1].ledger.pool
        return response

    @refusing
    async def ListLeases(  # noqa: N802
        self, request: cache_service_pb2.ListLeasesRequest, context: Context
    ) -> cache_service_pb2.ListLeasesResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, PAGE_KEY)
        offset_s = time.time() - self._clock()
        pools = [self._catalog.pool(request.pool)] if request.pool else self._catalog.pools()
        keyed = {
            page_key(lease.lease_id): (lease, pool.ledger)
            for pool in pools
            for lease in pool.ledger.leases()
            if is_visible(lease)
        }
        keys = sorted(key for key in keyed if key > request.page_token)
        page = (keyed[key] for key in keys[:limit])
        response = cache_service_pb2.ListLeasesResponse(
            leases=[
                messages.encode_lease(lease, ledger.holdings(lease.lease_id), wall_clock_offset_s=offset_s)
                for lease, ledger in page
            ]
        )
        if len(keys) > limit:
            response.next_page_token = keys[limit - 1]
        return response

    @refusing
    async def GetSequence(  # noqa: N802
        self, request: cache_service_pb2.GetSequenceRequest, context: Context
    ) -> cache_service_pb2.GetSequenceResponse:
        ledger = self._visible_pool(request.lease_id).ledger
        sequence = ledger.sequence(request.lease_id, request.sequence_id)
        if sequence is None:
            raise CallRefused(sequence_not_found(request.sequence_id))
        encoded = messages.encode_sequence(sequence, request.lease_id, with_blocks=True)
        return cache_service_pb2.GetSequenceResponse(sequence=encoded)

    @refusing
    async def ListSequences(  # noqa: N802
        self, request: cache_service_pb2.ListSequencesRequest, context: Context
    ) -> cache_service_pb2.ListSequencesResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, PAGE_KEY + r"\.[0-9]{10}")
        ledger = self._catalog.pool(request.pool).ledger
        keyed = {
            f"{page_key(lease.lease_id)}.{seq_id:010d}": (lease.lease_id, seq_id)
            for lease in ledger.leases()
            if is_visible(lease) and request.lease_id in ("", lease.lease_id)
            for seq_id in ledger.sequence_ids(lease.lease_id)
        }
        keys = sorted(key for key in keyed if key > request.page_token)
        response = cache_service_pb2.ListSequencesResponse()
        for lease_id, seq_id in (keyed[key] for key in keys[:limit]):
            sequence = ledger.view(lease_id, seq_id)
            response.sequences.append(messages.encode_sequence(sequence, lease_id, with_blocks=False))
        if len(keys) > limit:
            response.next_page_token = keys[limit - 1]
        return response

    @refusing
    async def ListBlocks(  # noqa: N802
        self, request: cache_service_pb2.ListBlocksRequest, context: Context
    ) -> cache_service_pb2.ListBlocksResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_BLOCK_PAGE, most=MAX_BLOCK_PAGE)
        messages.check_page_token(request.page_token, "[0-9]{1,10}")
        if request.state not in (cache_service_pb2.BLOCK_STATE_UNSPECIFIED, *messages.BLOCK_STATES.values()):
            raise CallRefused(invalid("state", request.state, "a BlockState"))
        pool = self._catalog.pool(request.pool)
        if request.lease_id or not sees_all():
            self._visible_pool(request.lease_id)
        start = int(request.page_token or 0) + 1
        blocks = listed_blocks(pool, candidate_blocks(pool, request.lease_id, start), request.state)
        response = cache_service_pb2.ListBlocksResponse()
        for block in blocks:
            if len(response.blocks) == limit:
                response.next_page_token = str(response.blocks[-1].block_id)
                break
            response.blocks.append(block)
        return response

    @refusing
    async def LookupPrefix(  # noqa: N802
        self, request: cache_service_pb2.LookupPrefixRequest, context: Context
    ) -> cache_service_pb2.LookupPrefixResponse:
        messages.check_salt("salt", request.salt)
        if not request.token_ids:
            raise CallRefused(refuse(Reason.EMPTY_PROMPT, "token_ids is empty; at least 1 is needed"))
        tokens = messages.int32_bytes(request.token_ids)
        pools = [self._catalog.pool(request.pool)] if request.pool else self._catalog.pools()
        matches = [
            cache_service_pb2.PrefixMatch(
                pool=pool.ledger.pool,
                cached_token_count=pool.ledger.num_cached_tokens(tokens, salt=request.salt, tenant=caller().name),
                block_counts=messages.encode_counts(pool.ledger.counts()),
                worker_address=pool.worker_address,
            )
            for pool in pools
        ]
        matches.sort(key=lambda match: -match.cached_token_count)
        return cache_service_pb2.LookupPrefixResponse(matches=matches)

    @refusing
    async def ResetPrefixCache(  # noqa: N802
        self, request: cache_service_pb2.ResetPrefixCacheRequest, context: Context
    ) -> cache_service_pb2.ResetPrefixCacheResponse:
        ledger, dropped = self._catalog.pool(request.pool).ledger, 0
        for first in range(0, ledger.geometry.num_blocks, RESET_SLICE):
            dropped += ledger.reset_prefix_cache(first, first + RESET_SLICE)
            await asyncio.sleep(0)  # others' calls go on
        return cache_service_pb2.ResetPrefixCacheResponse(dropped_block_count=dropped)

    @refusing
    async def AuditPool(  # noqa: N802
        self, request: cache_service_pb2.AuditPoolRequest, context: Context
    ) -> cache_service_pb2.AuditPoolResponse:
        ledger = self._catalog.pool(request.pool).ledger
        violations = ledger.audit_counts()
        for first in range(0, ledger.geometry.num_blocks, AUDIT_SLICE):
            await asyncio.sleep(0)  # others' calls go on
            violations += ledger.audit(first, first + AUDIT_SLICE)
        return cache_service_pb2.AuditPoolResponse(
            violations=violations,
            block_count=ledger.geometry.num_blocks - 1,
            sequence_count=ledger.statistics().num_sequences,
        )

    @refusing
    async def GetStatistics(  # noqa: N802
        self, request: cache_service_pb2.GetStatisticsRequest, context: Context
    ) -> cache_service_pb2.GetStatisticsResponse:
        pools = [self._catalog.pool(request.pool)] if request.pool else self._catalog.pools()
        return cache_service_pb2.GetStatisticsResponse(
            pools=[messages.encode_statistics(pool, pool.ledger.statistics()) for pool in pools]
        )

    def _is_own(self, lease_id: str) -> bool:
        """Whether it is a lease of the caller's tenant."""
        return self._catalog.tenant_of(lease_id) == caller().name

    def _own_pool(self, lease_id: str) -> AttachedPool:
        """The pool that a lease of the caller's tenant is for. Raises CallRefused (LEASE_NOT_FOUND)."""
        if not self._is_own(lease_id):
            raise lease_not_found(lease_id)
        return self._catalog.pool_of(lease_id)

    def _visible_pool(self, lease_id: str) -> AttachedPool:
        """The same, of any lease for who sees all."""
        return self._catalog.pool_of(lease_id) if sees_all() else self._own_pool(lease_id)

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise CallRefused(refuse(Reason.SHUTTING_DOWN, "cachemgr is shutting down"))

    def _wall_clock_ns(self, at: float) -> int:
        return int((time.time() + at - self._clock()) * 1e9)


def sees_all() -> bool:
    """Whether the caller may look at what belongs to others."""
    return Role.OPERATOR in caller().roles


def is_visible(lease: Lease) -> bool:
    """Whether the caller may know of this lease."""
    return sees_all() or lease.tenant == caller().name


def page_key(lease_id: str) -> str:
    """Orders leases in lists without giving their ids away, which are capabilities; a PAGE_KEY."""
    return sha256(lease_id.encode()).hexdigest()[:24]


def candidate_blocks(pool: AttachedPool, lease_id: str, start: int) -> Iterable[int]:
    """Block ids from start on: all, or those in the block tables of one lease. Raises CallRefused."""
    if not lease_id:
        return range(start, pool.ledger.geometry.num_blocks)
    pool.ledger.lease(lease_id)
    held = {block_id for sequence in pool.ledger.sequences(lease_id) for block_id in sequence.block_table}
    return sorted(block_id for block_id in held if block_id >= start)


def listed_blocks(pool: AttachedPool, block_ids: Iterable[int], state: int) -> Iterable[cache_service_pb2.Block]:
    """The blocks that are in the state asked for; BLOCK_STATE_UNSPECIFIED: in any."""
    for block_id in block_ids:
        block_state, ref_count, pin_count, prefix_hash = pool.ledger.block(block_id)
        if state in (cache_service_pb2.BLOCK_STATE_UNSPECIFIED, messages.BLOCK_STATES[block_state]):
            yield cache_service_pb2.Block(
                block_id=block_id,
                state=messages.BLOCK_STATES[block_state],
                reference_count=ref_count,
                pin_count=pin_count,
                prefix_hash=prefix_hash or b"",
            )
