"""The calls of CacheService about pins, tenants' shares of a pool, and admission checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import Admission
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.errors import CallRefused, invalid
from quire.cachemgr.service import messages
from quire.cachemgr.service.attachments import pool_detached
from quire.cachemgr.service.inspection import DEFAULT_PAGE, MAX_PAGE
from quire.cachemgr.service.pools import VisiblePools, sees_all, tenant_asked_about, tenant_asked_for
from quire.cachemgr.service.statuses import refusing
from quire.cachemgr.service.turns import in_turns
from quire.serving.access import caller

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PIN_TTL_S = 3600.0
MIN_PIN_TTL_S, MAX_PIN_TTL_S = 1.0, 86_400.0


class Keeping:
    """Pins and tenants."""

    def __init__(self, pools: VisiblePools, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._clock = clock

    @refusing
    async def CheckAdmission(  # noqa: N802
        self, request: cache_service_pb2.CheckAdmissionRequest, context: Context
    ) -> cache_service_pb2.CheckAdmissionResponse:
        reserve = request.admission_reserve_block_count
        messages.require_not_negative("admission_reserve_block_count", reserve)
        pools = self._pools.pools(request.pool)
        tenant = tenant_asked_for("CheckAdmission", request.admission)
        most_tokens = max((pool.ledger.geometry.max_tokens for pool in pools), default=0)
        admission = Admission(messages.known_bytes(request.admission), most_tokens)
        parts = [partial(check_admission, pool, tenant, admission, reserve) for pool in pools]
        checks = [check async for check in in_turns(parts)]
        checks.sort(key=lambda check: (not check.accepted, -check.cached_token_count))
        return cache_service_pb2.CheckAdmissionResponse(checks=checks)

    @refusing
    async def ListTenants(  # noqa: N802
        self, request: cache_service_pb2.ListTenantsRequest, context: Context
    ) -> cache_service_pb2.ListTenantsResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        ledger = self._pools.pool(request.pool).ledger
        behind = messages.decode_name_token(request.page_token)
        is_shown = (lambda name: True) if sees_all() else (lambda name: name == caller().name)
        uses = [
            use for use in ledger.inspector.tenants() if is_shown(use.name) and (behind is None or use.name > behind)
        ]
        num_leases = ledger.inspector.num_leases_by_tenant()
        offset_s = self._pools.wall_clock_offset_s()
        response = cache_service_pb2.ListTenantsResponse(
            tenants=[
                messages.encode_tenant(use, num_leases.get(use.name, 0), wall_clock_offset_s=offset_s)
                for use in uses[:limit]
            ]
        )
        if len(uses) > limit:
            response.next_page_token = messages.encode_name_token(uses[limit - 1].name)
        return response

    @refusing
    async def PinPrefix(  # noqa: N802
        self, request: cache_service_pb2.PinPrefixRequest, context: Context
    ) -> cache_service_pb2.PinPrefixResponse:
        ledger, tenant = self._pools.pool(request.pool).ledger, tenant_asked_for("PinPrefix", request)
        tokens = messages.decode_prefix(request.token_ids, request.salt, request.adapter, [ledger.geometry])
        ledger.check_adapter(tenant, request.adapter, "adapter")
        ttl_s = messages.seconds_of(request.ttl) if request.HasField("ttl") else DEFAULT_PIN_TTL_S
        if not MIN_PIN_TTL_S <= ttl_s <= MAX_PIN_TTL_S:
            raise CallRefused(invalid("ttl", f"{ttl_s} s", f"{MIN_PIN_TTL_S:g} s to {MAX_PIN_TTL_S:g} s"))
        pin = ledger.pin_prefix(
            tokens, salt=request.salt, adapter=request.adapter, tenant=tenant, ttl_s=ttl_s, now=self._clock()
        )
        use = ledger.inspector.tenant_use(tenant)
        assert use is not None, "a tenant with a pin is known"
        response = cache_service_pb2.PinPrefixResponse(
            pin_id=pin.pin_id.hex(),
            pinned_token_count=pin.num_tokens,
            pinned_block_count=use.num_pinned,
            pin_budget_block_count=use.pin_budget,
        )
        response.expire_time.FromNanoseconds(int((pin.until + self._pools.wall_clock_offset_s()) * 1e9))
        return response

    @refusing
    async def UnpinPrefix(  # noqa: N802
        self, request: cache_service_pb2.UnpinPrefixRequest, context: Context
    ) -> cache_service_pb2.UnpinPrefixResponse:
        pin_id = messages.decode_pin_id("pin_id", request.pin_id)
        ledger, tenant = self._pools.pool(request.pool).ledger, tenant_asked_about("UnpinPrefix", request)
        ledger.unpin_prefix(pin_id, tenant=tenant)
        return cache_service_pb2.UnpinPrefixResponse()

    @refusing
    async def ListPins(  # noqa: N802
        self, request: cache_service_pb2.ListPinsRequest, context: Context
    ) -> cache_service_pb2.ListPinsResponse:
        limit = messages.page_limit(request.page_size, default=DEFAULT_PAGE, most=MAX_PAGE)
        messages.check_page_token(request.page_token, messages.PIN_ID)
        behind = bytes.fromhex(request.page_token) or None
        ledger, tenant = self._pools.pool(request.pool).ledger, tenant_asked_about("ListPins", request)
        pins = ledger.inspector.pins(tenant=tenant, behind=behind, most=limit + 1)
        offset_s = self._pools.wall_clock_offset_s()
        response = cache_service_pb2.ListPinsResponse(
            pins=[messages.encode_pin(pin, wall_clock_offset_s=offset_s) for pin in pins[:limit]]
        )
        if len(pins) > limit:
            response.next_page_token = pins[limit - 1].pin_id.hex()
        return response


def check_admission(
    pool: AttachedPool, tenant: str, admission: Admission, reserve: int
) -> cache_service_pb2.AdmissionCheck:
    """Return the answer of one pool to an admission of a tenant."""
    check = pool.ledger.check_admission(tenant, admission, reserve=reserve)
    refusal = check.refusal if pool.is_attached else pool_detached(pool).refusal
    message = cache_service_pb2.AdmissionCheck(
        pool=pool.ledger.pool,
        accepted=refusal is None,
        cached_token_count=check.num_cached_tokens,
        needed_block_count=check.num_needed,
        available_block_count=check.num_available,
        block_counts=messages.counts_of(pool.ledger),
        worker_address=pool.worker_address,
    )
    if refusal is not None:
        message.refusal.CopyFrom(messages.encode_refusal(refusal))
    return message
