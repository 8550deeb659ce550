"""The process of `quire dynamo`: a pool as a backend of NVIDIA Dynamo.

    QuireEngine   Dynamo's interface to an engine, over ours: tokens in, tokens out
    _Events       the pool's changes as Dynamo's KV events
    _Service      the place of the endpoint in Dynamo's discovery: taken back while the pool has no worker

Nothing else of Quire knows Dynamo. Its interface is that of one version, TESTED.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from typing import Any

import click
from dynamo.common.backend import EngineConfig as DynamoConfig
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import PushSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import Disconnected, InvalidArgument

from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE
from quire.client.credentials import Credentials
from quire.client.engine.caching import CacheParams
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.flags import SPECULATIVE_FLAG
from quire.client.engine.grammar import Grammar
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import EngineStopped, InvalidRequest, NotFound, OutOfRoom, QuireError, Unavailable
from quire.integrations.kv_events.follower import PoolFollower
from quire.integrations.kv_events.replica import ROOT, AllCleared, BlocksRemoved, BlocksStored, Change
from quire.serving.dialing import DialOptions
from quire.serving.flags import DIAL_FLAGS, Flag, add_flags, cachemgr_option, command_settings, option
from quire.serving.manual import ServerCommand
from quire.serving.options import dial_options

log = logging.getLogger("quire.dynamo")

TESTED = "1.6.1"
"""The version of both packages that the tests run with."""
_PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")
_RETRY_S = 0.5
# The endpoint leaves discovery after so many looks in a row, so far apart, that found no worker or had no answer.
_MAX_MISSED_LOOKS = 2
_LOOK_INTERVAL_S = 0.5
_LOOK_TIMEOUT_S = 1.0
_TEMPORARY = (NotFound, OutOfRoom, Unavailable)
# Options of a request that SamplingParams has under the same name.
_SAME_NAME = (
    *("temperature", "top_p", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_SAME_NAME_STOPS = ("max_tokens", "min_tokens", "ignore_eos")
_GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf"}
# Parts of a request that would change its answer and that no pool has.
_REFUSED = ("multi_modal_data", "encoder_result", "prefill_result", "bootstrap_info", "prompt_embeds")
_REFUSED_SAMPLING = ("use_beam_search", "length_penalty")
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}

Request = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The values of the process's own flags; see OWN_FLAGS."""

    cachemgr: str
    pool: str
    model_path: str | None
    served_model_name: str | None
    namespace: str
    component: str
    discovery_backend: str
    request_plane: str
    event_plane: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    max_waiting_requests: int
    speculative_config: SpeculativeConfig | None


def params_of(request: Request) -> tuple[SamplingParams, CacheParams]:
    """Return a request's parameters. Raises InvalidRequest, also for a parameter that a pool can't apply."""
    sampling, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    outputs = request.get("output_options") or {}
    refused = [name for name in _REFUSED if request.get(name)]
    refused += [name for name in _REFUSED_SAMPLING if sampling.get(name)]
    # Dynamo ends the stream with the sample that ends first.
    refused += [name for name in ("n", "best_of") if (sampling.get(name) or 1) > 1]
    refused += ["prompt_logprobs"] if outputs.get("prompt_logprobs") is not None else []
    if refused:
        value = sampling.get(refused[0], "given")
        raise InvalidRequest.of_field(refused[0], value, "left out: Quire does not serve it through Dynamo")
    fields: dict[str, Any] = {name: sampling[name] for name in _SAME_NAME if sampling.get(name) is not None}
    fields |= {name: stops[name] for name in _SAME_NAME_STOPS if stops.get(name) is not None}
    fields["max_tokens"] = stops.get("max_tokens")
    fields["top_k"] = max(0, sampling.get("top_k") or 0)  # -1: all tokens
    ends = {*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())}
    fields["stop_token_ids"] = tuple(sorted(ends))
    fields["logprobs"] = outputs.get("logprobs")
    if isinstance(biases := fields.get("logit_bias"), Mapping):
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    if guided := sampling.get("guided_decoding"):
        fields["grammar"] = _grammar_of(guided)
    # Strings in `stop` are the frontend's: it has the text, and ends the request at one.
    return SamplingParams(**fields), CacheParams(salt=_salt_of(request).encode())


def _grammar_of(guided: Mapping[str, Any]) -> Grammar:
    given = {name: value for name, value in guided.items() if value is not None and name != "backend"}
    unknown = sorted(given.keys() - _GRAMMARS.keys())
    if unknown:
        raise InvalidRequest.of_field(f"guided_decoding.{unknown[0]}", "given", f"one of {', '.join(_GRAMMARS)}")
    return Grammar(**{_GRAMMARS[name]: value for name, value in given.items()})


def _salt_of(request: Request) -> str:
    """Return the salt that separates prefixes: the router's, or the one that the caller gave. Empty: none."""
    routing = request.get("routing") or {}
    extension = (request.get("extra_args") or {}).get("nvext") or {}
    return str(routing.get("cache_salt") or extension.get("cache_salt") or "")


def chunk_of(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as Dynamo has it. The text is the frontend's to make."""
    message: dict[str, Any] = {"token_ids": list(chunk.token_ids), "index": chunk.index}
    if chunk.logprobs is not None:
        message["log_probs"] = [each.logprob for each in chunk.logprobs]
        message["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
                for rank, (token_id, logprob) in enumerate(each.top, 1)
            ]
            for each in chunk.logprobs
        ]
    if chunk.finish_reason is not None:
        message["finish_reason"] = _REASONS.get(chunk.finish_reason, "error")
    return message


class _RequestUsage:
    """The tokens of a request, for its last chunk."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_tokens = 0

    def with_usage(self, chunk: Chunk) -> dict[str, Any]:
        """Count a chunk, and return it as Dynamo has it; the usage is in the last one."""
        self._num_tokens += len(chunk.token_ids)
        self._num_cached_tokens += chunk.num_cached_tokens or 0
        if chunk.finish_reason is None:
            return chunk_of(chunk)
        return chunk_of(chunk) | {
            "completion_usage": {
                "prompt_tokens": self._num_prompt_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": self._num_prompt_tokens + self._num_tokens,
                "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            }
        }


class _Events:
    """The pool's changes, for Dynamo's publisher. It has no event for "all": each block that was stored is removed."""

    def __init__(self, publisher: Any, *, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._stored: dict[int, None] = {}  # hashes, a parent before its children

    def publish(self, changes: Sequence[Change]) -> None:
        """Publish changes of a PoolFollower, in order."""
        for change in changes:
            match change:
                case BlocksStored():
                    self._store(change)
                case BlocksRemoved(prefix_hashes):
                    self._remove([_hash_of(each) for each in prefix_hashes])
                case AllCleared():
                    self._remove(list(self._stored)[::-1])

    def _store(self, change: BlocksStored) -> None:
        try:
            salt = change.salt.decode()
        except UnicodeDecodeError:
            return  # a salt of another client: no request of Dynamo can have it
        hashes = [_hash_of(block.prefix_hash) for block in change.blocks]
        self._stored.update(dict.fromkeys(hashes))
        self._publisher.publish_stored(
            list(chain.from_iterable(block.token_ids for block in change.blocks)),
            [self._block_size] * len(hashes),
            hashes,
            parent_hash=None if change.parent_hash == ROOT else _hash_of(change.parent_hash),
            cache_salt=salt or None,
        )

    def _remove(self, hashes: Sequence[int]) -> None:
        known = [each for each in hashes if each in self._stored]
        for each in known:
            del self._stored[each]
        if known:
            self._publisher.publish_removed(known)


def _hash_of(prefix_hash: bytes) -> int:
    """Return a block's hash as Dynamo has it: 64 bits, signed."""
    return int.from_bytes(prefix_hash[:8], "big", signed=True)


class _Service:
    """The endpoint in Dynamo's discovery. Without a worker it is removed, and requests go to other backends."""

    def __init__(self, cache: CacheClient, engine: Engine) -> None:
        self._cache = cache
        self._engine = engine
        self.is_open = True

    async def watch(self, endpoint: Any) -> None:
        """Ask for the pool again and again, until cancelled. Open requests fail when it has no worker any more.

        Dynamo sends them to another backend, if its frontend has --migration-limit.
        """
        num_missed = 0
        while True:
            num_missed = 0 if await self._is_attached() else num_missed + 1
            if num_missed >= _MAX_MISSED_LOOKS:
                self._engine.fail_all(away())
                if self.is_open:
                    self.is_open = False
                    await _tried("taken out of discovery: no worker", endpoint.unregister_endpoint_instance())
            elif not num_missed and not self.is_open:
                self.is_open = await _tried("registered again", endpoint.register_endpoint_instance())
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _is_attached(self) -> bool:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                return (await self._cache.get_pool(self._engine.pool)).attached
        except (TimeoutError, QuireError):
            return False


async def _tried(what: str, change: Any) -> bool:
    """Return True if a change of the discovery was made."""
    try:
        await change
    except Exception as error:
        log.warning("not %s, tried again: %s", what, error)
        return False
    log.warning("the endpoint was %s", what)
    return True


def away() -> Unavailable:
    """Return the error of requests while the pool has no worker."""
    return Unavailable("the pool has no worker right now", reason="POOL_DETACHED")


class QuireEngine(LLMEngine):  # type: ignore[misc]
    """A pool as an engine of Dynamo. Belongs to the event loop that it was opened in."""

    def __init__(self, options: BackendOptions, engine: Engine, cache: CacheClient) -> None:
        """Over an engine that was started, and that this one closes, and a client, too."""
        self._options = options
        self._engine = engine
        self._cache = cache
        self._service = _Service(cache, engine)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._readers: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[QuireEngine, WorkerConfig]:
        """Not supported: use open."""
        raise NotImplementedError("the flags are those of `quire dynamo`")

    @classmethod
    async def open(cls, options: BackendOptions, credentials: Credentials) -> tuple[QuireEngine, WorkerConfig]:
        """Wait for the services, and take a lease. Raises click.ClickException for errors that no retry cures."""
        cache = CacheClient(options.cachemgr, credentials=credentials, retry=ONCE)
        told = ""
        while True:
            config = EngineConfig(
                pool=options.pool,
                max_waiting_requests=options.max_waiting_requests,
                speculative=options.speculative_config,
            )
            engine = Engine.connect(options.cachemgr, credentials=credentials, config=config)
            try:
                await engine.start()
                await _check_content(cache, engine.pool)
                break
            except _TEMPORARY as error:
                await engine.close()
                if error.reason != told:
                    log.warning("waiting for the services: %s", error)
                told = error.reason
                await asyncio.sleep(_RETRY_S)
            except (QuireError, OSError, ValueError) as error:
                await engine.close()
                await cache.close()
                raise click.ClickException(str(error)) from error
        backend = cls(options, engine, cache)
        return backend, backend._worker_config()

    def _worker_config(self) -> WorkerConfig:
        options = self._options
        return WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            model_name=self._model_path,
            served_model_name=self._served_name,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )

    @property
    def _model_path(self) -> str:
        return self._options.model_path or self._engine.model.tokenizer

    @property
    def _served_name(self) -> str:
        return self._options.served_model_name or self._engine.model.model

    async def start(self, worker_id: int) -> DynamoConfig:
        """Return the pool's data for the router."""
        model = self._engine.model
        self._begin(self._end_with_engine(), "engine")
        log.info("pool %s is Dynamo's worker %d", self._engine.pool, worker_id)
        return DynamoConfig(
            model=self._model_path,
            served_model_name=self._served_name,
            llm=LlmRegistration(
                context_length=self._engine.max_sequence_tokens,
                kv_cache_block_size=model.geometry.block_size_tokens,
                total_kv_blocks=model.geometry.block_count - 1,  # without the null block
                max_num_seqs=min(model.geometry.max_sequence_count, EngineConfig().max_running_sequences),
                max_num_batched_tokens=model.max_step_tokens,
            ),
        )

    async def _end_with_engine(self) -> None:
        """End the process, which can serve nothing any more, when the engine's loop has died."""
        log.critical("the backend ends: %s", await self._engine.failed())
        os._exit(1)

    async def kv_event_sources(self) -> list[PushSource]:
        """Return the one source of events. It publishes from the moment on at which Dynamo is ready for it."""
        loop = asyncio.get_running_loop()
        return [PushSource(on_ready=lambda publisher: loop.call_soon_threadsafe(self._follow, publisher))]

    def _follow(self, publisher: Any) -> None:
        events = _Events(publisher, block_size=self._engine.model.geometry.block_size_tokens)
        self._begin(PoolFollower(self._cache, self._engine.pool, events.publish).run(), "follow")

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Keep the endpoint in discovery while the pool has a worker."""
        self._begin(self._service.watch(endpoint), "watch")

    def _begin(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"quire-dynamo-{name}")
        self._tasks.add(task)
        task.add_done_callback(_say_failure)

    async def generate(self, request: Request, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of the sample, until it has a finish reason.

        Raises InvalidArgument, and Disconnected if another backend may serve the request.
        """
        if not self._service.is_open:
            raise Disconnected(str(away()))
        tokens = list(request["token_ids"])
        try:
            params, caching = params_of(request)
            stream = self._engine.generate(tokens, params, cache=caching)
            usage = _RequestUsage(len(tokens))
            chunks: asyncio.Queue[Chunk | QuireError | None] = asyncio.Queue()
            reader = self._readers[context.id()] = asyncio.create_task(_read(stream, chunks))
            try:
                while (chunk := await chunks.get()) is not None:
                    if isinstance(chunk, QuireError):
                        raise chunk
                    yield usage.with_usage(chunk)
            finally:
                reader.cancel()
                self._readers.pop(context.id(), None)
        except InvalidRequest as error:
            raise InvalidArgument(str(error)) from error
        except (Unavailable, EngineStopped) as error:
            raise Disconnected(str(error)) from error

    async def abort(self, context: Any) -> None:
        """Free the blocks of a request: its caller has disconnected."""
        if reader := self._readers.pop(context.id(), None):
            reader.cancel()

    async def cleanup(self) -> None:
        """Stop. The blocks are removed from the router's index, and the lease is given back. Idempotent."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.close()
        await self._cache.close()


async def _check_content(cache: CacheClient, pool: str) -> None:
    """Raise AccessDenied or InvalidRequest if the pool's changes can't be watched with their tokens."""
    async with contextlib.aclosing(cache.watch_blocks(pool, include_content=True)) as watch:
        await anext(watch)


async def _read(stream: AsyncGenerator[Chunk, None], chunks: asyncio.Queue[Chunk | QuireError | None]) -> None:
    """Pass chunks on, then the error if there was one, then None. Cancelling it frees the request's blocks."""
    try:
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                chunks.put_nowait(chunk)
    except QuireError as error:
        chunks.put_nowait(error)
    finally:
        chunks.put_nowait(None)


def _say_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended: %s", task.get_name(), error)


def check_versions() -> str | None:
    """Return the installed version, if it is another one than the tested one."""
    installed = {name: metadata.version(name) for name in _PACKAGES}
    if set(installed.values()) == {TESTED}:
        return None
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    return f"{named}: tested with {TESTED} alone, its interface is not stable"


OWN_FLAGS: list[Flag] = [
    cachemgr_option(),
    option("--pool", default="", metavar="NAME", show_default="the only one", help="The pool that is served."),
    option(
        "--model-path",
        metavar="PATH_OR_HUB_ID",
        show_default="where the worker has its tokenizer from",
        help="Place of the model's configuration, tokenizer and chat template, for Dynamo's frontend.",
    ),
    option(
        "--served-model-name",
        metavar="NAME",
        show_default="as the worker names its model",
        help="The model's name in requests.",
    ),
    option("--namespace", default="dynamo", metavar="NAME", help="Dynamo's namespace."),
    option("--component", default="backend", metavar="NAME", help="The component's name in Dynamo."),
    option(
        "--discovery-backend",
        type=click.Choice(("etcd", "file", "kubernetes", "mem")),
        default="etcd",
        help="The same as the frontend's. Dynamo's variables, such as DYN_FILE_KV and ETCD_ENDPOINTS, name the place.",
    ),
    option("--request-plane", type=click.Choice(("tcp", "nats")), default="tcp", help="The same as the frontend's."),
    option("--event-plane", type=click.Choice(("zmq", "nats")), default="zmq", help="The same as the frontend's."),
    option("--tool-call-parser", metavar="NAME", help="Dynamo's parser of calls of tools."),
    option("--reasoning-parser", metavar="NAME", help="Dynamo's parser of reasoning."),
    option(
        "--max-waiting-requests",
        type=click.IntRange(min=1),
        default=4096,
        metavar="NUMBER",
        help="Prompts that may wait for their first token.",
    ),
    SPECULATIVE_FLAG,
]


@click.command(name="dynamo", cls=ServerCommand, context_settings=command_settings("QUIRE_DYNAMO"))
@dial_options("cachemgr")
@add_flags(OWN_FLAGS)
def main(cachemgr_dial: DialOptions, **own: Any) -> None:
    """Serve a pool as a backend of NVIDIA Dynamo, with KV events for its router.

    Needs the roles client, operator and content where cachemgr authenticates callers. Dynamo listens on all addresses,
    without TLS: see docs/how-to/dynamo.md.

    \b
    Example:
      quire dynamo --cachemgr unix:/run/quire/cachemgr.sock --pool one --discovery-backend file
    """
    options = BackendOptions(**own)
    credentials = Credentials(**{name: getattr(cachemgr_dial, name) for name in DIAL_FLAGS})
    if differs := check_versions():
        click.echo(f"Warning: {differs}", err=True)
    run(QuireEngine, engine_factory=lambda _: QuireEngine.open(options, credentials))


if __name__ == "__main__":
    sys.exit(main(prog_name="quire dynamo"))
