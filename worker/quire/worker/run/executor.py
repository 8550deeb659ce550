"""Runs steps on the device, one after the other: table changes, copies, one forward, one sample.

A step is launched, which gives a GPU all of its work, and later collected, which waits for it. The next step needs no
more than the launch, because its input tokens stay on the device. Runs on the model thread. Decides nothing about
ownership: block ids come from grants that have passed the gate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.cache.v1 import grant_pb2
from quire.serving.logs import describe_exception
from quire.worker.device.profiling import StepProfiler, phase
from quire.worker.device.transfer import Moment, Readback, indices
from quire.worker.grant.decoding import AcceptedStep, adapter_of, num_drafts
from quire.worker.memory.host_pool import HostCopies, HostPool, make_host_pool
from quire.worker.memory.kept_pool import KeptPool, Overwritten
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.sequence_table import NO_TOKEN, Int64s, SequenceTable
from quire.worker.memory.step_batch import (
    DraftCounts,
    StepBatch,
    build_step_batch,
    count_on,
    max_logits,
)
from quire.worker.memory.step_ring import StepTokens
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.graphs import StaticDecode
from quire.worker.run.prompt_graphs import StaticPrompts
from quire.worker.run.ranks import ONE_RANK, OneRank, RankLostError, RankStatistics
from quire.worker.sampling.drafts import DraftRows
from quire.worker.sampling.grammar_masks import NO_MASKS, GrammarRows, MaskedRun, Masks
from quire.worker.sampling.parameters import SamplingParams, TokenArray
from quire.worker.sampling.prompt_logprobs import PromptLogprobs, ScoredTokens, Scores, read_scores, score_tokens
from quire.worker.sampling.sampler import Draws, Sampled, Sampler

log = logging.getLogger(__name__)

T = TypeVar("T")
COUNTS = 4
"""The place of Sampled.counts among its tensors."""

MAX_SPIN_S = 0.002
"""Of a step that a thread may wait for without giving up its core: a longer one is worth the wake-up."""


class Outcome(Enum):
    COMPUTED = "computed"
    FAILED = "failed"
    PRIOR_FAILED = "prior failed"
    SKIPPED = "skipped"


class PoolDamagedError(Exception):
    """A grant could not be applied: the content of the blocks is unknown, and a new epoch has to begin."""


class DeviceLostError(Exception):
    """A GPU failed in the middle of its work. No later work of this process on it can succeed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, of the model's own distribution."""

    seq_id: int
    sampled: float
    top_token_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """The reason why a sequence's grammar could not be followed; its token means nothing."""

    seq_id: int
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step. Times in seconds, on a GPU its own; lists named alike belong together by index."""

    step_number: int
    outcome: Outcome
    failed_step: int = 0
    """The failed step that made this one fail, if PRIOR_FAILED."""
    sampled_ids: list[int] = field(default_factory=list)
    """Sequences for which a token was sampled."""
    sampled_tokens: list[int] = field(default_factory=list)
    sampled_counts: list[int] = field(default_factory=list)
    """Tokens of each sequence among these, one after the other; empty if each has one."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    grammar_failures: list[GrammarFailure] = field(default_factory=list)
    late_ids: list[int] = field(default_factory=list)
    """Sequences with a mask that was not made in time: their tokens mean nothing."""
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    host: HostCopies = field(default_factory=HostCopies)
    num_copied: int = 0
    """Blocks copied within the pool."""
    gap_s: float | None = None
    """From the end of the computed step before to this step's forward; None if it continues no sequence with the token
    sampled last: then there may have been nothing to do between them."""


@dataclass(frozen=True, slots=True)
class SampledDrafts:
    """The rows of a step with drafts: how many each of n sequences has, and the position of its first sampled token."""

    num_rows: Int64s
    first_positions: Int64s

    def kept(self, sampled: Sampled, counts: list[int]) -> Sampled:
        """Return the rows that the sequences keep, so many of each, of a sample on the host."""
        firsts = self.num_rows.cumsum() - self.num_rows
        return sampled.take(torch.from_numpy(count_on(firsts, np.array(counts, dtype=np.int64))))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampled values of a step on the device: tokens and log-probabilities of seq_ids, num_asked as in
    read_logprobs."""

    seq_ids: list[int]
    num_asked: list[int | None]
    sampled: Sampled | StepTokens
    """StepTokens if the step is one graph, which writes its tokens to the host itself."""
    moments: tuple[Moment, Moment, Moment, Moment]
    """The times before the step, with its batch built, after the forward and after sampling."""
    last_ended: Moment | None = None
    """The end of the computed step before, if this one continues a sequence."""
    grammar_failures: list[GrammarFailure] = field(default_factory=list)
    late_ids: list[int] = field(default_factory=list)
    scored: list[tuple[int, ScoredTokens]] = field(default_factory=list)
    """Sequences with log-probabilities for their prompts, and the tokens."""
    scores: Scores | None = None
    """These, of all of them together."""
    spins: bool = False
    """See Arrival."""
    drafts: SampledDrafts | None = None
    """Of a step with drafts: then `sampled` has more rows than there are sequences."""

    def readback(self, device: torch.device) -> Readback | StepTokens:
        """Have the values brought to the host: those of `sampled`, and of `scores`."""
        if isinstance(self.sampled, StepTokens):
            return self.sampled
        scores = () if self.scores is None else self.scores.tensors()
        return Readback(device, *self.sampled.tensors(), *scores, spins=self.spins)


class LaunchedStep:
    """A step with its work queued on the device. `result` has its number and its outcome so far."""

    def __init__(self, result: StepResult, sampling: Sampling | None, device: torch.device) -> None:
        """Make it when the device has all work of the step."""
        self.result = result
        self.copies = HostCopies(), 0
        """Those of the host tier, and the number of blocks copied within the pool."""
        self.await_ranks: Callable[[], None] = lambda: None
        """Waits for the worker's other ranks to be past the step."""
        self.record_blocks: Callable[[], None] = lambda: None
        """Records the checksums of the blocks that the step fills, if their memory is kept."""
        self.on_collected: Callable[[StepResult], None] = lambda result: None
        """Called with the result of a step that sampled."""
        self._sampling = sampling
        self._readback = Readback(device) if sampling is None else sampling.readback(device)

    def collect(self) -> StepResult:
        """Waits for the step to end; from any thread.

        Raises DeviceLostError if the device fails before that, RankLostError if another rank does.
        """
        try:
            with phase("read tokens"):
                arrived = self._readback.wait()
            self.record_blocks()
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"step {self.result.step_number}: {error!r}") from error
        with phase("await ranks"):
            self.await_ranks()
        host, num_copied = self.copies
        if self._sampling is None:
            return replace(self.result, host=host, num_copied=num_copied)
        tokens, chosen, top_ids, top, counts, *scores = arrived
        assert tokens is not None
        sampled = Sampled(tokens, chosen, top_ids, top, counts)
        seq_ids, num_asked, sampled_counts = self._sampling.seq_ids, self._sampling.num_asked, []
        if self._sampling.drafts is not None and counts is not None:
            sampled_counts = counts.tolist()
            sampled = self._sampling.drafts.kept(sampled, sampled_counts)
            seq_ids, num_asked = _repeated(seq_ids, sampled_counts), _repeated(num_asked, sampled_counts)
        started, prepared, forwarded, ended = self._sampling.moments
        result = replace(
            self.result,
            sampled_ids=self._sampling.seq_ids,
            sampled_tokens=sampled.tokens.tolist(),
            sampled_counts=sampled_counts,
            logprobs=read_logprobs(sampled, seq_ids, num_asked),
            prompt_logprobs=self._read_scores(*scores),
            grammar_failures=self._sampling.grammar_failures,
            late_ids=self._sampling.late_ids,
            prepare_s=started.seconds_until(prepared),
            forward_s=prepared.seconds_until(forwarded),
            sample_s=forwarded.seconds_until(ended),
            gap_s=None if self._sampling.last_ended is None else self._sampling.last_ended.seconds_until(prepared),
            host=host,
            num_copied=num_copied,
        )
        self.on_collected(result)
        return result

    def next_position(self, seq_id: int) -> int:
        """The position that the last token of a sequence with drafts takes; waits for the step to end."""
        assert self._sampling is not None
        assert self._sampling.drafts is not None
        counts = self._readback.wait()[COUNTS]
        assert counts is not None
        index = self._sampling.seq_ids.index(seq_id)
        return int(self._sampling.drafts.first_positions[index] + counts[index] - 1)

    def _read_scores(self, *scores: Tensor | None) -> list[PromptLogprobs]:
        if self._sampling is None or not scores:
            return []
        return read_scores(Scores(*(tensor for tensor in scores if tensor is not None)), self._sampling.scored)


@dataclass(slots=True)
class LeaseRows:
    """The rows of one lease's sequences, and its last step that should have computed but did not."""

    rows: dict[int, int] = field(default_factory=dict)
    offloaded: set[int] = field(default_factory=set)
    """Sequences in the host tier: they have no row."""
    last_failed_step: int = 0


@dataclass(frozen=True, slots=True)
class GrantedRuns:
    """The runs of a grant in columns: B sequences, with their rows of the table.

    starts, counts  [B]     the first position and the number of tokens
    chosen          [n]     indexes of the runs that sample
    drafts          the numbers of drafts, if there are any: see DraftCounts
    """

    seq_ids: list[int]
    rows: list[int]
    starts: Int64s
    counts: Int64s
    chosen: Int64s
    drafts: DraftCounts | None = None

    @property
    def all_sample(self) -> bool:
        """True if each run samples."""
        return len(self.chosen) == len(self.rows)

    @property
    def sampled_positions(self) -> Int64s:
        """The position of each run's first sampled token, if it samples."""
        ends = self.starts + self.counts
        return ends if self.drafts is None else ends - self.drafts.given

    def chosen_logits(self) -> Int64s:
        """The rows of the step's logits that belong to the chosen runs."""
        return self.chosen if self.drafts is None else self.drafts.logit_rows(self.chosen)

    def those_of(self, rows: Collection[int]) -> list[tuple[int, int]]:
        """The sequences that have one of these rows, and the row."""
        if not rows:
            return []
        return [(seq_id, row) for seq_id, row in zip(self.seq_ids, self.rows, strict=True) if row in rows]


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    num_sequences: int
    ranks: RankStatistics


class Executor:
    """Owner of the pool, the host tier, the block tables, the sampling state and the model."""

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        *,
        max_num_seqs: int,
        decode: StaticDecode | None = None,
        prompts: StaticPrompts | None = None,
        host_pool: HostPool | None = None,
        ranks: OneRank = ONE_RANK,
        spins: bool = False,
        kept: KeptPool | Overwritten | None = None,
    ) -> None:
        """`decode` and `prompts` run the steps that they take, the model the others. There is no host tier without a
        pool for it.

        With `spins` the thread that collects a step of `decode` keeps its core busy until the device has ended, if the
        last one took less than MAX_SPIN_S.

        `kept` is the memory that the pool lies in, if it outlives this process.

        `ranks` is this process's place among those that share the model. A StaticDecode is for as many sequences, and
        belongs to one executor: its table holds the executor's sequences.
        """
        self._model = model
        self._ranks = ranks
        if model.states.max_num_seqs < max_num_seqs:
            model.allocate_states(max_num_seqs)
        self._pool = pool
        self._kept = kept
        self._decode = decode
        self._prompts = prompts
        self.runs_ahead = model.device.type == "cuda"
        """True if it pays to launch a step before earlier ones are collected."""
        self._host_pool = host_pool or make_host_pool(pool, num_blocks=0)
        self._table = (
            decode.table
            if decode is not None
            else SequenceTable(
                max_num_seqs=max_num_seqs,
                max_blocks_per_seq=-(-model.max_model_len // pool.block_size),
                device=model.device,
                windowed=pool.windowed,
            )
        )
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs,
            vocab_size=model.vocab_size,
            device=model.device,
            row_by_row=model.is_deterministic,
        )
        self._grammars = GrammarRows(self._table, vocab_size=model.vocab_size, end_token_ids=model.eos_token_ids)
        self._leases: dict[str, LeaseRows] = {}
        self._is_damaged = False
        self._last_ended: Moment | None = None
        self._max_logits = max_logits(max_num_seqs)
        self._unsettled: dict[int, LaunchedStep] = {}
        """Rows that had drafts in their last step: how many were accepted is known when it has ended."""
        self._spins = spins
        self._decode_s = math.inf
        """The time of the last decode step of which the tokens were read."""
        self.profiler: StepProfiler | None = None

    def execute(self, step: AcceptedStep) -> StepResult:
        """Launches and collects. Raises what these raise."""
        with self._recorded(step):
            return self._launch_or_stop(step).collect()

    def launch(self, step: AcceptedStep) -> LaunchedStep:
        """Applies the grant, then gives the device what there is to compute.

        Raises PoolDamagedError if this or an earlier grant can't be applied, DeviceLostError if the device has failed,
        RankLostError if another rank has.
        Anything else that fails after the grant was applied fails the step alone.
        """
        with self._recorded(step):
            return self._launch_or_stop(step)

    def _recorded(self, step: AcceptedStep) -> AbstractContextManager[None]:
        """Record the work in this context as a step of the trace, if there is one."""
        return nullcontext() if self.profiler is None else self.profiler.step(step.grant.step_number)

    def _launch_or_stop(self, step: AcceptedStep) -> LaunchedStep:
        try:
            return self._launch(step)
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"step {step.grant.step_number}: {error!r}") from error

    def _launch(self, step: AcceptedStep) -> LaunchedStep:
        device = self._model.device
        started = Moment(device)
        grant = step.grant
        if self._is_damaged:
            raise PoolDamagedError(f"step {grant.step_number}: an earlier step could not be applied")
        self._ranks.raise_if_lost()
        lease = self._leases.setdefault(grant.lease_id, LeaseRows())
        try:
            with phase("apply grant"):
                self._apply(lease, grant)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._is_damaged = True
            raise PoolDamagedError(f"step {grant.step_number}: {error!r}") from error
        launched = self._try_to_compute(lease, step, started)
        if launched.result.outcome is Outcome.COMPUTED:
            self._note_unsettled(lease, grant, launched)
        if grant.run_sequence_ids and launched.result.outcome is not Outcome.COMPUTED:
            lease.last_failed_step = grant.step_number
        # Waits for the copies of steps that have some: they are few, and the next launch may write their blocks.
        num_copied = len(grant.copy_source_block_ids)
        launched.copies = (self._host_pool.finish(), num_copied)
        if self._kept is not None:
            filled = self._filled_blocks(lease, grant, launched.result.outcome)
            launched.record_blocks = self._kept.end_writing(filled)
        launched.await_ranks = self._ranks.launched(step, self._table_digest)
        if self._spins and self._is_decode(step):
            launched.on_collected = self._note_decode
        return launched

    def _is_decode(self, step: AcceptedStep) -> bool:
        """True if the step is one of those that the static memory is for."""
        return self._decode is not None and self._decode.takes_counts(np.array(step.grant.run_token_counts))

    def _note_decode(self, result: StepResult) -> None:
        self._decode_s = result.prepare_s + result.forward_s + result.sample_s

    def _may_spin(self, step: AcceptedStep) -> bool:
        return self._spins and self._decode_s < MAX_SPIN_S and self._is_decode(step)

    def _table_digest(self) -> int:
        """A number that is equal on all ranks; this one says nothing."""
        return 0

    def _try_to_compute(self, lease: LeaseRows, step: AcceptedStep, started: Moment) -> LaunchedStep:
        number, device = step.grant.step_number, self._model.device
        try:
            self._set_sampling(lease, step)
            outcome = self._refused_outcome(lease, step)
            if outcome is not None:
                return LaunchedStep(StepResult(number, outcome, failed_step=lease.last_failed_step), None, device)
            sampling = self._compute(lease, step, started) if step.grant.run_sequence_ids else None
            return LaunchedStep(StepResult(number, Outcome.COMPUTED), sampling, device)
        except (torch.AcceleratorError, RankLostError):
            raise
        except Exception as error:
            log.error("step failed step=%d error=%s", number, describe_exception(error))
            return LaunchedStep(StepResult(number, Outcome.FAILED), None, device)

    def fence_lease(self, lease_id: str) -> None:
        """Forgets a lease and its sequences."""
        self._ranks.fence_lease(lease_id)
        self._forget_lease(lease_id)

    def _forget_lease(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id, None)
        for row in lease.rows.values() if lease is not None else ():
            self._remove(row)

    def begin_epoch(self) -> None:
        """Forgets everything."""
        self._ranks.begin_epoch()
        for lease_id in list(self._leases):
            self._forget_lease(lease_id)
        self._host_pool.finish()  # of a step that could not be applied
        if self._decode is not None:
            self._decode.begin_anew()
        self._is_damaged = False

    @property
    def host_block_bytes(self) -> int:
        """Of a block's content as read_host_block returns it."""
        return self._host_pool.bytes_per_block

    def read_host_block(self, block_id: int) -> bytes:
        """Return the content of a host block that no step copies to; from any thread."""
        return self._host_pool.read_block(block_id)

    def write_host_block(self, block_id: int, content: bytes) -> None:
        """Replace the content of a host block that no step uses; from any thread."""
        self._host_pool.write_block(block_id, content)

    def checksum_blocks(self, block_ids: list[int]) -> list[int]:
        """See KVPool.checksum_blocks; of all ranks' parts of the blocks."""
        return self._ranks.add_checksums(block_ids, self._pool.checksum_blocks(block_ids))

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(self._table.statistics().num_seqs, self._ranks.statistics())

    def _refused_outcome(self, lease: LeaseRows, step: AcceptedStep) -> Outcome | None:
        """Return the outcome of a step that must not be computed, None if it may be."""
        if step.skip:
            return Outcome.SKIPPED
        if lease.last_failed_step > step.grant.known_step_number and step.grant.run_sequence_ids:
            return Outcome.PRIOR_FAILED
        return None

    def _note_unsettled(self, lease: LeaseRows, grant: grant_pb2.StepGrant, launched: LaunchedStep) -> None:
        for seq_id, count in zip(grant.run_sequence_ids, grant.run_draft_counts, strict=False):
            if count:
                self._unsettled[lease.rows[seq_id]] = launched

    def _settle(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> None:
        """Note the last tokens' positions of the sequences that a grant goes on with, if they had drafts before.

        cachemgr grants it when it knows the outcome of that step, so this waits for nothing.
        """
        for seq_id in (*grant.run_sequence_ids, *grant.fork_parent_ids) if self._unsettled else ():
            row = lease.rows.get(seq_id)
            if row is not None and (launched := self._unsettled.pop(row, None)) is not None:
                self._table.note_sampled([row], [launched.next_position(seq_id)])

    def _apply(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> None:
        """Applies the ownership changes: they do not depend on the computation afterwards."""
        self._settle(lease, grant)
        self._host_pool.join()
        for seq_id in grant.released_sequence_ids:
            if seq_id in lease.offloaded:
                lease.offloaded.remove(seq_id)
            else:
                self._remove(lease.rows.pop(seq_id))
        for seq_id in grant.offloaded_sequence_ids:
            self._remove(lease.rows.pop(seq_id))
            lease.offloaded.add(seq_id)
        for parent_id, child_id in zip(grant.fork_parent_ids, grant.fork_child_ids, strict=True):
            child = self._table.fork(lease.rows[parent_id])
            self._sampler.fork(lease.rows[parent_id], child)
            self._grammars.fork(lease.rows[parent_id], child)
            self._model.states.fork(lease.rows[parent_id], child)
            lease.rows[child_id] = child
        for seq_id, group, num_blocks in zip(
            grant.passed_sequence_ids, grant.passed_layer_groups, grant.passed_block_counts, strict=True
        ):
            self._table.pass_blocks(lease.rows[seq_id], num_blocks, group=group)
        block_ids = list(grant.write_block_ids)
        groups = grant.write_layer_groups or [0] * len(grant.write_sequence_ids)
        spans = pairwise(accumulate(grant.write_block_counts, initial=0))
        for seq_id, group, first_index, (start, end) in zip(
            grant.write_sequence_ids, groups, grant.write_first_indexes, spans, strict=True
        ):
            row = lease.rows.get(seq_id)
            if row is None:
                row = lease.rows[seq_id] = self._table.add()
                lease.offloaded.discard(seq_id)
                self._sampler.set_params(row, SamplingParams())  # greedy, until the client says otherwise
            self._table.stage_blocks(row, first_index, block_ids[start:end], group=group)
        self._copy_blocks(lease, grant)

    def _copy_blocks(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> None:
        """Copy blocks to the host tier, within the pool, and from the host tier, in this order."""
        sources = grant.offload_source_block_ids
        written = self._written_blocks(lease, grant) if sources or self._kept is not None else set[int]()
        if self._kept is not None:
            self._kept.begin_writing((*grant.copy_target_block_ids, *grant.restore_target_block_ids, *written))
        self._host_pool.offload(list(zip(sources, grant.offload_target_host_block_ids, strict=True)))
        # Evicted blocks are copied and handed out by one grant.
        if sources and not written.union(grant.write_block_ids).isdisjoint(sources):
            self._host_pool.join()  # a sharer of a released block, or its new holder, may write it from here on
        self._pool.copy_blocks(list(zip(grant.copy_source_block_ids, grant.copy_target_block_ids, strict=True)))
        self._host_pool.restore(
            list(zip(grant.restore_source_host_block_ids, grant.restore_target_block_ids, strict=True))
        )

    def _written_blocks(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> set[int]:
        """Blocks that the runs write."""
        size = self._pool.block_size
        return self._blocks_of_runs(lease, grant, lambda start, end: slice(start // size, -(-end // size)))

    def _filled_blocks(self, lease: LeaseRows, grant: grant_pb2.StepGrant, outcome: Outcome) -> set[int]:
        """Blocks with content that a step may make findable: those that it wrote to their end, or copied from the
        host tier."""
        size, restored = self._pool.block_size, set(grant.restore_target_block_ids)
        if outcome is not Outcome.COMPUTED:
            return restored
        return restored | self._blocks_of_runs(lease, grant, lambda start, end: slice(start // size, end // size))

    def _blocks_of_runs(
        self, lease: LeaseRows, grant: grant_pb2.StepGrant, entries: Callable[[int, int], slice]
    ) -> set[int]:
        """The blocks of the runs' tables, in all layer groups, at the entries that a run from start to end has."""
        found: set[int] = set()
        for seq_id, start, count in zip(grant.run_sequence_ids, grant.run_starts, grant.run_token_counts, strict=True):
            row, chosen = lease.rows[seq_id], entries(start, start + count)
            for group in range(self._table.num_groups):
                found.update(self._table.block_ids(row, group=group)[chosen])
        return found

    def _set_sampling(self, lease: LeaseRows, step: AcceptedStep) -> None:
        """Sets sampling parameters from this step on, also if it fails: the client may not send them again.

        A row with wrong parameters is left without any: the steps that sample it fail.
        """
        for seq_id, sampling in step.sampling.items():
            self._grammars.set(lease.rows[seq_id], sampling.following)
            self._sampler.set_params(
                lease.rows[seq_id],
                sampling.params,
                prompt_token_ids=sampling.prompt_token_ids,
                output_token_ids=sampling.output_token_ids,
                last_token_ids=sampling.last_token_ids,
            )

    def _compute(self, lease: LeaseRows, step: AcceptedStep, started: Moment) -> Sampling:
        device, runs = self._model.device, _granted_runs(step.grant, lease.rows, most_logits=self._max_logits)
        draws = self._draws(step, runs)
        if draws is not None and (tokens := self._run_whole(step, runs, draws)) is not None:
            ended = Moment(device)
            return Sampling(runs.seq_ids, num_asked=[], sampled=tokens, moments=(started, started, ended, ended))
        with phase("prepare batch"):
            batch = self._build_batch(step, runs, draws)
        prepared = Moment(device)
        making = self._grammars.begin(_masked_runs(step, runs)) if self._grammars.follows(runs.rows) else None
        try:
            with phase("forward"), self._ranks.computing(step):
                logits, scores = self._forward_and_score(step, batch)
        finally:
            masks = NO_MASKS if making is None else self._grammars.finish(making)
        forwarded = Moment(device)
        with phase("sample"):
            drafts = _draft_rows(step, runs, device)
            sampled = (
                self._sample(batch, logits, runs, masks, drafts)
                if draws is None
                else self._replay_sampler(batch, draws)
            )
        last_ended, self._last_ended = self._last_ended, Moment(device)
        return Sampling(
            seq_ids=runs.seq_ids if runs.all_sample else [runs.seq_ids[run] for run in runs.chosen],
            num_asked=self._num_asked(sampled, runs),
            sampled=sampled,
            moments=(started, prepared, forwarded, self._last_ended),
            last_ended=last_ended if _continues(step) else None,
            scored=[(runs.seq_ids[run], tokens) for run, tokens in step.scored.items()],
            scores=scores,
            grammar_failures=[
                GrammarFailure(seq_id, masks.failures[row]) for seq_id, row in runs.those_of(masks.failures)
            ],
            late_ids=[seq_id for seq_id, _ in runs.those_of(masks.late)],
            spins=self._may_spin(step),
            drafts=None if drafts is None else SampledDrafts(drafts.counts, runs.sampled_positions[runs.chosen]),
        )

    def _num_asked(self, sampled: Sampled, runs: GrantedRuns) -> list[int | None]:
        """The number of log-probabilities that each chosen row wants, None for none; empty if no row wants any."""
        if sampled.chosen_logprobs is None:
            return []
        params = [self._sampler.params(runs.rows[run]) for run in runs.chosen]
        return [None if row_params is None else row_params.num_logprobs for row_params in params]

    def _draws(self, step: AcceptedStep, runs: GrantedRuns) -> Draws | None:
        """How the static sampler chooses the step's tokens, if it can."""
        if step.scored or self._decode is None or not self._decode.takes_counts(runs.counts):
            return None
        is_replayed = self._decode.samples and runs.all_sample and not self._grammars.follows(runs.rows)
        return self._sampler.draws(runs.rows) if is_replayed else None

    def _run_whole(self, step: AcceptedStep, runs: GrantedRuns, draws: Draws) -> StepTokens | None:
        """Launch the step as one graph, if it can be; the tokens to come."""
        if self._decode is None:
            return None
        with phase("whole step"):
            token_ids, spins = _token_ids(step, runs), self._may_spin(step)
            adapters = self._adapter_slots(step.grant)
            tokens = self._decode.run_whole(
                runs.rows, runs.starts, token_ids, draws, spins=spins, adapter_slots=adapters
            )
        if tokens is not None:
            self._check_whole(step.grant, self._decode)
        return tokens

    def _check_whole(self, grant: grant_pb2.StepGrant, decode: StaticDecode) -> None:
        """Check a step that was launched as one graph; this executor checks nothing."""

    def _build_batch(self, step: AcceptedStep, runs: GrantedRuns, draws: Draws | None) -> StepBatch:
        """The step's numbers on the device, with draws those of the static sampler, too."""
        token_ids = _token_ids(step, runs)
        if step.scored or self._decode is None or not self._decode.takes_counts(runs.counts):
            batch = build_step_batch(
                self._table,
                block_size=self._pool.block_size,
                rows=runs.rows,
                starts=runs.starts,
                counts=runs.counts,
                token_ids=token_ids,
                drafts=runs.drafts,
                adapter_slots=self._adapter_slots(step.grant),
            )
            if step.grant.run_adapters and not self._model.adapters.has_slots:
                batch = replace(batch, adapters=tuple(self._adapter_numbers(step.grant)))
            return replace(batch, keeps_hidden_states=True) if step.scored else batch
        adapters = self._adapter_slots(step.grant)
        return self._decode.prepare(runs.rows, runs.starts, token_ids, draws=draws, adapter_slots=adapters)

    def _adapter_numbers(self, grant: grant_pb2.StepGrant) -> list[int | None]:
        """The number in the model of each run's adapter."""
        numbers = self._model.adapters.numbers
        identities = (adapter_of(grant, run) for run in range(len(grant.run_adapters)))
        return [numbers[identity] if identity else None for identity in identities]

    def _adapter_slots(self, grant: grant_pb2.StepGrant) -> list[int] | None:
        """The same as StepBatch.adapter_slots has it, if the model has slots and a run an adapter."""
        if not grant.run_adapters or not self._model.adapters.has_slots:
            return None
        return [0 if number is None else 1 + number for number in self._adapter_numbers(grant)]

    def _forward_and_score(self, step: AcceptedStep, batch: StepBatch) -> tuple[Tensor, Scores | None]:
        """The logits of _forward(), and the log-probabilities of prompt tokens for the sequences that need them."""
        if not step.scored:
            return self._forward(step.grant, batch), None
        with self._model.keeping_hidden_states(batch, self._pool) as kept:
            logits = self._forward(step.grant, batch)
        firsts = list(accumulate(batch.counts_host, initial=0))
        asked = step.scored.items()
        tokens = [np.arange(firsts[run], firsts[run] + len(each.next_token_ids)) for run, each in asked]
        following = [each.next_token_ids for _, each in asked]
        scores = score_tokens(
            kept.reader(),
            indices(np.concatenate(tokens).tolist(), batch.input_ids.device),
            indices(np.concatenate(following).tolist(), batch.input_ids.device),
            num_top=max(each.num_top for _, each in asked),
            vocab_size=self._model.vocab_size,
            row_by_row=self._model.is_deterministic,
        )
        return logits, scores

    def _forward(self, grant: grant_pb2.StepGrant, batch: StepBatch) -> Tensor:
        """Runs the grant's computation; logits [L, V] of the batch's logit_indices, float32 or of the output layer's
        dtype, valid until the next forward.
        """
        if batch.keeps_hidden_states:
            return self._model.forward(batch, self._pool)
        if self._decode is not None and self._decode.takes(batch):
            return self._decode.forward(batch)
        if self._prompts is not None and self._prompts.takes(batch):
            return self._prompts.forward(batch)
        pieces = None if self._decode is None else self._decode.pieces
        if pieces is not None and pieces.takes(batch):
            return pieces.forward(batch)
        return self._model.forward(batch, self._pool)

    def _replay_sampler(self, batch: StepBatch, draws: Draws) -> Sampled:
        assert self._decode is not None
        return Sampled(self._decode.sample(batch, draws.way))

    def _sample(
        self, batch: StepBatch, logits: Tensor, runs: GrantedRuns, masks: Masks, drafts: DraftRows | None
    ) -> Sampled:
        """Chooses a token for the chosen runs, of logits [L, V], and keeps it on the device for the next step.

        Penalties, biases, masks and log-probabilities are float32, whatever the logits are.
        """
        rows, positions, index = runs.rows, runs.sampled_positions, batch.rows
        if not len(runs.chosen):
            return Sampled(torch.zeros(0, dtype=torch.int64))
        if not runs.all_sample:
            chosen = indices(runs.chosen, logits.device)
            logits = logits.index_select(0, indices(runs.chosen_logits(), logits.device))
            index = index.index_select(0, chosen)
            rows, positions = [rows[run] for run in runs.chosen], positions[runs.chosen]
        if drafts is not None:
            return self._sample_drafts(logits, rows, positions, masks, drafts, index=index)
        sampled = self._ranks.sample(len(rows), lambda: self._sampler.sample(logits.float(), rows, positions, masks))
        self._table.store_sampled(rows, sampled.tokens, positions, index=index)
        return sampled

    def _sample_drafts(
        self, logits: Tensor, rows: list[int], positions: Int64s, masks: Masks, drafts: DraftRows, *, index: Tensor
    ) -> Sampled:
        """Choose the tokens of sequences of which some have drafts, and keep the last accepted one of each.

        How many are accepted is known to the device alone: _settle() notes where the last ones are.
        """
        row_of = drafts.repeat(rows).tolist()
        position_of = drafts.repeat(positions) + drafts.offsets
        sampled = self._ranks.sample(
            len(row_of), lambda: self._sampler.sample(logits.float(), row_of, position_of, masks, drafts)
        )
        kept = drafts.keep(sampled.tokens)
        known = np.where(drafts.counts == 1, positions, NO_TOKEN)
        self._table.store_sampled(rows, drafts.newest(sampled.tokens, kept), known, index=index)
        return replace(sampled, counts=kept.counts)

    def _remove(self, row: int) -> None:
        self._table.remove(row)
        self._unsettled.pop(row, None)
        self._sampler.clear(row)
        self._grammars.set(row, None)
        self._model.states.clear(row)


def _granted_runs(grant: grant_pb2.StepGrant, rows: Mapping[int, int], *, most_logits: int) -> GrantedRuns:
    """The runs of a grant, with drafts to verify as far as most_logits tokens with logits allow it.

    Raises KeyError for a sequence without a row.
    """
    given = np.array(grant.run_draft_counts, dtype=np.int64)
    seq_ids: list[int] = np.array(grant.run_sequence_ids).tolist()
    return GrantedRuns(
        seq_ids=seq_ids,
        rows=[rows[seq_id] for seq_id in seq_ids],
        starts=np.array(grant.run_starts),
        counts=np.array(grant.run_token_counts),
        chosen=np.array(grant.run_samples).nonzero()[0],
        drafts=DraftCounts.fit(given, most_logits=most_logits) if given.any() else None,
    )


def _draft_rows(step: AcceptedStep, runs: GrantedRuns, device: torch.device) -> DraftRows | None:
    """The rows of logits of the runs that sample, in a step with drafts."""
    if runs.drafts is None:
        return None
    verified = runs.drafts.verified
    return DraftRows([step.given_tokens[run][: verified[run]] if verified[run] else () for run in runs.chosen], device)


def _continues(step: AcceptedStep) -> bool:
    """True if a run of the step begins with its sequence's last sampled token."""
    grant = step.grant
    return len(step.given_tokens) < len(grant.run_sequence_ids) or any(grant.run_draft_counts)


def _repeated(values: list[T], counts: list[int]) -> list[T]:
    """Return each value so many times; there may be none."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)] if values else values


def _token_ids(step: AcceptedStep, runs: GrantedRuns) -> list[TokenArray | None]:
    """The tokens of each run that the client has given, None for the token sampled last."""
    token_ids: list[TokenArray | None] = [None] * len(runs.rows)
    for run, given in step.given_tokens.items():
        token_ids[run] = given
    return token_ids


def _masked_runs(step: AcceptedStep, runs: GrantedRuns) -> list[MaskedRun]:
    """The step's runs as grammars see them."""
    grant, verified = step.grant, None if runs.drafts is None else runs.drafts.verified.tolist()
    masked = []
    for index, (row, start, count) in enumerate(zip(runs.rows, grant.run_starts, grant.run_token_counts, strict=True)):
        samples, given = grant.run_samples[index], step.given_tokens.get(index)
        if num_drafts(grant, index) and given is not None and verified is not None:
            drafts = tuple(given[: verified[index]].tolist())
            masked.append(MaskedRun(row, start, 1, None, samples, drafts))
        else:
            masked.append(MaskedRun(row, start, count, given, samples))
    return masked


def read_logprobs(sampled: Sampled, seq_ids: list[int], num_asked: list[int | None]) -> list[TokenLogprobs]:
    """Return, for sequences with a number, the chosen token's log-probability, and so many of the likeliest."""
    if sampled.chosen_logprobs is None:
        return []
    none: list[list[int]] = [[]] * len(seq_ids)
    chosen = sampled.chosen_logprobs.tolist()
    top_ids = none if sampled.top_ids is None else sampled.top_ids.tolist()
    top = none if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
    return [
        TokenLogprobs(seq_id, logprob, ids[:num], values[:num])
        for seq_id, num, logprob, ids, values in zip(seq_ids, num_asked, chosen, top_ids, top, strict=True)
        if num is not None
    ]
