"""The cost of the control plane: latencies of plans through gRPC, and its share of the engine's throughput.

    quire bench control-plane [--restarts 5]
    quire bench control-plane --soak-s 600                  the worst single call under mixed load

First the processor time of a plan and of a report, see processor.py. Then the plans of plans.py: each restart has new
processes throughout, and a row's figure is the median of the restarts' quantiles, since grpc.aio differs more between
processes than within one. Last the engine over both real services, see engine_cost.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import click
import numpy as np
import processor
from matplotlib import pyplot
from matplotlib.figure import Figure
from plans import QUANTILES, QUICK, Load, Quantiles, Row, Sample, Sizes, figure_of, median_us, rows, services
from report import Findings, benchmark, plain, table
from rich.progress import Progress
from rich.table import Table


def measure_rows(chosen: Sequence[Row], restarts: int, progress: Progress, *, pinned: bool) -> list[Quantiles]:
    """Every row in every restart."""
    samples: dict[str, list[Sample]] = {row.name: [] for row in chosen}
    task = progress.add_task("", total=restarts * len(chosen))
    for number in range(1, restarts + 1):
        progress.update(task, description=f"restart {number}/{restarts}: starting")
        with services(pinned=pinned) as running:
            for row in chosen:
                progress.update(task, description=f"restart {number}/{restarts}: {row.name}")
                samples[row.name].append(running.measure(row))
                progress.advance(task)
    return [figure_of(samples[row.name]) for row in chosen]


def measure_engine(progress: Progress, *, quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """Its tables, and its figures for the JSON. Imports torch, which no process of the rows should have."""
    import engine_cost

    task = progress.add_task("the engine", total=None)
    sizes = engine_cost.QUICK if quick else engine_cost.Sizes()
    ratio, works = engine_cost.measure(sizes, lambda part: progress.update(task, description=part))
    return engine_cost.tables(ratio, works), engine_cost.as_json(sizes, ratio, works)


def soak_row(duration_s: float, sizes: Sizes) -> Row:
    """Decode steps every 10 ms while clients admit at a bounded rate."""
    load = Load(sizes.num_clients, in_one_process=True, on_streams=True, admissions_per_s=sizes.admissions_per_s)
    name = f"decode step every 10 ms for {duration_s:g} s, mixed load"
    return Row(name, "decode", on_stream=True, num_calls=max(1, int(duration_s * 100)), load=load, interval_s=0.01)


def measure(
    quick: bool,
    progress: Progress,
    *,
    restarts: int,
    pattern: str,
    clients: int | None,
    rate: float | None,
    pin: bool,
    soak_s: float | None,
    with_engine: bool,
) -> Findings:
    """Raises click.BadParameter if no row has the pattern in its name."""
    sizes = QUICK if quick else Sizes()
    sizes = replace(sizes, num_clients=clients or sizes.num_clients, admissions_per_s=rate or sizes.admissions_per_s)
    chosen = [soak_row(soak_s, sizes)] if soak_s else [row for row in rows(sizes) if pattern in row.name]
    if not chosen:
        raise click.BadParameter("no row has a name like that", param_hint="'--rows'")
    used = processor.measure(processor.QUICK if quick else processor.Sizes())
    measured = measure_rows(chosen, 1 if quick or soak_s else restarts, progress, pinned=pin)
    tables, engine = measure_engine(progress, quick=quick) if with_engine and not soak_s else ([], {})
    figures = {
        "sizes": asdict(sizes),
        "quantiles_percent": QUANTILES,
        "processor": [asdict(each) for each in used],
        "figures": [asdict(each) for each in measured],
        "engine": engine,
    }
    return Findings([processor.table_of(used), table_of(measured), *tables], figures, lambda: plot(measured))


def table_of(measured: Sequence[Quantiles]) -> Table:
    cores_of = ("cachemgr", "others", "machine")
    headings = ("p50", "p99", "worst", "p50 by restart", "p99 by restart", "put off", "admitted/s", *cores_of)
    made = table("µs from a built message to a decoded answer, medians of restarts", "row", *headings)
    for each in measured:
        cores = [statistics.median(sample.busy_cores[name] for sample in each.samples) for name in cores_of]
        rate = statistics.median(sample.admissions_per_s for sample in each.samples)
        made.add_row(
            each.row,
            *(f"{value:.0f}" for value in (each.p50_us, each.p99_us, each.max_us)),
            *(range_of(each, percent) for percent in (50, 99)),
            str(sum(sample.put_off for sample in each.samples)),
            f"{rate:.0f}" if rate else "",
            *(f"{value:.2f}" for value in cores),
        )
    made.caption = "cachemgr, others (no part of this), machine: cores busy"
    return made


def range_of(measured: Quantiles, percent: float) -> str:
    """The lowest and the highest of the restarts."""
    values = [sample.quantiles_us[QUANTILES.index(percent)] for sample in measured.samples]
    return f"{min(values):.0f} to {max(values):.0f}"


def plot(measured: Sequence[Quantiles]) -> Figure:
    """The share of the calls that were answered within a time; the axis of percentages is stretched towards 100."""
    figure, axes = pyplot.subplots(figsize=(11, 5.5))
    shown = [percent for percent in QUANTILES if 0 < percent < 100]
    places = [-np.log10(1 - percent / 100) for percent in shown]
    for each in measured:
        medians = [median_us(each.samples, percent) for percent in shown]
        axes.plot(places, medians, linewidth=1.2, label=each.row, linestyle="-" if "admit" not in each.row else "--")
    labels = (50, 90, 99, 99.9, 99.99)
    axes.set_xticks([-np.log10(1 - percent / 100) for percent in labels], [f"{percent:g} %" for percent in labels])
    axes.set_yscale("log")
    axes.set_xlabel("of the calls are answered within")
    axes.set_ylabel("µs")
    axes.grid(which="both", linewidth=0.3)
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_title("PlanStep through gRPC: medians of restarts", fontsize=10)
    plain(axes)
    return figure


OPTIONS = (
    click.Option(["--restarts"], default=5, show_default=True, type=click.IntRange(min=1), help="Of every process."),
    click.Option(["--rows", "pattern"], default="", help="Only rows with this in their name."),
    click.Option(["--clients"], type=click.IntRange(min=1), help="Of the load.  [default: 8]"),
    click.Option(
        ["--rate"],
        type=click.FloatRange(min=0, min_open=True),
        help="Admissions a second in all, where bounded.",
    ),
    click.Option(
        ["--soak-s"], type=click.FloatRange(min=0, min_open=True), help="Instead: mixed load for so many seconds."
    ),
    click.Option(["--engine/--no-engine", "with_engine"], default=True, help="Whether to measure the engine, too."),
)
main = benchmark(
    "control-plane",
    measure,
    packages=("grpcio", "protobuf", "uvloop", "numpy", "torch", "transformers"),
    flags={"--pin": "Give cachemgr a core of its own, and everything else the others."},
    options=OPTIONS,
)

if __name__ == "__main__":
    main()
