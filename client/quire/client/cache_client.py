"""cachemgr over gRPC: a thin typed client. Deadlines, safe retries, lease keep-alive; no policy."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

from google.protobuf import duration_pb2

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1 import cache_service_pb2_grpc
from quire.client.channel import (
    ONCE,
    RETRIES,
    OrderedStream,
    RetryPolicy,
    answers,
    decode_error,
    last_cause,
    open_channel,
    retried,
    unary,
)
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import InvalidRequest, LeaseLost, ProtocolViolation, QuireError, Unavailable
from quire.serving.runtime_folder import given_cachemgr

Response = TypeVar("Response")
NOT_LISTENING = ("connect failed", ": connect: ", "Failed to connect to remote host")
"""Parts of gRPC's messages if no process listens at a unix socket, by its two ways to poll, and at a port."""
_BLOCK_PAGE_SIZE = 10_000
"""The most that cachemgr gives."""


class CacheApi(Protocol):
    """The calls of cachemgr that the engine needs. Every method raises QuireError and nothing else."""

    async def create_lease(self, pool: str, *, ttl_s: float) -> pb.CreateLeaseResponse:
        """Create a lease on a pool; "" is for the only pool."""

    async def renew_lease(self, lease_id: str) -> None:
        """Move the lease's expiry to now + its ttl. Raises LeaseLost."""

    async def delete_lease(self, lease_id: str) -> None:
        """End the lease. A lease that has ended is no error."""

    async def plan(self, request: pb.PlanStepRequest) -> pb.PlanStepResponse:
        """Plan one step. One at a time."""

    async def get_pool(self, pool: str) -> pb.Pool:
        """Return a pool's geometry, address and block counts."""

    async def hang_up(self) -> None:
        """Give up plans that wait for an answer. A late answer is never taken for the answer to a later plan."""

    async def close(self) -> None:
        """Give up all connections."""


class CacheClient:
    """CacheApi over a channel, and the calls that inspect. Make it inside a running event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        timeout_s: float = 10.0,
        retry: RetryPolicy = RETRIES,
    ) -> None:
        """Prepare calls to an address, "unix:/path" or "host:port".

        None is that of the environment variable QUIRE_CACHEMGR, and without it the address where `quire up` serves.

        timeout_s is the deadline of each attempt of a call.
        """
        self._timeout_s = timeout_s
        self._retry = retry
        self._address = address or given_cachemgr()
        self._channel = open_channel(self._address, credentials)
        self._stub = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._plans: OrderedStream[pb.PlanStepsRequest, pb.PlanStepsResponse] = OrderedStream(
            self._stub.PlanSteps, timeout_s=timeout_s
        )

    async def create_lease(self, pool: str, *, ttl_s: float) -> pb.CreateLeaseResponse:
        """See CacheService.CreateLease. Repeated under one request_id.

        Raises NotFound, OutOfRoom, LeaseLost (it ended before the answer came), Unavailable.
        """
        request = pb.CreateLeaseRequest(pool=pool, ttl=_duration_of(ttl_s), request_id=uuid.uuid4().hex)
        return await self._call(self._stub.CreateLease, request)

    async def renew_lease(self, lease_id: str) -> None:
        """See CacheService.RenewLease. Raises LeaseLost, Unavailable."""
        request = pb.RenewLeaseRequest(lease_id=lease_id)
        await self._call(self._stub.RenewLease, request)

    async def delete_lease(self, lease_id: str) -> None:
        """See CacheService.DeleteLease. Tried once: a lease left over expires by itself."""
        request = pb.DeleteLeaseRequest(lease_id=lease_id)
        await self._call(self._stub.DeleteLease, request, policy=ONCE)

    async def plan(self, request: pb.PlanStepRequest) -> pb.PlanStepResponse:
        """See CacheService.PlanStep; goes over the stream. Repeated after a break if it has a request_id.

        Raises LeaseLost, EpochChanged, OutOfRoom (TOO_MANY_STEPS, OVERLOADED), Unavailable.
        """
        message = pb.PlanStepsRequest(plan=request)

        async def attempt() -> pb.PlanStepsResponse:
            return await (await self._plans.send(message))

        answer = await retried(attempt, self._retry if request.request_id else ONCE)
        match answer.WhichOneof("answer"):
            case "plan":
                return answer.plan
            case "error":
                raise decode_error(answer.error)
            case _:
                raise ProtocolViolation("an empty answer to a plan")

    async def get_pool(self, pool: str = "") -> pb.Pool:
        """See CacheService.GetPool. Raises NotFound, Unavailable."""
        request = pb.GetPoolRequest(pool=pool)
        return (await self._call(self._stub.GetPool, request)).pool

    async def get_sequence(self, lease_id: str, sequence_id: int) -> pb.Sequence:
        """See CacheService.GetSequence. Raises LeaseLost, NotFound, Unavailable."""
        request = pb.GetSequenceRequest(lease_id=lease_id, sequence_id=sequence_id)
        answer = await self._call(self._stub.GetSequence, request)
        return answer.sequence

    async def list_pools(self) -> list[pb.Pool]:
        """See CacheService.ListPools; all pages."""
        pages = self._pages(self._stub.ListPools, pb.ListPoolsRequest())
        return [each async for page in pages for each in page.pools]

    async def watch_pools(self) -> AsyncGenerator[pb.WatchPoolsResponse, None]:
        """See CacheService.WatchPools; goes on until it is closed.

        With each complete answer, a copy of the pools is the whole list. Raises OutOfRoom, Unavailable, AccessDenied.
        """
        async with contextlib.aclosing(answers(self._stub.WatchPools(pb.WatchPoolsRequest()))) as changes:
            async for answer in changes:
                yield answer

    async def list_leases(self, pool: str = "") -> list[pb.Lease]:
        """See CacheService.ListLeases; all pages."""
        pages = self._pages(self._stub.ListLeases, pb.ListLeasesRequest(pool=pool))
        return [each async for page in pages for each in page.leases]

    async def list_sequences(self, pool: str = "", *, lease_id: str = "") -> list[pb.Sequence]:
        """See CacheService.ListSequences; all pages. Raises NotFound."""
        pages = self._pages(self._stub.ListSequences, pb.ListSequencesRequest(pool=pool, lease_id=lease_id))
        return [each async for page in pages for each in page.sequences]

    async def first_sequences(self, pool: str = "", *, count: int, tenant: str | None = None) -> list[pb.Sequence]:
        """See CacheService.ListSequences; the first `count`, at most 1,000, of a tenant or of all. Raises NotFound."""
        request = pb.ListSequencesRequest(pool=pool, page_size=count, tenant=tenant)
        answer = await self._call(self._stub.ListSequences, request)
        return list(answer.sequences)

    async def list_blocks(
        self, pool: str = "", *, state: pb.BlockState.ValueType = pb.BLOCK_STATE_UNSPECIFIED, lease_id: str = ""
    ) -> list[pb.Block]:
        """See CacheService.ListBlocks; all pages. Raises NotFound."""
        pages = self._pages(
            self._stub.ListBlocks,
            pb.ListBlocksRequest(pool=pool, state=state, lease_id=lease_id, page_size=_BLOCK_PAGE_SIZE),
        )
        return [each async for page in pages for each in page.blocks]

    async def watch_blocks(
        self,
        pool: str = "",
        *,
        cursor: str = "",
        tenant: str | None = None,
        include_content: bool = False,
        copy_media: Iterable[pb.Medium.ValueType] = (),
    ) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        """See CacheService.WatchBlocks; goes on until it is closed, of a tenant's blocks or of all.

        With copy_media also of the copies in the host tier, on the disk, or both.

        With each answer that has a cursor, a copy of the blocks is whole. Others are parts of a larger change.
        Raises NotFound, CursorExpired, Unavailable, AccessDenied, and InvalidRequest for content that is not kept.
        """
        request = pb.WatchBlocksRequest(
            pool=pool, cursor=cursor, tenant=tenant, include_content=include_content, copy_media=copy_media
        )
        async with contextlib.aclosing(answers(self._stub.WatchBlocks(request))) as changes:
            async for answer in changes:
                yield answer

    async def list_tenants(self, pool: str = "") -> list[pb.Tenant]:
        """See CacheService.ListTenants; all pages. Raises NotFound."""
        pages = self._pages(self._stub.ListTenants, pb.ListTenantsRequest(pool=pool))
        return [each async for page in pages for each in page.tenants]

    async def lookup_prefix(
        self,
        token_ids: Iterable[int],
        *,
        pool: str = "",
        salt: bytes = b"",
        adapter: bytes = b"",
        tenant: str | None = None,
    ) -> pb.LookupPrefixResponse:
        """See CacheService.LookupPrefix. tenant None is the caller's. Raises NotFound, InvalidRequest, AccessDenied."""
        request = pb.LookupPrefixRequest(pool=pool, token_ids=token_ids, salt=salt, adapter=adapter, tenant=tenant)
        return await self._call(self._stub.LookupPrefix, request)

    async def explain_prefix(
        self,
        token_ids: Iterable[int],
        *,
        pool: str = "",
        salt: bytes = b"",
        adapter: bytes = b"",
        tenant: str | None = None,
    ) -> pb.ExplainPrefixResponse:
        """See CacheService.ExplainPrefix; as lookup_prefix otherwise."""
        request = pb.ExplainPrefixRequest(pool=pool, token_ids=token_ids, salt=salt, adapter=adapter, tenant=tenant)
        return await self._call(self._stub.ExplainPrefix, request)

    async def check_admission(
        self, admission: pb.Admission, *, pool: str = "", reserve_blocks: int = 0
    ) -> list[pb.AdmissionCheck]:
        """See CacheService.CheckAdmission: one check per pool. Raises NotFound, InvalidRequest."""
        request = pb.CheckAdmissionRequest(pool=pool, admission=admission, admission_reserve_block_count=reserve_blocks)
        answer = await self._call(self._stub.CheckAdmission, request)
        return list(answer.checks)

    async def pin_prefix(
        self,
        token_ids: Iterable[int],
        *,
        pool: str = "",
        salt: bytes = b"",
        adapter: bytes = b"",
        ttl_s: float | None = None,
        tenant: str | None = None,
    ) -> pb.PinPrefixResponse:
        """See CacheService.PinPrefix. ttl_s from 1 to 86,400; None is the server's default.

        tenant None is the caller's. Raises NotFound, OutOfRoom, InvalidRequest, AccessDenied.
        """
        ttl = None if ttl_s is None else _duration_of(ttl_s)
        request = pb.PinPrefixRequest(
            pool=pool, token_ids=token_ids, salt=salt, adapter=adapter, ttl=ttl, tenant=tenant
        )
        return await self._call(self._stub.PinPrefix, request)

    async def unpin_prefix(self, pin_id: str, *, pool: str = "", tenant: str | None = None) -> None:
        """See CacheService.UnpinPrefix. A missing pin is no error. Raises NotFound for the pool, AccessDenied."""
        request = pb.UnpinPrefixRequest(pool=pool, pin_id=pin_id, tenant=tenant)
        await self._call(self._stub.UnpinPrefix, request)

    async def list_pins(self, pool: str = "", *, tenant: str | None = None) -> list[pb.Pin]:
        """See CacheService.ListPins; all pages. Raises NotFound, AccessDenied."""
        pages = self._pages(self._stub.ListPins, pb.ListPinsRequest(pool=pool, tenant=tenant))
        return [each async for page in pages for each in page.pins]

    async def reset_prefix_cache(
        self,
        pool: str = "",
        *,
        tenant: str | None = None,
        salt: bytes | None = None,
        adapter: bytes = b"",
        token_ids: Iterable[int] | None = None,
    ) -> pb.ResetPrefixCacheResponse:
        """See CacheService.ResetPrefixCache: of the pool, a tenant, a salt, an adapter, or prompts that begin with
        tokens.

        Raises NotFound, InvalidRequest (also for tokens that are none: they would reset the pool), AccessDenied.
        """
        request = pb.ResetPrefixCacheRequest(
            pool=pool, tenant=tenant, salt=salt, adapter=adapter, token_ids=token_ids or ()
        )
        if token_ids is not None and not request.token_ids:
            raise InvalidRequest.of_field("token_ids", [], "at least a full block of tokens", reason="EMPTY_PROMPT")
        return await self._call(self._stub.ResetPrefixCache, request)

    async def audit_pool(self, pool: str = "") -> pb.AuditPoolResponse:
        """See CacheService.AuditPool. Raises NotFound."""
        request = pb.AuditPoolRequest(pool=pool)
        return await self._call(self._stub.AuditPool, request)

    async def get_statistics(self, pool: str = "") -> list[pb.PoolStatistics]:
        """See CacheService.GetStatistics."""
        request = pb.GetStatisticsRequest(pool=pool)
        answer = await self._call(self._stub.GetStatistics, request)
        return list(answer.pools)

    async def _call(
        self, method: Callable[..., Awaitable[Response]], request: Any, *, policy: RetryPolicy | None = None
    ) -> Response:
        """Make one call. Raises QuireError; for an address where no process listens, one line with the remedy."""
        try:
            return await unary(method, request, timeout_s=self._timeout_s, policy=policy or self._retry)
        except Unavailable as error:
            if not any(sign in error.message for sign in NOT_LISTENING):
                raise
            raise _no_cachemgr(self._address, error.message) from None

    async def _pages(self, call: Any, request: Any) -> AsyncGenerator[Any, None]:
        """All pages of a list; the server says where the next one begins."""
        while True:
            page = await self._call(call, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def hang_up(self) -> None:
        """End the stream of plans; plans that wait get Unavailable. The next plan opens another one."""
        await self._plans.close()

    async def close(self) -> None:
        """Give up the stream and the channel."""
        await self._plans.close()
        await self._channel.close()


def _no_cachemgr(address: str, said: str) -> Unavailable:
    """Return the error of an address without a cachemgr; `said` is gRPC's message, which stays in the metadata."""
    return Unavailable(
        f"no cachemgr answers at {address} ({last_cause(said)}): start one with `quire up PATH_OR_HUB_ID`, or give its "
        "address as the argument cachemgr or in QUIRE_CACHEMGR",
        metadata={"address": address, "cause": said},
    )


def _duration_of(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(round(seconds * 1000))
    return duration


async def keep_lease_alive(
    cache: CacheApi,
    lease_id: str,
    *,
    ttl_s: float,
    last_renewal: Callable[[], float],
    on_renewal: Callable[[], None] = lambda: None,
) -> LeaseLost:
    """Renew a lease a third of its ttl after the last call that renewed it, until it is lost; returns the loss.

    last_renewal says when that call was, by the running loop's clock; renewals made here need not be counted in it.
    on_renewal is called after each of these.
    """
    loop = asyncio.get_running_loop()
    renewed_at = loop.time()
    while True:
        renewed_at = max(renewed_at, last_renewal())
        due_s = renewed_at + ttl_s / 3 - loop.time()
        if due_s > 0:
            await asyncio.sleep(due_s)
            continue
        try:
            await cache.renew_lease(lease_id)
            renewed_at = loop.time()
            on_renewal()
        except LeaseLost as lost:
            return lost
        except QuireError:
            await asyncio.sleep(ttl_s / 20)  # the server is unavailable: it may recover before the lease ends
