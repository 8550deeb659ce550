"""A router over services that live in the test: which pools are its own, and what goes on where.

A pool's model recites SCRIPT, as in test_engine.py: a token that is lost or doubled by a move shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from deadlines import DEADLINE_S
from replica import without_counts
from unit.engine.test_engine import RECITED, TOKENIZER, Services, geometry, greedy

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.client import (
    Engine,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutOfRoom,
    RequestFailed,
    SamplingParams,
    Unavailable,
    WorkerUnavailable,
)
from quire.client.engine.scheduling.faults import BrokenInvariantError
from quire.compute.v1 import worker_service_pb2
from quire.gateway.routing.members import RouterConfig, SameModel
from quire.gateway.routing.router import Router

PROMPT = TOKENIZER.encode("once\n")


class Pool(Services):
    """One pool's services. fingerprint and max_tokens are of its model."""

    def __init__(self, name: str, *, fingerprint: str = "weights", model: str = "m", max_tokens: int = 400) -> None:
        super().__init__()
        self.name, self.fingerprint, self.model, self.max_tokens = name, fingerprint, model, max_tokens
        self.attached = True
        self.num_cached = 0
        self.adapters: dict[str, bytes] = {}
        self.is_mute = False

    def described(self) -> pb.Pool:
        shape = geometry()
        shape.model, shape.model_fingerprint, shape.max_sequence_tokens = self.model, self.fingerprint, self.max_tokens
        counts = pb.BlockCounts(free_count=1000)
        return pb.Pool(
            name=self.name,
            epoch=self.epoch,
            attached=self.attached,
            geometry=shape,
            worker_address=self.name,
            block_counts=counts,
            adapters=attach_pb2.PoolAdapters(
                adapters=[attach_pb2.PoolAdapter(name=name, identity=each) for name, each in self.adapters.items()]
            ),
        )

    async def get_model(self) -> worker_service_pb2.GetModelResponse:
        if self.is_mute:
            await asyncio.get_running_loop().create_future()
        model = await super().get_model()
        for name, identity in self.adapters.items():
            model.adapters.add(name=name, identity=identity)
        return model

    async def create_lease(self, pool: str, *, ttl_s: float) -> pb.CreateLeaseResponse:
        lease = await super().create_lease(pool, ttl_s=ttl_s)
        lease.geometry.CopyFrom(self.described().geometry)
        lease.worker_address = self.name
        return lease


class Cache:
    """cachemgr's client: one for each engine, and one for the router."""

    def __init__(self, pools: dict[str, Pool]) -> None:
        self.pools = pools
        self.pool: Pool | None = None
        self.lookups = 0
        self.is_mute = False
        self.is_away = False

    async def list_pools(self) -> list[pb.Pool]:
        return [pool.described() for pool in self.pools.values()]

    async def watch_pools(self) -> AsyncIterator[pb.WatchPoolsResponse]:
        told: list[pb.Pool] | None = None
        while True:
            if self.is_away:
                raise Unavailable("away")
            if told != (pools := [without_counts(pool.described()) for pool in self.pools.values()]):
                yield pb.WatchPoolsResponse(cleared=told is None, pools=pools, complete=True)
                told = pools
            await asyncio.sleep(0.005)

    async def lookup_prefix(
        self, token_ids: list[int], *, salt: bytes, adapter: bytes, tenant: str | None
    ) -> pb.LookupPrefixResponse:
        self.lookups += 1
        if self.is_mute:
            await asyncio.get_running_loop().create_future()
        matches = [
            pb.PrefixMatch(
                pool=pool.name, cached_token_count=pool.num_cached, block_counts=pb.BlockCounts(free_count=1000)
            )
            for pool in self.pools.values()
        ]
        return pb.LookupPrefixResponse(matches=matches)

    async def create_lease(self, pool: str, *, ttl_s: float) -> pb.CreateLeaseResponse:
        self.pool = self.pools[pool]
        return await self.pool.create_lease(pool, ttl_s=ttl_s)

    async def get_pool(self, pool: str) -> pb.Pool:
        return self.pools[pool].described()

    async def renew_lease(self, lease_id: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: getattr(self.pool, name)(*arguments)

    async def hang_up(self) -> None:
        pass

    async def close(self) -> None:
        pass


class LocalRouter(Router):
    def __init__(self, *pools: Pool, model: str | None = None, engine: Any = None, **config: Any) -> None:
        self.fleet = {pool.name: pool for pool in pools}
        super().__init__(
            "unix:/nowhere",
            model=model,
            tokenizer=TOKENIZER,
            config=RouterConfig(**{"refresh_s": 0.01, "failover_after_s": 0.05, "start_timeout_s": 30.0} | config),
            engine_config=EngineConfig(verify=True, **(engine or {})),
        )

    def _connect_cache(self, **_: Any) -> Any:
        return Cache(self.fleet)

    def _connect_worker(self, address: str, **_: Any) -> Any:
        return self.fleet[address]

    async def text_of(self, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
        return [token async for chunk in self.generate(prompt, params) for token in chunk.token_ids]


@contextlib.asynccontextmanager
async def routing(*pools: Pool, **options: Any) -> AsyncIterator[LocalRouter]:
    async with asyncio.timeout(DEADLINE_S), LocalRouter(*pools, **options) as router:
        yield router


async def until_pools(router: Router, *names: str) -> None:
    while tuple(router.pools) != names:
        await asyncio.sleep(0.005)


def run(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body, DEADLINE_S))


def test_the_pools_of_one_model_are_used() -> None:
    async def body() -> None:
        pools = (Pool("a"), Pool("b"), Pool("c", fingerprint="others", model="o"))
        with pytest.raises(InvalidRequest, match="there are m, o"):
            await LocalRouter(*pools).start()
        async with routing(*pools, model="m") as router:
            await until_pools(router, "a", "b")
            assert await router.text_of(greedy(30)) == RECITED[:30]
            assert (router.model_names, router.max_model_len, router.max_logprobs) == (("m",), 400, 4)
            assert router.is_ready

    run(body())


def test_without_a_pool_it_waits_and_says_so() -> None:
    async def body() -> None:
        with pytest.raises(NotFound):
            async with routing(start_timeout_s=0.05):
                pass

    run(body())


def test_the_first_pool_is_used_at_once_however_seldom_blocks_are_counted() -> None:
    async def body() -> None:
        router = LocalRouter(refresh_s=86_400.0, start_timeout_s=86_400.0)
        starting = asyncio.create_task(router.start())
        await asyncio.sleep(0)
        router.fleet["a"] = Pool("a")
        await starting
        assert tuple(router.pools) == ("a",)
        await router.close()

    run(body())


def test_pools_that_attach_join_and_those_that_detach_are_spared() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        async with routing(a, refresh_s=86_400.0) as router:
            router.fleet["b"] = b
            await until_pools(router, "a", "b")
            b.num_cached = 4
            await router.text_of(greedy(5))
            b.attached = False
            await until_pools(router, "a")
            await router.text_of(greedy(5))
            assert router.router_statistics().placed == {"a": 1, "b": 1}

    run(body())


def test_a_restarted_cachemgr_without_a_pool_has_it_spared() -> None:
    """The copy begins anew with each watch: a pool that the next cachemgr does not have is gone."""

    async def body() -> None:
        async with routing(Pool("a"), Pool("b"), refresh_s=86_400.0) as router:
            await until_pools(router, "a", "b")
            cache: Cache = router._cache  # type: ignore[assignment]
            cache.is_away = True
            while router.is_ready:
                await asyncio.sleep(0.005)
            assert tuple(router.pools) == ("a", "b"), "they may be there, and their engines find out"
            del router.fleet["a"]
            cache.is_away = False
            await until_pools(router, "b")
            assert router.is_ready
            assert await router.text_of(greedy(5)) == RECITED[:5]
            router.fleet["a"] = Pool("a")
            await until_pools(router, "a", "b")

    run(body())


def test_adapters_are_followed_and_a_worker_that_hangs_delays_no_other_pool() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            a.is_mute = True
            a.adapters = b.adapters = {"x": b"1" * 32}
            while not router._members["b"].engine.adapters:
                await asyncio.sleep(0.005)
            router.fleet["c"] = Pool("c")
            await until_pools(router, "a", "b", "c")
            assert not router._members["a"].engine.adapters

    run(body())


def test_a_pool_with_another_model_is_left_and_its_requests_go_on_elsewhere() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            b.num_cached = 4
            chunks = router.generate(PROMPT, greedy(60))
            tokens = list((await anext(chunks)).token_ids)
            b.gate.clear()
            b.fingerprint = "others"
            b.plan_errors.append(b.new_epoch())
            b.gate.set()
            async for chunk in chunks:
                tokens += chunk.token_ids
            assert tokens == RECITED[:60]
            await until_pools(router, "a")
            while b.open_leases:  # given back when the engine of the pool has closed, which is after it is left
                await asyncio.sleep(0.005)
            assert router.router_statistics().moves == 1

    run(body())


def test_the_last_pool_with_another_model_is_not_used_until_it_has_its_own_again() -> None:
    async def body() -> None:
        a = Pool("a")
        async with routing(a, engine={"recovery_timeout_s": 0}) as router:
            a.fingerprint = "others"
            a.plan_errors.append(LeaseLost("ended"))
            with pytest.raises(WorkerUnavailable, match="another model"):
                await router.text_of(greedy(5))
            await until_pools(router)
            assert (router.model_names, router.is_ready) == (("m",), False)
            a.fingerprint = "weights"
            await until_pools(router, "a")
            assert await router.text_of(greedy(5)) == RECITED[:5]

    run(body())


def test_an_engine_takes_no_lease_on_another_model() -> None:
    async def body() -> None:
        a = Pool("a", fingerprint="others")
        client = SameModel(Cache({"a": a}), "weights")
        with pytest.raises(WorkerUnavailable, match="another model"):
            await client.create_lease("a", ttl_s=5.0)
        with pytest.raises(WorkerUnavailable, match="another model"):
            await client.get_pool("a")
        assert (a.num_leases, a.open_leases) == (1, [])

    run(body())


def test_an_engine_that_died_is_replaced() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            a.num_cached = 4
            chunks = router.generate(PROMPT, greedy(60))
            tokens = list((await anext(chunks)).token_ids)
            a.plan_errors.append(BrokenInvariantError("unexpected"))
            async for chunk in chunks:
                tokens += chunk.token_ids
            assert tokens == RECITED[:60]
            while router._members["a"].has_stopped:
                await asyncio.sleep(0.005)
            await router.text_of(greedy(5))
            assert router.router_statistics().placed == {"a": 2, "b": 1}

    run(body())


def test_a_full_queue_hands_on_to_the_next_pool_and_all_full_ones_refuse() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        async with routing(a, b, engine={"max_waiting_requests": 1}) as router:
            await until_pools(router, "a", "b")
            a.gate.clear()
            b.gate.clear()
            a.num_cached = 4
            begun = [asyncio.create_task(router.text_of(greedy(5))) for _ in range(2)]
            while router.router_statistics().open != {"a": 1, "b": 1}:
                await asyncio.sleep(0.001)
            with pytest.raises(OutOfRoom) as caught:
                await router.text_of(greedy(5))
            assert caught.value.reason == "QUEUE_FULL"
            a.gate.set()
            b.gate.set()
            assert await asyncio.gather(*begun) == [RECITED[:5]] * 2
            assert router.router_statistics().moves == 0

    run(body())


def test_a_request_is_checked_without_a_generator_in_any_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        begun: list[Engine] = []
        generate = Engine.generate

        def counted(engine: Engine, *arguments: Any, **fields: Any) -> Any:
            begun.append(engine)
            return generate(engine, *arguments, **fields)

        monkeypatch.setattr(Engine, "generate", counted)
        async with routing(Pool("a", max_tokens=20), Pool("b", max_tokens=100)) as router:
            await until_pools(router, "a", "b")
            with pytest.raises(InvalidRequest):
                router.generate(PROMPT, greedy(200))
            chunks = router.generate(PROMPT, greedy(60))
            assert begun == [], "it is only checked"
            assert [token async for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
            assert begun

    run(body())


def test_what_is_too_long_for_one_pool_goes_to_another() -> None:
    async def body() -> None:
        async with routing(Pool("a", max_tokens=20), Pool("b", max_tokens=100)) as router:
            await until_pools(router, "a", "b")
            assert await router.text_of(greedy(60)) == RECITED[:60]
            assert router.max_model_len == 100
            with pytest.raises(InvalidRequest) as caught:
                router.generate(PROMPT, greedy(100))
            assert caught.value.reason == "SEQUENCE_TOO_LONG"

    run(body())


def test_a_request_that_fails_by_itself_is_not_moved() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        a.poison = b.poison = TOKENIZER.encode("X")[0]
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            with pytest.raises(RequestFailed, match="failed steps"):
                await router.text_of(greedy(5), TOKENIZER.encode("X\n"))
            assert sum(router.router_statistics().placed.values()) == 1

    run(body())


def test_a_worker_that_stays_away_loses_its_requests_to_another_pool() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        a.num_cached = 4
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            chunks = router.generate(PROMPT, greedy(60, n=2, logprobs=0))
            tokens: dict[int, list[int]] = {0: [], 1: []}
            num_logprobs = 0
            async for chunk in chunks:
                tokens[chunk.index] += chunk.token_ids
                num_logprobs += len(chunk.logprobs or ())
                if len(tokens[1]) == 5 and not a.lease_errors:
                    a.lease_errors.extend([WorkerUnavailable("away")] * 1_000_000)
                    a.plan_errors.append(WorkerUnavailable("away"))
                    a.result_errors.extend([WorkerUnavailable("away")] * 2)
            assert tokens == {0: RECITED[:60], 1: RECITED[:60]}
            assert num_logprobs == 120
            assert router.router_statistics().placed == {"a": 1, "b": 1}

    run(body())


def test_a_whole_answer_has_two_chunks_a_sample_and_one_more_for_each_move() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        a.num_cached = 4
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            whole = [chunk async for chunk in router.generate(PROMPT, greedy(60), is_whole=True)]
            assert [len(chunk.token_ids) for chunk in whole] == [1, 59]
            moved = []
            async for chunk in router.generate(PROMPT, greedy(60), is_whole=True):
                moved.append(chunk)
                if len(moved) == 1:
                    a.lease_errors.extend([WorkerUnavailable("away")] * 1_000_000)
                    a.plan_errors.append(WorkerUnavailable("away"))
                    a.result_errors.extend([WorkerUnavailable("away")] * 2)
            assert [token for chunk in moved for token in chunk.token_ids] == RECITED[:60]
            assert len(moved) <= 4
            assert router.router_statistics().placed == {"a": 2, "b": 1}

    run(body())


def test_without_another_pool_a_request_waits_for_its_own() -> None:
    async def body() -> None:
        a = Pool("a")
        async with routing(a, failover_after_s=0.001) as router:
            a.plan_errors.append(WorkerUnavailable("away"))
            a.lease_errors.extend([WorkerUnavailable("away")] * 3)
            assert await router.text_of(greedy(20)) == RECITED[:20]
            assert router.router_statistics().moves == 0

    run(body())


def test_a_timeout_counts_from_the_first_attempt() -> None:
    async def body() -> None:
        a = Pool("a")
        async with routing(a) as router:
            chunks = []
            async for chunk in router.generate(PROMPT, greedy(60, timeout_s=0.2)):
                a.gate.clear()
                chunks.append(chunk)
            assert chunks[-1].finish_reason is FinishReason.TIMEOUT
            assert sum(len(chunk.token_ids) for chunk in chunks) < 60
            a.gate.set()

    run(body())


def test_without_an_answer_about_prefixes_requests_are_placed() -> None:
    async def body() -> None:
        async with routing(Pool("a"), Pool("b"), lookup_timeout_s=0.01) as router:
            await until_pools(router, "a", "b")
            router._cache.is_mute = True  # type: ignore[attr-defined]
            assert await asyncio.gather(*(router.text_of(greedy(5)) for _ in range(4))) == [RECITED[:5]] * 4
            statistics = router.router_statistics()
            assert sum(statistics.placed.values()) == 4
            assert statistics.unanswered == 4

    run(body())


def test_sums_do_not_shrink_when_a_pool_leaves() -> None:
    async def body() -> None:
        a, b = Pool("a"), Pool("b")
        async with routing(a, b) as router:
            await until_pools(router, "a", "b")
            b.num_cached = 4
            await router.text_of(greedy(5))
            before = router.statistics()
            assert before.prompt_tokens == len(PROMPT)
            b.fingerprint = "others"
            await until_pools(router, "a")
            assert router.statistics() == before

    run(body())


def test_weights_are_those_of_all_engines() -> None:
    async def body() -> None:
        async with routing(Pool("a"), Pool("b")) as router:
            await until_pools(router, "a", "b")
            router.set_weights({"gold": 2.0})
            with pytest.raises(InvalidRequest):
                router.set_weights({"gold": 0.0})
            weights = [member.policy._shares.weight("gold") for member in router._members.values()]
            assert weights == [2.0, 2.0]

    run(body())
