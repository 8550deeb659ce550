"""Draws of tokens on a CPU, in turns with draws by inversion of the cumulated probabilities.

    quire bench step draws --output benchmarks/results

Random logits. Times are of the processor, so that other work on the machine matters little. Inversion is what Quire did
before: it reads one random number a row, and gives other tokens after a rounding of one logit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click
import torch
from engines import NUM_CORES
from report import Findings, benchmark, summary, table
from rich.progress import Progress
from torch import Tensor

from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler

TEMPERATURE = 0.8
FILTERS = {
    "no filter": SamplingParams(temperature=TEMPERATURE),
    "top-k 50": SamplingParams(temperature=TEMPERATURE, top_k=50),
    "top-p 0.9": SamplingParams(temperature=TEMPERATURE, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=TEMPERATURE, min_p=0.05),
}
BY_INVERSION = "no filter, by inversion"


def invert(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row at which the cumulated probability exceeds its uniform number [n, 1]."""
    scores = (logits - logits.amax(-1, keepdim=True)).div_(TEMPERATURE)
    cumulative = scores.exp_().cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def ways(logits: Tensor) -> dict[str, Callable[[], object]]:
    """Return a draw of all rows by its name."""
    rows = range(len(logits))
    uniforms = torch.rand(len(logits), 1, dtype=torch.float64)
    made: dict[str, Callable[[], object]] = {BY_INVERSION: lambda: invert(logits, uniforms)}
    for name, params in FILTERS.items():
        sampler = Sampler(max_num_seqs=len(logits), vocab_size=logits.shape[1], device="cpu")
        for row in rows:
            sampler.set_params(row, params)
        made[name] = lambda sampler=sampler: sampler.sample(logits, rows, rows)
    return made


def processor_ms(work: Callable[[], object]) -> float:
    """Return the time of the process at one call."""
    started = time.process_time()
    work()
    return 1e3 * (time.process_time() - started)


def measure(
    quick: bool, progress: Progress, *, rows: tuple[int, ...], vocab_size: int, rounds: int, threads: int
) -> Findings:
    torch.set_num_threads(threads)
    if quick:
        rows, vocab_size, rounds = (1, 4), 2000, 2
    torch.manual_seed(0)
    made = table(f"ms of a processor, {vocab_size:,} tokens", *("rows", BY_INVERSION, *FILTERS), words=0)
    figures = {}
    for count in progress.track(rows, description="batches"):
        drawn = ways(3 * torch.randn(count, vocab_size))
        taken: dict[str, list[float]] = {name: [] for name in drawn}
        for _ in range(rounds):
            for name, work in drawn.items():
                taken[name].append(processor_ms(work))
        figures[str(count)] = {name: summary(times) for name, times in taken.items()}
        made.add_row(str(count), *(f"{min(times):.2f}" for times in taken.values()))
    sizes = {"vocab_size": vocab_size, "threads": threads, "ms_by_rows": figures}
    return Findings([made], sizes, notes=["the least time of each"])


OPTIONS = [
    click.Option(
        ["--rows"], multiple=True, default=(1, 16, 256), show_default=True, type=click.IntRange(min=1), help="Batches."
    ),
    click.Option(["--vocab-size"], default=151_936, show_default=True, type=click.IntRange(min=1), help="Tokens."),
    click.Option(["--rounds"], default=10, show_default=True, type=click.IntRange(min=1), help="Draws of each."),
    click.Option(["--threads"], default=NUM_CORES, show_default=True, type=click.IntRange(min=1), help="Of torch."),
]
main = benchmark("step draws", measure, packages=("torch", "numpy"), options=OPTIONS)

if __name__ == "__main__":
    main()
