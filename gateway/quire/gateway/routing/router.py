"""A model that several pools serve: one engine for each pool, and the choice among them for each request.

    placement   a request goes to the pool where it costs least (choosing.py); LookupPrefix asks all pools in one call
    failover    if a pool's worker stays unavailable, its requests continue in another pool, each token delivered once
    membership  pools join and leave while requests run (members.py)

An engine survives failures of its services (engine.py), and a move loses its cached blocks. So a request stays while
cachemgr is unavailable, and for failover_after_s while the worker is; after that it moves, if another pool can be
used. A moved request has its prompt, its seed and its tokens: with these it draws the same next tokens, but for
rounding between workers without --deterministic (docs/reference/scheduling.md, Seeds).

A request that fails by itself is never moved: one that breaks a worker would break the next one.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType
from typing import Self

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE, RETRIES, RetryPolicy
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine.caching import CacheParams, cache_params_of
from quire.client.engine.config import EngineConfig
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.tokenizer import Tokenizer
from quire.client.engine.tracing import TracedCacheClient, TracedWorkerClient, Tracing
from quire.client.errors import (
    EngineStopped,
    EpochChanged,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutOfRoom,
    QuireError,
    Unavailable,
)
from quire.client.worker_client import WorkerClient
from quire.gateway.routing.backend import BackendStatistics, Chunks, PoolUse, engine_adapters, has_outage, pool_use
from quire.gateway.routing.choosing import OpenRequest, OutputLength, cheapest
from quire.gateway.routing.failover import ELSEWHERE, RoutedChunks
from quire.gateway.routing.members import Member, Members, RouterConfig
from quire.serving.runtime_folder import given_cachemgr

_log = logging.getLogger(__name__)

# A request that an engine failed with one of these continues in another pool.
_MOVED = (Unavailable, LeaseLost, EpochChanged, NotFound, EngineStopped, OutOfRoom)
# Moves of a request without a token in between.
_MAX_MOVES = 3
_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Present numbers, and counters since the start.

    placed     requests sent to each pool, those that moved there included
    open       requests in each pool
    moves      requests that went on in another pool
    unanswered prefixes that cachemgr did not look up in time
    """

    placed: Mapping[str, int]
    open: Mapping[str, int]
    moves: int
    unanswered: int


class Router:
    """All pools of one model as a Backend. Use it with `async with`, or call start() and close().

    The model is that of the pools that are attached first; later ones join if their weights are the same
    (PoolGeometry.model_fingerprint).
    """

    def __init__(
        self,
        cachemgr: str | None = None,
        *,
        model: str | None = None,
        model_names: Sequence[str] = (),
        config: RouterConfig | None = None,
        engine_config: EngineConfig | None = None,
        weights: Mapping[str, float] = _NO_WEIGHTS,
        credentials: Credentials = NO_CREDENTIALS,
        tokenizer: Tokenizer | str | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Over the cachemgr at this address; None is the default one.

        model is the name that the workers give it; None: the only one that is served. model_names are the names for
        callers; none: the worker's. engine_config is for each engine, but for its pool and its page of metrics. weights
        are the tenants' (PriorityPolicy); the others are as in Engine.
        """
        self._address = cachemgr or given_cachemgr()
        self._model_names = tuple(model_names)
        self._config = config or RouterConfig()
        self._credentials = credentials
        self._tokenizer = tokenizer
        self._tracing = tracing
        self._cache = self._connect_cache(retry=ONCE)
        self._members = Members(
            self._cache,
            connect_cache=self._connect_cache,
            connect_worker=self._connect_worker,
            model_name=model,
            config=self._config,
            engine_config=engine_config or EngineConfig(),
            weights=weights,
            tokenizer=tokenizer,
            tracing=tracing,
        )
        self._lengths = OutputLength()
        self._is_closed = False
        self._placed: dict[str, int] = {}
        self._moves = 0
        self._unanswered = 0

    async def __aenter__(self) -> Self:
        """Start; see start."""
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; see close."""
        await self.close()

    async def start(self) -> None:
        """Take a lease on each pool. Returns when one can be used.

        Raises InvalidRequest if several models are attached and none was named; after start_timeout_s what kept the
        last pool from being used, or NotFound without a pool; OSError or ValueError for the tokenizer asked for.
        """
        await self._members.start()

    async def close(self) -> None:
        """Stop: callers that still wait get EngineStopped, the leases are given back. Doing it twice is fine."""
        self._is_closed = True
        await self._members.close()
        await self._cache.close()

    # The interface of Backend.

    @property
    def model_names(self) -> Sequence[str]:
        """The names given, or the worker's."""
        return self._model_names or (self._members.first.pool.geometry.model,)

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """Those that every pool has under the same name."""
        first, *others = [engine_adapters(member.engine) for member in self._members.values()] or [{}]
        return {
            name: identity for name, identity in first.items() if all(other.get(name) == identity for other in others)
        }

    @property
    def max_adapters(self) -> int:
        """The least of the workers' limits."""
        return min(member.model.max_adapter_count for member in self._members.values())

    async def load_adapter(self, name: str, path: str) -> bool:
        """Load it into every pool's worker, or into none: where it was new, it is unloaded again after an error."""
        members = list(self._members.values())
        loads = [member.engine.load_adapter(name, path) for member in members]
        results = await asyncio.gather(*loads, return_exceptions=True)
        error = next((each for each in results if isinstance(each, BaseException)), None)
        if error is None:
            return any(results)
        for member, is_new in zip(members, results, strict=True):
            if is_new is True:
                with contextlib.suppress(QuireError):
                    await member.engine.unload_adapter(name)
        raise error

    async def unload_adapter(self, name: str) -> None:
        """Unload it from every pool's worker. After an error it may be gone from some: then no request can name it."""
        for member in list(self._members.values()):
            await member.engine.unload_adapter(name)

    @property
    def max_model_len(self) -> int:
        """Most tokens that a sequence can have in one of the pools."""
        return max(member.engine.max_sequence_tokens for member in self._members.values())

    @property
    def max_logprobs(self) -> int:
        """Most log-probabilities that one of the workers reports per token."""
        return max(member.model.max_logprob_count for member in self._members.values())

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of all engines."""
        return self._members.first.engine.tokenizer

    @property
    def tokenizer_source(self) -> str:
        """The place that was named, or the one that a worker names."""
        return self._tokenizer if isinstance(self._tokenizer, str) else self._members.first.model.tokenizer

    @property
    def pools(self) -> Sequence[str]:
        """Names of the pools that are attached."""
        return sorted(name for name, member in self._members.items() if member.pool.attached)

    @property
    def pool_uses(self) -> Sequence[PoolUse]:
        """Those of the pools that are attached."""
        attached = [member for member in self._members.values() if member.pool.attached]
        return [pool_use(member.pool.geometry, self._members.counts(member.name)) for member in attached]

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be computed now in one of the pools."""
        now = asyncio.get_running_loop().time()
        usable = [member for member in self._members.values() if member.is_usable(now)]
        return self._members.is_listed and not all(has_outage(member.engine) for member in usable)

    def statistics(self) -> BackendStatistics:
        """The sums of all engines; counters include those of pools that have gone."""
        return self._members.statistics()

    async def failed(self) -> BaseException:
        """Wait until a task that watches the pools has died. A dead engine is replaced."""
        return await self._members.failed()

    def router_statistics(self) -> RouterStatistics:
        """The requests by pool."""
        members = self._members.values()
        return RouterStatistics(
            placed=dict(self._placed),
            open={member.name: member.use.num_open for member in members},
            moves=self._moves,
            unanswered=self._unanswered,
        )

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Give the tenants other weights in all engines, from now on. Raises InvalidRequest, nothing changed."""
        self._members.set_weights(weights)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache: CacheParams | None = None,
        is_whole: bool = False,
    ) -> Chunks:
        """Chunks as Engine.generate gives them. Raises InvalidRequest at once, if no pool can serve the request."""
        token_ids, caching = list(prompt_token_ids), cache_params_of(cache)
        if params.seed is None:
            params = replace(params, seed=random.getrandbits(62))
        self._check(token_ids, params, caching)
        return RoutedChunks(self, token_ids, params, caching, is_whole=is_whole)

    def _check(self, token_ids: list[int], params: SamplingParams, cache: CacheParams) -> None:
        error: QuireError = EngineStopped("the router is closed")
        for member in self._members.values():
            try:
                member.engine.check(token_ids, params, cache=cache)
            except (InvalidRequest, EngineStopped) as refused:
                error = refused
            else:
                return
        raise error

    # For RoutedChunks.

    async def enter(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache: CacheParams,
        *,
        num_delivered: int,
        tried: set[Member],
    ) -> tuple[Member, OpenRequest]:
        """Choose another pool than those tried, and count the request there: num_delivered tokens are known."""
        member, num_cached = await self._place(token_ids, params, cache, without=tried)
        num_expected = self._lengths.expected(params.max_tokens, params.n)
        num_missing = len(token_ids) + num_delivered - num_cached
        return member, OpenRequest(member.use, num_missing=num_missing, num_expected=num_expected)

    def goes_on_elsewhere(self, error: QuireError, member: Member, *, tried: set[Member], num_moves: int) -> bool:
        """Return whether a request that this error ended in a pool goes on in another one than those tried."""
        if self._is_closed or num_moves > _MAX_MOVES or all(each in tried for each in self._members.values()):
            return False
        if error.reason in ELSEWHERE:
            return True
        if not isinstance(error, _MOVED):
            return False
        if isinstance(error, EngineStopped):
            self._members.replace_stopped(member)
        self._moves += 1
        _log.warning("a request of pool %s continues in another pool: %s", member.name, error)
        return True

    def observe(self, num_tokens: int) -> None:
        """Learn from a sample that has ended how long answers are."""
        self._lengths.observe(num_tokens)

    # Placement.

    async def _place(
        self, token_ids: list[int], params: SamplingParams, cache: CacheParams, *, without: set[Member]
    ) -> tuple[Member, int]:
        """Return the pool for a request, and the tokens of its prompt that are cached there."""
        if len(self._candidates(without)) > 1:
            matches = await self._look_up(token_ids, params, cache)
        else:
            matches = {}
        candidates = self._candidates(without)  # as they are after the call
        if not candidates:
            raise EngineStopped("the router is closed")
        loads = {
            member.name: member.load(match.cached_token_count, match.block_counts)
            if (match := matches.get(member.name))
            else member.load(0, self._members.counts(member.name))
            for member in candidates
        }
        chosen = self._members[cheapest(loads.items(), len(token_ids))]
        self._placed[chosen.name] = self._placed.get(chosen.name, 0) + 1
        return chosen, loads[chosen.name].num_cached

    def _candidates(self, without: set[Member]) -> list[Member]:
        """Return the pools that can be used; without one, the pools that a request may wait for."""
        now = asyncio.get_running_loop().time()
        members = [member for member in self._members.values() if member not in without]
        usable = [member for member in members if member.is_usable(now)]
        return usable or [member for member in members if member.pool.attached] or members

    async def _look_up(
        self, token_ids: list[int], params: SamplingParams, cache: CacheParams
    ) -> dict[str, pb.PrefixMatch]:
        """Return the cached tokens of a prompt in each pool; nothing if cachemgr does not answer in time."""
        tenant = params.tenant if self._config.names_tenants else None
        try:
            async with asyncio.timeout(self._config.lookup_timeout_s):
                found = await self._cache.lookup_prefix(
                    token_ids, salt=cache.salt, adapter=cache.adapter, tenant=tenant
                )
        except (QuireError, TimeoutError) as error:
            self._unanswered += 1
            _log.warning("a prefix was not looked up: %s", error or "no answer in time")
            return {}
        matches = {match.pool: match for match in found.matches}
        if not cache.reads_cache:
            for match in matches.values():
                match.cached_token_count = 0
        return matches

    # Parts.

    def _connect_cache(self, *, retry: RetryPolicy = RETRIES) -> CacheClient:
        kind = CacheClient if self._tracing is None else TracedCacheClient
        return kind(self._address, credentials=self._credentials, retry=retry)

    def _connect_worker(self, address: str) -> WorkerClient:
        kind = WorkerClient if self._tracing is None else TracedWorkerClient
        return kind(address, credentials=self._credentials)
