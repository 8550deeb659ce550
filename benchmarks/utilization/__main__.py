"""The share of memory that holds tokens: blocks against contiguous buffers, and tables for layers with windows.

    quire bench utilization

cachemgr's own books admit every request and say what it holds; a contiguous reservation is arithmetic. Lengths, prompt
and output together: N(500, 200) clipped to [200, 2048] with a limit of 2,048, and those of the Azure conversation trace
(benchmarks/traces), cut at the limit where a contiguous buffer would. Requests are measured when they are complete, the
best moment of a contiguous buffer. windows.py has the models with windows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import windows
from books import Books, Lengths, azure_lengths, normal_lengths
from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, percent, plain, table
from rich.progress import Progress

BATCH_SIZES = (10, 25, 50, 100, 200)
BLOCK_SIZES = (16, 32, 64, 128)
LIMIT = 2_048
AZURE_LIMITS = (2_048, 4_096, 16_384)
ROUNDS = 20
QUICK_ROUNDS, QUICK_REQUESTS = 2, 200
NUM_BUFFERS = 64
"""Contiguous buffers that the memory has room for, where it is counted how many requests fit."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts of the memory taken that hold tokens, one of each round; blocks by block size."""

    batch_size: int
    contiguous: list[float]
    paged: dict[int, list[float]]


@dataclass(frozen=True, slots=True)
class Trace:
    """The same for the trace as a whole; contiguous by limit."""

    num_requests: int
    mean_tokens: float
    contiguous: dict[int, float]
    paged: dict[int, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests that fit, by block size and one of each round, where `NUM_BUFFERS` contiguous buffers do."""

    lengths: str
    limit: int
    paged: dict[int, list[int]]

    def times(self, block_size: int) -> float:
        return statistics.median(self.paged[block_size]) / NUM_BUFFERS


def paged_utilization(lengths: Lengths, block_size: int) -> float:
    """Tokens over slots of the blocks that hold them, as the books count both."""
    num_blocks = int((-(-lengths // block_size)).sum())
    books = Books(num_blocks, block_size=block_size)
    for length in lengths.tolist():
        if not books.admit(length):
            raise RuntimeError(f"refused, with {num_blocks} blocks for what needs no more")
    return books.num_computed_tokens / (books.num_active_blocks * block_size)


def contiguous_utilization(lengths: Lengths, limit: int) -> float:
    return float(np.minimum(lengths, limit).mean() / limit)


def measure_batch(batch_size: int, rounds: int) -> Batch:
    draws = [normal_lengths(np.random.default_rng(seed), batch_size) for seed in range(rounds)]
    return Batch(
        batch_size,
        [contiguous_utilization(lengths, LIMIT) for lengths in draws],
        {size: [paged_utilization(lengths, size) for lengths in draws] for size in BLOCK_SIZES},
    )


def measure_trace(lengths: Lengths) -> Trace:
    return Trace(
        len(lengths),
        float(lengths.mean()),
        {limit: contiguous_utilization(lengths, limit) for limit in AZURE_LIMITS},
        {size: paged_utilization(lengths, size) for size in BLOCK_SIZES},
    )


def measure_fit(name: str, draws: Sequence[Lengths], limit: int) -> Fit:
    """Admits each draw's requests in order until one is refused."""
    return Fit(
        name,
        limit,
        {size: [num_fitting(np.minimum(draw, limit), limit, size) for draw in draws] for size in BLOCK_SIZES},
    )


def num_fitting(lengths: Lengths, limit: int, block_size: int) -> int:
    books = Books(NUM_BUFFERS * limit // block_size, block_size=block_size)
    for count, length in enumerate(lengths.tolist()):
        if not books.admit(length):
            return count
    raise RuntimeError("all requests fit: the memory is too large for this draw")


def measure(quick: bool, progress: Progress) -> Findings:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    prompts, outputs = azure_lengths()
    azure = prompts + outputs
    task = progress.add_task("batches", total=len(BATCH_SIZES) + 1 + 1 + len(AZURE_LIMITS))
    batches = []
    for batch_size in BATCH_SIZES:
        batches.append(measure_batch(batch_size, rounds))
        progress.advance(task)
    progress.update(task, description="the trace")
    trace = measure_trace(azure[:QUICK_REQUESTS] if quick else azure)
    progress.advance(task)
    progress.update(task, description="requests that fit")
    normal = [normal_lengths(np.random.default_rng(seed), NUM_BUFFERS * 8) for seed in range(rounds)]
    fits = [measure_fit("N(500, 200)", normal, LIMIT)]
    for limit in AZURE_LIMITS:
        draws = [np.random.default_rng(seed).choice(azure, NUM_BUFFERS * limit // 400) for seed in range(rounds)]
        fits.append(measure_fit("Azure conversations", draws, limit))
        progress.advance(task)
    windowed = windows.measure(quick=quick)
    figures = {
        "rounds": rounds,
        "batches": [asdict(batch) for batch in batches],
        "azure": asdict(trace),
        "fits": [asdict(fit) for fit in fits],
        "contiguous_buffers": NUM_BUFFERS,
        "windows": windows.as_json(windowed),
    }
    shown = [*tables(batches, trace, fits), *windows.tables(windowed)]
    return Findings(shown, figures, lambda: plot(batches, trace, windowed))


def tables(batches: Sequence[Batch], trace: Trace, fits: Sequence[Fit]) -> list:
    sizes = [f"blocks of {size}" for size in BLOCK_SIZES]
    first = table(f"memory that holds tokens: N(500, 200), limit {LIMIT:,}; medians", "requests", "contiguous", *sizes)
    for batch in batches:
        paged = [percent(statistics.median(batch.paged[size])) for size in BLOCK_SIZES]
        first.add_row(str(batch.batch_size), percent(statistics.median(batch.contiguous)), *paged)
    title = f"the same: {trace.num_requests:,} Azure conversations, {trace.mean_tokens:,.0f} tokens on average"
    second = table(title, *(f"contiguous, {limit:,}" for limit in AZURE_LIMITS), *sizes, words=0)
    second.add_row(*(percent(trace.contiguous[limit]) for limit in AZURE_LIMITS), *map(percent, trace.paged.values()))
    third = table("requests that fit where one contiguous buffer does", "lengths", "limit", *sizes)
    for fit in fits:
        third.add_row(fit.lengths, f"{fit.limit:,}", *(f"{fit.times(size):.2f}" for size in BLOCK_SIZES))
    return [first, second, third]


def plot(batches: Sequence[Batch], trace: Trace, windowed: windows.Windows) -> Figure:
    """Normal lengths by batch size; the trace by limit and block size; models with windows."""
    figure, (left, right, last) = pyplot.subplots(1, 3, figsize=(15, 3.4), sharey=True)
    contiguous = [statistics.median(batch.contiguous) for batch in batches]
    left.plot(BATCH_SIZES, contiguous, "o-", color="0.5", label=f"contiguous, {LIMIT:,}")
    for size in BLOCK_SIZES:
        left.plot(
            BATCH_SIZES, [statistics.median(batch.paged[size]) for batch in batches], "o-", label=f"blocks of {size}"
        )
    left.set_xlabel("requests")
    left.set_ylabel("part of the memory that holds tokens")
    left.set_ylim(0, 1.03)
    left.set_title("N(500, 200) in [200, 2048]", fontsize=10)
    left.legend(fontsize=8, loc="center right")
    bars = {f"buffers\nof {limit:,}": value for limit, value in trace.contiguous.items()}
    bars |= {f"blocks\nof {size}": value for size, value in trace.paged.items()}
    drawn = right.bar(
        list(bars), list(bars.values()), color=["0.6"] * len(trace.contiguous) + ["tab:blue"] * len(trace.paged)
    )
    right.bar_label(drawn, [percent(value) for value in bars.values()], fontsize=8)
    right.tick_params(axis="x", labelsize=8)
    right.set_title(f"{trace.num_requests:,} Azure conversations", fontsize=10)
    plain(left)
    plain(right)
    windows.plot(windowed, last)
    return figure


main = benchmark("utilization", measure, packages=("numpy", "torch"))

if __name__ == "__main__":
    main()
