"""Calls of other tasks: the engine's task alone uses the scheduler, and takes them from the inbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from unit.engine.test_engine import PROMPT_END, RECITED, Services, greedy, read, turns, until, with_engine
from unit.engine.test_scheduler import limits

from quire.client import CacheParams, Engine, EngineConfig, FinishReason, InvalidRequest, OutOfRoom, RequestFailed
from quire.client.engine.inbox import Inbox
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.policy import PoolView, PriorityPolicy
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import Sequence

# Reads of numbers, from any task.
READS = {"limits", "costs", "statistics", "check_invariants"}


class OwnedScheduler(Scheduler):
    """A scheduler that notes each use of it outside of the engine's task."""

    strangers: list[str] = []  # noqa: RUF012 - of all schedulers of a test

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in {"strangers", *READS}:
            task = asyncio.current_task()
            if task is None or task.get_name() != "quire-engine":
                self.strangers.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The uses of the engine's scheduler by other tasks and by timers."""
    monkeypatch.setattr("quire.client.engine.engine.Scheduler", OwnedScheduler)
    monkeypatch.setattr(OwnedScheduler, "strangers", [])
    return OwnedScheduler.strangers


async def finishes(engine: Engine, services: Services) -> None:
    await engine.complete(["a\n", "b\n"], greedy(20, n=3))
    await engine.complete("a\n", greedy(9, n=1, best_of=2))


async def meets_a_stop_string(engine: Engine, services: Services) -> None:
    await engine.complete("a\n", greedy(100, stop=("STOP",)))


async def searches(engine: Engine, services: Services) -> None:
    await engine.beam_search("a\n", beam_width=1, max_tokens=5)


async def closes_its_iterator(engine: Engine, services: Services) -> None:
    async with contextlib.aclosing(engine.generate("a\n", greedy(300, n=3))) as chunks:
        await anext(chunks)


async def is_cancelled(engine: Engine, services: Services) -> None:
    for num_turns in (0, 1, 2, 30):
        task = asyncio.create_task(engine.complete("a\n", greedy(300)))
        await turns(num_turns)
        task.cancel()
        await asyncio.wait([task])


async def is_late(engine: Engine, services: Services) -> None:
    services.gate.clear()
    await engine.complete("a\n", greedy(300, timeout_s=0.01))
    services.gate.set()


async def fails_with_all(engine: Engine, services: Services) -> None:
    task = asyncio.create_task(engine.complete("a\n", greedy(300)))
    await turns(30)
    engine.fail_all(RequestFailed("all"))
    await asyncio.wait([task])


async def is_refused(engine: Engine, services: Services) -> None:
    with pytest.raises(InvalidRequest):
        engine.check("a\n", greedy(1000))
    with pytest.raises(InvalidRequest):
        engine.generate("a\n", greedy(1000))
    with pytest.raises(InvalidRequest):
        await engine.beam_search("a\n", beam_width=1, max_tokens=1000)


@pytest.mark.parametrize(
    "request_of_caller",
    [finishes, meets_a_stop_string, searches, closes_its_iterator, is_cancelled, is_late, fails_with_all, is_refused],
)
def test_no_task_but_the_engines_uses_the_scheduler(
    request_of_caller: Callable[[Engine, Services], Awaitable[None]], strangers: list[str]
) -> None:
    async def body(engine: Engine, services: Services) -> None:
        await request_of_caller(engine, services)
        await until(lambda: not services.sequences)

    with_engine(body)
    assert strangers == []


def test_the_guard_notices_a_call_of_another_task(strangers: list[str]) -> None:
    async def body(engine: Engine, services: Services) -> None:
        engine._scheduler.end([], FinishReason.CANCELLED)

    with_engine(body)
    assert strangers == ["end"]


def test_a_request_that_ends_before_it_is_taken_is_in_no_plan() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_gate.clear()
        first = asyncio.ensure_future(read(engine.generate("b\n", greedy(5))))
        await until(lambda: len(services.asked) == 1)  # the engine's task waits for cachemgr
        second = asyncio.ensure_future(read(engine.generate("a\n", greedy(5))))
        await turns(2)
        assert engine.statistics().num_requests == 2
        second.cancel()
        await asyncio.wait([second])
        assert engine.statistics().num_requests == 1
        services.plan_gate.set()
        await first
        await turns()
        assert [len(plan.admissions) for plan in services.plans if plan.admissions] == [1]
        assert engine.statistics().scheduler.admissions == 1

    with_engine(body)


def test_requests_that_are_not_taken_yet_count_for_the_limits_and_in_the_statistics() -> None:
    async def body(engine: Engine, services: Services) -> None:
        tasks = [asyncio.ensure_future(read(engine.generate("a\n", greedy(5, n=3)))) for _ in range(2)]
        refused = asyncio.ensure_future(read(engine.generate("a\n", greedy(5))))
        while not (waiting := engine.statistics().scheduler).num_waiting:
            await asyncio.sleep(0)
        assert (waiting.num_waiting, waiting.num_following, waiting.num_running) == (2, 4, 0)
        assert services.asked == [], "the engine's task has not taken them"
        with pytest.raises(OutOfRoom) as caught:
            await refused
        assert caught.value.reason == "QUEUE_FULL"
        await asyncio.gather(*tasks)

    with_engine(body, max_waiting_requests=2)


def test_an_idle_engine_takes_a_request_at_once() -> None:
    async def body(engine: Engine, services: Services) -> None:
        for _ in range(3):
            await turns()
            assert not engine._inbox._has_news.is_set()
            assert len((await engine.complete("a\n", greedy(3)))[0].token_ids) == 3

    with_engine(body)


def test_check_begins_nothing_and_raises_what_generate_raises() -> None:
    async def body(engine: Engine, services: Services) -> None:
        engine.check("a\n", greedy(5), cache=CacheParams(salt=b"s"))
        engine.check([1, 2, 3], max_tokens=5)
        for prompt, fields in (([], {}), ([999], {}), ("a\n", {"max_tokens": 1000}), ("a\n", {"logprobs": 5})):
            with pytest.raises(InvalidRequest) as checked:
                engine.check(prompt, **fields)
            with pytest.raises(InvalidRequest) as generated:
                engine.generate(prompt, **fields)
            assert (checked.value.reason, checked.value.metadata) == (generated.value.reason, generated.value.metadata)
        await turns()
        assert services.asked == []
        assert engine.statistics().num_requests == 0

    with_engine(body)


class TestInbox:
    """Without an engine."""

    def new(self, request_id: int, num_samples: int = 1) -> list[Sequence]:
        params = greedy(5, n=num_samples)
        return new_samples(limits(), request_id, [1, 2], params, end_token_ids=(), seed=0)

    def test_requests_are_taken_in_their_order_and_once(self) -> None:
        inbox, scheduler = Inbox(), Scheduler(limits(), verify=True)
        first, second = self.new(0), self.new(1, num_samples=2)
        inbox.submit(0, first)
        inbox.submit(1, second)
        for _ in range(2):
            inbox.take_into(scheduler)
            assert scheduler._queues.living() == [*first, *second]

    def test_ends_are_applied_to_the_beams_that_there_are_then(self) -> None:
        inbox, scheduler = Inbox(), Scheduler(limits(), verify=True)
        first, second = self.new(0), self.new(1)
        inbox.submit(0, first)
        inbox.submit(1, second)
        inbox.take_into(scheduler)
        members = list(first)
        inbox.end(0, members, FinishReason.CANCELLED)
        members[:] = second
        inbox.take_into(scheduler)
        assert scheduler._queues.living() == first

    def test_a_request_may_end_twice_before_it_is_taken(self) -> None:
        inbox, scheduler = Inbox(), Scheduler(limits(), verify=True)
        sequences = self.new(0, num_samples=2)
        inbox.submit(0, sequences)
        inbox.end(0, sequences, FinishReason.TIMEOUT)
        inbox.end(0, sequences, FinishReason.CANCELLED)
        inbox.take_into(scheduler)
        assert not scheduler.has_work
        assert {sequence.finish_reason for sequence in sequences} == {FinishReason.TIMEOUT}


def test_a_policy_that_can_not_rank_a_request_fails_that_request() -> None:
    """The policy is asked for a rank by the engine's task, not by the caller's."""

    class Picky(PriorityPolicy):
        def rank(self, sequence: Sequence, view: PoolView) -> tuple[int, ...]:
            if sequence.params.seed == 1:
                raise ZeroDivisionError("a mistake of the policy")
            wrong: Any = ("text",)
            right = super().rank(sequence, view)
            return wrong if sequence.params.seed == 2 else right

    async def main() -> None:
        services = Services()
        engine = Engine(services, lambda _: services, config=EngineConfig(verify=True), policy=Picky())
        async with engine:
            other = asyncio.create_task(engine.complete([[1, PROMPT_END]], greedy(30)))
            await turns()
            with pytest.raises(RequestFailed, match="a mistake of the policy"):
                await engine.complete([[1, PROMPT_END]], greedy(3, seed=1))
            waiting = asyncio.create_task(engine.complete([[1, PROMPT_END]], greedy(200, n=9)))
            await turns()
            with pytest.raises(RequestFailed, match="as an integer"):
                await engine.complete([[1, PROMPT_END]], greedy(3, seed=2, n=2))
            for (completion,) in (await other, await waiting):
                assert all(s.token_ids == tuple(RECITED[: len(s.token_ids)]) for s in completion.samples)

    asyncio.run(main())
