"""Tokens a second with drafts and without, in turns, over the two services: where they come true, and where none does.

    quoted        a text of the prompt is written again: a grammar allows nothing else
    asked again   the same seeded requests as before: recent answers have the drafts
    open text     other seeds each time: next to no guess comes true

Both engines are connected to the same services. The first round of each is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from engines import NUM_CORES
from models import llama_56m, tiny_llama
from report import Findings, benchmark, table
from rich.progress import Progress

from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig, Grammar, SamplingParams, SpeculativeConfig

DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"
TEXT = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError(width)
    return width * height
"""
CONFIG = SpeculativeConfig("suffix", num_speculative_tokens=8)
BATCHES = (1, 4, 16)
TO_REACH: Mapping[str, float] = MappingProxyType({"quoted": 1.5, "asked again": 1.5, "open text": 0.97})
"""Times the tokens a second without drafts, at batch 1; of open text at any batch."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A model in a dtype with a load of so many requests at once."""

    model: str
    dtype: str
    load: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens a second of a cell, the medians of its rounds, and the median of the rounds' gains.

    accepted         drafts that came true, of all
    tokens_a_step    of one sequence, with drafts
    """

    cell: Cell
    without: float
    with_drafts: float
    gain: float
    num_drafts: int
    accepted: float
    tokens_a_step: float


def requests_of(cell: Cell, round_number: int, num_new: int) -> tuple[list[Any], list[SamplingParams]]:
    """Return the prompts, all different, and their parameters."""
    seeds = range(1000 * round_number, 1000 * round_number + cell.num_requests)
    if cell.load == "quoted":
        grammar = Grammar(choice=(TEXT,))
        prompts: list[Any] = [f"{number}: {TEXT}" for number in range(cell.num_requests)]
        return prompts, [SamplingParams(max_tokens=num_new, temperature=0.0, grammar=grammar) for _ in seeds]
    generator = torch.Generator().manual_seed(cell.num_requests)
    prompts = torch.randint(1, 500, (cell.num_requests, 48), generator=generator).tolist()
    if cell.load == "asked again":
        seeds = range(cell.num_requests)
    return prompts, [SamplingParams(max_tokens=num_new, seed=seed, ignore_eos=True) for seed in seeds]


async def measure_cell(address: str, cell: Cell, *, num_rounds: int, num_new: int) -> Row:
    """Measure one cell, off and on in turns."""

    async def measure_round(engine: Engine, number: int) -> float:
        prompts, params = requests_of(cell, number, num_new)
        began = time.perf_counter()
        completions = await engine.complete(prompts, params)
        num_tokens = sum(len(sample.token_ids) for each in completions for sample in each.samples)
        return num_tokens / (time.perf_counter() - began)

    rates: dict[bool, list[float]] = {False: [], True: []}
    async with (
        Engine.connect(address, config=EngineConfig(verify=False)) as without,
        Engine.connect(address, config=EngineConfig(verify=False, speculative=CONFIG)) as drafting,
    ):
        for number in range(1 + num_rounds):
            turns: Sequence[bool] = (False, True) if number % 2 else (True, False)
            for is_drafting in turns:
                rates[is_drafting].append(await measure_round(drafting if is_drafting else without, number))
        counts = drafting.statistics().scheduler
    pairs = list(zip(rates[False], rates[True], strict=True))[1:]
    num_runs = counts.sampled_tokens - counts.accepted_tokens
    return Row(
        cell,
        without=round(statistics.median(off for off, _ in pairs), 1),
        with_drafts=round(statistics.median(on for _, on in pairs), 1),
        gain=round(statistics.median(on / off for off, on in pairs), 3),
        num_drafts=counts.drafted_tokens,
        accepted=round(counts.accepted_tokens / max(1, counts.drafted_tokens), 3),
        tokens_a_step=round(counts.sampled_tokens / max(1, num_runs), 2),
    )


def measure(quick: bool, progress: Progress) -> Findings:
    """--quick: a tiny model and the demo model, float32, one batch, 24 tokens."""
    models = {"tiny": ("float32",)} if quick else {"56M": ("float32", "bfloat16")}
    models = {"demo": ("float32",) if quick else ("float32", "bfloat16")} | models
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folders = {"demo": DEMO, "tiny": Path(name) / "tiny", "56M": Path(name) / "56m"}
        for model, make in (("tiny", tiny_llama), ("56M", llama_56m)):
            if model in models:
                make(folders[model])
        pairs = [(model, dtype) for model, dtypes in models.items() for dtype in dtypes]
        for model, dtype in progress.track(pairs, description="models"):
            rows += _measure_model(model, dtype, folders[model], quick=quick)
    return Findings(
        [_table_of(rows)],
        {"rows": [asdict(row) for row in rows]},
        notes=["Tokens a step are those of one sequence, prompts left out."],
    )


def _measure_model(model: str, dtype: str, folder: Path, *, quick: bool) -> list[Row]:
    arguments = ("--dtype", dtype, "--threads", str(NUM_CORES), "--max-model-len", "512")
    loads = [load for load in TO_REACH if model == "demo" or load != "quoted"]
    cells = [Cell(model, dtype, load, count) for load in loads for count in ((1,) if quick else BATCHES)]
    num_rounds, num_new = (2, 24) if quick else (7, 128)
    with LocalServices.start(model=folder, num_blocks=1024, extra_worker_args=arguments) as services:
        address = services.cachemgr_address
        return [asyncio.run(measure_cell(address, each, num_rounds=num_rounds, num_new=num_new)) for each in cells]


def _table_of(rows: Sequence[Row]) -> Any:
    heads = ("without", "with drafts", "gain", "to reach", "accepted", "tokens a step")
    made = table("tokens a second", "model", "load", "batch", *heads)
    for row in rows:
        cell = row.cell
        is_bound = cell.num_requests == 1 or cell.load == "open text"
        to_reach = f"{TO_REACH[cell.load]:.2f}" if is_bound else ""
        accepted = f"{100 * row.accepted:.0f} %" if row.num_drafts else "no drafts"
        figures = (f"{row.without:.0f}", f"{row.with_drafts:.0f}", f"{row.gain:.2f}", to_reach)
        name = f"{cell.model}, {cell.dtype}"
        made.add_row(name, cell.load, str(cell.num_requests), *figures, accepted, f"{row.tokens_a_step:.1f}")
    return made


main = benchmark("drafts", measure, packages=("torch", "transformers"))

if __name__ == "__main__":
    main()
