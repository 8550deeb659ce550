"""Hits of the prefix cache under each eviction policy, on recorded requests driven through the ledger.

    python benchmarks/eviction.py [--output benchmarks/results/eviction.json]
    python benchmarks/eviction.py --windows [--output benchmarks/results/eviction_windows.json]

Every trace in benchmarks/traces at the capacities of expected.json and some between, one request at a time under the
rules written there. Counts are exact: every run and every machine gives the same.

--windows: the same requests at one capacity each, in a pool with a full and a windowed layer group of one layer each.
It has twice as many blocks, of half the bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import click
import matplotlib
from matplotlib import pyplot
from replay import GroupsOutcome, GroupsReplay, expectations, load
from report import save_svg
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quire.cachemgr._core import DEFAULT_POLICY
from quire.cachemgr.geometry import LayerGroup, LayerGroupKind
from quire.lab.replay import Outcome, Replay

matplotlib.use("svg")

CAPACITIES = {512: (250, 500, 1000, 2000, 3000, 5000, 10000), 16: (500, 1000, 1500, 2000, 3000, 5000)}
"""By block size."""
WINDOW = 1_024
WINDOWED_CAPACITY = 1_000
GROUPS = (LayerGroup(LayerGroupKind.FULL, 0, 1), LayerGroup(LayerGroupKind.SLIDING, WINDOW, 1))


@dataclass(frozen=True, slots=True)
class WindowedMeasurement:
    """One trace under one policy: in a pool with one table, and in one of as many bytes with GROUPS."""

    trace: str
    capacity: int
    policy: str
    one_table: Outcome
    with_groups: GroupsOutcome


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trace at one capacity, in blocks. Belady is None where expected.json does not say."""

    trace: str
    capacity: int
    lru: Outcome
    default: Outcome
    belady_hits: int | None
    infinite_hits: int

    @property
    def ratio(self) -> float:
        """Hits of the default relative to LRU's."""
        return self.default.num_hits / self.lru.num_hits


def measure() -> list[Measurement]:
    measurements = []
    with Progress(console=Console(stderr=True)) as progress:
        for name in progress.track(expectations(), description="traces"):
            measurements += measure_trace(name)
    return measurements


def measure_trace(name: str) -> list[Measurement]:
    """Every capacity for this file's block size."""
    file, requests = expectations()[name], load(name)
    measurements = []
    for capacity in CAPACITIES[file["block"]]:
        lru, default = (
            Replay(capacity, block_size=file["block"], policy=policy).run(requests)
            for policy in ("lru", DEFAULT_POLICY)
        )
        expected = file["capacity"].get(str(capacity), {})
        if expected and lru != Outcome(expected["lru_hit_blocks"], expected["lru_evictions"]):
            raise click.ClickException(f"LRU on {name} at {capacity} blocks is not as expected.json says")
        measured = Measurement(
            *(name.partition(".")[0], capacity, lru, default),
            *(expected.get("opt_hit_blocks"), file["hit_blocks_infinite"]),
        )
        measurements.append(measured)
    return measurements


def measure_windows(name: str, capacity: int) -> list[WindowedMeasurement]:
    """Both policies."""
    block_size, requests = expectations()[name]["block"], load(name)
    return [
        WindowedMeasurement(
            *(name.partition(".")[0], capacity, policy),
            Replay(capacity, block_size=block_size, policy=policy).run(requests),
            GroupsReplay(capacity, block_size=block_size, policy=policy, layer_groups=GROUPS).run_groups(requests),
        )
        for policy in ("lru", DEFAULT_POLICY)
    ]


def show_windows(measurements: list[WindowedMeasurement]) -> None:
    table = Table(title=f"a full group and one of window {WINDOW:,}, beside one table in the same memory")
    headings = ("trace", "policy", "hits, one table", "hits", "found: full", "windowed", "evicted: full", "windowed")
    for heading in (*headings, "stranded, at most"):
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for measured in measurements:
        groups = measured.with_groups
        counts = (measured.one_table.num_hits, groups.num_hits, *groups.num_found, *groups.num_evicted)
        cells = [f"{count:,}" for count in (*counts, groups.most_stranded)]
        table.add_row(f"{measured.trace}, {measured.capacity:,}", measured.policy, *cells)
    Console(width=max(Console().width, 130)).print(table)


def show(measurements: list[Measurement]) -> None:
    table = Table(title="blocks found in the prefix cache")
    for heading in ("trace", "capacity", "LRU", DEFAULT_POLICY, "of LRU", "Belady", "infinite"):
        table.add_column(heading, justify="left" if heading == "trace" else "right")
    for measured in measurements:
        belady = "" if measured.belady_hits is None else f"{measured.belady_hits:,}"
        table.add_row(
            *(measured.trace, f"{measured.capacity:,}", f"{measured.lru.num_hits:,}", f"{measured.default.num_hits:,}"),
            *(f"{measured.ratio:.3f}", belady, f"{measured.infinite_hits:,}"),
        )
    totals = [sum(outcome.num_hits for outcome in column) for column in outcomes(measurements)]
    table.add_row("all", "", f"{totals[0]:,}", f"{totals[1]:,}", f"{totals[1] / totals[0]:.4f}", "", "")
    Console(width=max(Console().width, 110)).print(table)


def outcomes(measurements: list[Measurement]) -> tuple[list[Outcome], list[Outcome]]:
    return [measured.lru for measured in measurements], [measured.default for measured in measurements]


def plot(measurements: list[Measurement], path: Path) -> None:
    """A panel per trace: share of the hits of an infinite cache over the capacity."""
    traces = [list(group) for _, group in groupby(measurements, key=lambda measured: measured.trace)]
    figure, axes = pyplot.subplots(1, len(traces), figsize=(12, 3.2), sharey=True)
    for axis, rows in zip(axes, traces, strict=True):
        capacities = [row.capacity for row in rows]
        infinite = rows[0].infinite_hits
        known = [row for row in rows if row.belady_hits is not None]
        axis.plot(capacities, [row.lru.num_hits / infinite for row in rows], "o-", label="LRU")
        axis.plot(capacities, [row.default.num_hits / infinite for row in rows], "s-", label=DEFAULT_POLICY)
        belady = [(row.belady_hits or 0) / infinite for row in known]
        axis.plot([row.capacity for row in known], belady, "k:", marker="^", label="Belady (knows the future)")
        axis.set_xscale("log")
        axis.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities], rotation=60, fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("blocks in the pool")
        axis.set_title(rows[0].trace, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("hits, share of an infinite cache's")
    axes[0].set_ylim(0, 1.03)
    axes[-1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    save_svg(figure, path)


@click.command()
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write the figures as JSON, and a plot as SVG."
)
@click.option("--windows", is_flag=True, help="In pools with a full and a windowed layer group. Without a plot.")
def main(output: Path | None, windows: bool) -> None:
    """Prefix cache hits by eviction policy, on recorded requests."""
    if windows:
        windowed = [each for name in expectations() for each in measure_windows(name, WINDOWED_CAPACITY)]
        show_windows(windowed)
        if output is not None:
            contents = {
                "command": "python benchmarks/eviction.py --windows",
                "window": WINDOW,
                "default": DEFAULT_POLICY,
            }
            figures = [asdict(measured) for measured in windowed]
            output.write_text(json.dumps(contents | {"figures": figures}, indent=1) + "\n")
        return
    measurements = measure()
    show(measurements)
    if output is not None:
        figures = [asdict(measured) for measured in measurements]
        contents = {"command": "python benchmarks/eviction.py", "default": DEFAULT_POLICY, "figures": figures}
        output.write_text(json.dumps(contents, indent=1) + "\n")
        plot(measurements, output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
