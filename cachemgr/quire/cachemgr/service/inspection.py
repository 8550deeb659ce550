"""The calls of CacheService that read without taking blocks, and ResetPrefixCache."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import Ledger, Reset
from quire.cachemgr.bounds import MAX_WATCHES, Places
from quire.cachemgr.catalog import AttachedPool, Catalog, leases_from
from quire.cachemgr.errors import CallRefused, sequence_not_found
from quire.cachemgr.service import messages
from quire.cachemgr.service.attachments import Attachments
from quire.cachemgr.service.pools import VisiblePools, is_visible, require_role, sees_all, tenant_asked_for
from quire.cachemgr.service.statuses import refusing, to_error_status
from quire.cachemgr.service.turns import in_turns
from quire.cachemgr.service.watch import DEVICE, View, watch_blocks
from quire.cachemgr.service.watch_pools import watch_pools
from quire.serving.access import Role, caller
from quire.serving.errors import CallEnded

Context = grpc.aio.ServicerContext[Any, Any]

PAGE_KEY = "[0-9a-f]{24}"
"""The form of page keys, which order leases in lists."""
DEFAULT_PAGE, MAX_PAGE = 100, 1_000
DEFAULT_BLOCK_PAGE, MAX_BLOCK_PAGE = 1_000, 10_000
AUDIT_SLICE = 8_192
"""Blocks that are checked before other calls get a turn: a few milliseconds in a pool of a million."""
RESET_SLICE = 1_000
"""Blocks that are made unfindable before other calls get a turn: about a millisecond."""


class Inspection:
    """Pools, leases, sequences, blocks and prefixes as they are."""

    def __init__(
        self, catalog: Catalog, pools: VisiblePools, attachments: Attachments, clock: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._attachments = attachments
        self._clock = clock
        self._watch_places = Places(MAX_WATCHES, "watches")

    @property
    def num_watches(self) -> int:
        return self._watch_places.num_taken

    # -- pools ----------------------------------------------------------------------------------------------------

    @refusing
    async def GetPool(  # noqa: N802
        self, request: cache_service_pb2.GetPoolRequest, context: Context
    ) -> cache_service_pb2.GetPoolResponse:
        pool = messages.encode_pool(self._pools.pool(request.pool), shown_adapters=self._pools.shown_adapters())
        return cache_service_pb2.GetPoolResponse(pool=pool)

    @refusing
    async def ListPools(  # noqa: N802
        self, request: cache_service_pb2.ListPoolsRequest, context: Context
    ) -> cache_service_pb2.ListPoolsResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, messages.POOL_NAME)
        pools = [pool for pool in self._pools.pools("") if pool.ledger.pool > request.page_token]
        shown = self._pools.shown_adapters()
        response = cache_service_pb2.ListPoolsResponse(
            pools=[messages.encode_pool(pool, shown_adapters=shown) for pool in pools[:limit]]
        )
        if len(pools) > limit:
            response.next_page_token = pools[limit - 1].ledger.pool
        return response

    async def WatchPools(  # noqa: N802
        self, request: cache_service_pb2.WatchPoolsRequest, context: Context
    ) -> AsyncIterator[cache_service_pb2.WatchPoolsResponse]:
        try:
            with self._watch_places.taken():
                watch = watch_pools(self._catalog, shown_adapters=self._pools.shown_adapters)
                async with contextlib.aclosing(watch) as answers:
                    async for answer in answers:
                        yield answer
        except CallRefused as refused:
            raise CallEnded(to_error_status(refused.refusal)) from None

    @refusing
    async def GetStatistics(  # noqa: N802
        self, request: cache_service_pb2.GetStatisticsRequest, context: Context
    ) -> cache_service_pb2.GetStatisticsResponse:
        return cache_service_pb2.GetStatisticsResponse(
            pools=[messages.statistics_of(pool.ledger) for pool in self._pools.pools(request.pool)]
        )

    @refusing
    async def AuditPool(  # noqa: N802
        self, request: cache_service_pb2.AuditPoolRequest, context: Context
    ) -> cache_service_pb2.AuditPoolResponse:
        ledger = self._pools.pool(request.pool).ledger
        firsts = range(0, ledger.geometry.num_blocks, AUDIT_SLICE)
        parts: list[Callable[[], list[str]]] = [ledger.inspector.audit_counts, ledger.inspector.audit_promises]
        parts += [partial(ledger.inspector.audit, first, first + AUDIT_SLICE) for first in firsts]
        violations = [violation async for wrong in in_turns(parts) for violation in wrong]
        return cache_service_pb2.AuditPoolResponse(
            violations=violations,
            block_count=ledger.geometry.num_blocks - 1,
            sequence_count=messages.statistics_of(ledger).sequence_count,
        )

    # -- leases and sequences -------------------------------------------------------------------------------------

    @refusing
    async def ListLeases(  # noqa: N802
        self, request: cache_service_pb2.ListLeasesRequest, context: Context
    ) -> cache_service_pb2.ListLeasesResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, PAGE_KEY)
        is_ending = messages.decode_lease_state("state", request.state)
        tenant = request.tenant if request.HasField("tenant") else None
        ledgers = [pool.ledger for pool in self._pools.pools(request.pool)]
        response = cache_service_pb2.ListLeasesResponse()
        offset_s, last_key = self._pools.wall_clock_offset_s(), ""
        for key, lease in self._catalog.leases_after(request.page_token, ledgers):
            if not is_visible(lease) or is_ending not in (None, lease.is_ending) or tenant not in (None, lease.tenant):
                continue
            if len(response.leases) == limit:
                response.next_page_token = last_key
                break
            response.leases.append(messages.encode_lease(lease, wall_clock_offset_s=offset_s))
            last_key = key
        return response

    @refusing
    async def GetSequence(  # noqa: N802
        self, request: cache_service_pb2.GetSequenceRequest, context: Context
    ) -> cache_service_pb2.GetSequenceResponse:
        lease_id = self._pools.lease_id_of(request.lease_id)
        sequence = self._pools.sequence(lease_id, request.sequence_id)
        if sequence is None:
            raise CallRefused(sequence_not_found(request.sequence_id))
        encoded = messages.encode_sequence(sequence, lease_id, with_blocks=True)
        return cache_service_pb2.GetSequenceResponse(sequence=encoded)

    @refusing
    async def ListSequences(  # noqa: N802
        self, request: cache_service_pb2.ListSequencesRequest, context: Context
    ) -> cache_service_pb2.ListSequencesResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, PAGE_KEY + r"\.[0-9]{10}")
        ledger = self._pools.pool(request.pool).ledger
        tenant = request.tenant if request.HasField("tenant") else None
        last_lease, _, last_id = request.page_token.partition(".")
        response, last_token = cache_service_pb2.ListSequencesResponse(), ""
        for key, lease in leases_from(ledger, last_lease, only=request.lease_id):
            shown = tenant if is_visible(lease) else caller().name
            if tenant not in (None, shown):
                continue
            first, most = int(last_id) + 1 if key == last_lease else 0, limit + 1 - len(response.sequences)
            for sequence in ledger.inspector.sequences_from(lease.lease_id, first, most, tenant=shown):
                if len(response.sequences) == limit:
                    response.next_page_token = last_token
                    return response
                response.sequences.append(messages.encode_sequence(sequence, lease.lease_id, with_blocks=False))
                last_token = f"{key}.{sequence.seq_id:010d}"
        return response

    # -- blocks ---------------------------------------------------------------------------------------------------

    @refusing
    async def ListBlocks(  # noqa: N802
        self, request: cache_service_pb2.ListBlocksRequest, context: Context
    ) -> cache_service_pb2.ListBlocksResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_BLOCK_PAGE, most=MAX_BLOCK_PAGE)
        messages.check_page_token(request.page_token, "[0-9]{1,10}")
        state = messages.decode_block_state("state", request.state)
        ledger = self._pools.pool(request.pool).ledger
        if request.lease_id:
            self._pools.visible_pool(request.lease_id)
            ledger.inspector.lease(request.lease_id)
        tenant = request.tenant if request.HasField("tenant") else None
        response = cache_service_pb2.ListBlocksResponse()
        if not sees_all():
            if tenant not in (None, caller().name):
                return response
            tenant = caller().name
        blocks, following = ledger.inspector.list_blocks(
            int(request.page_token or 0) + 1, limit, state=state, tenant=tenant, lease_id=request.lease_id or None
        )
        response.MergeFromString(blocks)
        if following is not None:
            response.next_page_token = str(following - 1)
        return response

    async def WatchBlocks(  # noqa: N802
        self, request: cache_service_pb2.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[cache_service_pb2.WatchBlocksResponse]:
        try:
            if request.include_content:
                require_role("WatchBlocks", Role.CONTENT)
            view = _view_of(request)
            with self._watch_places.taken():
                watch = watch_blocks(self._catalog, request.pool, view, cursor=request.cursor, clock=self._clock)
                async with contextlib.aclosing(watch) as answers:
                    async for answer in answers:
                        yield answer
        except CallRefused as refused:
            raise CallEnded(to_error_status(refused.refusal)) from None

    @refusing
    async def ResetPrefixCache(  # noqa: N802
        self, request: cache_service_pb2.ResetPrefixCacheRequest, context: Context
    ) -> cache_service_pb2.ResetPrefixCacheResponse:
        pool = self._pools.pool(request.pool)
        ledger = pool.ledger
        salt, tokens = messages.decode_reset_scope(request, ledger.geometry)
        if request.HasField("tenant") or salt is not None:
            tenant = tenant_asked_for("ResetPrefixCache", request)
            reset = ledger.begin_reset(tenant, salt=salt, adapter=request.adapter, tokens=tokens)
            parts = parts_of_reset(ledger, reset, self._clock(), by=caller().name)
        else:
            require_role("ResetPrefixCache", Role.OPERATOR)
            parts = parts_of_whole_reset(ledger, self._clock(), by=caller().name)
        dropped = [dropped async for dropped in in_turns(parts)]
        await self._attachments.erased(pool)
        return cache_service_pb2.ResetPrefixCacheResponse(
            dropped_block_count=sum(num_blocks for num_blocks, _ in dropped),
            dropped_pin_count=sum(num_pins for _, num_pins in dropped),
        )

    # -- prefixes -------------------------------------------------------------------------------------------------

    @refusing
    async def LookupPrefix(  # noqa: N802
        self, request: cache_service_pb2.LookupPrefixRequest, context: Context
    ) -> cache_service_pb2.LookupPrefixResponse:
        pools = self._pools.pools(request.pool)
        tokens, tenant = prefix_asked_for("LookupPrefix", request, pools)
        pools = pools_with_adapter(pools, tenant, request.adapter)
        parts = [partial(match_of, pool, tokens, request, tenant) for pool in pools]
        matches = [match async for match in in_turns(parts)]
        matches.sort(key=lambda match: -match.cached_token_count)
        return cache_service_pb2.LookupPrefixResponse(matches=matches)

    @refusing
    async def ExplainPrefix(  # noqa: N802
        self, request: cache_service_pb2.ExplainPrefixRequest, context: Context
    ) -> cache_service_pb2.ExplainPrefixResponse:
        pool = self._pools.pool(request.pool)
        tokens, tenant = prefix_asked_for("ExplainPrefix", request, [pool])
        ledger = pool.ledger
        ledger.check_adapter(tenant, request.adapter, "adapter")
        explanation = ledger.inspector.explain(
            tokens, salt=request.salt, adapter=request.adapter, tenant=tenant, with_other_tenants=sees_all()
        )
        offset_s = self._pools.wall_clock_offset_s()
        response = messages.encode_explanation(explanation, ledger, offset_s=offset_s)
        if explanation.reset_by is not None and (sees_all() or explanation.reset_by == tenant):
            response.reset_by = explanation.reset_by
        if explanation.evicted_by is not None:
            evicting_tenant, lease_id_prefix = explanation.evicted_by
            if sees_all() or evicting_tenant == tenant:
                response.evicted_by_tenant = evicting_tenant
                response.evicted_by_lease_id_prefix = lease_id_prefix
        return response


def _view_of(request: cache_service_pb2.WatchBlocksRequest) -> View:
    """Return the blocks that a caller may watch. Raises CallRefused (ROLE_MISSING, INVALID_ARGUMENT)."""
    is_named = request.HasField("tenant")
    tenant = tenant_asked_for("WatchBlocks", request) if is_named or not sees_all() else None
    if request.include_content and tenant not in (None, caller().name):
        require_role("WatchBlocks", Role.OPERATOR)
    media = (DEVICE, *messages.decode_copy_media(request.copy_media))
    return View(tenant=tenant, with_content=request.include_content, media=media)


def prefix_asked_for(
    method: str,
    request: cache_service_pb2.LookupPrefixRequest | cache_service_pb2.ExplainPrefixRequest,
    pools: Sequence[AttachedPool],
) -> tuple[bytes, str]:
    """Tokens and tenant. Tokens beyond the longest sequence of the pools are left out: no cached prefix has them.

    Raises CallRefused (ROLE_MISSING, INVALID_ARGUMENT, EMPTY_PROMPT, TOKEN_OUT_OF_RANGE).
    """
    tenant = tenant_asked_for(method, request)
    geometries = [pool.ledger.geometry for pool in pools]
    longest = max((geometry.max_tokens for geometry in geometries), default=1)
    return messages.decode_prefix(request.token_ids[:longest], request.salt, request.adapter, geometries), tenant


def pools_with_adapter(pools: Sequence[AttachedPool], tenant: str, adapter: bytes) -> list[AttachedPool]:
    """The pools that take a tenant's admissions with an adapter. Raises CallRefused (INVALID_ARGUMENT) if none does."""
    found, refused = [], None
    for pool in pools:
        try:
            pool.ledger.check_adapter(tenant, adapter, "adapter")
            found.append(pool)
        except CallRefused as error:
            refused = error
    if refused is not None and not found:
        raise refused
    return found


def parts_of_whole_reset(ledger: Ledger, now: float, *, by: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """Drop everything for a caller, a slice at a time: how many blocks and pins."""

    def drop(first: int) -> tuple[int, int]:
        num_pins = 0 if first else ledger.inspector.num_pins()
        return ledger.reset_prefix_cache(first, first + RESET_SLICE, now=now, by=by), num_pins

    return (partial(drop, first) for first in range(0, ledger.geometry.num_blocks, RESET_SLICE))


def parts_of_reset(ledger: Ledger, reset: Reset, now: float, *, by: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """Drop a reset's content for a caller, a part at a time: each returns the numbers of blocks and pins."""
    is_done = False

    def drop() -> tuple[int, int]:
        nonlocal is_done
        dropped = ledger.go_on_with_reset(reset, now=now, by=by)
        is_done = dropped is None
        return dropped or (0, 0)

    while not is_done:
        yield drop


def match_of(
    pool: AttachedPool, tokens: bytes, request: cache_service_pb2.LookupPrefixRequest, tenant: str
) -> cache_service_pb2.PrefixMatch:
    """How much of a prefix a pool holds: of these tokens of the request, for a tenant."""
    num_in_pool, num_in_host, num_on_disk = pool.ledger.inspector.cached_tokens(
        tokens, salt=request.salt, adapter=request.adapter, tenant=tenant
    )
    return cache_service_pb2.PrefixMatch(
        pool=pool.ledger.pool,
        cached_token_count=num_in_pool + num_in_host + num_on_disk,
        tokens_by_medium=messages.encode_media(num_in_pool, num_in_host, num_on_disk),
        block_counts=messages.counts_of(pool.ledger),
        worker_address=pool.worker_address,
    )
