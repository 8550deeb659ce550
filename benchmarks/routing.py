"""Requests over two workers: by the gateway's router, by prefix alone, and in turn; hits and time to first token.

    quire bench routing

Two workers, of one thread each, serve a Llama of 56 M parameters in float32 on this machine. Two loads: conversations,
each turn begins with all earlier ones; and one long prefix that all requests share, in bursts. Tokens found in
the cache, seconds from a request to its first token, and seconds for the whole load. The caches are empty at first.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from in_process import LEASE_TTL_S
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m, tiny_llama
from report import Findings, benchmark, percent, plain, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.cli.service_process import WORKER_START_TIMEOUT_S, ServiceProcess
from quire.client import CacheClient, CacheParams, EngineConfig, SamplingParams
from quire.gateway.routing.router import Router

POOLS = ("worker-1", "worker-2")
logging.getLogger("quire.client").setLevel(logging.ERROR)  # these models have no tokenizer, and need none
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, and numbers of requests.

    sessions, turns             conversations at once, and turns of each; first_tokens and then turn_tokens are new
    shared_tokens, own_tokens   of the prefix that all requests have, and of each request's own
    bursts, burst               bursts, one behind the other, and requests of each at once
    """

    new_tokens: int = 16
    sessions: int = 6
    turns: int = 3
    first_tokens: int = 256
    turn_tokens: int = 64
    shared_tokens: int = 512
    own_tokens: int = 32
    bursts: int = 2
    burst: int = 12
    rounds: int = 2
    num_blocks: int = 1024
    vocabulary: int = 32_000


QUICK = Sizes(
    new_tokens=4, sessions=3, turns=2, first_tokens=32, turn_tokens=16, shared_tokens=64, bursts=2, burst=3, rounds=1,
    num_blocks=128, vocabulary=512,
)  # fmt: skip


class InTurn(Router):
    """Each request to the next pool."""

    _next = 0

    async def _place(self, token_ids: list[int], *_: Any, **__: Any) -> tuple[Any, int]:
        members = [self._members[name] for name in sorted(self._members)]
        self._next += 1
        return members[self._next % len(members)], 0


class ByPrefix(Router):
    """Each request to the pool with the most cached tokens, whatever the load; in turn, if none has any."""

    _next = 0

    async def _place(
        self, token_ids: list[int], params: SamplingParams, cache: CacheParams, *_: Any, **__: Any
    ) -> tuple[Any, int]:
        matches = await self._look_up(token_ids, params, cache)
        self._next += 1
        order = sorted(matches)[self._next % len(matches) :] + sorted(matches)
        best = max(order, key=lambda name: matches[name].cached_token_count)
        return self._members[best], matches[best].cached_token_count


WAYS: dict[str, type[Router]] = {"by cost": Router, "by prefix": ByPrefix, "in turn": InTurn}


@dataclass(slots=True)
class Measured:
    """One load in one way, all rounds together."""

    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))

    @property
    def hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens


Load = Callable[[Router, Sizes, int, Measured], Awaitable[None]]


async def ask(router: Router, prompt: Sequence[int], num_new: int, measured: Measured) -> list[int]:
    """Returns the tokens generated."""
    began, tokens = time.perf_counter(), list[int]()
    async for chunk in router.generate(prompt, SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)):
        if not tokens:
            measured.first_token_s.append(time.perf_counter() - began)
        tokens += chunk.token_ids
    return tokens


async def converse(router: Router, sizes: Sizes, number: int, measured: Measured) -> None:
    """All conversations at once; each sends its next turn when it has its answer."""

    async def session(index: int) -> None:
        generator = np.random.default_rng([number, index])
        said: list[int] = generator.integers(3, sizes.vocabulary, sizes.first_tokens).tolist()
        for _ in range(sizes.turns):
            said += await ask(router, said, sizes.new_tokens, measured)
            said += generator.integers(3, sizes.vocabulary, sizes.turn_tokens).tolist()

    await asyncio.gather(*map(session, range(sizes.sessions)))


async def share(router: Router, sizes: Sizes, number: int, measured: Measured) -> None:
    """Bursts of requests with one beginning, the first request alone."""
    generator = np.random.default_rng([number, 99])
    shared = generator.integers(3, sizes.vocabulary, sizes.shared_tokens).tolist()

    def own() -> list[int]:
        return [*shared, *generator.integers(3, sizes.vocabulary, sizes.own_tokens).tolist()]

    await ask(router, own(), sizes.new_tokens, measured)
    for _ in range(sizes.bursts):
        prompts = [own() for _ in range(sizes.burst)]
        await asyncio.gather(*(ask(router, prompt, sizes.new_tokens, measured) for prompt in prompts))


LOADS: dict[str, Load] = {"conversations": converse, "one long prefix": share}


@asynccontextmanager
async def fleet(model: Path, num_blocks: int) -> AsyncIterator[str]:
    """cachemgr and both workers; yields cachemgr's address."""
    flags = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--block-size", str(BLOCK_SIZE))
    with LocalServices.start(
        model=model, num_blocks=num_blocks, extra_worker_args=(*flags, "--pool", POOLS[0])
    ) as services:
        address = f"unix:{services.runtime_dir}/{POOLS[1]}.sock"
        own = ("--listen", address, "--cachemgr", services.cachemgr_address, "--pool", POOLS[1])
        sized = ("--model", str(model), "--num-blocks", str(num_blocks))
        log_path = services.runtime_dir / f"{POOLS[1]}.log"
        second = ServiceProcess(
            POOLS[1], target="quire.worker", arguments=(*own, *sized, *flags), address=address, log_path=log_path
        )
        try:
            second.start()
            await asyncio.to_thread(second.wait_serving, WORKER_START_TIMEOUT_S)
            yield services.cachemgr_address
        finally:
            second.terminate()


async def measure_one(address: str, way: type[Router], load: Load, sizes: Sizes, number: int, into: Measured) -> None:
    cache = CacheClient(address)
    try:
        for pool in POOLS:
            await cache.reset_prefix_cache(pool)
        async with way(address, engine_config=EngineConfig(lease_ttl_s=LEASE_TTL_S, verify=False)) as router:
            while len(router.pools) < len(POOLS):
                await asyncio.sleep(0.01)
            before: dict[str, pb.PoolStatistics] = {each.pool: each for each in await cache.get_statistics()}
            began = time.perf_counter()
            await load(router, sizes, number, into)
            into.total_s.append(time.perf_counter() - began)
            for each in await cache.get_statistics():
                into.requests[each.pool] += each.admission_count - before[each.pool].admission_count
            into.prompt_tokens += router.statistics().prompt_tokens
            into.cached_tokens += router.statistics().cached_tokens
    finally:
        await cache.close()


async def measure_all(sizes: Sizes, quick: bool, progress: Progress) -> dict[str, dict[str, Measured]]:
    found = {load: {way: Measured() for way in WAYS} for load in LOADS}
    task = progress.add_task("routing", total=(sizes.rounds + 1) * len(LOADS) * len(WAYS))
    with tempfile.TemporaryDirectory() as name:
        (tiny_llama if quick else llama_56m)(Path(name))
        async with fleet(Path(name), sizes.num_blocks) as address:
            for number in range(sizes.rounds + 1):  # the first one warms up
                for load, run in LOADS.items():
                    for way, kind in WAYS.items():
                        into = found[load][way] if number else Measured()
                        await measure_one(address, kind, run, sizes, number, into)
                        progress.advance(task)
    return found


def measure(quick: bool, progress: Progress) -> Findings:
    found = asyncio.run(measure_all(QUICK if quick else Sizes(), quick, progress))
    figures = {
        load: {
            way: {
                "hits": measured.hits,
                "first_token_s": quantiles(measured.first_token_s),
                "total_s": statistics.median(measured.total_s),
                "requests": measured.requests,
            }
            for way, measured in ways.items()
        }
        for load, ways in found.items()
    }
    notes = ["Both workers, cachemgr and the router share the cores of one machine."]
    return Findings([table_of(load, ways) for load, ways in figures.items()], figures, lambda: plot(figures), notes)


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    return {name: round(float(np.percentile(samples, part)), 4) for name, part in (("p50", 50), ("p95", 95))}


def table_of(load: str, ways: dict[str, Any]) -> Any:
    made = table(load, "", "from the cache", "first token, ms: p50", "p95", "whole load, s", "requests by pool")
    for way, each in ways.items():
        times = [f"{1e3 * each['first_token_s'][part]:.0f}" for part in ("p50", "p95")]
        by_pool = ", ".join(map(str, each["requests"].values()))
        made.add_row(way, percent(each["hits"]), *times, f"{each['total_s']:.2f}", by_pool)
    return made


def plot(figures: dict[str, Any]) -> Figure:
    """A panel per load: time to first token in each way."""
    figure, panels = pyplot.subplots(1, len(figures), figsize=(4 * len(figures), 3.2), squeeze=False)
    for axes, (load, ways) in zip(panels[0], figures.items(), strict=True):
        for offset, part in ((-0.2, "p50"), (0.2, "p95")):
            heights = [1e3 * each["first_token_s"][part] for each in ways.values()]
            axes.bar([index + offset for index in range(len(ways))], heights, width=0.4, label=part)
        axes.set_xticks(range(len(ways)), list(ways))
        axes.set_title(load, fontsize=9)
        plain(axes)
    panels[0][0].set_ylabel("ms to the first token")
    panels[0][0].legend(fontsize=8)
    return figure


main = benchmark("routing", measure, packages=("numpy", "torch", "transformers", "grpcio"))

if __name__ == "__main__":
    main()
