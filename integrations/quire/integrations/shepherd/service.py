"""VllmEngine over a Gateway: Shepherd Model Gateway (smg) takes this process for one of its workers, over one pool.

    async with shepherd_server(gateway, address, pool="main", security=options) as (server, servicer):
        await server.announce_serving()
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=30)

All that Quire knows of smg is in this file. The messages are those of the package smg-grpc-proto.

A stream of KV events begins with a snapshot of the pool's blocks, and so does each recovery: when the pool has a new
epoch or no worker, and when a subscriber reads too slowly. So no cursor and no history is kept. smg takes the
sequence numbers of a snapshot as they are, so that each stream counts from 1.

While the pool has no worker, calls end with UNAVAILABLE, as those of an engine that has died: smg then sends
requests to its other workers. A stream of events ends so too, once smg was told that no block is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import math
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from quire.client.engine.grammar import Grammar
from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.sequence import FinishReason
from quire.client.errors import QuireError
from quire.gateway.callers import NOBODY
from quire.gateway.chat.templates import find_file
from quire.gateway.gateway import Gateway
from quire.gateway.grpc.errors import DOMAIN, Reason, answering, invalid, status_of
from quire.gateway.grpc.messages import MAX_MESSAGE_TOKENS, bounded
from quire.gateway.limits import MAX_TOKEN_IDS
from quire.gateway.routing.backend import EngineBackend
from quire.gateway.texts import encode_text
from quire.integrations.kv_events.follower import PoolFollower
from quire.integrations.kv_events.replica import ROOT, AllCleared, BlocksRemoved, BlocksStored, Change
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
MAX_UNSENT_TOKENS = 1_000_000
"""Tokens of stored blocks, and removed blocks, that wait for a subscriber. With more it gets a new snapshot."""

_METHODS = tuple(method.name for method in vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods)
_GENERATE = f"/{SERVICE_NAME}/Generate"
# Tokens of stored blocks, and removed blocks, in a message: at most 640 KiB.
_MAX_BATCH_TOKENS = 65_536
_WATCH_S = 0.25
_TOKENIZER_CHUNK_BYTES = 2**20
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "config.json", "generation_config.json"),
)
# Fields that SamplingParams has under the same name and with the same meaning: always set, set if present, and set
# if they are not 0, which stands for "not given" there.
_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")
_ZERO_IS_DEFAULT = ("top_p", "repetition_penalty", "n")
# What a request must not have, and the reason.
_NO_MEDIA, _NO_TRANSFER = "unset: models take text only here", "unset: KV is not transferred between workers here"
_REFUSED = {
    "mm_inputs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
}
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "length"}
_ABORTED = "abort"


def describe_version() -> str:
    """Return the installed version of smg-grpc-proto, and warn if it is not the tested one."""
    version = metadata.version("smg-grpc-proto")
    if version != TESTED_PROTO:
        log.warning("smg-grpc-proto is %s, but this adapter was tested with %s alone", version, TESTED_PROTO)
    return version


class RunningRequest:
    """The chunks of a request, which others than their reader can end."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
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
        """Free what the request holds, also while its reader waits for a chunk or writes one."""
        self._is_ended, self.error = True, error
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())
        else:
            await self._chunks.aclose()


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class GenerateMessages:
    """The messages of a request: of each chunk, if it is streamed, and of each sample's end."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, *, is_stream: bool) -> None:
        self._prompt = prompt
        self._params = params
        self._is_stream = is_stream
        self._num_cached_tokens = 0
        self._input_logprobs: Any = None
        self._open = {index: _Sample() for index in range(params.n)}

    def of_chunk(self, chunk: Chunk) -> Iterator[Any]:
        """Yield the messages of a chunk."""
        self._num_cached_tokens += chunk.num_cached_tokens or 0
        if chunk.prompt_logprobs is not None:
            self._input_logprobs = _encode_input_logprobs(self._prompt, chunk.prompt_logprobs)
        sample = self._open[chunk.index]
        sample.token_ids += chunk.token_ids
        if self._is_stream:
            yield from self._parts_of(chunk)
        else:
            sample.logprobs += chunk.logprobs or ()
        if chunk.finish_reason is not None:
            yield self._complete(chunk.index, _FINISH_REASONS[chunk.finish_reason])

    def of_abort(self) -> Iterator[Any]:
        """Yield the messages of the samples that have not ended."""
        for index in list(self._open):
            yield self._complete(index, _ABORTED)

    def _parts_of(self, chunk: Chunk) -> Iterator[Any]:
        for first in range(0, len(chunk.token_ids), MAX_MESSAGE_TOKENS):
            part = slice(first, first + MAX_MESSAGE_TOKENS)
            token_ids = chunk.token_ids[part]
            yield vllm_engine_pb2.GenerateResponse(
                chunk=vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=token_ids,
                    prompt_tokens=len(self._prompt),
                    completion_tokens=len(token_ids),  # of this message: smg adds them up
                    cached_tokens=self._num_cached_tokens,
                    output_logprobs=_encode_output_logprobs((chunk.logprobs or ())[part]),
                    input_logprobs=self._input_logprobs if not first and chunk.prompt_logprobs is not None else None,
                    index=chunk.index,
                )
            )

    def _complete(self, index: int, reason: str) -> Any:
        sample = self._open.pop(index)
        is_stop_token = reason == "stop" and sample.token_ids and sample.token_ids[-1] in self._params.stop_token_ids
        return vllm_engine_pb2.GenerateResponse(
            complete=vllm_engine_pb2.GenerateComplete(
                output_ids=sample.token_ids,
                finish_reason=reason,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(sample.token_ids),
                cached_tokens=self._num_cached_tokens,
                output_logprobs=_encode_output_logprobs(sample.logprobs),
                input_logprobs=self._input_logprobs,
                index=index,
                matched_token_id=sample.token_ids[-1] if is_stop_token else None,
            )
        )


class Subscriber:
    """The changes that a stream of KV events has not sent yet."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._num_unsent_tokens = 0
        self.needs_snapshot = True
        self.news = asyncio.Event()

    def put(self, changes: Iterable[Change]) -> None:
        """Add changes. A subscriber that needs a snapshot anyway, or is told to clear, gets them with the snapshot."""
        self.news.set()
        for change in changes:
            self.needs_snapshot = self.needs_snapshot or isinstance(change, AllCleared)
            if not self.needs_snapshot:
                self._changes.append(change)
                self._num_unsent_tokens += _size_of(change)
        if self._num_unsent_tokens > MAX_UNSENT_TOKENS:
            log.warning("a subscriber of KV events reads too slowly: it gets a snapshot")
            self.needs_snapshot = True
        if self.needs_snapshot:
            self.take()

    def take(self) -> list[Change]:
        """Return the changes, and begin anew."""
        taken, self._changes = self._changes, []
        self._num_unsent_tokens = 0
        return taken


class EventBatches:
    """The batches of one stream, numbered from 1, each with a load record."""

    def __init__(self) -> None:
        self._sequence_number = 0
        self._num_events = 0
        self._num_records = 0

    def snapshot(self, chains: Iterable[BlocksStored], load: Any) -> Iterator[Any]:
        """Yield the chunks of a snapshot, one at least. They replace all blocks that the subscriber knows."""
        pieces = list(_pieces(chains)) or [[]]
        num_blocks = sum(len(change.blocks) for piece in pieces for change in piece if isinstance(change, BlocksStored))
        for index, piece in enumerate(pieces):
            events = [] if index else [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
            events += [_encode_change(change, event_id=0) for change in piece]
            chunk = common_pb2.KvSnapshotChunk(index=index, count=len(pieces), blocks=num_blocks)
            yield self._batch(events, load, snapshot=chunk)

    def changes(self, changes: Iterable[Change], load: Any) -> Iterator[Any]:
        """Yield the batches of some changes."""
        for piece in _pieces(changes):
            events = []
            for change in piece:
                self._num_events += 1
                events.append(_encode_change(change, event_id=self._num_events))
            yield self._batch(events, load)

    def heartbeat(self, load: Any) -> Any:
        """Return a batch with a load record alone; it has the number of the batch before it."""
        load.load_only = True
        self._sequence_number -= 1
        return self._batch([], load)

    def _batch(self, events: list[Any], load: Any, *, snapshot: Any = None) -> Any:
        self._sequence_number += 1
        self._num_records += 1
        load.sample = self._num_records
        return common_pb2.KvEventBatch(
            sequence_number=self._sequence_number,
            timestamp=time.time(),
            events=events,
            dp_rank=0,
            snapshot=snapshot,
            load=load,
        )


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
        """Refuses new requests; returns when those that have begun have ended."""
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
        with _answering():
            backend = self._backend()
            self._last_request_s = time.time()
            prompt, params = await _prompt_of(backend, request), _decode_parameters(request)
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
        """End requests by their ids; those that are not open are fine."""
        request_ids = set(request.request_ids)
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
        with _answering():
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
        with _answering():
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
        with _answering():
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
        with _answering():
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
        with _answering():
            source = self._backend().tokenizer_source
            archive = await asyncio.to_thread(_archive, source)
            if not archive:
                message = f"no tokenizer is at {source!r}, as far as this process can read it"
                raise CallEnded(_unimplemented(message))
        last = (len(archive) - 1) // _TOKENIZER_CHUNK_BYTES
        for index in range(last + 1):
            data = archive[index * _TOKENIZER_CHUNK_BYTES : (index + 1) * _TOKENIZER_CHUNK_BYTES]
            digest = hashlib.sha256(archive).hexdigest() if index == last else ""
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Stream a snapshot of the pool's blocks, then each change; a load record each HEARTBEAT_S at least."""
        with _answering():
            backend = self._backend()
        stream, subscriber = EventBatches(), Subscriber()
        self._subscribers.add(subscriber)
        try:
            while True:
                subscriber.news.clear()
                for batch in self._unsent(stream, subscriber, backend):
                    yield batch
                if not backend.is_ready and not self.follower.replica.statistics().num_published:
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
        raise CallEnded(_unimplemented("the models that are served here generate text, and make no embeddings"))

    async def StartProfile(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Refuse: profiles are made otherwise."""
        raise CallEnded(_unimplemented("profiles are made at the worker: see docs/how-to/read-a-profile.md"))

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
    def _opened(self, request_id: str, chunks: AsyncGenerator[Chunk, None]) -> Iterator[RunningRequest]:
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


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Make the call's status of an error that the block raises, with the names that fields have in these messages."""
    try:
        with answering():
            yield
    except CallEnded as ended:
        raise CallEnded(_renamed(ended.error)) from None


def _renamed(error: ErrorStatus) -> ErrorStatus:
    """Return a status with the name that its field has in VllmEngine's messages, in place of EngineService's."""
    named = error.metadata.get("field", "")
    if not named.startswith("parameters."):
        return error
    rest = named.removeprefix("parameters.").removeprefix("grammar.")
    ours = f"sampling_params.{'grammar' if rest in ('ebnf', 'lark') else rest}"
    return replace(error, message=error.message.replace(named, ours, 1), metadata={**error.metadata, "field": ours})


def _unimplemented(message: str) -> ErrorStatus:
    return ErrorStatus(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", message, DOMAIN)


async def _prompt_of(backend: EngineBackend, request: Any) -> Sequence[int]:
    """Return the prompt's tokens. Raises CallEnded, and InvalidRequest for text that can't be encoded."""
    for name, limit in _REFUSED.items():
        if getattr(request, name) if name == "extra_mm_inputs" else request.HasField(name):
            raise CallEnded(invalid(name, "given", limit))
    if request.data_parallel_rank:
        raise CallEnded(invalid("data_parallel_rank", request.data_parallel_rank, "0, the one rank there is"))
    match request.WhichOneof("input"):
        case "tokenized":
            return list(request.tokenized.input_ids)
        case "text" if backend.tokenizer is not None:
            return await encode_text(backend.tokenizer, request.text)
        case "text":
            raise CallEnded(invalid("text", "given", "unset: this model has no tokenizer here"))
    raise CallEnded(invalid("input", "unset", "tokenized or text"))


def _decode_parameters(request: Any) -> SamplingParams:
    """Return the sampling parameters of a request. Raises InvalidRequest, CallEnded."""
    given = request.sampling_params
    values = {name: getattr(given, name) for name in _PLAIN}
    values |= {name: getattr(given, name) for name in _OPTIONAL if given.HasField(name)}
    values |= {name: getattr(given, name) for name in _ZERO_IS_DEFAULT if getattr(given, name)}
    values.setdefault("max_tokens", None)
    if given.HasField("truncate_prompt_tokens"):
        limit = "unset: prompts are not truncated here"
        raise CallEnded(invalid("sampling_params.truncate_prompt_tokens", given.truncate_prompt_tokens, limit))
    return SamplingParams(
        stop=tuple(given.stop),
        stop_token_ids=bounded("stop_token_ids", given.stop_token_ids, MAX_TOKEN_IDS, "tokens"),
        logit_bias=dict(given.logit_bias),
        grammar=_decode_grammar(given),
        **values,
    )


def _decode_grammar(given: Any) -> Grammar | None:
    """Return the grammar of a constraint; None without one. Raises InvalidRequest, CallEnded."""
    match given.WhichOneof("constraint"):
        case None:
            return None
        case "structural_tag":
            limit = "unset: give json_schema, regex, grammar, json_object or choice"
            raise CallEnded(invalid("sampling_params.structural_tag", "given", limit))
        case "grammar":
            return Grammar(ebnf=given.grammar) if "::=" in given.grammar else Grammar(lark=given.grammar)
        case "choice":
            return Grammar(choice=list(given.choice.choices))
        case kind:
            values: dict[str, Any] = {kind: getattr(given, kind)}
            return Grammar(**values)


def _encode_output_logprobs(entries: Sequence[TokenLogprobs]) -> Any:
    """Return the log-probabilities of generated tokens as a message; None of no tokens."""
    if not entries:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=list(map(_encode_top, entries)),
    )


def _encode_input_logprobs(prompt: Sequence[int], entries: PromptLogprobs) -> Any:
    """Return those of a prompt's tokens. The first token has none."""
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[
            vllm_engine_pb2.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries
        ],
        token_ids=prompt,
        top_logprobs=[vllm_engine_pb2.TopLogProbs() if entry is None else _encode_top(entry) for entry in entries],
    )


def _encode_top(entry: TokenLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[logprob for _, logprob in entry.top], token_ids=[token_id for token_id, _ in entry.top]
    )


def _archive(source: str) -> bytes:
    """Return a zip archive of a tokenizer's files; nothing if there are none. Blocks on files and the network."""
    found = [path for name in _TOKENIZER_FILES if (path := find_file(source, name)) is not None]
    if not any(path.name == _TOKENIZER_FILES[0] for path in found):
        return b""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            # The date is always the same: equal files have equal digests.
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _hash_of(prefix_hash: bytes) -> int:
    return int.from_bytes(prefix_hash[:8], "big", signed=True)


def _size_of(change: Change) -> int:
    """Return the tokens of stored blocks, or the number of removed ones."""
    match change:
        case BlocksStored(blocks=blocks):
            return sum(len(block.token_ids) for block in blocks)
        case BlocksRemoved(prefix_hashes=hashes):
            return len(hashes)
        case AllCleared():
            return 0


def _pieces(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Yield the changes in lists of at most _MAX_BATCH_TOKENS; longer changes are divided."""
    piece: list[Change] = []
    room = _MAX_BATCH_TOKENS
    for part in (part for change in changes for part in _divided(change)):
        size = _size_of(part)
        if piece and size > room:
            yield piece
            piece, room = [], _MAX_BATCH_TOKENS
        piece.append(part)
        room -= size
    if piece:
        yield piece


def _divided(change: Change) -> Iterator[Change]:
    match change:
        case BlocksStored(blocks=blocks):
            count = max(1, _MAX_BATCH_TOKENS // len(blocks[0].token_ids))
            for first in range(0, len(blocks), count):
                parent = blocks[first - 1].prefix_hash if first else change.parent_hash
                yield replace(change, parent_hash=parent, blocks=blocks[first : first + count])
        case BlocksRemoved(prefix_hashes=hashes):
            for first in range(0, len(hashes), _MAX_BATCH_TOKENS):
                yield BlocksRemoved(hashes[first : first + _MAX_BATCH_TOKENS])
        case AllCleared():
            yield change


def _encode_change(change: Change, *, event_id: int) -> Any:
    match change:
        case BlocksStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_encode_stored(change))
        case BlocksRemoved(prefix_hashes=hashes):
            removed = common_pb2.KvBlocksRemoved(
                block_hashes=list(map(_hash_of, hashes)), tier=common_pb2.KV_CACHE_TIER_DEVICE
            )
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case AllCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _encode_stored(change: BlocksStored) -> Any:
    """Return a message. A salt keeps blocks from requests of smg, which have none."""
    return common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=_hash_of(block.prefix_hash), token_ids=block.token_ids, block_size=len(block.token_ids)
            )
            for block in change.blocks
        ],
        parent_block_hash=None if change.parent_hash == ROOT else _hash_of(change.parent_hash),
        tier=common_pb2.KV_CACHE_TIER_DEVICE,
        cache_salt=change.salt.hex() or None,
    )
