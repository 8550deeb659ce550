"""Greedy generation through a worker's executor, without the services: grants written by hand.

Blocks are handed out in shuffled order from a pool full of NaN, prompts run in chunks beside sequences that decode,
one sequence is preempted and admitted again, two are forked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from model_zoo import VOCAB_SIZE

from quire.cache.v1 import grant_pb2
from quire.worker.executor import Outcome
from quire.worker.grants import Step
from quire.worker.kv_pool import KVPool
from quire.worker.model import PagedModel
from quire.worker.verify import VerifyingExecutor

BLOCK_SIZE = 4
NUM_BLOCKS = 128
MAX_MODEL_LEN = 64
PROMPT_LENGTHS = (5, 33, 12, 1, 20)
# Tokens per step and sequence; a sequence at the end of its list decodes. Sequence i enters at step i // 2.
CHUNKS = ((3, 2), (7, 26), (12,), (1,), (9, 1, 10))
PREEMPTED, PREEMPTED_AT = 1, 6
FORKED = (0, 2)


@dataclass
class Stream:
    """One sequence: its tokens, how many of them are computed, and whether the worker sampled the last one."""

    seq_id: int
    tokens: list[int]
    num_computed: int = 0
    sampled_at: int | None = None


class ExecutorDriver:
    """The orders of cachemgr and a client for a few sequences, one step after the other."""

    def __init__(self, model: PagedModel) -> None:
        self.pool = KVPool(
            model.specs, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
        )
        self.executor = VerifyingExecutor(model, self.pool, max_num_seqs=8)
        for tensor in self.pool.tensors():
            tensor[1:].fill_(float("nan"))
        generator = torch.Generator().manual_seed(5)
        self._free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
        self._tables: dict[int, list[int]] = {}
        self._ids, self._steps = count(1), count(1)
        self._grant = self._next_grant()

    def _next_grant(self) -> grant_pb2.StepGrant:
        """As if the outcome of the step before were known."""
        number = next(self._steps)
        return grant_pb2.StepGrant(lease_id="one", step_number=number, known_step_number=number - 1)

    def admit(self, tokens: list[int]) -> Stream:
        stream = Stream(next(self._ids), list(tokens))
        self._tables[stream.seq_id] = []
        return stream

    def fork(self, parent: Stream) -> Stream:
        """A sequence that computes the parent's last computed token again, on a copy of the block it is in."""
        length = parent.num_computed
        child = Stream(next(self._ids), parent.tokens[:length], length - 1)
        table = self._tables[parent.seq_id][: -(-length // BLOCK_SIZE)]
        self._grant.fork_parent_ids.append(parent.seq_id)
        self._grant.fork_child_ids.append(child.seq_id)
        copy = self._free.pop()
        if (length - 1) % BLOCK_SIZE:
            self._grant.copy_source_block_ids.append(table[-1])
            self._grant.copy_target_block_ids.append(copy)
        self._tables[child.seq_id] = []
        self._write(child.seq_id, [*table[:-1], copy])
        return child

    def share(self, owner: Stream, other: Stream, num_tokens: int) -> None:
        """Let `other` begin with the owner's first blocks, which may be computed in the next step only."""
        missing = num_tokens // BLOCK_SIZE - len(self._tables[owner.seq_id])
        if missing > 0:
            self._write(owner.seq_id, [self._free.pop() for _ in range(missing)])
        self._write(other.seq_id, self._tables[owner.seq_id][: num_tokens // BLOCK_SIZE])
        other.num_computed = num_tokens

    def preempt(self, stream: Stream) -> None:
        """Give everything back; the next step admits it again under another id."""
        self._grant.released_sequence_ids.append(stream.seq_id)
        del self._tables[stream.seq_id]
        stream.seq_id, stream.num_computed, stream.sampled_at = next(self._ids), 0, None
        self._tables[stream.seq_id] = []

    def _write(self, seq_id: int, block_ids: list[int]) -> None:
        self._grant.write_sequence_ids.append(seq_id)
        self._grant.write_first_indexes.append(len(self._tables[seq_id]))
        self._grant.write_block_counts.append(len(block_ids))
        self._grant.write_block_ids.extend(block_ids)
        self._tables[seq_id] += block_ids

    def step(self, counts: list[tuple[Stream, int]]) -> Outcome:
        """Run so many tokens of each; one that has then computed all its tokens gets the next one."""
        grant, given = self._grant, {}
        for index, (stream, num) in enumerate(counts):
            start, end = stream.num_computed, stream.num_computed + num
            missing = -(-end // BLOCK_SIZE) - len(self._tables[stream.seq_id])
            if missing > 0:
                self._write(stream.seq_id, [self._free.pop() for _ in range(missing)])
            grant.run_sequence_ids.append(stream.seq_id)
            grant.run_starts.append(start)
            grant.run_token_counts.append(num)
            grant.run_samples.append(end == len(stream.tokens))
            if num > 1 or stream.sampled_at != start:
                grant.given_run_indexes.append(index)
                given[index] = np.array(stream.tokens[start:end], dtype=np.int32)
        result = self.executor.execute(Step(grant, given))
        self._grant = self._next_grant()
        if result.outcome is Outcome.COMPUTED:
            tokens = dict(zip(result.sampled_ids, result.sampled_tokens, strict=True))
            for stream, num in counts:
                stream.num_computed += num
                if stream.seq_id in tokens:
                    stream.sampled_at = stream.num_computed
                    stream.tokens.append(tokens[stream.seq_id])
        return result.outcome


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def run_mixed(model: PagedModel, num_new: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the prompts with num_new new ones each, and of forks that began where prompts FORKED ended."""
    driver, prompts = ExecutorDriver(model), make_prompts()
    chunks = [list(sizes) for sizes in CHUNKS]
    streams: list[Stream] = []
    children: list[Stream] = []
    for step in count():
        while len(streams) < len(prompts) and step >= len(streams) // 2:
            streams.append(driver.admit(prompts[len(streams)]))
        if step == PREEMPTED_AT:
            driver.preempt(streams[PREEMPTED])
            chunks[PREEMPTED] = [11, len(streams[PREEMPTED].tokens) - 11]
        for i in FORKED:
            if i < len(streams) and streams[i].num_computed == len(prompts[i]):
                children.append(driver.fork(streams[i]))
        lengths = [len(prompt) + num_new for prompt in prompts[: len(streams)]]
        lengths += [len(prompts[i]) + num_new for i in FORKED[: len(children)]]
        sizes = [chunks[i].pop(0) if chunks[i] else 1 for i in range(len(streams))] + [1] * len(children)
        everybody = zip([*streams, *children], sizes, lengths, strict=True)
        counts = [(stream, size) for stream, size, length in everybody if len(stream.tokens) < length]
        if not counts:
            return [stream.tokens for stream in streams], [child.tokens for child in children]
        outcome = driver.step(counts[::-1] if step % 2 else counts)
        assert outcome is Outcome.COMPUTED
        driver.pool.check_invariants()
        model.states.check_invariants()
    raise AssertionError("count() has no end")
