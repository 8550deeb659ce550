"""Greedy generation through a worker's executor, without the services: grants written by hand.

Blocks are handed out in shuffled order from a pool full of NaN, prompts run in chunks beside sequences that decode,
one sequence is preempted and admitted again, two are forked. Blocks behind the window of a layer group are given up as
soon as no later token sees them; they are filled with NaN and handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from types import MappingProxyType

import numpy as np
import torch
from model_zoo import VOCAB_SIZE

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.host_pool import make_host_pool
from quire.worker.memory.kv_pool import NULL_BLOCK, KVPool
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Outcome, StepResult
from quire.worker.run.graphs import StaticDecode
from quire.worker.run.verify import VerifyingExecutor

BLOCK_SIZE = 4
NUM_BLOCKS = 128
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 64
PROMPT_LENGTHS = (5, 33, 12, 1, 20)
# Tokens per step and sequence; a sequence at the end of its list decodes. Sequence i enters at step i // 2.
CHUNKS = ((3, 2), (7, 26), (12,), (1,), (9, 1, 10))
PREEMPTED, PREEMPTED_AT = 1, 6
FORKED = (0, 2)
NO_SAMPLING: Mapping[int, RowSampling] = MappingProxyType({})
NO_DRAFTS: Mapping[int, list[int]] = MappingProxyType({})


@dataclass
class Stream:
    """One sequence: its tokens, how many of them are computed, and whether the worker sampled the last one."""

    seq_id: int
    tokens: list[int]
    num_computed: int = 0
    sampled_at: int | None = None
    adapter: bytes = b""


class ExecutorDriver:
    """The orders of cachemgr and a client for a few sequences, one step after the other."""

    def __init__(
        self,
        model: PagedModel,
        *,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = MAX_NUM_SEQS,
        make_decode: Callable[[PagedModel, KVPool], StaticDecode] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.pool = model.make_pool(num_blocks=NUM_BLOCKS, block_size=block_size, dtype=kv_dtype)
        self._block_size = block_size
        host_pool = make_host_pool(self.pool, num_blocks=NUM_BLOCKS)
        decode = None if make_decode is None else make_decode(model, self.pool)
        self.executor = VerifyingExecutor(
            model, self.pool, max_num_seqs=max_num_seqs, decode=decode, host_pool=host_pool
        )
        self.num_passed = 0
        """Table entries that were given up."""
        for tensor in self.pool.tensors():
            tensor[1:].fill_(float("nan"))
        generator = torch.Generator().manual_seed(5)
        self._free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
        self._free_host = list(range(NUM_BLOCKS))
        self._tables: dict[int, list[list[int]]] = {}
        self._host_tables: dict[int, list[list[int | None]]] = {}
        self._ids, self._steps = count(1), count(1)
        self._grant = self._next_grant()

    def _next_grant(self) -> grant_pb2.StepGrant:
        """As if the outcome of the step before were known."""
        number = next(self._steps)
        return grant_pb2.StepGrant(lease_id="one", step_number=number, known_step_number=number - 1)

    def admit(self, tokens: list[int], adapter: bytes = b"") -> Stream:
        stream = Stream(next(self._ids), list(tokens), adapter=adapter)
        self._tables[stream.seq_id] = [[] for _ in self.pool.groups]
        return stream

    def fork(self, parent: Stream) -> Stream:
        """A sequence that computes the parent's last computed token again, on a copy of the block it is in."""
        length = parent.num_computed
        child = Stream(next(self._ids), parent.tokens[:length], length - 1, adapter=parent.adapter)
        self._grant.fork_parent_ids.append(parent.seq_id)
        self._grant.fork_child_ids.append(child.seq_id)
        self._tables[child.seq_id] = [[] for _ in self.pool.groups]
        for number, group in enumerate(self.pool.groups):
            table = self._tables[parent.seq_id][number][: -(-length // self._block_size)]
            passed = group.count_passed(length, self._block_size)
            copy = self._free.pop()
            if (length - 1) % self._block_size:
                self._grant.copy_source_block_ids.append(table[-1])
                self._grant.copy_target_block_ids.append(copy)
            self._write(child.seq_id, number, [*table[passed:-1], copy], first=passed)
        return child

    def share(self, owner: Stream, other: Stream, num_tokens: int) -> None:
        """Let `other` begin with the owner's first blocks, which may be computed in the next step only."""
        for number, group in enumerate(self.pool.groups):
            missing = num_tokens // self._block_size - len(self._tables[owner.seq_id][number])
            if missing > 0:
                self._write(owner.seq_id, number, [self._free.pop() for _ in range(missing)])
            passed = group.count_passed(num_tokens, self._block_size)
            shared = self._tables[owner.seq_id][number][passed : num_tokens // self._block_size]
            self._write(other.seq_id, number, shared, first=passed)
        other.num_computed = num_tokens

    def end(self, stream: Stream) -> None:
        """Release a stream with the next step."""
        self._grant.released_sequence_ids.append(stream.seq_id)
        self._give_back({block_id for table in self._tables.pop(stream.seq_id) for block_id in table} - {NULL_BLOCK})

    def preempt(self, stream: Stream) -> None:
        """Give everything back; the next step admits it again under another id."""
        self.end(stream)
        stream.seq_id, stream.num_computed, stream.sampled_at = next(self._ids), 0, None
        self._tables[stream.seq_id] = [[] for _ in self.pool.groups]

    def offload(self, stream: Stream) -> None:
        """Move the blocks of a stream to the host tier."""
        self._pass_blocks(stream, is_leaving=True)
        self._grant.offloaded_sequence_ids.append(stream.seq_id)
        host_tables: list[list[int | None]] = [[] for _ in self.pool.groups]
        for table, host_table in zip(self._tables.pop(stream.seq_id), host_tables, strict=True):
            for block_id in table:
                host_table.append(None if block_id == NULL_BLOCK else self._free_host.pop())
                if block_id != NULL_BLOCK:
                    self._grant.offload_source_block_ids.append(block_id)
                    self._grant.offload_target_host_block_ids.append(host_table[-1])
                    self._free.insert(0, block_id)
        self._host_tables[stream.seq_id] = host_tables

    def restore(self, stream: Stream) -> None:
        """Move a stream back, to other blocks; its next token is given."""
        self._tables[stream.seq_id] = [[] for _ in self.pool.groups]
        for group, host_table in enumerate(self._host_tables.pop(stream.seq_id)):
            host_ids = [host_id for host_id in host_table if host_id is not None]
            block_ids = [self._free.pop() for _ in host_ids]
            self._grant.restore_source_host_block_ids.extend(host_ids)
            self._grant.restore_target_block_ids.extend(block_ids)
            self._write(stream.seq_id, group, block_ids, first=len(host_table) - len(host_ids))
        stream.sampled_at = None

    def _write(self, seq_id: int, group: int, block_ids: list[int], *, first: int | None = None) -> None:
        """Write entries to a table: behind those that it has, or from `first` on."""
        table = self._tables[seq_id][group]
        first = len(table) if first is None else first
        self._grant.write_sequence_ids.append(seq_id)
        self._grant.write_layer_groups.append(group)
        self._grant.write_first_indexes.append(first)
        self._grant.write_block_counts.append(len(block_ids))
        self._grant.write_block_ids.extend(block_ids)
        table += [NULL_BLOCK] * (first - len(table)) + block_ids

    def _pass_blocks(self, stream: Stream, *, is_leaving: bool = False) -> None:
        """Give up entries that no later token of the stream sees. Blocks in no other table are free again.

        The grant says nothing of entries of a stream that gives up all of them.
        """
        for number, group in enumerate(self.pool.groups):
            table = self._tables[stream.seq_id][number]
            passed = group.count_passed(stream.num_computed, self._block_size)
            given_up = {block_id for block_id in table[:passed] if block_id != NULL_BLOCK}
            if not given_up:
                continue
            if not is_leaving:
                self._grant.passed_sequence_ids.append(stream.seq_id)
                self._grant.passed_layer_groups.append(number)
                self._grant.passed_block_counts.append(passed)
            table[:passed] = [NULL_BLOCK] * passed
            self.num_passed += len(given_up)
            self._give_back(given_up)

    def _give_back(self, block_ids: set[int]) -> None:
        """Hand blocks that are in no table out again, full of NaN."""
        held = {block_id for tables in self._tables.values() for each in tables for block_id in each}
        for block_id in block_ids - held:
            self._free.insert(0, block_id)
            for tensor in self.pool.tensors():
                tensor[block_id].fill_(float("nan"))

    def _add_adapter(self, adapter: bytes) -> None:
        """Name the adapter of the run that was added last."""
        if adapter and adapter not in self._grant.adapters:
            self._grant.adapters.append(adapter)
        self._grant.run_adapters.append(1 + list(self._grant.adapters).index(adapter) if adapter else 0)

    def step(
        self,
        counts: list[tuple[Stream, int]],
        sampling: Mapping[int, RowSampling] = NO_SAMPLING,
        drafts: Mapping[int, list[int]] = NO_DRAFTS,
    ) -> Outcome:
        """Run so many tokens of each; one that has then computed all its tokens gets the next one.

        sampling has new parameters, and drafts the tokens to verify behind a stream's last one, both by sequence id.
        """
        grant, given = self._grant, {}
        for index, (stream, num_tokens) in enumerate(counts):
            guesses = drafts.get(stream.seq_id, [])
            num = num_tokens + len(guesses)
            start, end = stream.num_computed, stream.num_computed + num
            if stream.seq_id not in grant.fork_child_ids:
                self._pass_blocks(stream)
            for number, table in enumerate(self._tables[stream.seq_id]):
                missing = -(-end // self._block_size) - len(table)
                if missing > 0:
                    self._write(stream.seq_id, number, [self._free.pop() for _ in range(missing)])
            grant.run_sequence_ids.append(stream.seq_id)
            grant.run_starts.append(start)
            grant.run_token_counts.append(num)
            grant.run_samples.append(start + num_tokens == len(stream.tokens))
            grant.run_draft_counts.append(len(guesses))
            self._add_adapter(stream.adapter)
            if num > 1 or stream.sampled_at != start:
                grant.given_run_indexes.append(index)
                given[index] = np.array(guesses or stream.tokens[start:end], dtype=np.int32)
        if not any(grant.run_draft_counts):
            grant.ClearField("run_draft_counts")
        if not any(grant.run_adapters):
            grant.ClearField("run_adapters")
        self.result = self.executor.execute(AcceptedStep(grant, given, sampling))
        self._grant = self._next_grant()
        if self.result.outcome is Outcome.COMPUTED:
            tokens = _tokens_by_sequence(self.result)
            for stream, num in counts:
                stream.num_computed += num
                if sampled := tokens.get(stream.seq_id):
                    stream.num_computed += len(sampled) - 1
                    stream.sampled_at = stream.num_computed
                    stream.tokens += sampled
        return self.result.outcome


def _tokens_by_sequence(result: StepResult) -> dict[int, list[int]]:
    tokens = iter(result.sampled_tokens)
    counts = result.sampled_counts or [1] * len(result.sampled_ids)
    return {seq_id: list(islice(tokens, count)) for seq_id, count in zip(result.sampled_ids, counts, strict=True)}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def run_mixed(
    model: PagedModel,
    num_new: int,
    *,
    driver: ExecutorDriver | None = None,
    adapters: Sequence[bytes] = (b"",) * len(PROMPT_LENGTHS),
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the prompts with num_new new ones each, and of forks that began where prompts FORKED ended.

    adapters are those of the prompts.
    """
    driver, prompts = driver or ExecutorDriver(model), make_prompts()
    chunks = [list(sizes) for sizes in CHUNKS]
    streams: list[Stream] = []
    children: list[Stream] = []
    for step in count():
        while len(streams) < len(prompts) and step >= len(streams) // 2:
            streams.append(driver.admit(prompts[len(streams)], adapters[len(streams)]))
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
