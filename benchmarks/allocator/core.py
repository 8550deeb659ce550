"""Quire's core as a subject: the only file of this benchmark that calls the ledger.

The bytes of requests are made outside of the timed regions, and so are the worker's reports. The call that plans
a request decodes it. Nothing is subtracted: a step's own cost (the row "empty step") is in every row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from workload import BLOCK_SIZE, VOCAB, Prompts

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cachemgr._core import GrantedStep, Ledger, PlanRequest, StepReport
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.service import messages

EPOCH = 1
TTL_S = 1e9
LEASE = "prompts"
SAMPLED_TOKEN = 7
MAX_SEQUENCE_TOKENS = 32_768
CHAIN_BLOCKS = 8
CROWD_IDS = 1 << 30

clock = time.perf_counter_ns
Outcome = attach_pb2.StepOutcome.ValueType


def make_geometry(num_blocks: int, *, max_sequences: int = 1 << 20) -> Geometry:
    """A pool with num_blocks usable blocks of 16 tokens."""
    return Geometry(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + 1,
        block_bytes=1,
        max_sequences=max_sequences,
        max_sequence_tokens=MAX_SEQUENCE_TOKENS,
        vocab_size=VOCAB,
        model="benchmark",
        model_fingerprint="benchmark",
    )


def make_ledger(num_blocks: int, *, max_sequences: int = 1 << 20) -> Ledger:
    """A ledger as it serves, checks of every call off."""
    return Ledger("benchmark", EPOCH, make_geometry(num_blocks, max_sequences=max_sequences))


# -- requests, and the worker's reports -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The items of a request. Its bytes are made for a lease, outside of the timed regions."""

    message: cache_service_pb2.PlanStepRequest

    def body(self, lease_id: str) -> bytes:
        self.message.lease_id, self.message.epoch = lease_id, EPOCH
        return self.message.SerializeToString()


def asked(**items: Any) -> StepRequest:
    return StepRequest(cache_service_pb2.PlanStepRequest(**items))


def admission(seq_id: int, tokens: list[int]) -> StepRequest:
    return asked(admissions=[cache_service_pb2.Admission(sequence_id=seq_id, token_ids=tokens)])


def extension(seq_ids: list[int]) -> StepRequest:
    """One token of each."""
    return asked(extends=cache_service_pb2.Extends(sequence_ids=seq_ids, token_counts=[1] * len(seq_ids)))


def releases(*seq_ids: int) -> StepRequest:
    return asked(release_sequence_ids=seq_ids)


def forking(parent_id: int, child_ids: list[int], num_tokens: int) -> StepRequest:
    """Children that begin with num_tokens of the parent; then one token of the parent and of each child."""
    fork = cache_service_pb2.Fork(parent_sequence_id=parent_id, child_sequence_ids=child_ids, token_count=num_tokens)
    seq_ids = [parent_id, *child_ids]
    extends = cache_service_pb2.Extends(sequence_ids=seq_ids, token_counts=[1] * len(seq_ids))
    return asked(forks=[fork], extends=extends)


@dataclass(slots=True)
class Wishes:
    """A step's request in the making, for loads that mix everything."""

    releases: list[int]
    trims: list[tuple[int, int]]
    forks: list[tuple[int, list[int], int]]
    extends: list[tuple[int, int]]
    appends: dict[int, int]
    """One token each."""
    admissions: list[tuple[int, list[int], int]]

    def request(self) -> StepRequest:
        forks = [
            cache_service_pb2.Fork(parent_sequence_id=parent_id, child_sequence_ids=child_ids, token_count=num_tokens)
            for parent_id, child_ids, num_tokens in self.forks
        ]
        admissions = [
            cache_service_pb2.Admission(sequence_id=seq_id, token_ids=tokens, max_compute_token_count=most)
            for seq_id, tokens, most in self.admissions
        ]
        return asked(
            release_sequence_ids=self.releases,
            trim_sequence_ids=[seq_id for seq_id, _ in self.trims],
            trim_token_counts=[num_tokens for _, num_tokens in self.trims],
            forks=forks,
            extends=self._extends(),
            admissions=admissions,
        )

    def _extends(self) -> cache_service_pb2.Extends:
        seq_ids = [seq_id for seq_id, _ in self.extends]
        extends = cache_service_pb2.Extends(sequence_ids=seq_ids, token_counts=[count for _, count in self.extends])
        if self.appends:
            extends.append_token_counts.extend(int(seq_id in self.appends) for seq_id in seq_ids)
            extends.append_token_ids.extend(self.appends[seq_id] for seq_id in seq_ids if seq_id in self.appends)
        return extends


class Report:
    """The worker's report of a computed step: everything planned, and a token for every run that samples."""

    def __init__(self, plan: GrantedStep) -> None:
        grant = grant_pb2.StepGrant.FromString(plan.encode_grant("benchmark", EPOCH, 1, LEASE))
        runs = zip(grant.run_sequence_ids, grant.run_samples, strict=True)
        sampled_ids = [seq_id for seq_id, samples in runs if samples]
        starts_and_counts = zip(grant.run_starts, grant.run_token_counts, strict=True)
        self.step_number = grant.step_number
        self.num_copies = len(grant.copy_target_block_ids)
        self._message = attach_pb2.StepReport(
            step_number=grant.step_number,
            sequence_ids=grant.run_sequence_ids,
            computed_token_counts=[int(start) + int(count) for start, count in starts_and_counts],
            sampled_sequence_ids=sampled_ids,
            sampled_token_ids=[SAMPLED_TOKEN] * len(sampled_ids),
        )

    @property
    def num_runs(self) -> int:
        return len(self._message.sequence_ids)

    def is_doomed(self, ledger: Ledger, lease_id: str) -> bool:
        """True if a step before it computed nothing, so that the worker refuses it."""
        return ledger.probe.steps_in_flight(lease_id)[0].is_doomed

    def settle(self, ledger: Ledger, lease_id: str, outcome: Outcome = attach_pb2.STEP_OUTCOME_COMPUTED) -> int:
        """Enters the report as the servicer does; returns nanoseconds."""
        self._message.lease_id, self._message.outcome = lease_id, outcome
        body = self._message.SerializeToString()
        start = clock()
        ledger.settle(StepReport(body))
        return clock() - start


def plan(ledger: Ledger, lease_id: str, request: StepRequest, *, now: float = 1.0) -> tuple[GrantedStep, int]:
    """Plans a step; returns the plan and nanoseconds."""
    body = request.body(lease_id)
    start = clock()
    planned = ledger.plan(PlanRequest(body), now=now)
    return planned, clock() - start


def step(ledger: Ledger, lease_id: str, request: StepRequest) -> int:
    """Plans a step and settles it: the nanoseconds of both."""
    planned, taken = plan(ledger, lease_id, request)
    return taken + Report(planned).settle(ledger, lease_id)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a sequence, in tokens."""

    num_known: int
    num_scheduled: int
    num_computed: int


def progress(ledger: Ledger, lease_id: str, seq_id: int) -> Progress | None:
    """Untimed; None if the sequence is not there."""
    sequence = ledger.inspector.sequence(lease_id, seq_id)
    if sequence is None:
        return None
    return Progress(sequence.num_known, sequence.num_scheduled, sequence.num_computed)


# -- leases ---------------------------------------------------------------------------------------------------------


def open_lease(ledger: Ledger, lease_id: str, *, ttl_s: float, now: float) -> int:
    start = clock()
    ledger.open_lease(lease_id, ttl_s=ttl_s, now=now)
    return clock() - start


def expire_leases(ledger: Ledger, *, now: float) -> tuple[dict[str, int], int]:
    """Ends leases that have run out; returns how many sequences each has, and nanoseconds."""
    start = clock()
    expired = ledger.expire_leases(now)
    taken = clock() - start
    sizes = {lease.lease_id: lease.num_sequences for lease in ledger.inspector.leases()}
    return {lease_id: sizes[lease_id] for lease_id in expired}, taken


def fence_lease(ledger: Ledger, lease_id: str) -> int:
    """The blocks of an ended lease come back; returns nanoseconds."""
    start = clock()
    ledger.lease_fenced(lease_id)
    return clock() - start


@dataclass(frozen=True, slots=True)
class Crowd:
    """The other contents of the ledger during a measurement."""

    num_leases: int = 0
    """Open leases with one sequence of two blocks each."""
    num_sequences: int = 0
    """Sequences of two blocks on the lease that is measured."""
    num_chains: int = 0
    """Cached prompts of CHAIN_BLOCKS blocks without a holder."""

    def enter(self, ledger: Ledger) -> None:
        prompts = Prompts(seed=1)
        for number in range(self.num_chains):
            tokens = prompts.tokens(CHAIN_BLOCKS * BLOCK_SIZE)
            step(ledger, LEASE, admission(CROWD_IDS + number, tokens))
            step(ledger, LEASE, releases(CROWD_IDS + number))
        for number in range(self.num_leases):
            lease_id = f"lease {number}"
            ledger.open_lease(lease_id, ttl_s=TTL_S, now=0.0)
            step(ledger, lease_id, admission(1, prompts.tokens(BLOCK_SIZE + 1)))
        for number in range(self.num_sequences):
            step(ledger, LEASE, admission(CROWD_IDS + number, prompts.tokens(BLOCK_SIZE + 1)))


class Core:
    """The core behind the common interface, with one lease."""

    def __init__(
        self,
        num_blocks: int,
        crowd: Crowd | None = None,
        *,
        ledger: Ledger | None = None,
        keep_tokens: bool = True,
    ) -> None:
        """`ledger`: one to use instead of a new one. `keep_tokens`: False is cachemgr's --no-keep-tokens."""
        self._num_blocks = num_blocks
        self._keep_tokens = keep_tokens
        self._crowd = crowd or Crowd()
        self.ledger = self._open(ledger)
        self._in_flight: Report | None = None
        self._fork_tokens: dict[int, int] = {}

    def _open(self, ledger: Ledger | None = None) -> Ledger:
        ledger = ledger or make_ledger(self._num_blocks)
        ledger.keep_contents(self._keep_tokens)
        ledger.open_lease(LEASE, ttl_s=TTL_S, now=0.0)
        self._crowd.enter(ledger)
        return ledger

    def prepare(self, seq_id: int, tokens: list[int]) -> tuple[int, StepRequest, int]:
        return seq_id, admission(seq_id, tokens), len(tokens)

    def admit(self, prepared: tuple[int, StepRequest, int]) -> int:
        """Timed: `plan` with the admission (hash, look up, allocate) and `settle` of its step (publish)."""
        seq_id, request, num_tokens = prepared
        self._fork_tokens[seq_id] = num_tokens
        return step(self.ledger, LEASE, request)

    def release(self, seq_id: int) -> int:
        """Timed: `plan` of a step that only releases, nothing in flight. Its `settle` is outside."""
        self._fork_tokens.pop(seq_id, None)
        planned, taken = plan(self.ledger, LEASE, releases(seq_id))
        Report(planned).settle(self.ledger, LEASE)
        return taken

    def release_in_flight(self, seq_id: int) -> tuple[int, int]:
        """Timed: `plan` of a step that only releases while a step that reads the sequence is in flight; and the same
        with the `settle` of both steps, which is when the blocks become cached."""
        reading, _ = plan(self.ledger, LEASE, extension([seq_id]))
        planned, taken = plan(self.ledger, LEASE, releases(seq_id))
        settled = Report(reading).settle(self.ledger, LEASE) + Report(planned).settle(self.ledger, LEASE)
        return taken, taken + settled

    def empty_step(self) -> int:
        """Timed: `plan` of a request without items and `settle` of its step."""
        return step(self.ledger, LEASE, asked())

    def begin_batch(self, seq_ids: list[int]) -> None:
        """Untimed: plans one step of all of them and leaves it in flight."""
        self._in_flight = Report(plan(self.ledger, LEASE, extension(seq_ids))[0])

    def extend(self, seq_ids: list[int]) -> int:
        """Timed: `plan` of one step, with the step before in flight and its tokens unknown. The `settle` of the step
        before is outside."""
        planned, taken = plan(self.ledger, LEASE, extension(seq_ids))
        self.settle_before(planned)
        return taken

    def extend_and_publish(self, seq_ids: list[int]) -> int:
        """Timed: `plan` of one step, and `settle` of the step before: tokens entered, full blocks published."""
        planned, taken = plan(self.ledger, LEASE, extension(seq_ids))
        return taken + self.settle_before(planned)

    def settle_before(self, planned: GrantedStep) -> int:
        """Settles the step in flight, and has this one in flight from now on; returns nanoseconds."""
        before, self._in_flight = self._in_flight, Report(planned)
        assert before is not None
        return before.settle(self.ledger, LEASE)

    def end_batch(self, seq_ids: list[int]) -> None:
        assert self._in_flight is not None
        self._in_flight.settle(self.ledger, LEASE)
        self._in_flight = None
        step(self.ledger, LEASE, releases(*seq_ids))

    def fork(self, seq_id: int, child_ids: list[int]) -> int:
        """Timed: `plan` of three forks and of one token of the parent and of each child: the children compute the
        prompt's last token again, each into a copy of the half-full last block. The `settle` is outside."""
        planned, taken = plan(self.ledger, LEASE, forking(seq_id, child_ids, self._fork_tokens[seq_id]))
        report = Report(planned)
        assert report.num_copies == len(child_ids)
        report.settle(self.ledger, LEASE)
        return taken

    def num_free(self) -> int:
        return messages.counts_of(self.ledger).free_count

    def clear(self) -> None:
        """A new ledger, as for a new epoch."""
        self.ledger = self._open()
        self._fork_tokens.clear()
