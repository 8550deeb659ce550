"""`quire lab` against the real processes: the same requests, with the times of steps that this machine takes.

    quire bench lab

The first requests of a recorded trace arrive, so fast that the laboratory expects a worker that computes 60 % of the
time: at cachemgr, a worker and an engine, with a Llama of 56 million parameters on the CPU, three times; and at the
laboratory, with the fit of `quire lab calibrate` to the means of four `quire bench step`, one before each of these
rounds and one after the last: a shared machine's speed changes. A second run of the laboratory adds what steps of the
real processes take beside the fit: decode steps, and those of other prompts that come alone. An answer of the trace
is in no later prompt here, because the real model gives others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from engines import Running, Setup, greedy, two_processes
from lengths import lengths_around
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m, tiny_llama
from report import Findings, benchmark, percent, plain, spread, table
from rich.progress import Progress
from rich.table import Table

from quire.lab import LabConfig, StepTime, calibrate
from quire.lab.config import Fleet, Load
from quire.lab.requests import Request
from quire.lab.simulation import Simulation
from quire.lab.tokens import Content
from quire.lab.traces import read_trace

TRACE = Path(__file__).parent / "traces" / "sharegpt128_B16.jsonl.gz"
BLOCK_SIZE = 16
ANSWER_STREAMS = 2**33
"""No stream of a trace."""
TO_REACH = 0.15
PAUSE_S = 1.0
"""Before a lone prompt, as between requests of the trace."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The part of the trace, and the pool that it meets.

    busy          share of the time in which the laboratory's worker computes: the trace's times are divided to reach it
    most_output   longer answers are cut
    """

    num_rounds: int = 3
    num_requests: int = 40
    busy: float = 0.6
    most_output: int = 200
    num_blocks: int = 3000
    max_step_tokens: int = 512
    dtype: str = "float32"
    vocabulary: int = 32_000
    decodes: tuple[tuple[int, int], ...] = ((1, 128), (2, 128), (4, 128), (1, 1024), (2, 1024), (4, 1024))
    """Sequences and their tokens on average, to measure what a step takes beside its computation."""
    decoded_tokens: int = 40
    prompts: tuple[int, ...] = (128, 512, 128, 512, 128, 512)
    """Tokens of prompts that come alone, to measure the same; each fits in a step."""


QUICK = Sizes(
    num_rounds=1,
    num_requests=3,
    most_output=4,
    vocabulary=512,
    decodes=((2, 20),),
    decoded_tokens=4,
    prompts=(20,),
)


@dataclass(frozen=True, slots=True)
class Served:
    """One request, in seconds. token_s: of each token after the first; None with one token."""

    first_token_s: float
    token_s: float | None
    num_cached: int


# -- the requests -----------------------------------------------------------------------------------------------------


def requests_of(sizes: Sizes) -> list[Request]:
    """The first requests of the trace, with answers that no other prompt has."""
    return [
        replace(each, content=_with_own_answer(each, number, sizes), num_output=_num_output(each, sizes))
        for number, each in enumerate(read_trace(TRACE, most=sizes.num_requests))
    ]


def at_speed(requests: Sequence[Request], step: StepTime, sizes: Sizes) -> tuple[list[Request], float]:
    """The requests at times by which the laboratory's worker is as busy as it should be; and the trace's speed-up."""
    speed = sizes.busy * requests[-1].at_s / in_the_lab(requests, step, sizes).busy_s
    return [replace(each, at_s=each.at_s / speed) for each in requests], speed


def _num_output(request: Request, sizes: Sizes) -> int:
    return min(request.num_output, sizes.most_output)


def _with_own_answer(request: Request, number: int, sizes: Sizes) -> Content:
    answer = Content.of([(ANSWER_STREAMS + number, 0, _num_output(request, sizes))])
    return request.content.cut(0, request.num_prompt) + answer


# -- the real processes -----------------------------------------------------------------------------------------------


async def serve(running: Running, requests: Sequence[Request], sizes: Sizes, progress: Progress) -> list[Served]:
    task = progress.add_task("requests through the real processes", total=len(requests))
    prompts = [(each.content.tokens()[: each.num_prompt] % (sizes.vocabulary - 3) + 3).tolist() for each in requests]
    began = time.perf_counter()

    async def one(request: Request, prompt: list[int]) -> Served:
        await asyncio.sleep(began + request.at_s - time.perf_counter())
        arrived = time.perf_counter()
        first = last = 0.0
        num_tokens = num_cached = 0
        async with contextlib.aclosing(running.engine.generate(prompt, greedy(request.num_output))) as chunks:
            async for chunk in chunks:
                last = time.perf_counter()
                first = first or last
                num_tokens += len(chunk.token_ids)
                num_cached += chunk.num_cached_tokens or 0
        assert num_tokens == request.num_output
        progress.advance(task)
        token_s = (last - first) / (num_tokens - 1) if num_tokens > 1 else None
        return Served(first - arrived, token_s, num_cached)

    return await asyncio.gather(*map(one, requests, prompts))


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of the real processes: num_seqs sequences with num_tokens on average compute num_new each.

    taken_s: from the tokens of the step before to its own; of a lone prompt, from the request to its first token.
    """

    num_seqs: int
    num_tokens: int
    num_new: int
    taken_s: float

    @property
    def name(self) -> str:
        if self.num_new > 1:
            return f"prompt of {self.num_new}, alone"
        return f"decode, {self.num_seqs} on {self.num_tokens}"

    def computed_s(self, step: StepTime) -> float:
        """By a fit."""
        return step.seconds([self.num_tokens] * self.num_seqs, [self.num_new] * self.num_seqs)


async def measured_steps(running: Running, sizes: Sizes) -> list[Measured]:
    """Decode steps through both processes, then lone prompts."""
    measured = []
    for number, (num_seqs, num_tokens) in enumerate(sizes.decodes):
        generator = np.random.default_rng(number)
        lengths = lengths_around(num_tokens, num_seqs)
        prompts = [generator.integers(3, sizes.vocabulary, length).tolist() for length in lengths]
        counts = await asyncio.gather(*(_times_of_tokens(running, prompt, sizes.decoded_tokens) for prompt in prompts))
        began, ended = max(times[0] for times in counts), min(times[-1] for times in counts)
        num_steps = sum(began < at <= ended for at in counts[0])
        start = num_tokens + sizes.decoded_tokens // 2
        measured.append(Measured(num_seqs, start, 1, (ended - began) / max(1, num_steps)))
    for number, num_tokens in enumerate(sizes.prompts, len(sizes.decodes)):
        prompt = np.random.default_rng(number).integers(3, sizes.vocabulary, num_tokens).tolist()
        await asyncio.sleep(PAUSE_S)
        began = time.perf_counter()
        measured.append(Measured(1, 0, num_tokens, (await _times_of_tokens(running, prompt, 1))[0] - began))
    return measured


async def _times_of_tokens(running: Running, prompt: list[int], count: int) -> list[float]:
    async with contextlib.aclosing(running.engine.generate(prompt, greedy(count))) as chunks:
        return [time.perf_counter() async for _ in chunks]


async def in_truth(
    model: Path, requests: Sequence[Request], sizes: Sizes, progress: Progress
) -> tuple[list[Measured], list[Served]]:
    setup = Setup(model, sizes.num_blocks + 1, BLOCK_SIZE, dtype=sizes.dtype, max_step_tokens=sizes.max_step_tokens)
    async with two_processes(setup) as running:
        warm = [replace(each, at_s=0.0) for each in requests[:2]]
        await serve(running, warm, sizes, progress)
        measured = await measured_steps(running, sizes)
        await running.forget()
        return measured, await serve(running, requests, sizes, progress)


# -- the laboratory ---------------------------------------------------------------------------------------------------


def bench_step(folder: Path) -> Path:
    """The result of a `quire bench step` that runs now."""
    command = [sys.executable, "-m", "quire.cli", "bench", "step", "--float32", "--output", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "step_cpu.json"


def mean_of(results: Sequence[Path], folder: Path) -> Path:
    """A result with the mean of each step's medians."""
    read = [json.loads(path.read_text()) for path in results]
    for steps in zip(*(result["steps"] for result in read), strict=True):
        steps[0]["median_ms"] = statistics.fmean(each["median_ms"] for each in steps)
    path = folder / "mean.json"
    path.write_text(json.dumps(read[0]))
    return path


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run of the laboratory: the requests, the worker's time in steps, and the seconds that the run took."""

    served: list[Served]
    busy_s: float
    taken_s: float


def in_the_lab(requests: Sequence[Request], step: StepTime, sizes: Sizes) -> Simulated:
    config = LabConfig(
        name="truth",
        load=Load(trace=TRACE, requests=len(requests), lengths="known"),
        fleet=Fleet(step, sizes.num_blocks, block_size=BLOCK_SIZE, max_step_tokens=sizes.max_step_tokens),
    )
    simulation = Simulation(config, 1, requests)
    began = time.perf_counter()
    simulation.run()
    taken_s = time.perf_counter() - began
    served = [Served(each.first_token_s, each.token_s, each.num_cached) for each in simulation.records]
    return Simulated(served, simulation.pools[0].busy_s, taken_s)


def with_own_time(step: StepTime, measured: Sequence[Measured]) -> StepTime:
    """The fit, with what the processes take beside it: in a decode step, and in a step after a pause. Medians."""
    own_s = statistics.median(max(0.0, each.taken_s - each.computed_s(step)) for each in measured if each.num_new == 1)
    own = replace(step, overhead_s=own_s)
    ratios = [each.taken_s / each.computed_s(own) for each in measured if each.num_new > 1]
    return replace(own, idle_ratio=max(1.0, statistics.median(ratios)))


# -- all of it --------------------------------------------------------------------------------------------------------


def medians(served: Sequence[Served]) -> dict[str, float]:
    """Of a request: seconds to the first token, and tokens a second after it. Of all: tokens that were found."""
    speeds = [1 / each.token_s for each in served if each.token_s]
    return {
        "first_token_s": statistics.median(each.first_token_s for each in served),
        "tokens_per_s": statistics.median(speeds),
        "found_tokens": sum(each.num_cached for each in served),
    }


def measure(quick: bool, progress: Progress) -> Findings:
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (tiny_llama if quick else llama_56m)(folder / "model")
        results: list[Path] = []

        def fit() -> tuple[StepTime, float]:
            """To the steps that are measured now, and to those of before."""
            if quick:
                return StepTime("additive", 0.01, 1e-5), 0.0
            task = progress.add_task("steps", total=None)
            results.append(bench_step(folder / f"step-{len(results)}"))
            progress.remove_task(task)
            return calibrate(mean_of(results, folder), dtype=sizes.dtype)

        requests, speed = at_speed(requests_of(sizes), fit()[0], sizes)
        measured: list[Measured] = []
        rounds: list[list[Served]] = []
        for _ in range(sizes.num_rounds):
            own, served = asyncio.run(in_truth(folder / "model", requests, sizes, progress))
            measured += own
            rounds.append(served)
            step, worst = fit()
    truth = [each for served in rounds for each in served]
    own_step = with_own_time(step, measured)
    fitted = in_the_lab(requests, step, sizes)
    simulated = in_the_lab(requests, own_step, sizes)
    in_lab = sizes.num_rounds * simulated.served
    num_equal = sum(one.num_cached == other.num_cached for one, other in zip(truth, in_lab, strict=True))
    ways = {
        "real processes": truth,
        "laboratory, by the fit": sizes.num_rounds * fitted.served,
        "and the processes' own time": in_lab,
    }
    figures_of = {name: medians(served) for name, served in ways.items()}
    figures = {
        "sizes": asdict(sizes),
        "speed": round(speed, 3),
        "step": asdict(step),
        "largest_error_of_a_step": round(worst, 3),
        "steps": [asdict(each) | {"computed_s": each.computed_s(step)} for each in measured],
        "own_s_of_a_step": round(own_step.overhead_s, 5),
        "idle_ratio": round(own_step.idle_ratio, 3),
        "medians": figures_of,
        "medians_of_rounds": [medians(served) for served in rounds],
        "requests_with_equal_hits": num_equal,
        "laboratory_s": round(simulated.taken_s, 2),
        "requests": [
            {"real": asdict(one), "laboratory": asdict(other)} for one, other in zip(truth, in_lab, strict=True)
        ],
    }
    last_s = requests[-1].at_s
    notes = [
        f"{sizes.num_rounds} times {len(requests)} requests in {last_s:.0f} s ({speed:.2f} times the trace's speed), "
        f"{sum(each.num_prompt for each in requests):,} prompt tokens; {sizes.dtype}. "
        f"The laboratory took {simulated.taken_s:.1f} s.",
        f"The same tokens of {num_equal} of {len(truth)} prompts were found in the cache.",
        "The rounds: " + "; ".join(map(_in_words, figures["medians_of_rounds"])) + ".",
        f"The fit's largest error is {percent(worst, 0)}. The processes' own time of a decode step is "
        f"{1e3 * own_step.overhead_s:.1f} ms; a prompt that comes alone takes {own_step.idle_ratio:.2f} times as long.",
    ]
    return Findings([times(figures_of), steps(measured, step)], figures, lambda: plot(truth, in_lab), notes)


def _in_words(medians_of_round: dict[str, float]) -> str:
    first_token_s, tokens_per_s = medians_of_round["first_token_s"], medians_of_round["tokens_per_s"]
    return f"{first_token_s:.3f} s to the first token, {tokens_per_s:.1f} tokens a second"


def times(ways: dict[str, dict[str, float]]) -> Table:
    """The real processes, and the laboratory with its difference from them."""
    made = table(f"median of the requests; to reach: {percent(TO_REACH, 0)}", "", *ways)
    truth = next(iter(ways.values()))
    rows = {"first_token_s": ("s to the first token", ".3f"), "tokens_per_s": ("tokens a second after it", ".1f")}
    for name, (title, form) in rows.items():
        cells = [f"{each[name]:{form}} ({100 * (each[name] / truth[name] - 1):+.1f} %)" for each in ways.values()]
        made.add_row(title, f"{truth[name]:{form}}", *cells[1:])
    made.add_row("tokens found in the cache", *(f"{each['found_tokens']:,.0f}" for each in ways.values()))
    return made


def steps(measured: Sequence[Measured], step: StepTime) -> Table:
    made = table("a step, ms", "", "real processes", "the fit")
    for name in dict.fromkeys(each.name for each in measured):
        alike = [each for each in measured if each.name == name]
        taken_ms = [1e3 * each.taken_s for each in alike]
        made.add_row(name, spread(taken_ms, ".1f"), f"{1e3 * alike[0].computed_s(step):.1f}")
    return made


def plot(truth: Sequence[Served], simulated: Sequence[Served]) -> Figure:
    """Each request: in truth and in the laboratory."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    columns = {
        "s to the first token": (left, lambda each: each.first_token_s),
        "tokens a second after it": (right, lambda each: 1 / each.token_s if each.token_s else np.nan),
    }
    for title, (axes, of) in columns.items():
        real, lab = [of(each) for each in truth], [of(each) for each in simulated]
        axes.scatter(real, lab, s=12)
        most = np.nanmax([*real, *lab])
        axes.plot([0, most], [0, most], color="grey", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("real processes")
        axes.set_ylabel("laboratory")
        plain(axes)
    return figure


main = benchmark("lab", measure, packages=("torch", "transformers", "numpy"))

if __name__ == "__main__":
    main()
