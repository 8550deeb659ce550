"""The pools of one model, with an engine on each: new pools join, others leave.

cachemgr tells of each pool that comes, changes or goes (WatchPools). Each second it is asked for the blocks in use,
which a watch does not tell, and pools that could not be used are tried again. If a pool's worker stays unavailable for
failover_after_s, and another pool can be used, the pool's engine fails its requests, which the router moves.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheApi, CacheClient
from quire.client.channel import is_being_cancelled
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.scheduling.policy import PriorityPolicy
from quire.client.engine.tokenizer import Tokenizer
from quire.client.engine.tracing import Tracing
from quire.client.errors import InvalidRequest, NotFound, OutOfRoom, QuireError, Unavailable, WorkerUnavailable
from quire.client.worker_client import WorkerApi
from quire.compute.v1 import worker_service_pb2
from quire.gateway.routing.backend import BackendStatistics, lacks_adapters, statistics_of
from quire.gateway.routing.choosing import PoolLoad, PoolUse

_log = logging.getLogger(__name__)

# A worker that was away, and is attached in the same epoch, is tried again after this long.
_RETRY_S = 5.0
# A watch of the pools that broke begins again after this long.
_WATCH_AGAIN_S = 0.2
_NO_COUNTS = pb.BlockCounts()
# A pool that is gone, and has no open request, is forgotten after this long.
_FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The settings of a router. Raises InvalidRequest.

    failover_after_s    a request moves when its pool's worker has been away for so long and another pool can be used
    refresh_s           the blocks in use are asked for this often, and a pool that can't be used is tried again
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


@dataclass(slots=True, eq=False)
class Member:
    """A pool and the engine on it.

    pool       as it was told last, without counts; attached is False if it is gone
    away_epoch the pool's epoch when its worker was found to be away; None: it was not, or is back
    retry_at   by the loop's clock: then the same epoch is tried again
    unlisted_at    by the loop's clock, if it is gone; None: it is there
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
        """The pool's name."""
        return self.pool.name

    @property
    def lacks_worker(self) -> bool:
        """True if the engine waits for the pool's worker."""
        outage = self.engine.outage
        return outage is not None and outage.waiting_for == "the worker"

    def is_usable(self, now: float) -> bool:
        """Return whether a request would probably be computed now."""
        if not self.pool.attached or self.has_stopped:
            return False
        return not self.lacks_worker or self.pool.epoch != self.away_epoch or now >= self.retry_at

    def load(self, cached: int, counts: pb.BlockCounts) -> PoolLoad:
        """Return the load of the pool for a prompt of which this many tokens are cached."""
        return self.use.load(cached, counts, self.pool.geometry.block_size_tokens)


class Members(Mapping[str, Member]):
    """The pools of one model, by name, each with its engine."""

    def __init__(
        self,
        cache: CacheClient,
        *,
        connect_cache: Callable[[], CacheClient],
        connect_worker: Callable[[str], WorkerApi],
        model_name: str | None,
        config: RouterConfig,
        engine_config: EngineConfig,
        weights: Mapping[str, float],
        tokenizer: Tokenizer | str | None,
        tracing: Tracing | None,
    ) -> None:
        """cache tells of the pools; each engine has a client of its own. The others are as in Router."""
        self._cache = cache
        self._connect_cache = connect_cache
        self._connect_worker = connect_worker
        self._model_name = model_name
        self._config = config
        self._engine_config = engine_config
        self._weights = weights
        self._tokenizer = tokenizer
        self._tracing = tracing
        self._fingerprint: str | None = None
        self._by_name: dict[str, Member] = {}
        self._listed: dict[str, pb.Pool] = {}
        self._coming: dict[str, pb.Pool] = {}
        self._counts: dict[str, pb.BlockCounts] = {}
        self._joining: set[str] = set()
        self._learning_adapters: set[str] = set()
        self._join_error: BaseException | None = None
        self._watch_error: QuireError | None = None
        self._count_error: QuireError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()
        self._past = BackendStatistics(0, 0, 0, 0, 0)

    def __getitem__(self, name: str) -> Member:
        """Return a pool by its name. Raises KeyError."""
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the pools."""
        return iter(self._by_name)

    def __len__(self) -> int:
        """Return the number of pools."""
        return len(self._by_name)

    @property
    def first(self) -> Member:
        """The pool that joined first, of those that are left."""
        return next(iter(self._by_name.values()))

    @property
    def is_listed(self) -> bool:
        """False while cachemgr can't be reached, or does not answer."""
        return self._watch_error is None and self._count_error is None

    def counts(self, name: str) -> pb.BlockCounts:
        """Return a pool's blocks by state, as cachemgr was asked last; zeros before."""
        return self._counts.get(name, _NO_COUNTS)

    def statistics(self) -> BackendStatistics:
        """Return the sums of all engines; counters include those of pools that have gone."""
        return _sum([self._past, *(statistics_of(member.engine) for member in self._by_name.values())])

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Give the tenants other weights in all engines. Raises InvalidRequest, nothing changed."""
        PriorityPolicy(weights)
        self._weights = weights
        for member in self._by_name.values():
            member.policy.set_weights(weights)

    def replace_stopped(self, member: Member) -> None:
        """Start another engine for a member, because the loop of its engine has died."""
        member.has_stopped = True
        self._update()

    async def start(self) -> None:
        """Take a lease on each pool. Returns when one can be used.

        Raises InvalidRequest if several models are attached and none was named; after start_timeout_s what kept the
        last pool from being used, or NotFound without a pool; OSError or ValueError for the tokenizer asked for.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.start_timeout_s
        self._spawn(self._follow_for_ever(), "quire-router-pools")
        self._spawn(self._count_for_ever(), "quire-router-blocks")
        none = NotFound("no worker has attached a pool of the model", reason="POOL_NOT_FOUND")
        while not self._by_name:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            error = self._join_error or self._watch_error or none
            is_over = loop.time() >= deadline or not isinstance(error, QuireError) or not self._may_go_on_watching
            if not self._by_name and is_over:
                raise error

    @property
    def _may_go_on_watching(self) -> bool:
        """False if the watch of the pools was refused for a reason that time does not cure."""
        return self._watch_error is None or isinstance(self._watch_error, Unavailable | OutOfRoom)

    async def _follow_for_ever(self) -> None:
        """Keep the list of pools as cachemgr tells it. A watch that breaks begins again, with all pools."""
        while True:
            try:
                async with contextlib.aclosing(self._cache.watch_pools()) as answers:
                    async for answer in answers:
                        self._take(answer)
            except QuireError as error:
                if self._watch_error is None:
                    _log.warning("the pools can't be watched: %s", error)
                self._watch_error = error
                self._changed.set()
            except asyncio.CancelledError:
                if is_being_cancelled():
                    raise
            await asyncio.sleep(_WATCH_AGAIN_S)

    def _take(self, answer: pb.WatchPoolsResponse) -> None:
        if answer.cleared:
            self._coming = {}
        self._coming.update((pool.name, pool) for pool in answer.pools)
        if answer.complete:
            self._choose_model(self._coming.values())
            self._listed, self._watch_error = dict(self._coming), None
            self._update()

    async def _count_for_ever(self) -> None:
        """Ask for what changes with each step, which a watch does not tell, and try again what could not be done."""
        while True:
            try:
                self._counts = {pool.name: pool.block_counts for pool in await self._cache.list_pools()}
                self._count_error = None
            except QuireError as error:
                self._count_error = error
            self._update()
            await asyncio.sleep(self._config.refresh_s)

    def _update(self) -> None:
        """Compare the pools with the list: new ones join, those of another model leave."""
        now = asyncio.get_running_loop().time()
        for name, member in list(self._by_name.items()):
            if name not in self._listed:
                self._miss(member, now)
            elif self._listed[name].geometry.model_fingerprint != self._fingerprint:
                self._lose_model(member)
            else:
                member.pool, member.unlisted_at = self._listed[name], None
                self._learn_adapters(member)
        for name, pool in self._listed.items():
            is_ours = pool.attached and pool.geometry.model_fingerprint == self._fingerprint
            is_served = name in self._by_name and not self._by_name[name].has_stopped
            if is_ours and not is_served and name not in self._joining:
                self._joining.add(name)
                self._spawn(self._join(pool), f"quire-join-{name}")

    def _learn_adapters(self, member: Member) -> None:
        """Have an engine ask its worker for its adapters, if these have changed. A worker that hangs delays nothing."""
        if lacks_adapters(member.engine, member.pool) and member.name not in self._learning_adapters:
            self._learning_adapters.add(member.name)
            self._spawn(self._ask_for_adapters(member), f"quire-adapters-{member.name}")

    async def _ask_for_adapters(self, member: Member) -> None:
        try:
            with contextlib.suppress(QuireError):  # a worker that is away is asked again
                await member.engine.refresh_adapters()
        finally:
            self._learning_adapters.discard(member.name)

    def _lose_model(self, member: Member) -> None:
        """Leave a pool that has another model now; the last one is kept, and may get its model back."""
        member.pool.attached = False
        member.engine.fail_all(_other_model(member.name))
        if len(self._by_name) > 1:
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

    def _miss(self, member: Member, now: float) -> None:
        """Take a pool that is gone for detached; forget it in the end, if it is not the last."""
        member.pool.attached = False
        member.unlisted_at = member.unlisted_at or now
        is_over = now >= member.unlisted_at + _FORGET_S and not member.use.num_open
        if is_over and len(self._by_name) > 1:
            self._spawn(self._leave(member), f"quire-leave-{member.name}")

    async def _join(self, pool: pb.Pool) -> None:
        """Start an engine on a pool; if that fails it is tried again after refresh_s."""
        policy = PriorityPolicy(self._weights)
        tokenizer = self.first.engine.tokenizer if self._by_name else self._tokenizer
        engine = Engine(
            SameModel(self._connect_cache(), pool.geometry.model_fingerprint),
            self._connect_worker,
            config=replace(self._engine_config, pool=pool.name, metrics_listen=None),
            tokenizer=tokenizer or self._tokenizer,
            policy=policy,
            tracing=self._tracing,
        )
        try:
            await engine.start()
            member = Member(engine, policy, engine.model, pool)
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
        before = self._by_name.get(pool.name)
        self._by_name[pool.name] = member
        member.watcher = asyncio.create_task(self._watch(member), name=f"quire-watch-{pool.name}")
        member.watcher.add_done_callback(self._note_end)
        _log.info("pool %s joined", pool.name)
        self._update()  # the pool may have changed meanwhile
        if before is not None:
            await self._retire(before)

    async def _leave(self, member: Member) -> None:
        """Close a pool's engine; its requests continue in other pools."""
        if self._by_name.get(member.name) is not member:
            return
        del self._by_name[member.name]
        await self._retire(member)
        _log.info("pool %s left", member.name)

    async def _retire(self, member: Member) -> None:
        """Close an engine, and keep its counters."""
        self._past = _sum([self._past, replace(statistics_of(member.engine), num_running=0, num_waiting=0)])
        if member.watcher is not None:
            member.watcher.cancel()
            await asyncio.wait([member.watcher])
        await member.engine.close()

    async def _watch(self, member: Member) -> None:
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
            if member.away_epoch is None:
                member.away_epoch = member.pool.epoch
            member.retry_at = loop.time() + _RETRY_S
            if moves_at is None:
                moves_at = loop.time() + config.failover_after_s

    def _evacuate(self, member: Member) -> bool:
        """Move a pool's requests to other pools; False if no other pool can be used."""
        now = asyncio.get_running_loop().time()
        if not any(other.is_usable(now) for other in self._by_name.values() if other is not member):
            return False
        outage = member.engine.outage
        why = "it was unavailable" if outage is None else str(outage.error)
        member.engine.fail_all(WorkerUnavailable(f"the worker of pool {member.name!r} stays unavailable: {why}"))
        return True

    async def close(self) -> None:
        """Close all engines. Doing it twice is fine."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._leave(member) for member in list(self._by_name.values())))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or error
            self._has_failed.set()

    async def failed(self) -> BaseException:
        """Wait until a task that keeps the list of pools, or watches one, has died; return its error."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure


class SameModel:
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
