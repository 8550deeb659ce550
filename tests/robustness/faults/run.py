"""Runs schedules of faults: `make faults ARGS="--schedules 1000"`.

    python tests/robustness/faults/run.py --schedules 1000 --seed 1 --jobs 2
    python tests/robustness/faults/run.py --replay 4711 --times 10
    python tests/robustness/faults/run.py --schedules 200 --only kill --only cut

Seeds are those from --seed on, one schedule each. What failed is listed at the end, with its seed; its logs are kept.
The same seed is the same schedule; the processes may interleave otherwise, so a failure can take a few replays.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
import click
import forking
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from robustness.faults.disk import can_mount
from robustness.faults.harness import ENVIRONMENT, Harness, HarnessError, Outcome, knows_state_dir
from robustness.faults.schedule import WEIGHTS, FaultKind, draws_adapters, draws_holder, make_schedule

KINDS = [kind.value for kind in FaultKind]
MAX_TRIES = 3
"""The time limit for the start of the processes of a job, one after the other without a schedule in between."""


@dataclass(frozen=True)
class Settings:
    """The settings of each job."""

    output: Path
    kinds: tuple[FaultKind, ...]
    state_dir: bool
    small_disk: bool
    num_ranks: int = 1
    has_window: bool = False
    deterministic: bool = False
    has_holder: bool | None = None
    """None: by seed."""
    has_adapters: bool | None = None
    """None: by seed."""

    def wants_holder(self, seed: int) -> bool:
        return self.num_ranks == 1 and draws_holder(seed) if self.has_holder is None else self.has_holder

    def wants(self, seed: int) -> tuple[bool, bool]:
        """Return whether the processes of a seed have a holder, and whether they have adapters."""
        has_adapters = self.has_adapters
        if has_adapters is None:
            has_adapters = self.num_ranks == 1 and draws_adapters(seed)
        return self.wants_holder(seed), has_adapters


async def run_seeds(seeds: list[int], settings: Settings, tell: Any) -> None:
    """Runs these, in new processes after each failure and for those with a holder or adapters; tells each outcome."""
    tries, seeds = 0, sorted(seeds, key=settings.wants)
    while seeds:
        wanted = has_holder, has_adapters = settings.wants(seeds[0])
        folder = Path(tempfile.mkdtemp(prefix="quire-faults-", dir="/tmp"))  # short enough for sockets
        try:
            async with Harness(
                folder,
                state_dir=settings.state_dir,
                small_disk=settings.small_disk,
                num_ranks=settings.num_ranks,
                has_window=settings.has_window,
                deterministic=settings.deterministic,
                has_holder=has_holder,
                has_adapters=has_adapters,
            ) as harness:
                while seeds and settings.wants(seeds[0]) == wanted:
                    outcome = await run_one(harness, seeds.pop(0), settings)
                    tries = 0
                    tell(outcome)
                    if outcome.failures:
                        break
        except (HarnessError, TimeoutError, OSError) as error:
            tries += 1
            if tries == MAX_TRIES:
                raise
            tell(f"the processes are started again: {error!r}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def run_one(harness: Harness, seed: int, settings: Settings) -> Outcome:
    """One schedule; keeps the logs of one that failed."""
    schedule = make_schedule(seed, kinds=settings.kinds, num_ranks=settings.num_ranks, has_holder=harness.has_holder)
    try:
        outcome = await harness.run(schedule)
    except Exception as error:
        outcome = harness.outcome
        outcome.failures.append(f"the harness failed: {error!r}")
    if outcome.failures:
        harness.keep_logs(settings.output / f"seed-{seed}", schedule, outcome)
    return outcome


def work(seeds: list[int], settings: Settings, outcomes: Any) -> None:
    """A job: a process with its own harness, which ends its processes also if it is told to stop."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(ENVIRONMENT)
    forking.install()
    threading.Thread(target=stop_with_parent, daemon=True).start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run_seeds(seeds, settings, outcomes.put))
    except Exception as error:
        outcomes.put(f"a job has ended: {error!r}")
    finally:
        outcomes.put(None)


def stop_with_parent() -> None:
    """Stops this job when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class Totals:
    """The sums of all schedules."""

    def __init__(self) -> None:
        self.failed: dict[int, list[str]] = {}
        self.fired: Counter[str] = Counter()
        self.num_schedules = self.num_tokens = self.recoveries = self.preemptions = self.not_reached = 0
        self.num_carried = 0

    def add(self, outcome: Outcome) -> None:
        self.num_schedules += 1
        self.num_tokens += outcome.num_tokens
        self.recoveries += outcome.recoveries
        self.preemptions += outcome.preemptions
        self.num_carried += outcome.num_carried
        self.not_reached += outcome.not_reached
        self.fired += outcome.fired
        if outcome.failures:
            self.failed.setdefault(outcome.seed, outcome.failures)

    def print(self, console: Console, *, duration_s: float, output: Path) -> None:
        for fault, count in sorted(self.fired.items()):
            console.print(f"  {count:6} {fault}", highlight=False)
        for seed, failures in sorted(self.failed.items()):
            console.print(f"seed {seed}: {len(failures)} failures, logs in {output}/seed-{seed}", style="red")
            for failure in failures[:5]:
                console.print(f"    {failure}", markup=False, highlight=False)
        console.print(
            f"{self.num_schedules} schedules, {len(self.failed)} failed; {self.fired.total()} faults "
            f"({self.not_reached} not reached), {self.num_tokens} tokens compared, {self.recoveries} recoveries, "
            f"{self.preemptions} preemptions, {self.num_carried} blocks carried over; {duration_s:.0f} s",
            highlight=False,
        )


def run_all(seeds: list[int], settings: Settings, *, jobs: int, console: Console) -> Totals:
    """All seeds, over jobs; shows how far they are."""
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    processes = [context.Process(target=work, args=(seeds[job::jobs], settings, outcomes)) for job in range(jobs)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    totals, num_running = Totals(), jobs
    for process in processes:
        process.start()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            bar = progress.add_task("schedules", total=len(seeds))
            while num_running:
                try:
                    outcome = outcomes.get(timeout=1.0)
                except queue.Empty:
                    if not any(process.is_alive() for process in processes):
                        break
                    continue
                if outcome is None:
                    num_running -= 1
                elif isinstance(outcome, str):
                    console.print(outcome, style="yellow", markup=False)
                else:
                    totals.add(outcome)
                    failed = f", {len(totals.failed)} failed" if totals.failed else ""
                    progress.update(bar, advance=1, description=f"schedules, {totals.fired.total()} faults{failed}")
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return totals


@click.command()
@click.option("--schedules", type=click.IntRange(min=1), default=100, show_default=True, help="How many.")
@click.option("--seed", type=int, default=1, show_default=True, help="The first one's seed.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="How many at a time.")
@click.option("--replay", type=int, metavar="SEED", help="Only this one, again and again.")
@click.option("--times", type=click.IntRange(min=1), default=5, show_default=True, help="How often --replay runs it.")
@click.option("--only", type=click.Choice(KINDS), multiple=True, help="Only these kinds of faults.")
@click.option("--ranks", type=click.IntRange(1, 2), default=1, show_default=True, help="Of each worker.")
@click.option("--window", is_flag=True, help="A model with two layer groups, one with a window.")
@click.option("--deterministic", is_flag=True, help="Workers in bfloat16 with --deterministic, not in float32.")
@click.option("--holder/--no-holder", default=None, help="One worker with a holder of its memory; default: by seed.")
@click.option("--adapters/--no-adapters", default=None, help="Workers with LoRA adapters; default: by seed.")
@click.option("--state-dir/--no-state-dir", default=None, help="Whether cachemgr keeps its state; default: if it can.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path(tempfile.gettempdir(), "quire-faults"),
    show_default=True,
    help="Where logs of failed schedules are kept.",
)
def main(
    schedules: int,
    seed: int,
    jobs: int,
    replay: int | None,
    times: int,
    only: tuple[str, ...],
    ranks: int,
    deterministic: bool,
    window: bool,
    holder: bool | None,
    adapters: bool | None,
    state_dir: bool | None,
    output: Path,
) -> None:
    """Kill, pause, cut, delay, lose, double: and every token has to be the right one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    if holder and ranks > 1:
        raise click.UsageError(f"--holder excludes --ranks {ranks}: a holder keeps the pool of one rank.")
    if adapters and ranks > 1:
        raise click.UsageError(f"--adapters excludes --ranks {ranks}: their weights are not divided among ranks.")
    state_dir = knows_state_dir() if state_dir is None else state_dir
    small_disk = state_dir and can_mount()
    if state_dir and not small_disk:
        console.print("full disks are left out: a file system can't be mounted here", style="yellow")
    kinds = tuple(FaultKind(kind) for kind in only) or (*WEIGHTS, *([FaultKind.FULL_DISK] if small_disk else []))
    settings = Settings(output, kinds, state_dir, small_disk, ranks, window, deterministic, holder, adapters)
    seeds = [*range(seed, seed + schedules)] if replay is None else [replay] * times
    started = time.monotonic()
    totals = run_all(seeds, settings, jobs=jobs, console=console)
    totals.print(console, duration_s=time.monotonic() - started, output=output)
    sys.exit(0 if not totals.failed and totals.num_schedules == len(seeds) else 1)


if __name__ == "__main__":
    main()
