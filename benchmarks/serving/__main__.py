"""Requests one at a time, as a batch and as they arrive: with paged attention, and gathering a padded batch each step.

    quire bench serving

A GPT-2-small shape with random weights; 64 requests of 704 to 1,008 prompt tokens, 54,784 in all, and 16 new tokens
each; the engine, cachemgr's books and the worker's executor in one process. The rows differ in the attention alone: the
worker's own over the block pool, or harness/padded.py. On a GPU if there is one, in float16; otherwise on the CPU in
bfloat16. Prompts that share nothing; 64 sequences at a time, 2,048 tokens a step; prefix cache emptied before each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import decode_batch
from engines import Running, Setup, generate, load, one_process
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import gpt2_small, tiny_gpt2
from padded import gathering
from report import Findings, benchmark, plain, spread, table
from rich.progress import Progress
from torch.profiler import ProfilerActivity, profile

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.paged_model import PagedModel

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048
ATTENTIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "gathered and padded": gathering,
    "paged": contextlib.nullcontext,
}
PUBLISHED = {
    ("one at a time", "paged"): 239,
    ("offline batch", "gathered and padded"): 308,
    ("offline batch", "paged"): 1853,
    ("online arrivals", "gathered and padded"): 289,
    ("online arrivals", "paged"): 1252,
}
"""Tokens per second on a desktop GPU; a step took 57 ms gathered and 13 ms paged there."""
# Parts of a step by torch's names of operations, the first that fits.
PARTS = {
    "linear layers": ("addmm", "aten::mm", "linear", "mkldnn"),
    "attention (SDPA)": ("scaled_dot", "flash", "bmm", "softmax"),
    "gathers and copies": ("index", "gather", "copy", "clone", "contiguous", "fill", "cat", "expand", "empty"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompts are evenly spread over the range. `alone` requests are served where it is one at a time."""

    num_requests: int = 64
    prompt_tokens: tuple[int, int] = (704, 1008)
    new_tokens: int = 16
    alone: int = 16
    seconds_between_arrivals: float = 0.75
    profiled_steps: int = 5


GPU = Sizes(seconds_between_arrivals=0.01)
"""A GPU is done with a request in less time than lies between two arrivals of the default."""
QUICK = Sizes(
    num_requests=4, prompt_tokens=(8, 24), new_tokens=3, alone=2, seconds_between_arrivals=0.01, profiled_steps=2
)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of the model."""

    num_tokens: int
    num_seqs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Served:
    """All requests in one mode by one attention."""

    mode: str
    attention: str
    num_requests: int
    num_new: int
    seconds: float
    cpu_s: float
    """Processor time of the process, all threads: what others do on the machine changes it less."""
    latencies_s: list[float]
    """From each request's arrival to its last token."""
    forwards: list[tuple[int, int, float]] = field(default_factory=list)
    """Tokens, sequences and seconds of each."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_new / self.seconds


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A token of each of all sequences at their full prompts: ms of each step, and where an average step goes."""

    attention: str
    num_seqs: int
    step_ms: list[float]
    parts_ms: dict[str, float]


# -- the work ---------------------------------------------------------------------------------------------------------


def prompt_lengths(sizes: Sizes) -> list[int]:
    return np.linspace(*sizes.prompt_tokens, sizes.num_requests).round().astype(int).tolist()


def draw_prompts(sizes: Sizes, vocab_size: int) -> list[list[int]]:
    """In random order of length."""
    generator = np.random.default_rng(0)
    lengths = generator.permutation(prompt_lengths(sizes))
    return [generator.integers(1, vocab_size, length).tolist() for length in lengths]


async def one_at_a_time(running: Running, prompts: Sequence[list[int]], sizes: Sizes) -> list[float]:
    latencies = []
    for prompt in prompts[: sizes.alone]:
        start = time.perf_counter()
        await generate(running.engine, [prompt], [sizes.new_tokens])
        latencies.append(time.perf_counter() - start)
    return latencies


async def arriving(running: Running, prompts: Sequence[list[int]], sizes: Sizes, interval_s: float) -> list[float]:
    """Each request comes a random time after the one before; 0: all at once."""
    pauses = np.random.default_rng(1).exponential(1.0, len(prompts)) * interval_s

    async def serve(prompt: list[int]) -> float:
        start = time.perf_counter()
        await generate(running.engine, [prompt], [sizes.new_tokens])
        return time.perf_counter() - start

    tasks = []
    for prompt, pause in zip(prompts, pauses.tolist(), strict=True):
        await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(serve(prompt)))
    return await asyncio.gather(*tasks)


MODES: dict[str, Callable[..., Any]] = {
    "one at a time": one_at_a_time,
    "offline batch": lambda running, prompts, sizes: arriving(running, prompts, sizes, 0.0),
    "online arrivals": lambda running, prompts, sizes: arriving(
        running, prompts, sizes, sizes.seconds_between_arrivals
    ),
}


@contextlib.contextmanager
def recorded(model: PagedModel) -> Iterator[list[Forward]]:
    """The forwards that the model makes within the block."""
    forwards: list[Forward] = []
    forward = model.forward

    def timed(batch: StepBatch, pool: KVPool) -> torch.Tensor:
        start = time.perf_counter()
        logits = forward(batch, pool)
        if logits.is_cuda:
            torch.cuda.synchronize()
        forwards.append(Forward(batch.num_tokens, batch.num_seqs, round(time.perf_counter() - start, 5)))
        return logits

    model.forward = timed
    try:
        yield forwards
    finally:
        del model.forward


async def serve(setup: Setup, model: PagedModel, sizes: Sizes, progress: Progress) -> list[Served]:
    """Every mode with every attention, each once, after a short one that does not count."""
    prompts = draw_prompts(sizes, model.vocab_size)
    results = []
    task = progress.add_task("", total=len(MODES) * len(ATTENTIONS))
    async with one_process(setup, model=model) as running:
        await generate(running.engine, prompts[:2], [2, 2])
        for mode, run in MODES.items():
            for name, attention in ATTENTIONS.items():
                progress.update(task, description=f"{mode}, {name}")
                await running.forget()
                with attention(), recorded(model) as forwards:
                    start, cpu = time.perf_counter(), time.process_time()
                    latencies = await run(running, prompts, sizes)
                    seconds, cpu_s = round(time.perf_counter() - start, 3), round(time.process_time() - cpu, 3)
                rows = [(each.num_tokens, each.num_seqs, each.seconds) for each in forwards]
                rounded = [round(latency, 3) for latency in latencies]
                count = len(latencies)
                results.append(Served(mode, name, count, count * sizes.new_tokens, seconds, cpu_s, rounded, rows))
                progress.advance(task)
    return results


# -- where a step goes ------------------------------------------------------------------------------------------------


def profile_decode(model: PagedModel, sizes: Sizes) -> list[DecodeStep]:
    """A step that runs one token of each sequence, by each attention."""
    lengths = [length + 1 for length in prompt_lengths(sizes)]
    batch, num_blocks = decode_batch(lengths, block_size=BLOCK_SIZE, device=model.device)
    pool = model.make_pool(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    steps = []
    for name, attention in ATTENTIONS.items():
        with attention(), recorded(model) as forwards:
            model.forward(batch, pool)
            forwards.clear()
            for _ in range(sizes.profiled_steps):
                model.forward(batch, pool)
            times = [round(1e3 * each.seconds, 2) for each in forwards]
            steps.append(DecodeStep(name, batch.num_seqs, times, parts_of(model, batch, pool)))
    return steps


def parts_of(model: PagedModel, batch: StepBatch, pool: KVPool) -> dict[str, float]:
    """ms of one step, by torch's profiler, each operation without those that it calls."""
    on_gpu = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiled:
        model.forward(batch, pool)
    parts = dict.fromkeys([*PARTS, "everything else"], 0.0)
    for event in profiled.key_averages():
        part = next((part for part, names in PARTS.items() if any(name in event.key for name in names)), None)
        taken_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        parts[part or "everything else"] += taken_us / 1e3
    return {part: round(taken_ms, 2) for part, taken_ms in parts.items()}


# -- all of it --------------------------------------------------------------------------------------------------------


def measure(quick: bool, progress: Progress) -> Findings:
    sizes = QUICK if quick else GPU if torch.cuda.is_available() else Sizes()
    device, dtype = ("cuda", "float16") if torch.cuda.is_available() else ("cpu", "bfloat16")
    with tempfile.TemporaryDirectory() as name:
        (tiny_gpt2 if quick else gpt2_small)(Path(name), getattr(torch, dtype))
        num_blocks = sizes.num_requests * -(-(sizes.prompt_tokens[1] + sizes.new_tokens) // BLOCK_SIZE) + 1
        setup = Setup(
            Path(name),
            num_blocks,
            BLOCK_SIZE,
            dtype=dtype,
            device=device,
            max_step_tokens=MAX_STEP_TOKENS,
            max_num_seqs=sizes.num_requests,
            max_running_sequences=sizes.num_requests,
        )
        model = load(setup)
        served = asyncio.run(serve(setup, model, sizes, progress))
        progress.add_task("where a step goes", total=None)
        steps = profile_decode(model, sizes)
    figures = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": dtype,
        "threads": setup.threads,
        "sizes": asdict(sizes),
        "prompt_tokens": sum(prompt_lengths(sizes)),
        "served": [asdict(each) | {"tokens_per_s": each.tokens_per_s} for each in served],
        "decode_steps": [asdict(step) for step in steps],
    }
    notes = [
        f"{sum(prompt_lengths(sizes)):,} prompt tokens in all, {dtype} on {figures['device']}; each row was run once.",
        f"One at a time was measured on {sizes.alone} of the {sizes.num_requests} requests.",
        "Published: on a desktop GPU.",
    ]
    return Findings(tables(served, steps), figures, lambda: plot(served, steps), notes)


def tables(served: Sequence[Served], steps: Sequence[DecodeStep]) -> list:
    first = table(
        "generated tokens per second, prompts included",
        *("", *ATTENTIONS, "ratio", "published", "ratio", "processor s", "ratio", "s to the last token, median"),
    )
    for mode in MODES:
        padded, paged = (next(each for each in served if (each.mode, each.attention) == (mode, a)) for a in ATTENTIONS)
        published = [PUBLISHED.get((mode, attention)) for attention in ATTENTIONS]
        known = [str(each) for each in published if each is not None]
        latencies = " and ".join(f"{statistics.median(each.latencies_s):.1f}" for each in (padded, paged))
        first.add_row(
            *(mode, f"{padded.tokens_per_s:.2f}", f"{paged.tokens_per_s:.2f}"),
            *(f"{paged.tokens_per_s / padded.tokens_per_s:.2f}", " and ".join(known)),
            f"{published[1] / published[0]:.1f}" if published[0] and published[1] else "",
            *(f"{padded.cpu_s:.0f} and {paged.cpu_s:.0f}", f"{padded.cpu_s / paged.cpu_s:.2f}", latencies),
        )
    padded_step, paged_step = steps
    second = table(
        f"a step that generates one token of each of {paged_step.num_seqs} sequences: ms", "", *ATTENTIONS, "ratio"
    )
    medians = [statistics.median(step.step_ms) for step in steps]
    second.add_row("step", *(spread(step.step_ms, ".1f") for step in steps), f"{medians[0] / medians[1]:.2f}")
    for part, padded_ms in padded_step.parts_ms.items():
        paged_ms = paged_step.parts_ms[part]
        ratio = f"{padded_ms / paged_ms:.2f}" if paged_ms else ""
        second.add_row(f"  {part}, profiled", f"{padded_ms:.1f}", f"{paged_ms:.1f}", ratio)
    second.add_row("published, a step", "57", "13", "4.4")
    return [first, second]


def plot(served: Sequence[Served], steps: Sequence[DecodeStep]) -> Figure:
    """Tokens per second by mode; a decode step by its parts."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for number, attention in enumerate(ATTENTIONS):
        heights = [each.tokens_per_s for each in served if each.attention == attention]
        bars = left.bar([place + (number - 0.5) * 0.38 for place in range(len(MODES))], heights, 0.36, label=attention)
        left.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    left.set_xticks(range(len(MODES)), list(MODES), fontsize=9)
    left.set_ylabel("generated tokens per second")
    left.set_title(f"GPT-2 small, {served[-1].num_requests} requests", fontsize=10)
    left.margins(y=0.2)
    left.legend(fontsize=8)
    bottoms = [0.0] * len(steps)
    for part in steps[0].parts_ms:
        heights = [step.parts_ms[part] for step in steps]
        right.bar(list(ATTENTIONS), heights, 0.5, bottom=bottoms, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    right.set_ylabel("ms")
    right.set_title(f"a step of {steps[0].num_seqs} sequences, profiled", fontsize=10)
    right.legend(fontsize=8)
    plain(left)
    plain(right)
    return figure


main = benchmark("serving", measure, packages=("torch", "transformers", "numpy"))

if __name__ == "__main__":
    main()
