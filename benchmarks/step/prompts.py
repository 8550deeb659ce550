"""Steps of prompts by what of them is replayed as CUDA graphs.

    quire bench step prompts --output benchmarks/results
    quire bench step prompts --model Qwen3-0.6B --way whole

Random weights. Each prompt step is launched before the one in front of it is collected, as a worker does. Ways:

    pieces-512      steps of up to 512 tokens in pieces: --max-graph-tokens 512
    pieces          as many tokens as the model decides: the default
    pieces-8192     steps of up to 8,192 tokens in pieces: --max-graph-tokens 8192
    whole           small steps as one graph: --max-whole-graph-tokens 1024, the others as pieces-8192
    none            no graphs of prompts: --max-graph-tokens 0

The seconds and the memory of a way are those of all its graphs, decode steps of 8 sequences included. On a CPU nothing
is replayed, and all ways are the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import click
import torch
from cells import LEASE, WARM_UP_STEPS, Cell, make_steps
from engines import NUM_CORES
from in_process import make_executor
from report import Findings, benchmark, table
from rich.progress import Progress
from roofline import synchronize
from running import computed
from shapes import BLOCK_SIZE, LLAMA_1B, LLAMA_8B, QWEN3_06B, QWEN3_17B, TINY, Shape
from worker_flags import DEFAULTS, WorkerFlags

from quire.worker.device.capture import free_bytes
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor

CELLS = (Cell(1, 0, 64), Cell(1, 0, 512), Cell(1, 0, 1024), Cell(1, 0, 2048), Cell(8, 0, 1024))
QUICK_CELLS = (Cell(1, 0, 9), Cell(2, 0, 5))
SHAPES = (QWEN3_06B, LLAMA_1B, QWEN3_17B, LLAMA_8B)
WAYS = {
    "pieces-512": WorkerFlags(max_graph_tokens=512),
    "pieces": DEFAULTS,
    "pieces-8192": WorkerFlags(max_graph_tokens=8192),
    "whole": WorkerFlags(max_graph_tokens=8192, max_whole_graph_tokens=1024),
    "none": WorkerFlags(max_graph_tokens=0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of each step, from the end of the one before it to its own; what was captured, and its cost."""

    model: str
    way: str
    cell: str
    step_ms: list[float]
    forward_ms: float
    graph_tokens: int
    whole_graph_tokens: int
    capture_s: float
    capture_mib: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


def measure_way(shape: Shape, model: PagedModel, way: str, cells: Sequence[Cell], *, num_steps: int) -> list[Row]:
    """The cells on one executor, which is dropped afterwards."""
    is_gpu = model.device.type == "cuda"
    pool = model.make_pool(num_blocks=1 + max(cell.num_blocks for cell in cells), block_size=BLOCK_SIZE)
    before, start = free_bytes(model.device) if is_gpu else 0, time.perf_counter()
    executor = make_executor(model, pool, max_num_seqs=max(cell.num_seqs for cell in cells), flags=WAYS[way])
    capture_s = time.perf_counter() - start
    taken = before - free_bytes(model.device) if is_gpu else 0
    decode, prompts = executor._decode, executor._prompts
    pieces = None if decode is None else decode.pieces
    rows = []
    for cell in cells:
        step_ms, forward_ms = time_steps(model, executor, cell, num_steps=num_steps)
        rows.append(
            Row(
                shape.name,
                way,
                cell.name,
                step_ms,
                forward_ms,
                graph_tokens=0 if pieces is None else pieces.buckets[-1],
                whole_graph_tokens=0 if prompts is None else prompts.shapes[-1].num_tokens,
                capture_s=round(capture_s, 2),
                capture_mib=round(taken / 2**20, 1),
            )
        )
    return rows


def time_steps(model: PagedModel, executor: Executor, cell: Cell, *, num_steps: int) -> tuple[list[float], float]:
    """Milliseconds between the ends of steps, and the median of the forward on the device."""
    steps = make_steps(cell, WARM_UP_STEPS + num_steps + 1, vocab_size=model.vocab_size)
    synchronize(model.device)
    in_flight, ends, forwards = executor.launch(steps[0]), [], []
    for step in steps[1:]:
        following = executor.launch(step)
        forwards.append(1e3 * computed(in_flight.collect()).forward_s)
        ends.append(time.perf_counter())
        in_flight = following
    computed(in_flight.collect())
    executor.fence_lease(LEASE)
    gaps = [round(1e3 * (end - begin), 4) for begin, end in pairwise(ends)]
    return gaps[WARM_UP_STEPS - 1 :], round(statistics.median(forwards[WARM_UP_STEPS:]), 4)


def measure(quick: bool, progress: Progress, *, model: Sequence[str], way: Sequence[str]) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    torch.set_num_threads(NUM_CORES)
    is_small = device.type == "cpu"
    shapes = (TINY,) if is_small else [shape for shape in SHAPES if not model or shape.name in model]
    ways, cells = list(way or WAYS), QUICK_CELLS if is_small else CELLS
    task = progress.add_task("", total=len(shapes) * len(ways))
    rows: list[Row] = []
    for shape in shapes:
        longest = max(cell.new for cell in cells) + 64
        dtype = torch.float32 if is_small else torch.bfloat16
        paged = shape.load(dtype=dtype, device=device, max_model_len=longest)
        for each in ways:
            progress.update(task, description=f"{shape.name}: {each}")
            rows += measure_way(shape, paged, each, cells, num_steps=3 if is_small else 30)
            progress.advance(task)
    figures: dict[str, Any] = {"rows": [asdict(row) | {"median_ms": row.median_ms} for row in rows]}
    made = table(
        "prompt steps, ms", *("model", "way", "step", "median", "forward", "graphs up to", "whole", "s", "MiB")
    )
    for row in rows:
        sizes = (
            f"{row.graph_tokens:,}",
            f"{row.whole_graph_tokens:,}",
            f"{row.capture_s:.1f}",
            f"{row.capture_mib:,.0f}",
        )
        made.add_row(row.model, row.way, row.cell, f"{row.median_ms:.2f}", f"{row.forward_ms:.2f}", *sizes)
    return Findings([made], figures)


def gpu_items(given: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what lists of the JSON have on a GPU with these parameters: the fields that name each item."""
    models = [shape.name for shape in SHAPES if shape.name in (given["model"] or [each.name for each in SHAPES])]
    rows = product(models, given["way"] or WAYS, CELLS)
    return {"rows": [{"model": model, "way": way, "cell": cell.name} for model, way, cell in rows]}


OPTIONS = [
    click.Option(
        ["--model"], multiple=True, type=click.Choice([shape.name for shape in SHAPES]), help="Only these, on a GPU."
    ),
    click.Option(["--way"], multiple=True, type=click.Choice(list(WAYS)), help="Only these."),
]
main = benchmark("step prompts", measure, packages=("torch", "transformers", "triton"), options=OPTIONS)

if __name__ == "__main__":
    main()
