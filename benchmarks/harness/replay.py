"""The recorded requests of benchmarks/traces, and their replay in a pool with layer groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.service import messages
from quire.lab.replay import Replay
from quire.lab.requests import Prompt
from quire.lab.traces import read_prompts

TRACES = Path(__file__).parents[1] / "traces"
STRANDED_EVERY = 20


@dataclass(frozen=True, slots=True)
class GroupsOutcome:
    """The outcome in a pool with layer groups.

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


def load(name: str) -> list[Prompt]:
    """The prompts of a trace, in file order."""
    return read_prompts(TRACES / name)[1]


class GroupsReplay(Replay):
    """A replay that counts by layer group."""

    def run_groups(self, prompts: Iterable[Prompt]) -> GroupsOutcome:
        """All of them, as run() does."""
        num_hits, stranded = 0, []
        for number, prompt in enumerate(prompts):
            num_hits += self.serve(prompt)
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
            page, first = self._ledger.inspector.list_blocks(first, 1_000, state=None, tenant=None, lease_id=None)
            yield from cache_service_pb2.ListBlocksResponse.FromString(page).blocks
