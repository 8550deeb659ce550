"""Runs steps on the device, one after the other: table changes, copies, one forward, one sample.

Lives on the model thread. Decides nothing about ownership: block ids come from grants that have passed the gate.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from torch import Tensor

from quire.cache.v1 import grant_pb2
from quire.serving.logs import describe_exception
from quire.worker.grants import Step
from quire.worker.kv_pool import KVPool
from quire.worker.model import PagedModel
from quire.worker.profiling import StepProfiler, phase
from quire.worker.sampler import Sampled, Sampler, SamplingParams
from quire.worker.sequence_table import SequenceTable
from quire.worker.step_batch import StepBatch, build_step_batch

log = logging.getLogger(__name__)


class Outcome(Enum):
    COMPUTED = "computed"
    FAILED = "failed"
    PRIOR_FAILED = "prior failed"
    SKIPPED = "skipped"


class PoolDamagedError(Exception):
    """A grant could not be applied: what the blocks hold is not known any more, a new epoch has to begin."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, of the model's own distribution."""

    seq_id: int
    sampled: float
    top_token_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step ended. Times in seconds; lists named alike belong together by index."""

    step_number: int
    outcome: Outcome
    failed_step: int = 0
    """The step whose failure made this one fail, if PRIOR_FAILED."""
    sampled_ids: list[int] = field(default_factory=list)
    """Sequences for which a token was sampled."""
    sampled_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True)
class LeaseRows:
    """Where one lease's sequences are, and the last of its steps that computed nothing though it should have."""

    rows: dict[int, int] = field(default_factory=dict)
    last_failed_step: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    num_sequences: int


class Executor:
    """Owner of the pool, the block tables, the sampling state and the model."""

    def __init__(self, model: PagedModel, pool: KVPool, *, max_num_seqs: int) -> None:
        self._model = model
        self._pool = pool
        self._table = SequenceTable(
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=-(-model.max_model_len // pool.block_size),
            device=model.device,
        )
        self._sampler = Sampler(max_num_seqs=max_num_seqs, vocab_size=model.vocab_size, device=model.device)
        self._leases: dict[str, LeaseRows] = {}
        self._is_damaged = False
        self.profiler: StepProfiler | None = None

    def execute(self, step: Step) -> StepResult:
        """Applies the grant, then computes. Raises PoolDamagedError if this or an earlier grant can't be applied.

        Anything that fails after that fails the step alone.
        """
        if self.profiler is None:
            return self._execute(step)
        with self.profiler.step(step.grant.step_number):
            return self._execute(step)

    def _execute(self, step: Step) -> StepResult:
        started = time.perf_counter()
        grant = step.grant
        if self._is_damaged:
            raise PoolDamagedError(f"step {grant.step_number}: an earlier step could not be applied")
        lease = self._leases.setdefault(grant.lease_id, LeaseRows())
        try:
            with phase("apply grant"):
                self._apply(lease, grant)
        except Exception as error:
            self._is_damaged = True
            raise PoolDamagedError(f"step {grant.step_number}: {error!r}") from error
        self._set_sampling(lease, step)
        outcome = self._refused_outcome(lease, step)
        if outcome is not None:
            result = StepResult(grant.step_number, outcome, failed_step=lease.last_failed_step)
        else:
            result = self._try_to_compute(lease, step, started)
        if grant.run_sequence_ids and result.outcome is not Outcome.COMPUTED:
            lease.last_failed_step = grant.step_number
        return result

    def _try_to_compute(self, lease: LeaseRows, step: Step, started: float) -> StepResult:
        number = step.grant.step_number
        if not step.grant.run_sequence_ids:
            return StepResult(number, Outcome.COMPUTED, prepare_s=time.perf_counter() - started)
        try:
            return self._compute(lease, step, started)
        except Exception as error:
            log.error("step failed step=%d error=%s", number, describe_exception(error))
            return StepResult(number, Outcome.FAILED)

    def fence_lease(self, lease_id: str) -> None:
        """Forgets a lease and its sequences."""
        lease = self._leases.pop(lease_id, None)
        for row in lease.rows.values() if lease is not None else ():
            self._remove(row)

    def begin_epoch(self) -> None:
        """Forgets everything."""
        for lease_id in list(self._leases):
            self.fence_lease(lease_id)
        self._is_damaged = False

    def checksum_blocks(self, block_ids: list[int]) -> list[int]:
        """See KVPool.checksum_blocks."""
        return self._pool.checksum_blocks(block_ids)

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(self._table.statistics().num_seqs)

    def _refused_outcome(self, lease: LeaseRows, step: Step) -> Outcome | None:
        """Why nothing is to be computed, if so."""
        if step.skip:
            return Outcome.SKIPPED
        if lease.last_failed_step > step.grant.known_step_number and step.grant.run_sequence_ids:
            return Outcome.PRIOR_FAILED
        return None

    def _apply(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> None:
        """Who owns what: the same whether or not anything is computed afterwards."""
        for seq_id in grant.released_sequence_ids:
            self._remove(lease.rows.pop(seq_id))
        for parent_id, child_id in zip(grant.fork_parent_ids, grant.fork_child_ids, strict=True):
            child = self._table.fork(lease.rows[parent_id])
            self._table.trim_blocks(child, 0)
            self._sampler.fork(lease.rows[parent_id], child)
            lease.rows[child_id] = child
        ends = [0]
        for count in grant.write_block_counts:
            ends.append(ends[-1] + count)
        block_ids = list(grant.write_block_ids)
        spans = pairwise(ends)
        for seq_id, first_index, (start, end) in zip(
            grant.write_sequence_ids, grant.write_first_indexes, spans, strict=True
        ):
            row = lease.rows.get(seq_id)
            if row is None:
                row = lease.rows[seq_id] = self._table.add()
                self._sampler.set_params(row, SamplingParams())  # greedy, until the client says otherwise
            self._table.stage_blocks(row, first_index, block_ids[start:end])
        self._pool.copy_blocks(list(zip(grant.copy_source_block_ids, grant.copy_target_block_ids, strict=True)))

    def _set_sampling(self, lease: LeaseRows, step: Step) -> None:
        """From this step on, also if it fails: the client may not send it again."""
        for seq_id, sampling in step.sampling.items():
            self._sampler.set_params(
                lease.rows[seq_id],
                sampling.params,
                prompt_token_ids=sampling.prompt_token_ids,
                output_token_ids=sampling.output_token_ids,
            )

    def _compute(self, lease: LeaseRows, step: Step, started: float) -> StepResult:
        grant = step.grant
        rows = [lease.rows[seq_id] for seq_id in grant.run_sequence_ids]
        with phase("prepare batch"):
            batch = build_step_batch(
                self._table,
                block_size=self._pool.block_size,
                rows=rows,
                starts=list(grant.run_starts),
                counts=list(grant.run_token_counts),
                token_ids=[step.given_tokens.get(index) for index in range(len(rows))],
            )
        prepared = time.perf_counter()
        with phase("forward"):
            logits = self._forward(grant, batch)
        forwarded = time.perf_counter()
        chosen = [index for index, samples in enumerate(grant.run_samples) if samples]
        seq_ids = [grant.run_sequence_ids[index] for index in chosen]
        tokens, logprobs = self._sample(
            logits if len(chosen) == len(rows) else logits[chosen],
            seq_ids,
            rows=[rows[index] for index in chosen],
            positions=[batch.seq_lens_host[index] for index in chosen],
        )
        return StepResult(
            grant.step_number,
            Outcome.COMPUTED,
            sampled_ids=seq_ids,
            sampled_tokens=tokens,
            logprobs=logprobs,
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sample_s=time.perf_counter() - forwarded,
        )

    def _forward(self, grant: grant_pb2.StepGrant, batch: StepBatch) -> Tensor:
        """Computes what the grant says; logits [B, V] of each run's last token."""
        return self._model.forward(batch, self._pool)

    def _sample(
        self, logits: Tensor, seq_ids: list[int], *, rows: list[int], positions: list[int]
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """Chooses a token for each row of logits [rows, V], keeps it on the device for the next step, and reads it."""
        if not rows:
            return [], []
        with phase("sample"):
            sampled = self._sampler.sample(logits, rows, positions)
            self._table.store_sampled(rows, sampled.tokens, positions)
        params = [self._sampler.params(row) for row in rows]
        num_asked = [None if row_params is None else row_params.num_logprobs for row_params in params]
        with phase("read tokens"):
            return sampled.tokens.tolist(), read_logprobs(sampled, seq_ids, num_asked)

    def _remove(self, row: int) -> None:
        self._table.remove(row)
        self._sampler.clear(row)


def read_logprobs(sampled: Sampled, seq_ids: list[int], num_asked: list[int | None]) -> list[TokenLogprobs]:
    """Of the sequences that asked for some: the chosen token's, and as many of the likeliest as each asked for."""
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
