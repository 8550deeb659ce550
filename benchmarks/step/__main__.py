"""The worker's step against the device's limits: decode and prompt steps, and whole workloads on a GPU.

    quire bench step --output benchmarks/results        on a GPU if there is one, else on the CPU

Random weights. A step's least time follows from a copy and a large matrix product measured in the same run: weights
read once or multiplied, keys and values read once. On a GPU, bfloat16: the shapes of Llama 3.1 8B, Llama 3.2 1B, Qwen3
0.6B and 1.7B, then the engine, cachemgr's books and the executor in one process on 256 requests of 1,024 prompt tokens
and 1,024 new ones each (a Qwen3 8B shape), and on 256 requests of 100 to 1,024 each (a Qwen3 0.6B shape), beside
transformers' continuous batching. On a CPU: a Llama of 56 million parameters in float32 and bfloat16.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from cells import Cell, Timing, fits, measure
from engines import NUM_CORES
from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, percent, plain, spread, table
from rich.progress import Progress
from rich.table import Table
from roofline import Ceilings, measure_ceilings
from shapes import LLAMA_1B, LLAMA_8B, LLAMA_56M, QWEN3_06B, QWEN3_8B, QWEN3_17B, TINY, Shape
from workloads import Served, Work, equal_lengths, mixed_lengths, serve

GRID = tuple(Cell(num_seqs, cached) for cached in (1024, 8192) for num_seqs in (1, 8, 32, 128, 256))
# The targets of a decode step on an H200, ms: must and goal.
TO_REACH_MS = {
    ("Llama-3.1-8B", 1, 1024): (5.0, 4.4),
    ("Llama-3.1-8B", 32, 1024): (6.0, 5.4),
    ("Llama-3.1-8B", 128, 1024): (9.7, 8.8),
    ("Llama-3.1-8B", 32, 8192): (14.3, 12.9),
    ("Llama-3.2-1B", 1, 1024): (1.15, 0.80),
    ("Qwen3-0.6B", 1, 1024): (0.95, 0.60),
    ("Qwen3-0.6B", 128, 1024): (5.2, 4.6),
    ("Qwen3-1.7B", 32, 1024): (2.6, 2.1),
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
    works = (equal_lengths(QWEN3_8B), mixed_lengths(QWEN3_06B))
    shapes = (LLAMA_8B, LLAMA_1B, QWEN3_06B, QWEN3_17B)
    return Plan(shapes, (torch.bfloat16,), (*GRID, *PROMPTS), works, 30, copy_bytes=4 << 30, product_size=8192)


def cpu_plan(*, float32: bool) -> Plan:
    decodes = [Cell(num_seqs, cached) for cached in (128, 1024) for num_seqs in (1, 4, 16, 64)]
    prompts = [Cell(1, 0, 128), Cell(1, 0, 1024), Cell(1, 1024, 256)]
    dtypes = (torch.float32,) if float32 else (torch.float32, torch.bfloat16)
    return Plan((LLAMA_56M,), dtypes, (*decodes, *prompts), (), 15, copy_bytes=1 << 28, product_size=2048)


def quick_plan() -> Plan:
    works = (
        equal_lengths(TINY, num_requests=2, prompt=6, output=3),
        mixed_lengths(TINY, num_requests=2, limits=(2, 6)),
    )
    cells = (Cell(2, 20), Cell(1, 0, 9), Cell(1, 8, 5))
    return Plan((TINY,), (torch.float32,), cells, works, 2, copy_bytes=1 << 16, product_size=32)


@dataclass(frozen=True, slots=True)
class Measured:
    ceilings: dict[str, Ceilings]
    timings: list[Timing]
    served: list[Served]
    left_out: list[str]


def run(plan: Plan, device: torch.device, progress: Progress) -> Measured:
    ceilings = {}
    timings, served, left_out = [], [], []
    pieces = len(plan.shapes) * len(plan.dtypes) * len(plan.cells) + len(plan.works)
    task = progress.add_task("ceilings", total=pieces)
    for dtype in plan.dtypes:
        ceilings[str(dtype).removeprefix("torch.")] = measure_ceilings(
            device, dtype, num_bytes=plan.copy_bytes, size=plan.product_size
        )
    for shape in plan.shapes:
        for dtype in plan.dtypes:
            model = shape.load(dtype=dtype, device=device, max_model_len=longest(plan.cells))
            for cell in plan.cells:
                progress.update(task, description=f"{shape.name} {dtype}: {cell.name}")
                if fits(cell, model):
                    limits = TO_REACH_MS.get((shape.name, cell.num_seqs, cell.cached)) if cell.new == 1 else None
                    barred = Cell(cell.num_seqs, cell.cached, cell.new, *(limits or ()))
                    known = ceilings[str(dtype).removeprefix("torch.")]
                    timings.append(measure(shape, model, barred, known, num_steps=plan.num_steps))
                else:
                    left_out.append(f"{shape.name}, {cell.name}: memory")
                free(device)
                progress.advance(task)
            del model
            free(device)
    for work in plan.works:
        progress.update(task, description=work.name)
        dtype = plan.dtypes[0]
        served += asyncio.run(serve(work, dtype=dtype, device=device, ceilings=next(iter(ceilings.values()))))
        free(device)
        progress.advance(task)
    return Measured(ceilings, timings, served, left_out)


def longest(cells: Sequence[Cell]) -> int:
    return max(cell.cached + cell.new for cell in cells) + 64


def free(device: torch.device) -> None:
    """Frees unused memory before the next piece reads the free memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_all(quick: bool, progress: Progress, *, float32: bool) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    torch.set_num_threads(NUM_CORES)
    plan = quick_plan() if quick else gpu_plan() if device.type == "cuda" else cpu_plan(float32=float32)
    measured = run(plan, device, progress)
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
        if kind == "decode":
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
main = benchmark("step", measure_all, packages=("torch", "transformers", "triton"), flags=FLAGS)

if __name__ == "__main__":
    main()
