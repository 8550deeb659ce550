"""Quire's scheduler whole: the engine's, and cachemgr's books in the same process, one step in flight.

Every message is made, turned to bytes and read again, as between the processes; nothing carries it. Parts of a step:

    schedule     Scheduler.schedule
    request      the plan as a message for cachemgr, and its bytes
    cachemgr     its bytes read, Ledger.plan (blocks, lease, tenant, and what another client's plan may not touch), the
                 grant signed, the answer's bytes
    answer       read, and Scheduler.on_planned
    step         the message for the worker, and its bytes
    report       the step before in cachemgr's books: Ledger.settle of the worker's report (tokens, blocks hashed)
    tokens       Scheduler.on_step_done of the step before (tokens taken, ends checked)

Outside: gRPC, the worker's report and answer as they come, delivery to callers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepping import MAX_SEQUENCE_TOKENS, MAX_STEP_TOKENS, SAMPLED_TOKEN, VOCABULARY, Load, Stopwatch, drive

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from books import EPOCH, LEASE, report_of
from core import TTL_S, make_ledger
from workload import BLOCK_SIZE

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cachemgr._core import PlanRequest, StepReport
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.service import messages as books_messages
from quire.client import SamplingParams
from quire.client.engine import messages
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.plans import StepInFlight
from quire.client.engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step in flight, with the report that cachemgr will get and the tokens that the engine will."""

    step: StepInFlight
    report: bytes
    seq_ids: Sequence[int]


class Quire:
    """All sequences decode once it is made, with a step in flight."""

    def __init__(self, load: Load) -> None:
        self._pool = AttachedPool(make_ledger(load.num_blocks), b"k" * 32, "-", terms=(1,))
        self._pool.ledger.open_lease(LEASE, ttl_s=TTL_S, now=0.0)
        limits = messages.limits_of(
            attach_pb2.PoolGeometry(
                block_size_tokens=BLOCK_SIZE,
                block_count=load.num_blocks + 1,
                max_sequence_count=load.num_running,
                max_sequence_tokens=MAX_SEQUENCE_TOKENS,
                vocabulary_size=VOCABULARY,
            ),
            max_step_tokens=MAX_STEP_TOKENS,
            max_running_sequences=load.num_running,
        )
        self._scheduler = Scheduler(limits)
        params = SamplingParams(max_tokens=load.max_new_tokens, ignore_eos=True)
        for number, tokens in enumerate(load.prompts()):
            self._scheduler.add(new_samples(limits, number, tokens, params, end_token_ids=(), seed=0))
        self._num_plans = 0
        self._in_flight: InFlight | None = None
        while self.step(Stopwatch()) < load.num_running:
            pass

    def step(self, watch: Stopwatch) -> int:
        """The next step planned, and the tokens of the one before it taken."""
        self._num_plans += 1
        watch.start()
        plan = self._scheduler.schedule()
        watch.lap("schedule")
        request = messages.encode_plan(plan, lease_id=LEASE, epoch=EPOCH, request_id=str(self._num_plans))
        body = request.SerializeToString()
        watch.lap("request")
        answer = answer_plan(self._pool, body)
        watch.lap("cachemgr")
        response = cache_service_pb2.PlanStepResponse.FromString(answer)
        step = self._scheduler.on_planned(plan, messages.decode_granted_step(response))
        watch.lap("answer")
        messages.encode_step(step, response.grant).SerializeToString()
        watch.lap("step")
        before, self._in_flight = self._in_flight, in_flight(step, response.grant)
        return 0 if before is None else self._settle(before, watch)

    def _settle(self, before: InFlight, watch: Stopwatch) -> int:
        tokens = [SAMPLED_TOKEN] * len(before.seq_ids)
        watch.start()
        self._pool.ledger.settle(StepReport(before.report))
        watch.lap("report")
        sampled, _ = self._scheduler.on_step_done(before.step, before.seq_ids, tokens)
        watch.lap("tokens")
        return len(sampled.sequences)


def answer_plan(pool: AttachedPool, body: bytes) -> bytes:
    """The bytes of a request to those of cachemgr's answer, as the service makes it."""
    request = PlanRequest(body)
    plan = pool.ledger.plan(request, now=1.0)
    return books_messages.encode_plan(plan, pool, lease_id=request.lease_id)


def in_flight(step: StepInFlight, signed: grant_pb2.SignedGrant) -> InFlight:
    """The step as if a worker had computed it."""
    report = report_of(grant_pb2.StepGrant.FromString(signed.grant), token=SAMPLED_TOKEN)
    return InFlight(step, report.SerializeToString(), list(report.sampled_sequence_ids))


if __name__ == "__main__":
    drive(Quire, package="quire-kv")
