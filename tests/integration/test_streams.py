"""The streams: many steps on one, errors inside, broken in the middle; and the conversation with a worker."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import grpc
import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import (
    CACHE_SERVICE,
    WORKER_SERVICE,
    LeaseHolder,
    Pair,
    RefusedError,
    StandInWorker,
    await_that,
    draw_tokens,
    seconds,
    unsigned,
)

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.compute.v1 import worker_service_pb2

CreateLease = Callable[..., LeaseHolder]
Generate = Callable[[list[int], int], list[int]]
Attach = Callable[[], StandInWorker]
PROMPT = draw_tokens(21, seed=1)
NUM_NEW = 12


class Stream:
    """A bidirectional stream: say something, hear the next answer."""

    def __init__(self, method: Any) -> None:
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.call = method(iter(self._sent.get, None), timeout=DEADLINE_S)

    def say(self, request: Any) -> None:
        self._sent.put(request)

    def hear(self) -> Any:
        try:
            return next(self.call)
        except grpc.RpcError as error:
            raise RefusedError.of_call(error) from None

    def end(self) -> None:
        """No more requests."""
        self._sent.put(None)


@pytest.fixture
def open_stream() -> Iterator[Callable[[Any], Stream]]:
    """Opens streams, which end with the test."""
    opened: list[Stream] = []

    def open_stream(method: Any) -> Stream:
        opened.append(Stream(method))
        return opened[-1]

    yield open_stream
    for stream in opened:
        stream.end()
        stream.call.cancel()


@pytest.fixture
def plans(pair: Pair, open_stream: Any) -> Callable[[cache_service_pb2.PlanStepRequest], Any]:
    """Plans on one stream; returns the plan or raises RefusedError."""
    stream = open_stream(pair.cache.PlanSteps)

    def plan(request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        stream.say(cache_service_pb2.PlanStepsRequest(plan=request))
        answer = stream.hear()
        if answer.HasField("error"):
            raise RefusedError.of_message(answer.error)
        return answer.plan

    return plan


def send(stream: Stream, step: worker_service_pb2.RunStepRequest) -> None:
    stream.say(worker_service_pb2.RunStepsRequest(step=step))


def heard(stream: Stream, lease: LeaseHolder) -> worker_service_pb2.RunStepResponse:
    """The next step's answer. Raises RefusedError if it was refused."""
    answer = stream.hear()
    if answer.HasField("error"):
        raise RefusedError.of_message(answer.error)
    return lease.keep(answer.step)


def refused(stream: Stream, lease: LeaseHolder) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        heard(stream, lease)
    return caught.value


def admission(seq_id: int, tokens: list[int]) -> dict[str, Any]:
    return {"admissions": [cache_service_pb2.Admission(sequence_id=seq_id, token_ids=tokens)]}


EXTEND = {"extends": {"sequence_ids": [1], "token_counts": [1]}}


def test_steps_on_streams_run_ahead(
    pair: Pair, lease: LeaseHolder, plans: Any, open_stream: Any, generate: Generate
) -> None:
    steps = open_stream(pair.worker.RunSteps)
    lease.tokens[1] = list(PROMPT)
    send(steps, lease.step(plans(lease.plan_request(**admission(1, PROMPT)))))
    for _ in range(NUM_NEW - 1):
        send(steps, lease.step(plans(lease.plan_request(**EXTEND))))
        heard(steps, lease)
    steps.end()
    heard(steps, lease)
    with pytest.raises(StopIteration):
        steps.hear()
    assert lease.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)


def test_a_step_that_is_refused_does_not_end_the_stream(
    pair: Pair, lease: LeaseHolder, open_stream: Any, generate: Generate
) -> None:
    steps = open_stream(pair.worker.RunSteps)
    planned = [lease.admit((1, PROMPT)), lease.extend(1), lease.extend(1)]
    forged = lease.step(planned[0])
    forged.grant.signature = bytes(32)
    sent = [
        lease.step(planned[1]),
        forged,
        lease.step(planned[0]),
        lease.step(planned[0]),
        worker_service_pb2.RunStepRequest(),
        lease.step(planned[1]),
        lease.step(planned[2]),
    ]
    with pair.held() as hold:
        for step in sent:
            send(steps, step)
        hold.await_running()
    answers: list[Any] = []
    for _ in sent:
        try:
            answers.append(heard(steps, lease).step_number)
        except RefusedError as error:
            answers.append(error.reason)
    assert answers == ["STEP_OUT_OF_ORDER", "BAD_SIGNATURE", 1, "STEP_OUT_OF_ORDER", "BAD_SIGNATURE", 2, 3]
    assert lease.tokens[1] == PROMPT + generate(PROMPT, 3)


def test_a_plan_that_fails_does_not_end_the_stream(pair: Pair, lease: LeaseHolder, plans: Any) -> None:
    wrong = {
        "LEASE_NOT_FOUND": lease.plan_request(lease_id="none"),
        "EPOCH_CHANGED": lease.plan_request(epoch=lease.epoch + 1),
        "INVALID_ARGUMENT": lease.plan_request(trim_sequence_ids=[1]),
    }
    with pair.untouched():
        for reason, request in wrong.items():
            with pytest.raises(RefusedError) as caught:
                plans(request)
            assert caught.value.reason == reason
    assert plans(lease.plan_request()).step_number == 1


def test_a_repeated_plan_on_a_stream_is_applied_once(pair: Pair, lease: LeaseHolder, plans: Any) -> None:
    request = lease.plan_request(request_id="p", **admission(1, PROMPT))
    first = plans(request)
    assert plans(request) == first
    assert lease.plan(request_id="p", **admission(1, PROMPT)) == first  # by the other way too
    with pytest.raises(RefusedError, match="REQUEST_ID_REUSED"):
        plans(lease.plan_request(request_id="p", **admission(2, PROMPT)))
    assert first.step_number == 1
    assert plans(lease.plan_request()).step_number == 2
    assert pair.counts().active_count == 6


def test_the_last_eight_plans_are_remembered(lease: LeaseHolder, plans: Any) -> None:
    answers = [plans(lease.plan_request(request_id=str(number))) for number in range(9)]
    assert [plans(lease.plan_request(request_id=str(number))) for number in range(1, 9)] == answers[1:]
    assert plans(lease.plan_request(request_id="0")).step_number == 10


def test_a_stream_that_breaks_loses_no_step(
    pair: Pair, lease: LeaseHolder, open_stream: Any, generate: Generate
) -> None:
    steps = open_stream(pair.worker.RunSteps)
    planned = [lease.admit((1, PROMPT)), lease.extend(1), lease.extend(1)]
    with pair.held() as hold:
        for plan in planned[:2]:
            send(steps, lease.step(plan))
        hold.await_running()
        await_that("both are in line", lambda: pair.worker_statistics().step_in_flight_count == 2)
        steps.call.cancel()
        again = open_stream(pair.worker.RunSteps)
        send(again, lease.step(planned[1]))
        assert refused(again, lease).metadata == {"value": "2", "limit": "3"}
        send(again, lease.step(planned[2]))
    lease.tokens[1] += generate(PROMPT, 2)  # what the broken stream would have said
    heard(again, lease)
    lease.await_settled()
    assert lease.tokens[1] == PROMPT + generate(PROMPT, 3)
    assert lease.sequence(1).computed_token_count == len(PROMPT) + 2


def test_a_call_that_is_cancelled_loses_no_step(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    plan = lease.admit((1, PROMPT))
    with pair.held() as hold:
        running = lease.start(plan)
        hold.await_running()
        running.cancel()
    lease.tokens[1] += generate(PROMPT, 1)
    lease.go_on(1, num_steps=3)
    assert lease.tokens[1] == PROMPT + generate(PROMPT, 4)


def test_a_stream_of_many_steps_is_read_as_far_as_it_can_be_answered(
    pair: Pair, lease: LeaseHolder, open_stream: Any
) -> None:
    steps = open_stream(pair.worker.RunSteps)
    planned = [lease.admit((1, PROMPT)), *(lease.plan() for _ in range(63))]
    with pair.held() as hold:
        for plan in planned:
            send(steps, lease.step(plan))
        for _ in range(40):
            send(steps, worker_service_pb2.RunStepRequest())
        hold.await_running()
        assert not pair.cached_tokens(PROMPT)  # cachemgr and the worker's loop are free meanwhile
    assert [heard(steps, lease).step_number for _ in planned] == list(range(1, 65))
    assert {refused(steps, lease).reason for _ in range(40)} == {"BAD_SIGNATURE"}


def test_a_stream_that_breaks_while_many_wait_does_not_stop_others(
    pair: Pair, lease: LeaseHolder, open_stream: Any, generate: Generate
) -> None:
    steps = open_stream(pair.worker.RunSteps)
    before = pair.worker_statistics().refusal_counts["BAD_SIGNATURE"]
    with pair.held() as hold:
        send(steps, lease.step(lease.admit((1, PROMPT))))
        for _ in range(100):
            send(steps, worker_service_pb2.RunStepRequest())
        hold.await_running()
        await_that("no more are read", lambda: pair.worker_statistics().refusal_counts["BAD_SIGNATURE"] >= before + 64)
        steps.call.cancel()
    lease.tokens[1] += generate(PROMPT, 1)
    lease.go_on(1, num_steps=2)
    assert lease.tokens[1] == PROMPT + generate(PROMPT, 3)


METHODS = (
    f"/{CACHE_SERVICE}/PlanSteps",
    f"/{CACHE_SERVICE}/AttachPool",
    f"/{WORKER_SERVICE}/RunSteps",
)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_is_none_ends_the_stream(method: str, pair: Pair, open_stream: Any) -> None:
    channel = pair.worker_channel if WORKER_SERVICE in method else pair.cache_channel
    stream = open_stream(channel.stream_stream(method))
    stream.say(b"\xff\xff\xff")
    with pytest.raises(RefusedError) as caught:
        stream.hear()
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert pair.worker_statistics().attached


# -- the conversation with a worker -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "registration",
    [
        {"pool": ""},
        {"pool": "a/b"},
        {"pool": "ä"},
        {"pool": "a" * 129},
        {"pool": "a", "epoch": 0},
        {"pool": "a", "highest_term": -1},
        {"pool": "a", "attached_term": -1},
        {"pool": "a", "worker_address": "x" * 5_000},
        {"pool": "a", "model": "x" * 5_000},
        {"pool": "a", "model_fingerprint": "x" * 5_000},
        {"pool": "a", "block_size_tokens": 0},
        {"pool": "a", "block_size_tokens": 1025},
        {"pool": "a", "block_count": 1},
        {"pool": "a", "block_count": -1},
        {"pool": "a", "block_bytes": 0},
        {"pool": "a", "max_sequence_count": 0},
        {"pool": "a", "max_sequence_tokens": 0},
        {"pool": "a", "vocabulary_size": 0},
    ],
    ids=str,
)
def test_a_pool_that_can_not_be_is_not_attached(registration: dict[str, Any], pair: Pair, attach: Attach) -> None:
    before = ask_pools(pair)
    with pytest.raises(RefusedError) as caught:
        attach().register(**registration)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert {"field", "value", "limit"} <= caught.value.metadata.keys()
    assert ask_pools(pair) == before


def ask_pools(pair: Pair) -> list[str]:
    return [pool.name for pool in pair.cache.ListPools(cache_service_pb2.ListPoolsRequest(), timeout=DEADLINE_S).pools]


def test_a_worker_registers_first(pair: Pair, attach: Attach) -> None:
    for message in ({"lease_opened": attach_pb2.LeaseOpened(lease_id="a")}, {}):
        worker = attach()
        worker.say(**message)
        with pytest.raises(RefusedError, match="register_pool") as caught:
            worker.hear()
        assert caught.value.reason == "INVALID_ARGUMENT"


def test_a_worker_registers_once(pair: Pair, attach: Attach) -> None:
    worker = attach()
    assert worker.register("once").HasField("attached")
    with pytest.raises(RefusedError, match="INVALID_ARGUMENT"):
        worker.register("once", epoch=2)
    await_that("it is detached", lambda: not pair.pool("once").attached)
    assert pair.pool("once").epoch == 1


def test_a_worker_that_has_obeyed_a_newer_cachemgr_is_not_ruled(pair: Pair, attach: Attach) -> None:
    term = pair.pool().term
    with pytest.raises(RefusedError) as caught:
        attach().register("elsewhere", highest_term=term + 1)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TERM_SUPERSEDED")
    assert caught.value.metadata == {"value": str(term), "limit": str(term + 1)}
    assert "elsewhere" not in ask_pools(pair)


def test_a_cachemgr_that_started_after_the_one_obeyed_rules_under_a_higher_term(pair: Pair, attach: Attach) -> None:
    """Its clock was set back."""
    worker, higher = attach(), pair.pool().term + 10**18
    told = {"highest_term": higher, "attached_term": higher}
    answer = worker.register("later", **told, highest_term_age=seconds(10**6))
    raised = answer.new_epoch_required.term
    assert raised > higher
    assert "later" not in ask_pools(pair)
    attached = worker.register("later", epoch=2, highest_term=raised).attached
    assert (attached.term, pair.pool("later").term) == (raised, raised)
    lease = worker.create_lease(pair, "later")
    assert lease.term == raised
    assert unsigned(lease.plan().grant).term == raised
    lease.delete()
    assert pair.pool().term < higher


def test_a_pool_is_attached_once(pair: Pair, attach: Attach) -> None:
    epoch = pair.pool().epoch
    with pytest.raises(RefusedError) as caught:
        attach().register("default", epoch=epoch ^ 1)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POOL_ALREADY_ATTACHED")
    assert caught.value.metadata == {"pool": "default", "epoch": str(epoch)}
    assert pair.pool().attached
    assert pair.pool().epoch == epoch


def test_a_worker_may_be_back_before_its_old_stream_has_ended(pair: Pair, attach: Attach) -> None:
    old, new = attach(), attach()
    first = old.register("quick").attached
    lease = old.create_lease(pair, "quick")
    again = new.register("quick", attached_term=first.term, highest_term=first.term).attached
    assert (again.signing_key, list(again.open_lease_ids)) == (first.signing_key, [lease.lease_id])
    assert_replaced(old, "quick", epoch=1)
    assert pair.pool("quick").attached
    lease.delete()
    assert new.hear().fence_lease.lease_id == lease.lease_id
    new.say(lease_fenced=attach_pb2.LeaseFenced(lease_id=lease.lease_id))
    await_that("the lease is gone", lambda: not pair.leases("quick"))


def assert_replaced(worker: StandInWorker, pool: str, *, epoch: int) -> None:
    """Its stream has ended because another one has registered the epoch."""
    with pytest.raises(RefusedError) as caught:
        list(iter(worker.hear, None))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POOL_ALREADY_ATTACHED")
    assert caught.value.metadata == {"pool": pool, "epoch": str(epoch)}
    assert "a newer stream has registered" in caught.value.message


def test_orders_that_were_not_answered_go_to_the_newer_stream(pair: Pair, attach: Attach) -> None:
    old, new = attach(), attach()
    term = old.register("moved").attached.term
    ended = old.create_lease(pair, "moved")
    request = cache_service_pb2.CreateLeaseRequest(pool="moved", ttl=seconds(60))
    creating = pair.cache.CreateLease.future(request, timeout=DEADLINE_S)
    opening = old.hear().open_lease.lease_id
    ended.delete()
    assert old.hear().fence_lease.lease_id == ended.lease_id
    attached = new.register("moved", attached_term=term, highest_term=term).attached
    assert list(attached.open_lease_ids) == [opening]
    orders = {order.WhichOneof("message"): order for order in (new.hear(), new.hear())}
    assert orders["open_lease"].open_lease.lease_id == opening
    assert orders["fence_lease"].fence_lease.lease_id == ended.lease_id
    assert_replaced(old, "moved", epoch=1)
    new.say(lease_opened=attach_pb2.LeaseOpened(lease_id=opening))
    new.say(lease_fenced=attach_pb2.LeaseFenced(lease_id=ended.lease_id))
    assert creating.result().lease_id == opening
    await_that("the ended lease is gone", lambda: len(pair.leases("moved")) == 1)


def test_many_streams_of_one_epoch_leave_the_last_one_attached(pair: Pair, attach: Attach) -> None:
    workers = [attach() for _ in range(20)]
    term = workers[0].register("often").attached.term
    for worker in workers[1:]:
        assert worker.register("often", attached_term=term, highest_term=term).attached.term == term
    for worker in workers[:-1]:
        assert_replaced(worker, "often", epoch=1)
    assert pair.pool("often").attached
    workers[-1].close()
    await_that("it is detached", lambda: not pair.pool("often").attached)


def test_a_worker_whose_epoch_another_one_registers_is_attached_again(
    pair: Pair, attach: Attach, lease: LeaseHolder, generate: Generate
) -> None:
    """The other one ends, too, once the worker reconnects: neither side notices the break before."""
    lease.run(lease.admit((1, PROMPT)))
    lease.await_settled()
    pool, other = pair.pool(), attach()
    geometry = {field.name: value for field, value in pool.geometry.ListFields()}
    term = {"attached_term": pool.term, "highest_term": pool.term}
    assert other.register("default", epoch=pool.epoch, **term, **geometry).HasField("attached")
    assert_replaced(other, "default", epoch=pool.epoch)
    assert pair.pool().attached
    lease.go_on(1, num_steps=3)
    lease.await_settled()
    assert lease.tokens[1] == PROMPT + generate(PROMPT, 4)


def test_an_epoch_has_one_geometry(pair: Pair, attach: Attach) -> None:
    worker = attach()
    term = worker.register("fixed").attached.term
    for told in ({"block_count": 12}, {"vocabulary_size": 101}, {"model": "another"}, {"host_block_count": 1}):
        with pytest.raises(RefusedError) as caught:
            attach().register("fixed", attached_term=term, highest_term=term, **told)
        ((field, value),) = told.items()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert caught.value.metadata["field"] == f"geometry.{field}"
        assert caught.value.metadata["value"] == str(value)
        assert caught.value.metadata["limit"].endswith("as this epoch was registered")
    assert pair.pool("fixed").attached
    lease = worker.create_lease(pair, "fixed")
    lease.delete()


def test_an_epoch_with_an_unknown_history_is_not_attached(pair: Pair, attach: Attach) -> None:
    worker = attach()
    answer = worker.register("history", epoch=5, attached_term=3)
    assert answer.new_epoch_required.term == pair.pool().term
    assert "history" not in ask_pools(pair)
    attached = worker.register("history", epoch=6).attached
    assert attached.term == pair.pool().term
    assert len(attached.signing_key) == 32
    assert pair.pool("history").epoch == 6


def test_a_worker_that_comes_back_finds_its_books(pair: Pair, attach: Attach) -> None:
    worker = attach()
    first = worker.register("back").attached
    lease = worker.create_lease(pair, "back")
    plan = lease.admit((1, draw_tokens(9, seed=2)))
    worker.close()
    await_that("it is detached", lambda: not pair.pool("back").attached)
    worker = attach()
    again = worker.register("back", attached_term=first.term, highest_term=first.term).attached
    assert (again.signing_key, list(again.open_lease_ids)) == (first.signing_key, [lease.lease_id])
    assert pair.pool("back").sequence_count == 1
    report = attach_pb2.StepReport(
        report_number=1,
        lease_id=lease.lease_id,
        step_number=plan.step_number,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=[1],
        computed_token_counts=[9],
        sampled_sequence_ids=[1],
        sampled_token_ids=[7],
    )
    for _ in range(2):  # once more, as after a break
        worker.say(step_report=report)
    assert worker.hear().reports_acknowledged.report_number == 1
    assert pair.statistics("back").computed_step_count == 1
    assert lease.sequence(1).token_count == 10
    lease.delete()


@pytest.mark.parametrize(
    "report",
    [
        {"report_number": 2},
        {"step_number": 2},
        {"outcome": attach_pb2.STEP_OUTCOME_UNSPECIFIED},
        {"computed_token_counts": []},
        {"computed_token_counts": [8]},
        {"sequence_ids": [2]},
        {"sampled_sequence_ids": [], "sampled_token_ids": []},
    ],
    ids=str,
)
def test_a_report_of_what_was_not_planned_is_not_entered(report: dict[str, Any], pair: Pair, attach: Attach) -> None:
    worker = attach()
    worker.register("lies", epoch=crc32(str(report).encode()) + 1)
    lease = worker.create_lease(pair, "lies")
    lease.admit((1, draw_tokens(9, seed=2)))
    right: dict[str, Any] = {
        "report_number": 1,
        "lease_id": lease.lease_id,
        "step_number": 1,
        "outcome": attach_pb2.STEP_OUTCOME_COMPUTED,
        "sequence_ids": [1],
        "computed_token_counts": [9],
        "sampled_sequence_ids": [1],
        "sampled_token_ids": [7],
    }
    worker.say(step_report=attach_pb2.StepReport(**right | report))
    with pytest.raises(RefusedError) as caught:
        worker.hear()
    assert caught.value.reason == "INVALID_ARGUMENT"
    assert pair.statistics("lies").computed_step_count == 0
    assert lease.sequence(1).computed_token_count == 0
    assert pair.violations("lies") == []
    lease.delete()


def test_blocks_stay_with_a_lease_that_ended_until_its_worker_answers(pair: Pair, attach: Attach) -> None:
    """The worker is cut off, the lease expires, a worker connects: only its answer frees the blocks."""
    worker = attach()
    term = worker.register("cut", block_count=5).attached.term
    lease = worker.create_lease(pair, "cut", ttl_s=1.0)
    other = worker.create_lease(pair, "cut")
    lease.admit((1, draw_tokens(9, seed=2)))
    worker.close()
    await_that("it has expired", lambda: pair.statistics("cut").expired_lease_count == 1)
    assert pair.counts("cut").active_count == 3
    prompt = draw_tokens(8, seed=3)
    refusal = other.plan(admissions=[{"sequence_id": 1, "token_ids": prompt}]).refusals[0].error
    assert refusal.reason == "OUT_OF_BLOCKS"
    worker = attach()
    attached = worker.register("cut", block_count=5, attached_term=term, highest_term=term).attached
    assert list(attached.open_lease_ids) == [other.lease_id]
    assert worker.hear().fence_lease.lease_id == lease.lease_id
    assert pair.counts("cut").active_count == 3
    worker.say(lease_fenced=attach_pb2.LeaseFenced(lease_id=lease.lease_id))
    await_that("the blocks are back", lambda: pair.counts("cut").free_count == 4)
    other.admit((2, prompt))
    other.delete()


def test_a_new_epoch_frees_the_blocks_of_a_lease_that_ended(pair: Pair, attach: Attach) -> None:
    worker = attach()
    worker.register("gone")
    lease, other = worker.create_lease(pair, "gone"), worker.create_lease(pair, "gone")
    lease.admit((1, draw_tokens(9, seed=2)))
    other.admit((1, draw_tokens(9, seed=3)))
    lease.delete()
    assert worker.hear().fence_lease.lease_id == lease.lease_id
    worker.close()
    await_that("it is detached", lambda: not pair.pool("gone").attached)
    attached = attach().register("gone", epoch=2).attached
    assert list(attached.open_lease_ids) == [other.lease_id]
    assert pair.pool("gone").lease_count == 1
    assert pair.counts("gone").free_count == 8
    with pytest.raises(RefusedError, match="EPOCH_CHANGED"):
        other.plan()
    other.epoch = 2
    assert other.plan().step_number == 1
    other.delete()


def test_a_lease_needs_a_worker_that_is_there(pair: Pair, attach: Attach) -> None:
    worker = attach()
    worker.register("away")
    worker.close()
    await_that("it is detached", lambda: not pair.pool("away").attached)
    with pytest.raises(RefusedError) as caught:
        LeaseHolder.create(pair, pool="away")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "POOL_DETACHED")
    assert caught.value.metadata == {"pool": "away"}


def test_a_lease_whose_worker_does_not_answer_is_not_left_behind(pair: Pair, attach: Attach) -> None:
    worker = attach()
    worker.register("mute")
    request = cache_service_pb2.CreateLeaseRequest(pool="mute", ttl=seconds(60))
    creating = pair.cache.CreateLease.future(request, timeout=DEADLINE_S)
    lease_id = worker.hear().open_lease.lease_id
    assert worker.hear().fence_lease.lease_id == lease_id
    with pytest.raises(grpc.RpcError) as caught:
        creating.result()
    assert RefusedError.of_call(caught.value).reason == "POOL_DETACHED"
    assert [lease.state for lease in pair.leases("mute")] == [cache_service_pb2.LEASE_STATE_FENCING]
    worker.say(lease_fenced=attach_pb2.LeaseFenced(lease_id=lease_id))
    await_that("the lease is gone", lambda: not pair.leases("mute"))
