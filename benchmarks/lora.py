"""Tokens a second of sequences with LoRA adapters and of the base alone, in turns, through both services on a CPU.

    quire bench lora

Each of 8 adapters has two of 16 sequences; all are for every linear layer of the layers. The base's sequences run on
the same worker, without an adapter. Prompts are short, so nearly all steps are decode steps of 16 tokens. The first
round of each is not counted. A round's rate is by the clock, and by the processor time of all three processes: on a
machine that does other work as well the second one says more.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from engines import NUM_CORES
from models import byte_tokenizer, llama_56m, tiny_llama
from report import Findings, benchmark, table
from rich.progress import Progress
from safetensors.torch import save_file

from quire.cli.launch import LocalServices
from quire.client import CacheParams, CacheUse, Engine, EngineConfig, SamplingParams

NUM_ADAPTERS, NUM_SEQUENCES, PROMPT_TOKENS = 8, 16, 8
RANKS = (8, 16)
TO_REACH = 0.85
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Row:
    """Adapters of a rank: tokens a second of both, medians over the rounds, and the medians of the rounds' parts.

    bytes_part   the bytes of all adapters, as a part of the weights that a step of the base reads
    """

    rank: int
    bytes_part: float
    base: float
    adapted: float
    part: float
    processor_part: float
    parts: Sequence[float]


def save_adapter(model: Any, folder: Path, *, rank: int, seed: int) -> int:
    """Write an adapter of a model as PEFT does. Returns the number of its weights."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            num_outputs, num_inputs = module.weight.shape
            for part, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                drawn = 0.02 * torch.randn(*shape, generator=generator)
                weights[f"base_model.model.{name}.lora_{part}.weight"] = drawn
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return sum(weight.numel() for weight in weights.values())


async def measure_rank(services: LocalServices, *, rank: int, bytes_part: float, num_rounds: int, num_new: int) -> Row:
    """Measure the base and the adapters in turns."""
    processes = [psutil.Process(), *(psutil.Process(each.pid) for each in (services.cachemgr, services.worker))]
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)

    async def measure_round(engine: Engine, identities: Sequence[bytes]) -> tuple[float, float]:
        used, began = _processor_s(processes), time.perf_counter()
        await asyncio.gather(
            *(
                engine.complete(
                    [10 + number] * PROMPT_TOKENS,
                    params,
                    cache=CacheParams(adapter=identities[number % len(identities)], cache_use=CacheUse.NONE),
                )
                for number in range(NUM_SEQUENCES)
            )
        )
        num_tokens = NUM_SEQUENCES * num_new
        return num_tokens / (time.perf_counter() - began), num_tokens / (_processor_s(processes) - used)

    rounds = []
    async with Engine.connect(services.cachemgr_address, config=EngineConfig(verify=False)) as engine:
        identities = list(engine.adapters.values())
        for number in range(1 + num_rounds):
            if number % 2:
                base, adapted = await measure_round(engine, [b""]), await measure_round(engine, identities)
            else:
                adapted, base = await measure_round(engine, identities), await measure_round(engine, [b""])
            rounds.append((base, adapted))
    pairs = rounds[1:]
    parts = [adapted[0] / base[0] for base, adapted in pairs]
    return Row(
        rank,
        bytes_part=round(bytes_part, 3),
        base=round(statistics.median(base[0] for base, _ in pairs), 1),
        adapted=round(statistics.median(adapted[0] for _, adapted in pairs), 1),
        part=round(statistics.median(parts), 3),
        processor_part=round(statistics.median(adapted[1] / base[1] for base, adapted in pairs), 3),
        parts=[round(part, 3) for part in parts],
    )


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(quick: bool, progress: Progress, *, threads: int | None, rank: Sequence[str], rounds: int) -> Findings:
    """--quick: a tiny model, rank 8, two rounds of 8 tokens."""
    threads, rows = threads or NUM_CORES, []
    num_rounds, num_new = (2, 8) if quick else (rounds, 96)
    ranks = RANKS[:1] if quick else tuple(map(int, rank))
    task = progress.add_task("ranks", total=len(ranks))
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        model = (tiny_llama if quick else llama_56m)(folder / "model")
        byte_tokenizer(folder / "model")
        num_read = sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel()
        for each in ranks:
            places = [folder / f"{each}-{number}" for number in range(NUM_ADAPTERS)]
            num_weights = sum(save_adapter(model, place, rank=each, seed=seed) for seed, place in enumerate(places))
            flags = [flag for place in places for flag in ("--lora", f"{place.name}={place}")]
            arguments = ("--dtype", "float32", "--threads", str(threads), "--max-model-len", "256", *flags)
            with LocalServices.start(model=folder / "model", num_blocks=512, extra_worker_args=arguments) as services:
                bytes_part = num_weights / num_read
                asked = measure_rank(services, rank=each, bytes_part=bytes_part, num_rounds=num_rounds, num_new=num_new)
                rows.append(asyncio.run(asked))
            progress.advance(task)
    return Findings(
        [_table_of(rows)],
        {"rows": [asdict(row) for row in rows]},
        notes=[f"Threads of the worker: {threads}. float32."],
        file_name="lora",
    )


def _table_of(rows: Sequence[Row]) -> Any:
    heads = ("bytes of the adapters", "base", "adapters", "part", "to reach", "part by processor time")
    made = table("tokens a second", "rank", *heads, words=1)
    for row in rows:
        figures = (f"{row.base:.0f}", f"{row.adapted:.0f}", f"{row.part:.2f}", f"{TO_REACH:.2f}")
        made.add_row(str(row.rank), f"{100 * row.bytes_part:.0f} %", *figures, f"{row.processor_part:.2f}")
    return made


main = benchmark(
    "lora",
    measure,
    packages=("torch", "transformers"),
    options=[
        click.Option(["--threads"], type=click.IntRange(min=1), help="Of the worker. Default: one for each core."),
        click.Option(
            ["--rounds"],
            type=click.IntRange(min=1),
            default=5,
            show_default=True,
            help="Counted rounds of each rank.",
        ),
        click.Option(
            ["--rank"],
            type=click.Choice(tuple(map(str, RANKS))),
            multiple=True,
            default=tuple(map(str, RANKS)),
            help="May be repeated.",
        ),
    ],
)

if __name__ == "__main__":
    main()
