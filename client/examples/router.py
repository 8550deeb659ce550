"""Sends each prompt to the worker with the fewest tokens left to compute, and shows the saving.

    python client/examples/router.py                                         two workers of its own, the demo's model
    python client/examples/router.py --cachemgr unix:/run/quire/cachemgr.sock             the existing pools

Questions about three documents are sent by prefix and load first, then to each worker in turn. The gateway's router
(quire.gateway.routing.router) chooses by the same cost, and handles the failure of a worker.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from quire.cli.launch import LocalServices
from quire.cli.service_process import WORKER_START_TIMEOUT_S, ServiceProcess
from quire.client import CacheClient, Engine, EngineConfig, SamplingParams
from quire.gateway.routing.choosing import PoolLoad, cheapest

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
WORKER_FLAGS = ("--model", str(MODEL), "--num-blocks", "256", "--threads", "1")
DOCUMENTS = {
    "models": 4 * "A model is a module that takes a tensor as input and returns a tensor as output. ",
    "locks": 4 * "Each thread holds a lock while it reads the file, and gives it back when the file is closed. ",
    "defaults": 4 * "The default value of this parameter is used when the function is called without an argument. ",
}
QUESTIONS = ("Note that", "In general", "If not", "For example")
PARAMS = SamplingParams(max_tokens=12, temperature=0)


@dataclass
class Backend:
    """One pool: an engine on it, how many prompts of which document it got, and tokens that it has still to compute."""

    engine: Engine
    documents: Counter[str] = field(default_factory=Counter)
    num_pending_tokens: int = 0

    async def answer(self, document: str, tokens: list[int], num_cached: int) -> None:
        """Generates; the text is not looked at."""
        self.documents[document] += 1
        self.num_pending_tokens += len(tokens) - num_cached
        await self.engine.complete([tokens], PARAMS)
        self.num_pending_tokens -= len(tokens) - num_cached


async def choose(
    cache: CacheClient, backends: dict[str, Backend], tokens: list[int], block_size: int
) -> tuple[str, int]:
    """The pool with the lowest cost, and the number of tokens that it has cached. One call queries all pools."""
    loads: dict[str, PoolLoad] = {}
    for match in (await cache.lookup_prefix(tokens)).matches:
        if match.pool in backends:
            counts = match.block_counts
            loads[match.pool] = PoolLoad(
                num_cached=match.cached_token_count,
                num_pending=backends[match.pool].num_pending_tokens,
                num_in_use=block_size * (counts.active_count + counts.retired_count),
                num_available=block_size * (counts.free_count + counts.cached_count),
            )
    best = cheapest(loads.items(), len(tokens))
    return best, loads[best].num_cached


async def ask_all(cache: CacheClient, address: str, *, by_prefix: bool) -> dict[str, Backend]:
    """Every question about every document, those of one kind at once; the caches are empty at first."""
    attached = [pool for pool in await cache.list_pools() if pool.attached]
    pools = [pool.name for pool in attached]
    block_size = attached[0].geometry.block_size_tokens
    for pool in pools:
        await cache.reset_prefix_cache(pool)
    async with connected(address, pools) as backends:
        tokenizer = backends[pools[0]].engine.tokenizer
        assert tokenizer is not None, "the workers have one model, and its tokenizer can be read here"
        in_turn = iter(pools * (len(QUESTIONS) * len(DOCUMENTS)))
        documents = deque(DOCUMENTS)
        for question in QUESTIONS:
            documents.rotate()
            async with asyncio.TaskGroup() as answers:
                for document in documents:
                    tokens = tokenizer.encode(DOCUMENTS[document] + question)
                    pool, num_cached = (
                        await choose(cache, backends, tokens, block_size) if by_prefix else (next(in_turn), 0)
                    )
                    answers.create_task(backends[pool].answer(document, tokens, num_cached))
                    await asyncio.sleep(0)  # from here on its tokens are pending
        return backends


@contextlib.asynccontextmanager
async def connected(address: str, pools: list[str]) -> AsyncIterator[dict[str, Backend]]:
    """An engine on each pool."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            pool: Backend(await stack.enter_async_context(Engine.connect(address, config=EngineConfig(pool=pool))))
            for pool in pools
        }


async def compare(address: str, console: Console) -> None:
    """Prints what went where, by prefix and in turn."""
    cache = CacheClient(address)
    try:
        for title, by_prefix in (("By prefix and load", True), ("In turn", False)):
            backends = await ask_all(cache, address, by_prefix=by_prefix)
            table = Table("pool", "prompts about", "tokens", "from the cache", title=title, title_justify="left")
            num_tokens = num_cached = 0
            for pool, backend in backends.items():
                counted = backend.engine.statistics().scheduler
                about = ", ".join(f"{document} {count}" for document, count in backend.documents.items())
                table.add_row(pool, about, str(counted.admitted_tokens), str(counted.cached_tokens))
                num_tokens, num_cached = num_tokens + counted.admitted_tokens, num_cached + counted.cached_tokens
            console.print(table, f"{title}: {num_cached / num_tokens:.1%} of all tokens came from a cache.\n")
    finally:
        await cache.close()


@contextlib.contextmanager
def local_fleet(num_workers: int) -> Iterator[str]:
    """One cachemgr and so many workers, each with a pool of its own, on this machine; yields cachemgr's address."""
    first = (*WORKER_FLAGS[2:], "--pool", "worker-1")
    with LocalServices.start(model=MODEL, extra_worker_args=first) as services, contextlib.ExitStack() as stack:
        for name in (f"worker-{number}" for number in range(2, num_workers + 1)):
            address = f"unix:{services.runtime_dir}/{name}.sock"
            flags = ("--listen", address, "--cachemgr", services.cachemgr_address, "--pool", name, *WORKER_FLAGS)
            log_path = services.runtime_dir / f"{name}.log"
            worker = ServiceProcess(name, target="quire.worker", arguments=flags, address=address, log_path=log_path)
            stack.callback(worker.terminate)
            worker.start()
            worker.wait_serving(WORKER_START_TIMEOUT_S)
        yield services.cachemgr_address


@click.command()
@click.option("--cachemgr", metavar="ADDRESS", help="Use the pools of this one instead of starting services.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=1), help="So many are started.")
def main(cachemgr: str | None, workers: int) -> None:
    """Route prompts by their cached prefixes, and compare with round robin."""
    with contextlib.nullcontext(cachemgr) if cachemgr else local_fleet(workers) as address:
        asyncio.run(compare(address, Console(highlight=False)))


if __name__ == "__main__":
    main()
