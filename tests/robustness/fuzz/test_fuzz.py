"""A part of `make fuzz`, and tests that its checks find violations."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from planning import decode_plan
from robustness.fuzz import large, names
from robustness.fuzz.drive import Answer, Broken, Driver, Streams, judge, outcome_of, refusal_of
from robustness.fuzz.flat import Gauge, Sample
from robustness.fuzz.messages import Generator, Message, Origin
from robustness.fuzz.run import fuzz
from robustness.fuzz.subject import OWN_GEOMETRY, Changed, Subject
from robustness.fuzz.surface import CACHEMGR, CODES, GATEWAY, WORKER, Method, methods

from quire.cache.v1 import attach_pb2, cache_service_pb2, error_pb2
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.service import messages
from quire.compute.v1 import worker_service_pb2

NUM_MESSAGES = 20_000
NEEDS_FILES = {"LoadAdapter"}
"""Methods that refuse every message, because the folder that it names is not there."""
OWN = messages.decode_geometry(attach_pb2.PoolGeometry(**OWN_GEOMETRY))
METHODS = {(method.process, method.name): method for method in methods(CACHEMGR, WORKER)}
PLAN_STEP, PLAN_STEPS = METHODS[CACHEMGR, "PlanStep"], METHODS[CACHEMGR, "PlanSteps"]


def test_malformed_messages_change_nothing_and_break_nothing() -> None:
    run = asyncio.run(fuzz(1, NUM_MESSAGES))
    assert run.failures == []
    assert run.driver.num_sent == NUM_MESSAGES
    assert set(run.driver.counts) == set(METHODS.values())
    for method, count in run.driver.counts.items():
        is_accepted = bool(count.ok) != (method.name in NEEDS_FILES)
        assert is_accepted, f"{method.path}: nothing was accepted, so little of it was reached"
        assert count.refused, f"{method.path}: nothing was refused"
    assert run.driver.num_repeated
    assert run.driver.num_frames
    assert len(run.driver.outcomes) > 200


# -- the messages -------------------------------------------------------------------------------------------------


def test_a_message_can_be_made_again_by_itself() -> None:
    generator = Generator(7, CACHEMGR, WORKER)
    kept: dict[Method, list[Message]] = {}
    made = []
    for number in range(3_000):
        message = generator.message(number, kept)
        assert message.method is generator.method(number)
        made.append(message)
        if number % 10 == 0:
            kept.setdefault(message.method, []).append(message)
    assert max(len(message.origin.numbers) for message in made) > 3
    again = Generator(7, CACHEMGR, WORKER)
    for message in made:
        origin = Origin.of(str(message.origin))
        assert origin == message.origin
        found = again.again(origin)
        assert (found.method.path, found.data, found.twist) == (message.method.path, message.data, message.twist)
    other = Generator(8, CACHEMGR, WORKER)
    assert [other.message(number).data for number in range(50)] != [each.data for each in made[:50]]


def test_every_method_gets_messages_that_can_be_read_and_others() -> None:
    generator = Generator(3, CACHEMGR, WORKER)
    read: Counter[Method] = Counter()
    sent: Counter[Method] = Counter()
    for number in range(8_000):
        message = generator.message(number)
        sent[message.method] += 1
        try:
            message.method.request_class.FromString(message.data)
        except DecodeError:
            continue
        read[message.method] += 1
    assert set(sent) == set(METHODS.values())
    assert all(0 < read[method] < sent[method] for method in sent)


@pytest.mark.parametrize("process", [CACHEMGR, WORKER, GATEWAY])
def test_every_field_of_every_request_is_written(process: str) -> None:
    """Also a field that the generator has no rule for."""
    generator = Generator(5, process)
    seen: set[tuple[str, str]] = set()
    for number in range(12_000):
        message = generator.message(number)
        try:
            note_fields(message.method.request_class.FromString(message.data), seen)
        except DecodeError:
            continue
    expected: set[tuple[str, str]] = set()
    for method in methods(process):
        expect_fields(method.request, expected)
    assert expected <= seen


def test_messages_near_the_bounds_are_among_them_and_most_are_valid() -> None:
    generator, rng = Generator(4, CACHEMGR, WORKER), random.Random(4)
    assert {method.name for method in generator.methods} >= set(large.LARGE)
    sizes = [len(generator.message(number).data) for number in range(6_000)]
    assert sum(size > 100_000 for size in sizes) >= 5
    assert max(sizes) < 8 * 2**20
    plans = [large.plan(rng) for _ in range(200)]
    refused = 0
    for plan in plans:
        try:
            decode_plan(plan, OWN)
        except CallRefused:
            refused += 1
    assert 20 < refused < 150


def note_fields(message: Any, seen: set[tuple[str, str]]) -> None:
    for field, value in message.ListFields():
        seen.add((message.DESCRIPTOR.full_name, field.name))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            seen.update((field.message_type.full_name, part) for part in ("key", "value"))
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                note_fields(part, seen)


def expect_fields(descriptor: Any, expected: set[tuple[str, str]]) -> None:
    for field in descriptor.fields:
        expected.add((descriptor.full_name, field.name))
        if field.message_type is not None:
            expect_fields(field.message_type, expected)


def test_nothing_that_may_change_the_canary_is_sent() -> None:
    generator = Generator(9, CACHEMGR)
    planned = 0
    for number in range(30_000):
        message = generator.message(number)
        data, name = message.sent(names.Bindings()), message.method.name
        if name in names.LEASE_ENDERS:
            assert names.CANARY_LEASE.encode() not in data
        elif name in names.POOL_CHANGERS:
            assert names.CANARY_POOL.encode() not in data
        elif name in ("PlanStep", "PlanSteps") and names.CANARY_LEASE.encode() in data:
            planned += is_spoiled_plan(message.method, data)
    assert planned > 200


def is_spoiled_plan(method: Method, data: bytes) -> bool:
    """True if it is a plan of the canary's lease; one that could be accepted fails the test."""
    try:
        message = method.request_class.FromString(data)
    except DecodeError:
        return False
    plan = getattr(message, "plan", message)
    if plan.lease_id != names.CANARY_LEASE:
        return False
    assert (
        plan.epoch != names.CANARY_EPOCH
        or len(plan.request_id) > 64
        or len(plan.trim_sequence_ids) != len(plan.trim_token_counts)
        or len(plan.extends.sequence_ids) != len(plan.extends.token_counts)
        or min(plan.admission_token_budget, plan.admission_reserve_block_count) < 0
        or not all(fork.child_sequence_ids for fork in plan.forks)
    )
    return True


def test_what_stands_for_ids_is_replaced_at_its_length() -> None:
    request = cache_service_pb2.PlanStepRequest(
        lease_id=names.OWN_LEASES[1], epoch=names.CANARY_EPOCH, release_sequence_ids=[1]
    )
    bindings = names.Bindings(leases={names.OWN_LEASES[1]: "f" * 32}, canary_epoch=5)
    data = bindings.bind(request.SerializeToString())
    assert len(data) == len(request.SerializeToString())
    found = cache_service_pb2.PlanStepRequest.FromString(data)
    assert (found.lease_id, found.epoch, found.release_sequence_ids) == ("f" * 32, 5, [1])


# -- the looks ----------------------------------------------------------------------------------------------------


def refused(method: Method = PLAN_STEP, **changes: Any) -> Answer:
    said: dict[str, Any] = {
        "code": grpc.StatusCode.INVALID_ARGUMENT,
        "reason": "INVALID_ARGUMENT",
        "text": "request_id is 70 bytes; must be at most 64 bytes",
        "metadata": (("field", "request_id"), ("value", "70 bytes")),
    }
    return Answer(**said | changes)


def test_a_refusal_as_it_has_to_be_is_right() -> None:
    assert judge(PLAN_STEP, refused()) == []
    assert refusal_of(refused(), []) == "INVALID_ARGUMENT"
    other = refused(text="request_id is 71 bytes; must be at most 64 bytes")
    assert outcome_of(refused(), []) == outcome_of(other, [])


WRONG: Mapping[str, dict[str, Any]] = {
    "a reason that nobody knows": {"reason": "OOPS"},
    "a reason of the other service": {"reason": "BAD_SIGNATURE", "code": grpc.StatusCode.PERMISSION_DENIED},
    "a defect": {"reason": "INTERNAL", "code": grpc.StatusCode.INTERNAL},
    "another code": {"code": grpc.StatusCode.NOT_FOUND},
    "no words": {"text": ""},
    "words without end": {"text": "request_id" * 1_000},
    "no field": {"metadata": ()},
    "an empty field": {"metadata": (("field", ""),)},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_refusal_that_is_wrong_is_noticed(changes: dict[str, Any]) -> None:
    with pytest.raises(Broken):
        judge(PLAN_STEP, refused(**changes))


def test_an_error_within_an_answer_is_looked_at_too() -> None:
    error = error_pb2.Error(code=3, reason="INVALID_ARGUMENT", message="it is wrong")
    refusal = cache_service_pb2.Refusal(error=error)
    for response in (
        cache_service_pb2.PlanStepsResponse(error=error),
        cache_service_pb2.PlanStepsResponse(plan=cache_service_pb2.PlanStepResponse(refusals=[refusal])),
    ):
        with pytest.raises(Broken):
            judge(PLAN_STEPS, Answer((response.SerializeToString(),)))


def test_an_answer_that_is_no_message_and_a_token_that_is_none_are_noticed() -> None:
    with pytest.raises(Broken):
        judge(PLAN_STEP, Answer((b"\xff",), grpc.StatusCode.OK))
    sampled = worker_service_pb2.RunStepResponse(sampled_token_ids=[-1]).SerializeToString()
    with pytest.raises(Broken):
        judge(METHODS[WORKER, "RunStep"], Answer((sampled,), grpc.StatusCode.OK))


def test_every_service_says_its_own_reasons_only() -> None:
    assert {"PRIOR_STEP_FAILED", "BAD_SIGNATURE"} <= set(CODES[WORKER]) - set(CODES[CACHEMGR])


def test_a_process_that_grows_is_noticed() -> None:
    def gauge(*, leak_bytes: int, files: int = 0) -> Gauge:
        samples = [
            Sample(number, 10**8 + leak_bytes * number, 20 + files * (number > 0), 10)
            for number in range(0, 1_000_001, 5_000)
        ]
        return Gauge("it", None, samples)  # type: ignore[arg-type]  # is not asked any more

    assert gauge(leak_bytes=0).problems() == []
    assert len(gauge(leak_bytes=100).problems()) == 1
    assert len(gauge(leak_bytes=0, files=100).problems()) == 1


def test_a_look_sees_a_canary_that_was_changed_and_nothing_before() -> None:
    async def change() -> None:
        async with Subject.started() as subject:
            driver = Driver(subject, Generator(1, CACHEMGR))
            too_long = cache_service_pb2.PlanStepRequest(lease_id=names.OWN_LEASES[0], request_id="r" * 65)
            async with Streams(subject) as streams:
                await driver.send_one(Message(Origin(1, (1,)), PLAN_STEP, too_long.SerializeToString()), streams)
            await driver.look("a message that is refused, twice")
            assert (driver.failures, driver.num_repeated) == ([], 1)
            lease = subject.canary.lease
            lease.run(lease.plan(trim_sequence_ids=[1], trim_token_counts=[20]))
            lease.await_settled()
            with pytest.raises(Changed):
                subject.canary.check()
            await driver.look("the trim")
            assert len(driver.failures) == 1

    asyncio.run(change())
