"""The report of a call: the figures beside their predictions, the parts, and the last lines of what failed."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clocks import TOOL
from parts import GPU, Call, Figure
from running import Outcome

REPORTED = "report: "
"""A line of a log that begins so is in the report too."""
TAIL_LINES = 25
FAR_OFF = 1.34
"""A prediction that misses by more than a third is marked."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPU's name, and whether it is the one of the predictions; what is absent, of PROBES."""

    gpu: str
    is_predicted: bool
    absent: frozenset[str]

    @property
    def counts(self) -> bool:
        """False without a GPU: then no figure is worth its comparison."""
        return GPU not in self.absent and self.gpu != "none"


def report(call: Call, outcomes: Sequence[Outcome], machine: Machine) -> str:
    """Return the report in Markdown. It ends with the tables."""
    return "\n".join([*heading(call, outcomes, machine), *details(outcomes), *tables(outcomes, machine)]) + "\n"


def heading(call: Call, outcomes: Sequence[Outcome], machine: Machine) -> list[str]:
    now = datetime.datetime.now(datetime.UTC)
    counts = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in ("ok", "not run")}
    num_bad = sum(outcome.is_bad for outcome in outcomes)
    lines = [
        f"{sum(outcome.num_compiled for outcome in outcomes)} kernels were compiled",
        "",
        f"# Call {call.name}: {call.title}",
        "",
        f"{now:%Y-%m-%d %H:%M} UTC, {machine.gpu}, {platform.platform()}, Python {platform.python_version()}",
        "",
        f"{counts['ok']} parts are ok, {num_bad} are not, {counts['not run']} were not run.",
    ]
    if not machine.counts:
        lines += ["", "**There is no GPU here: what is below says nothing about one.**"]
    elif not machine.is_predicted:
        lines += ["", "**Predictions are of another GPU, and its targets are not compared.**"]
    if machine.counts and not any(outcome.clocks.samples for outcome in outcomes):
        lines += ["", f"No clocks and no power: {TOOL} is not there, or answers nothing."]
    if any(figure.estimate for outcome in outcomes for figure in outcome.part.figures):
        lines += ["", "A prediction with ~ is an estimate: it does not follow from a measured or a published figure."]
    return lines


def details(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the `report:` lines of each part, and the end of the log of those that are not ok."""
    for outcome in outcomes:
        found = [line for line in outcome.log.splitlines() if line.startswith(REPORTED)]
        if not found and not outcome.is_bad:
            continue
        yield from ("", f"## {outcome.part.name}: {outcome.verdict}", "", f"Look at: {outcome.part.decides}", "")
        yield from (f"- {line.removeprefix(REPORTED)}" for line in found)
        if outcome.is_bad:
            yield from ("", "```text", *outcome.log.splitlines()[-TAIL_LINES:], "```")


def tables(outcomes: Sequence[Outcome], machine: Machine) -> list[str]:
    """Return the table of parts and the table of figures, as columns of equal width."""
    parts = [_about(outcome) for outcome in outcomes]
    figures = [
        (each.part.name, *row(figure, figure.read(each.content), machine))
        for each in outcomes
        for figure in each.part.figures
    ]
    clocks = [str(outcome.clocks) for outcome in outcomes]
    headings: tuple[str, ...] = ("part", "", "s", "limit", "compiled", "")
    if any(clocks):
        headings = (*headings, "clock, power")
        parts = [(*part, shown) for part, shown in zip(parts, clocks, strict=True)]
    lines = ["", *columns(headings, parts)]
    if figures:
        headings = ("part", "figure", "measured", "target", "goal", "predicted", "measured/predicted", "")
        lines += ["", *columns(headings, figures)]
    return lines


def _about(outcome: Outcome) -> tuple[str, ...]:
    part = outcome.part
    figures = (f"{outcome.seconds:.0f}", f"{part.limit_s:g}", str(outcome.num_compiled))
    return (part.name, outcome.verdict, *figures, outcome.detail)


def row(figure: Figure, value: float | None, machine: Machine) -> tuple[str, ...]:
    known = (figure.target, figure.goal, figure.predicted)
    shown = ["" if each is None else number(each) for each in known]
    if figure.estimate:
        shown[-1] = f"~{shown[-1]}"
    if value is None:
        return (figure.name, "-", *shown, "", "not measured")
    if not machine.counts:
        return (figure.name, number(value), *shown, "", "")
    ratio = value / figure.predicted if figure.predicted else None
    remarks = []
    if machine.is_predicted and figure.target is not None:
        limits = (("goal", figure.goal), ("target", figure.target))
        reached = [name for name, limit in limits if limit is not None and figure.reaches(value, limit)]
        remarks.append(f"{reached[0]} reached" if reached else "MISSED")
    if ratio is not None and not 1 / FAR_OFF <= ratio <= FAR_OFF:
        remarks.append("far from what was predicted")
    return (figure.name, number(value), *shown, "" if ratio is None else f"{ratio:.2f}", ", ".join(remarks))


def number(value: float) -> str:
    """Return three digits or more: 0.583, 12.2, 1,915."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table with columns that are also straight on a terminal."""
    widths = [max(len(line[index]) for line in (headings, *rows)) for index in range(len(headings))]
    made = [
        " | ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in (headings, *rows)
    ]
    return [f"| {line} |" for line in (made[0], " | ".join("-" * max(3, width) for width in widths), *made[1:])]
