"""The cost to others of a grammar with masks that take long: their steps' time with such a request, and without.

quire bench step slow-grammar

Plain streams of the demo model, through both services. In each round they generate four times, in an order that
changes: alone, beside a plain request more, and beside requests with a grammar, one after another. Each of these has
a grammar of its own text, as the worker refuses one of which a mask took too long. A step's time is a stream's time
over its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import click
import psutil
from engines import NUM_CORES
from report import Findings, benchmark, summary, table
from rich.progress import Progress

from quire.cli.launch import LocalServices
from quire.client import Engine, Grammar, SamplingParams
from quire.client.errors import QuireError

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
PROMPT = "The default value of this parameter"
TARGET = 1.1
NUM_FAST = 6
"""The first masks of the grammar are fast. Others are measured behind these."""
KINDS = {
    "step_ms": "a step, ms",
    "longest_ms": "longest wait, ms",
    "worker_cores": "worker's cores",
    "other_tokens": "other's tokens",
}
ALONE, PLAIN, SLOW, SLOWER = WAYS = ("alone", "a plain request", "a slow grammar", "a slower grammar")


def grammar_of(way: str, number: int) -> Grammar | None:
    """Return the grammar of a way; its number makes it another one. Each mask takes longer than the one before."""
    rules = {
        SLOW: f's s s | s s | "a" | " a" | "z{number}" | ""',
        SLOWER: f's s s s s s | s s s | s s | /[a-z]/ | "z{number}" | ""',
    }
    return Grammar(lark=f"start: s\ns: {rules[way]}") if way in rules else None


@dataclass(frozen=True, slots=True)
class Streams:
    """The times of plain streams that ran together.

    step_ms           of a step
    longest_ms        the longest between two chunks
    worker_cores      the worker's processor time by the time of the run: the masks are made in its threads
    other_tokens      tokens of the request beside them
    """

    step_ms: float
    longest_ms: float
    worker_cores: float
    other_tokens: int = 0


async def run_streams(engine: Engine, worker: psutil.Process, *, num_seqs: int, num_tokens: int) -> Streams:
    """Generate beside one another. The first token of each stream is not counted."""
    began, used_s = time.perf_counter(), _processor_s(worker)
    all_times = await asyncio.gather(*(_stream(engine, seed, num_tokens) for seed in range(num_seqs)))
    gaps = [after - before for times in all_times for before, after in pairwise(times)]
    steps = [(times[-1] - times[0]) / (num_tokens - 1) for times in all_times]
    cores = (_processor_s(worker) - used_s) / (time.perf_counter() - began)
    return Streams(1e3 * statistics.median(steps), 1e3 * max(gaps), cores)


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _stream(engine: Engine, seed: int, num_tokens: int) -> Sequence[float]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
    return [time.perf_counter() async for chunk in engine.generate(PROMPT, params) if chunk.token_ids]


class Beside:
    """One more request beside the streams, again and again: with a grammar, or a plain one."""

    def __init__(self, engine: Engine, way: str) -> None:
        self._engine = engine
        self._way = way
        self._ends = dict.fromkeys(engine.model.end_token_ids, -100.0)  # each goes on until it is refused for its time
        self._number = 0
        self.num_tokens = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Within the block, such a request is always open."""
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send(begun))
            await begun.wait()
            self.num_tokens = 0
            yield
            sending.cancel()

    async def _send(self, begun: asyncio.Event) -> None:
        while True:
            self._number += 1
            grammar = grammar_of(self._way, self._number)
            params = SamplingParams(max_tokens=1000, seed=self._number, logit_bias=self._ends, grammar=grammar)
            num_own = 0
            with contextlib.suppress(QuireError):
                async for chunk in self._engine.generate(PROMPT, params):
                    num_own += len(chunk.token_ids)
                    self.num_tokens += len(chunk.token_ids)
                    if num_own >= NUM_FAST:
                        begun.set()
            begun.set()


async def measure_rounds(
    progress: Progress, *, num_seqs: int, num_tokens: int, rounds: int
) -> dict[str, list[Streams]]:
    """Return the streams of each round, by way."""
    flags = ("--threads", str(max(1, NUM_CORES - 1)), "--max-num-seqs", "32")
    measured: dict[str, list[Streams]] = {way: [] for way in WAYS}
    with LocalServices.start(model=MODEL, num_blocks=1024, extra_worker_args=flags) as services:
        worker = psutil.Process(services.worker.pid)
        async with Engine.connect(services.cachemgr_address) as engine:
            beside = {way: Beside(engine, way) for way in WAYS[1:]}
            await run_streams(engine, worker, num_seqs=num_seqs, num_tokens=num_tokens)
            for number in progress.track(range(rounds), description="rounds"):
                first = number % len(WAYS)
                for way in (*WAYS[first:], *WAYS[:first]):
                    other = beside.get(way)
                    async with contextlib.nullcontext() if other is None else other.open():
                        found = await run_streams(engine, worker, num_seqs=num_seqs, num_tokens=num_tokens)
                        measured[way].append(replace(found, other_tokens=0 if other is None else other.num_tokens))
    return measured


def measure(quick: bool, progress: Progress, *, num_seqs: int, tokens: int, rounds: int) -> Findings:
    if quick:
        num_seqs, tokens, rounds = 2, 8, 2
    measured = asyncio.run(measure_rounds(progress, num_seqs=num_seqs, num_tokens=tokens, rounds=rounds))
    ratios = {
        way: statistics.median(
            after.step_ms / before.step_ms for before, after in zip(measured[ALONE], measured[way], strict=True)
        )
        for way in WAYS
    }
    figures = {
        "num_seqs": num_seqs,
        "num_tokens": tokens,
        "ways": {
            way: {kind: summary([getattr(each, kind) for each in measured[way]]) for kind in KINDS} for way in WAYS
        },
        "step_ratios": ratios,
    }
    made = table(f"{num_seqs} streams", "", *KINDS.values(), "of a step alone", "to reach", words=1)
    for way in WAYS:
        medians = [statistics.median(getattr(each, kind) for each in measured[way]) for kind in KINDS]
        target = f"at most {TARGET}" if way in (SLOW, SLOWER) else ""
        made.add_row(way, *(f"{value:.2f}" for value in medians), f"{ratios[way]:.2f}", target)
    return Findings([made], figures)


OPTIONS = [
    click.Option([flag], default=default, show_default=True, type=click.IntRange(min=1), help=text)
    for flag, default, text in (
        ("--num-seqs", 8, "Plain streams at once."),
        ("--tokens", 150, "Of each stream."),
        ("--rounds", 12, "Rounds, each of them in all ways."),
    )
]
main = benchmark("step slow-grammar", measure, packages=("torch", "llguidance"), options=OPTIONS)

if __name__ == "__main__":
    main()
