"""The protocol through which every endpoint generates, and a single engine behind it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheClient
from quire.client.engine.adapters import adapters_of
from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams
from quire.client.engine.engine import Engine
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import QuireError, Unavailable
from quire.compute.v1 import worker_service_pb2

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Without requests, a change of a service is noticed after this time and the time of one call."""


@dataclass(frozen=True, slots=True)
class BackendStatistics:
    """Present numbers of sequences, and counters since the start."""

    num_running: int
    num_waiting: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A pool's blocks, as they were seen last, a second ago or less.

    block_size   tokens of a block
    num_blocks   all blocks that sequences can have
    num_used     of these, blocks that a sequence holds or a step in flight may touch; cached ones are free
    """

    block_size: int
    num_blocks: int
    num_used: int


def pool_use(geometry: attach_pb2.PoolGeometry, counts: pb.BlockCounts) -> PoolUse:
    """Return the use of a pool's blocks; block 0 is nobody's."""
    return PoolUse(
        block_size=geometry.block_size_tokens,
        num_blocks=max(0, geometry.block_count - 1),
        num_used=counts.active_count + counts.retired_count,
    )


class Chunks(Protocol):
    """The chunks of one request, for one reader. Work begins with the first item; closing them frees everything."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Return itself."""

    def __anext__(self) -> Awaitable[Chunk]:
        """Wait for the next chunk. Raises the request's error; then the chunks have ended."""

    def aclose(self) -> Awaitable[None]:
        """End the request, if it has not ended. Not while a chunk is awaited."""


class Backend(Protocol):
    """A served model: one engine, or a router over the engines of several pools."""

    @property
    def model_names(self) -> Sequence[str]:
        """The model's names in requests; answers have the first one."""

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """The identities of the adapters that requests can name in place of the model, by name."""

    @property
    def max_adapters(self) -> int:
        """Most adapters that can be loaded at a time; 0: none."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def max_logprobs(self) -> int:
        """Most log-probabilities to report per token."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use; None: prompts are token ids and there is no text."""

    @property
    def tokenizer_source(self) -> str:
        """The place of the tokenizer's files: a folder, or a hub id. The chat template is there too."""

    @property
    def pools(self) -> Sequence[str]:
        """Names of the pools behind it."""

    @property
    def pool_uses(self) -> Sequence[PoolUse]:
        """The use of each attached pool's blocks."""

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be computed now; False while it would wait for a service."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache: CacheParams | None = None,
        is_whole: bool = False,
    ) -> Chunks:
        """Chunks as Engine.generate gives them. Raises InvalidRequest at once, other errors while it is iterated."""

    async def load_adapter(self, name: str, path: str) -> bool:
        """Load an adapter from a folder of the workers' machines; return False if it was there. Raises QuireError."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises QuireError: OutOfRoom while a sequence has it."""

    def statistics(self) -> BackendStatistics:
        """Present numbers and counters."""

    async def failed(self) -> BaseException:
        """Wait until a task that every request needs has died; return its error. Then the process should end."""


class EngineBackend:
    """A single engine as a backend. The caller starts and closes the engine."""

    def __init__(self, engine: Engine, model_names: Sequence[str], *, tokenizer_source: str | None = None) -> None:
        """tokenizer_source None: the place that the worker names."""
        self._engine = engine
        self._model_names = tuple(model_names)
        self._model = engine.model
        self._pool = engine.pool
        self._tokenizer_source = tokenizer_source or engine.model.tokenizer
        self._is_attached = True
        self._seen = pb.Pool()

    @property
    def model(self) -> worker_service_pb2.GetModelResponse:
        """The worker's model, as of the engine's start."""
        return self._model

    @property
    def max_running_sequences(self) -> int:
        """Most sequences that the engine computes at once."""
        return self._engine.max_running_sequences

    @property
    def block_counts(self) -> pb.BlockCounts:
        """The pool's blocks by state, as watch() saw them last; zeros before it did."""
        return self._seen.block_counts

    @property
    def model_names(self) -> Sequence[str]:
        """The names given."""
        return self._model_names

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """Those of the worker; none while there is no session with it."""
        return engine_adapters(self._engine)

    @property
    def max_adapters(self) -> int:
        """The worker's limit, as of the engine's start."""
        return self._model.max_adapter_count

    async def load_adapter(self, name: str, path: str) -> bool:
        """Load it into the worker."""
        return await self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload it from the worker."""
        await self._engine.unload_adapter(name)

    @property
    def max_model_len(self) -> int:
        """Most tokens that the pool and the model hold for a sequence."""
        return self._engine.max_sequence_tokens

    @property
    def max_logprobs(self) -> int:
        """Most log-probabilities that the worker reports per token."""
        return self._model.max_logprob_count

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer."""
        return self._engine.tokenizer

    @property
    def tokenizer_source(self) -> str:
        """The place of the tokenizer's files."""
        return self._tokenizer_source

    @property
    def pools(self) -> Sequence[str]:
        """The engine's pool."""
        return (self._pool,)

    @property
    def pool_uses(self) -> Sequence[PoolUse]:
        """That of the pool, as watch() saw it last; none before it did."""
        return (pool_use(self._seen.geometry, self._seen.block_counts),) if self._seen.attached else ()

    @property
    def is_ready(self) -> bool:
        """Return whether the services can be used, as far as watch() and the requests that are open know."""
        return self._is_attached and not has_outage(self._engine)

    async def failed(self) -> BaseException:
        """Wait until the engine's loop has died."""
        return await self._engine.failed()

    async def watch(self, cache: CacheClient) -> None:
        """Ask cachemgr for the pool again and again: an engine without requests does not notice that a service went."""
        while True:
            try:
                pool = await cache.get_pool(self._pool)
                self._is_attached, self._seen = pool.attached, pool
                if lacks_adapters(self._engine, pool):
                    await self._engine.refresh_adapters()
            except QuireError:
                self._is_attached = False
            except Exception:
                log.exception("the pool can't be looked at")
                self._is_attached = False
            await asyncio.sleep(WATCH_S)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache: CacheParams | None = None,
        is_whole: bool = False,
    ) -> Chunks:
        """Chunks of a request; see Engine.generate."""
        return self._engine.generate(prompt_token_ids, params, cache=cache, is_whole=is_whole)

    def statistics(self) -> BackendStatistics:
        """The engine's numbers."""
        return statistics_of(self._engine)


def engine_adapters(engine: Engine) -> dict[str, bytes]:
    """Return the adapters of an engine's worker; none while there is no session with it."""
    try:
        return engine.adapters
    except Unavailable:
        return {}


def lacks_adapters(engine: Engine, pool: pb.Pool) -> bool:
    """Return True if an engine knows other adapters of its worker than cachemgr does."""
    is_known = pool.attached and pool.HasField("adapters")
    return is_known and adapters_of(pool.adapters) != engine_adapters(engine)


@dataclass(frozen=True, slots=True)
class AdaptedBackend:
    """One adapter of a backend, as a backend: requests for it are computed with the adapter."""

    base: Backend
    name: str
    identity: bytes

    @property
    def model_names(self) -> Sequence[str]:
        """The adapter's name."""
        return (self.name,)

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """None: an adapter has no adapters."""
        return {}

    @property
    def max_adapters(self) -> int:
        """None can be loaded."""
        return 0

    async def load_adapter(self, name: str, path: str) -> bool:
        """Load it for the base."""
        return await self.base.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload it from the base."""
        await self.base.unload_adapter(name)

    @property
    def max_model_len(self) -> int:
        """That of the base."""
        return self.base.max_model_len

    @property
    def max_logprobs(self) -> int:
        """That of the base."""
        return self.base.max_logprobs

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of the base."""
        return self.base.tokenizer

    @property
    def tokenizer_source(self) -> str:
        """That of the base."""
        return self.base.tokenizer_source

    @property
    def pools(self) -> Sequence[str]:
        """Those of the base."""
        return self.base.pools

    @property
    def pool_uses(self) -> Sequence[PoolUse]:
        """Those of the base."""
        return self.base.pool_uses

    @property
    def is_ready(self) -> bool:
        """True if the base is ready."""
        return self.base.is_ready

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache: CacheParams | None = None,
        is_whole: bool = False,
    ) -> Chunks:
        """Chunks of a request with the adapter; see Backend.generate."""
        adapted = replace(cache or NO_CACHE_PARAMS, adapter=self.identity)
        return self.base.generate(prompt_token_ids, params, cache=adapted, is_whole=is_whole)

    def statistics(self) -> BackendStatistics:
        """Those of the base, with all of its adapters."""
        return self.base.statistics()

    async def failed(self) -> BaseException:
        """As the base."""
        return await self.base.failed()


def base_of(backend: Backend) -> Backend:
    """Return the backend of the model that an adapter is for; any other backend itself."""
    return backend.base if isinstance(backend, AdaptedBackend) else backend


def has_outage(engine: Engine) -> bool:
    """Return whether requests wait for a service. An outage that no request waits for may be over."""
    return engine.outage is not None and engine.statistics().num_requests > 0


def statistics_of(engine: Engine) -> BackendStatistics:
    """Return an engine's numbers as those of a backend."""
    scheduler = engine.statistics().scheduler
    return BackendStatistics(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + scheduler.num_following + scheduler.num_draining,
        preemptions=scheduler.preemptions,
        prompt_tokens=scheduler.admitted_tokens,
        cached_tokens=scheduler.cached_tokens,
        drafts=scheduler.drafts,
        drafted_tokens=scheduler.drafted_tokens,
        accepted_tokens=scheduler.accepted_tokens,
    )
