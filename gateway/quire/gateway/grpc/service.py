"""EngineService over a Gateway: every handler reads, generates, encodes.

    async with engine_server(gateway, addresses, security=options) as (server, servicer):
        await server.announce_serving()
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=30)

A stream's memory is bounded twice. A chunk is taken from the engine only when gRPC has accepted the message before it,
and the engine fails a request with too many unread tokens (EngineConfig.max_unread_tokens).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.client.engine.caching import CacheParams
from quire.client.engine.outputs import Chunk, Completion, complete
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import InvalidRequest, QuireError
from quire.engine.v1 import engine_service_pb2, engine_service_pb2_grpc
from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError
from quire.gateway.gateway import Gateway
from quire.gateway.grpc.errors import DOMAIN, MAX_SHOWN, Reason, answering, invalid, status_of, status_of_error
from quire.gateway.grpc.messages import (
    Tally,
    decode_cache,
    decode_parameters,
    encode_finish_reason,
    encode_logprobs,
    encode_prompt_logprobs,
    messages_of,
)
from quire.gateway.routing.backend import AdaptedBackend, Backend, Chunks
from quire.gateway.texts import check_countable, check_length, decode_tokens, encode_text
from quire.serving.access import ANYBODY, Role, Roles, caller
from quire.serving.addresses import Address
from quire.serving.errors import CallEnded, to_message
from quire.serving.receiving import PROMPT_MESSAGE_BYTES
from quire.serving.security import Security, SecurityOptions
from quire.serving.server import Server
from quire.serving.systemd import ServiceManager

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = "quire.engine.v1.EngineService"
_METHODS = ("Generate", "GenerateBatch", "Tokenize", "Detokenize", "ListModels")
_CLIENT: Roles = frozenset({Role.CLIENT})
ROLES: dict[str, Roles] = {f"/{SERVICE_NAME}/{method}": _CLIENT for method in _METHODS}
# Bytes of a request; ListModels takes numbers only.
MESSAGE_LIMITS: dict[str, int] = {f"/{SERVICE_NAME}/{method}": PROMPT_MESSAGE_BYTES for method in _METHODS[:-1]}

MAX_BATCH_TOKENS = 131_072
"""Tokens in the answer to a batch, some 200 bytes each with all log-probabilities: 26 MiB."""
DEFAULT_PAGE, MAX_PAGE = 100, 1_000


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that was read. received_s is by time.perf_counter()."""

    backend: Backend
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache: CacheParams
    received_s: float = field(default_factory=time.perf_counter)

    @property
    def num_answered_tokens(self) -> int:
        """Most tokens that the answer has."""
        num_prompt_tokens = len(self.prompt_token_ids)
        most = self.params.max_tokens or self.backend.max_model_len - num_prompt_tokens
        return self.params.n * most + (num_prompt_tokens if self.params.prompt_logprobs is not None else 0)


class EngineServicer(engine_service_pb2_grpc.EngineServiceServicer):
    """Text behind gRPC."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def drain(self) -> None:
        """Refuses new requests; returns when the calls that have begun have ended."""
        self._gateway.is_draining = True
        await self._none_open.wait()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """A call is open within the block; an error that the block raises becomes its status."""
        self._num_open += 1
        self._none_open.clear()
        try:
            with answering():
                yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._none_open.set()

    async def Generate(  # noqa: N802
        self, request: engine_service_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[engine_service_pb2.GenerateResponse]:
        """Streams the messages of each chunk, then the summary."""
        with self._answering():
            asking = self._caller(context)
            asked = await self._read(request, asking)
            tally = Tally(len(asked.prompt_token_ids), asked.received_s)
            async with contextlib.aclosing(self._chunks(asking, asked)) as chunks:
                async for chunk in chunks:
                    tally.note(chunk, time.perf_counter())
                    for message in messages_of(chunk):
                        yield message
            yield engine_service_pb2.GenerateResponse(summary=tally.summary(time.perf_counter()))

    async def GenerateBatch(  # noqa: N802
        self, request: engine_service_pb2.GenerateBatchRequest, context: Context
    ) -> engine_service_pb2.GenerateBatchResponse:
        """Runs all requests at once; one that is refused or fails is answered in its place."""
        with self._answering():
            asking, limits = self._caller(context), self._gateway.limits
            if not 1 <= len(request.requests) <= limits.max_prompts:
                raise CallEnded(invalid("requests", f"{len(request.requests)} entries", f"1 to {limits.max_prompts}"))
            read = [await _attempt(self._read(each, asking)) for each in request.requests]
            asked = [each for each in read if isinstance(each, GenerationRequest)]
            _require("samples", sum(each.params.n for each in asked), limits.max_samples)
            _require("tokens", sum(each.num_answered_tokens for each in asked), MAX_BATCH_TOKENS)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(asking, each)) for each in read]
            return engine_service_pb2.GenerateBatchResponse(results=[task.result() for task in tasks])

    async def Tokenize(  # noqa: N802
        self, request: engine_service_pb2.TokenizeRequest, context: Context
    ) -> engine_service_pb2.TokenizeResponse:
        """Makes tokens of a text."""
        with self._answering():
            asking = self._caller(context)
            backend = self._backend(request.model, asking)
            tokenizer = _tokenizer_of(backend, "text")
            adds = not request.HasField("add_special_tokens") or request.add_special_tokens
            check_countable("text", request.text, tokenizer, max_tokens=backend.max_model_len)
            token_ids = await encode_text(tokenizer, request.text, add_special_tokens=adds)
            return engine_service_pb2.TokenizeResponse(token_ids=token_ids, max_sequence_tokens=backend.max_model_len)

    async def Detokenize(  # noqa: N802
        self, request: engine_service_pb2.DetokenizeRequest, context: Context
    ) -> engine_service_pb2.DetokenizeResponse:
        """Makes a text of tokens."""
        with self._answering():
            asking = self._caller(context)
            tokenizer = _tokenizer_of(self._backend(request.model, asking), "token_ids")
            token_ids = list(request.token_ids)
            if token_ids:
                _check_token_ids((min(token_ids), max(token_ids)), tokenizer.vocabulary_size)
            skips = not request.HasField("skip_special_tokens") or request.skip_special_tokens
            text = await decode_tokens(tokenizer, token_ids, skip_special_tokens=skips)
            return engine_service_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, request: engine_service_pb2.ListModelsRequest, context: Context
    ) -> engine_service_pb2.ListModelsResponse:
        """Lists the models of a page."""
        with self._answering():
            asking = self._caller(context)
            if not 0 <= request.page_size <= MAX_PAGE:
                raise CallEnded(invalid("page_size", request.page_size, f"0 to {MAX_PAGE}"))
            models = sorted(self._models_of(asking), key=lambda model: model.name)
            if request.page_token and request.page_token not in {model.name for model in models}:
                raise CallEnded(invalid("page_token", request.page_token[:MAX_SHOWN], "one from an earlier answer"))
            rest = [model for model in models if model.name > request.page_token]
            size = request.page_size or DEFAULT_PAGE
            following = rest[size - 1].name if len(rest) > size else ""
            return engine_service_pb2.ListModelsResponse(models=rest[:size], next_page_token=following)

    def _caller(self, context: Context) -> Caller:
        """The caller as the server knows it, else as the gateway's keys say. Raises HttpError."""
        identity = caller()
        if identity is not ANYBODY:
            return Caller(name=identity.name, tenant=identity.name)
        shown = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        return self._gateway.caller_of(str(shown[0]) if len(shown) == 1 else None)

    def _models_of(self, asking: Caller) -> list[engine_service_pb2.Model]:
        """The models, and the adapters that the caller may use."""
        adapted = [each for each in self._gateway.served(asking).values() if isinstance(each, AdaptedBackend)]
        return [_encode_model(each) for each in (*self._gateway.models, *adapted)]

    def _backend(self, model: str, asking: Caller) -> Backend:
        backends = self._gateway.backends
        if not backends:
            raise CallEnded(status_of(Reason.SERVICE_AWAY, "the services of the model have not been reached yet"))
        if not model and len(self._gateway.models) != 1:
            raise CallEnded(invalid("model", "empty", f"one of {', '.join(backends)}"))
        if not model:
            return self._gateway.models[0]
        found = self._gateway.find(model, asking)
        if found is None:
            message = f"no model {model[:MAX_SHOWN]!r} is served; {', '.join(self._gateway.served(asking))} is"
            raise CallEnded(status_of(Reason.MODEL_NOT_FOUND, message, {"model": model[:MAX_SHOWN]}))
        return found

    async def _read(self, request: engine_service_pb2.GenerateRequest, asking: Caller) -> GenerationRequest:
        """A request with its prompt's tokens. Raises QuireError, HttpError, CallEnded."""
        backend = self._backend(request.model, asking)
        params, cache = decode_parameters(request.parameters), decode_cache(request.cache)
        return GenerationRequest(backend, await _prompt_of(backend, request.prompt), params, cache)

    def _chunks(self, asking: Caller, asked: GenerationRequest, *, is_whole: bool = False) -> Chunks:
        return self._gateway.generate(
            asking, asked.backend, asked.prompt_token_ids, asked.params, cache=asked.cache, is_whole=is_whole
        )

    async def _complete(
        self, asking: Caller, asked: GenerationRequest | CallEnded
    ) -> engine_service_pb2.GenerateBatchResult:
        """The answer to one request of a batch."""
        if isinstance(asked, CallEnded):
            return engine_service_pb2.GenerateBatchResult(error=to_message(asked.error))
        tally = Tally(len(asked.prompt_token_ids), asked.received_s)
        chunks: list[Chunk] = []
        try:
            async with contextlib.aclosing(self._chunks(asking, asked, is_whole=True)) as stream:
                async for chunk in stream:
                    tally.note(chunk, time.perf_counter())
                    chunks.append(chunk)
        except (QuireError, HttpError) as error:
            return engine_service_pb2.GenerateBatchResult(error=to_message(status_of_error(error)))
        completion = complete(asked.prompt_token_ids, chunks)
        summary = tally.summary(time.perf_counter())
        return engine_service_pb2.GenerateBatchResult(completion=_encode_completion(completion, summary))


@contextlib.asynccontextmanager
async def engine_server(
    gateway: Gateway, addresses: Iterable[Address], *, security: SecurityOptions, is_part: bool = False
) -> AsyncIterator[tuple[Server, EngineServicer]]:
    """Within the block EngineService is served; health says NOT_SERVING until announce_serving.

    is_part: the process serves something else too, and tells systemd of its start and stop itself.

    Raises FileError, AddressError.
    """
    servicer = EngineServicer(gateway)
    async with Server(
        service_names=[SERVICE_NAME],
        domain=DOMAIN,
        security=Security(security, roles=ROLES, domain=DOMAIN),
        message_limits=MESSAGE_LIMITS,
        manager=ServiceManager({}) if is_part else None,
    ) as server:
        engine_service_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server.grpc)
        await server.start(addresses)
        yield server, servicer


async def _attempt(reading: Coroutine[Any, Any, GenerationRequest]) -> GenerationRequest | CallEnded:
    """A request of a batch, or why it is refused."""
    try:
        with answering():
            return await reading
    except CallEnded as refused:
        return refused.with_traceback(None)


async def _prompt_of(backend: Backend, prompt: engine_service_pb2.Prompt) -> Sequence[int]:
    kind = prompt.WhichOneof("prompt")
    if kind is None:
        raise CallEnded(invalid("prompt", "unset", "text or token_ids"))
    if kind == "token_ids":
        return list(prompt.token_ids.token_ids)
    tokenizer = _tokenizer_of(backend, "prompt.text")
    check_length("prompt.text", len(prompt.text), tokenizer, max_tokens=backend.max_model_len)
    return await encode_text(tokenizer, prompt.text)


def _tokenizer_of(backend: Backend, named: str) -> Tokenizer:
    if backend.tokenizer is None:
        raise CallEnded(invalid(named, "given", "unset: this model has no tokenizer here"))
    return backend.tokenizer


def _check_token_ids(token_ids: Iterable[int], vocabulary_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_size:
            limit = f"token ids from 0 to {vocabulary_size - 1}"
            raise InvalidRequest.of_field("token_ids", token_id, limit, reason=Reason.TOKEN_OUT_OF_RANGE)


def _require(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise CallEnded(invalid("requests", f"{count} {what} together", f"at most {limit} {what}"))


def _encode_completion(
    completion: Completion, summary: engine_service_pb2.GenerationSummary
) -> engine_service_pb2.Completion:
    samples = [
        engine_service_pb2.Sample(
            text=sample.text,
            token_ids=sample.token_ids,
            logprobs=encode_logprobs(sample.logprobs or ()),
            finish_reason=encode_finish_reason(sample.finish_reason),
        )
        for sample in completion.samples
    ]
    logprobs = completion.prompt_logprobs
    return engine_service_pb2.Completion(
        samples=samples,
        prompt_logprobs=() if logprobs is None else encode_prompt_logprobs(logprobs),
        summary=summary,
    )


def _encode_model(backend: Backend) -> engine_service_pb2.Model:
    name, *aliases = backend.model_names
    return engine_service_pb2.Model(
        name=name,
        aliases=aliases,
        max_sequence_tokens=backend.max_model_len,
        max_logprob_count=backend.max_logprobs,
        pools=backend.pools,
        has_tokenizer=backend.tokenizer is not None,
        ready=backend.is_ready,
        parent=backend.base.model_names[0] if isinstance(backend, AdaptedBackend) else "",
    )
