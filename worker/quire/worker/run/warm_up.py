"""Steps that run before a worker serves, so that no later step waits for a kernel to be compiled.

The kernels that a step launches, and their compiled variants, follow from a few of its sizes: the tokens of its
prompts, the longest sequence that it may have, whether its prompts are adjacent, whether it has decodes, too. The
steps here have all combinations of these sizes, by the choices of `quire.kernels`:

    prompts     of 1, 2, 4, … tokens, at the beginning of the longest sequence and at its end. Few tokens behind a
                long prefix split the keys and merge the parts
    mixed       one prompt behind decodes, prompts with decodes in between
    decodes     one, several, all that there may be, if they don't run as graphs
    copies      within the pool, to the host tier and back
    sampling    greedy, and with all sampling parameters
    drafts      the same, behind drafts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.kv_pool import NULL_BLOCK
from quire.worker.run.executor import Executor, Outcome
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.parameters import SamplingParams

LEASE_ID = "warm-up"
FIRST_BLOCK = NULL_BLOCK + 1

# More tokens than these are never so few programs that keys are split, or a mixed step runs other kernels.
MAX_MIXED_TOKENS = 512
MAX_TOKENS_AT_END = 2048

# Blocks that are moved to the host tier and back: enough for the kernel, which handles many short runs.
MAX_MOVED_BLOCKS = 16

SAMPLED = (
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(
        temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1, num_logprobs=2
    ),
    SamplingParams(frequency_penalty=0.1, constraints=Constraints(bad_words=((0,), (0, 1)), logit_bias={0: 1.0})),
)


@dataclass(frozen=True, slots=True)
class WarmUpRun:
    """A sequence of a step: `count` tokens from position `start`."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The upper limits of a step. `can_go_on` is false if a sequence has to be computed from its beginning."""

    max_step_tokens: int
    max_num_seqs: int
    max_model_len: int
    can_go_on: bool
    max_drafts: int = 0

    def allow(self, runs: Sequence[WarmUpRun]) -> bool:
        """Say if a step may have these runs."""
        return (
            len(runs) <= self.max_num_seqs
            and sum(run.count for run in runs) <= self.max_step_tokens
            and all(run.start >= 0 and run.start + run.count <= self.max_model_len for run in runs)
            and (self.can_go_on or all(run.start == 0 for run in runs))
        )


def warm_up(
    executor: Executor,
    sizes: StepSizes,
    *,
    block_size: int,
    num_blocks: int,
    num_groups: int,
    num_host_blocks: int,
) -> None:
    """Run the steps on the pool that will serve: afterwards its blocks have unused content.

    The executor is not used for anything else. Raises ValueError if a step fails.
    Cost: the tokens of about two largest steps, in some 60 steps.
    """
    lease = _Lease(executor, block_size, num_groups)
    for runs in batches(sizes):
        lease.run(runs)
    for params in SAMPLED:
        lease.run([WarmUpRun(0, 1)], params)
        if num_drafts := min(sizes.max_drafts, sizes.max_step_tokens - 1, sizes.max_model_len - 2):
            lease.verify(num_drafts, params)
    lease.move_blocks(num_blocks=num_blocks, num_host_blocks=num_host_blocks)


def batches(sizes: StepSizes) -> Iterator[list[WarmUpRun]]:
    """Yield the runs of each step."""
    return (runs for runs in _batches(sizes) if sizes.allow(runs))


def _batches(sizes: StepSizes) -> Iterator[list[WarmUpRun]]:
    longest, most = sizes.max_model_len, sizes.max_step_tokens
    for count in (1 << power for power in range(min(most, longest).bit_length())):
        yield from _at_the_beginning(count)
        if count <= MAX_TOKENS_AT_END:
            yield from (
                [WarmUpRun(longest - run.count, run.count) for run in runs] for runs in _at_the_beginning(count)
            )
    yield [WarmUpRun(0, 2)] * min(sizes.max_num_seqs, most // 2)
    yield [WarmUpRun(0, 1)] * min(sizes.max_num_seqs, most)


def _at_the_beginning(count: int) -> Iterator[list[WarmUpRun]]:
    """Yield the runs of steps with prompts of so many tokens in all."""
    yield [WarmUpRun(0, count)]
    if 4 <= count <= MAX_MIXED_TOKENS:
        one, half = WarmUpRun(0, 1), WarmUpRun(0, count // 2)
        yield [one, WarmUpRun(0, count)]
        yield [half, one, half, one]


class _Lease:
    """A lease of the warm-up. All its sequences share one block, since their results are not used."""

    def __init__(self, executor: Executor, block_size: int, num_groups: int) -> None:
        self._executor = executor
        self._block_size = block_size
        self._num_groups = num_groups

    def run(self, runs: Sequence[WarmUpRun], params: SamplingParams | None = None) -> None:
        """Run a step of new sequences, and forget them."""
        self._run(runs, params)
        self._executor.fence_lease(LEASE_ID)

    def verify(self, num_drafts: int, params: SamplingParams) -> None:
        """Run a step of a sequence that goes on with drafts."""
        self._run([WarmUpRun(0, 1)], params, num_blocks=-(-(2 + num_drafts) // self._block_size))
        grant = self._grant()
        grant.run_sequence_ids.append(0)
        grant.run_starts.append(1)
        grant.run_token_counts.append(1 + num_drafts)
        grant.run_draft_counts.append(num_drafts)
        grant.run_samples.append(True)
        self._execute(AcceptedStep(grant, {0: np.zeros(num_drafts, dtype=np.int32)}))
        self._executor.fence_lease(LEASE_ID)

    def _run(self, runs: Sequence[WarmUpRun], params: SamplingParams | None, *, num_blocks: int = 0) -> None:
        """Run a step of new sequences, with a table of num_blocks blocks each, or of those that it needs."""
        grant = self._grant()
        for seq_id, run in enumerate(runs):
            needed = -(-(run.start + run.count) // self._block_size)
            for group in range(self._num_groups):
                self._write(grant, seq_id, group, [FIRST_BLOCK] * max(needed, num_blocks))
            grant.run_sequence_ids.append(seq_id)
            grant.run_starts.append(run.start)
            grant.run_token_counts.append(run.count)
            grant.run_samples.append(True)
        given = {index: np.zeros(run.count, dtype=np.int32) for index, run in enumerate(runs)}
        sampling = {} if params is None else {seq_id: RowSampling(params) for seq_id in range(len(runs))}
        self._execute(AcceptedStep(grant, given, sampling))

    def move_blocks(self, *, num_blocks: int, num_host_blocks: int) -> None:
        """Copy a block within the pool, and as many as it takes to the host tier and back, as far as there are any."""
        grant = self._grant()
        if num_blocks > FIRST_BLOCK + 1:
            grant.copy_source_block_ids.append(FIRST_BLOCK)
            grant.copy_target_block_ids.append(FIRST_BLOCK + 1)
        self._execute(AcceptedStep(grant))
        moved = range(min(MAX_MOVED_BLOCKS, num_blocks - FIRST_BLOCK, num_host_blocks))
        there, back = self._grant(), self._grant()
        there.offload_source_block_ids.extend(FIRST_BLOCK + index for index in moved)
        there.offload_target_host_block_ids.extend(moved)
        back.restore_source_host_block_ids.extend(moved)
        back.restore_target_block_ids.extend(FIRST_BLOCK + index for index in moved)
        self._execute(AcceptedStep(there))
        self._execute(AcceptedStep(back))
        self._executor.fence_lease(LEASE_ID)

    def _grant(self) -> grant_pb2.StepGrant:
        return grant_pb2.StepGrant(lease_id=LEASE_ID, step_number=1)

    def _write(self, grant: grant_pb2.StepGrant, seq_id: int, group: int, block_ids: list[int]) -> None:
        grant.write_sequence_ids.append(seq_id)
        grant.write_layer_groups.append(group)
        grant.write_first_indexes.append(0)
        grant.write_block_counts.append(len(block_ids))
        grant.write_block_ids.extend(block_ids)

    def _execute(self, step: AcceptedStep) -> None:
        """Run one step. Raises ValueError if it fails."""
        outcome = self._executor.execute(step).outcome
        if outcome is not Outcome.COMPUTED:
            counts = list(step.grant.run_token_counts)
            raise ValueError(f"a step of the warm-up has failed, see the log; tokens: {counts}")
