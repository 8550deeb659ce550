"""Tokens a second with drafts and without, in turns, over the two services: where they come true, and where none does.

loads.py has the loads. Both engines are connected to the same services. The first round of each is not counted. A
round's rate is by the clock, and by the processor time of all three processes: on a machine that does other work as
well the second one says more.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import psutil
from engines import NUM_CORES
from loads import LOADS, Turns, sessions_of
from models import byte_tokenizer, llama_56m, tiny_llama
from report import Findings, benchmark, table
from rich.progress import Progress

from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig, SpeculativeConfig

DEMO = Path(__file__).parents[2] / "deploy" / "demo" / "model"
NUM_DRAFTS = 8
NUM_NEW = {1: 128, 4: 64, 16: 48, 64: 32}
"""Most tokens of an answer, by the number of sessions at once."""
NO_COPIES = "open text"
MODELS = ("demo", "56M")
DTYPES = ("float32", "bfloat16")
BATCHES = tuple(map(str, NUM_NEW))
ALL_MODELS = ("quoted text", NO_COPIES)
"""The loads of models without a text of their own."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A model in a dtype with a load of so many sessions at once."""

    model: str
    dtype: str
    load: str
    batch: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of one round, by the clock and by processor time."""

    by_clock: float
    by_processor: float


@dataclass(frozen=True, slots=True)
class Row:
    """The rates of a cell, medians over its rounds, and the medians of the rounds' gains.

    accepted         drafts that came true, of all
    tokens_a_step    of one sequence, with drafts
    """

    cell: Cell
    without: float
    with_drafts: float
    gain: float
    processor_gain: float
    gains: Sequence[float]
    num_drafts: int
    accepted: float
    tokens_a_step: float


async def run_session(engine: Engine, turns: Turns) -> int:
    """Ask for the turns, one after the other. Returns the number of tokens that were generated."""
    num_tokens = 0
    for prompt, params in turns:
        [completion] = await engine.complete(prompt, params)
        num_tokens += sum(len(sample.token_ids) for sample in completion.samples)
    return num_tokens


async def measure_cell(services: LocalServices, cell: Cell, *, quick: bool) -> Row:
    """Measure one cell, off and on in turns."""
    num_rounds, num_new = (2, 24) if quick else (3, NUM_NEW[cell.batch])
    processes = [psutil.Process(), *(psutil.Process(each.pid) for each in (services.cachemgr, services.worker))]
    plain = EngineConfig(verify=False)
    drafts = SpeculativeConfig(LOADS[cell.load].method, num_speculative_tokens=NUM_DRAFTS)

    async def measure_round(engine: Engine, number: int) -> Rate:
        sessions = sessions_of(cell.load, cell.batch, number, num_new)
        used, began = processor_s(processes), time.perf_counter()
        num_tokens = sum(await asyncio.gather(*(run_session(engine, turns) for turns in sessions)))
        return Rate(num_tokens / (time.perf_counter() - began), num_tokens / (processor_s(processes) - used))

    rounds: list[tuple[Rate, Rate]] = []
    async with (
        Engine.connect(services.cachemgr_address, config=plain) as without,
        Engine.connect(services.cachemgr_address, config=replace(plain, speculative=drafts)) as drafting,
    ):
        for number in range(1 + num_rounds):
            if number % 2:
                off, on = await measure_round(without, number), await measure_round(drafting, number)
            else:
                on, off = await measure_round(drafting, number), await measure_round(without, number)
            rounds.append((off, on))
        counts = drafting.statistics().scheduler
    pairs = rounds[1:]
    gains = [on.by_clock / off.by_clock for off, on in pairs]
    num_runs = counts.sampled_tokens - counts.accepted_tokens
    return Row(
        cell,
        without=round(statistics.median(off.by_clock for off, _ in pairs), 1),
        with_drafts=round(statistics.median(on.by_clock for _, on in pairs), 1),
        gain=round(statistics.median(gains), 3),
        processor_gain=round(statistics.median(on.by_processor / off.by_processor for off, on in pairs), 3),
        gains=[round(gain, 3) for gain in gains],
        num_drafts=counts.drafted_tokens,
        accepted=round(counts.accepted_tokens / max(1, counts.drafted_tokens), 3),
        tokens_a_step=round(counts.sampled_tokens / max(1, num_runs), 2),
    )


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time of these processes so far, user's and system's."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(
    quick: bool,
    progress: Progress,
    *,
    threads: int | None,
    model: Sequence[str],
    dtype: Sequence[str],
    batch: Sequence[str],
) -> Findings:
    """--quick: a tiny model and the demo model, float32, one batch, 24 tokens."""
    threads, rows = threads or NUM_CORES, []
    models, dtypes, batches = (("demo", "tiny"), DTYPES[:1], BATCHES[:1]) if quick else (model, dtype, batch)
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        folders = {"demo": DEMO}
        for made, make in (("tiny", tiny_llama), ("56M", llama_56m)):
            if made in models:
                folders[made] = Path(folder) / made
                make(folders[made])
                byte_tokenizer(folders[made])
        loads = {name: [each for each in LOADS if name == "demo" or each in ALL_MODELS] for name in models}
        cells = [
            Cell(name, kind, load, int(count))
            for name, kind, count in product(models, dtypes, batches)
            for load in loads[name]
        ]
        task = progress.add_task("cells", total=len(cells))
        for (name, kind), some in groupby(cells, key=lambda cell: (cell.model, cell.dtype)):
            arguments = ("--dtype", kind, "--threads", str(threads), "--max-model-len", "1024")
            with LocalServices.start(model=folders[name], num_blocks=3072, extra_worker_args=arguments) as services:
                for cell in some:
                    rows.append(asyncio.run(measure_cell(services, cell, quick=quick)))
                    progress.advance(task)
                    progress.console.print(f"{cell.model} {cell.dtype} {cell.load} {cell.batch}: {rows[-1].gain}")
    return Findings(
        [_table_of(rows)],
        {"rows": [asdict(row) for row in rows]},
        notes=["Tokens a step are those of one sequence, prompts left out.", f"Threads of the worker: {threads}."],
    )


def _table_of(rows: Sequence[Row]) -> Any:
    heads = ("without", "with drafts", "gain", "to reach", "gain by processor time", "accepted", "tokens a step")
    made = table("tokens a second", "model", "load", "batch", *heads, words=2)
    for row in rows:
        cell = row.cell
        is_bound = cell.batch == 1 or cell.load == NO_COPIES
        to_reach = f"{LOADS[cell.load].to_reach:.2f}" if is_bound else ""
        accepted = f"{100 * row.accepted:.0f} %" if row.num_drafts else "no drafts"
        figures = (f"{row.without:.0f}", f"{row.with_drafts:.0f}", f"{row.gain:.2f}", to_reach)
        figures = (*figures, f"{row.processor_gain:.2f}", accepted, f"{row.tokens_a_step:.1f}")
        made.add_row(f"{cell.model}, {cell.dtype}", cell.load, str(cell.batch), *figures)
    return made


main = benchmark(
    "drafts",
    measure,
    packages=("torch", "transformers"),
    options=[
        click.Option(["--threads"], type=click.IntRange(min=1), help="Of the worker. Default: one for each core."),
        *(
            click.Option([flag], type=click.Choice(choices), multiple=True, default=choices, help="May be repeated.")
            for flag, choices in (("--model", MODELS), ("--dtype", DTYPES), ("--batch", BATCHES))
        ),
    ],
)

if __name__ == "__main__":
    main()
