"""The host tier and the disk as further caches: hits, time to the first token, decode steps while blocks come back.

    quire bench tiers

Recorded requests (benchmarks/traces) are served in the laboratory, in a pool with a tenth of the blocks that the
prompts have: with the device alone, with copies of evicted blocks in host tiers of two sizes, and with a disk below
the smaller one. Before that, steps of a real worker on the CPU are measured in turns, each with a decoding sequence:
alone, with a prompt that is found in the pool, that is copied from the host tier, or that is computed, and while a
prompt waits for its blocks from the disk. The pages of the disk's files are dropped from memory before they are read.
The rates of computing, copying, reading and writing in the laboratory are those that were measured.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from engines import NUM_CORES
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import block_bytes, llama_56m, tiny_llama
from replay import TRACES
from report import Findings, benchmark, percent, plain, spread, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.client.cache_client import CacheClient
from quire.client.worker_client import WorkerClient
from quire.compute.v1 import worker_service_pb2
from quire.lab.config import Fleet, LabConfig, LayerGroup, Load
from quire.lab.requests import Request
from quire.lab.simulation import Simulation
from quire.lab.step_times import StepTime
from quire.lab.traces import read_prompts, read_trace

BLOCK_SIZE = 16
DEVICE, HOST = cache_service_pb2.MEDIUM_DEVICE, cache_service_pb2.MEDIUM_HOST
NUM_PROMPTS = 1000
"""Numbers of the other prompts of a round."""
DISK_RATIO = 20
"""Bytes of the real worker's disk, in those of its host tier."""
LEASE_TTL_S = 3600.0
DECODING, PROMPT = 1, 2
WAYS = ("alone", "found in the pool", "copied from the host tier", "computed")
BESIDE_READS = "beside reads from the disk"
MAX_READING_STEPS = 10_000
POLL_S = 0.05
NUM_POLLS = 4
"""A disk that has written nothing for so many polls has nothing to write."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The requests, the pools, and the steps of the real worker.

    traces         files, the number of their first requests, and the window of half of the layers, 0 if they have none
    most_output    longer answers are cut
    pool_ratio     blocks of the pool, in those of all prompts; the longest request has room in any case
    host_ratios    blocks of the host tiers, in those of the pool
    disk_ratio     the same of the disk below the smaller one
    busy           part of the time in which the worker of the device alone computes: the trace's times are divided to
                   reach it
    prompt_blocks  full blocks of the prompt in a step of the real worker
    rounds         of the steps
    """

    traces: tuple[tuple[str, int, int], ...] = (
        ("sharegpt128_B16", 400, 0),
        ("sharegpt128_B16", 400, 1024),
        ("mooncake_conversation_2000", 400, 0),
        ("mooncake_toolagent_arxiv_1000", 400, 0),
    )
    most_output: int = 32
    pool_ratio: float = 0.1
    host_ratios: tuple[int, int] = (2, 9)
    disk_ratio: int = 18
    busy: float = 0.6
    prompt_blocks: int = 60
    rounds: int = 9


QUICK_STEP = StepTime("additive", 1e-3, 1e-4, copy_s=1e-4, read_s=2e-4, write_s=2e-4)
"""In place of what is measured: on a busy machine copies of so small a model may cost more than computing."""
QUICK = Sizes(
    traces=(("sharegpt128_B16", 100, 0), ("sharegpt128_B16", 100, 64)), most_output=2, prompt_blocks=6, rounds=1
)


# -- steps of a real worker -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """Seconds of a step by its way, a value a round; the blocks that were copied, and the seconds of these copies.

    beside_reads_s    medians of the decode steps while a prompt waits for the disk
    from_disk_s       from the plan that orders the reads to the end of the step that finds the prompt
    """

    prompt_tokens: int
    steps_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    num_copied: int = 0
    copy_s: float = 0.0
    beside_reads_s: list[float] = field(default_factory=list)
    from_disk_s: list[float] = field(default_factory=list)
    read_s: float = 0.0
    write_s: float = 0.0
    num_read: int = 0
    num_written: int = 0

    def median_s(self, way: str) -> float:
        return statistics.median(self.steps_s[way])

    @property
    def ratios(self) -> list[float]:
        """A step with copies, in the step of the same round that found the same blocks in the pool."""
        return [
            copied / found
            for found, copied in zip(
                self.steps_s["found in the pool"], self.steps_s["copied from the host tier"], strict=True
            )
        ]

    def step_time(self) -> StepTime:
        """The steps as the laboratory counts them."""
        alone_s = self.median_s("alone")
        token_s = max(1e-9, self.median_s("computed") - alone_s) / self.prompt_tokens
        return StepTime(
            "additive",
            alone_s,
            token_s,
            copy_s=self.copy_s / self.num_copied,
            read_s=self.read_s / self.num_read,
            write_s=self.write_s / self.num_written,
        )


class Bench:
    """A lease on a pool of both real processes: one sequence decodes, and prompts come beside it."""

    def __init__(
        self,
        cache: CacheClient,
        worker: WorkerClient,
        lease: cache_service_pb2.CreateLeaseResponse,
        disk: Path,
    ) -> None:
        self._cache, self._worker, self._lease, self._disk = cache, worker, lease, disk
        self._vocabulary = lease.geometry.vocabulary_size

    def draw(self, number: int, num_tokens: int) -> list[int]:
        """A prompt by its number."""
        return np.random.default_rng(number).integers(3, self._vocabulary, num_tokens).tolist()

    async def step(
        self, prompt: Sequence[int] = (), *, seq_id: int = PROMPT, ends: bool = False, waits: bool = False
    ) -> tuple[float, cache_service_pb2.PlanStepResponse]:
        """A step of the decoding sequence, with a prompt beside it or the end of the one before.

        A prompt that waits for the disk is refused until it is read.
        """
        plan = cache_service_pb2.PlanStepRequest(lease_id=self._lease.lease_id, epoch=self._lease.epoch)
        if ends:
            plan.release_sequence_ids.append(PROMPT)
        if seq_id != DECODING:
            plan.extends.sequence_ids.append(DECODING)
            plan.extends.token_counts.append(1)
        if prompt:
            plan.admissions.add(sequence_id=seq_id, token_ids=prompt, waits_for_prefix=waits)
        planned = await self._cache.plan(plan)
        if planned.refusals and not waits:
            raise RuntimeError(f"refused: {planned.refusals[0].error.message}")
        request = worker_service_pb2.RunStepRequest(grant=planned.grant)
        if prompt and not planned.refusals:
            sampling = worker_service_pb2.SamplingParameters(temperature=0.0)
            (num_found,) = planned.admitted_cached_token_counts
            request.inputs.add(sequence_id=seq_id, token_ids=prompt[num_found:], sampling=sampling)
        begun = time.perf_counter()
        await (await self._worker.run(request)).result()
        return time.perf_counter() - begun, planned

    async def round(self, number: int, measured: Measured, num_blocks: int) -> None:
        """The steps with one prompt: computed, evicted and copied back, found in the pool, alone, read from disk."""
        prompt = self.draw(number, measured.prompt_tokens)
        measured.steps_s["computed"].append((await self.step(prompt))[0])
        await self.step(ends=True)
        await self._evict(prompt, number, num_blocks, DEVICE)
        before = await self._worker.get_statistics()
        measured.steps_s["copied from the host tier"].append(await self._found(prompt))
        after = await self._worker.get_statistics()
        num_back = after.restored_block_count - before.restored_block_count
        if num_back != len(prompt) // BLOCK_SIZE:
            raise RuntimeError(f"{num_back} blocks were copied back of a prompt with {len(prompt) // BLOCK_SIZE}")
        measured.num_copied += num_back
        measured.copy_s += _seconds(after) - _seconds(before)
        measured.steps_s["found in the pool"].append(await self._found(prompt))
        measured.steps_s["alone"].append((await self.step())[0])
        await self._written()
        await self._evict(prompt, number + NUM_PROMPTS // 2, num_blocks, DEVICE, HOST)
        await self._written()
        await self._read_back(prompt, measured)

    async def _read_back(self, prompt: Sequence[int], measured: Measured) -> None:
        """Decode until the prompt has come from the disk, and is found."""
        forget_pages(self._disk)
        before = await self._worker.get_statistics()
        begun, beside_s = time.perf_counter(), []
        for _ in range(MAX_READING_STEPS):
            seconds, planned = await self.step(prompt, waits=True)
            if not planned.refusals:
                break
            beside_s.append(seconds)
        measured.from_disk_s.append(time.perf_counter() - begun)
        if planned.refusals or planned.admitted_cached_token_counts[0] != len(prompt) - 1:
            raise RuntimeError(f"the prompt did not come back from the disk after {len(beside_s)} steps")
        measured.beside_reads_s.append(statistics.median(beside_s))
        await self.step(ends=True)
        after = await self._worker.get_statistics()
        measured.num_read += after.disk_read_block_count - before.disk_read_block_count
        measured.read_s += (after.disk_read_time.ToNanoseconds() - before.disk_read_time.ToNanoseconds()) / 1e9
        measured.num_written = after.disk_write_block_count
        measured.write_s = after.disk_write_time.ToNanoseconds() / 1e9

    async def _written(self) -> None:
        """Wait until the disk has written what it was to write."""
        num_written, num_equal = -1, 0
        while num_equal < NUM_POLLS:
            now = (await self._worker.get_statistics()).disk_write_block_count
            num_equal = num_equal + 1 if now == num_written else 0
            num_written = now
            await asyncio.sleep(POLL_S)

    async def _found(self, prompt: Sequence[int]) -> float:
        """Seconds of the step in which a prompt is found whole, but for its last token. It ends after that."""
        seconds, planned = await self.step(prompt)
        if planned.admitted_cached_token_counts[0] != len(prompt) - 1:
            raise RuntimeError(f"{planned.admitted_cached_token_counts[0]} of {len(prompt)} tokens were found")
        await self.step(ends=True)
        return seconds

    async def _evict(self, prompt: Sequence[int], number: int, num_blocks: int, *media: int) -> None:
        """Compute other prompts until these media have no block of this one."""
        for other in range(1, NUM_PROMPTS // 2):
            (match,) = (await self._cache.lookup_prefix(prompt)).matches
            by_medium = {part.medium: part.token_count for part in match.tokens_by_medium}
            if not any(by_medium.get(medium) for medium in media):
                return
            await self.step(self.draw(NUM_PROMPTS * number + other, len(prompt)))
            await self.step(ends=True)
            await self._written()
        raise RuntimeError(f"the prompt is still in the pool of {num_blocks} blocks, or in its host tier")


def forget_pages(directory: Path) -> None:
    """Have the disk read from the disk: drop the pages of its files."""
    for path in directory.glob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _seconds(statistics: worker_service_pb2.GetStatisticsResponse) -> float:
    """Of all copies to the host tier and back."""
    return statistics.host_copy_time.ToNanoseconds() / 1e9


async def measure_steps(model: Path, sizes: Sizes, progress: Progress) -> Measured:
    task = progress.add_task("steps of the worker", total=sizes.rounds + 1)
    num_tokens = sizes.prompt_blocks * BLOCK_SIZE + 1
    num_blocks = 4 * sizes.prompt_blocks
    flags = ("--dtype", "float32", "--device", "cpu", "--threads", str(NUM_CORES), "--block-size", str(BLOCK_SIZE))
    host_bytes = num_blocks * block_bytes(model, BLOCK_SIZE)
    disk = model.with_name("disk")
    tiers = (
        *("--host-memory", str(host_bytes), "--host-cache-share", "1"),
        *("--disk-dir", str(disk), "--disk-memory", str(DISK_RATIO * host_bytes), "--disk-write-rate", "16G"),
    )
    async with LocalServices(model=model, num_blocks=num_blocks, extra_worker_args=(*flags, *tiers)) as services:
        cache, worker = CacheClient(services.cachemgr_address), WorkerClient(services.worker_address)
        try:
            lease = await cache.create_lease("default", ttl_s=LEASE_TTL_S)
            bench = Bench(cache, worker, lease, disk)
            await bench.step(bench.draw(0, num_tokens // 2), seq_id=DECODING)
            measured = Measured(num_tokens)
            for number in range(1, sizes.rounds + 2):
                if number == 2:
                    measured = Measured(num_tokens)  # the first round was to warm up
                await bench.round(number, measured, num_blocks)
                progress.advance(task)
            await cache.delete_lease(lease.lease_id)
        finally:
            await worker.close()
            await cache.close()
    return measured


# -- recorded requests in the laboratory ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A trace in the laboratory, with a host tier and a disk of these sizes; ratios are parts of all prompt tokens."""

    trace: str
    window: int
    block_size: int
    prompt_blocks: int
    pool_blocks: int
    host_blocks: int
    disk_blocks: int
    speed: float
    device_hit_ratio: float
    host_hit_ratio: float
    disk_hit_ratio: float
    first_token_p50_s: float
    first_token_p90_s: float
    computed_tokens: int
    copied_blocks: int
    copying_ratio: float
    busy_ratio: float


def serve(trace: str, most: int, window: int, sizes: Sizes, step: StepTime) -> Iterator[Served]:
    """The first requests of a trace: with the device alone, with each host tier, and with a disk below the first.

    With a window there are two layer groups, blocks of half the layers, and twice as many of them.
    """
    path = TRACES / f"{trace}.jsonl.gz"
    block_size, prompts = read_prompts(path)
    prompt_blocks = len({block for prompt in prompts[:most] for block in prompt.block_ids})
    requests = [_cut(request, sizes.most_output) for request in read_trace(path, most=most)]
    longest = max(request.num_prompt + request.num_output for request in requests)
    groups = (LayerGroup("full", 1), LayerGroup("sliding", 1, window)) if window else ()
    num_groups = len(groups) or 1
    pool_blocks = num_groups * max(round(sizes.pool_ratio * prompt_blocks), longest // block_size + 2)
    scale = block_size / BLOCK_SIZE / num_groups
    times = {name: getattr(step, name) * scale for name in ("copy_s", "read_s", "write_s")}
    step = replace(step, **times)

    def run(host_blocks: int, disk_blocks: int, requests: Sequence[Request]) -> tuple[dict[str, float], float]:
        fleet = Fleet(
            step,
            pool_blocks,
            block_size=block_size,
            max_sequence_tokens=2**20,
            host_blocks=host_blocks,
            host_cache_share=1.0 if host_blocks else 0.0,
            disk_blocks=disk_blocks,
            layer_groups=groups,
        )
        config = LabConfig(name=trace, load=Load(trace=path, lengths="known"), fleet=fleet)
        simulation = Simulation(config, 1, requests)
        return simulation.run().metrics, simulation.pools[0].busy_s

    speed = sizes.busy * requests[-1].at_s / run(0, 0, requests)[1]
    requests = [replace(request, at_s=request.at_s / speed) for request in requests]
    small, large = (ratio * pool_blocks for ratio in sizes.host_ratios)
    for host_blocks, disk_blocks in ((0, 0), (small, 0), (large, 0), (small, sizes.disk_ratio * pool_blocks)):
        metrics, _ = run(host_blocks, disk_blocks, requests)
        yield Served(
            *(trace, window, block_size, prompt_blocks, pool_blocks, host_blocks, disk_blocks, speed),
            device_hit_ratio=metrics["hit_ratio"] - metrics["host_hit_ratio"],
            **{name: metrics[name] for name in Served.__dataclass_fields__ if name in metrics},
        )


def _cut(request: Request, most_output: int) -> Request:
    num_output = min(request.num_output, most_output)
    return replace(request, num_output=num_output, content=request.content.cut(0, request.num_prompt + num_output))


# -- all of it --------------------------------------------------------------------------------------------------------


def measure(quick: bool, progress: Progress) -> Findings:
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "tiny" if quick else "llama")
        (tiny_llama if quick else llama_56m)(model)
        measured = asyncio.run(measure_steps(model, sizes, progress))
    step = QUICK_STEP if quick else measured.step_time()
    block_s = BLOCK_SIZE * float(step.token_s)
    task = progress.add_task("", total=len(sizes.traces) * 4)
    served: list[Served] = []
    for trace, most, window in sizes.traces:
        progress.update(task, description=trace)
        for each in serve(trace, most, window, sizes, step):
            served.append(each)
            progress.advance(task)
    figures = {
        "sizes": asdict(sizes),
        "step": asdict(step),
        "steps": asdict(measured) | {"ratios": measured.ratios},
        "served": [asdict(each) for each in served],
    }
    notes = [
        f"A block of {BLOCK_SIZE} tokens takes {1e3 * block_s:.2f} ms to compute, {1e3 * step.copy_s:.2f} ms to copy, "
        f"{1e3 * step.read_s:.2f} ms to read from the disk and {1e3 * step.write_s:.2f} ms to write.",
        f"A step with {measured.prompt_tokens // BLOCK_SIZE} copies takes {spread(measured.ratios, '.2f')} times as "
        "long as one that finds the same blocks in the pool.",
        f"From the disk the prompt is found after {spread([1e3 * each for each in measured.from_disk_s], '.0f')} ms.",
    ]
    return Findings([step_table(measured), trace_table(served)], figures, lambda: plot(served), notes)


def step_table(measured: Measured) -> Any:
    made = table(f"a step of one decoding sequence, and a prompt of {measured.prompt_tokens} tokens, ms", "", "step")
    for way in WAYS:
        made.add_row(way, spread([1e3 * seconds for seconds in measured.steps_s[way]], ".1f"))
    made.add_row(BESIDE_READS, spread([1e3 * seconds for seconds in measured.beside_reads_s], ".1f"))
    return made


def trace_table(served: Sequence[Served]) -> Any:
    headings = (
        "found in the pool",
        "in the host tier",
        "of these read",
        "s to the first token",
        "90 %",
        "tokens computed",
        "copying",
    )
    made = table(
        "recorded requests in the laboratory", "trace, tokens of a block", "pool", "host tier", "disk", *headings
    )
    for each in served:
        made.add_row(
            f"{each.trace}{f', window {each.window}' if each.window else ''}, {each.block_size}",
            f"{each.pool_blocks:,}",
            f"{each.host_blocks:,}",
            f"{each.disk_blocks:,}",
            *(percent(ratio) for ratio in (each.device_hit_ratio, each.host_hit_ratio, each.disk_hit_ratio)),
            *(f"{seconds:.3f}" for seconds in (each.first_token_p50_s, each.first_token_p90_s)),
            f"{each.computed_tokens:,.0f}",
            percent(each.copying_ratio, 2),
        )
    return made


def plot(served: Sequence[Served]) -> Figure:
    """By trace, a bar for each host tier and for the disk: tokens found, and the time to the first token."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8))
    traces = list(dict.fromkeys((each.trace, each.window) for each in served))
    for index, trace in enumerate(traces):
        bars = [each for each in served if (each.trace, each.window) == trace]
        for number, each in enumerate(bars):
            at = index + (number - (len(bars) - 1) / 2) * 0.2
            label = {"label": _name(each)} if not index else {}
            colour = ("0.7", "tab:cyan", "tab:blue", "tab:green")[number]
            left.bar(at, 100 * each.device_hit_ratio, width=0.18, color="0.85", edgecolor=colour)
            left.bar(at, 100 * each.host_hit_ratio, width=0.18, bottom=100 * each.device_hit_ratio, color=colour)
            right.bar(at, each.first_token_p50_s / bars[0].first_token_p50_s, width=0.18, color=colour, **label)
    left.set_title("% of prompt tokens found: grey in the pool, colour in the host tier", fontsize=9)
    right.set_title("median time to the first token, relative to that of the device alone", fontsize=9)
    right.set_ylim(0, 1.4)
    right.legend(fontsize=8)
    for axes in (left, right):
        names = [trace.replace("_", "\n", 1) + (f"\nwindow {window}" if window else "") for trace, window in traces]
        axes.set_xticks(range(len(traces)), names)
        axes.tick_params(axis="x", labelsize=7)
        plain(axes)
    return figure


def _name(each: Served) -> str:
    if not each.host_blocks:
        return "device alone"
    host = f"host tier of {each.host_blocks // each.pool_blocks} times the pool"
    return host + (f", disk of {each.disk_blocks // each.pool_blocks}" if each.disk_blocks else "")


main = benchmark("tiers", measure, packages=("torch", "transformers", "numpy"))

if __name__ == "__main__":
    main()
