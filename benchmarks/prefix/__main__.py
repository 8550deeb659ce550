"""The hits of the prefix cache, and the prefill that it saves: on recorded requests, and measured end to end.

    quire bench prefix

Recorded requests (benchmarks/traces) go through cachemgr's books one at a time, under the rules of expected.json: the
default policy, LRU, a cache that keeps everything, and Belady, which knows the future, where expected.json has it.
Counts are exact. The time of a prompt is measured through both services with a Llama of 56 M parameters: prompts
without a common prefix, and prompts with one long system prompt.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from engines import Running, Setup, generate, two_processes
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m
from replay import expectations, load
from report import Findings, benchmark, percent, plain, spread, table
from rich.progress import Progress

from quire.cachemgr._core import DEFAULT_POLICY
from quire.lab.replay import Outcome, Replay

BLOCK_SIZE = 16
CAPACITIES = {512: (250, 500, 1000, 2000, 3000, 5000, 10000), 16: (500, 1000, 1500, 2000, 3000, 5000)}
"""By block size: the capacities of expected.json and some between."""
QUICK_TRACE = "lmcache_miniswe_B16.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trace at one capacity, in blocks. Belady is None where expected.json does not say."""

    trace: str
    capacity: int
    lru: Outcome
    default: Outcome
    belady_hits: int | None
    infinite_hits: int

    @property
    def ratio(self) -> float:
        """Hits of the default relative to LRU's."""
        return self.default.num_hits / self.lru.num_hits


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the system prompt, of each request's own part, and of the generated part."""

    system_tokens: int = 4096
    own_tokens: int = 64
    new_tokens: int = 4
    num_requests: int = 8
    rounds: int = 5


QUICK = Sizes(system_tokens=64, own_tokens=8, new_tokens=2, num_requests=2, rounds=1)


@dataclass(frozen=True, slots=True)
class Prompted:
    """Seconds from a request to its last token, through both services, one request at a time.

    cold_s          the first with its system prompt, one of each round
    warm_s          later ones with the same
    cached_tokens   tokens that each of these found in the cache, as cachemgr counts them
    """

    prompt_tokens: int
    cold_s: list[float]
    warm_s: list[float]
    cached_tokens: list[int]

    @property
    def tokens_per_s(self) -> float:
        """The rate for a prompt that has to be computed."""
        return self.prompt_tokens / statistics.median(self.cold_s)

    @property
    def speedup(self) -> float:
        return statistics.median(self.cold_s) / statistics.median(self.warm_s)


async def measure_prompts(sizes: Sizes, progress: Progress, *, device: str) -> Prompted:
    task = progress.add_task("prompts, end to end", total=sizes.rounds + 1)
    num_tokens = sizes.system_tokens + sizes.own_tokens + sizes.new_tokens
    with tempfile.TemporaryDirectory() as name:
        llama_56m(Path(name))
        num_blocks = 4 * -(-num_tokens // BLOCK_SIZE) + 1
        setup = Setup(Path(name), num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)
        measured = Prompted(sizes.system_tokens + sizes.own_tokens, [], [], [])
        async with two_processes(setup) as running:
            for number in range(sizes.rounds + 1):
                await running.forget()
                cold, warm = await one_round(running, sizes, number)
                if number:
                    measured.cold_s.append(cold[0])
                    measured.warm_s.extend(seconds for seconds, _ in warm)
                    measured.cached_tokens.extend(found for _, found in warm)
                progress.advance(task)
    return measured


async def one_round(running: Running, sizes: Sizes, number: int) -> tuple[tuple[float, int], list[tuple[float, int]]]:
    """Seconds and cached tokens of the first request with a system prompt, and of the later ones."""
    generator = np.random.default_rng(number)
    system = generator.integers(3, 32_000, sizes.system_tokens).tolist()
    prompts = [system + generator.integers(3, 32_000, sizes.own_tokens).tolist() for _ in range(sizes.num_requests + 1)]
    first, *later = [await one_request(running, prompt, sizes.new_tokens) for prompt in prompts]
    return first, later


async def one_request(running: Running, prompt: Sequence[int], num_new: int) -> tuple[float, int]:
    before, start = running.engine.statistics().scheduler.cached_tokens, time.perf_counter()
    await generate(running.engine, [prompt], [num_new])
    taken = time.perf_counter() - start
    return round(taken, 4), running.engine.statistics().scheduler.cached_tokens - before


def measure_trace(name: str) -> list[Measurement]:
    """Every capacity for this file's block size."""
    file, requests = expectations()[name], load(name)
    measurements = []
    for capacity in CAPACITIES[file["block"]]:
        lru, default = (
            Replay(capacity, block_size=file["block"], policy=policy).run(requests)
            for policy in ("lru", DEFAULT_POLICY)
        )
        expected = file["capacity"].get(str(capacity), {})
        if expected and lru != Outcome(expected["lru_hit_blocks"], expected["lru_evictions"]):
            raise click.ClickException(f"LRU on {name} at {capacity} blocks is not as expected.json says")
        measured = Measurement(
            *(name.partition(".")[0], capacity, lru, default),
            *(expected.get("opt_hit_blocks"), file["hit_blocks_infinite"]),
        )
        measurements.append(measured)
    return measurements


def measure(quick: bool, progress: Progress, *, prompts: bool) -> Findings:
    names = [] if prompts else [QUICK_TRACE] if quick else list(expectations())
    task = progress.add_task("traces", total=len(names))
    traces: dict[str, list[Measurement]] = {}
    for name in names:
        progress.update(task, description=name.partition(".")[0])
        traces[name] = measure_trace(name)
        progress.advance(task)
    device = "cuda" if torch.cuda.is_available() and not quick else "cpu"
    prompted = asyncio.run(measure_prompts(QUICK if quick else Sizes(), progress, device=device))
    rows = [hit_ratios(name, measured) for name, each in traces.items() for measured in each]
    figures: dict[str, Any] = {
        "default": DEFAULT_POLICY,
        "device": device,
        "traces": rows,
        "end_to_end": asdict(prompted) | {"tokens_per_s": prompted.tokens_per_s, "speedup": prompted.speedup},
    }
    notes = [
        f"Prefill saved is at {prompted.tokens_per_s:,.0f} prompt tokens a second, as the prompts above took here."
    ]
    if prompts:
        return Findings([prompt_table(prompted)], figures)
    return Findings([prompt_table(prompted), trace_table(rows, prompted)], figures, lambda: plot(rows), notes)


def hit_ratios(name: str, measured: Measurement) -> dict[str, Any]:
    """Parts of the prompts' tokens that were found; Belady's is None where it is not known."""
    file = expectations()[name]

    def ratio(num_blocks: int | None) -> float | None:
        return None if num_blocks is None else num_blocks * file["block"] / file["input_tokens"]

    return {
        "trace": measured.trace,
        "block_size": file["block"],
        "input_tokens": file["input_tokens"],
        "capacity": measured.capacity,
        "default": ratio(measured.default.num_hits),
        "lru": ratio(measured.lru.num_hits),
        "belady": ratio(measured.belady_hits),
        "infinite": ratio(measured.infinite_hits),
        "blocks": {"default": asdict(measured.default), "lru": asdict(measured.lru)},
    }


def prompt_table(prompted: Prompted) -> Any:
    made = table("requests one at a time, the same system prompt", "", "first", "later ones")
    made.add_row("prompt tokens", f"{prompted.prompt_tokens:,}", f"{prompted.prompt_tokens:,}")
    blocks = statistics.median(prompted.cached_tokens) / BLOCK_SIZE
    made.add_row("blocks reused by each", "0", f"{blocks:g}")
    times = [spread([1e3 * seconds for seconds in each]) for each in (prompted.cold_s, prompted.warm_s)]
    made.add_row("ms to the last token", *times)
    made.add_row("times faster", "", f"{prompted.speedup:.1f}")
    return made


def trace_table(rows: Sequence[dict[str, Any]], prompted: Prompted) -> Any:
    headings = ("trace", "blocks", "default", "LRU", "Belady", "infinite", "default / LRU")
    made = table("part of the prompts' tokens found in the cache", *headings, "prefill saved, s", "than LRU, s")
    for row in rows:
        seconds = row["input_tokens"] / prompted.tokens_per_s
        shares = ["" if row[each] is None else percent(row[each]) for each in ("default", "lru", "belady", "infinite")]
        saved = (f"{row['default'] * seconds:,.1f}", f"{(row['default'] - row['lru']) * seconds:+,.1f}")
        blocks = row["blocks"]["default"]["num_hits"] / row["blocks"]["lru"]["num_hits"]
        about = (f"{row['trace']}, {row['block_size']} a block", f"{row['capacity']:,}")
        made.add_row(*about, *shares, f"{blocks:.3f}", *saved)
    totals = {policy: sum(row["blocks"][policy]["num_hits"] for row in rows) for policy in ("default", "lru")}
    made.add_row("all", *[""] * 5, f"{totals['default'] / totals['lru']:.4f}", "", "")
    return made


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """A panel per trace: token hit ratio over capacity."""
    traces = [list(group) for _, group in groupby(rows, key=lambda row: row["trace"])]
    figure, panels = pyplot.subplots(1, len(traces), figsize=(3 * len(traces) + 1, 3.4), squeeze=False)
    for axes, points in zip(panels[0], traces, strict=True):
        capacities = [row["capacity"] for row in points]
        axes.axhline(points[0]["infinite"], color="0.6", linestyle=":", label="infinite")
        known = [row for row in points if row["belady"] is not None]
        axes.plot([row["capacity"] for row in known], [row["belady"] for row in known], "k^--", label="Belady")
        axes.plot(capacities, [row["default"] for row in points], "s-", label=f"default ({DEFAULT_POLICY})")
        axes.plot(capacities, [row["lru"] for row in points], "o-", label="LRU")
        axes.set_xscale("log")
        axes.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities], rotation=60, fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.set_xlabel(f"blocks of {points[0]['block_size']} tokens")
        axes.set_title(points[0]["trace"], fontsize=9)
        plain(axes)
    panels[0][0].set_ylabel("token hit ratio")
    panels[0][0].legend(fontsize=8)
    return figure


FLAGS = {"--prompts": "Only requests to the services; no recorded requests."}
main = benchmark("prefix", measure, packages=("numpy", "torch", "transformers", "grpcio"), flags=FLAGS)

if __name__ == "__main__":
    main()
