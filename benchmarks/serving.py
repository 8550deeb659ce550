"""Tokens per second of the engine through both services, beside transformers on the same model and work, on a CPU.

    python benchmarks/serving.py [--rounds 5] [--output benchmarks/results/serving_cpu.json]

Rows: transformers' `generate` on static batches of 16, its continuous batching, Quire through the two real processes,
and Quire with both services in this process (the difference is what the process boundary costs). The rows take turns
in every round, so that what else the machine does hits all of them; medians of the rounds. Greedy, float32, random
weights; prefix caches are emptied before each run; every row's tokens are compared with the first row's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import click
import grpc
import torch
import transformers
from in_process import LEASE_TTL_S, InProcessCache, InProcessServices, InProcessWorker
from machine import machine
from matplotlib import pyplot
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.client import Engine, EngineConfig, SamplingParams
from quire.client.launch import LocalServices
from quire.worker.model import load_model

BATCH = 16
BLOCK_SIZE = 16
NUM_BLOCKS = 512
MAX_STEP_TOKENS = 2048

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
    def tokens_per_s(self) -> float:
        return self.num_generated / statistics.median(self.seconds)


def workloads(vocab_size: int) -> list[Workload]:
    """Equal lengths: the best case of a static batch. Mixed lengths: what serving sees."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    equal = Workload("equal 16 x (128 + 64)", [draw(3, vocab_size, 128) for _ in range(16)], [64] * 16)
    lengths = draw(16, 241, 32)
    mixed = Workload(
        "mixed 32 x (16..240 + 8..120)", [draw(3, vocab_size, length) for length in lengths], draw(8, 121, 32)
    )
    return [equal, mixed]


def make_model(directory: Path) -> LlamaForCausalLM:
    """56 M parameters: hidden 512, 8 layers, 8 query and 4 key heads, vocabulary 32,000."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model


def static_batches(model: LlamaForCausalLM) -> Callable[[Workload], Awaitable[Tokens]]:
    """Left-padded batches of 16, each as long as its longest."""

    async def generate(work: Workload) -> Tokens:
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

    return generate


def continuous_batching(model: LlamaForCausalLM) -> Callable[[Workload], Awaitable[Tokens]]:
    """transformers' continuous batching, sized to the work."""
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    settings = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=MAX_STEP_TOKENS, allow_block_sharing=False
    )

    async def generate(work: Workload) -> Tokens:
        outputs: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings
        ) as manager:
            for index, (prompt, count) in enumerate(zip(work.prompts, work.num_new, strict=True)):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=count)
            while len(outputs) < len(work.prompts):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching gave no result for 60 s")
                if result.is_finished():
                    outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[str(index)] for index in range(len(work.prompts))]

    return generate


def engine_row(engine: Engine) -> Callable[[Workload], Awaitable[Tokens]]:
    """The engine, whatever services are behind it."""

    async def generate(work: Workload) -> Tokens:
        params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in work.num_new]
        completions = await engine.complete(work.prompts, params)
        return [list(completion.token_ids) for completion in completions]

    return generate


def engine_config() -> EngineConfig:
    """The lease outlives the other rows, which hold up this process's event loop."""
    return EngineConfig(
        max_step_tokens=MAX_STEP_TOKENS, max_running_sequences=BATCH, lease_ttl_s=LEASE_TTL_S, verify=False
    )


@contextlib.asynccontextmanager
async def through_services(directory: Path, threads: int) -> AsyncIterator[Row]:
    """An engine over two real processes."""
    worker_args = ("--dtype", "float32", "--threads", str(threads), "--block-size", str(BLOCK_SIZE))
    services = await asyncio.to_thread(
        LocalServices.start, model=directory, num_blocks=NUM_BLOCKS, extra_worker_args=worker_args
    )
    with services:
        address = services.cachemgr_address
        async with (
            grpc.aio.insecure_channel(address) as channel,
            Engine.connect(address, config=engine_config()) as engine,
        ):
            stub = cache_service_pb2_grpc.CacheServiceStub(channel)

            async def forget() -> None:
                await stub.ResetPrefixCache(cache_service_pb2.ResetPrefixCacheRequest())

            yield Row("Quire, two services", engine_row(engine), forget)


@contextlib.asynccontextmanager
async def in_process(directory: Path) -> AsyncIterator[Row]:
    """An engine with both services in this process."""
    model = load_model(directory, dtype=torch.float32)
    services = InProcessServices(
        model,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        max_step_tokens=8192,
    )
    worker = InProcessWorker(services)
    async with Engine(InProcessCache(services), lambda _: worker, config=engine_config()) as engine:

        async def forget() -> None:
            services.pool.ledger.reset_prefix_cache()

        yield Row("Quire, in one process", engine_row(engine), forget)
    services.close()


async def measure(rows: list[Row], works: list[Workload], rounds: int) -> list[Measurement]:
    """Every row once in every round, after one round that does not count."""
    seconds: dict[tuple[str, str], list[float]] = {(work.name, row.name): [] for work in works for row in rows}
    tokens: dict[tuple[str, str], Tokens] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=(rounds + 1) * len(works) * len(rows))
        for number in range(rounds + 1):
            for work in works:
                for row in rows:
                    progress.update(task, description=f"round {number}/{rounds} {work.name.split()[0]}: {row.name}")
                    await row.forget()
                    start = time.perf_counter()
                    tokens[work.name, row.name] = await row.generate(work)
                    if number:
                        seconds[work.name, row.name].append(time.perf_counter() - start)
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


async def run(rounds: int, threads: int) -> list[Measurement]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_model(directory)
        async with through_services(directory, threads) as remote, in_process(directory) as local:
            rows = [
                Row("transformers, static batch", static_batches(model)),
                Row("transformers, continuous batching", continuous_batching(model)),
                remote,
                local,
            ]
            return await measure(rows, workloads(model.config.vocab_size), rounds)


def show(measurements: list[Measurement]) -> None:
    table = Table(title="tokens per second, medians")
    for heading in ("workload", "row", "tokens/s", "of static batch", "fastest", "slowest", "equal sequences"):
        table.add_column(heading, justify="left" if heading in ("workload", "row") else "right")
    baseline: dict[str, float] = {}
    for measured in measurements:
        base = baseline.setdefault(measured.workload, measured.tokens_per_s)
        table.add_row(
            measured.workload,
            measured.row,
            f"{measured.tokens_per_s:.0f}",
            f"{measured.tokens_per_s / base:.2f}",
            f"{measured.num_generated / min(measured.seconds):.0f}",
            f"{measured.num_generated / max(measured.seconds):.0f}",
            f"{measured.equal_sequences}/{measured.num_sequences}",
        )
    Console(width=max(Console().width, 120)).print(table)


def plot(measurements: list[Measurement], path: Path) -> None:
    """Bars of the medians with the range of the rounds, one group per workload."""
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    works = list(dict.fromkeys(measured.workload for measured in measurements))
    rows = list(dict.fromkeys(measured.row for measured in measurements))
    for number, row in enumerate(rows):
        chosen = [measured for measured in measurements if measured.row == row]
        heights = [measured.tokens_per_s for measured in chosen]
        low = [height - each.num_generated / max(each.seconds) for height, each in zip(heights, chosen, strict=True)]
        high = [each.num_generated / min(each.seconds) - height for height, each in zip(heights, chosen, strict=True)]
        places = [index + (number - (len(rows) - 1) / 2) * 0.2 for index in range(len(works))]
        bars = axes.bar(places, heights, 0.18, yerr=[low, high], label=row, error_kw={"linewidth": 0.8})
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_xticks(range(len(works)), works)
    axes.set_ylabel("generated tokens per second")
    axes.set_title("56 M-parameter Llama, float32, on a CPU: medians and ranges", fontsize=10)
    axes.margins(y=0.25)
    axes.legend(fontsize=8, ncols=2, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds that count.")
@click.option("--threads", default=len(os.sched_getaffinity(0)), show_default=True, help="Threads of each model.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write the figures as JSON, and a plot as SVG."
)
def main(rounds: int, threads: int, output: Path | None) -> None:
    """Serving throughput on a CPU, beside transformers."""
    transformers.logging.set_verbosity_error()
    measurements = asyncio.run(run(rounds, threads))
    show(measurements)
    if output is not None:
        command = f"python benchmarks/serving.py --rounds {rounds} --threads {threads}"
        figures = [asdict(measured) | {"tokens_per_s": measured.tokens_per_s} for measured in measurements]
        output.write_text(
            json.dumps({"command": command, "machine": machine("torch", "transformers"), "figures": figures}, indent=1)
            + "\n"
        )
        plot(measurements, output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
