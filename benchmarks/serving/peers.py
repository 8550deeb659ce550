"""Tokens per second of the engine beside transformers and llama.cpp on the same model and work, on a CPU.

    quire bench serving peers

Rows: transformers' `generate` on static batches of 16, its continuous batching, llama.cpp with 16 slots, Quire through
the two real processes, and Quire with both services in this process (the difference is the cost of the process
boundary). The rows take turns in every round, so that other load of the machine hits all of them; medians of the
rounds. Greedy, float32, random weights, 16 sequences at a time; prefix caches are emptied before each run; every
row's tokens are compared with the first row's.

Three more rows have the linear layers in 8 bits, and no others: llama.cpp's Q8_0, which rounds the inputs of products
to 8 bits too; Quire's `--quantization int8`, which does the same; and int8 weights with inputs in bfloat16, as they
are. Their tokens are those of other weights. Then Quire's time in one process is told by part, beside bounds.

llama.cpp needs an environment of its own:

    python3 -m venv .venv-peers/llama_cpp
    .venv-peers/llama_cpp/bin/pip install -r benchmarks/serving/llama_cpp_requirements.txt
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import continuous_batching
import numpy as np
import torch
from engines import NUM_CORES, Running, Setup, generate, one_process, two_processes
from environments import ENVIRONMENTS, python_of
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m
from parts import PartTimes, describe, measure_cpu, parts_table, time_parts
from report import Findings, benchmark, plain, spread, table
from rich.progress import Progress
from roofline import Ceilings
from shapes import LLAMA_56M
from transformers import LlamaForCausalLM

from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.quantization.at_load import quantize_at_load
from quire.worker.quantization.inputs import KEEP, InputRounding

BATCH = 16
BLOCK_SIZE = 16
NUM_BLOCKS = 512
MAX_STEP_TOKENS = 2048
ROUNDS, QUICK_ROUNDS = 3, 1
LLAMA_CPP_PYTHON = python_of("llama_cpp")
QUANTIZED = {"Q8_0"}
"""Of llama.cpp's kinds of weights."""

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how many tokens to generate for each."""

    name: str
    prompts: Tokens
    num_new: list[int]

    @property
    def num_generated(self) -> int:
        return sum(self.num_new)


async def nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Row:
    """One way to do the work; returns the tokens generated, per prompt. `forget` is called before, untimed."""

    name: str
    generate: Callable[[Workload], Awaitable[Tokens]]
    forget: Callable[[], Awaitable[object]] = nothing


@dataclass(frozen=True, slots=True)
class Measurement:
    workload: str
    row: str
    seconds: list[float]
    num_generated: int
    equal_sequences: int
    num_sequences: int

    @property
    def tokens_per_s(self) -> list[float]:
        return [self.num_generated / seconds for seconds in self.seconds]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


def workloads(vocab_size: int, *, quick: bool) -> list[Workload]:
    """Equal lengths: the best case of a static batch. Mixed lengths: what serving sees."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    if quick:
        equal = Workload("equal 2 x (8 + 3)", [draw(3, vocab_size, 8) for _ in range(2)], [3] * 2)
        return [equal, Workload("mixed 3", [draw(3, vocab_size, length) for length in (4, 9, 6)], [4, 2, 3])]
    equal = Workload("equal 16 x (128 + 64)", [draw(3, vocab_size, 128) for _ in range(16)], [64] * 16)
    lengths = draw(16, 241, 32)
    mixed = Workload(
        "mixed 32 x (16..240 + 8..120)", [draw(3, vocab_size, length) for length in lengths], draw(8, 121, 32)
    )
    return [equal, mixed]


# -- the rows ---------------------------------------------------------------------------------------------------------


def static_batches(model: LlamaForCausalLM) -> Row:
    """Left-padded batches of 16, each as long as its longest."""

    async def run(work: Workload) -> Tokens:
        results: Tokens = []
        for first in range(0, len(work.prompts), BATCH):
            prompts, num_new = work.prompts[first : first + BATCH], work.num_new[first : first + BATCH]
            width = max(map(len, prompts))
            input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            output = model.generate(
                input_ids,
                attention_mask=mask,
                max_new_tokens=max(num_new),
                min_new_tokens=max(num_new),
                do_sample=False,
            )
            results += [row[width : width + count].tolist() for row, count in zip(output, num_new, strict=True)]
        return results

    return Row("transformers, static batch", run)


def batched_continuously(model: LlamaForCausalLM) -> Row:
    """transformers' continuous batching, sized to the work."""
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_batch_tokens": MAX_STEP_TOKENS}

    async def run(work: Workload) -> Tokens:
        return continuous_batching.generate(model, work.prompts, work.num_new, **sizes)

    return Row("transformers, continuous batching", run)


def write_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights as LlamaCpp reads them."""
    np.savez(folder / "weights.npz", **{name: tensor.float().numpy() for name, tensor in model.state_dict().items()})


class LlamaCpp:
    """The driver's process, with the same weights."""

    def __init__(self, folder: Path, threads: int, kind: str, *options: str) -> None:
        """Raises RuntimeError if it does not start."""
        driver = Path(__file__).with_name("llama_cpp_driver.py")
        command = [*map(str, (LLAMA_CPP_PYTHON, driver, folder, threads, BATCH, kind, *options))]
        self._kind, self.options = kind, options
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version: str = self._hear()["version"]

    @classmethod
    def started(cls, folder: Path, threads: int, kind: str) -> Self:
        """The driver; without AMX if it does not start with it."""
        try:
            return cls(folder, threads, kind)
        except RuntimeError:
            return cls(folder, threads, kind, "plain")

    def row(self) -> Row:
        async def run(work: Workload) -> Tokens:
            return await asyncio.to_thread(self._run, work)

        return Row("llama.cpp, 16 slots" + (f", {self._kind}" if self._kind in QUANTIZED else ""), run)

    def _run(self, work: Workload) -> Tokens:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": work.prompts, "num_new": work.num_new}) + "\n")
        self._process.stdin.flush()
        tokens: Tokens = self._hear()["tokens"]
        return tokens

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's driver ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def engine_row(name: str, running: Running) -> Row:
    async def run(work: Workload) -> Tokens:
        return await generate(running.engine, work.prompts, work.num_new)

    return Row(name, run, running.forget)


def load_plain(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval().requires_grad_(False)


def prepared(model: LlamaForCausalLM) -> PagedModel:
    return prepare_model(model, max_model_len=LLAMA_56M.config.max_position_embeddings)


def load_int8(folder: Path, dtype: torch.dtype, inputs: InputRounding | None = None) -> PagedModel:
    """A model with int8 in its linear layers, as the worker quantizes it, or with these inputs."""
    model = load_plain(folder, dtype)
    quantize_at_load(model, "int8", inputs)
    return prepared(model)


# -- measuring --------------------------------------------------------------------------------------------------------


async def measure_rows(
    rows: Sequence[Row], works: Sequence[Workload], rounds: int, progress: Progress
) -> list[Measurement]:
    """Every row once in every round, after one round that does not count."""
    seconds: dict[tuple[str, str], list[float]] = {(work.name, row.name): [] for work in works for row in rows}
    tokens: dict[tuple[str, str], Tokens] = {}
    task = progress.add_task("", total=(rounds + 1) * len(works) * len(rows))
    for number in range(rounds + 1):
        for work in works:
            for row in rows:
                progress.update(task, description=f"round {number}/{rounds} {work.name.split()[0]}: {row.name}")
                await row.forget()
                start = time.perf_counter()
                tokens[work.name, row.name] = await row.generate(work)
                if number:
                    seconds[work.name, row.name].append(round(time.perf_counter() - start, 4))
                progress.advance(task)
    return [
        Measurement(
            work.name,
            row.name,
            seconds[work.name, row.name],
            work.num_generated,
            equal_sequences=sum(map(list.__eq__, tokens[work.name, row.name], tokens[work.name, rows[0].name])),
            num_sequences=len(work.prompts),
        )
        for work in works
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Results:
    """All rows; llama.cpp's version, or the reason why it is not among them; and Quire's time by part."""

    measurements: list[Measurement]
    llama_cpp: str
    parts: list[PartTimes]
    ceilings: Ceilings


async def run(*, quick: bool, progress: Progress) -> Results:
    """All rows, then the parts of the last one."""
    torch.set_num_threads(NUM_CORES)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = llama_56m(directory)
        setup = Setup(directory, NUM_BLOCKS, BLOCK_SIZE, max_running_sequences=BATCH, max_step_tokens=MAX_STEP_TOKENS)
        async with AsyncExitStack() as stack:
            rows = [static_batches(model), batched_continuously(model)]
            llama_cpp = f"absent: there is no {LLAMA_CPP_PYTHON.relative_to(ENVIRONMENTS.parent)}"
            if LLAMA_CPP_PYTHON.exists():
                write_weights(model, directory)
                drivers = [
                    stack.enter_context(LlamaCpp.started(directory, NUM_CORES, kind))
                    for kind in ("F32", *sorted(QUANTIZED))
                ]
                without_amx = (
                    " without AMX, which ends its process here" if any(each.options for each in drivers) else ""
                )
                llama_cpp = drivers[0].version + without_amx
                rows += [driver.row() for driver in drivers]
            rows.append(engine_row("Quire, two services", await stack.enter_async_context(two_processes(setup))))
            for row, int8 in (
                ("Quire, in one process, int8", load_int8(directory, torch.float32)),
                ("Quire, in one process, int8 weights", load_int8(directory, torch.bfloat16, KEEP)),
            ):
                rows.append(engine_row(row, await stack.enter_async_context(one_process(setup, model=int8))))
            own = load_plain(directory)
            running = await stack.enter_async_context(one_process(setup, model=prepared(own)))
            rows.append(engine_row("Quire, in one process", running))
            works = workloads(model.config.vocab_size, quick=quick)
            rounds = QUICK_ROUNDS if quick else ROUNDS
            measurements = await measure_rows(rows, works, rounds, progress)
            ceilings = measure_cpu()
            parts = [
                await time_parts(
                    work.name,
                    work.num_generated,
                    partial(rows[-1].generate, work),
                    forget=running.forget,
                    model=own,
                    shape=LLAMA_56M,
                    ceilings=ceilings,
                    rounds=rounds,
                )
                for work in works
            ]
            return Results(measurements, llama_cpp, parts, ceilings)


def measure(quick: bool, progress: Progress) -> Findings:
    results = asyncio.run(run(quick=quick, progress=progress))
    measurements, llama_cpp = results.measurements, results.llama_cpp
    made = table(
        "tokens per second, medians",
        *("workload", "row", "tokens/s", "of static batch", "sequences equal to the first row's"),
        words=2,
    )
    baseline: dict[str, float] = {}
    for measured in measurements:
        base = baseline.setdefault(measured.workload, measured.median)
        made.add_row(
            *(measured.workload, measured.row, spread(measured.tokens_per_s), f"{measured.median / base:.2f}"),
            f"{measured.equal_sequences} of {measured.num_sequences}",
        )
    figures = {
        "threads": NUM_CORES,
        "llama_cpp": llama_cpp,
        "figures": [asdict(measured) | {"tokens_per_s": measured.median} for measured in measurements],
        "parts": describe(results.parts, results.ceilings),
    }
    notes = [f"llama.cpp (llama-cpp-python): {llama_cpp}.", f"Every row has {NUM_CORES} threads."]
    return Findings([made, parts_table(results.parts, results.ceilings)], figures, lambda: plot(measurements), notes)


def plot(measurements: Sequence[Measurement]) -> Figure:
    """Bars of the medians with the range of the rounds, one group per workload."""
    figure, axes = pyplot.subplots(figsize=(11, 4.2))
    works = list(dict.fromkeys(measured.workload for measured in measurements))
    rows = list(dict.fromkeys(measured.row for measured in measurements))
    for number, row in enumerate(rows):
        chosen = [measured for measured in measurements if measured.row == row]
        heights = [measured.median for measured in chosen]
        low = [measured.median - min(measured.tokens_per_s) for measured in chosen]
        high = [max(measured.tokens_per_s) - measured.median for measured in chosen]
        places = [index + (number - (len(rows) - 1) / 2) * 0.1 for index in range(len(works))]
        bars = axes.bar(places, heights, 0.095, yerr=[low, high], label=row, error_kw={"linewidth": 0.8})
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_xticks(range(len(works)), works)
    axes.set_ylabel("generated tokens per second")
    axes.set_title("56 M-parameter Llama on a CPU, float32 but for rows in 8 bits: medians and ranges", fontsize=10)
    axes.margins(y=0.3)
    axes.legend(fontsize=8, ncols=2, loc="upper right")
    plain(axes)
    return figure


main = benchmark("serving peers", measure, packages=("torch", "transformers", "grpcio", "numpy"))

if __name__ == "__main__":
    main()
