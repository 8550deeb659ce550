"""A simulated process that has callers: an engine, or a router with an engine for each pool, and their requests.

The callers live with the gateway's process: if it is killed, they send what has not ended to the next one, from the
beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from robustness.simulation.admissions import Admissions
from robustness.simulation.cachemgr import ADDRESS
from robustness.simulation.deliveries import Deliveries
from robustness.simulation.workload import MAX_MODEL_LEN, Request
from robustness.simulation.world import Process

from quire.client.cache_client import CacheClient
from quire.client.engine.caching import Breakpoint, CacheParams, CacheUse
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import EngineStopped, EpochChanged, LeaseLost, NotFound, OutOfRoom, QuireError, Unavailable
from quire.client.worker_client import WorkerClient
from quire.gateway.routing.backend import Chunks
from quire.gateway.routing.members import RouterConfig
from quire.gateway.routing.router import Router

STEP_TIMEOUT_S = 2.0
REOPEN_S = 0.05
RECOVERY_TIMEOUT_S = 60.0
DRAFTS = SpeculativeConfig("suffix", num_speculative_tokens=6, prompt_lookup_min=1, adaptive=False)
"""Any guess is drafted, unless it is adaptive. Those behind an answer that was given before are right, and most others
are wrong."""


@dataclass(frozen=True, slots=True)
class Call:
    """A caller's request: its number, when it comes, and when its caller leaves.

    after_s          seconds from the gateway's start
    leaves_after     the caller leaves when it has so many tokens; None: it stays
    leaves_after_s   it leaves after so many seconds, with a token or without; None: it stays
    reads_s          seconds that it takes for each chunk
    breakpoints      the prefixes that it wants kept
    explains_miss    it asks why no more of its prompt was found
    """

    request: int
    after_s: float = 0.0
    leaves_after: int | None = None
    leaves_after_s: float | None = None
    reads_s: float = 0.0
    breakpoints: tuple[Breakpoint, ...] = ()
    explains_miss: bool = False

    @property
    def may_leave(self) -> bool:
        """True if the caller may be gone before it has an answer."""
        return self.leaves_after is not None or self.leaves_after_s is not None

    def cache_of(self, request: Request) -> CacheParams:
        """Return the request's use of the cache, with the call's breakpoints."""
        if not self.breakpoints or request.cache.cache_use is CacheUse.NONE:
            return request.cache
        return replace(request.cache, breakpoints=self.breakpoints, explain_miss=self.explains_miss)


@dataclass(slots=True)
class Task:
    """The calls of one gateway, and which of them have ended: for good, over all starts of its process."""

    calls: tuple[Call, ...]
    ended: set[int] = field(default_factory=set)

    happened: Counter[str] = field(default_factory=Counter)
    """The events that engines counted, in gateways that were closed. A feature that nothing uses is not tested."""

    @property
    def is_done(self) -> bool:
        return len(self.ended) == len(self.calls)

    def note(self, backend: Engine | Router) -> None:
        """Add what a backend has counted."""
        if isinstance(backend, Router):
            self.happened["moves to other pools"] += backend.router_statistics().moves
            return
        statistics, scheduler = backend.statistics(), backend.statistics().scheduler
        self.happened.update(
            {
                "recoveries": statistics.recoveries,
                "blocks copied by forks": statistics.copied_blocks,
                "preemptions": scheduler.preemptions,
                "sequences offloaded": scheduler.offloads,
                "sequences restored": scheduler.restores,
                "tokens found in the cache": scheduler.cached_tokens,
                "steps": scheduler.planned_steps,
                "drafts": scheduler.drafted_tokens,
                "drafts accepted": scheduler.accepted_tokens,
            }
        )


class SimulatedGateway:
    """One start of a gateway."""

    def __init__(
        self,
        process: Process,
        task: Task,
        requests: tuple[Request, ...],
        deliveries: Deliveries,
        admissions: Admissions,
        *,
        uses_router: bool,
        max_step_tokens: int,
        drafts: SpeculativeConfig | None,
        lease_ttl_s: float,
        wrong: Callable[[str], None],
        call_timeout_s: float,
        failover_after_s: float,
    ) -> None:
        self.process = process
        self.is_done = False
        """True when all calls have ended. The leases stay until close()."""
        self.is_closed = False
        """True when the leases were given back."""
        self.backend: Engine | Router | None = None
        self._ending = False
        self._wrong = wrong
        self._may_close = asyncio.Event()
        self._task = task
        self._requests = requests
        self._deliveries = deliveries
        self._admissions = admissions
        self._uses_router = uses_router
        self._call_timeout_s = call_timeout_s
        self._router_config = RouterConfig(names_tenants=True, failover_after_s=failover_after_s)
        self._config = EngineConfig(
            lease_ttl_s=lease_ttl_s,
            max_step_tokens=max_step_tokens,
            recovery_timeout_s=RECOVERY_TIMEOUT_S,
            max_recoveries=64,
            tenants=True,
            verify=True,
            speculative=drafts,
        )
        process.spawn(self._run())

    async def _run(self) -> None:
        backend = self.backend = await self._open()
        watching = asyncio.create_task(self._watch(backend))
        try:
            calls = [call for call in self._task.calls if call.request not in self._task.ended]
            if self._config.speculative is not None:
                await asyncio.gather(*(self._rehearse(backend, call) for call in calls))
            await asyncio.gather(*(self._call(backend, call) for call in calls))
            self.is_done = True
            await self._may_close.wait()
        finally:
            watching.cancel()
        if num_left := _num_requests(backend):
            self._wrong(f"all callers have left, and it has {num_left} requests")
        self._task.note(backend)
        await backend.close()
        self.is_closed = True

    @property
    def num_callers(self) -> int:
        """Of all its starts."""
        return len(self._task.calls)

    def close(self) -> None:
        """Let it give its leases back when its calls have ended. May be called from outside of the process."""
        self.process.loop.call_soon(self._may_close.set)

    async def terminate(self) -> None:
        """SIGTERM while requests are open, and more of them than it may wait for: they get an error, leases end."""
        self._ending = True
        if self.backend is not None:
            await self.backend.close()
        self.process.end()

    async def _watch(self, backend: Engine | Router) -> None:
        error = await backend.failed()
        self._wrong(f"it can serve nothing any more: {error!r}")

    async def _open(self) -> Engine | Router:
        """As soon as it can be had: an engine outlives the absence of services, and needs them for its start."""
        while True:
            try:
                return await self._make().__aenter__()
            except (Unavailable, NotFound, LeaseLost, EpochChanged, OutOfRoom):
                await asyncio.sleep(REOPEN_S)

    def _make(self) -> Engine | Router:
        if self._uses_router:
            return Router(ADDRESS, config=self._router_config, engine_config=self._config)
        return Engine(CacheClient(ADDRESS, timeout_s=self._call_timeout_s), self._connect_worker, config=self._config)

    def _connect_worker(self, address: str) -> WorkerClient:
        return WorkerClient(address, timeout_s=self._call_timeout_s, step_timeout_s=STEP_TIMEOUT_S)

    async def _rehearse(self, backend: Engine | Router, call: Call) -> None:
        """Ask for an answer that nobody reads: then the same request has drafts that come true."""
        request = self._requests[call.request]
        if not isinstance(request.params, SamplingParams):
            return
        with contextlib.suppress(QuireError):
            async for chunk in _chunks(backend, request, call):
                if chunk.cache_outcome is not None:
                    self._admissions.answer(request.params.tenant, request.prompt, chunk.cache_outcome)

    async def _call(self, backend: Engine | Router, call: Call) -> None:
        request = self._requests[call.request]
        await asyncio.sleep(call.after_s)
        self._deliveries.begin_anew(call.request)
        try:
            async with asyncio.timeout(call.leaves_after_s):
                if isinstance(request.params, SamplingParams):
                    await self._generate(_chunks(backend, request, call), call)
                else:
                    await self._search(backend, request, call)
        except TimeoutError:
            pass  # the caller has left
        except QuireError as error:
            if self._ending and isinstance(error, EngineStopped):
                return
            self._wrong(f"request {call.request} failed: {error!r}")
        self._task.ended.add(call.request)

    async def _search(self, backend: Engine | Router, request: Request, call: Call) -> None:
        assert isinstance(backend, Engine)
        assert isinstance(request.params, BeamSearchParams)
        (found,) = await backend.beam_search(request.prompt, request.params, cache=call.cache_of(request))
        for index, beam in enumerate(found.beams):
            values = [round(beam.cumulative_logprob, 3)]
            self._deliveries.take(call.request, index, beam.token_ids, values, beam.finish_reason.value)

    def _require_end(self, call: Call) -> None:
        num_samples = self._requests[call.request].params.n
        if not self._deliveries.has_ended(call.request, num_samples):
            self.process.world.fail(f"{self.process.name}: request {call.request} has ended without all of its ends")

    async def _generate(self, chunks: Chunks, call: Call) -> None:
        num_tokens, num_outcomes = 0, 0
        request = self._requests[call.request]
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                finish = None if chunk.finish_reason is None else chunk.finish_reason.value
                self._deliveries.take(call.request, chunk.index, chunk.token_ids, _values(chunk), finish)
                num_tokens += len(chunk.token_ids)
                if chunk.cache_outcome is not None:
                    num_outcomes += 1
                    self._admissions.answer(request.params.tenant, request.prompt, chunk.cache_outcome)
                if call.leaves_after is not None and num_tokens >= call.leaves_after:
                    return
                if call.reads_s:
                    await asyncio.sleep(call.reads_s)
        self._require_end(call)
        if num_outcomes != 1:
            self.process.world.fail(f"{self.process.name}: request {call.request} has {num_outcomes} outcomes")


def _num_requests(backend: Engine | Router) -> int:
    if isinstance(backend, Engine):
        return backend.statistics().num_requests
    return sum(backend.router_statistics().open.values())


def _chunks(backend: Engine | Router, request: Request, call: Call) -> Chunks:
    assert isinstance(request.params, SamplingParams)
    assert len(request.prompt) + (request.params.max_tokens or 0) <= MAX_MODEL_LEN
    return backend.generate(list(request.prompt), request.params, cache=call.cache_of(request))


def _values(chunk: Chunk) -> list[Any]:
    """The log-probabilities of a chunk's tokens, rounded, if they were asked for."""
    return [tuple((token, round(value, 3)) for token, value in each.top) for each in chunk.logprobs or ()]
