"""Hits of the prefix cache in pools with a full and a windowed layer group, on recorded requests.

    quire bench prefix windows

Every trace of benchmarks/traces under each eviction policy, at one capacity, one request at a time under the rules of
expected.json. The pool has a full and a windowed layer group of one layer each, and twice as many blocks, of half the
bytes, as the pool with one table beside it. Counts are exact: every run and every machine gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from replay import GroupsOutcome, GroupsReplay, expectations, load
from report import Findings, benchmark, table
from rich.progress import Progress
from rich.table import Table

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import DEFAULT_POLICY
from quire.cachemgr.geometry import LayerGroup
from quire.lab.replay import Outcome, Replay

WINDOW = 1_024
CAPACITY = 1_000
QUICK_TRACES = 1
GROUPS = (LayerGroup(LayerGroupKind.FULL, 0, 1), LayerGroup(LayerGroupKind.SLIDING, WINDOW, 1))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trace under one policy: in a pool with one table, and in one of as many bytes with GROUPS."""

    trace: str
    capacity: int
    policy: str
    one_table: Outcome
    with_groups: GroupsOutcome


def measure_trace(name: str) -> list[Measurement]:
    """Both policies."""
    block_size, requests = expectations()[name]["block"], load(name)
    return [
        Measurement(
            *(name.partition(".")[0], CAPACITY, policy),
            Replay(CAPACITY, block_size=block_size, policy=policy).run(requests),
            GroupsReplay(CAPACITY, block_size=block_size, policy=policy, layer_groups=GROUPS).run_groups(requests),
        )
        for policy in ("lru", DEFAULT_POLICY)
    ]


def measure(quick: bool, progress: Progress) -> Findings:
    names = [*expectations()][-QUICK_TRACES if quick else 0 :]
    measured = [each for name in progress.track(names, description="traces") for each in measure_trace(name)]
    figures = {"window": WINDOW, "default": DEFAULT_POLICY, "figures": [asdict(each) for each in measured]}
    return Findings([table_of(measured)], figures, file_name="eviction_windows")


def table_of(measured: Sequence[Measurement]) -> Table:
    title = (
        f"blocks found in {CAPACITY:,}: a full group and one of window {WINDOW:,}, beside one table in the same memory"
    )
    headings = ("trace", "policy", "one table", "groups", "found: full", "windowed", "evicted: full", "windowed")
    made = table(title, *headings, "stranded, at most", words=2)
    for each in measured:
        groups = each.with_groups
        counts = (each.one_table.num_hits, groups.num_hits, *groups.num_found, *groups.num_evicted)
        made.add_row(each.trace, each.policy, *(f"{count:,}" for count in (*counts, groups.most_stranded)))
    return made


main = benchmark("prefix windows", measure)

if __name__ == "__main__":
    main()
