"""Mixed load for as long as wanted, and the growth meanwhile: `make soak ARGS="--minutes 60"`.

One client with many requests at a time: greedy and sampled, one sample and two, some beginning alike, long and short,
some cancelled, some read slowly, some refused; every minute the engine is closed and opened again. Memory, open file
descriptors, threads, leases and blocks by state are read every few seconds. Once warm, each must not rise by more than
its limit in an hour, by the line through its readings; and at the end no lease, no sequence and no block may be left.
The threads of gRPC's own pool are counted apart: it starts one more whenever all of them are busy, and ends it only
after a long idle time. There may be twice as many as at first.

Memory rises with tables that grow by design (the prefix index of a pool, bounded by the pool) until the pool has been
full once. Hence the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
import click
import matplotlib as mpl
import numpy as np
import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table
from robustness.faults.harness import DTYPE_FLAGS
from robustness.faults.workload import BLOCK_SIZE, MAX_STEP_TOKENS, NUM_BLOCKS, VOCAB_SIZE

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.client.cache_client import CacheClient
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.sampling import SamplingParams
from quire.client.errors import InvalidRequest

mpl.use("Agg")
from matplotlib import pyplot  # after the choice of what it draws with

MODEL = Path(__file__).parents[3] / "deploy/demo/model"
MIB = 2**20
NUM_CALLERS = 12
ENGINE_LIFE_S = 60.0
WARM_UP = 0.25
"""The part of the run that is not judged."""
WORKER_ARGS = (
    *("--threads", "1", "--block-size", str(BLOCK_SIZE), "--host-memory", "256K"),
    *("--max-num-seqs", "16", "--max-step-tokens", str(MAX_STEP_TOKENS)),
)
PROCESSES = ("cachemgr", "worker", "client")
LIMITS_PER_HOUR = {"rss_mib": 24.0, "fds": 2.0, "threads": 1.0}
"""The most that a reading may rise in an hour once warm."""
GRPC_THREAD = "event_engine"
"""gRPC's name for the threads of its pool."""
MAX_GRPC_GROWTH = 2
SHORTEST_JUDGED_S = 120.0
"""A line through less than this says nothing of an hour."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at everything."""

    at_s: float
    cachemgr_rss_mib: float
    cachemgr_fds: int
    cachemgr_threads: int
    cachemgr_grpc_threads: int
    worker_rss_mib: float
    worker_fds: int
    worker_threads: int
    worker_grpc_threads: int
    client_rss_mib: float
    client_fds: int
    client_threads: int
    client_grpc_threads: int
    free: int
    cached: int
    active: int
    retired: int
    leases: int
    sequences: int
    requests: int
    tokens: int


@dataclass
class Load:
    """The sent requests and the answers so far."""

    num_requests: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    num_refused: int = 0


class Callers:
    """Callers of one engine, each with a request at a time."""

    def __init__(self, load: Load, *, seed: int) -> None:
        self._load = load
        self._generator = random.Random(seed)
        self._beginnings = [self._draw(40) for _ in range(6)]

    async def call(self, engine: Engine, until: float) -> None:
        """All callers, until this time by the monotonic clock."""
        await asyncio.gather(*(self._caller(engine, until) for _ in range(NUM_CALLERS)))

    async def _caller(self, engine: Engine, until: float) -> None:
        while time.monotonic() < until:
            await self._request(engine)

    async def _request(self, engine: Engine) -> None:
        generator, load = self._generator, self._load
        beginning = generator.choice(self._beginnings)[: generator.choice((0, 4, 16, 30, 40))]
        prompt = beginning + self._draw(generator.randint(1, 12))
        if generator.random() < 0.02:
            prompt = self._draw(4 * VOCAB_SIZE)  # more than the model takes
        kind = generator.randrange(4)
        params = SamplingParams(
            max_tokens=generator.randint(1, 32),
            temperature=0 if kind == 0 else 0.9,
            n=2 if kind == 1 else 1,
            repetition_penalty=1.2 if kind == 2 else 1.0,
            logprobs=2 if kind == 3 else None,
        )
        cancelled_after = generator.randint(1, 8) if generator.random() < 0.15 else None
        pause_s = 0.05 if generator.random() < 0.1 else 0.0
        load.num_requests += 1
        num_tokens = 0
        try:
            async with contextlib.aclosing(engine.generate(prompt, params)) as chunks:
                async for chunk in chunks:
                    num_tokens += len(chunk.token_ids)
                    load.num_tokens += len(chunk.token_ids)
                    if cancelled_after is not None and num_tokens >= cancelled_after:
                        load.num_cancelled += 1
                        return
                    if pause_s:
                        await asyncio.sleep(pause_s)
        except InvalidRequest:
            load.num_refused += 1

    def _draw(self, count: int) -> list[int]:
        return [self._generator.randrange(VOCAB_SIZE) for _ in range(count)]


class Soak:
    """Both services as processes of their own, and the load from here."""

    def __init__(self, services: LocalServices, *, seed: int, period_s: float) -> None:
        assert services.cachemgr.pid is not None
        assert services.worker.pid is not None
        self._services = services
        self._seed = seed
        self._period_s = period_s
        self._pids = dict(zip(PROCESSES, (services.cachemgr.pid, services.worker.pid, None), strict=True))
        self.load = Load()
        self.readings: list[Reading] = []

    async def run(self, duration_s: float, live: Live) -> cache_service_pb2.Pool:
        """The load and the readings; returns the pool as it is when all has ended."""
        self._began = time.monotonic()
        self._cache = CacheClient(self._services.cachemgr_address)
        reading = asyncio.create_task(self._read_again_and_again(live))
        callers, end = Callers(self.load, seed=self._seed), self._began + duration_s
        try:
            while (now := time.monotonic()) < end:
                config = EngineConfig(max_step_tokens=MAX_STEP_TOKENS)
                async with Engine.connect(self._services.cachemgr_address, config=config) as engine:
                    await callers.call(engine, min(end, now + ENGINE_LIFE_S))
                if reading.done():
                    reading.result()
            return await self._at_rest()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self._cache.close()

    async def _at_rest(self) -> cache_service_pb2.Pool:
        """The pool once its lease has ended, or after a minute in any state."""
        for _ in range(600):
            pool = await self._cache.get_pool()
            if not pool.lease_count:
                break
            await asyncio.sleep(0.1)
        return pool

    async def _read_again_and_again(self, live: Live) -> None:
        while True:
            self.readings.append(await self._read())
            live.update(show(self.readings, self.load))
            await asyncio.sleep(self._period_s)

    async def _read(self) -> Reading:
        pool = await self._cache.get_pool()
        processes: dict[str, float] = {}
        for name, pid in self._pids.items():
            process = psutil.Process(pid)
            threads = thread_names(process.pid)
            num_grpc = threads.count(GRPC_THREAD)
            processes |= {
                f"{name}_rss_mib": process.memory_info().rss / MIB,
                f"{name}_fds": process.num_fds(),
                f"{name}_threads": len(threads) - num_grpc,
                f"{name}_grpc_threads": num_grpc,
            }
        counts = pool.block_counts
        return Reading(
            at_s=time.monotonic() - self._began,
            free=counts.free_count,
            cached=counts.cached_count,
            active=counts.active_count,
            retired=counts.retired_count,
            leases=pool.lease_count,
            sequences=pool.sequence_count,
            requests=self.load.num_requests,
            tokens=self.load.num_tokens,
            **processes,  # type: ignore[arg-type]
        )


def thread_names(pid: int) -> list[str]:
    """The names of a process's threads, as the kernel has them."""
    names = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text().strip())
    return names


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend of one reading, once warm. rise_per_hour is the line's slope."""

    name: str
    first: float
    last: float
    rise_per_hour: float
    limit_per_hour: float

    @property
    def is_within(self) -> bool:
        return self.rise_per_hour <= self.limit_per_hour


def trends(readings: list[Reading]) -> Iterator[Trend]:
    """The trends of each process's memory, file descriptors and threads. Empty if the run was too short."""
    warm = [reading for reading in readings if reading.at_s >= WARM_UP * readings[-1].at_s]
    if len(warm) < 3 or warm[-1].at_s - warm[0].at_s < SHORTEST_JUDGED_S:
        return
    at_h = np.array([reading.at_s for reading in warm]) / 3600
    for process in PROCESSES:
        for kind, limit in LIMITS_PER_HOUR.items():
            values = np.array([getattr(reading, f"{process}_{kind}") for reading in warm], dtype=float)
            slope = float(np.polyfit(at_h, values, 1)[0])
            yield Trend(f"{process} {kind}", float(values[0]), float(values[-1]), slope, limit)


def leftovers(pool: cache_service_pb2.Pool) -> list[str]:
    """Objects that should not exist when all requests have ended."""
    counts, host_counts = pool.block_counts, pool.host_block_counts
    found = {
        "leases": pool.lease_count,
        "sequences": pool.sequence_count,
        "active blocks": counts.active_count,
        "retired blocks": counts.retired_count,
        "host blocks held": host_counts.held_count,
        "host blocks retired": host_counts.retired_count,
        "blocks missing": pool.geometry.block_count - 1 - counts.free_count - counts.cached_count,
    }
    return [f"{count} {what}" for what, count in found.items() if count]


def grown_pools(readings: list[Reading]) -> list[str]:
    """Processes with many more gRPC threads than at first."""
    first = readings[min(1, len(readings) - 1)]  # the first of all may have come before the pool
    found = []
    for process in PROCESSES:
        before = getattr(first, f"{process}_grpc_threads")
        most = max(getattr(reading, f"{process}_grpc_threads") for reading in readings)
        if most > MAX_GRPC_GROWTH * before:
            found.append(f"{process} had {most} threads of gRPC's, {before} at first")
    return found


def show(readings: list[Reading], load: Load) -> Table:
    """The last reading, beside the first."""
    first, last = readings[0], readings[-1]
    table = Table(title=f"{last.at_s:.0f} s, {load.num_requests} requests, {load.num_tokens} tokens")
    for column in ("", "RSS MiB", "file descriptors", "threads"):
        table.add_column(column, justify="right")
    for process in PROCESSES:
        cells = []
        for kind in LIMITS_PER_HOUR:
            before, now = (getattr(reading, f"{process}_{kind}") for reading in (first, last))
            cells.append(f"{now:.4g} ({now - before:+.3g})")
        table.add_row(process, *cells)
    blocks = f"{last.free} free, {last.cached} cached, {last.active} active, {last.retired} retired"
    table.caption = f"blocks: {blocks}; {last.leases} leases, {last.sequences} sequences"
    return table


def write_readings(readings: list[Reading], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Reading)])
        writer.writeheader()
        writer.writerows(map(asdict, readings))


def draw(readings: list[Reading], path: Path) -> None:
    """Memory, file descriptors, threads and blocks over the minutes."""
    minutes = [reading.at_s / 60 for reading in readings]
    figure, axes = pyplot.subplots(4, 1, sharex=True, figsize=(9, 11), layout="constrained")
    labels = ("RSS, MiB", "file descriptors", "threads, without gRPC's pool")
    for axis, kind, label in zip(axes, LIMITS_PER_HOUR, labels, strict=False):
        for process in PROCESSES:
            axis.plot(minutes, [getattr(reading, f"{process}_{kind}") for reading in readings], label=process)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(loc="center right")
    for state in ("free", "cached", "active", "retired"):
        axes[3].plot(minutes, [getattr(reading, state) for reading in readings], label=state, linewidth=0.8)
    axes[3].set_ylabel("blocks")
    axes[3].set_xlabel("minutes")
    axes[3].legend(loc="center right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show_trends(found: list[Trend]) -> Table:
    table = Table(title="once warm")
    for column in ("", "first", "last", "rise per hour", "limit"):
        table.add_column(column, justify="right")
    for trend in found:
        values = (f"{value:.4g}" for value in (trend.first, trend.last, trend.rise_per_hour, trend.limit_per_hour))
        table.add_row(trend.name, *values, style="" if trend.is_within else "red")
    return table


def judge(console: Console, readings: list[Reading], left: list[str]) -> bool:
    """Prints the verdict; whether nothing leaks."""
    found = list(trends(readings))
    if found:
        console.print(show_trends(found))
    if left:
        console.print(f"left over: {', '.join(left)}", style="red")
    rising = [*(trend.name for trend in found if not trend.is_within), *grown_pools(readings)]
    if rising:
        console.print(f"rising: {', '.join(rising)}", style="red")
    elif not found:
        console.print("too short to judge what rises", style="yellow")
    elif not left:
        console.print("nothing leaks", style="green")
    return not left and not rising


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="How long.")
@click.option("--period", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Seconds per reading.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of what is asked for.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path(tempfile.gettempdir(), "quire-soak"),
    show_default=True,
    help="Folder for readings.csv, plot.png and the services' logs.",
)
@click.option("--deterministic", is_flag=True, help="A worker in bfloat16 with --deterministic, not in float32.")
def main(minutes: float, period: float, seed: int, output: Path, deterministic: bool) -> None:
    """Look for leaks under mixed load."""
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    with (
        LocalServices.start(
            model=MODEL,
            num_blocks=NUM_BLOCKS,
            extra_worker_args=(*DTYPE_FLAGS[deterministic], *WORKER_ARGS),
            runtime_dir=output,
        ) as services,
        Live(console=console, refresh_per_second=1) as live,
    ):
        soak = Soak(services, seed=seed, period_s=period)
        pool = asyncio.run(soak.run(minutes * 60, live))
    write_readings(soak.readings, output / "readings.csv")
    draw(soak.readings, output / "plot.png")
    load = soak.load
    console.print(
        f"{load.num_requests} requests ({load.num_cancelled} cancelled, {load.num_refused} refused), "
        f"{load.num_tokens} tokens; plot: {output}/plot.png",
        highlight=False,
    )
    sys.exit(0 if judge(console, soak.readings, leftovers(pool)) else 1)


if __name__ == "__main__":
    main()
