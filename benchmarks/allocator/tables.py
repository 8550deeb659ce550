"""The results as a table, as JSON and as a figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import machine
from matplotlib import pyplot
from recorded import (
    EVICTION_GROWTH_TO_REACH,
    METADATA_TO_REACH_BYTES,
    PEERS,
    POOL_GROWTH_TO_REACH,
    RECORDED_METADATA_BYTES,
    RECORDED_US,
    TITLES,
    TO_REACH_US,
    WORST_CALL_TO_REACH_MS,
    recorded_us,
)
from report import save_svg, summary, write_json
from rich.console import Console
from rich.table import Table
from scaling import AXES, Series, growth
from workload import CALIBRATION_REFERENCE_US, ROWS


@dataclass(slots=True)
class Results:
    """Everything measured in one run. Times are nanoseconds, by pool size and row."""

    command: str
    calibration: dict[str, float]
    load_average: list[float] = field(default_factory=list)
    """One-minute load before each part of the run, the benchmark's own included."""
    quire: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, float] = field(default_factory=dict)
    kept_tokens_ratio: float | None = None
    scaling: Series = field(default_factory=dict)
    mixed: dict[str, Any] = field(default_factory=dict)

    @property
    def slowness(self) -> float:
        """This machine's time for the calibration's SHA-256 chain over that of the recorded figures' machine."""
        return self.calibration["sha256_chain_us"] / CALIBRATION_REFERENCE_US

    def peer_us(self, peer: str, row: str, size: int) -> float | None:
        """Median in microseconds; a recorded figure, scaled, if the peer did not run."""
        if peer not in self.peers:
            return recorded_us(peer, row, size, scale=self.slowness)
        samples = self.peers[peer]["samples_ns"].get(str(size), {}).get(row)
        return median_us(samples) if samples else None

    def about(self) -> dict[str, Any]:
        """The conditions of all figures."""
        return {
            "command": self.command,
            "machine": machine(),
            "calibration": self.calibration | {"slowness": self.slowness},
            "load_average": self.load_average,
        }

    def rows_as_json(self) -> dict[str, Any]:
        return self.about() | {
            "to_reach_us": TO_REACH_US,
            "metadata_bytes_per_block": self.metadata,
            "kept_tokens_ratio": self.kept_tokens_ratio,
            "recorded_only": self.unavailable,
            "quire": {"quantiles_ns": summaries(self.quire)},
            "peers": {peer: without_samples(found) for peer, found in self.peers.items()},
        }


def summaries(rows_by_point: Mapping[Any, Mapping[str, list[float]]]) -> dict[Any, dict[str, Any]]:
    """Quantiles of the samples, by point (a pool size, a value of an axis) and row."""
    return {point: {row: summary(samples) for row, samples in rows.items()} for point, rows in rows_by_point.items()}


def without_samples(found: dict[str, Any]) -> dict[str, Any]:
    """A peer's output, with quantiles in place of samples."""
    others = {name: value for name, value in found.items() if name != "samples_ns"}
    return others | {"quantiles_ns": summaries(found["samples_ns"])}


def median_us(samples: list[float]) -> float:
    return statistics.median(samples) / 1000


def console() -> Console:
    return Console(width=max(Console().width, 170))


def shown(microseconds: float | None) -> str:
    if microseconds is None:
        return "–"
    return f"{microseconds:,.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def show(results: Results) -> None:
    """One table per pool size, and what else was measured."""
    out = console()
    for size in results.quire:
        out.print(size_table(results, size))
    if results.quire:
        out.print(own_table(results))
    chain_us = results.calibration["sha256_chain_us"]
    out.print(f"calibration: SHA-256 chain {chain_us:.1f} us, {results.slowness:.2f} of the recorded figures' machine;")
    out.print("recorded figures (marked *) and the bars in brackets are multiplied by that")
    out.print(
        "vllm, sglang and tokenspeed have no fork: samples are new requests; sglang publishes when a request ends, not "
        "as it runs; tokenspeed's rows are calls of its whole scheduler"
    )
    for peer, reason in sorted(results.unavailable.items()):
        out.print(f"{peer}*: {reason}")
    if results.metadata:
        out.print(metadata_table(results))
    if results.kept_tokens_ratio is not None:
        out.print(f"an admission of 2,048 tokens, tokens kept / not kept: {results.kept_tokens_ratio:.3f}")
    if results.scaling:
        out.print(scaling_table(results.scaling))
    if results.mixed:
        show_mixed(out, results.mixed)


def size_table(results: Results, size: int) -> Table:
    table = Table(title=f"microseconds, medians; pool of {size:,} blocks of 16 tokens")
    table.add_column("work", no_wrap=True)
    for heading in ("to reach (here)", "Quire", *PEERS, "best peer / Quire"):
        recorded = heading in PEERS and heading not in results.peers
        table.add_column(f"{heading}*" if recorded else heading, justify="right")
    for row in ROWS:
        ours = median_us(results.quire[size][row])
        theirs = [results.peer_us(peer, row, size) for peer in PEERS]
        bar, known = TO_REACH_US[row], [figure for figure in theirs if figure is not None]
        colour = "green" if ours <= bar else "yellow" if ours <= bar * results.slowness else "red"
        table.add_row(
            TITLES[row],
            f"{bar:.0f} ({bar * results.slowness:.0f})",
            f"[{colour}]{shown(ours)}",
            *map(shown, theirs),
            f"{min(known) / ours:.2f}" if known else "–",
        )
    return table


def own_table(results: Results) -> Table:
    table = Table(title="Quire alone: microseconds, medians")
    table.add_column("work")
    for size in results.quire:
        table.add_column(f"{size:,} blocks", justify="right")
    first = next(iter(results.quire.values()))
    for row in first:
        if row not in ROWS:
            table.add_row(TITLES.get(row, row), *(shown(median_us(rows[row])) for rows in results.quire.values()))
    return table


def metadata_table(results: Results) -> Table:
    table = Table(title="bytes of metadata per block, pool full of cached blocks")
    table.add_column("to reach", justify="right")
    figures = {
        "Quire": results.metadata.get("quire"),
        "tokens not kept": results.metadata.get("quire, tokens not kept"),
    }
    for peer in PEERS:
        measured = results.metadata.get(peer)
        name = peer if measured is not None else f"{peer}*"
        figures[name] = measured if measured is not None else RECORDED_METADATA_BYTES.get(peer)
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(
        str(METADATA_TO_REACH_BYTES), *("–" if figure is None else f"{figure:.0f}" for figure in figures.values())
    )
    return table


def scaling_table(series: Series) -> Table:
    """Microseconds along each axis, and the growth from the second value (10,000 blocks, 10 leases) to the last."""
    table = Table(title="Quire: microseconds, medians, as something else grows")
    table.add_column("grows")
    table.add_column("work")
    for heading in ("1st", "2nd", "3rd", "4th", "4th / 2nd", "to reach"):
        table.add_column(heading, justify="right")
    for axis, points in series.items():
        base = AXES[axis][0][1]
        names = list(points[base])
        table.add_section()
        table.add_row(f"[bold]{axis}", "", *(f"[bold]{count:,}" for count in points))
        for row in names:
            limit = EVICTION_GROWTH_TO_REACH if row == "full" else POOL_GROWTH_TO_REACH
            grown = growth(points, row, base=base)
            cells = [shown(median_us(samples[row])) for samples in points.values()]
            colour = "green" if grown is not None and grown <= limit else "red"
            table.add_row("", TITLES[row], *cells, f"[{colour}]{grown:.2f}", f"{limit:.1f}")
    return table


def show_mixed(out: Console, mixed: dict[str, Any]) -> None:
    table = Table(title=f"mixed load, {mixed['minutes']:g} minutes, {mixed['num_blocks']:,} blocks: microseconds")
    columns = {
        "p50": "p50_us",
        "p99": "p99_us",
        "p99.99": "p9999_us",
        "worst": "max_us",
        "worst, CPU time": "max_cpu_us",
    }
    for heading in ("call", "calls", *columns):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    for kind, row in mixed["kinds"].items():
        table.add_row(kind, f"{row['calls']:,}", *(shown(row[name]) for name in columns.values()))
    out.print(table)
    everything = mixed["kinds"]["all"]
    out.print(
        f"worst single call {everything['max_us'] / 1000:.2f} ms, to reach {WORST_CALL_TO_REACH_MS:g} ms;", end=" "
    )
    out.print(f"collections: {mixed['collections']}; the worst calls:")
    for call in mixed["worst"][:5] + mixed["worst_by_cpu_time"][:5]:
        out.print(f"  {call['us'] / 1000:8.2f} ms, {call['cpu_us'] / 1000:.2f} ms CPU  {call['what']}")
    out.print(f"refused items: {mixed['refused']}")


def write(results: Results, folder: Path) -> None:
    """Writes allocator_rows.json and allocator.svg, allocator_scaling.json, allocator_mixed.json, if measured."""
    if results.quire:
        write_json(results.rows_as_json(), folder / "allocator_rows.json")
        plot(results, folder / "allocator.svg", size=max(results.quire))
    if results.scaling:
        quantiles = {axis: summaries(points) for axis, points in results.scaling.items()}
        write_json(results.about() | {"quantiles_ns": quantiles}, folder / "allocator_scaling.json")
    if results.mixed:
        write_json(results.about() | results.mixed, folder / "allocator_mixed.json")


def plot(results: Results, path: Path, *, size: int) -> None:
    """The factor between the peers' times and Quire's, row by row; a mark at the target."""
    figure, axes = pyplot.subplots(figsize=(8.5, 5))
    peers = [peer for peer in PEERS if peer in results.peers or peer in RECORDED_US]
    places = range(len(ROWS))
    for number, peer in enumerate(peers):
        ratios = [ratio(results, peer, row, size) for row in ROWS]
        shifted = [place + (number - (len(peers) - 1) / 2) * 0.16 for place in places]
        name = peer if peer in results.peers else f"{peer} (recorded, scaled)"
        axes.barh(shifted, [each - 1 for each in ratios], 0.14, left=1, label=name)
    ours = [median_us(results.quire[size][row]) for row in ROWS]
    bars = [TO_REACH_US[row] * results.slowness / our for row, our in zip(ROWS, ours, strict=True)]
    axes.plot(bars, places, "k|", markersize=26, markeredgewidth=2, label="to reach, on this machine")
    axes.axvline(1, color="0.4", linewidth=0.8)
    axes.set_xscale("log")
    labels = [f"{TITLES[row]}\n{our:,.0f} us" for row, our in zip(ROWS, ours, strict=True)]
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time over Quire's (more than 1: Quire takes less)", fontsize=9)
    axes.set_title(f"Allocators in process, medians, pool of {size:,} blocks", fontsize=10)
    axes.legend(fontsize=8, markerscale=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_svg(figure, path)


def ratio(results: Results, peer: str, row: str, size: int) -> float:
    """The peer's time over Quire's; 1, which is no bar, if there is no figure."""
    theirs = results.peer_us(peer, row, size)
    return 1.0 if theirs is None else theirs / median_us(results.quire[size][row])
