"""Recorded requests, driven one at a time through the ledger: what its prefix cache finds under a policy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr import messages
from quire.cachemgr._core import Ledger
from quire.cachemgr.geometry import Geometry, LayerGroup

TRACES = Path(__file__).parent / "traces"
EPOCH = 1
VOCAB = 2**31 - 1
TAIL = VOCAB - 1
STRANDED_EVERY = 20


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: its tokens, and the ids of its full blocks."""

    num_tokens: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Blocks that were found instead of computed, and blocks that were evicted."""

    num_hits: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class GroupsOutcome:
    """The same in a pool with layer groups.

    num_hits       blocks of the prompts' positions that were found
    num_found      blocks that were found, by group
    num_evicted    by group
    most_stranded  the most cached blocks that nobody could find, after every STRANDED_EVERY-th request
    """

    num_hits: int
    num_found: list[int]
    num_evicted: list[int]
    most_stranded: int


def expectations() -> dict[str, Any]:
    """By file: block size, counts, and by capacity the hits and evictions of LRU and the hits of Belady."""
    files: dict[str, Any] = json.loads((TRACES / "expected.json").read_text())["files"]
    return files


def load(name: str) -> list[Request]:
    """The requests of a trace, in file order."""
    with gzip.open(TRACES / name, "rt") as lines:
        return [Request(record["input_length"], list(full_blocks(record))) for record in map(json.loads, lines)]


def full_blocks(record: dict[str, Any]) -> Iterator[int]:
    if "hash_ids" in record:
        yield from record["hash_ids"][: record["input_length"] // 512]
        return
    for first, count in record["block_runs"]:
        yield from range(first, first + count)


class Replay:
    """A pool of `capacity` blocks for each layer group and one for a partial tail, which the rules in expected.json do
    not count.

    Every prompt is given a tail of one token, so that the tail's block is taken and given back each time. A prompt that
    is longer than the capacity is admitted with its first blocks only.
    """

    def __init__(
        self, capacity: int, *, block_size: int, policy: str, layer_groups: tuple[LayerGroup, ...] = ()
    ) -> None:
        self._capacity = capacity
        self._block_size = block_size
        geometry = Geometry(
            block_size=block_size,
            num_blocks=max(1, len(layer_groups)) * (capacity + 1) + 1,
            block_bytes=1,
            max_sequences=2,
            max_sequence_tokens=2**31 - 1,
            vocab_size=VOCAB,
            model="trace",
            model_fingerprint="trace",
            layer_groups=layer_groups,
        )
        self._ledger = Ledger("trace", EPOCH, geometry, policy=policy)
        self._ledger.open_lease("lease", ttl_s=1.0, now=0.0)

    def run(self, requests: list[Request]) -> Outcome:
        """All of them, each released before the next begins."""
        num_hits = sum([self._serve(request) for request in requests])
        return Outcome(num_hits, messages.statistics_of(self._ledger).evicted_block_count)

    def run_groups(self, requests: list[Request]) -> GroupsOutcome:
        """All of them, as run() does, in a pool with layer groups."""
        num_hits, stranded = 0, []
        for number, request in enumerate(requests):
            num_hits += self._serve(request)
            if number % STRANDED_EVERY == 0:
                stranded.append(self.num_stranded())
        statistics = messages.statistics_of(self._ledger)
        return GroupsOutcome(
            num_hits,
            [group.found_block_count for group in statistics.layer_groups],
            [group.evicted_block_count for group in statistics.layer_groups],
            max(stranded),
        )

    def num_stranded(self) -> int:
        """Windowed blocks in the cache that nobody can find: the full group's block of their place is not there."""
        findable = [block for block in self._blocks() if block.prefix_hash]
        full = {block.prefix_hash for block in findable if block.layer_group == 0}
        return sum(block.prefix_hash not in full for block in findable)

    def _blocks(self) -> Iterator[cache_service_pb2.Block]:
        first: int | None = 1
        while first is not None:
            page, first = self._ledger.list_blocks(first, 1_000, state=None, tenant=None, lease_id=None)
            yield from cache_service_pb2.ListBlocksResponse.FromString(page).blocks

    def _serve(self, request: Request) -> int:
        prompt = [*tokens_of(request.block_ids[: self._capacity], self._block_size), TAIL]
        step = cache_service_pb2.PlanStepRequest(lease_id="lease", epoch=EPOCH, release_sequence_ids=[1])
        step.admissions.add(sequence_id=1, token_ids=prompt)
        plan = self._ledger.plan(step.SerializeToString(), now=0.0)
        if plan.has_refusals:
            raise RuntimeError(f"a prompt was refused: {plan.refusals[0]}")
        answer = cache_service_pb2.PlanStepResponse.FromString(plan.encode_answer())
        report = attach_pb2.StepReport(
            lease_id="lease",
            step_number=answer.step_number,
            outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
            sequence_ids=[1],
            computed_token_counts=[len(prompt)],
            sampled_sequence_ids=[1],
            sampled_token_ids=[0],
        )
        self._ledger.settle(report.SerializeToString())
        found = answer.admitted_cached_token_counts[0] // self._block_size
        return min(found, (request.num_tokens - 1) // self._block_size)


def tokens_of(block_ids: list[int], block_size: int) -> list[int]:
    """Different tokens for different ids."""
    first = np.array(block_ids, dtype="<i4")[:, None] * block_size
    tokens: list[int] = (first + np.arange(block_size, dtype="<i4")).ravel().tolist()
    return tokens
