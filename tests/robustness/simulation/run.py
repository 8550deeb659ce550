"""Runs simulated schedules: `make simulate ARGS="--schedules 100000 --seed 1"`.

    python tests/robustness/simulation/run.py --schedules 10000 --seed 1 --jobs 2
    python tests/robustness/simulation/run.py --schedules 100000 --minutes 20   # as many of them as run in this time
    python tests/robustness/simulation/run.py --replay 4711            # the story of one, shrunk if it fails

Seeds are those from --seed on, one schedule each. The same seed is the same run, to the last callback.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a run
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from robustness.simulation.running import Outcome, run, run_seed, simulating
from robustness.simulation.schedule import make_schedule
from robustness.simulation.shrinking import shrink

CHUNK = 50
"""Schedules that a process runs before it gives their outcomes."""
LINE_EVERY = 1_000
"""Schedules between two lines of a log, where no bar is shown."""


@dataclass
class Totals:
    """The sums of all schedules."""

    num_schedules: int = 0
    num_callbacks: int = 0
    num_tokens: int = 0
    virtual_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.num_schedules += 1
        self.num_callbacks += outcome.num_callbacks
        self.num_tokens += outcome.num_tokens
        self.virtual_s += outcome.virtual_s
        self.fired += outcome.fired
        self.happened += outcome.happened
        self.pairs.update(combinations(outcome.met, 2))
        if outcome.failure is not None:
            self.failed[outcome.seed] = outcome.failure

    def print(self, console: Console, *, duration_s: float, jobs: int) -> None:
        for counts in (self.fired, self.happened):
            for kind, count in sorted(counts.items()):
                console.print(f"  {count:8} {kind}", highlight=False)
            console.print()
        console.print(
            f"{self.num_schedules} schedules, {len(self.failed)} failed; {self.virtual_s:.0f} s of virtual time, "
            f"{self.fired.total()} faults, {len(self.pairs)} pairs of features and faults met, "
            f"{self.num_tokens} tokens compared, {self.num_callbacks} callbacks; {duration_s:.0f} s, "
            f"{self.num_schedules / duration_s / jobs:.0f} schedules a second and core",
            highlight=False,
            soft_wrap=True,
        )


def run_chunk(seeds: range) -> list[Outcome]:
    with simulating():
        return [plain(run_seed(seed)) for seed in seeds]


def plain(outcome: Outcome) -> Outcome:
    """Without what can't be sent to another process."""
    outcome.error = None
    return outcome


def outcomes_of(seeds: range, jobs: int) -> Iterator[Outcome]:
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            yield from run_chunk(chunk)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for outcomes in pool.imap_unordered(run_chunk, chunks):
            yield from outcomes


def replay(seed: int, console: Console) -> bool:
    """Print the story of a seed; of one that fails the shortest that fails alike. Returns False if it fails."""
    schedule = make_schedule(seed)
    with simulating():
        outcome = run(schedule)
        if outcome.failure is not None:
            schedule = shrink(schedule, outcome.failure)
    with simulating(told=True):
        outcome = run(schedule, tell=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    console.print(f"{schedule}", markup=False)
    if schedule.features.disk is not None:
        console.print(f"{schedule.features.disk}", markup=False)
    console.print(f"digest {outcome.digest}: {outcome.failure or 'all is well'}", markup=False)
    return outcome.failure is None


@click.command()
@click.option("--schedules", type=click.IntRange(min=1), default=1000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=1, show_default=True, help="The first one's seed.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="How many at a time.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Stop after this time, and sum up.")
@click.option("--replay", "replayed", type=int, metavar="SEED", help="Only this one: its story.")
def main(schedules: int, seed: int, jobs: int, minutes: float | None, replayed: int | None) -> None:
    """Run schedules of the whole control plane in virtual time: every token has to be the right one."""
    console = Console()
    if replayed is not None:
        sys.exit(0 if replay(replayed, console) else 1)
    started, totals = time.monotonic(), Totals()
    ends_at = started + 60 * minutes if minutes is not None else math.inf
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("schedules", total=schedules)
        for outcome in outcomes_of(range(seed, seed + schedules), jobs):
            totals.add(outcome)
            failed = f", {len(totals.failed)} failed" if totals.failed else ""
            progress.update(bar, advance=1, description=f"schedules{failed}")
            if outcome.failure is not None:
                console.print(f"seed {outcome.seed}: {outcome.failure}", style="red", markup=False, highlight=False)
            if not console.is_terminal and totals.num_schedules % LINE_EVERY == 0:
                console.print(f"{totals.num_schedules} schedules{failed}", highlight=False)
            if totals.num_schedules % CHUNK == 0 and time.monotonic() > ends_at:
                break
    totals.print(console, duration_s=time.monotonic() - started, jobs=jobs)
    sys.exit(1 if totals.failed else 0)


if __name__ == "__main__":
    main()
