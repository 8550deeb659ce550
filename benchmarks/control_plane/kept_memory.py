"""The death of a worker under load, with a holder, with a disk and without: tokens computed again, and seconds lost.

    quire bench control-plane kept-memory

All pairs of services have --state-dir, one has a holder and one a disk. In turns each loses its worker by SIGKILL, or
the worker and right behind it cachemgr, while all requests decode and about 60 % of the pool is published. Before each
round the prefix cache is emptied. A disk has only what was evicted: there the prompts were computed once before, and
evicted by others.

    computed again   tokens of the requests that came back by re-admission, without those found in the prefix cache
    until all go on  from the kill until the last request has its next token: the start of the worker is most of it
    processor        of the new worker until then

Then what the records of kept blocks cost: see kept_records.py.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from kept_records import measure_records
from models import block_bytes
from report import Findings, benchmark, spread, table
from rich.progress import Progress

from quire.cache.v1.cache_service_pb2 import MEDIUM_DISK, PoolStatistics
from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig
from quire.client.cache_client import CacheClient

MODEL = Path(__file__).parents[2] / "deploy/demo/model"
BLOCK_SIZE = 16
VOCABULARY = 2048
NUM_BEFORE = 3
"""Tokens that each request has before the kill."""
DRAIN_S = 0.2
"""After the kill: tokens that were on their way arrive. A worker takes longer to start."""
OUTAGES = ("worker", "worker and cachemgr")
WAYS = ("not kept", "kept", "on a disk")
POLL_S = 0.05
START_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the load, of the pool, and of the rounds."""

    num_requests: int = 12
    prompt_tokens: int = 500
    new_tokens: int = 200
    num_blocks: int = 640
    rounds: int = 3


QUICK = Sizes(num_requests=3, num_blocks=160, rounds=1)


@dataclass(frozen=True, slots=True)
class Outage:
    """One round. `published` is the part of the pool at the kill."""

    published: float
    computed_again: int
    until_all_go_on_s: float
    processor_s: float


@dataclass(slots=True)
class Answer:
    """The tokens of one request as they come."""

    num_tokens: int = 0
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, engine: Engine, prompt: list[int], num_new: int) -> None:
        async for chunk in engine.generate(prompt, max_tokens=num_new, temperature=0.0, ignore_eos=True):
            self.num_tokens += len(chunk.token_ids)
            self.grown.set()

    async def reach(self, num_tokens: int) -> None:
        while self.num_tokens < num_tokens:
            self.grown.clear()
            await self.grown.wait()


async def lose(services: LocalServices, outage: str, way: str, sizes: Sizes, *, seed: int) -> Outage:
    """One round of a load."""
    address = services.cachemgr_address
    async with AsyncExitStack() as stack:
        await empty_cache(address)
        before = await statistics_of(address)
        config = EngineConfig(recovery_timeout_s=START_TIMEOUT_S)
        engine = await stack.enter_async_context(Engine.connect(address, config=config))
        shape = (sizes.num_requests, sizes.prompt_tokens)
        prompts = np.random.default_rng(seed).integers(0, VOCABULARY, shape).tolist()
        if way == "on a disk":
            await put_on_disk(engine, address, prompts, sizes, seed=seed)
            before = await statistics_of(address)
        answers = [Answer() for _ in prompts]
        reading = asyncio.gather(
            *(answer.read(engine, prompt, sizes.new_tokens) for answer, prompt in zip(answers, prompts, strict=True))
        )
        stack.push_async_callback(cancel, reading)
        await asyncio.gather(*(answer.reach(NUM_BEFORE) for answer in answers))
        num_published = (await statistics_of(address)).published_block_count - before.published_block_count
        killed_at = time.perf_counter()
        await asyncio.to_thread(kill, services, outage)
        await asyncio.sleep(DRAIN_S)
        counts = [answer.num_tokens for answer in answers]
        await asyncio.to_thread(start_again, services, outage)
        await asyncio.gather(*(answer.reach(count + 1) for answer, count in zip(answers, counts, strict=True)))
        until_all_go_on_s = time.perf_counter() - killed_at
        times = psutil.Process(services.worker.pid).cpu_times()
        after = await statistics_of(address)
        num_again = after.resumed_token_count - after.resumed_cached_token_count
        return Outage(num_published / (sizes.num_blocks - 1), num_again, until_all_go_on_s, times.user + times.system)


async def put_on_disk(engine: Engine, address: str, prompts: list[list[int]], sizes: Sizes, *, seed: int) -> None:
    """Compute the prompts, then others until pool and host tier have no block of them, and the disk has all."""
    num_others = 2 * sizes.num_blocks * BLOCK_SIZE // sizes.prompt_tokens + 1
    others = np.random.default_rng(seed + 1_000).integers(0, VOCABULARY, (num_others, sizes.prompt_tokens)).tolist()
    for prompt in [*prompts, *others]:
        await Answer().read(engine, prompt, 1)
        while (await statistics_of(address)).disk_block_counts.retired_count:
            await asyncio.sleep(POLL_S)
    async with cache_at(address) as cache:
        for prompt in prompts:
            (match,) = (await cache.lookup_prefix(prompt)).matches
            on_disk = [each.token_count for each in match.tokens_by_medium if each.medium == MEDIUM_DISK]
            if not on_disk or on_disk[0] != match.cached_token_count:
                raise RuntimeError(f"{match.tokens_by_medium}: the prompt is not on the disk alone")


@asynccontextmanager
async def cache_at(address: str) -> AsyncIterator[CacheClient]:
    """A connection of its own: an older one may still wait for the cachemgr that was killed."""
    cache = CacheClient(address)
    try:
        yield cache
    finally:
        await cache.close()


async def statistics_of(address: str) -> PoolStatistics:
    async with cache_at(address) as cache:
        return (await cache.get_statistics())[0]


async def empty_cache(address: str) -> None:
    async with cache_at(address) as cache:
        await cache.reset_prefix_cache()


async def cancel(reading: asyncio.Future[Any]) -> None:
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


def kill(services: LocalServices, outage: str) -> None:
    services.worker.kill()
    if outage != "worker":
        services.cachemgr.kill()


def start_again(services: LocalServices, outage: str) -> None:
    if outage != "worker":
        services.cachemgr.start()
    services.worker.start()


def start(folder: Path, sizes: Sizes, way: str) -> LocalServices:
    host_bytes = sizes.num_blocks * block_bytes(MODEL, BLOCK_SIZE) // 4
    disk = (
        *("--host-memory", str(host_bytes), "--host-cache-share", "1"),
        *("--disk-dir", str(folder / "kv"), "--disk-memory", str(40 * host_bytes)),
    )
    flags = ("--block-size", str(BLOCK_SIZE), "--threads", "1")
    return LocalServices.start(
        model=MODEL,
        num_blocks=sizes.num_blocks,
        extra_cachemgr_args=("--state-dir", str(folder / "state")),
        extra_worker_args=(*flags, *disk) if way == "on a disk" else flags,
        keeps_memory=way == "kept",
        runtime_dir=folder,
        worker_start_timeout_s=START_TIMEOUT_S,
    )


def measure(quick: bool, progress: Progress) -> Findings:
    """In turns, so that what else the machine does falls on all."""
    sizes = QUICK if quick else Sizes()
    found: dict[tuple[str, str], list[Outage]] = {}
    task = progress.add_task("outages", total=sizes.rounds * len(OUTAGES) * len(WAYS))
    with tempfile.TemporaryDirectory(prefix="q-") as name, ExitStack() as stack:
        pairs: dict[str, LocalServices] = {}
        for number, way in enumerate(WAYS):
            pairs[way] = start(Path(name, str(number)), sizes, way)
            stack.callback(pairs[way].stop)
        for seed, outage, way in product(range(sizes.rounds), OUTAGES, WAYS):
            losing = asyncio.wait_for(lose(pairs[way], outage, way, sizes, seed=seed), ROUND_TIMEOUT_S)
            found.setdefault((outage, way), []).append(asyncio.run(losing))
            progress.advance(task)
    made = table("SIGKILL under load", "", "published", "computed again", "seconds until all go on", "processor s")
    for (outage, way), rounds in found.items():
        made.add_row(
            f"{outage}, {way}",
            f"{statistics.median(each.published for each in rounds):.0%}",
            f"{statistics.median(each.computed_again for each in rounds):,.0f}",
            spread([each.until_all_go_on_s for each in rounds], ".1f"),
            spread([each.processor_s for each in rounds], ".1f"),
        )
    figures = {
        "sizes": asdict(sizes),
        "outages": [
            {"lost": outage, "way": way, "rounds": [asdict(each) for each in rounds]}
            for (outage, way), rounds in found.items()
        ],
    }
    progress.update(task, description="records")
    records, figures["records"] = measure_records(quick)
    return Findings([made, records], figures)


main = benchmark("control-plane kept-memory", measure, packages=("torch", "transformers", "grpcio"))

if __name__ == "__main__":
    main()
