"""Both services as users have them: streams through gateway, engine, cachemgr and worker, beside one process.

    quire bench serve-gpu                                       on a GPU if there is one, else small on the CPU
    quire bench serve-gpu --cells "0.6B 1, 8B 32" --seconds 10 --json FILE

Random weights, greedy tokens. So many requests at once, each a stream over HTTP on a connection of its own; the
gateway with its engine, cachemgr and the worker are a process each. In turns with them the same requests through an
engine, books and executor in this process. Medians of the rounds. The gap between steps is the worker's own: from the
end of a step to the forward of the next one, on the device.

A worker that runs slower than it could is an error, unless --allow-degraded.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from cell_names import number, split_cells
from engines import NUM_CORES, Setup, one_process
from gaps import Gaps, gaps_of_buckets, gaps_of_page
from models import number_tokenizer
from modes import ALLOW_DEGRADED, DegradedError, check_modes, check_parts
from report import Findings, benchmark, table, write_json
from rich.progress import Progress
from rich.table import Table
from shapes import BLOCK_SIZE, LLAMA_8B, LLAMA_56M, QWEN3_06B, SHAPES, TINY, Shape, shape_of
from streams import Ask, Stream, StreamFailed, by_engine, by_http, run_streams

from quire.cli.launch import LocalServices
from quire.client.worker_client import WorkerClient

RANDOM_WORKER = str(Path(__file__).with_name("random_worker.py"))
BOTH, ONE = WAYS = ("both services", "one process")
TO_REACH = 0.95
"""Tokens a second through both services, as a part of one process's."""
START_TIMEOUT_S = 300.0
MAX_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells of a run: a shape, and how many streams there are at once.

    num_prompt, num_new     tokens of each request
    """

    cells: Sequence[tuple[Shape, int]]
    dtype: str
    num_prompt: int
    num_new: int
    rounds: int
    seconds: float = float("inf")
    allow_degraded: bool = False

    @property
    def longest(self) -> int:
        return self.num_prompt + self.num_new

    def setup(self, folder: Path, shape: Shape, device: str) -> Setup:
        most = max(count for each, count in self.cells if each.short == shape.short)
        return Setup(
            model=folder,
            num_blocks=2 + most * (self.longest // BLOCK_SIZE + 2),
            block_size=BLOCK_SIZE,
            dtype=self.dtype,
            device=device,
            max_num_seqs=max(most, 8),
            max_step_tokens=MAX_STEP_TOKENS,
            max_running_sequences=max(most, 8),
        )


def cells_of(shapes: Sequence[Shape], counts: Sequence[int]) -> list[tuple[Shape, int]]:
    return [(shape, count) for shape in shapes for count in counts]


def plan_for(device: str, *, quick: bool) -> Plan:
    if quick:
        return Plan(cells_of([TINY], (1, 4)), "float32", num_prompt=8, num_new=6, rounds=1)
    if device == "cpu":
        cells = cells_of([LLAMA_56M], (1, 8, 32))
        return Plan(cells, "float32", num_prompt=64, num_new=32, rounds=3)
    cells = cells_of([QWEN3_06B, LLAMA_8B], (1, 32, 128, 256))
    return Plan(cells, "bfloat16", num_prompt=256, num_new=128, rounds=3)


@dataclass(frozen=True, slots=True)
class Round:
    """One way's streams of a cell, once."""

    tokens_per_s: float
    first_token_s: list[float]
    between_tokens_s: list[float]
    gaps: dict[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to generate, and how to read the gaps between its steps so far."""

    ask: Ask
    gaps: Callable[[], Gaps]


@dataclass(slots=True)
class Cell:
    """The rounds of a model with so many streams, by way, and how the steps ran."""

    model: str
    num_streams: int
    mode: dict[str, dict[str, str]]
    rounds: dict[str, list[Round]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def describe(self) -> dict[str, Any]:
        ways = {way: describe_rounds(rounds) for way, rounds in self.rounds.items()}
        return {
            "model": self.model,
            "num_streams": self.num_streams,
            "ways": ways,
            "ratio": self.ratio,
            "mode": self.mode,
        }

    @property
    def ratio(self) -> float:
        """Tokens a second through both services over those of one process: the median of the rounds."""
        pairs = zip(self.rounds[BOTH], self.rounds[ONE], strict=True)
        return statistics.median(both.tokens_per_s / one.tokens_per_s for both, one in pairs)


def describe_rounds(rounds: Sequence[Round]) -> dict[str, Any]:
    """Of all rounds together; the gaps are those of the round in the middle by their mean."""
    first = [seconds for each in rounds for seconds in each.first_token_s]
    between = [seconds for each in rounds for seconds in each.between_tokens_s] or [0.0]
    by_gap = sorted(rounds, key=lambda each: each.gaps.get("mean_us", 0.0))
    return {
        "tokens_per_s": [round(each.tokens_per_s, 1) for each in rounds],
        **quantiles("first_token_ms", first),
        **quantiles("between_tokens_ms", between),
        "step_gap": by_gap[len(by_gap) // 2].gaps,
    }


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{percent}": round(1e3 * float(np.percentile(seconds, percent)), 3) for percent in (50, 99)}


@contextlib.asynccontextmanager
async def both_services(
    setup: Setup, *, max_model_len: int, allow_degraded: bool
) -> AsyncIterator[tuple[Way, dict[str, str]]]:
    """Yield the way through the gateway, and how the worker's steps run. Raises DegradedError."""
    flags = ("--dtype", setup.dtype, "--device", setup.device, "--block-size", str(setup.block_size))
    flags += ("--max-num-seqs", str(setup.max_num_seqs), "--max-step-tokens", str(setup.max_step_tokens))
    flags += ("--max-model-len", str(max_model_len), "--metrics-listen", "127.0.0.1:0")
    async with LocalServices(
        model=setup.model,
        num_blocks=setup.num_blocks,
        extra_worker_args=flags,
        http_listen=("127.0.0.1:0",),
        extra_gateway_args=("--served-model-name", "measured"),
        worker_target=RANDOM_WORKER,
        worker_start_timeout_s=START_TIMEOUT_S,
    ) as services:
        assert services.gateway is not None
        page = metrics_url(services)
        yield (
            Way(by_http(services.gateway.urls[0], "measured"), lambda: gaps_of_page(read_page(page))),
            await mode_of_worker(services.worker_address, allow_degraded=allow_degraded),
        )
        await mode_of_worker(services.worker_address, allow_degraded=allow_degraded)  # a kernel may have been compiled


async def mode_of_worker(address: str, *, allow_degraded: bool) -> dict[str, str]:
    worker = WorkerClient(address)
    try:
        model, statistics_ = await worker.get_model(), await worker.get_statistics()
    finally:
        await worker.close()
    parts = {part.part: (part.mode, part.degraded_reason) for part in statistics_.step_parts}
    return check_parts(parts, device=model.device, allow_degraded=allow_degraded)


def metrics_url(services: LocalServices) -> str:
    log = services.worker.log_path
    assert log is not None
    (address,) = re.findall(r" metrics address=(\S+)", log.read_text())
    return f"http://{address}/metrics"


def read_page(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as page:
        return str(page.read().decode())


def prompts(shape: Shape, plan: Plan, count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    drawn: list[list[int]] = generator.integers(3, shape.config.vocab_size, (count, plan.num_prompt)).tolist()
    return drawn


async def measure_round(way: Way, shape: Shape, plan: Plan, count: int, seed: int) -> Round:
    """Raises StreamFailed."""
    before, began = way.gaps(), time.perf_counter()
    streams: list[Stream] = await run_streams(
        way.ask, prompts(shape, plan, count, seed), plan.num_new, seconds=plan.seconds
    )
    ended = max(stream.times[-1] for stream in streams)
    return Round(
        tokens_per_s=sum(stream.num_tokens for stream in streams) / (ended - began),
        first_token_s=[stream.first_token_s for stream in streams],
        between_tokens_s=[gap_s for stream in streams for gap_s in stream.gaps_s],
        gaps=way.gaps().since(before).describe(),
    )


@dataclass(slots=True)
class Run:
    """The results so far. A model that can't be measured is an error or is left out, with the reason."""

    plan: Plan
    device: str
    progress: Progress
    changed: Callable[[Run], None]
    cells: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        task = self.progress.add_task("services", total=len(self.plan.cells) * self.plan.rounds)
        for short, group in groupby(self.plan.cells, lambda cell: cell[0].short):
            try:
                await self._measure_model(SHAPES[short], [count for _, count in group], task)
            except DegradedError as error:
                self.errors.append(f"{short}: {error}")
            except (StreamFailed, RuntimeError, OSError) as error:
                self.left_out.append(f"{short}: {next(iter(str(error).splitlines()), repr(error))}")
            self.changed(self)

    async def _measure_model(self, shape: Shape, counts: Sequence[int], task: Any) -> None:
        plan, max_model_len = self.plan, self.plan.longest + BLOCK_SIZE
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shape.config.architectures = [shape.architecture]
            shape.config.save_pretrained(folder)
            number_tokenizer(folder, shape.config.vocab_size)
            setup = plan.setup(folder, shape, self.device)
            async with contextlib.AsyncExitStack() as stack:
                services, mode = await stack.enter_async_context(
                    both_services(setup, max_model_len=max_model_len, allow_degraded=plan.allow_degraded)
                )
                dtype, device = getattr(torch, plan.dtype), torch.device(self.device)
                model = shape.load(dtype=dtype, device=device, max_model_len=max_model_len)
                running = await stack.enter_async_context(one_process(setup, model=model))
                modes = {BOTH: mode, ONE: check_modes(model, allow_degraded=plan.allow_degraded)}
                own = running.gaps
                assert own is not None
                alone = Way(by_engine(running.engine), lambda: gaps_of_buckets(own.buckets(), own.sum_s))
                ways = {BOTH: services, ONE: alone}
                for way in ways.values():  # the first requests compile, open connections, fill caches
                    await measure_round(way, shape, replace(plan, num_new=4), max(counts), seed=0)
                for count in counts:
                    await self._measure_cell(shape, count, ways, modes, task)

    async def _measure_cell(
        self, shape: Shape, count: int, ways: dict[str, Way], modes: dict[str, dict[str, str]], task: Any
    ) -> None:
        cell = Cell(shape.name, count, modes)
        for seed in range(1, self.plan.rounds + 1):
            self.progress.update(task, description=f"{shape.name}: {count}")
            for name in WAYS if seed % 2 else WAYS[::-1]:
                cell.rounds[name].append(await measure_round(ways[name], shape, self.plan, count, seed))
            self.progress.advance(task)
        self.cells.append(cell)
        self.changed(self)


def chosen(plan: Plan, cells: str) -> Plan:
    """The plan of these cells alone: "0.6B 1, 8B 32". Raises click.BadParameter."""
    return replace(plan, cells=[(shape_of(name), number(count)) for name, count in split_cells(cells)])


def gpu_items(given: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what lists of the JSON have on a GPU with these parameters: the fields that name each item."""
    plan = plan_for("cuda", quick=False)
    cells = plan.cells if given["cells"] is None else chosen(plan, given["cells"]).cells
    return {"cells": [{"model": shape.name, "num_streams": str(count)} for shape, count in cells]}


def figures_of(run: Run) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if run.device == "cuda" else f"CPU, {NUM_CORES} threads",
        "num_prompt": run.plan.num_prompt,
        "cells": [cell.describe() for cell in run.cells],
        "left_out": run.left_out,
        "errors": run.errors,
    }


def measure_all(
    quick: bool,
    progress: Progress,
    *,
    cells: str | None,
    seconds: float | None,
    json_path: Path | None,
    allow_degraded: bool,
) -> Findings:
    device = "cuda" if torch.cuda.is_available() and not quick else "cpu"
    plan = plan_for(device, quick=quick)
    plan = replace(plan if cells is None else chosen(plan, cells), allow_degraded=allow_degraded)
    plan = plan if seconds is None else replace(plan, seconds=seconds)

    def write_so_far(run: Run) -> None:
        if json_path is not None:
            write_json(figures_of(run), json_path)

    run = Run(plan, device, progress, write_so_far)
    asyncio.run(run.run())
    figures = figures_of(run)
    notes = [f"Device: {figures['device']}. Prompts of {plan.num_prompt} tokens."]
    notes.append(f"Tokens a second through both services, as a part of one process's, to reach: {TO_REACH}.")
    notes += [f"Left out: {each}." for each in run.left_out]
    notes += [
        f"Mode, {cell.model}, {way}: " + "; ".join(f"{part}: {how}" for part, how in mode.items()) + "."
        for cell in run.cells[:1]
        for way, mode in cell.mode.items()
    ]
    return Findings([table_of(run)], figures, None, notes, errors=run.errors)


def table_of(run: Run) -> Table:
    made = table(
        "both services and one process",
        *("model", "streams", "way", "tokens/s", "of one process", "first token, ms: p50", "p99"),
        *("between tokens, ms: p50", "p99", "step gap, µs: mean", "p50", "p99"),
        words=3,
    )
    for cell in run.cells:
        for way, found in cell.describe()["ways"].items():
            gap = found["step_gap"]
            made.add_row(
                *(cell.model, str(cell.num_streams), way, f"{statistics.median(found['tokens_per_s']):,.0f}"),
                f"{cell.ratio:.2f}" if way == BOTH else "",
                *(f"{found[f'{name}_ms_p{p}']:.2f}" for name in ("first_token", "between_tokens") for p in (50, 99)),
                *(f"{gap[name]:.0f}" if name in gap else "" for name in ("mean_us", "p50_us", "p99_us")),
            )
    return made


OPTIONS = [
    click.Option(
        ["--cells"],
        metavar="CELLS",
        help="Only these: a model and streams at once, '0.6B 1, 8B 32'. Models: " + ", ".join(SHAPES) + ".",
    ),
    click.Option(["--seconds"], type=float, help="Streams of a round end after that, with the tokens that they have."),
    click.Option(
        ["--json", "json_path"],
        type=click.Path(path_type=Path, dir_okay=False),
        help="A file with the figures so far, written again after each cell.",
    ),
    ALLOW_DEGRADED,
]
main = benchmark("serve-gpu", measure_all, packages=("torch", "transformers", "triton", "grpcio"), options=OPTIONS)

if __name__ == "__main__":
    main()
