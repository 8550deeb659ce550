"""Steps from acceptance to report. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Self

import numpy as np

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.worker.adapters.adapter_table import AdapterTable
from quire.worker.grant.adapter_users import AdapterUsers
from quire.worker.grant.decoding import (
    AcceptedStep,
    decode_generated,
    decode_grammar,
    decode_grant,
    decode_step,
    max_grant_bytes,
    refuse_grammar,
)
from quire.worker.grant.errors import Reason, Refused
from quire.worker.grant.gate import Gate
from quire.worker.memory.kept_pool import KeptPool
from quire.worker.run.executor import DeviceLostError, Executor, Outcome, PoolDamagedError, StepResult
from quire.worker.run.model_thread import ModelThread
from quire.worker.run.ranks import RankLostError, RankStatistics
from quire.worker.run.verify import OwnershipViolation
from quire.worker.sampling.following import Following
from quire.worker.sampling.grammars import CompilerUnavailable, GrammarRefused, Grammars, NoGrammars
from quire.worker.service.step_gaps import StepGaps

log = logging.getLogger(__name__)

CHECKSUM_BYTES = 1 << 20
"""Read between two steps for ChecksumBlocks."""

REPORTED_OUTCOMES = {
    Outcome.COMPUTED: attach_pb2.STEP_OUTCOME_COMPUTED,
    Outcome.FAILED: attach_pb2.STEP_OUTCOME_FAILED,
    Outcome.PRIOR_FAILED: attach_pb2.STEP_OUTCOME_FAILED,
    Outcome.SKIPPED: attach_pb2.STEP_OUTCOME_SKIPPED,
}

NO_GRAMMARS = NoGrammars("this worker has no grammars")

# Errors that a new epoch of this process does not cure: the next process begins one.
WHY_STOPPING: dict[type[BaseException], str] = {
    OwnershipViolation: "the worker stops: it was to break an invariant",
    DeviceLostError: "the worker stops: its device has failed",
    RankLostError: "the worker stops: one of its ranks has failed",
}


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a step."""

    vocab_size: int
    max_sequence_tokens: int
    max_step_tokens: int
    max_logprobs: int
    max_grant_bytes: int
    max_drafts: int = 0

    @classmethod
    def of(
        cls,
        geometry: attach_pb2.PoolGeometry,
        *,
        max_step_tokens: int,
        max_logprobs: int,
    ) -> Self:
        """The limits of a worker with a pool of this geometry."""
        return cls(
            vocab_size=geometry.vocabulary_size,
            max_sequence_tokens=geometry.max_sequence_tokens,
            max_step_tokens=max_step_tokens,
            max_logprobs=max_logprobs,
            max_grant_bytes=max_grant_bytes(geometry),
            max_drafts=geometry.max_draft_count,
        )


@dataclass(slots=True)
class StepCounters:
    """Numbers of steps, tokens and blocks since the process started."""

    computed: int = 0
    failed: int = 0
    skipped: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    copied_blocks: int = 0
    offloaded_blocks: int = 0
    restored_blocks: int = 0
    forward_s: float = 0.0
    gaps: StepGaps = field(default_factory=StepGaps)
    host_copy_s: float = 0.0
    refusals: Counter[Reason] = field(default_factory=Counter)


class Reports:
    """Reports of one epoch that cachemgr has not acknowledged, oldest first; `send` passes new ones on."""

    def __init__(self) -> None:
        self._kept: deque[attach_pb2.StepReport] = deque()
        self._next_number = 1
        self.send: Callable[[attach_pb2.StepReport], None] = lambda report: None

    def add(self, report: attach_pb2.StepReport) -> None:
        report.report_number = self._next_number
        self._next_number += 1
        self._kept.append(report)
        self.send(report)

    def acknowledge(self, report_number: int) -> None:
        """Forgets reports up to this number."""
        while self._kept and self._kept[0].report_number <= report_number:
            self._kept.popleft()

    @property
    def acknowledged(self) -> int:
        """Reports up to this number are forgotten."""
        return self._next_number - 1 - len(self._kept)

    def kept(self) -> list[attach_pb2.StepReport]:
        return list(self._kept)

    def begin_epoch(self) -> None:
        """Forgets everything; numbers begin anew."""
        self._kept.clear()
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._kept)


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that ran, and how long it waited for its turn."""

    result: StepResult
    queue_s: float


class Steps:
    """The one way into the model thread. Checks a step at the gate, runs it, reports it."""

    def __init__(
        self,
        gate: Gate,
        executor: Executor,
        thread: ModelThread,
        limits: StepLimits,
        grammars: Grammars | NoGrammars = NO_GRAMMARS,
        kept: KeptPool | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.gate = gate
        self.adapters = adapters or AdapterTable()
        self.adapter_users = AdapterUsers()
        self.reports = Reports()
        self.counters = StepCounters()
        self.limits = limits
        self._grammars = grammars
        self._kept = kept
        self._executor = executor
        self._thread = thread
        self._running: deque[AcceptedStep] = deque()
        self._is_draining = False
        self.on_damage: Callable[[], None] = lambda: None
        self.on_new_epoch: Callable[[threading.Event], None] = lambda begun: None
        """Called before an epoch begins, with an event that is set when the steps before it have ended."""
        self.on_violation: Callable[[BaseException], None] = lambda error: None
        """Called with an error after which this process must end."""

    @property
    def num_in_flight(self) -> int:
        return self._thread.num_waiting

    def oldest(self) -> AcceptedStep | None:
        """Return the accepted step that has to end before all others, None if there is none."""
        return self._running[0] if self._running else None

    async def drain(self) -> None:
        """Refuses new steps; returns when those accepted have ended."""
        self._is_draining = True
        await self._thread.idle()

    async def check_grammar(self, request: worker_service_pb2.CheckGrammarRequest) -> float:
        """Compile a grammar, and make the mask behind the generated tokens.

        Returns the seconds of a processor that the mask took. Raises Refused (INVALID_ARGUMENT, OVERLOADED).
        """
        tokens = decode_generated(
            request, vocab_size=self.limits.vocab_size, max_sequence_tokens=self.limits.max_sequence_tokens
        )
        try:
            if isinstance(self._grammars, NoGrammars):
                raise GrammarRefused(self._grammars.reason)
            return await self._grammars.prepare(decode_grammar(request.grammar), tokens)
        except GrammarRefused as error:
            raise refuse_grammar("grammar", request.grammar, error) from None
        except CompilerUnavailable as error:
            raise Refused(Reason.OVERLOADED, str(error), limit=error.limit) from None

    async def follow_grammars(self, request: worker_service_pb2.RunStepRequest) -> dict[int, Following | Refused]:
        """Return the grammars that a step brings, by sequence, compiled and moved to the tokens generated so far."""
        entries = [entry for entry in request.inputs if entry.sampling.HasField("grammar")]
        if not entries:
            return {}
        followed = await asyncio.gather(*map(self._follow, entries))
        return {entry.sequence_id: each for entry, each in zip(entries, followed, strict=True)}

    async def _follow(self, entry: worker_service_pb2.SequenceInput) -> Following | Refused:
        sampling, seq_id = entry.sampling, entry.sequence_id
        try:
            if isinstance(self._grammars, NoGrammars):
                raise GrammarRefused(self._grammars.reason)
            # accept() refuses lists that are too long, and ids that are no token.
            tokens = [token for token in sampling.output_token_ids if 0 <= token < self.limits.vocab_size]
            return await self._grammars.follow(
                decode_grammar(sampling.grammar),
                begins_at=sampling.output_begins_at,
                tokens=tokens[: self.limits.max_sequence_tokens],
            )
        except GrammarRefused as error:
            return refuse_grammar("sampling.grammar", sampling.grammar, error, sequence_id=seq_id)
        except CompilerUnavailable as error:
            return Refused(Reason.OVERLOADED, str(error), limit=error.limit, sequence_id=seq_id)

    def accept(
        self,
        request: worker_service_pb2.RunStepRequest,
        followed: Mapping[int, Following | Refused] = MappingProxyType({}),
    ) -> asyncio.Future[EndedStep]:
        """Queue a step, with the answer of follow_grammars() about it.

        Raises Refused. Then no state has changed, and the step's number can be used again.
        """
        try:
            self.gate.check_unread(request.grant, max_bytes=self.limits.max_grant_bytes)
            grant = decode_grant(request.grant)
            self._refuse_if_draining()
            self.gate.check(request.grant, grant)
            step = decode_step(
                request,
                grant,
                vocab_size=self.limits.vocab_size,
                max_sequence_tokens=self.limits.max_sequence_tokens,
                max_step_tokens=self.limits.max_step_tokens,
                max_logprobs=self.limits.max_logprobs,
                max_drafts=self.limits.max_drafts,
                adapters=self.adapters.names,
                followed=followed,
            )
        except Refused as refused:
            self.counters.refusals[refused.reason] += 1
            raise
        self.gate.use(grant)
        self.adapter_users.accept(grant)
        for identity in grant.adapters:
            self.adapters.use(identity)
        if self._kept is not None:
            self._kept.accepted()
        return self._run(step)

    def _run(self, step: AcceptedStep) -> asyncio.Future[EndedStep]:
        accepted = time.perf_counter()

        def launch() -> Callable[[], EndedStep]:
            queue_s = time.perf_counter() - accepted
            launched = self._executor.launch(step)
            return lambda: EndedStep(launched.collect(), queue_s)

        def execute() -> EndedStep:
            queue_s = time.perf_counter() - accepted
            return EndedStep(self._executor.execute(step), queue_s)

        epoch = self.gate.epoch
        ahead = self._executor.runs_ahead
        self._running.append(step)
        running = self._thread.submit_ahead(launch) if ahead else self._thread.submit(execute)
        ended: asyncio.Future[EndedStep] = asyncio.get_running_loop().create_future()
        running.add_done_callback(lambda future: self._ended(step.grant, epoch, future, ended))
        return ended

    def _ended(
        self,
        grant: grant_pb2.StepGrant,
        epoch: int,
        running: asyncio.Future[EndedStep],
        ended: asyncio.Future[EndedStep],
    ) -> None:
        self._running.popleft()  # steps end in the order in which they were accepted
        error = running.exception()
        if error is not None and type(error) in WHY_STOPPING:
            if not isinstance(error, RankLostError):  # of which on_violation says enough
                log.critical("%s", error)
            self.on_violation(error)
            _refuse(ended, Refused(Reason.SHUTTING_DOWN, WHY_STOPPING[type(error)]))
            return
        if error is not None:
            self._damaged(error, epoch)
            message = "the pool was damaged; its worker begins a new epoch"
            _refuse(ended, Refused(Reason.EPOCH_CHANGED, message, value=epoch, epoch=self.gate.epoch))
            return
        if epoch == self.gate.epoch:
            self.reports.add(make_report(grant, running.result().result))
        self._count(grant, running.result().result)
        if not ended.cancelled():
            ended.set_result(running.result())

    def _damaged(self, error: BaseException, epoch: int) -> None:
        cause = error if isinstance(error, PoolDamagedError) else repr(error)
        log.error("pool damaged epoch=%d error=%s", epoch, cause)
        if epoch == self.gate.epoch:
            self.begin_epoch()
            self.on_damage()

    def begin_epoch(self) -> None:
        """Forgets every sequence and chooses a new epoch. Steps that run or wait are not reported."""
        if self._kept is not None:
            self._kept.epoch_ended()
        begun = threading.Event()
        self.on_new_epoch(begun)
        self.gate.begin_epoch(new_epoch())
        self.reports.begin_epoch()
        self.adapter_users.begin_epoch()
        self._thread.submit(self._executor.begin_epoch).add_done_callback(lambda future: begun.set())

    def fence_lease(self, lease_id: str) -> asyncio.Future[None]:
        """Refuses the lease's steps from here on; the future is done when none of them runs any more."""
        self.gate.fence_lease(lease_id)
        self.adapter_users.end_lease(lease_id)
        return self._thread.submit(lambda: self._executor.fence_lease(lease_id))

    async def checksum_blocks(self, block_ids: list[int], *, block_bytes: int) -> list[int]:
        """Checksums of blocks of so many bytes, a few blocks at a time in turn with the steps; of each block once.

        Raises Refused (EPOCH_CHANGED) if a new epoch begins meanwhile.
        """
        epoch, checksums = self.gate.epoch, dict.fromkeys(block_ids, 0)
        ids, size = list(checksums), max(1, CHECKSUM_BYTES // max(1, block_bytes))
        for part in (ids[start : start + size] for start in range(0, len(ids), size)):
            found = await self._thread.submit(partial(self._executor.checksum_blocks, part))
            checksums.update(zip(part, found, strict=True))
        if epoch != self.gate.epoch:
            message = f"epoch {self.gate.epoch} began while blocks of epoch {epoch} were read"
            raise Refused(Reason.EPOCH_CHANGED, message, value=epoch, epoch=self.gate.epoch)
        return [checksums[block_id] for block_id in block_ids]

    def num_sequences(self) -> int:
        return self._executor.statistics().num_sequences

    def rank_statistics(self) -> RankStatistics:
        return self._executor.statistics().ranks

    def _count(self, grant: grant_pb2.StepGrant, result: StepResult) -> None:
        counters = self.counters
        counters.copied_blocks += len(grant.copy_source_block_ids)
        counters.offloaded_blocks += result.host.num_offloaded
        counters.restored_blocks += result.host.num_restored
        counters.host_copy_s += result.host.offload_s + result.host.restore_s
        counters.forward_s += result.forward_s
        if result.gap_s is not None:
            counters.gaps.add(result.gap_s)
        counters.sampled_tokens += len(result.sampled_tokens)
        if result.outcome is Outcome.COMPUTED:
            counters.computed += 1
            num_rejected = int(rejected_drafts(grant, result).sum())
            counters.computed_tokens += sum(grant.run_token_counts) - num_rejected
            counters.drafts += sum(grant.run_draft_counts)
            counters.accepted_drafts += sum(grant.run_draft_counts) - num_rejected
        elif result.outcome is Outcome.SKIPPED:
            counters.skipped += 1
        else:
            counters.failed += 1

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise Refused(Reason.SHUTTING_DOWN, "the worker is shutting down")


def _refuse(ended: asyncio.Future[EndedStep], refused: Refused) -> None:
    """Answer a step that has no result. Its caller may have disconnected without reading the answer."""
    if not ended.cancelled():
        ended.set_exception(refused)
        ended.exception()  # seen: asyncio logs an error that nobody has


def make_report(grant: grant_pb2.StepGrant, result: StepResult) -> attach_pb2.StepReport:
    """The report to cachemgr of a step that ended."""
    report = attach_pb2.StepReport(
        lease_id=grant.lease_id, step_number=grant.step_number, outcome=REPORTED_OUTCOMES[result.outcome]
    )
    if result.outcome is Outcome.COMPUTED:
        ends = np.array(grant.run_starts) + np.array(grant.run_token_counts) - rejected_drafts(grant, result)
        report.sequence_ids.MergeFrom(grant.run_sequence_ids)
        report.computed_token_counts.extend(ends.tolist())
        report.sampled_sequence_ids.extend(result.sampled_ids)
        report.sampled_token_ids.extend(result.sampled_tokens)
        report.sampled_token_counts.extend(result.sampled_counts)
    return report


def rejected_drafts(grant: grant_pb2.StepGrant, result: StepResult) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return for each run of a computed step how many of its drafts were not accepted."""
    rejected = np.zeros(len(grant.run_sequence_ids), dtype=np.int64)
    if any(grant.run_draft_counts):
        accepted = {seq_id: num - 1 for seq_id, num in zip(result.sampled_ids, result.sampled_counts, strict=True)}
        rejected += grant.run_draft_counts
        rejected -= [accepted.get(seq_id, 0) for seq_id in grant.run_sequence_ids]
    return rejected


def new_epoch() -> int:
    """Random, 1 to 2^63 - 1."""
    return secrets.randbelow(2**63 - 1) + 1
