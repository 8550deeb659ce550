"""Plans as tests ask for them, and as they are answered: messages, made of plain values and decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr import _core
from quire.cachemgr._core import Ledger
from quire.cachemgr.errors import CallRefused, Reason, Refusal
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.service import messages

TOKEN_BYTES = 4


class BlockCounts(NamedTuple):
    """Blocks by state; they add up to the pool's blocks without the null block."""

    free: int
    cached: int
    active: int
    retired: int


class HostBlockCounts(NamedTuple):
    """Blocks of the host tier by state; they add up to all of them."""

    free: int
    held: int
    retired: int
    cached: int = 0


class StepOutcome(Enum):
    COMPUTED = attach_pb2.STEP_OUTCOME_COMPUTED
    FAILED = attach_pb2.STEP_OUTCOME_FAILED
    SKIPPED = attach_pb2.STEP_OUTCOME_SKIPPED


class PlanItem(Enum):
    """The kinds of items that are answered one by one."""

    OFFLOAD = pb.PLAN_ITEM_OFFLOAD
    TRIM = pb.PLAN_ITEM_TRIM
    FORK = pb.PLAN_ITEM_FORK
    EXTEND = pb.PLAN_ITEM_EXTEND
    RESTORE = pb.PLAN_ITEM_RESTORE
    ADMISSION = pb.PLAN_ITEM_ADMISSION


class CacheUse(Enum):
    """How a sequence uses the prefix cache."""

    READ_AND_WRITE = pb.CACHE_USE_READ_AND_WRITE
    WRITE_ONLY = pb.CACHE_USE_WRITE_ONLY
    NONE = pb.CACHE_USE_NONE


class HostCopyUse(Enum):
    """The copies of evicted blocks that a plan may make."""

    THERE_AND_BACK = pb.HOST_COPY_USE_THERE_AND_BACK
    BACK = pb.HOST_COPY_USE_BACK
    NONE = pb.HOST_COPY_USE_NONE


@dataclass(frozen=True, slots=True)
class Trim:
    seq_id: int
    num_tokens: int
    """Tokens to keep."""


@dataclass(frozen=True, slots=True)
class Fork:
    parent_id: int
    child_ids: Sequence[int]
    num_tokens: int
    """Tokens each child begins with."""


@dataclass(frozen=True, slots=True)
class Restore:
    seq_id: int
    max_compute: int = 0
    """The most tokens to compute in this step; 0: no limit of its own."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention of a range of a sequence."""

    num_tokens: int
    """From the end of the range before it on; 0: all that follow."""
    priority: int
    """LEAST_WORTH to MOST_WORTH of the core."""
    ttl_s: float | None = None
    """The validity; None: as long as the content."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A prefix to keep for a time after each use."""

    num_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ReturnHint:
    """Hints about the future of a sequence that is released."""

    seq_id: int
    expected_in_s: float | None
    """It will be asked for again in about so many seconds; None: never."""


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """A prompt that waits at the client."""

    tokens: bytes
    """TOKEN_BYTES each."""
    expected_in_s: float
    salt: bytes = b""
    tenant: str | None = None
    """None: the lease's."""


@dataclass(frozen=True, slots=True)
class Admission:
    seq_id: int
    tokens: bytes
    """TOKEN_BYTES each."""
    max_compute: int = 0
    """The most tokens to compute in this step; 0: no limit of its own."""
    salt: bytes = b""
    reserved_tokens: int = 0
    """The most tokens the sequence will ever have, guaranteed; 0: best effort."""
    retention: Sequence[Retention] = ()
    """A range of tokens that is worth keeping, from the first token on."""
    resumed: bool = False
    """It was here before, and was released to make room."""
    cache_use: CacheUse = CacheUse.READ_AND_WRITE
    tenant: str | None = None
    """None: the lease's."""
    breakpoints: Sequence[Breakpoint] = ()
    """The shorter ones first."""
    waits_for_prefix: bool = False
    explains_miss: bool = False
    adapter: bytes = b""
    """Its identity; empty: none."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Everything a client wants of one step."""

    releases: Sequence[int] = ()
    return_hints: Sequence[ReturnHint] = ()
    """About sequences that are released."""
    offloads: Sequence[int] = ()
    """Sequences to move to the host tier."""
    expected_prompts: Sequence[ExpectedPrompt] = ()
    trims: Sequence[Trim] = ()
    forks: Sequence[Fork] = ()
    extend_ids: Sequence[int] | bytes = ()
    """Sequences to run; as bytes, a little-endian int32 each."""
    extend_token_counts: Sequence[int] | bytes = ()
    """Tokens to compute, parallel to extend_ids."""
    appends: Mapping[int, bytes] = field(default_factory=dict)
    """Tokens to append before computing, by sequence, TOKEN_BYTES each."""
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Drafts by sequence."""
    restores: Sequence[Restore] = ()
    admissions: Sequence[Admission] = ()
    admission_token_budget: int = 0
    """The most tokens restores and admissions may compute together; 0: no limit."""
    admission_reserve: int = 0
    """Blocks that restores and admissions leave allocatable."""
    host_copy_use: HostCopyUse = HostCopyUse.THERE_AND_BACK
    skips_disk: bool = False


@dataclass(frozen=True, slots=True)
class RefusedItem:
    item: PlanItem
    seq_id: int
    refusal: Refusal


# -- requests -------------------------------------------------------------------------------------------------------


def decode_plan(message: pb.PlanStepRequest, geometry: Geometry) -> None:
    """Checks the form of a plan, as books do that have no such lease. Raises CallRefused."""
    try:
        Ledger("p", 1, geometry).plan(_core.PlanRequest(message.SerializeToString()), now=0.0)
    except CallRefused as refused:
        if refused.refusal.reason is not Reason.LEASE_NOT_FOUND:
            raise


def body_of(request: StepRequest, lease_id: str, epoch: int = 1, *, request_id: str = "") -> bytes:
    """A serialised PlanStepRequest."""
    message = pb.PlanStepRequest(
        lease_id=lease_id,
        epoch=epoch,
        request_id=request_id,
        release_sequence_ids=request.releases,
        return_hints=[message_of_hint(hint) for hint in request.return_hints],
        offload_sequence_ids=request.offloads,
        expected_prompts=map(message_of_expected, request.expected_prompts),
        trim_sequence_ids=[trim.seq_id for trim in request.trims],
        trim_token_counts=[trim.num_tokens for trim in request.trims],
        forks=[
            pb.Fork(parent_sequence_id=fork.parent_id, child_sequence_ids=fork.child_ids, token_count=fork.num_tokens)
            for fork in request.forks
        ],
        extends=message_of_extends(request),
        restores=[
            pb.Restore(sequence_id=restore.seq_id, max_compute_token_count=restore.max_compute)
            for restore in request.restores
        ],
        admissions=[message_of(admission) for admission in request.admissions],
        admission_token_budget=request.admission_token_budget,
        admission_reserve_block_count=request.admission_reserve,
        host_copy_use=request.host_copy_use.value,
        skips_disk=request.skips_disk,
    )
    return message.SerializeToString(deterministic=True)


def message_of_extends(request: StepRequest) -> pb.Extends:
    extends = pb.Extends(sequence_ids=request.extend_ids, token_counts=request.extend_token_counts)
    if request.appends:
        appends = [np.frombuffer(request.appends.get(seq_id, b""), "<i4") for seq_id in request.extend_ids]
        extends.append_token_counts.extend(map(len, appends))
        extends.append_token_ids.extend(np.concatenate(appends).tolist() if appends else ())
    if request.drafts:
        drafts = [request.drafts.get(seq_id, ()) for seq_id in request.extend_ids]
        extends.draft_token_counts.extend(map(len, drafts))
        extends.draft_token_ids.extend(token for each in drafts for token in each)
    return extends


def message_of_hint(hint: ReturnHint) -> pb.ReturnHint:
    message = pb.ReturnHint(sequence_id=hint.seq_id)
    if hint.expected_in_s is None:
        message.not_expected = True
    else:
        message.expected_in.FromNanoseconds(int(hint.expected_in_s * 1e9))
    return message


def message_of_expected(prompt: ExpectedPrompt) -> pb.ExpectedPrompt:
    message = pb.ExpectedPrompt(
        token_ids=np.frombuffer(prompt.tokens, "<i4").tolist(), salt=prompt.salt, tenant=prompt.tenant
    )
    message.expected_in.FromNanoseconds(int(prompt.expected_in_s * 1e9))
    return message


def message_of(admission: Admission) -> pb.Admission:
    message = pb.Admission(
        sequence_id=admission.seq_id,
        token_ids=np.frombuffer(admission.tokens, "<i4").tolist(),
        max_compute_token_count=admission.max_compute,
        salt=admission.salt,
        adapter=admission.adapter,
        reserved_token_count=admission.reserved_tokens,
        resumed=admission.resumed,
        cache_use=admission.cache_use.value,
        tenant=admission.tenant,
        waits_for_prefix=admission.waits_for_prefix,
        explains_miss=admission.explains_miss,
    )
    for each in admission.breakpoints:
        message.breakpoints.add(token_count=each.num_tokens).ttl.FromNanoseconds(int(each.ttl_s * 1e9))
    for part in admission.retention:
        added = message.retention.add(token_count=part.num_tokens, priority=part.priority)
        if part.ttl_s is not None:
            added.ttl.FromNanoseconds(int(part.ttl_s * 1e9))
    return message


# -- answers --------------------------------------------------------------------------------------------------------

GRANTED = {
    "known_step": "known_step_number",
    "released_ids": "released_sequence_ids",
    "offloaded_ids": "offloaded_sequence_ids",
    "fork_parent_ids": "fork_parent_ids",
    "fork_child_ids": "fork_child_ids",
    "write_seq_ids": "write_sequence_ids",
    "write_first_indexes": "write_first_indexes",
    "write_block_counts": "write_block_counts",
    "write_block_ids": "write_block_ids",
    "write_groups": "write_layer_groups",
    "passed_seq_ids": "passed_sequence_ids",
    "passed_groups": "passed_layer_groups",
    "passed_counts": "passed_block_counts",
    "copy_sources": "copy_source_block_ids",
    "copy_targets": "copy_target_block_ids",
    "offload_sources": "offload_source_block_ids",
    "offload_targets": "offload_target_host_block_ids",
    "restore_sources": "restore_source_host_block_ids",
    "restore_targets": "restore_target_block_ids",
    "run_seq_ids": "run_sequence_ids",
    "run_starts": "run_starts",
    "run_token_counts": "run_token_counts",
    "run_samples": "run_samples",
    "given_run_indexes": "given_run_indexes",
    "given_digests": "given_token_digests",
    "run_draft_counts": "run_draft_counts",
    "adapters": "adapters",
    "run_adapters": "run_adapters",
}
"""Short names for the fields of StepGrant."""
ANSWERED = {
    "admitted_ids": "admitted_sequence_ids",
    "admitted_cached_counts": "admitted_cached_token_counts",
    "admitted_written_counts": "admitted_written_token_counts",
    "admitted_kept_counts": "admitted_kept_token_counts",
    "admitted_misses": "admitted_misses",
    "restored_ids": "restored_sequence_ids",
    "restored_counts": "restored_token_counts",
}
"""The same fields of PlanStepResponse."""


class Planned:
    """A planned step, read from its grant and its answer. Fields are lists."""

    def __init__(self, plan: _core.GrantedStep) -> None:
        self.core = plan
        self.grant = grant_pb2.StepGrant.FromString(plan.encode_grant("pool", 1, 1, "lease"))
        self.answer = pb.PlanStepResponse.FromString(plan.encode_answer())
        self.step_number = self.grant.step_number
        self.refusals = [RefusedItem(PlanItem(item), *refused) for item, *refused in plan.refusals]
        self.has_refusals = plan.has_refusals

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERED:
            return list(getattr(self.answer, ANSWERED[name]))
        if name not in GRANTED:
            raise AttributeError(name)
        value = getattr(self.grant, GRANTED[name])
        return value if isinstance(value, int | bytes) else list(value)

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state after the step was planned."""
        return block_counts(self.answer.block_counts)

    @property
    def host_counts(self) -> HostBlockCounts | None:
        """The host tier's counts; None if there is none."""
        return host_block_counts(self.answer)


def block_counts(counts: pb.BlockCounts) -> BlockCounts:
    return BlockCounts(counts.free_count, counts.cached_count, counts.active_count, counts.retired_count)


def host_block_counts(message: pb.PlanStepResponse | pb.PoolStatistics) -> HostBlockCounts | None:
    """None if there is no host tier."""
    counts = message.host_block_counts
    if not message.HasField("host_block_counts"):
        return None
    return HostBlockCounts(counts.free_count, counts.held_count, counts.retired_count, counts.cached_count)


def counts_of(ledger: Ledger) -> BlockCounts:
    """Blocks by state."""
    return block_counts(messages.counts_of(ledger))


def host_counts_of(ledger: Ledger) -> HostBlockCounts | None:
    """The host tier's counts; None if there is none."""
    return host_block_counts(messages.statistics_of(ledger))


def sequences_of(ledger: Ledger, lease_id: str) -> list[_core.SequenceView]:
    """All sequences of a lease, one that has ended included, by id."""
    return ledger.inspector.sequences_from(lease_id, 0, 2**31)


def sequence_of(ledger: Ledger, lease_id: str, seq_id: int) -> _core.SequenceView:
    """One of them."""
    (sequence,) = ledger.inspector.sequences_from(lease_id, seq_id, 1)
    assert sequence.seq_id == seq_id
    return sequence


def lease_numbers_of(ledger: Ledger, lease_id: str) -> tuple[int, int, int, int]:
    """The next step and the last that was reported, and how many steps in flight and sequences there are."""
    lease = ledger.inspector.find_lease(lease_id)
    assert lease is not None
    return lease.next_step, lease.settled_step, lease.num_in_flight, lease.num_sequences


def plan_step(
    ledger: Ledger,
    lease_id: str,
    request: StepRequest,
    *,
    now: float,
    epoch: int | None = None,
    request_id: str = "",
    names_tenants: bool = False,
) -> Planned:
    """Plans a step of a lease, of the present epoch if no other is given. Raises CallRefused."""
    body = body_of(request, lease_id, ledger.epoch if epoch is None else epoch, request_id=request_id)
    return Planned(ledger.plan(_core.PlanRequest(body), now=now, names_tenants=names_tenants))


def report_of(
    lease_id: str,
    step_number: int,
    outcome: StepOutcome = StepOutcome.COMPUTED,
    *,
    seq_ids: Sequence[int] = (),
    token_counts: Sequence[int] = (),
    sampled_ids: Sequence[int] = (),
    sampled_tokens: Sequence[int] = (),
    sampled_counts: Sequence[int] = (),
    report_number: int = 0,
) -> _core.StepReport:
    """A report of a step, as a worker would have sent it."""
    report = attach_pb2.StepReport(
        report_number=report_number,
        lease_id=lease_id,
        step_number=step_number,
        outcome=outcome.value,
        sequence_ids=seq_ids,
        computed_token_counts=token_counts,
        sampled_sequence_ids=sampled_ids,
        sampled_token_ids=sampled_tokens,
        sampled_token_counts=sampled_counts,
    )
    return _core.StepReport(report.SerializeToString())
