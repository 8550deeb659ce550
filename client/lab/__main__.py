"""The process of `quire lab`: its commands, and what they print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from quire.client.lab.config import LabConfig, read_config
from quire.client.lab.errors import ConfigError
from quire.client.lab.experiment import Comparison, Estimate, compare
from quire.client.lab.load import make_requests
from quire.client.lab.measures import Metric
from quire.client.lab.report import write_report
from quire.client.lab.step_times import calibrate, describe_presets

_CONFIG_WIDTH = 56
"""Characters that a configuration's two columns of the table take at most."""
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
    for name in fitted.__dataclass_fields__:
        value = getattr(fitted, name)
        click.echo(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value:.6g}")


def _experiment(configs: Sequence[LabConfig], num_seeds: int, jobs: int, output: Path) -> None:
    began = perf_counter()
    total = num_seeds * sum(len(make_requests(config.load, seed=1)) for config in configs)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as progress:
        task = progress.add_task("requests", total=total)
        seeds = range(1, num_seeds + 1)
        comparison = compare(configs, seeds, jobs=jobs, on_end=lambda count: progress.advance(task, count))
    page, data = write_report(comparison, output)
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, _CONFIG_WIDTH * (1 + len(configs))))
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
