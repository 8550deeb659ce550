"""The common parts of the benchmarks of `quire bench`: flags, the machine, tables, JSON and plot."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import matplotlib
import numpy as np
from machine import machine
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "quire"  # the same figures give the same file
matplotlib.rcParams["svg.fonttype"] = "none"  # letters as text: a quarter of the size that their outlines take

WIDTH = 150
QUANTILES = {"min": 0, "p25": 25, "median": 50, "p75": 75, "p99": 99, "max": 100}


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of a benchmark.

    tables     for people
    figures    for JSON: every figure of the tables, with the quantiles behind it; samples only if the plot needs them
    draw       makes the plot; None: there is none
    notes      conditions and limits of the figures, a sentence each
    file_name  of the JSON and the plot, without ending; the last word of the benchmark's name if empty
    errors     reasons why figures do not count: the benchmark ends with status 1 after it has shown and written them
    """

    tables: Sequence[Table]
    figures: dict[str, Any]
    draw: Callable[[], Figure] | None = None
    notes: Sequence[str] = ()
    file_name: str = ""
    errors: Sequence[str] = ()


Measure = Callable[..., Findings]
"""Gets whether it is to be quick, where to show how far it is, and the benchmark's own flags by name."""


def benchmark(
    name: str,
    measure: Measure,
    *,
    packages: Sequence[str] = (),
    flags: Mapping[str, str] = MappingProxyType({}),
    options: Sequence[click.Option] = (),
) -> click.Command:
    """The command of a benchmark: --quick, --output and its own flags.

    name      as `quire bench` has it, with the part behind a space
    packages  the figures depend on their versions
    flags     help by flag ("--peers"); each is on or off
    options   flags that have a value; None where they are not given
    """

    @click.command(name=name, cls=_KeptArguments)
    @click.option("--quick", is_flag=True, help="Tiny sizes, in seconds: whether everything runs. No figure counts.")
    @click.option(
        "--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for the JSON and the plot."
    )
    def main(quick: bool, output: Path | None, **own: Any) -> None:
        os.environ["QUIRE_VERIFY"] = "0"  # it would check every invariant in every call
        about = {
            "command": command_line(name, click.get_current_context().meta[__name__]),
            "machine": machine(*packages),
            "load_average_at_start": round(os.getloadavg()[0], 2),
        }
        start = time.perf_counter()
        with progress_bar() as progress:
            findings = measure(quick, progress, **own)
        about["seconds"] = round(time.perf_counter() - start, 1)
        show(findings, about)
        if output is not None:
            write(findings, about, output, findings.file_name or name.split()[-1])
        if findings.errors:
            raise click.ClickException("\n".join(findings.errors))

    main.params += [click.Option([flag], is_flag=True, help=text) for flag, text in flags.items()]
    main.params += options
    main.help = (sys.modules[measure.__module__].__doc__ or "").partition("\n")[0]
    return main


class _KeptArguments(click.Command):
    """A command that keeps the arguments that it was given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = list(args)
        return super().parse_args(ctx, args)


def command_line(name: str, arguments: Sequence[str]) -> str:
    """The command that runs a benchmark again with these arguments, without the folder of its output."""
    ends = list(arguments).index("--output") if "--output" in arguments else len(arguments)
    return shlex.join(["quire", "bench", *name.split(), *arguments[:ends], *arguments[ends + 2 :]])


def progress_bar() -> Progress:
    """On standard error; with how long it has taken and may still take."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def show(findings: Findings, about: dict[str, Any]) -> None:
    """Prints the tables, the notes, the machine and the versions."""
    console = Console(highlight=False)
    console = console if console.width >= WIDTH else Console(width=WIDTH, highlight=False)
    for table in findings.tables:
        console.print(table)
    for note in findings.notes:
        console.print(note)
    where = ", ".join(f"{key} {value}" for key, value in about["machine"].items())
    console.print(f"{about['command']}: {where}; load {about['load_average_at_start']}, {about['seconds']} s")


def write(findings: Findings, about: dict[str, Any], folder: Path, name: str) -> None:
    """NAME.json and, if there is a plot, NAME.svg in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('-', '_')}.json"
    write_json(about | {"notes": list(findings.notes)} | findings.figures, path)
    written = str(path)
    if findings.draw is not None:
        figure = findings.draw()
        figure.tight_layout()
        save_svg(figure, path.with_suffix(".svg"))
        written += f" and {path.with_suffix('.svg').name}"
    Console(highlight=False, soft_wrap=True).print(f"written: {written}")


def write_json(content: dict[str, Any], path: Path) -> None:
    """Indented, lists of numbers on one line each. The file is whole at any time: a benchmark may be killed."""
    text = json.dumps(content, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")
    part.replace(path)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Summarize samples: their number and quantiles, to 4 significant digits."""
    quantiles = np.percentile(samples, list(QUANTILES.values()))
    named = {name: float(f"{value:.4g}") for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {"num_samples": len(samples)} | named


def save_svg(figure: Figure, path: Path) -> None:
    """Writes a figure. The same figure gives the same file."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(compact_svg(path.read_text()))


def compact_svg(svg: str) -> str:
    """The picture in fewer bytes: coordinates to a tenth of a point, a path on one line, no metadata."""
    svg = re.sub(r" *<metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL)
    return re.sub(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)', lambda found: compact_path(found[0]), svg)


def compact_path(path: str) -> str:
    """Coordinates with one digit behind the point; a command that is the one before it is left out."""
    short = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path)
    words, command = [], ""
    for word in short.split():
        if word.isalpha() and word == command and word in "LQC":
            continue
        command = word if word.isalpha() else command
        words.append(word)
    return " ".join(words)


def table(title: str, *headings: str, words: int = 1) -> Table:
    """An empty table: its first `words` columns are text, the others numbers."""
    made = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="left" if index < words else "right", no_wrap=index == 0)
    return made


def percent(ratio: float, digits: int = 1) -> str:
    return f"{100 * ratio:.{digits}f} %"


def spread(samples: Sequence[float], form: str = ".0f") -> str:
    """The median, and what lies around it: "12 (11 to 14)"; one sample alone."""
    middle = format(statistics.median(samples), form)
    return middle if len(samples) == 1 else f"{middle} ({min(samples):{form}} to {max(samples):{form}})"


def plain(axes: Any) -> None:
    """Without the frame's top and right."""
    axes.spines[["top", "right"]].set_visible(False)
