"""The calls of CacheService that plan steps."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from quire.cachemgr._core import GrantedStep, PlanRequest, answer_on_stream
from quire.cachemgr.bounds import Drain
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.service import messages
from quire.cachemgr.service.pools import VisiblePools
from quire.cachemgr.service.statuses import refusing
from quire.cachemgr.service.turns import Turns
from quire.serving.access import Role, caller

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Planning:
    """Plans with their grants, call by call and on streams."""

    def __init__(self, pools: VisiblePools, drain: Drain, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._drain = drain
        self._clock = clock
        self._turns = Turns()
        self._refused_plans: Counter[Reason] = Counter()

    @property
    def num_waiting_admissions(self) -> int:
        return len(self._turns)

    @property
    def refused_plans(self) -> dict[Reason, int]:
        """On streams, as a whole, since the start."""
        return dict(self._refused_plans)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[PlanRequest, bytes]]:
        """The handlers of both methods. The core decodes their requests and encodes their answers."""
        return {
            "PlanStep": grpc.unary_unary_rpc_method_handler(self.PlanStep, request_deserializer=PlanRequest),
            "PlanSteps": grpc.stream_stream_rpc_method_handler(
                self.PlanSteps, request_deserializer=PlanRequest.on_stream
            ),
        }

    @refusing
    async def PlanStep(self, request: PlanRequest, context: Context) -> bytes:  # noqa: N802
        return await self._plan_in_parts(request)

    async def PlanSteps(  # noqa: N802
        self, request_iterator: AsyncIterator[PlanRequest], context: Context
    ) -> AsyncIterator[bytes]:
        async for request in request_iterator:
            try:
                answer = answer_on_stream(await self._plan_in_parts(request))
            except CallRefused as refused:
                self._refused_plans[refused.refusal.reason] += 1
                log.debug("plan refused reason=%s caller=%s", refused.refusal.reason.value, caller().name)
                answer = messages.encode_plan_error(refused.refusal)
            del request  # while the stream waits for the next one
            yield answer

    def plan_step(self, request: PlanRequest) -> bytes:
        """Plans one step; returns a serialised PlanStepResponse. Raises CallRefused."""
        pool, plan = self._plan(request)
        return self._encode(plan, pool, request.lease_id)

    async def _plan_in_parts(self, request: PlanRequest) -> bytes:
        """Plans in parts; other calls run between the parts that can be long."""
        if request.has_admissions:
            await self._turns.turn()
            while self._hash_part(request):
                await self._turns.further_turn()
        pool, plan = self._plan(request)
        if plan.has_refusals:
            await asyncio.sleep(0)
        return self._encode(plan, pool, request.lease_id)

    def _encode(self, plan: GrantedStep, pool: AttachedPool, lease_id: str) -> bytes:
        offset_s = self._pools.wall_clock_offset_s()
        return messages.encode_plan(plan, pool, lease_id=lease_id, wall_clock_offset_s=offset_s)

    def _hash_part(self, request: PlanRequest) -> bool:
        """Takes a part of the work off a plan with long prompts. True if there is more to take."""
        ledger = self._pools.own_pool(request.lease_id).ledger
        return ledger.hash_part(request, names_tenants=names_tenants())

    def _plan(self, request: PlanRequest) -> tuple[AttachedPool, GrantedStep]:
        self._drain.refuse_new()
        pool = self._pools.own_pool(request.lease_id)
        return pool, pool.ledger.plan(request, now=self._clock(), names_tenants=names_tenants())


def names_tenants() -> bool:
    """True if the caller may name the tenants of sequences."""
    return Role.GATEWAY in caller().roles
