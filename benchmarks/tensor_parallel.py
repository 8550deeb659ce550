"""A worker of two ranks beside one of one: tokens a second, time in collectives, bytes that a step's order takes.

    quire bench tensor-parallel

The same requests go through cachemgr and a worker of 1 and of 2 ranks, in turns. On a machine with GPUs each rank has
one; elsewhere each has one thread of the CPU, and what is seen is that the tokens are equal, and what the group costs.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m
from report import Findings, benchmark, plain, spread, summary, table
from rich.progress import Progress

from quire.cli.launch import LocalServices
from quire.client.engine.config import EngineConfig
from quire.client.engine.llm import LLM
from quire.client.engine.sampling import SamplingParams

RANKS = (1, 2)
VOCAB_SIZE = 32000
COLLECTIVES = ("gloo:", "ncclDevKernel")
"""How their ranges begin in a trace."""
MAX_DECODE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Decode steps of num_seqs sequences; `wide_seqs` is for the bytes of an order alone."""

    num_seqs: int = 16
    prompt_tokens: int = 32
    new_tokens: int = 32
    num_turns: int = 3
    profiled_steps: int = 20
    wide_seqs: int = 256
    wide_tokens: int = 16


QUICK = Sizes(num_seqs=2, prompt_tokens=4, new_tokens=8, num_turns=1, profiled_steps=2, wide_seqs=4, wide_tokens=4)


@dataclass(slots=True)
class Measured:
    """Of a worker of num_ranks: each turn's tokens a second and processor seconds of all ranks, and the tokens."""

    num_ranks: int
    tokens_per_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    step_ms: float = 0.0
    collective_ms: float = 0.0
    """Of step_ms, in the leader."""
    order_bytes: float = 0.0
    """Of an average order, when wide_seqs sequences decode."""


def worker_flags(num_ranks: int) -> list[str]:
    """One thread each, so that two ranks have twice the processor that one has."""
    flags = ["--dtype", "float32", "--threads", str(num_ranks), "--tensor-parallel-size", str(num_ranks)]
    return [*flags, "--num-blocks", "1024", "--no-cuda-graphs", "--no-fuse"]


def prompts(count: int, length: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, VOCAB_SIZE, length).tolist() for _ in range(count)]


def generate(llm: LLM, sizes: Sizes) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=sizes.new_tokens)
    found = llm.generate(prompts(sizes.num_seqs, sizes.prompt_tokens), params)
    return [list(completion.samples[0].token_ids) for completion in found]


def measure_turn(services: LocalServices, llm: LLM, sizes: Sizes, measured: Measured) -> None:
    """Add one turn: the same requests as in all others."""
    leader = psutil.Process(services.worker.pid)
    ranks = [leader, *leader.children()]
    before = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
    start = time.perf_counter()
    measured.tokens = generate(llm, sizes)
    seconds = time.perf_counter() - start
    measured.tokens_per_s.append(sizes.num_seqs * sizes.new_tokens / seconds)
    measured.processor_s.append(sum(sum(rank.cpu_times()[:2]) for rank in ranks) - before)


def measure_turns(model: Path, sizes: Sizes, progress: Progress) -> list[Measured]:
    """Both workers at a time, one of them busy."""
    found = [Measured(num_ranks) for num_ranks in RANKS]
    bar = progress.add_task("turns", total=sizes.num_turns * len(found))
    with (
        LocalServices.start(model=model, extra_worker_args=worker_flags(RANKS[0])) as one,
        LocalServices.start(model=model, extra_worker_args=worker_flags(RANKS[1])) as two,
        LLM(one.cachemgr_address) as of_one,
        LLM(two.cachemgr_address) as of_two,
    ):
        for llm in (of_one, of_two):
            generate(llm, sizes)
        for _ in range(sizes.num_turns):
            for services, llm, measured in zip((one, two), (of_one, of_two), found, strict=True):
                measure_turn(services, llm, sizes, measured)
                progress.advance(bar)
    return found


def profile(model: Path, sizes: Sizes, measured: Measured, folder: Path) -> None:
    """Decode steps in a trace: how long they take, and how much of it collectives do."""
    trace = folder / f"{measured.num_ranks}.json"
    flags = ["--profile", str(trace), "--profile-steps", f"3:{sizes.profiled_steps}"]
    with LocalServices.start(model=model, extra_worker_args=[*worker_flags(measured.num_ranks), *flags]) as services:
        with LLM(services.cachemgr_address) as llm:
            generate(llm, sizes)
        services.worker.terminate()
    measured.step_ms, measured.collective_ms = read_trace(json.loads(trace.read_text())["traceEvents"])


def read_trace(events: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Milliseconds of an average step, and of these in collectives, which gloo and NCCL run one after the other."""
    ranges = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in ranges if re.fullmatch(r"step \d+", str(event["name"])) and "gpu" not in event["cat"]]
    spent = [event["dur"] for event in ranges if str(event["name"]).startswith(COLLECTIVES)]
    return sum(step["dur"] for step in steps) / len(steps) / 1e3, sum(spent) / len(steps) / 1e3


def measure_orders(model: Path, sizes: Sizes, measured: Measured, folder: Path) -> None:
    """Many sequences that decode: bytes of an average order, by what the leader says at its end."""
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir=folder) as runtime_dir,
        LocalServices.start(
            model=model, extra_worker_args=worker_flags(measured.num_ranks), runtime_dir=runtime_dir
        ) as services,
    ):
        with LLM(services.cachemgr_address, config=EngineConfig(max_step_tokens=512)) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=sizes.wide_tokens)
            llm.generate(prompts(sizes.wide_seqs, 2), params)
        services.worker.terminate()
        assert services.worker.log_path is not None
        said = re.search(r"orders=(\d+) order_bytes=(\d+)", services.worker.log_path.read_text())
    if said is not None:
        measured.order_bytes = int(said[2]) / int(said[1])


def measure(quick: bool, progress: Progress) -> Findings:
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        model = folder / "model"
        llama_56m(model)
        found = measure_turns(model, sizes, progress)
        for measured in found:
            profile(model, sizes, measured, folder)
        measure_orders(model, sizes, found[-1], folder)
    return findings(found, sizes)


def findings(found: Sequence[Measured], sizes: Sizes) -> Findings:
    one, two = found
    same = sum(mine == other for mine, other in zip(one.tokens, two.tokens, strict=True))
    where = "GPUs" if torch.cuda.is_available() else "a CPU"
    title = f"{sizes.num_seqs} sequences decode, {sizes.new_tokens} tokens each, on {where}"
    made = table(title, "ranks", "tokens/s", "processor s", "ms a step", "of which collectives", "bytes an order")
    for each in found:
        made.add_row(
            str(each.num_ranks),
            spread(each.tokens_per_s),
            spread(each.processor_s, ".2f"),
            f"{each.step_ms:.1f}",
            f"{each.collective_ms:.2f}",
            "-" if each.num_ranks == 1 else f"{each.order_bytes:.0f}",
        )
    notes = [
        f"Tokens are equal in {same} of {len(one.tokens)} sequences.",
        f"Bytes of an order are an average while {sizes.wide_seqs} sequences decode; a decode step's may be at most "
        f"{MAX_DECODE_BYTES}.",
    ]
    if not torch.cuda.is_available():
        notes.append(
            "On a CPU the ranks share its memory and its cores, so two are no faster: the figures show that the "
            "tokens are right, and what a group costs. On GPUs the same command measures what it gains."
        )
    figures = {
        "ranks": [
            {
                "num_ranks": each.num_ranks,
                "tokens_per_s": summary(each.tokens_per_s),
                "processor_s": summary(each.processor_s),
                "step_ms": round(each.step_ms, 3),
                "collective_ms": round(each.collective_ms, 3),
                "order_bytes": round(each.order_bytes, 1),
            }
            for each in found
        ],
        "equal_sequences": [same, len(one.tokens)],
    }
    return Findings([made], figures, lambda: draw(found), notes)


def draw(found: Sequence[Measured]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(6, 3))
    names = [f"{each.num_ranks} rank{'s' if each.num_ranks > 1 else ''}" for each in found]
    collective = [each.collective_ms for each in found]
    axes.barh(names, [each.step_ms - spent for each, spent in zip(found, collective, strict=True)], label="compute")
    axes.barh(
        names, collective, left=[e.step_ms - s for e, s in zip(found, collective, strict=True)], label="collectives"
    )
    axes.set_xlabel("ms a decode step")
    axes.legend()
    plain(axes)
    return figure


if __name__ == "__main__":
    benchmark("tensor-parallel", measure, packages=("torch", "transformers"))()
