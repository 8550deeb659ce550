"""The worker's step against the device's limits: decode and prompt steps, and whole workloads on a GPU.

    quire bench step --output benchmarks/results        on a GPU if there is one, else on the CPU

Random weights. A step's least time follows from a copy and a large matrix product measured in the same run: weights
read once or multiplied, keys and values read once. On a GPU, bfloat16: the shapes of Llama 3.1 8B, Llama 3.2 1B, Qwen3
0.6B and 1.7B, then the engine, cachemgr's books and the executor in one process on 256 requests of 1,024 prompt tokens
and 1,024 new ones each (a Qwen3 8B shape), and on 256 requests of 100 to 1,024 each (a Qwen3 0.6B shape), beside
transformers' continuous batching. On a CPU: a Llama of 56 million parameters in float32 and bfloat16.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from cells import Cell, Timing, executor_for, fits, measure
from engines import NUM_CORES
from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, percent, plain, spread, table
from rich.progress import Progress
from rich.table import Table
from roofline import Ceilings, measure_ceilings
from shapes import LLAMA_1B, LLAMA_8B, LLAMA_56M, QWEN3_06B, QWEN3_8B, QWEN3_17B, TINY, Shape
from workloads import ROWS, Served, Work, equal_lengths, mixed_lengths, serve

from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor

GRID = (
    *(Cell(num_seqs, cached) for cached in (1024, 8192) for num_seqs in (1, 8, 32, 128, 256)),
    *(Cell(num_seqs, 1024, is_mixed=True) for num_seqs in (8, 32, 128)),
)
# The targets of a step on an H200, by its model and its cell's name, ms: must and goal.
TO_REACH_MS = {
    ("Llama-3.1-8B", "decode 1 x 1024"): (5.0, 4.4),
    ("Llama-3.1-8B", "decode 32 x 1024"): (6.0, 5.4),
    ("Llama-3.1-8B", "decode 128 x 1024"): (9.7, 8.8),
    ("Llama-3.1-8B", "decode 32 x 8192"): (14.3, 12.9),
    ("Llama-3.2-1B", "decode 1 x 1024"): (1.15, 0.80),
    ("Qwen3-0.6B", "decode 1 x 1024"): (0.95, 0.60),
    ("Qwen3-0.6B", "decode 128 x 1024"): (5.2, 4.6),
    ("Qwen3-1.7B", "decode 32 x 1024"): (2.6, 2.1),
}
PROMPTS = (Cell(1, 0, 512), Cell(1, 0, 2048), Cell(1, 0, 8192), Cell(1, 8192, 1024), Cell(8, 0, 1024))


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements on a kind of device. copy_bytes and product_size are for the ceilings."""

    shapes: Sequence[Shape]
    dtypes: Sequence[torch.dtype]
    cells: Sequence[Cell]
    works: Sequence[Work]
    num_steps: int
    copy_bytes: int
    product_size: int


def gpu_plan() -> Plan:
    works = (mixed_lengths(QWEN3_06B), equal_lengths(QWEN3_8B))
    shapes = (LLAMA_8B, LLAMA_1B, QWEN3_06B, QWEN3_17B)
    return Plan(shapes, (torch.bfloat16,), (*GRID, *PROMPTS), works, 30, copy_bytes=4 << 30, product_size=8192)


def cpu_plan(*, float32: bool) -> Plan:
    """Products of few rows do not get slower with each row here: each number of sequences up to 8 is measured.

    Attention to sequences of other lengths takes more calls than to those of one length, so both are measured.
    """
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 16, 64)
    decodes = [Cell(count, cached) for cached in (128, 1024) for count in counts]
    decodes += [Cell(count, cached, is_mixed=True) for cached in (128, 1024) for count in counts[1:]]
    prompts = [Cell(1, cached, new) for cached, new in ((0, 8), (0, 32), (0, 128), (0, 256), (0, 512), (0, 1024))]
    prompts += [Cell(1, 1024, 64), Cell(1, 1024, 256), Cell(1, 1024, 512)]
    dtypes = (torch.float32,) if float32 else (torch.float32, torch.bfloat16)
    return Plan((LLAMA_56M,), dtypes, (*decodes, *prompts), (), 15, copy_bytes=1 << 28, product_size=2048)


def quick_plan() -> Plan:
    works = (
        equal_lengths(TINY, num_requests=2, prompt=6, output=3),
        mixed_lengths(TINY, num_requests=2, limits=(2, 6)),
    )
    cells = (Cell(2, 20), Cell(2, 20, is_mixed=True), Cell(1, 0, 9), Cell(1, 8, 5))
    return Plan((TINY,), (torch.float32,), cells, works, 2, copy_bytes=1 << 16, product_size=32)


@dataclass(frozen=True, slots=True)
class Measured:
    ceilings: dict[str, Ceilings]
    timings: list[Timing]
    served: list[Served]
    left_out: list[str]


class Run:
    """One run: its results so far, and its time limit. A piece that fails is left out, with the reason."""

    def __init__(self, plan: Plan, device: torch.device, progress: Progress, *, minutes: float | None) -> None:
        self.plan = plan
        self.device = device
        self.measured = Measured({}, [], [], [])
        self._deadline = time.monotonic() + (math.inf if minutes is None else minutes * 60)
        self._progress = progress
        num_pieces = len(plan.shapes) * len(plan.dtypes) * len(plan.cells) + len(plan.works) * len(ROWS)
        self._task = progress.add_task("ceilings", total=num_pieces)

    def run(self) -> Measured:
        """Measure, the most telling first. Ctrl-C ends it with what there is."""
        try:
            self._run_all()
        except KeyboardInterrupt:
            self.measured.left_out.append("the rest: stopped")
        works = [work.name for work in self.plan.works]
        self.measured.served.sort(key=lambda served: works.index(served.work))
        return self.measured

    def _run_all(self) -> None:
        for dtype in self.plan.dtypes:
            self.measured.ceilings[name_of(dtype)] = measure_ceilings(
                self.device, dtype, num_bytes=self.plan.copy_bytes, size=self.plan.product_size
            )
        self._serve_all(ROWS[0])
        for shape in self.plan.shapes:
            for dtype in self.plan.dtypes:
                self._try(f"{shape.name} {name_of(dtype)}", self._measure_steps, shape, dtype, count=0)
        self._serve_all(ROWS[1])

    def _serve_all(self, row: str) -> None:
        for work in self.plan.works:
            self._try(f"{work.name}, {row}", self._serve, work, row)

    def _try(self, name: str, piece: Callable[..., None], *arguments: Any, count: int = 1) -> None:
        """Run a piece, `count` of all, if there is time. The memory that it took is free afterwards."""
        self._progress.update(self._task, description=name)
        if time.monotonic() > self._deadline:
            self.measured.left_out.append(f"{name}: time")
        else:
            try:
                piece(*arguments)
            except Exception as error:
                self.measured.left_out.append(f"{name}: {next(iter(str(error).splitlines()), repr(error))}")
            free(self.device)
        self._progress.advance(self._task, count)

    def _measure_steps(self, shape: Shape, dtype: torch.dtype) -> None:
        """All cells; the model and its pool are loaded once."""
        cells, name = self.plan.cells, f"{shape.name} {name_of(dtype)}"
        model = shape.load(dtype=dtype, device=self.device, max_model_len=longest(cells))
        fitting = [cell for cell in cells if fits(cell, model)]
        executor = executor_for(model, fitting)
        for cell in cells:
            if cell in fitting:
                self._try(f"{name}: {cell.name}", self._measure_step, shape, model, executor, cell)
            else:
                self.measured.left_out.append(f"{name}: {cell.name}: memory")
                self._progress.advance(self._task)

    def _measure_step(self, shape: Shape, model: PagedModel, executor: Executor, cell: Cell) -> None:
        must_ms, goal_ms = TO_REACH_MS.get((shape.name, cell.name), (None, None))
        barred = replace(cell, must_ms=must_ms, goal_ms=goal_ms)
        ceilings = self.measured.ceilings[name_of(model.dtype)]
        timing = measure(shape, model, executor, barred, ceilings, num_steps=self.plan.num_steps)
        self.measured.timings.append(timing)

    def _serve(self, work: Work, row: str) -> None:
        ceilings = next(iter(self.measured.ceilings.values()))
        served = serve(work, row, dtype=self.plan.dtypes[0], device=self.device, ceilings=ceilings)
        self.measured.served.append(served)


def only(plan: Plan, models: Sequence[str]) -> Plan:
    """The plan's parts that are of these models; all if none is named. Raises click.BadParameter."""
    names = sorted({shape.name for shape in plan.shapes} | {work.shape.name for work in plan.works})
    for model in models:
        if model not in names:
            raise click.BadParameter(f"{model!r} is not measured here: must be one of {', '.join(names)}")
    if not models:
        return plan
    shapes = [shape for shape in plan.shapes if shape.name in models]
    return replace(plan, shapes=shapes, works=[work for work in plan.works if work.shape.name in models])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def longest(cells: Sequence[Cell]) -> int:
    return max(max(cell.starts) + cell.new for cell in cells) + 64


def free(device: torch.device) -> None:
    """Frees unused memory before the next piece reads the free memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_all(
    quick: bool, progress: Progress, *, float32: bool, minutes: float | None, model: Sequence[str]
) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    torch.set_num_threads(NUM_CORES)
    plan = quick_plan() if quick else gpu_plan() if device.type == "cuda" else cpu_plan(float32=float32)
    measured = Run(only(plan, model), device, progress, minutes=minutes).run()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {NUM_CORES} threads"
    figures = {
        "device": name,
        "ceilings": {
            dtype: {"gb_per_s": round(found.bytes_per_s / 1e9, 2), "tflop_per_s": round(found.flops_per_s / 1e12, 3)}
            for dtype, found in measured.ceilings.items()
        },
        "steps": [timing.describe() for timing in measured.timings],
        "workloads": [served.describe() for served in measured.served],
        "left_out": measured.left_out,
    }
    notes = [f"Device: {name}.", *(f"Left out: {each}." for each in measured.left_out)]
    notes += [
        f"Ceilings, {dtype}: {found.bytes_per_s / 1e9:,.0f} GB/s copied, {found.flops_per_s / 1e12:,.2f} TFLOP/s."
        for dtype, found in measured.ceilings.items()
    ]
    file_name = "step" if device.type == "cuda" else "step_cpu"
    return Findings(tables(measured), figures, lambda: plot(measured), notes, file_name=file_name)


def tables(measured: Measured) -> list[Table]:
    steps = table(
        "a step, ms",
        *("model", "dtype", "step", "bound", "median", "of the bound", "must", "goal", "prepare", "forward", "sample"),
        words=3,
    )
    for timing in measured.timings:
        steps.add_row(
            *(timing.model, timing.dtype, timing.cell, f"{timing.bound_ms:.3f}", spread(timing.step_ms, ".3f")),
            percent(timing.of_bound, 0),
            *("" if value is None else f"{value:g}" for value in (timing.must_ms, timing.goal_ms)),
            *(f"{value:.3f}" for value in (timing.prepare_ms, timing.forward_ms, timing.sample_ms)),
        )
    if not measured.served:
        return [steps]
    works = table("whole workloads", "work", "row", "tokens/s", "bound", "of the bound", words=2)
    for served in measured.served:
        works.add_row(
            *(served.work, served.row, f"{served.tokens_per_s:,.0f}", f"{served.bound_tokens_per_s:,.0f}"),
            percent(served.tokens_per_s / served.bound_tokens_per_s, 0),
        )
    return [steps, works]


def plot(measured: Measured) -> Figure:
    """Each decode step's time over its least time, by batch; a line for each model, dtype and context."""
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    lines: dict[str, list[tuple[int, float]]] = {}
    for timing in measured.timings:
        kind, _, size = timing.cell.partition(" ")
        if kind == "decode" and not size.endswith(" mixed"):
            num_seqs, _, cached = size.partition(" x ")
            points = lines.setdefault(f"{timing.model}, {timing.dtype}, {cached} tokens", [])
            points.append((int(num_seqs), timing.of_bound))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("sequences")
    axes.set_ylabel("of the bound")
    axes.set_title("decode steps: least time over measured time", fontsize=10)
    axes.legend(fontsize=7, ncols=2)
    plain(axes)
    return figure


FLAGS = {"--float32": "On a CPU: without bfloat16, in half the time."}
MINUTES = click.Option(["--minutes"], type=float, help="No further piece is begun after that.")
MODEL = click.Option(["--model"], multiple=True, metavar="NAME", help="Only this model, or these.")
main = benchmark(
    "step", measure_all, packages=("torch", "transformers", "triton"), flags=FLAGS, options=[MINUTES, MODEL]
)

if __name__ == "__main__":
    main()
