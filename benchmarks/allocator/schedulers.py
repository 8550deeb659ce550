"""The time of a decode step in whole schedulers, without a model: Quire's with cachemgr's books, and those of peers.

    quire bench allocator schedulers            ours, and the peers that are installed
    quire bench allocator schedulers --peers    all of them, after making the peers' environments

256 and 1,024 sequences decode, none begins or ends, one in 16 begins a block in each step. Prefix caching is on, blocks
have 16 tokens, nothing becomes text. Each scheduler has a process of its own on a CPU; windows of steps run in turns.
The parts of a step, and what is outside of it, are said where they are measured: peers/*_steps.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from environments import PeerUnavailable
from matplotlib import pyplot
from matplotlib.figure import Figure
from peer_runs import prepare
from report import Findings, benchmark, plain, spread, table
from rich.progress import Progress
from rich.table import Table
from step_drivers import StepDriver, step_driver

OURS = "quire"
TITLES = {
    OURS: "Quire: engine and cachemgr",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tokenspeed": "TokenSpeed",
}
INCLUDED = (
    "Quire: the scheduler, its message to cachemgr, blocks and leases, the signed grant, the answer, the message to "
    "the worker, the worker's report; each message as bytes, without gRPC.",
    "vLLM: AsyncScheduler.schedule and update_from_output; objects, not sent to another process.",
    "SGLang: Scheduler.get_next_batch_to_run and process_batch_result_decode without stream and statistics; no "
    "overlap.",
    "TokenSpeed: next_execution_plan and advance of the C++ scheduler alone; stops are checked elsewhere.",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The load, and how often it is measured: a window of steps is one sample, after one that does not count."""

    running: tuple[int, ...] = (256, 1024)
    prompt_tokens: int = 512
    steps: int = 64
    windows: int = 9

    def load(self, num_running: int) -> dict[str, int]:
        """The load as a driver reads it, with room for more tokens than the windows take."""
        most = 2 * self.steps * (self.windows + 1)
        return {"num_running": num_running, "prompt_tokens": self.prompt_tokens, "max_new_tokens": most}


QUICK = Sizes(running=(16, 32), prompt_tokens=32, steps=16, windows=2)


@dataclass(slots=True)
class Steps:
    """The windows of one scheduler at one load: microseconds a step, by part."""

    scheduler: str
    num_running: int
    cpu_us: list[dict[str, float]] = field(default_factory=list)
    wall_us: list[dict[str, float]] = field(default_factory=list)

    def totals_us(self, clock: str) -> list[float]:
        """A step, of each window; `clock` is cpu_us or wall_us."""
        return [sum(parts.values()) for parts in getattr(self, clock)]

    def parts_us(self) -> dict[str, float]:
        """Processor time of each part, the median of the windows."""
        return {part: statistics.median(window[part] for window in self.cpu_us) for part in self.cpu_us[0]}

    def as_json(self) -> dict[str, Any]:
        """Every window's total, and the parts."""
        return {
            "scheduler": self.scheduler,
            "num_running": self.num_running,
            "cpu_us": [round(taken, 1) for taken in self.totals_us("cpu_us")],
            "wall_us": [round(taken, 1) for taken in self.totals_us("wall_us")],
            "parts_cpu_us": {part: round(taken, 1) for part, taken in self.parts_us().items()},
        }


@dataclass(slots=True)
class Measured:
    """Everything of one run; a scheduler that could not run is in `unavailable`, with the reason."""

    steps: list[Steps] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def of(self, scheduler: str, num_running: int) -> Steps | None:
        """The windows of a scheduler at a load, if it ran."""
        found = (steps for steps in self.steps if (steps.scheduler, steps.num_running) == (scheduler, num_running))
        return next(found, None)


def measure(quick: bool, progress: Progress, *, peers: bool, only: Sequence[str]) -> Findings:
    """Runs the schedulers in turns, and lays the figures out."""
    sizes = QUICK if quick else Sizes()
    names = tuple(only) or ((OURS,) if quick else tuple(TITLES))
    task = progress.add_task("schedulers", total=len(sizes.running) * (sizes.windows + 1))
    measured = Measured()
    with ExitStack() as stack:
        drivers: dict[str, StepDriver] = {}
        for name in names:
            progress.update(task, description=f"{name}: starting")
            try:
                if peers:
                    prepare(name)
                drivers[name] = stack.enter_context(step_driver(name))
            except PeerUnavailable as error:
                measured.unavailable[name] = str(error)
        for num_running in sizes.running:
            progress.update(task, description=f"{num_running:,} sequences")
            measure_load(measured, drivers, sizes, num_running, lambda: progress.advance(task))
    return Findings(
        tables=[steps_table(measured, sizes), parts_table(measured, sizes)],
        figures={
            "sizes": asdict(sizes),
            "versions": measured.versions,
            "unavailable": measured.unavailable,
            "steps": [steps.as_json() for steps in measured.steps],
        },
        draw=lambda: draw(measured, sizes),
        notes=[*INCLUDED, *(f"{TITLES[name]}: not run: {why}" for name, why in measured.unavailable.items())],
    )


def measure_load(
    measured: Measured, drivers: dict[str, StepDriver], sizes: Sizes, num_running: int, on_round: Callable[[], None]
) -> None:
    """All windows of one load, the schedulers in turns, in another order each round. One that fails is left out."""
    running: dict[str, Steps] = {}
    for name, driver in drivers.items():
        answer = ask(measured, driver, name, sizes.load(num_running))
        if answer is not None:
            measured.versions |= answer["versions"]
            running[name] = Steps(name, num_running)
    for number in range(sizes.windows + 1):
        for name in list(running) if number % 2 else list(running)[::-1]:
            answer = ask(measured, drivers[name], name, {"steps": sizes.steps})
            if answer is None:
                del running[name]
            elif number:
                running[name].cpu_us.append(answer["cpu_us"])
                running[name].wall_us.append(answer["wall_us"])
        on_round()
    measured.steps += running.values()


def ask(measured: Measured, driver: StepDriver, name: str, question: dict[str, int]) -> dict[str, Any] | None:
    """The driver's answer; None, and the reason noted, if there is none."""
    try:
        return driver.ask(question)
    except PeerUnavailable as error:
        measured.unavailable.setdefault(name, str(error))
        return None


def steps_table(measured: Measured, sizes: Sizes) -> Table:
    """A step of each scheduler, and how many of ours it takes."""
    made = table(
        "a decode step without a model: µs, median of the windows (range)",
        *("scheduler", "sequences", "processor time", "by the clock", "of Quire's", "processor time a sequence"),
    )
    for num_running in sizes.running:
        ours = measured.of(OURS, num_running)
        for name, title in TITLES.items():
            steps = measured.of(name, num_running)
            if steps is None:
                continue
            cpu_us = steps.totals_us("cpu_us")
            ratio = statistics.median(cpu_us) / statistics.median(ours.totals_us("cpu_us")) if ours else None
            made.add_row(
                *(title, f"{num_running:,}", spread(cpu_us, ",.0f"), spread(steps.totals_us("wall_us"), ",.0f")),
                *("–" if ratio is None else f"{ratio:.2f}", f"{statistics.median(cpu_us) / num_running:.2f}"),
            )
    return made


def parts_table(measured: Measured, sizes: Sizes) -> Table:
    """The same step by part."""
    columns = [f"{num_running:,} sequences" for num_running in sizes.running]
    made = table("the same by part: µs of processor time, medians", "scheduler", "part", *columns, words=2)
    for name, title in TITLES.items():
        loads = [steps.parts_us() for steps in measured.steps if steps.scheduler == name]
        for part in loads[0] if loads else ():
            made.add_row(title, part, *(f"{parts[part]:,.0f}" for parts in loads))
    return made


def draw(measured: Measured, sizes: Sizes) -> Figure:
    """A bar a scheduler and load, its parts on one another."""
    figure, panels = pyplot.subplots(1, len(sizes.running), figsize=(8.5, 3.6), squeeze=False)
    for axes, num_running in zip(panels[0], sizes.running, strict=True):
        shown = [steps for steps in measured.steps if steps.num_running == num_running]
        for place, steps in enumerate(shown):
            bottom = 0.0
            for shade, taken in enumerate(steps.parts_us().values()):
                axes.bar(place, taken / 1000, 0.6, bottom=bottom, color=f"C{place}", alpha=1 - 0.12 * shade)
                bottom += taken / 1000
            axes.text(place, bottom, f"{bottom:.2f}", ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(shown)), [TITLES[steps.scheduler].split(":")[0] for steps in shown], fontsize=8)
        axes.set_title(f"{num_running:,} sequences", fontsize=9)
        axes.set_ylabel("ms of processor time a step", fontsize=8)
        plain(axes)
    return figure


PEER_FLAG = {"--peers": "Make the peers' environments if they are not there."}
ONLY = click.Option(["--only"], multiple=True, type=click.Choice(list(TITLES)), help="Run these alone.")

if __name__ == "__main__":
    benchmark("allocator schedulers", measure, flags=PEER_FLAG, options=[ONLY])()
