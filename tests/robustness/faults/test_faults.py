"""Schedules of fixed seeds with every kind of fault, and tests that the harness notices violations."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from robustness.faults.admissions import Admissions
from robustness.faults.disk import SmallDisk, can_mount
from robustness.faults.harness import Checker, Delivery, Harness, knows_state_dir
from robustness.faults.proxy import DOWN, UP, Link
from robustness.faults.schedule import (
    ATTACH_LINK,
    BOTH,
    FOLLOWER,
    HOLDER,
    LINKS,
    PROCESSES,
    STEPS_LINK,
    WEIGHTS,
    Fault,
    FaultKind,
    Schedule,
    Task,
    make_schedule,
)
from robustness.faults.workload import Request

from quire.cache.v1 import cache_service_pb2
from quire.client.channel import decode_rpc_error
from quire.client.engine.sampling import SamplingParams
from quire.client.errors import Unavailable

SEEDS = (1, 6, 10, 12)
RANK_SEEDS = (11, 13)
HOLDER_SEEDS = (2, 5)
WINDOW_SEEDS = (501,)
"""A few, with most kinds of faults together: a night runs 500."""
TIMEOUT_S = 600.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="quire-faults-", dir="/tmp") as name:
        yield Path(name)


# -- schedules ----------------------------------------------------------------------------------------------------


def test_every_schedule_ends_with_every_token_right_and_every_block_back(folder: Path) -> None:
    async def run() -> None:
        async with Harness(folder, state_dir=knows_state_dir()) as harness:
            for seed in SEEDS:
                outcome = await harness.run(make_schedule(seed))
                assert not outcome.failures, f"seed {seed}: {outcome.failures}"

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_blocks_behind_a_window_and_of_adapters_come_back_and_tokens_are_the_same_in_bfloat16(folder: Path) -> None:
    asked = {"has_window": True, "deterministic": True, "has_adapters": True}

    async def run() -> None:
        async with Harness(folder, state_dir=knows_state_dir(), **asked) as harness:
            for seed in WINDOW_SEEDS:
                outcome = await harness.run(make_schedule(seed))
                assert not outcome.failures, f"seed {seed}: {outcome.failures}"

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_worker_of_two_ranks_leaves_nothing_and_loses_nothing_whichever_rank_is_the_victim(folder: Path) -> None:
    kinds = (FaultKind.KILL, FaultKind.PAUSE)
    schedules = [make_schedule(seed, kinds=kinds, num_ranks=2) for seed in RANK_SEEDS]
    victims = {(fault.kind, fault.target) for schedule in schedules for fault in schedule.faults}
    assert {(kind, target) for kind in kinds for target in ("worker", FOLLOWER)} <= victims

    async def run() -> None:
        async with Harness(folder, state_dir=knows_state_dir(), num_ranks=2) as harness:
            for schedule in schedules:
                outcome = await harness.run(schedule)
                assert not outcome.failures, f"seed {schedule.seed}: {outcome.failures}"

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_published_blocks_outlive_the_worker_and_both_but_not_the_holder(folder: Path) -> None:
    schedules = [make_schedule(seed, kinds=[FaultKind.KILL], has_holder=True) for seed in HOLDER_SEEDS]
    assert {"worker", HOLDER, BOTH} <= {fault.target for schedule in schedules for fault in schedule.faults}

    async def run() -> int:
        num_carried = 0
        async with Harness(folder, state_dir=knows_state_dir(), has_holder=True) as harness:
            for schedule in schedules:
                outcome = await harness.run(schedule)
                assert not outcome.failures, f"seed {schedule.seed}: {outcome.failures}"
                num_carried += outcome.num_carried
        return num_carried

    assert asyncio.run(asyncio.wait_for(run(), TIMEOUT_S)) > 0


def test_a_seed_is_a_schedule() -> None:
    assert make_schedule(7) == make_schedule(7)
    assert make_schedule(7) != make_schedule(8)


def test_schedules_have_every_kind_of_fault_at_every_place() -> None:
    faults = [fault for seed in range(2000) for fault in make_schedule(seed).faults]
    assert {fault.kind for fault in faults} == {*WEIGHTS, FaultKind.BAD_DISK}
    assert {fault.target for fault in faults} == {*LINKS, *PROCESSES}
    only = [fault for seed in range(20) for fault in make_schedule(seed, kinds=[FaultKind.KILL]).faults]
    assert {fault.kind for fault in only} == {FaultKind.KILL}


# -- what the harness must notice -----------------------------------------------------------------------------------

REFERENCE = {3: Delivery(tokens={0: [1, 2, 3], 1: [4, 5]}, finishes={0: "length", 1: "stop"})}
TASK = Task((3,))
RIGHT = [
    {"request": 3, "sample": 0, "tokens": [1, 2], "finish": None},
    {"request": 3, "sample": 1, "tokens": [4, 5], "finish": "stop"},
    {"request": 3, "sample": 0, "tokens": [3], "finish": "length"},
]


def check(events: list[dict[str, object]], task: Task = TASK) -> list[str]:
    checker = Checker(REFERENCE)
    for event in events:
        checker.take(event)
    checker.finish(task)
    return checker.failures


def test_the_checker_is_silent_when_all_is_right() -> None:
    assert check(RIGHT) == []
    assert check(RIGHT[:1], Task((3,), cancels={3: 2})) == []


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (RIGHT[:2], "sample 0: 2 of 3 tokens, finish None for length"),
        ([*RIGHT[:2], RIGHT[0], RIGHT[2]], "sample 0: token 2 is not the one without faults"),
        ([RIGHT[1], RIGHT[2]], "sample 0: token 0 is not the one without faults"),
        ([*RIGHT, {**RIGHT[2], "tokens": []}], "sample 0: goes on after its end"),
        ([*RIGHT[1:2], {**RIGHT[0], "tokens": [1, 2, 3, 4]}], "sample 0: token 3 is not the one without faults"),
        ([*RIGHT[:2], {**RIGHT[2], "finish": "stop"}], "sample 0: 3 of 3 tokens, finish stop for length"),
        ([{"request": 3, "error": "Unavailable"}], "sample 0: failed: Unavailable"),
        ([], "sample 1: 0 of 2 tokens, finish None for stop"),
    ],
    ids=["missing", "twice", "gap", "after the end", "too many", "other end", "error", "nothing"],
)
def test_the_checker_notices(events: list[dict[str, object]], failure: str) -> None:
    assert f"request 3 {failure}" in check(events)


def test_the_harness_notices_what_is_left_and_what_is_logged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of a client outside of the harness, and a log line that no fault excuses."""
    monkeypatch.setattr("robustness.faults.harness.END_TIMEOUT_S", 3.0)

    async def run() -> list[str]:
        async with Harness(folder) as harness:
            task = Task((0, 1))
            assert not (await harness.run(Schedule(0, (), {"a": task}))).failures
            async with grpc.aio.insecure_channel(f"unix:{folder}/cachemgr.sock") as channel:
                create = channel.unary_unary("/quire.cache.v1.CacheService/CreateLease")
                await create(b"")
            with (folder / "worker0.log").open("a") as log:
                log.write("CRITICAL quire.worker.service.steps I5 violated: block 1\n")
            return (await harness.run(Schedule(0, (), {"a": task}))).failures

    failures = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert any(failure.startswith("not at rest") for failure in failures)
    assert any("I5 violated" in failure for failure in failures)


PLAN = cache_service_pb2.PlanStepRequest(
    lease_id="lease",
    epoch=3,
    request_id="1",
    admissions=[
        cache_service_pb2.Admission(sequence_id=1, tenant="bob", token_ids=[1, 2, 3, 4, 5]),
        cache_service_pb2.Admission(sequence_id=2, tenant="bob", token_ids=[1, 2], resumed=True),
    ],
)
GRANTED = cache_service_pb2.PlanStepResponse(
    admitted_sequence_ids=[1, 2], admitted_cached_token_counts=[0, 0], admitted_written_token_counts=[4, 0]
)
OUTCOME = {"request": 0, "outcome": {"epoch": 3, "cached": 0, "written": 4}}


def compared(
    *,
    answers: int = 1,
    told: int = 1,
    counts: tuple[int, int, int] = (5, 0, 4),
    outcome: dict[str, Any] = OUTCOME,
    kept: int = 0,
    is_killed: bool = False,
) -> list[str]:
    """One plan on a stream, with so many answers, what its client is told of it, and what the books count."""
    request = Request((1, 2, 3, 4, 5), SamplingParams(tenant="bob"))
    admissions, method = Admissions([request]), "/quire.cache.v1.CacheService/PlanSteps"
    for _ in range(max(1, answers)):
        body = cache_service_pb2.PlanStepsRequest(plan=PLAN).SerializeToString()
        admissions.observe("a", "call", method, UP, body)
    for _ in range(answers):
        body = cache_service_pb2.PlanStepsResponse(plan=GRANTED).SerializeToString()
        admissions.observe("a", "call", method, DOWN, body)
    for _ in range(told):
        admissions.take(outcome)
    admissions.killed("a") if is_killed else admissions.ended("a")
    admitted, cached, written = counts
    tenant = cache_service_pb2.Tenant(
        name="bob",
        admitted_token_count=admitted,
        cached_token_count=cached,
        written_token_count=written,
        kept_block_count=kept,
        keep_limit_block_count=4,
    )
    return admissions.compare(3, [tenant])


def test_usage_is_right_also_of_a_plan_asked_twice_one_without_an_answer_and_a_client_that_was_killed() -> None:
    assert compared(kept=4) == []
    assert compared(answers=2) == []
    assert compared(told=0, is_killed=True) == []
    for counts in ((0, 0, 0), (5, 0, 4), (5, 4, 0)):
        assert compared(answers=0, told=0, counts=counts) == []


@pytest.mark.parametrize(
    ("arguments", "failure"),
    [
        ({"counts": (10, 0, 8)}, "the books count"),
        ({"counts": (5, 0, 0)}, "the books count"),
        ({"answers": 0, "told": 0, "counts": (6, 0, 0)}, "the books count"),
        ({"told": 2}, "no admission is such a one"),
        ({"told": 0}, "clients were not told"),
        ({"outcome": {**OUTCOME, "outcome": {"epoch": 3, "cached": 4, "written": 0}}}, "no admission is such a one"),
        ({"kept": 5}, "beyond its limit"),
    ],
    ids=["twice", "not written", "more than asked", "told twice", "not told", "told otherwise", "kept too much"],
)
def test_wrong_usage_is_noticed(arguments: dict[str, Any], failure: str) -> None:
    assert failure in compared(**arguments)[0]


# -- the proxy ------------------------------------------------------------------------------------------------------

ECHO, COUNT = "/test.Echo/PlanSteps", "/test.Echo/Count"
"""A stream by a name that the proxy knows for one, and a call."""


class Echo(grpc.GenericRpcHandler):
    """Answers each message with itself; Count with the number of calls so far."""

    def __init__(self) -> None:
        self.num_calls = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return (
            grpc.stream_stream_rpc_method_handler(self._echo)
            if (handler_call_details.method == ECHO)
            else grpc.unary_unary_rpc_method_handler(self._count)
        )

    @staticmethod
    async def _echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for request in requests:
            if request == b"refuse":
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing", (("why", "because"),))
            await context.write(request)
        await context.write(b"end")

    async def _count(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.num_calls += 1
        return request + str(self.num_calls).encode()


@contextlib.asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[tuple[Link, grpc.aio.Channel]]:
    """A link to an Echo, and a channel to the link."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(f"unix:{folder}/echo.sock")
    await server.start()
    listen, target = f"unix:{folder}/link.sock", f"unix:{folder}/echo.sock"
    link = Link("link", listen=listen, target=target, on_message=lambda: None)
    async with link, grpc.aio.insecure_channel(listen) as channel:
        yield link, channel
    await server.stop(None)


async def echoed(channel: grpc.aio.Channel, *messages: bytes) -> list[bytes]:
    """All answers to these messages."""
    call = channel.stream_stream(ECHO)(timeout=DEADLINE_S)
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return [answer async for answer in call]


def test_a_healthy_link_passes_everything_on(folder: Path) -> None:
    async def run() -> None:
        async with linked(folder) as (link, channel):
            assert await echoed(channel, b"1", b"2") == [b"1", b"2", b"end"]
            assert await channel.unary_unary(COUNT)(b"n") == b"n1"
            assert link.num_messages == Counter({UP: 3, DOWN: 4})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echoed(channel, b"refuse")
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")
            assert ("why", "because") in [(key, value) for key, value in caught.value.trailing_metadata()]

    asyncio.run(run())


def test_messages_are_lost_doubled_and_late_in_order(folder: Path) -> None:
    async def run() -> None:
        async with linked(folder) as (link, channel):
            link.directions[UP].num_lost = 1
            assert await echoed(channel, b"1", b"2") == [b"2", b"end"]
            link.directions[DOWN].num_lost = 1
            assert await echoed(channel, b"1", b"2") == [b"2", b"end"]
            link.directions[UP].num_doubled = 1
            assert await echoed(channel, b"1", b"2") == [b"1", b"1", b"2", b"end"]
            link.directions[DOWN].num_late, link.directions[DOWN].late_s = 1, 0.01
            assert await echoed(channel, b"1", b"2") == [b"1", b"2", b"end"]

    asyncio.run(run())


def test_a_call_is_doubled_as_a_whole_or_its_answer_is_lost(folder: Path) -> None:
    async def run() -> None:
        async with linked(folder) as (link, channel):
            link.directions[UP].num_doubled = 1
            assert await channel.unary_unary(COUNT)(b"") == b"2"
            for way in (DOWN, UP):
                link.directions[way].num_lost = 1
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(COUNT)(b"")
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await channel.unary_unary(COUNT)(b"") == b"4"  # of the two, one had come there

    asyncio.run(run())


def test_a_cut_ends_what_is_open_and_refuses_what_comes(folder: Path) -> None:
    async def run() -> None:
        async with linked(folder) as (link, channel):
            call = channel.stream_stream(ECHO)(timeout=DEADLINE_S)
            await call.write(b"1")
            assert await call.read() == b"1"
            link.cut()
            for broken in (call.read(), echoed(channel, b"1")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await broken
                # UNAVAILABLE, or INTERNAL if the stream ended while its caller wrote: an absence, says the client.
                assert isinstance(decode_rpc_error(caught.value), Unavailable), caught.value
            link.heal()
            assert await echoed(channel, b"1") == [b"1", b"end"]

    asyncio.run(run())


def test_a_half_closed_stream_still_answers(folder: Path) -> None:
    async def run() -> None:
        async with linked(folder) as (link, channel):
            call = channel.stream_stream(ECHO)(timeout=DEADLINE_S)
            await call.write(b"1")
            assert await call.read() == b"1"
            await link.half_close()
            assert await call.read() == b"end"

    asyncio.run(run())


def test_a_frozen_link_and_a_held_one_go_on_later(folder: Path) -> None:
    async def run() -> None:
        async with linked(folder) as (link, channel):
            link.directions[DOWN].flows.clear()
            waiting = asyncio.create_task(echoed(channel, b"1"))
            while not link.num_messages[DOWN]:
                await asyncio.sleep(0)
            assert not waiting.done()
            link.directions[DOWN].flows.set()
            assert await waiting == [b"1", b"end"]
            link.hold()
            waiting = asyncio.create_task(echoed(channel, b"1"))
            await asyncio.wait([waiting], timeout=0.1)
            assert not waiting.done()
            link.release()
            assert await waiting == [b"1", b"end"]

    asyncio.run(run())


# -- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not can_mount(), reason="a file system can't be mounted here")
def test_a_small_disk_is_full_and_has_room_again(folder: Path) -> None:
    disk = folder / "disk"
    with SmallDisk(disk) as small:
        with small.filled(), pytest.raises(OSError, match="No space") as caught:
            (disk / "state").write_bytes(bytes(4096))
        assert caught.value.errno == errno.ENOSPC
        (disk / "state").write_bytes(bytes(4096))
    assert not list(disk.iterdir())


def test_faults_say_what_they_are() -> None:
    assert str(Fault(FaultKind.LOSE, ATTACH_LINK, 7, 0.05, UP, 2)) == "at   7: lose attach up, 2 messages, 0.050 s"
    assert str(Fault(FaultKind.HALF_CLOSE, STEPS_LINK, 120)) == "at 120: half-close steps"
