"""VllmEngine over a gateway: smg takes this process for one of its workers, over one pool.

    async with shepherd_server(gateway, address, pool="main", security=options) as (server, servicer):
        await server.announce_serving()
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=30)

While the pool has no worker, calls end with UNAVAILABLE, as those of an engine that has died: smg then sends
requests to its other workers. A stream of events ends so too, once smg was told that no block is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from quire.client.engine.outputs import Chunk
from quire.client.errors import QuireError
from quire.gateway.callers import NOBODY
from quire.gateway.gateway import Gateway
from quire.gateway.grpc.errors import DOMAIN, Reason, invalid, status_of
from quire.gateway.routing.backend import Chunks, EngineBackend
from quire.integrations.kv_events.follower import PoolFollower
from quire.integrations.kv_events.replica import Change
from quire.integrations.shepherd.events import EventBatches, Subscriber
from quire.integrations.shepherd.messages import (
    GenerateMessages,
    answering_smg,
    decode_parameters,
    prompt_of,
    unimplemented,
)
from quire.integrations.shepherd.tokenizer import archive_of
from quire.serving.access import Role
from quire.serving.addresses import Address
from quire.serving.errors import CallEnded, ErrorStatus
from quire.serving.receiving import PROMPT_MESSAGE_BYTES
from quire.serving.security import Security, SecurityOptions
from quire.serving.server import Server
from quire.serving.systemd import ServiceManager

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

TESTED_PROTO = "0.4.28"
"""The version of smg-grpc-proto that the tests run with."""
SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
HEARTBEAT_S = 1.0
"""Between two load records on a stream without events. smg excludes a worker that was silent for 15 s."""
FAILOVER_AFTER_S = 2.0
"""Requests end this long after the pool's worker was found to be away, for smg to repeat them elsewhere."""

_METHODS = tuple(method.name for method in vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods)
_GENERATE = f"/{SERVICE_NAME}/Generate"
_WATCH_S = 0.25
_TOKENIZER_CHUNK_BYTES = 2**20


def describe_version() -> str:
    """Return the installed version of smg-grpc-proto, and warn if it is not the tested one."""
    version = metadata.version("smg-grpc-proto")
    if version != TESTED_PROTO:
        log.warning("smg-grpc-proto is %s, but this adapter was tested with %s alone", version, TESTED_PROTO)
    return version


class RunningRequest:
    """The chunks of a request, which others than their reader can end."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._reading: asyncio.Timeout | None = None
        self._is_ended = False
        self.error: ErrorStatus | None = None

    async def next(self) -> Chunk | None:
        """Return the next chunk; None after the last one, and once the request was ended."""
        if self._is_ended:
            return None
        try:
            async with asyncio.timeout(None) as self._reading:
                return await anext(self._chunks, None)
        except TimeoutError:
            if not self._is_ended:
                raise
            return None
        finally:
            self._reading = None

    async def end(self, error: ErrorStatus | None = None) -> None:
        """Free the request's blocks, also while its reader waits for a chunk or writes one."""
        self._is_ended, self.error = True, error
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())
        else:
            await self._chunks.aclose()


class ShepherdServicer:
    """The engine as a worker of smg."""

    def __init__(self, gateway: Gateway, *, pool: str) -> None:
        """pool is that of the gateway's one backend, which may come later. The gateway must have a cachemgr client."""
        if gateway.cache is None:
            raise ValueError("the gateway has no client of cachemgr")
        self._gateway = gateway
        self._pool = pool
        self._cache = gateway.cache
        self._began_s = time.time()
        self._last_request_s = 0.0
        self._open: dict[RunningRequest, str] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._subscribers: set[Subscriber] = set()
        self.follower = PoolFollower(gateway.cache, pool, self._publish)

    async def drain(self) -> None:
        """Refuses new requests; returns when the requests that have begun have ended."""
        self._gateway.is_draining = True
        await self._none_open.wait()

    async def end_requests_in_outages(self) -> None:
        """End all requests when the pool's worker stays away, for ever: smg repeats them elsewhere."""
        away_since: float | None = None
        while True:
            now = asyncio.get_running_loop().time()
            is_away = isinstance(self._found(), ErrorStatus)
            away_since = (away_since or now) if is_away else None
            if away_since is not None and now - away_since >= FAILOVER_AFTER_S:
                for opened in list(self._open):
                    await opened.end(self._away())
            await asyncio.sleep(_WATCH_S)

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Stream the messages of all samples."""
        with answering_smg():
            backend = self._backend()
            self._last_request_s = time.time()
            prompt, params = await prompt_of(backend, request), decode_parameters(request)
            answer = GenerateMessages(prompt, params, is_stream=request.stream)
            chunks = self._gateway.generate(NOBODY, backend, prompt, params)
            with self._opened(request.request_id, chunks) as opened:
                async with contextlib.aclosing(chunks):
                    while (chunk := await opened.next()) is not None:
                        for message in answer.of_chunk(chunk):
                            yield message
                if opened.error is not None:
                    raise CallEnded(opened.error)
            for message in answer.of_abort():
                yield message

    async def Abort(self, request: Any, context: Context) -> Any:  # noqa: N802
        """End requests by their ids; ids that are not open are ignored, and so is an empty one, which is nobody's."""
        request_ids = set(request.request_ids) - {""}
        for opened in [opened for opened, request_id in self._open.items() if request_id in request_ids]:
            await opened.end()
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Report whether a request would be computed now."""
        found = self._found()
        if isinstance(found, ErrorStatus):
            return vllm_engine_pb2.HealthCheckResponse(healthy=False, message=found.message)
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Describe the model."""
        with answering_smg():
            backend = self._backend()
            model = backend.model
            return vllm_engine_pb2.GetModelInfoResponse(
                model_path=model.model,
                served_model_name=backend.model_names[0],
                is_generation=True,
                max_context_length=backend.max_model_len,
                max_req_input_len=backend.max_model_len,
                vocab_size=model.geometry.vocabulary_size,
                tokenizer_path=backend.tokenizer_source,
                architectures=[model.architecture],
                eos_token_ids=model.end_token_ids,
            )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Describe the engine."""
        with answering_smg():
            backend = self._backend()
            return vllm_engine_pb2.GetServerInfoResponse(
                server_type="vllm-grpc",
                active_requests=len(self._open),
                last_receive_timestamp=self._last_request_s,
                uptime_seconds=time.time() - self._began_s,
                data_parallel_size=1,
                block_size=backend.model.geometry.block_size_tokens,
                max_num_seqs=backend.max_running_sequences,
                kv_cache_dtype=backend.model.kv_dtype,
                model_dtype=backend.model.dtype,
                constrained_decoding_start="first_token",
            )

    async def GetLoads(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return the load of the one rank, 0."""
        with answering_smg():
            load = self._load(self._backend())
            asks_for_it = not request.HasField("dp_rank") or request.dp_rank == 0
            of_rank = vllm_engine_pb2.SchedulerLoad(
                num_running_reqs=load.running_requests,
                num_waiting_reqs=load.waiting_requests,
                num_total_reqs=load.running_requests + load.waiting_requests,
                num_used_tokens=load.num_used_tokens,
                max_total_num_tokens=load.max_total_num_tokens,
                token_usage=load.token_usage,
                utilization=load.token_usage,
                cache_hit_rate=load.cache_hit_rate,
                max_running_requests=load.max_running_requests,
            )
            return vllm_engine_pb2.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(),
                version=metadata.version("quire-kv"),
                dp_rank_count=1,
                loads=[of_rank] if asks_for_it else [],
            )

    async def FlushCache(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Empty the pool's prefix cache. Running requests keep their blocks, so nothing is waited for."""
        with answering_smg():
            self._backend()
            if not 0 <= request.timeout_s < math.inf:
                raise CallEnded(invalid("timeout_s", request.timeout_s, "at least 0, and finite"))
        try:
            await self._cache.reset_prefix_cache(self._pool)
        except QuireError as error:
            return common_pb2.FlushCacheResponse(success=False, message=str(error))
        return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Stream the tokenizer's files as a zip archive, for an smg that can't read tokenizer_path."""
        with answering_smg():
            source = self._backend().tokenizer_source
            archive = await asyncio.to_thread(archive_of, source)
            if not archive:
                message = f"no tokenizer is at {source!r}, as far as this process can read it"
                raise CallEnded(unimplemented(message))
        last = (len(archive) - 1) // _TOKENIZER_CHUNK_BYTES
        for index in range(last + 1):
            data = archive[index * _TOKENIZER_CHUNK_BYTES : (index + 1) * _TOKENIZER_CHUNK_BYTES]
            digest = hashlib.sha256(archive).hexdigest() if index == last else ""
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Stream a snapshot of the pool's blocks, then each change; a load record each HEARTBEAT_S at least."""
        with answering_smg():
            backend = self._backend()
        stream, subscriber = EventBatches(), Subscriber()
        self._subscribers.add(subscriber)
        try:
            while True:
                subscriber.news.clear()
                for batch in self._unsent(stream, subscriber, backend):
                    yield batch
                if not backend.is_ready and not self.follower.replica.num_published:
                    raise CallEnded(self._away())
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await subscriber.news.wait()
                except TimeoutError:
                    yield stream.heartbeat(self._load(backend))
        finally:
            self._subscribers.discard(subscriber)

    async def Embed(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Refuse: there are no embeddings here."""
        raise CallEnded(unimplemented("the models that are served here generate text, and make no embeddings"))

    async def StartProfile(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Refuse: profiles are made otherwise."""
        raise CallEnded(unimplemented("profiles are made at the worker: see docs/how-to/read-a-profile.md"))

    async def StopProfile(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Refuse: profiles are made otherwise."""
        return await self.StartProfile(request, context)

    def _found(self) -> EngineBackend | ErrorStatus:
        """Return the backend, or the reason why it can't be used now."""
        match self._gateway.models:
            case [EngineBackend() as backend] if backend.is_ready:
                return backend
        return self._away()

    def _backend(self) -> EngineBackend:
        found = self._found()
        if isinstance(found, ErrorStatus):
            raise CallEnded(found)
        return found

    def _away(self) -> ErrorStatus:
        return status_of(Reason.SERVICE_AWAY, f"pool {self._pool!r} has no worker now", {"pool": self._pool})

    @contextlib.contextmanager
    def _opened(self, request_id: str, chunks: Chunks) -> Iterator[RunningRequest]:
        opened = RunningRequest(chunks)
        self._open[opened] = request_id
        self._none_open.clear()
        try:
            yield opened
        finally:
            del self._open[opened]
            if not self._open:
                self._none_open.set()

    def _publish(self, changes: list[Change]) -> None:
        for subscriber in self._subscribers:
            subscriber.put(changes)

    def _unsent(self, stream: EventBatches, subscriber: Subscriber, backend: EngineBackend) -> Iterator[Any]:
        """Return the batches that a subscriber lacks. The copy of the pool is read at once, before the first one."""
        load = self._load(backend)
        if subscriber.needs_snapshot:
            subscriber.needs_snapshot = False
            return stream.snapshot(list(self.follower.replica.chains()), load)
        return stream.changes(subscriber.take(), load)

    def _load(self, backend: EngineBackend) -> Any:
        """Return a load record. Blocks that no sequence holds count as free, as in vLLM: they can be evicted."""
        numbers, counts, geometry = backend.statistics(), backend.block_counts, backend.model.geometry
        num_held = counts.active_count + counts.retired_count
        num_blocks = geometry.block_count - 1  # one is the null block
        usage = num_held / num_blocks
        return common_pb2.EngineLoad(
            running_requests=numbers.num_running,
            waiting_requests=numbers.num_waiting,
            token_usage=usage,
            active_token_usage=usage,
            max_running_requests=backend.max_running_sequences,
            cache_hit_rate=numbers.cached_tokens / max(1, numbers.prompt_tokens),
            num_used_tokens=num_held * geometry.block_size_tokens,
            max_total_num_tokens=num_blocks * geometry.block_size_tokens,
        )


@contextlib.asynccontextmanager
async def shepherd_server(
    gateway: Gateway, address: Address, *, pool: str, security: SecurityOptions
) -> AsyncIterator[tuple[Server, ShepherdServicer]]:
    """Within the block VllmEngine is served; health says NOT_SERVING until announce_serving.

    The process serves something else too, and tells systemd of its start and stop itself. The server fails with the
    QuireError of PoolFollower.run. Raises FileError, AddressError.
    """
    version = describe_version()
    servicer = ShepherdServicer(gateway, pool=pool)
    roles = {f"/{SERVICE_NAME}/{method}": frozenset({Role.CLIENT}) for method in _METHODS}
    async with Server(
        service_names=[SERVICE_NAME],
        domain=DOMAIN,
        security=Security(security, roles=roles, domain=DOMAIN),
        message_limits={_GENERATE: PROMPT_MESSAGE_BYTES},
        manager=ServiceManager({}),
    ) as server:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server.grpc)
        await server.start([address])
        log.info("a worker of Shepherd Model Gateway pool=%s smg_grpc_proto=%s", pool, version)
        server.run_alongside(servicer.follower.run())
        server.run_alongside(servicer.end_requests_in_outages())
        yield server, servicer
