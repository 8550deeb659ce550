"""A model that several pools serve: one engine for each pool, and the choice among them for each request.

    placement   a request goes to the pool where it costs least (choosing.py); LookupPrefix asks all pools in one call
    failover    if a pool's worker stays unavailable, its requests continue in another pool, each token delivered once
    membership  pools are listed each second, and at once when an error shows that the list is old

An engine survives failures of its services (engine.py), and a move loses its cached blocks. So a request stays while
cachemgr is unavailable, and for failover_after_s while the worker is; after that it moves, if another pool can be
used. A moved request has its prompt, its seed and its tokens: with these it draws the same next tokens.

A request that fails by itself is never moved: one that breaks a worker would break the next one.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType, TracebackType
from typing import Any, Self

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheApi, CacheClient
from quire.client.channel import ONCE, RETRIES, RetryPolicy
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine.caching import CacheParams, cache_params_of
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.outputs import Chunk
from quire.client.engine.policy import PriorityPolicy
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.sequence import Delivered
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
    WorkerUnavailable,
)
from quire.client.worker_client import WorkerClient
from quire.compute.v1 import worker_service_pb2
from quire.gateway.routing.backend import BackendStatistics, has_outage, statistics_of
from quire.gateway.routing.choosing import OpenRequest, OutputLength, PoolLoad, PoolUse, cheapest
from quire.serving.runtime_folder import default_cachemgr

_log = logging.getLogger(__name__)

# Reasons for which another pool may still serve a refused request.
_ELSEWHERE = frozenset({"QUEUE_FULL", "SEQUENCE_TOO_LONG"})
# A request that an engine failed with one of these continues in another pool.
_MOVED = (Unavailable, LeaseLost, EpochChanged, NotFound, EngineStopped, OutOfRoom)
# Moves of a request without a token in between.
_MAX_MOVES = 3
# A worker that was away, and is attached in the same epoch, is tried again after this long.
_RETRY_S = 5.0
# A pool that is not listed any more, and has no open request, is forgotten after this long.
_FORGET_S = 60.0
_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The settings of a router. Raises InvalidRequest.

    failover_after_s    a request moves when its pool's worker has been away for so long and another pool can be used
    refresh_s           the pools are listed anew this often
    lookup_timeout_s    without an answer of cachemgr in this time a request is placed without its prefix
    start_timeout_s     start() waits so long for a first pool
    names_tenants       prefixes are looked up for the request's tenant: needs the role `gateway` at cachemgr
    """

    failover_after_s: float = 2.0
    refresh_s: float = 1.0
    lookup_timeout_s: float = 1.0
    start_timeout_s: float = 60.0
    names_tenants: bool = False

    def __post_init__(self) -> None:
        for name in ("failover_after_s", "refresh_s", "lookup_timeout_s", "start_timeout_s"):
            if not 0.001 <= getattr(self, name) <= 86_400:
                raise InvalidRequest.of_field(name, getattr(self, name), "seconds, 0.001 to 86400")


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


@dataclass(slots=True, eq=False)
class _Member:
    """A pool and the engine on it.

    pool       as it was listed last; attached is False if it is not listed any more
    away_epoch the pool's epoch when its worker was found to be away; None: it was not, or is back
    retry_at   by the loop's clock: then the same epoch is tried again
    unlisted_at    by the loop's clock; None: it is listed
    has_stopped    the engine's loop has died: another engine will replace it
    """

    engine: Engine
    policy: PriorityPolicy
    model: worker_service_pb2.GetModelResponse
    pool: pb.Pool
    use: PoolUse = field(default_factory=PoolUse)
    placed: int = 0
    away_epoch: int | None = None
    retry_at: float = 0.0
    unlisted_at: float | None = None
    has_stopped: bool = False
    watcher: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.pool.name

    @property
    def lacks_worker(self) -> bool:
        outage = self.engine.outage
        return outage is not None and outage.waiting_for == "the worker"

    def is_usable(self, now: float) -> bool:
        """Return whether a request would probably be computed now."""
        if not self.pool.attached or self.has_stopped:
            return False
        return not self.lacks_worker or self.pool.epoch != self.away_epoch or now >= self.retry_at

    def load(self, cached: int, counts: pb.BlockCounts) -> PoolLoad:
        return self.use.load(cached, counts, self.pool.geometry.block_size_tokens)


@dataclass(slots=True)
class _Progress:
    """The tokens that the caller of a request has got, by sample."""

    token_ids: list[list[int]]
    ended: list[bool]

    @classmethod
    def of(cls, num_samples: int) -> "_Progress":
        return cls([[] for _ in range(num_samples)], [False] * num_samples)

    def take(self, chunk: Chunk) -> None:
        self.token_ids[chunk.index] += chunk.token_ids
        self.ended[chunk.index] = self.ended[chunk.index] or chunk.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        return all(self.ended)

    @property
    def delivered(self) -> list[Delivered] | None:
        """None as long as there is nothing: then the request is like a new one."""
        if not any(self.token_ids):
            return None
        return [Delivered(tuple(ids), has_ended) for ids, has_ended in zip(self.token_ids, self.ended, strict=True)]


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
        self._address = cachemgr or default_cachemgr()
        self._model_name = model
        self._model_names = tuple(model_names)
        self._config = config or RouterConfig()
        self._engine_config = engine_config or EngineConfig()
        self._weights = weights
        self._credentials = credentials
        self._tokenizer = tokenizer
        self._tracing = tracing
        self._cache = self._connect_cache(retry=ONCE)
        self._fingerprint: str | None = None
        self._members: dict[str, _Member] = {}
        self._joining: set[str] = set()
        self._join_error: BaseException | None = None
        self._lengths = OutputLength()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stale = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._is_listed = True  # the pools, at the last attempt
        self._past = BackendStatistics(0, 0, 0, 0, 0)
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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.start_timeout_s
        error: BaseException = NotFound("no worker has attached a pool of the model", reason="POOL_NOT_FOUND")
        while not self._members:
            try:
                await self._refresh()
            except Unavailable as away:
                error = away
            await self._wait_for_change(min(self._config.refresh_s, max(0.001, deadline - loop.time())))
            error = self._join_error or error
            if not self._members and (loop.time() >= deadline or not isinstance(error, QuireError)):
                raise error
        self._spawn(self._refresh_for_ever(), "quire-router")

    async def _wait_for_change(self, timeout_s: float) -> None:
        self._changed.clear()
        if self._joining or not self._members:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop: callers that still wait get EngineStopped, the leases are given back. Doing it twice is fine."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._leave(member) for member in list(self._members.values())))
        await self._cache.close()

    # The interface of Backend.

    @property
    def model_names(self) -> Sequence[str]:
        """The names given, or the worker's."""
        return self._model_names or (self._first().pool.geometry.model,)

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
        return self._first().engine.tokenizer

    @property
    def tokenizer_source(self) -> str:
        """The place that was named, or the one that a worker names."""
        return self._tokenizer if isinstance(self._tokenizer, str) else self._first().model.tokenizer

    @property
    def pools(self) -> Sequence[str]:
        """Names of the pools that are attached."""
        return sorted(name for name, member in self._members.items() if member.pool.attached)

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be computed now in one of the pools."""
        now = asyncio.get_running_loop().time()
        usable = [member for member in self._members.values() if member.is_usable(now)]
        return self._is_listed and not all(has_outage(member.engine) for member in usable)

    def statistics(self) -> BackendStatistics:
        """The sums of all engines; counters include those of pools that have gone."""
        each = [statistics_of(member.engine) for member in self._members.values()]
        return _sum([self._past, *each])

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
        PriorityPolicy(weights)
        self._weights = weights
        for member in self._members.values():
            member.policy.set_weights(weights)

    def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, cache: CacheParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks as Engine.generate gives them. Raises InvalidRequest at once, if no pool can serve the request."""
        token_ids, caching = list(prompt_token_ids), cache_params_of(cache)
        if params.seed is None:
            params = replace(params, seed=random.getrandbits(62))
        self._check(token_ids, params)
        return self._generate(token_ids, params, caching)

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        error: QuireError = EngineStopped("the router is closed")
        for member in self._members.values():
            try:
                member.engine.generate(token_ids, params)  # refuses at once; nothing begins before it is iterated
            except (InvalidRequest, EngineStopped) as refused:
                error = refused
            else:
                return
        raise error

    async def _generate(
        self, token_ids: list[int], params: SamplingParams, cache: CacheParams
    ) -> AsyncGenerator[Chunk, None]:
        loop = asyncio.get_running_loop()
        ends_at = None if params.timeout_s is None else loop.time() + params.timeout_s
        progress, tried, num_moves = _Progress.of(params.n), set[_Member](), 0
        while True:
            member, num_cached = await self._place(token_ids, params, cache, without=tried)
            request = OpenRequest(
                member.use,
                num_missing=len(token_ids) + sum(map(len, progress.token_ids)) - num_cached,
                num_expected=self._lengths.expected(params.max_tokens, params.n),
            )
            try:
                if ends_at is not None:
                    params = replace(params, timeout_s=max(0.001, ends_at - loop.time()))
                chunks = member.engine.generate(token_ids, params, cache=cache, delivered=progress.delivered)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        request.begin_output()
                        progress.take(chunk)
                        num_moves = 0
                        tried.clear()
                        yield chunk
                self._observe(progress)
                return
            except QuireError as error:
                if progress.has_ended:
                    return
                if error.reason in _ELSEWHERE:
                    tried.add(member)
                else:
                    tried = {member}
                    num_moves += 1
                if not self._goes_on_elsewhere(error, tried, num_moves):
                    raise
                if isinstance(error, EngineStopped):
                    member.has_stopped = True
                    self._is_stale.set()
                if error.reason not in _ELSEWHERE:
                    self._moves += 1
                    _log.warning("a request of pool %s continues in another pool: %s", member.name, error)
            finally:
                request.leave()

    def _observe(self, progress: _Progress) -> None:
        for token_ids in progress.token_ids:
            self._lengths.observe(len(token_ids))

    def _goes_on_elsewhere(self, error: QuireError, tried: set[_Member], num_moves: int) -> bool:
        if self._is_closed or num_moves > _MAX_MOVES or all(member in tried for member in self._members.values()):
            return False
        return error.reason in _ELSEWHERE or isinstance(error, _MOVED)

    # Placement.

    async def _place(
        self, token_ids: list[int], params: SamplingParams, cache: CacheParams, *, without: set[_Member]
    ) -> tuple[_Member, int]:
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
            else member.load(0, member.pool.block_counts)
            for member in candidates
        }
        chosen = self._members[cheapest(loads.items(), len(token_ids))]
        self._placed[chosen.name] = self._placed.get(chosen.name, 0) + 1
        return chosen, loads[chosen.name].num_cached

    def _candidates(self, without: set[_Member]) -> list[_Member]:
        """Return the pools that can be used; without one, those that a request may wait for."""
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
                found = await self._cache.lookup_prefix(token_ids, salt=cache.salt, tenant=tenant)
        except (QuireError, TimeoutError) as error:
            self._unanswered += 1
            _log.warning("a prefix was not looked up: %s", error or "no answer in time")
            return {}
        matches = {match.pool: match for match in found.matches}
        if not matches.keys() <= self._members.keys():
            self._is_stale.set()
        if not cache.reads_cache:
            for match in matches.values():
                match.cached_token_count = 0
        return matches

    # Membership.

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self._refresh()
                self._is_listed = True
            except QuireError as error:
                _log.warning("the pools can't be listed: %s", error)
                self._is_listed = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.refresh_s):
                    await self._is_stale.wait()
            await asyncio.sleep(min(0.05, self._config.refresh_s))  # a stale list is read once for many requests
            self._is_stale.clear()

    async def _refresh(self) -> None:
        """List the pools: new ones join, those of another model leave."""
        listed = {pool.name: pool for pool in await self._cache.list_pools()}
        self._choose_model(listed.values())
        now = asyncio.get_running_loop().time()
        for name, member in list(self._members.items()):
            if name not in listed:
                self._miss(member, now)
            elif listed[name].geometry.model_fingerprint != self._fingerprint:
                self._lose_model(member)
            else:
                member.pool, member.unlisted_at = listed[name], None
        for name, pool in listed.items():
            is_ours = pool.attached and pool.geometry.model_fingerprint == self._fingerprint
            is_served = name in self._members and not self._members[name].has_stopped
            if is_ours and not is_served and name not in self._joining:
                self._joining.add(name)
                self._spawn(self._join(pool), f"quire-join-{name}")

    def _lose_model(self, member: _Member) -> None:
        """Leave a pool that has another model now; the last one is kept, and may get its model back."""
        member.pool.attached = False
        member.engine.fail_all(_other_model(member.name))
        if len(self._members) > 1:
            self._spawn(self._leave(member), f"quire-leave-{member.name}")

    def _choose_model(self, pools: Iterable[pb.Pool]) -> None:
        if self._fingerprint is not None:
            return
        found = {
            pool.geometry.model_fingerprint: pool.geometry.model
            for pool in pools
            if pool.attached and self._model_name in (None, pool.geometry.model)
        }
        if len(found) > 1:
            names = ", ".join(sorted(found.values()))
            limit = f"a name that stands for the same weights in all pools; there are {names}"
            raise InvalidRequest.of_field("model", self._model_name, limit)
        self._fingerprint = next(iter(found), None)

    def _miss(self, member: _Member, now: float) -> None:
        """Take a pool that is not listed any more for detached; forget it in the end, if it is not the last."""
        member.pool.attached = False
        member.unlisted_at = member.unlisted_at or now
        is_over = now >= member.unlisted_at + _FORGET_S and not member.use.num_open
        if is_over and len(self._members) > 1:
            self._spawn(self._leave(member), f"quire-leave-{member.name}")

    async def _join(self, pool: pb.Pool) -> None:
        """Start an engine on a pool; if that fails it is tried again when the pools are listed next."""
        policy = PriorityPolicy(self._weights)
        tokenizer = self._first().engine.tokenizer if self._members else self._tokenizer
        engine = Engine(
            _SameModel(self._connect_cache(), pool.geometry.model_fingerprint),
            lambda address: self._worker_kind(address, credentials=self._credentials),
            config=replace(self._engine_config, pool=pool.name, metrics_listen=None),
            tokenizer=tokenizer or self._tokenizer,
            policy=policy,
            tracing=self._tracing,
        )
        try:
            await engine.start()
            member = _Member(engine, policy, engine.model, pool)
        except (QuireError, OSError, ValueError) as error:
            _log.warning("pool %s can't be used: %s", pool.name, error)
            self._join_error = error
            await engine.close()
            return
        except BaseException:
            await engine.close()
            raise
        finally:
            self._joining.discard(pool.name)
            self._changed.set()
        before = self._members.get(pool.name)
        self._members[pool.name] = member
        member.watcher = asyncio.create_task(self._watch(member), name=f"quire-watch-{pool.name}")
        _log.info("pool %s joined", pool.name)
        if before is not None:
            await self._retire(before)

    async def _leave(self, member: _Member) -> None:
        """Close a pool's engine; its requests continue in other pools."""
        if self._members.get(member.name) is not member:
            return
        del self._members[member.name]
        await self._retire(member)
        _log.info("pool %s left", member.name)

    async def _retire(self, member: _Member) -> None:
        """Close an engine, and keep its counters."""
        self._past = _sum([self._past, replace(statistics_of(member.engine), num_running=0, num_waiting=0)])
        if member.watcher is not None:
            member.watcher.cancel()
            await asyncio.wait([member.watcher])
        await member.engine.close()

    async def _watch(self, member: _Member) -> None:
        """Move a pool's requests when its worker stays away and there is another pool."""
        loop, config = asyncio.get_running_loop(), self._config
        seen, moves_at = None, None
        while True:
            try:
                async with asyncio.timeout_at(moves_at):
                    seen = await member.engine.next_outage(seen)
            except TimeoutError:
                moves_at = None if self._evacuate(member) else loop.time() + config.refresh_s
                continue
            if not member.lacks_worker:
                moves_at = None
                if seen is None:
                    member.away_epoch = None
                continue
            self._is_stale.set()
            if member.away_epoch is None:
                member.away_epoch = member.pool.epoch
            member.retry_at = loop.time() + _RETRY_S
            if moves_at is None:
                moves_at = loop.time() + config.failover_after_s

    def _evacuate(self, member: _Member) -> bool:
        """Move a pool's requests to other pools; False if no other pool can be used."""
        now = asyncio.get_running_loop().time()
        if not any(other.is_usable(now) for other in self._members.values() if other is not member):
            return False
        outage = member.engine.outage
        why = "it was unavailable" if outage is None else str(outage.error)
        member.engine.fail_all(WorkerUnavailable(f"the worker of pool {member.name!r} stays unavailable: {why}"))
        return True

    # Parts.

    def _first(self) -> _Member:
        return next(iter(self._members.values()))

    def _connect_cache(self, *, retry: RetryPolicy = RETRIES) -> CacheClient:
        kind = CacheClient if self._tracing is None else TracedCacheClient
        return kind(self._address, credentials=self._credentials, retry=retry)

    def _worker_kind(self, address: str, *, credentials: Credentials) -> WorkerClient:
        kind = WorkerClient if self._tracing is None else TracedWorkerClient
        return kind(address, credentials=credentials)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _SameModel:
    """A client of cachemgr that uses a pool only while its model is this one. A CacheApi."""

    def __init__(self, cache: CacheApi, fingerprint: str) -> None:
        self._cache = cache
        self._fingerprint = fingerprint
        self.renew_lease = cache.renew_lease
        self.delete_lease = cache.delete_lease
        self.plan = cache.plan
        self.hang_up = cache.hang_up
        self.close = cache.close

    async def create_lease(self, pool: str, *, ttl_s: float) -> pb.CreateLeaseResponse:
        """A lease, given back if the pool has another model. Raises Unavailable then."""
        lease = await self._cache.create_lease(pool, ttl_s=ttl_s)
        if lease.geometry.model_fingerprint != self._fingerprint:
            await self._cache.delete_lease(lease.lease_id)
            raise _other_model(pool)
        return lease

    async def get_pool(self, pool: str) -> pb.Pool:
        """The pool. Raises Unavailable if it has another model."""
        found = await self._cache.get_pool(pool)
        if found.geometry.model_fingerprint != self._fingerprint:
            raise _other_model(pool)
        return found


def _other_model(pool: str) -> Unavailable:
    return WorkerUnavailable(f"pool {pool!r} has another model now")


def _sum(each: Sequence[BackendStatistics]) -> BackendStatistics:
    return BackendStatistics(
        **{part.name: sum(getattr(one, part.name) for one in each) for part in fields(BackendStatistics)}
    )
