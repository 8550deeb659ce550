"""Malformed messages of every type against both real services, by the million.

    python tests/robustness/fuzz/run.py                                      20,000 messages, seed 1
    python tests/robustness/fuzz/run.py --messages 1000000 --seed 2
    python tests/robustness/fuzz/run.py --service worker --messages 100000
    python tests/robustness/fuzz/run.py --replay '1:48213<3021'    one message again, as a run with these flags made it

What is drawn depends on the seed, the message's number and --service alone. Exits with 1 if an answer, a process, the
canary or the books are not as they have to be, and says which message it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))
import conftest  # noqa: F401 - the environment of tests, before gRPC is imported

# isort: split
import uvloop
from google.protobuf import text_format
from google.protobuf.message import DecodeError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from robustness.fuzz.drive import Driver, Failure, Streams, judge, refusal_of
from robustness.fuzz.flat import Gauge
from robustness.fuzz.messages import Generator, Origin
from robustness.fuzz.subject import Changed, Subject
from robustness.fuzz.surface import CACHEMGR, WORKER

SERVICES = {"both": (CACHEMGR, WORKER), CACHEMGR: (CACHEMGR,), WORKER: (WORKER,)}
MIB = 2**20


class Run:
    """The results of some messages: the driver with its counts, the size of the processes, and the time."""

    def __init__(self, driver: Driver, gauges: Sequence[Gauge]) -> None:
        self.driver = driver
        self.gauges = gauges
        self.seconds = 0.0

    @property
    def failures(self) -> list[Failure]:
        return self.driver.failures

    def look(self) -> None:
        for gauge in self.gauges:
            gauge.look(self.driver.num_sent)


async def fuzz(
    seed: int, num_messages: int, *, service: str = "both", minutes: float = inf, progress: Progress | None = None
) -> Run:
    """Starts both processes, sends so many messages, fewer if time is over, and looks at everything in the end."""
    async with Subject.started() as subject:
        generator = Generator(seed, *SERVICES[service], grant_bytes=subject.bindings.grant_bytes)
        run = Run(Driver(subject, generator), [Gauge(*each) for each in subject.processes.items()])
        task = progress.add_task("", total=num_messages) if progress is not None else None
        began = time.monotonic()

        def goes_on() -> bool:
            run.look()
            if progress is not None and task is not None:
                line = status_line(run, began)
                progress.update(task, completed=run.driver.num_sent, description=line)
                if not progress.console.is_terminal:
                    progress.console.print(f"{run.driver.num_sent:,}: {line}", highlight=False)
            return time.monotonic() - began < 60 * minutes

        run.look()
        await run.driver.run(range(num_messages), goes_on=goes_on)
        run.seconds = time.monotonic() - began
        if not run.failures:
            run.failures.extend(await asyncio.to_thread(last_look, subject, run.gauges))
        return run


def last_look(subject: Subject, gauges: Sequence[Gauge]) -> list[Failure]:
    """True if the canary goes on as it has to, and the processes are no bigger than they were."""
    found = []
    try:
        subject.canary.sing()
    except Changed as problem:
        found.append(Failure(None, "the canary", str(problem)))
    return [*found, *(Failure(None, "size", problem) for gauge in gauges for problem in gauge.problems())]


def status_line(run: Run, began: float) -> str:
    driver = run.driver
    sizes = ", ".join(f"{gauge.name} {gauge.samples[-1].memory_bytes / MIB:.0f} MiB" for gauge in run.gauges)
    rate = driver.num_sent / (time.monotonic() - began)
    return f"{rate:,.0f}/s, {len(driver.outcomes)} outcomes, {sizes}"


# -- showing ------------------------------------------------------------------------------------------------------


def summary(run: Run) -> Table:
    """By method: sent, accepted, refused, by which reasons."""
    table = Table("service", "method")
    for name in ("sent", "accepted", "refused", "outcomes"):
        table.add_column(name, justify="right")
    table.add_column("reasons")
    outcomes = Counter(method for method, _ in run.driver.outcomes)
    total: Counter[str] = Counter()
    for method, count in sorted(run.driver.counts.items(), key=lambda entry: entry[0].path):
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in count.refused.most_common())
        refused = count.refused.total()
        total.update(sent=count.sent, ok=count.ok, refused=refused, outcomes=outcomes[method])
        numbers = (count.sent, count.ok, refused, outcomes[method])
        table.add_row(method.process, method.name, *(f"{number:,}" for number in numbers), reasons)
    table.add_section()
    numbers = tuple(total[name] for name in ("sent", "ok", "refused", "outcomes"))
    table.add_row("", "all", *(f"{number:,}" for number in numbers), f"{run.driver.num_frames:,} as frames by hand")
    return table


def sizes(run: Run) -> Table:
    """Sizes of the processes: at first, after the warm-up, at the end."""
    table = Table("process", "memory, MiB", "after the warm-up", "in the end", "growth since", "files", "threads")
    for gauge in run.gauges:
        first, warm, last = gauge.samples[0], gauge.warm[0], gauge.samples[-1]
        memory = [f"{sample.memory_bytes / MIB:.1f}" for sample in (first, warm, last)]
        growth = f"{gauge.growth_bytes / MIB:+.1f}"
        files, threads = f"{first.num_files} to {last.num_files}", f"{first.num_threads} to {last.num_threads}"
        table.add_row(gauge.name, *memory, growth, files, threads)
    return table


def show(console: Console, run: Run, arguments: argparse.Namespace) -> None:
    console.print(summary(run))
    console.print(sizes(run))
    driver = run.driver
    console.print(
        f"seed {arguments.seed}: {driver.num_sent:,} messages in {run.seconds:,.0f} s, "
        f"{driver.num_sent / run.seconds:,.0f}/s; {len(driver.outcomes):,} outcomes; "
        f"{driver.num_repeated:,} refused ones repeated with all books compared",
        highlight=False,
    )
    for failure in run.failures:
        console.print(f"FAILED {failure.method}: {failure.problem}", markup=False, highlight=False)
        if failure.origin is not None:
            replay = f"--service {arguments.service} --replay '{failure.origin}'"
            console.print(f"again: python tests/robustness/fuzz/run.py {replay}", markup=False, highlight=False)


async def replay(console: Console, origin: Origin, service: str) -> bool:
    """Sends one message to fresh services and looks at everything; whether all is right."""
    async with Subject.started() as subject:
        generator = Generator(origin.seed, *SERVICES[service], grant_bytes=subject.bindings.grant_bytes)
        message = generator.again(origin)
        data = message.sent(subject.bindings)
        console.print(f"{message.method.path}, {len(data)} bytes: {data.hex()}", markup=False, highlight=False)
        with contextlib.suppress(DecodeError):
            text = text_format.MessageToString(message.method.request_class.FromString(data))
            console.print(text, markup=False, highlight=False)
        driver = Driver(subject, generator)
        async with Streams(subject) as streams:
            answer = await streams.exchange(message)
            console.print(str(answer), markup=False, highlight=False)
            refusal = refusal_of(answer, judge(message.method, answer))
            await driver.send_one(message, streams)
        console.print(f"refused: {refusal}" if refusal else "accepted", highlight=False)
        await driver.look("the message")
        for failure in driver.failures:
            console.print(f"FAILED {failure.problem}", markup=False, highlight=False)
        return not driver.failures


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000, metavar="NUMBER", help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (%(default)s)")
    parser.add_argument("--minutes", type=float, default=inf, help="stop earlier, after so long")
    parser.add_argument("--service", choices=SERVICES, default="both", help="the receiver (%(default)s)")
    parser.add_argument("--replay", type=Origin.of, metavar="ORIGIN", help="send one message again")
    parser.add_argument("--list-outcomes", action="store_true", help="show every way in which a message was answered")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.replay is not None:
        return 0 if uvloop.run(replay(console, arguments.replay, arguments.service)) else 1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        fuzzing = fuzz(
            arguments.seed,
            arguments.messages,
            service=arguments.service,
            minutes=arguments.minutes,
            progress=progress,
        )
        run = uvloop.run(fuzzing)
    show(console, run, arguments)
    if arguments.list_outcomes:
        for method, outcome in sorted(run.driver.outcomes, key=lambda entry: (entry[0].path, entry[1])):
            console.print(f"{method.path} {outcome}", markup=False, highlight=False)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
