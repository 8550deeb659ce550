"""A pool of blocks, its engine's scheduler and its worker, in virtual time.

The books are cachemgr's (Ledger) and the scheduler is the engine's (Scheduler), both unchanged. They exchange the
messages of the contract. The turns are those of engine.py: up to two steps are in flight, a step is planned before
the tokens of the one before it are back, and nothing is planned between those moments. Left out: gRPC, the texts and
everything about failures. The worker's model is replaced by the time of a step (step_times.py), and tokens by those
of the requests. A step first does its copies to the host tier and back, one block after the other, then it computes.
The disk (disk.py) is read and written beside the steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cachemgr._core import Ledger, PlanRequest, StepReport
from quire.cachemgr.eviction_interface import EvictionPolicy
from quire.cachemgr.service import messages
from quire.client.channel import RetryPolicy
from quire.client.engine.messages import decode_granted_step, encode_plan, limits_of
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.plans import StepInFlight
from quire.client.engine.scheduling.policy import Policy
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import Sequence as EngineSequence
from quire.client.engine.scheduling.statistics import SchedulerStatistics
from quire.client.engine.scheduling.tier import TierCosts
from quire.gateway.routing.choosing import PoolLoad, PoolUse
from quire.lab.config import Fleet
from quire.lab.disk import SimulatedDisk
from quire.lab.step_times import IDLE_S
from quire.lab.tokens import UNUSED_TOKEN

_EPOCH, _LEASE = 1, "lab"
_MAX_STEPS_IN_FLIGHT = 2
# The engine's pauses between plans that ran nothing, without their random part.
_PAUSES = RetryPolicy(first_delay_s=0.0005, max_delay_s=0.05)


@dataclass(slots=True)
class Job:
    """A request in a pool.

    outputs    the tokens that its steps sample, and one more: the engine runs a step ahead of an end token
    """

    number: int
    outputs: list[int]
    first_at_s: float | None = None
    ended_at_s: float | None = None
    num_cached: int = 0
    num_generated: int = 0


@dataclass(slots=True)
class _Sent:
    """A step in flight.

    sampler_ids   the runs that the worker samples a token for
    compute_s     the time of the runs; num_copied blocks are copied to the host tier or back in copy_s, before them
    """

    step: StepInFlight
    sampler_ids: list[int]
    compute_s: float
    num_copied: int
    copy_s: float
    ends_at_s: float
    asked_to_compute: bool


class SimulatedPool:
    """One worker. `turn` advances it; a PoolState for routers."""

    def __init__(
        self, name: str, fleet: Fleet, policy: Policy, eviction: str | EvictionPolicy, *, verify: bool = False
    ) -> None:
        """With verify, the scheduler and the books check their invariants after each change."""
        self.name = name
        self.eviction = eviction
        self.use = PoolUse()
        self._fleet = fleet
        self._layer_parts = fleet.layer_parts
        geometry = fleet.geometry
        self._keeps_evicted = geometry.host_cached_block_limit > 0
        self._ledger = Ledger(name, _EPOCH, messages.decode_geometry(geometry), policy=eviction, verify=verify)
        self._ledger.open_lease(_LEASE, ttl_s=1.0, now=0.0)
        self._ledger.keep_contents(False)  # nothing here reads the tokens of blocks
        self._disk = SimulatedDisk(self._ledger, fleet.step) if fleet.disk_blocks else None
        limits = limits_of(
            geometry,
            max_step_tokens=fleet.max_step_tokens,
            max_running_sequences=fleet.max_running_sequences,
            max_expected_prompts=fleet.max_expected_prompts,
        )
        self._scheduler = Scheduler(limits, policy=policy, by_tenant=fleet.separate_tenants, verify=verify)
        self._request_ids = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._flight: deque[_Sent] = deque()
        self._free_at_s = 0.0
        self._fruitless_in_row = 0
        self._prompt: tuple[bytes, str] = (b"", "")
        self._num_found: int | None = None
        self.wakes_at_s: float | None = None
        self.busy_s = 0.0
        self.num_copied = 0
        self.copying_s = 0.0
        self.num_steps = 0
        self.num_computed = 0

    def busy_until(self, now_s: float) -> float:
        """Return the seconds of computing until now; busy_s has the steps in flight whole."""
        return self.busy_s - sum(min(sent.compute_s, max(0.0, sent.ends_at_s - now_s)) for sent in self._flight)

    # For routers.

    def look_for(self, prompt: bytes, tenant: str) -> None:
        """Name the prompt of the request that is being placed."""
        self._prompt, self._num_found = (prompt, tenant if self._fleet.separate_tenants else ""), None

    @property
    def num_open(self) -> int:
        """Requests that were placed here and have not ended."""
        return self.use.num_open

    @property
    def num_pending(self) -> int:
        """Tokens of prompts that wait here to be computed."""
        return self.use.num_pending

    @property
    def num_cached(self) -> int:
        """Tokens of the arriving prompt that an admission would find."""
        if self._num_found is None:
            prompt, tenant = self._prompt
            self._num_found = self._ledger.inspector.num_cached_tokens(prompt, salt=b"", tenant=tenant)
        return self._num_found

    @property
    def num_found(self) -> int:
        """Tokens of the prompt found in the prefix cache, if a router asked for them, else 0."""
        return self._num_found or 0

    @property
    def load(self) -> PoolLoad:
        """Load of the pool for the prompt, with the values that the gateway's router reads."""
        return self.use.load(self.num_cached, messages.counts_of(self._ledger), self._fleet.block_size)

    # The engine.

    def add(self, number: int, tokens: Sequence[int], num_prompt: int, *, tenant: str, is_length_known: bool) -> None:
        """Take a request. Raises InvalidRequest if it can never fit."""
        params = _params(len(tokens) - num_prompt if is_length_known else None, tenant)
        limits, request_id = self._scheduler.limits, next(self._request_ids)
        sequences = new_samples(limits, request_id, tokens[:num_prompt], params, end_token_ids=(tokens[-1],), seed=0)
        self._scheduler.add(sequences)
        self._jobs[request_id] = Job(number, [*tokens[num_prompt:], UNUSED_TOKEN])

    def turn(self, now_s: float, on_first: Callable[[Job], None], on_end: Callable[[Job], None]) -> float | None:
        """Do all that the engine does at this time; return when it goes on, None if it waits for a request."""
        while self._scheduler.has_work:
            if len(self._flight) < _MAX_STEPS_IN_FLIGHT and self._plan(now_s, on_end):
                if self._has_run_nothing():
                    ends_at_s = self._flight[0].ends_at_s
                    self._settle(ends_at_s, on_first, on_end)
                    return ends_at_s + self._next_pause_s()
                continue
            if not self._flight:
                raise RuntimeError("there is work, nothing to plan and nothing to wait for")
            if self._flight[0].ends_at_s > now_s:
                return self._flight[0].ends_at_s
            self._settle(now_s, on_first, on_end)
        return None

    def _plan(self, now_s: float, on_end: Callable[[Job], None]) -> bool:
        """Plan a step and begin it when the worker is free. False if a step in flight has to end first."""
        if self._disk is not None:
            self._disk.turn(now_s)
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return False
        request = encode_plan(plan, lease_id=_LEASE, epoch=_EPOCH, request_id="")
        body = PlanRequest(request.SerializeToString())
        planned = self._ledger.plan(body, now=now_s, names_tenants=self._fleet.separate_tenants)
        if self._disk is not None:
            self._disk.turn(now_s)
        encoded = planned.encode_answer() + messages.encode_refusals(planned)
        answer = cache_service_pb2.PlanStepResponse.FromString(encoded)
        step = self._scheduler.on_planned(plan, decode_granted_step(answer))
        for failed in step.failed:
            self._end(self._jobs.pop(failed.sequence.request_id), failed.sequence, now_s, on_end)
        sampler_ids, num_copied = list(step.samplers), 0
        if planned.has_refusals or plan.offload_ids or plan.restore_ids or self._keeps_evicted:
            grant = grant_pb2.StepGrant.FromString(planned.encode_grant(self.name, _EPOCH, 1, _LEASE))
            # A sequence may have given way at once: it runs, and its result is dropped.
            sampler_ids = [i for i, samples in zip(grant.run_sequence_ids, grant.run_samples, strict=True) if samples]
            num_copied = len(grant.offload_source_block_ids) + len(grant.restore_source_host_block_ids)
        self._send(step, sampler_ids, num_copied, now_s, asked_to_compute=plan.asks_to_compute)
        return True

    def _send(
        self, step: StepInFlight, sampler_ids: list[int], num_copied: int, now_s: float, *, asked_to_compute: bool
    ) -> None:
        """Let the worker begin with a step when it is free."""
        times = self._fleet.step
        compute_s = times.seconds(step.starts, step.counts, self._layer_parts) if step.seq_ids else 0.0
        if now_s - self._free_at_s > IDLE_S:
            compute_s *= times.idle_ratio
        copy_s = times.copy_s * num_copied
        self._free_at_s = max(now_s, self._free_at_s) + copy_s + compute_s
        self.busy_s += compute_s
        self.num_copied += num_copied
        self.copying_s += copy_s
        self.num_computed += sum(step.counts)
        self._flight.append(_Sent(step, sampler_ids, compute_s, num_copied, copy_s, self._free_at_s, asked_to_compute))

    def _has_run_nothing(self) -> bool:
        """True if the plan asked for tokens, got none, and nothing else is in flight: blocks are on the way back."""
        return len(self._flight) == 1 and self._flight[0].asked_to_compute and not self._flight[0].step.seq_ids

    def _next_pause_s(self) -> float:
        self._fruitless_in_row += 1
        return min(_PAUSES.max_delay_s, _PAUSES.first_delay_s * 2.0 ** min(self._fruitless_in_row - 1, 16))

    def _settle(self, now_s: float, on_first: Callable[[Job], None], on_end: Callable[[Job], None]) -> None:
        """Take the tokens of the oldest step in flight."""
        sent = self._flight.popleft()
        step, jobs = sent.step, self._jobs
        self._observe_costs(sent)
        tokens = [self._token_of(step.samplers.get(seq_id)) for seq_id in sent.sampler_ids]
        report = attach_pb2.StepReport(
            lease_id=_LEASE,
            step_number=step.step_number,
            outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
            sequence_ids=step.seq_ids,
            computed_token_counts=[start + count for start, count in zip(step.starts, step.counts, strict=True)],
            sampled_sequence_ids=sent.sampler_ids,
            sampled_token_ids=tokens,
        )
        self._ledger.settle(StepReport(report.SerializeToString()))
        if step.seq_ids:
            self.num_steps += 1
            self._fruitless_in_row = 0
        accepted, _ = self._scheduler.on_step_done(step, sent.sampler_ids, tokens)
        for sequence in accepted.sequences:
            if sequence in accepted.ended:
                job = jobs.pop(sequence.request_id)
                self._note_first(job, sequence, now_s, on_first)
                self._end(job, sequence, now_s, on_end)
            elif len(sequence.token_ids) == sequence.num_prompt_tokens + 1:
                self._note_first(jobs[sequence.request_id], sequence, now_s, on_first)

    def _observe_costs(self, sent: _Sent) -> None:
        """Let the scheduler learn the costs of a preemption's two ways, as the engine does."""
        if self._fleet.host_blocks:
            block_bytes = self._scheduler.limits.block_bytes
            num_read, read_s = (0, 0.0) if self._disk is None else self._disk.take_reads()
            self._scheduler.costs.observe_step(
                sent.step.counts,
                compute_s=sent.compute_s,
                num_copied_bytes=sent.num_copied * block_bytes,
                copy_s=sent.copy_s,
                num_read_bytes=num_read * block_bytes,
                read_s=read_s,
            )

    def _token_of(self, sequence: EngineSequence | None) -> int:
        """The next token of a sequence's answer; any token if the result is dropped."""
        job = None if sequence is None else self._jobs.get(sequence.request_id)
        if sequence is None or job is None:
            return UNUSED_TOKEN
        return job.outputs[len(sequence.token_ids) - sequence.num_prompt_tokens]

    def _note_first(self, job: Job, sequence: EngineSequence, now_s: float, on_first: Callable[[Job], None]) -> None:
        if job.first_at_s is None:
            job.first_at_s = now_s
            job.num_cached = 0 if sequence.cache_outcome is None else sequence.cache_outcome.num_cached_tokens
            on_first(job)

    def _end(self, job: Job, sequence: EngineSequence, now_s: float, on_end: Callable[[Job], None]) -> None:
        job.ended_at_s = now_s
        job.num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        on_end(job)

    # State as values.

    def scheduler_statistics(self) -> SchedulerStatistics:
        """The scheduler's counters and present numbers."""
        return self._scheduler.statistics()

    @property
    def scheduler_costs(self) -> TierCosts:
        """The costs of computing and copying, as the scheduler has learned them."""
        return self._scheduler.costs

    def pool_statistics(self) -> cache_service_pb2.PoolStatistics:
        """The books' counters and present numbers. Cost: O(sequences)."""
        return messages.statistics_of(self._ledger)


@lru_cache(maxsize=4096)
def _params(max_tokens: int | None, tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=max_tokens is not None, tenant=tenant)


def prompt_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Tokens as the books read them: 4 bytes each, little-endian."""
    return tokens.astype("<i4", copy=False).tobytes()
