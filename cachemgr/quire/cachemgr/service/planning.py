"""The calls of CacheService that plan steps."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import GrantedStep
from quire.cachemgr.bounds import Drain
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.service import messages
from quire.cachemgr.service.grants import sign_grant
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
        """Plans in parts; other calls run between the parts that can be long."""
        if request.admissions or request.restores:
            await self._turns.turn()
        pool, plan = self._plan(request)
        if plan.has_refusals:
            await asyncio.sleep(0)
        self._answer(request, pool, plan, answer)

    def _plan(self, request: cache_service_pb2.PlanStepRequest) -> tuple[AttachedPool, GrantedStep]:
        self._drain.refuse_new()
        pool = self._pools.own_pool(request.lease_id)
        names_tenants = Role.GATEWAY in caller().roles
        return pool, pool.ledger.plan(messages.known_bytes(request), now=self._clock(), names_tenants=names_tenants)

    def _answer(
        self,
        request: cache_service_pb2.PlanStepRequest,
        pool: AttachedPool,
        plan: GrantedStep,
        answer: cache_service_pb2.PlanStepResponse,
    ) -> None:
        messages.encode_plan(answer, plan)
        sign_grant(plan, answer.grant, pool, lease_id=request.lease_id)
