"""The worker's step against the device's limits: decode and prompt steps, and whole workloads on a GPU.

    quire bench step --output benchmarks/results        on a GPU if there is one, else on the CPU

    quire bench step --cells "0.6B 1x1k,8B 32x1k,0.6B prompt 512" --seconds 10 --json FILE
    quire bench step --cells "0.6B 1x1k" --each-flag    with each flag of the worker that a GPU must judge
    quire bench step --cells "56M 16x128" --each-flag   on a CPU: --deterministic, and --quantization int8, in turns

Random weights. A step's least time follows from the rates of reading and of a large matrix product, measured in the
same run: weights read once or multiplied, keys and values read once or multiplied. Steps run as in a worker: on a GPU
the next one is launched before a step is collected. The lone step is measured beside that.

On a GPU, bfloat16: the shapes of Llama 3.1 8B, Llama 3.2 1B, Qwen3 0.6B and 1.7B, then the engine, cachemgr's books and
the executor in one process on 256 requests of 1,024 prompt tokens and 1,024 new ones each (a Qwen3 8B shape), and on
256 requests of 100 to 1,024 each (a Qwen3 0.6B shape). On a CPU: a Llama of 56 million parameters in float32 and
bfloat16, and the workloads of --quick also with transformers' continuous batching.

A model that runs slower than it could (modules not fused, no graphs) is an error, unless --allow-degraded.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import torch
import worker_flags
from cell_names import number, split_cells
from cells import Cell, Timing, executor_for, fits, measure
from engines import NUM_CORES
from matplotlib import pyplot
from matplotlib.figure import Figure
from modes import ALLOW_DEGRADED, CompilationCount, DegradedError, check_modes
from report import Findings, benchmark, percent, plain, spread, table, write_json
from rich.progress import Progress
from rich.table import Table
from roofline import Ceilings, measure_ceilings
from shapes import LLAMA_1B, LLAMA_8B, LLAMA_56M, QWEN3_06B, QWEN3_8B, QWEN3_17B, SHAPES, TINY, Shape, shape_of
from worker_flags import DEFAULTS, WorkerFlags, each_alone, in_turns
from workloads import ROWS, Served, Work, equal_lengths, mixed_lengths, rows_on, serve

from quire.serving.runtime import tune_garbage_collector
from quire.worker.device.reproducible import fix_product_order
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor

GRID = (
    *(Cell(num_seqs, cached) for cached in (1024, 8192) for num_seqs in (1, 8, 32, 128, 256)),
    *(Cell(num_seqs, 1024, is_mixed=True) for num_seqs in (8, 32, 128)),
)
# The targets of a step in the steady state on an H200, by its model and its cell's name, ms: must and goal.
TO_REACH_MS = {
    ("Llama-3.1-8B", "decode 1 x 1024"): (4.2, 4.0),
    ("Llama-3.1-8B", "decode 32 x 1024"): (5.6, 5.4),
    ("Llama-3.1-8B", "decode 128 x 1024"): (9.1, 8.8),
    ("Llama-3.1-8B", "decode 32 x 8192"): (12.2, 12.0),
    ("Llama-3.2-1B", "decode 1 x 1024"): (0.95, 0.76),
    ("Qwen3-0.6B", "decode 1 x 1024"): (0.92, 0.58),
    ("Qwen3-0.6B", "decode 128 x 1024"): (4.7, 4.4),
    ("Qwen3-1.7B", "decode 32 x 1024"): (2.5, 2.25),
    ("Qwen3-0.6B", "prompt 1 x 512"): (2.2, None),
    ("Qwen3-0.6B", "prompt 1 x 2048"): (7.5, None),
}
PROMPTS = (Cell(1, 0, 512), Cell(1, 0, 2048), Cell(1, 0, 8192), Cell(1, 8192, 1024), Cell(8, 0, 1024))


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements on a kind of device. read_bytes and product_size are for the ceilings.

    flags   of the worker: steps are measured with each of them, workloads with the first
    """

    steps: Sequence[tuple[Shape, Sequence[Cell]]]
    dtypes: Sequence[torch.dtype]
    works: Sequence[Work]
    num_steps: int
    read_bytes: int
    product_size: int
    flags: Sequence[WorkerFlags] = (DEFAULTS,)
    each: Callable[[WorkerFlags], list[WorkerFlags]] = each_alone
    """The flags that --each-flag compares."""

    def cells(self) -> list[dict[str, str]]:
        """The model, the cell and the flags of each step, as in the JSON."""
        return [
            {"model": shape.name, "cell": cell.name, "flags": str(flags)}
            for shape, cells in self.steps
            for flags in self.flags
            for cell in cells
        ]


def gpu_plan() -> Plan:
    works = (mixed_lengths(QWEN3_06B), equal_lengths(QWEN3_8B))
    steps = [(shape, (*GRID, *PROMPTS)) for shape in (LLAMA_8B, LLAMA_1B, QWEN3_06B, QWEN3_17B)]
    return Plan(steps, (torch.bfloat16,), works, 30, read_bytes=4 << 30, product_size=8192)


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
    steps = [(LLAMA_56M, (*decodes, *prompts))]
    return Plan(steps, dtypes, (), 15, read_bytes=1 << 28, product_size=2048, each=in_turns)


def quick_plan() -> Plan:
    works = (
        equal_lengths(TINY, num_requests=2, prompt=6, output=3),
        mixed_lengths(TINY, num_requests=2, limits=(2, 6)),
    )
    cells = (Cell(2, 20), Cell(2, 20, is_mixed=True), Cell(1, 0, 9), Cell(1, 8, 5))
    dtypes = (torch.float32,)
    return Plan([(TINY, cells)], dtypes, works, 2, read_bytes=1 << 16, product_size=32, each=in_turns)


@dataclass(frozen=True, slots=True)
class Measured:
    """The results so far. `errors` are models that were not measured, because they ran slower than they could."""

    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a run and of a cell, and the flag about degraded models. `changed` is called after each piece."""

    minutes: float = math.inf
    cell_seconds: float = math.inf
    allow_degraded: bool = False
    changed: Callable[[Measured], None] = lambda measured: None


class Run:
    """One run: its results so far, and its time limit. A piece that fails is left out, with the reason."""

    def __init__(self, plan: Plan, device: torch.device, progress: Progress, limits: Limits) -> None:
        self.plan = plan
        self.device = device
        self.measured = Measured()
        self._limits = limits
        self._deadline = time.monotonic() + limits.minutes * 60
        self._num_compiled = CompilationCount(device)
        self._rows = rows_on(device)
        self._progress = progress
        num_pieces = len(plan.dtypes) * len(plan.cells()) + len(plan.works) * len(self._rows)
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
        if any(flags.deterministic for flags in self.plan.flags):
            fix_product_order()  # before the first product
        for dtype in self.plan.dtypes:
            self.measured.ceilings[name_of(dtype)] = measure_ceilings(
                self.device, dtype, num_bytes=self.plan.read_bytes, size=self.plan.product_size
            )
        self._serve_all(self._rows[0])
        for shape, cells in self.plan.steps:
            for dtype, flags in product(self.plan.dtypes, self.plan.flags):
                name = f"{shape.name} {name_of(dtype)} {flags}".rstrip()
                self._try(name, self._measure_steps, name, shape, cells, dtype, flags, count=0)
        for row in self._rows[1:]:
            self._serve_all(row)

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
            except DegradedError as error:
                self.measured.errors.append(f"{name}: {error}")
            except Exception as error:
                self.measured.left_out.append(f"{name}: {next(iter(str(error).splitlines()), repr(error))}")
            free(self.device)
            self._limits.changed(self.measured)
        self._progress.advance(self._task, count)

    def _measure_steps(
        self, name: str, shape: Shape, cells: Sequence[Cell], dtype: torch.dtype, flags: WorkerFlags
    ) -> None:
        """All cells; the model and its pool are loaded once."""
        model = shape.load(dtype=dtype, device=self.device, max_model_len=longest(cells), flags=flags)
        fitting = [cell for cell in cells if fits(cell, model)]
        executor = executor_for(model, fitting, flags)
        mode = check_modes(model, allow_degraded=self._limits.allow_degraded)
        for cell in cells:
            if cell in fitting:
                self._try(f"{name}: {cell.name}", self._measure_step, shape, model, executor, cell, mode, flags)
            else:
                self.measured.left_out.append(f"{name}: {cell.name}: memory")
                self._progress.advance(self._task)

    def _measure_step(
        self,
        shape: Shape,
        model: PagedModel,
        executor: Executor,
        cell: Cell,
        mode: dict[str, str],
        flags: WorkerFlags,
    ) -> None:
        must_ms, goal_ms = TO_REACH_MS.get((shape.name, cell.name), (None, None))
        barred = replace(cell, must_ms=must_ms, goal_ms=goal_ms)
        ceilings = self.measured.ceilings[name_of(model.dtype)]
        tune_garbage_collector()  # as each service does
        timing = measure(
            *(shape, model, executor, barred, ceilings),
            num_steps=self.plan.num_steps,
            seconds=self._limits.cell_seconds,
            mode=mode,
            num_compiled=self._num_compiled,
            flags=flags,
        )
        self.measured.timings.append(timing)
        self._refuse_compiled(timing.num_compiled)

    def _serve(self, work: Work, row: str) -> None:
        served = serve(
            *(work, row),
            dtype=self.plan.dtypes[0],
            device=self.device,
            ceilings=next(iter(self.measured.ceilings.values())),
            allow_degraded=self._limits.allow_degraded,
            num_compiled=self._num_compiled,
            flags=self.plan.flags[0],
        )
        self.measured.served.append(served)
        self._refuse_compiled(served.num_compiled)

    def _refuse_compiled(self, num_compiled: int) -> None:
        """Raise DegradedError if kernels were compiled in measured steps. The figure is kept, with their number."""
        if num_compiled and not self._limits.allow_degraded:
            raise DegradedError(f"degraded: kernels: {num_compiled} compiled while it was measured")


def chosen(plan: Plan, cells: str) -> Plan:
    """The plan of these cells alone, without workloads. Raises click.BadParameter."""
    found = [(shape_of(name), cell_of(sizes)) for name, sizes in split_cells(cells)]
    steps = [
        (SHAPES[short], [cell for _, cell in group]) for short, group in groupby(found, lambda each: each[0].short)
    ]
    return replace(plan, steps=steps, works=())


def cell_of(sizes: str) -> Cell:
    """The cell of "32x1k", "32x1k mixed", "prompt 512", "prompt 8x1k" or "prompt 1k on 8k". Raises BadParameter."""
    if decode := re.fullmatch(r"(\d+)x(\w+)( mixed)?", sizes):
        return Cell(int(decode[1]), number(decode[2]), is_mixed=bool(decode[3]))
    if prompt := re.fullmatch(r"prompt (?:(\d+)x)?(\w+)(?: on (\w+))?", sizes):
        return Cell(int(prompt[1] or 1), number(prompt[3] or "0"), number(prompt[2]))
    raise click.BadParameter(f"--cells: {sizes!r} is neither like '32x1k' nor like 'prompt 8x1k on 8k'")


def planned(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan's parts that the command's parameters choose. Raises click.BadParameter."""
    flags = WorkerFlags.of(given)
    part = only(plan, given["model"] or ()) if given["cells"] is None else chosen(plan, given["cells"])
    return replace(part, flags=part.each(flags) if given["each_flag"] else [flags])


def gpu_items(given: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what lists of the JSON have on a GPU with these parameters: the fields that name each item."""
    plan = planned(gpu_plan(), given)
    works = [{"work": work.name, "row": ROWS[0]} for work in plan.works]
    return {"steps": plan.cells(), "workloads": works}


def only(plan: Plan, models: Sequence[str]) -> Plan:
    """The plan's parts that are of these models; all if none is named. Raises click.BadParameter."""
    names = sorted({shape.name for shape, _ in plan.steps} | {work.shape.name for work in plan.works})
    for model in models:
        if model not in names:
            raise click.BadParameter(f"{model!r} is not measured here: must be one of {', '.join(names)}")
    if not models:
        return plan
    steps = [(shape, cells) for shape, cells in plan.steps if shape.name in models]
    return replace(plan, steps=steps, works=[work for work in plan.works if work.shape.name in models])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def longest(cells: Sequence[Cell]) -> int:
    return max(max(cell.starts) + cell.new for cell in cells) + 64


def free(device: torch.device) -> None:
    """Frees unused memory before the next piece reads the free memory."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_all(
    quick: bool,
    progress: Progress,
    *,
    float32: bool,
    minutes: float | None,
    seconds: float | None,
    json_path: Path | None,
    allow_degraded: bool,
    **given: Any,
) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    torch.set_num_threads(NUM_CORES)
    plan = quick_plan() if quick else gpu_plan() if device.type == "cuda" else cpu_plan(float32=float32)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {NUM_CORES} threads"

    def write_so_far(measured: Measured) -> None:
        if json_path is not None:
            write_json(figures_of(measured, name), json_path)

    limits = Limits(
        math.inf if minutes is None else minutes,
        math.inf if seconds is None else seconds,
        allow_degraded,
        write_so_far,
    )
    measured = Run(planned(plan, given), device, progress, limits).run()
    write_so_far(measured)
    notes = [f"Device: {name}.", *(f"Left out: {each}." for each in measured.left_out)]
    notes += [
        f"Ceilings, {dtype}: {found.bytes_per_s / 1e9:,.0f} GB/s read, "
        f"{statistics.median(found.copy_samples) / 1e9:,.0f} copied, {found.flops_per_s / 1e12:,.2f} TFLOP/s."
        for dtype, found in measured.ceilings.items()
    ]
    notes += [f"Mode, {model}: {mode}." for model, mode in modes_of(measured).items()]
    file_name = "step" if device.type == "cuda" else "step_cpu"
    return Findings(
        tables(measured),
        figures_of(measured, name),
        lambda: plot(measured),
        notes,
        file_name=file_name,
        errors=measured.errors,
    )


def figures_of(measured: Measured, device: str) -> dict[str, Any]:
    return {
        "device": device,
        "ceilings": {dtype: found.describe() for dtype, found in measured.ceilings.items()},
        "steps": [timing.describe() for timing in measured.timings],
        "workloads": [served.describe() for served in measured.served],
        "left_out": measured.left_out,
        "errors": measured.errors,
    }


def modes_of(measured: Measured) -> dict[str, str]:
    """How each model's steps ran, in a line."""
    modes = {f"{timing.model}, {timing.dtype} {timing.flags}".rstrip(): timing.mode for timing in measured.timings}
    modes |= {served.work: served.mode for served in measured.served if served.mode}
    return {name: "; ".join(f"{part}: {how}" for part, how in mode.items()) for name, mode in modes.items()}


def tables(measured: Measured) -> list[Table]:
    steps = table(
        "a step, ms",
        *("model", "dtype", "step", "bound", "steady", "of the bound", "must", "goal", "lone"),
        *("gap", "prepare", "forward", "sample"),
        words=3,
    )
    for timing in measured.timings:
        steps.add_row(
            *(timing.model, timing.dtype, f"{timing.cell} {timing.flags}".rstrip()),
            *(f"{timing.bound_ms:.3f}", spread(timing.step_ms, ".3f")),
            percent(timing.of_bound, 0),
            *("" if value is None else f"{value:g}" for value in (timing.must_ms, timing.goal_ms)),
            f"{timing.lone_median_ms:.3f}",
            "" if timing.gap_ms is None else f"{timing.gap_ms:.3f}",
            *(f"{value:.3f}" for value in (timing.prepare_ms, timing.forward_ms, timing.sample_ms)),
        )
    if not measured.served:
        return [steps]
    works = table("whole workloads", "work", "row", "tokens/s", "bound", "of the bound", "must", words=2)
    for served in measured.served:
        works.add_row(
            *(served.work, served.row, f"{served.tokens_per_s:,.0f}", f"{served.bound_tokens_per_s:,.0f}"),
            percent(served.tokens_per_s / served.bound_tokens_per_s, 0),
            "" if served.must is None else percent(served.must, 0) if served.must <= 1 else f"{served.must:,.0f}",
        )
    return [steps, works]


def plot(measured: Measured) -> Figure:
    """Each decode step's time over its least time, by batch; a line for each model, dtype and context."""
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    lines: dict[str, list[tuple[int, float]]] = {}
    for timing in measured.timings:
        kind, _, size = timing.cell.partition(" ")
        if kind == "decode" and not size.endswith(" mixed") and not timing.flags:
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
OPTIONS = [
    click.Option(["--minutes"], type=float, help="No further piece is begun after that."),
    click.Option(["--model"], multiple=True, metavar="NAME", help="Only this model, or these."),
    click.Option(
        ["--cells"],
        metavar="CELLS",
        help="Only these steps, without workloads: '0.6B 1x1k, 8B 32x1k mixed, 0.6B prompt 8x1k on 8k'. Models: "
        + ", ".join(SHAPES)
        + ".",
    ),
    click.Option(["--seconds"], type=float, help="A cell's steps end after that, in each of its two ways."),
    click.Option(
        ["--json", "json_path"],
        type=click.Path(path_type=Path, dir_okay=False),
        help="A file with the figures so far, written again after each cell.",
    ),
    click.Option(
        ["--each-flag"],
        is_flag=True,
        help="On a GPU, also with each of these flags that it must judge, and all; on a CPU, as it is, with "
        "--deterministic and with --quantization int8, in turns.",
    ),
    *worker_flags.OPTIONS,
    ALLOW_DEGRADED,
]
main = benchmark("step", measure_all, packages=("torch", "transformers", "triton"), flags=FLAGS, options=OPTIONS)

if __name__ == "__main__":
    main()
