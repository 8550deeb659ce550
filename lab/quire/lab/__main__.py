"""The process of `quire lab`: its commands, and their output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from quire.cachemgr._core import DEFAULT_POLICY
from quire.lab.config import LabConfig, read_config
from quire.lab.errors import ConfigError
from quire.lab.eviction import judge
from quire.lab.eviction_loads import choose_recipes
from quire.lab.eviction_report import tables, write_judgement
from quire.lab.experiment import Comparison, Estimate, compare
from quire.lab.load import make_requests
from quire.lab.measures import Metric
from quire.lab.report import write_report
from quire.lab.step_times import calibrate, describe_presets

_CONFIG_WIDTH = 56
"""Characters that a configuration's two columns of the table take at most."""
_EVICTION_WIDTH = 110
_CHECKOUT_TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"
_CONFIG = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("lab-report"),
    show_default=True,
    metavar="FOLDER",
    help="Where report.html and report.json go.",
)
_SEEDS = click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="COUNT",
    help="Runs with seeds 1, 2, 3 ...",
)
_JOBS = click.option(
    "--jobs", type=click.IntRange(1, 256), default=1, show_default=True, metavar="COUNT", help="Processes for the runs."
)


class LabCommands(click.Group):
    """The commands; an error in a configuration, a trace or a policy is one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of this file."""
        return list(self.commands)


@click.group(cls=LabCommands)
def main() -> None:
    """Try schedulers, routers and eviction policies in virtual time, on recorded or made requests.

    The block manager, the scheduler and the router are the real ones. A worker is a model of the time of a step.
    """


@main.command()
@click.argument("config", type=_CONFIG)
@_SEEDS
@_JOBS
@_OUTPUT
def run(config: Path, seeds: int, jobs: int, output: Path) -> None:
    """Run one configuration, print its figures and write a report.

    \b
    Examples:
      quire lab run lab.toml
      quire lab run lab.toml --seeds 5 --output results
    """
    _experiment([read_config(config)], seeds, jobs, output)


@main.command("compare")
@click.argument("configs", type=_CONFIG, nargs=-1, required=True)
@_SEEDS
@_JOBS
@_OUTPUT
def compare_all(configs: tuple[Path, ...], seeds: int, jobs: int, output: Path) -> None:
    """Run configurations with the same seeds, side by side. The first is the one that others are compared with.

    \b
    Examples:
      quire lab compare round-robin.toml cost.toml --seeds 5
    """
    read = [read_config(path) for path in configs]
    if len({config.name for config in read}) < len(read):
        raise ConfigError("two configurations have the same name: give them a `name`")
    _experiment(read, seeds, jobs, output)


@main.command("presets")
def show_presets() -> None:
    """List the presets of `fleet.step`, with the derivation of each."""
    for line in describe_presets():
        click.echo(line)


@main.command("calibrate")
@click.argument("result", type=_CONFIG)
@click.option("--model", metavar="NAME", help="As the result names it; by default the first.")
@click.option("--dtype", metavar="NAME", help="As the result names it; by default the first.")
def show_calibration(result: Path, model: str | None, dtype: str | None) -> None:
    """Fit the time of a step to a JSON RESULT of `quire bench step`; prints a table for `[fleet.step]`.

    \b
    Examples:
      quire lab calibrate benchmarks/results/step_cpu.json
    """
    fitted, worst = calibrate(result, model=model, dtype=dtype)
    click.echo(f"# from {result.name}; the largest error of a step is {worst:.0%}")
    click.echo("[fleet.step]")
    click.echo("\n".join(fitted.describe()))


@main.command("eviction")
@click.option(
    "--policy",
    default=DEFAULT_POLICY,
    show_default=True,
    metavar="NAME|FILE.py:CLASS",
    help="The eviction policy that is judged.",
)
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    show_default="benchmarks/traces of the checkout",
    help="Recorded traces: files *.jsonl or *.jsonl.gz with ids of blocks.",
)
@click.option("--loads", default="*", metavar="PATTERN", help="Only loads with such names, as 'lab *'.")
@click.option(
    "--hashes",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    metavar="COUNT",
    help="Sets of hashes that each pair is run with.",
)
@_JOBS
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where eviction_loads.json and eviction_loads.svg go; by default nothing is written.",
)
def judge_eviction(policy: str, traces: Path | None, loads: str, hashes: int, jobs: int, output: Path | None) -> None:
    """Judge an eviction policy beside LRU, on recorded and made loads in pools of many sizes.

    A figure is the policy's hits in the prefix cache relative to LRU's, at most 2.

    \b
    Examples:
      quire lab eviction --jobs 2
      quire lab eviction --policy mine.py:Mine --loads 'lab *' --hashes 1
    """
    began = perf_counter()
    errors = Console(stderr=True)
    if traces is None and _CHECKOUT_TRACES.is_dir():
        traces = _CHECKOUT_TRACES
    elif traces is None:
        errors.print("there are no recorded traces here: only the made loads are run; --traces names a folder")
    recipes = choose_recipes(traces, loads)
    with _progress("loads", errors) as progress:
        task = progress.add_task("loads", total=len(recipes))
        judged = judge(recipes, policy, Path(), num_hashes=hashes, jobs=jobs, on_end=lambda: progress.advance(task))
    console = _wide_console(_EVICTION_WIDTH)
    for table in tables(judged):
        console.print(table)
        console.print()
    console.print(f"{len(judged):,} pairs of load and pool size, {perf_counter() - began:,.0f} s", soft_wrap=True)
    if output is not None:
        paths = write_judgement(judged, output, policy=policy, command=" ".join(["quire lab", *sys.argv[1:]]))
        console.print("written: " + " and ".join(str(path) for path in paths), soft_wrap=True)


def _wide_console(least: int) -> Console:
    return Console(highlight=False, width=max(Console().width, least))


def _progress(unit: str, errors: Console) -> Progress:
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, disable=not errors.is_terminal)


def _experiment(configs: Sequence[LabConfig], num_seeds: int, jobs: int, output: Path) -> None:
    began = perf_counter()
    total = num_seeds * sum(len(make_requests(config.load, seed=1)) for config in configs)
    with _progress("requests", Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total)
        seeds = range(1, num_seeds + 1)
        comparison = compare(configs, seeds, jobs=jobs, on_end=lambda count: progress.advance(task, count))
    page, data = write_report(comparison, output)
    console = _wide_console(_CONFIG_WIDTH * (1 + len(configs)))
    console.print(_table(comparison))
    seconds = perf_counter() - began
    virtual_s = sum(outcome.metrics["duration_s"] for runs in comparison.outcomes for outcome in runs)
    console.print(f"{total:,} requests, {virtual_s:,.0f} s of virtual time, in {seconds:.1f} s", soft_wrap=True)
    console.print(f"written: {page} and {data.name}", soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for index, config in enumerate(comparison.configs):
        table.add_column(config.name, justify="right", no_wrap=True)
        if index:
            table.add_column("change", justify="right", no_wrap=True)
    for name, metric in comparison.metrics.items():
        cells = []
        for index in range(len(comparison.configs)):
            cells.append(_show(comparison.estimate(index, name), metric))
            if index:
                change = comparison.change(index, name)
                cells.append(_show(change, metric, sign="+") + (" *" if change.is_clear else ""))
        table.add_row(metric.title, *cells)
    if len(comparison.configs) > 1 and len(comparison.seeds) > 1:
        table.caption = "± 95 % interval over the seeds; * the interval of the change excludes 0"
    return table


def _show(estimate: Estimate, metric: Metric, sign: str = "") -> str:
    scale = 100 if metric.unit == "%" else 1
    margin = "" if estimate.margin is None else f" ± {scale * estimate.margin:,.{metric.digits}f}"
    return f"{scale * estimate.mean:{sign},.{metric.digits}f}{margin} {metric.unit}".strip()


if __name__ == "__main__":
    main(prog_name="quire lab")
