"""The client process: an engine per task; it reports every delivered token to the harness at once.

Speaks JSON lines over the harness's socket. From it: {"task", "requests", "cancels", "slow", "has_drafts"}, or null to
end. To it:

    {"task", "request", "sample", "tokens", "finish"}      new tokens of a sample; "outcome" with the first ones of a
                                                           prompt: {"epoch", "cached", "written"}
    {"task", "rehearsed", "outcome"}                       a request that was asked for once before, with drafts
    {"task", "request", "error"}                           how a request ended instead
    {"task", "done": statistics}                           all requests have ended and the engine is closed

On SIGUSR1 it writes to its log what each of its tasks waits for; on SIGUSR2 the stack of each thread, even if its
loop hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
from robustness.faults.schedule import LEASE_TTL_S
from robustness.faults.workload import MAX_STEP_TOKENS, Request, adapter_of, make_requests

from quire.client.cache_client import CacheClient
from quire.client.engine.caching import CacheOutcome
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import EpochChanged, LeaseLost, NotFound, QuireError, Unavailable
from quire.client.worker_client import WorkerClient

CALL_TIMEOUT_S = 1.0
STEP_TIMEOUT_S = 2.0
SLOW_READ_S = 0.03
REOPEN_S = 0.05

log = logging.getLogger(__name__)

DRAFTS = SpeculativeConfig("suffix", num_speculative_tokens=6, prompt_lookup_min=1, adaptive=False)
"""Any guess is drafted. Those behind an answer that was given before are right, and most others are wrong."""


class Client:
    """One connection to the harness."""

    def __init__(self, cachemgr: str, writer: asyncio.StreamWriter, *, has_adapters: bool) -> None:
        self._cachemgr = cachemgr
        self._has_adapters = has_adapters
        self._writer = writer
        self._requests = make_requests()
        self._running: Engine | None = None

    def describe(self) -> None:
        """Writes the waits of all tasks to the log."""
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stderr)
        if self._running is not None:
            log.info("%s", self._running.statistics())

    async def run(self, order: dict[str, Any]) -> None:
        """One task, from a new engine to its end."""
        drafts = DRAFTS if order["has_drafts"] else None
        engine = self._running = await self._open_engine(drafts)
        try:
            if drafts is not None:
                await asyncio.gather(*(self._rehearse(engine, order, index) for index in order["requests"]))
            await asyncio.gather(*(self._request(engine, order, index) for index in order["requests"]))
            statistics = engine.statistics()
        finally:
            await engine.close()
            self._running = None
        self._say(task=order["task"], done=asdict(statistics))

    async def _rehearse(self, engine: Engine, order: dict[str, Any], index: int) -> None:
        """Ask for an answer that nobody reads: then the same request has drafts that come true."""
        request = self._find(engine, index)
        with contextlib.suppress(QuireError):
            async for chunk in engine.generate(request.prompt, request.params, cache=request.cache):
                if chunk.cache_outcome is not None:
                    self._say(task=order["task"], rehearsed=index, outcome=described(chunk.cache_outcome))

    async def _open_engine(self, drafts: SpeculativeConfig | None) -> Engine:
        """An engine, as soon as it can be had: one outlives the services' absence, but needs them for its start."""
        while True:
            try:
                return await self._engine(drafts).__aenter__()
            except (Unavailable, NotFound, LeaseLost, EpochChanged) as error:
                log.info("no engine yet: %s", error)
                await asyncio.sleep(REOPEN_S)

    def _engine(self, drafts: SpeculativeConfig | None) -> Engine:
        config = EngineConfig(
            lease_ttl_s=LEASE_TTL_S,
            max_step_tokens=MAX_STEP_TOKENS,
            recovery_timeout_s=30.0,
            tenants=True,
            speculative=drafts,
        )
        cache = CacheClient(self._cachemgr, timeout_s=CALL_TIMEOUT_S)

        def connect_worker(address: str) -> WorkerClient:
            return WorkerClient(address, timeout_s=CALL_TIMEOUT_S, step_timeout_s=STEP_TIMEOUT_S)

        return Engine(cache, connect_worker, config=config)

    def _find(self, engine: Engine, index: int) -> Request:
        """The request of a number, with its adapter."""
        request, name = self._requests[index], adapter_of(index) if self._has_adapters else None
        if name is None:
            return request
        return replace(request, cache=replace(request.cache, adapter=engine.adapters[name]))

    async def _request(self, engine: Engine, order: dict[str, Any], index: int) -> None:
        request = self._find(engine, index)
        most_tokens = order["cancels"].get(str(index))
        num_tokens = 0
        try:
            async with contextlib.aclosing(
                engine.generate(request.prompt, request.params, cache=request.cache)
            ) as chunks:
                async for chunk in chunks:
                    finish = None if chunk.finish_reason is None else chunk.finish_reason.value
                    self._say(
                        task=order["task"],
                        request=index,
                        sample=chunk.index,
                        tokens=chunk.token_ids,
                        finish=finish,
                        outcome=described(chunk.cache_outcome),
                    )
                    num_tokens += len(chunk.token_ids)
                    if most_tokens is not None and num_tokens >= most_tokens:
                        return
                    if index == order["slow"]:
                        await asyncio.sleep(SLOW_READ_S)
        except QuireError as error:
            self._say(task=order["task"], request=index, error=repr(error))

    def _say(self, **event: Any) -> None:
        self._writer.write(json.dumps(event).encode() + b"\n")


def described(outcome: CacheOutcome | None) -> dict[str, int] | None:
    if outcome is None:
        return None
    return {"epoch": outcome.epoch, "cached": outcome.num_cached_tokens, "written": outcome.num_written_tokens}


async def serve(name: str, cachemgr: str, socket: str, *adapters: str) -> None:
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(json.dumps({"client": name}).encode() + b"\n")
    client = Client(cachemgr, writer, has_adapters=bool(adapters))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, client.describe)
    while order := json.loads(await reader.readline() or b"null"):
        await client.run(order)
    writer.close()


def main(arguments: list[str]) -> None:
    """Arguments: the client's name, cachemgr's address, the harness's socket, the workers' adapters if any."""
    faulthandler.register(signal.SIGUSR2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(serve(*arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
