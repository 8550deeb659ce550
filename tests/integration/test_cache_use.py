"""A request's use of the pool and its prefix cache, by the engine, over real services."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.client import (
    LLM,
    CacheClient,
    CacheParams,
    CacheUse,
    Completion,
    Engine,
    EngineConfig,
    InvalidRequest,
    Retention,
)

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
NUM_BLOCKS = 64
Answer = TypeVar("Answer")


@pytest.fixture
def cachemgr() -> Iterator[str]:
    with LocalServices.start(model=MODEL, num_blocks=NUM_BLOCKS) as services:
        yield services.cachemgr_address


def ask(cachemgr: str, question: Callable[[CacheClient], Awaitable[Answer]]) -> Answer:
    async def run() -> Answer:
        cache = CacheClient(cachemgr)
        try:
            return await question(cache)
        finally:
            await cache.close()

    return asyncio.run(run())


def prompt_of(number: int) -> list[int]:
    return [number, *range(100, 140)]  # two full blocks of 16, and a part of one


def cached_tokens(cachemgr: str, prompt: list[int], salt: bytes = b"") -> int:
    return ask(cachemgr, lambda cache: cache.lookup_prefix(prompt, salt=salt)).matches[0].cached_token_count


def statistics(cachemgr: str) -> pb.PoolStatistics:
    (pool,) = ask(cachemgr, lambda cache: cache.get_statistics())
    return pool


def generate(llm: LLM, number: int, cache: CacheParams, *, max_tokens: int = 40, n: int = 1) -> Completion:
    (done,) = llm.generate(
        [prompt_of(number)], max_tokens=max_tokens, temperature=0.0, n=n, ignore_eos=True, cache=cache
    )
    return done


def test_a_completion_says_how_many_of_its_tokens_were_cached(cachemgr: str) -> None:
    with LLM(cachemgr) as llm:
        first, second = (generate(llm, 1, CacheParams(), n=n) for n in (1, 3))
        other = generate(llm, 1, CacheParams(cache_use=CacheUse.NONE))
    assert (first.num_cached_tokens, second.num_cached_tokens, other.num_cached_tokens) == (0, 32, 0)


def test_what_a_request_takes_and_publishes(cachemgr: str) -> None:
    """A sequence with generated tokens and a fork of it: unpublished blocks are not found, also not later."""
    with LLM(cachemgr) as llm:
        generate(llm, 1, CacheParams(cache_use=CacheUse.NONE), n=2)
        assert cached_tokens(cachemgr, prompt_of(1)) == 0
        counts = statistics(cachemgr)
        assert (counts.published_block_count, counts.block_counts.cached_count) == (0, 0)
        first = generate(llm, 1, CacheParams(cache_use=CacheUse.WRITE_ONLY))
        assert cached_tokens(cachemgr, prompt_of(1)) == 32
        again = generate(llm, 1, CacheParams(cache_use=CacheUse.WRITE_ONLY))
        none = generate(llm, 1, CacheParams(cache_use=CacheUse.NONE))
        assert statistics(cachemgr).cached_token_count == 0
        found = generate(llm, 1, CacheParams())
        assert statistics(cachemgr).cached_token_count == 32
        generate(llm, 1, CacheParams(salt=b"s"))
        assert statistics(cachemgr).cached_token_count == 32
        assert cached_tokens(cachemgr, prompt_of(1), b"s") == 32
        texts = {tuple(done.samples[0].token_ids) for done in (first, again, none, found)}
        assert len(texts) == 1
    assert not ask(cachemgr, lambda cache: cache.audit_pool()).violations


def test_advice_and_hints_reach_the_blocks(cachemgr: str) -> None:
    retention = (Retention(16, 9), Retention(16, 3, ttl_s=600.0))
    with LLM(cachemgr) as llm:
        generate(llm, 1, CacheParams(retention=retention), max_tokens=1)
        generate(llm, 2, CacheParams(expected_back_s=30.0), max_tokens=1)
        generate(llm, 3, CacheParams(expected_back_s=math.inf), max_tokens=1)
    blocks = ask(cachemgr, lambda cache: cache.list_blocks(state=pb.BLOCK_STATE_CACHED))
    assert sorted(block.priority for block in blocks) == [1, 1, 3, 7, 7, 9]


def test_cachemgr_knows_what_the_queue_of_an_engine_would_find(cachemgr: str) -> None:
    """One request runs; the next ones wait, and two blocks of one of them are cached."""

    async def run() -> tuple[list[int], list[int]]:
        config = EngineConfig(max_running_sequences=1)
        cache = CacheClient(cachemgr)

        async def priorities() -> list[int]:
            return sorted(block.priority for block in await cache.list_blocks(state=pb.BLOCK_STATE_CACHED))

        async with Engine.connect(cachemgr, config=config) as engine:
            await engine.complete(prompt_of(1), max_tokens=1)
            await engine.complete(prompt_of(2), max_tokens=1)
            running = asyncio.create_task(engine.complete(prompt_of(3), max_tokens=300, ignore_eos=True))
            waiting = [asyncio.create_task(engine.complete(prompt_of(number), max_tokens=1)) for number in (4, 1)]
            while (awaited := await priorities()) == [5] * 4 and not running.done():
                pass
            for task in (running, *waiting):
                await task
            found = await priorities()
        await cache.close()
        return awaited, found

    awaited, found = asyncio.run(run())
    assert awaited == [5, 5, 10, 10]
    assert set(found) == {5}


def test_a_reservation_is_made_and_one_that_has_no_room_waits() -> None:
    """Each needs more than half of the pool: one runs, the other waits without being preempted."""
    num_blocks = 16
    num_tokens = (num_blocks - 1) * 16 * 2 // 3

    async def run(cachemgr: str) -> tuple[list[int], int, list[int]]:
        async with Engine.connect(cachemgr) as engine:
            tasks = [
                asyncio.create_task(
                    engine.complete(
                        prompt_of(number), max_tokens=num_tokens, ignore_eos=True, cache=CacheParams(reserve=True)
                    )
                )
                for number in (1, 2)
            ]
            cache = CacheClient(cachemgr)
            reserved: list[int] = []
            while not reserved:
                reserved = [sequence.reserved_token_count for sequence in await cache.list_sequences()]
            await cache.close()
            done = [len(completion.samples[0].token_ids) for task in tasks for completion in await task]
            return done, engine.statistics().scheduler.preemptions, reserved

    with LocalServices.start(model=MODEL, num_blocks=num_blocks) as services:
        done, num_preemptions, reserved = asyncio.run(run(services.cachemgr_address))
    assert (done, num_preemptions) == ([num_tokens] * 2, 0)
    assert reserved == [len(prompt_of(1)) + num_tokens - 1]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("salt", lambda: CacheParams(salt=b"s" * 65)),
        ("salt", lambda: CacheParams(salt="text")),  # type: ignore[arg-type]
        ("cache_use", lambda: CacheParams(cache_use="none")),  # type: ignore[arg-type]
        ("retention", lambda: CacheParams(retention=(Retention(1, 5),) * 17)),
        ("retention.num_tokens", lambda: CacheParams(retention=(Retention(0, 5), Retention(1, 5)))),
        ("retention.num_tokens", lambda: Retention(-1, 5)),
        ("retention.priority", lambda: Retention(1, 10)),
        ("retention.ttl_s", lambda: Retention(1, 5, ttl_s=86_401.0)),
        ("retention.ttl_s", lambda: Retention(1, 5, ttl_s=0.0)),
        ("expected_back_s", lambda: CacheParams(expected_back_s=math.nan)),
        ("expected_back_s", lambda: CacheParams(expected_back_s=86_401.0)),
        ("reserve", lambda: CacheParams(reserve=1)),  # type: ignore[arg-type]
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.metadata["field"] == field


def test_a_request_that_cachemgr_refuses_fails_alone(cachemgr: str) -> None:
    """A bound that the client does not know: it lets the salt pass, and cachemgr refuses the whole plan."""

    async def run() -> None:
        bad = CacheParams()
        object.__setattr__(bad, "salt", b"s" * 65)
        async with Engine.connect(cachemgr) as engine:
            tasks = [
                asyncio.create_task(engine.complete(prompt_of(number), max_tokens=8, ignore_eos=True, cache=cache))
                for number, cache in enumerate((CacheParams(), bad, CacheParams(salt=b"s")))
            ]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        good, refused, salted = answers
        assert isinstance(refused, InvalidRequest)
        assert refused.metadata["field"] == "admissions.salt"
        assert not isinstance(good, BaseException)
        assert not isinstance(salted, BaseException)
        assert [len(done[0].samples[0].token_ids) for done in (good, salted)] == [8, 8]

    asyncio.run(run())


def test_an_unknown_use_of_the_cache_is_refused(cachemgr: str) -> None:
    admission = pb.Admission(token_ids=prompt_of(1), cache_use=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        ask(cachemgr, lambda cache: cache.check_admission(admission))
    assert (refused.value.metadata["field"], refused.value.metadata["value"]) == ("admission.cache_use", "4")
