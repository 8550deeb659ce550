"""Bounded tables: when one is full the next entry is refused with a retry delay, and earlier ones stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, cast

import pytest
from deadlines import DEADLINE_S
from google.protobuf import duration_pb2
from planning import Planned, decode_plan

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr import _core
from quire.cachemgr._core import Ledger, PlanRequest
from quire.cachemgr.bounds import MAX_WAITING_ADMISSIONS, RECOUNT_INTERVAL_S, LeaseCounts, Places
from quire.cachemgr.catalog import Catalog, Registration
from quire.cachemgr.errors import CallRefused, Reason, Refusal
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.service import messages
from quire.cachemgr.service.leasing import REMEMBER_LEASES_S, LeaseAnswers
from quire.cachemgr.service.messages import statistics_of
from quire.cachemgr.service.servicer import CacheServicer
from quire.cachemgr.service.turns import Turns

NUM_SEQUENCES = 2_000
GEOMETRY = Geometry(
    block_size=4,
    num_blocks=NUM_SEQUENCES + 1,
    block_bytes=64,
    max_sequences=NUM_SEQUENCES,
    max_sequence_tokens=64,
    vocab_size=100,
    model="m",
    model_fingerprint="f",
)


def refusal_of(call: Any) -> Refusal:
    with pytest.raises(CallRefused) as refused:
        call()
    return refused.value.refusal


# -- places -------------------------------------------------------------------------------------------------------


def test_who_comes_when_all_places_are_taken_is_refused() -> None:
    places = Places(2, "watches")
    with ExitStack() as stack:
        stack.enter_context(places.taken())
        for _ in range(2):  # a place is free again however its block ends
            with suppress(RuntimeError), places.taken():
                assert places.num_taken == 2
                refusal = refusal_of(lambda: places.taken().__enter__())
                assert (refusal.reason, refusal.metadata) == (Reason.OVERLOADED, {"limit": "2"})
                assert refusal.message == "there are 2 watches already"
                raise RuntimeError
    assert places.num_taken == 0


# -- leases -------------------------------------------------------------------------------------------------------


@pytest.fixture
def present() -> set[str]:
    """The leases that are there."""
    return set()


def counts_of(present: set[str], *, limit: int, **tenants: int) -> LeaseCounts:
    return LeaseCounts(present.__contains__, limit=limit, tenant_limit=tenants.get)


def make(counts: LeaseCounts, present: set[str], *leases: str, now: float = 0.0) -> None:
    """Leases named by their tenant and a number."""
    for lease in leases:
        counts.refuse_another(lease[0], now)
        counts.add(lease, lease[0])
        present.add(lease)


def test_leases_are_limited_in_all(present: set[str]) -> None:
    counts = counts_of(present, limit=3)
    make(counts, present, "a1", "a2", "b1")
    for tenant in ("a", "b", "c"):
        refusal = refusal_of(lambda tenant=tenant: counts.refuse_another(tenant, 0.0))
        assert refusal.reason is Reason.TOO_MANY_LEASES
        assert refusal.metadata == {"limit": "3", "limited_by": "server"}


def test_leases_are_limited_by_tenant(present: set[str]) -> None:
    counts = counts_of(present, limit=9, a=2, c=0)
    make(counts, present, "a1", "b1", "a2", "b2", "b3")
    refusal = refusal_of(lambda: counts.refuse_another("a", 0.0))
    assert refusal.metadata == {"limit": "2", "limited_by": "tenant"}
    assert refusal_of(lambda: counts.refuse_another("c", 0.0)).metadata["limit"] == "0"
    counts.refuse_another("b", 0.0)


@pytest.mark.parametrize("gone", ["a1", "b1"])
def test_a_lease_that_is_gone_makes_room(present: set[str], gone: str) -> None:
    counts = counts_of(present, limit=2)
    make(counts, present, "a1", "b1")
    present.remove(gone)
    make(counts, present, "a2")
    assert refusal_of(lambda: counts.refuse_another("b", RECOUNT_INTERVAL_S)).reason is Reason.TOO_MANY_LEASES


def test_leases_are_counted_again_only_now_and_then() -> None:
    asked: list[str] = []

    def is_there(lease: str) -> bool:
        asked.append(lease)
        return True

    counts = LeaseCounts(is_there, limit=1, tenant_limit=lambda tenant: None)
    counts.add("a1", "a")
    for now in (0.0, RECOUNT_INTERVAL_S / 2, RECOUNT_INTERVAL_S, 1.4 * RECOUNT_INTERVAL_S):
        assert refusal_of(lambda now=now: counts.refuse_another("a", now))
    assert asked == ["a1", "a1"]


# -- what CreateLease has answered --------------------------------------------------------------------------------


def creation(request_id: str, pool: str = "p") -> pb.CreateLeaseRequest:
    return pb.CreateLeaseRequest(pool=pool, request_id=request_id)


def run(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


def ask(answers: LeaseAnswers, request_id: str, *, tenant: str = "a", now: float = 0.0) -> asyncio.Future[Any]:
    """The future of a call, a new one if none is remembered."""
    request = creation(request_id)
    known = answers.recall(request, tenant, now)
    if known is None:
        known = asyncio.get_running_loop().create_future()
        answers.remember(request, tenant, known, now)
    return known


def test_answers_are_remembered_up_to_a_number_and_those_running_longest() -> None:
    async def body() -> None:
        answers = LeaseAnswers(limit=3)
        running, first, second = ask(answers, "running"), ask(answers, "first"), ask(answers, "second")
        first.set_result("1")
        second.set_result("2")
        third = ask(answers, "third")
        assert len(answers) == 3
        assert ask(answers, "running") is running
        assert ask(answers, "second") is second
        assert ask(answers, "third") is third
        assert ask(answers, "first") is not first, "the oldest that was answered is forgotten"

    run(body)


def test_a_call_is_refused_when_all_that_is_remembered_still_runs() -> None:
    async def body() -> None:
        answers = LeaseAnswers(limit=2)
        running = [ask(answers, name) for name in ("one", "two")]
        refusal = refusal_of(lambda: ask(answers, "three"))
        assert (refusal.reason, refusal.metadata) == (Reason.OVERLOADED, {"limit": "2"})
        assert [ask(answers, name) for name in ("one", "two")] == running
        assert answers.recall(creation(""), "a", 0.0) is None, "what has no request_id needs no memory"
        running[1].cancel()
        assert not ask(answers, "three").done()

    run(body)


def test_answers_are_remembered_for_a_time() -> None:
    async def body() -> None:
        answers = LeaseAnswers()
        made = ask(answers, "one")
        assert ask(answers, "one", now=REMEMBER_LEASES_S) is made
        assert ask(answers, "one", now=REMEMBER_LEASES_S + 1) is not made
        assert len(answers) == 1

    run(body)


def test_a_request_id_is_one_tenants_own() -> None:
    async def body() -> None:
        answers = LeaseAnswers()
        assert ask(answers, "one", tenant="a") is not ask(answers, "one", tenant="b")

    run(body)


# -- admissions that wait -----------------------------------------------------------------------------------------


def test_turns_come_one_by_one_to_as_many_as_may_wait() -> None:
    async def body() -> None:
        turns, order = Turns(limit=3), []

        async def wait(number: int) -> None:
            await turns.turn()
            order.append(number)

        waiting = [asyncio.ensure_future(wait(number)) for number in range(5)]
        done, _ = await asyncio.wait(waiting)
        refused = [number for number, task in enumerate(waiting) if task.exception() is not None]
        assert (order, refused, len(turns)) == ([0, 1, 2], [3, 4], 0)
        await turns.turn()
        assert len(done) == 5

    run(body)


async def requests_of(plan: pb.PlanStepRequest) -> AsyncIterator[PlanRequest]:
    yield PlanRequest(plan.SerializeToString())


def test_more_admissions_than_may_wait_are_refused_and_none_of_the_others_is_lost() -> None:
    async def body() -> None:
        catalog = Catalog(5)
        pool = catalog.register(Registration("p", 1, 0, 0, GEOMETRY, "w"), signing_key=b"key")
        assert pool is not None
        num_leases, too_many = 50, 30
        leases = [f"{number:032x}" for number in range(num_leases)]
        for lease_id in leases:
            catalog.open_lease(pool, lease_id, ttl_s=60, now=0.0)
        servicer = CacheServicer(catalog, clock=lambda: 0.0)

        async def admit(number: int) -> pb.PlanStepsResponse:
            admission = pb.Admission(sequence_id=number, token_ids=[number % 100])
            plan = pb.PlanStepRequest(lease_id=leases[number % num_leases], epoch=1, admissions=[admission])
            context: Any = None
            (answer,) = [answer async for answer in servicer.PlanSteps(requests_of(plan), context)]
            return pb.PlanStepsResponse.FromString(answer)

        answers = await asyncio.gather(*(admit(number) for number in range(MAX_WAITING_ADMISSIONS + too_many)))
        refused = [answer.error for answer in answers if answer.WhichOneof("answer") == "error"]
        planned = [answer.plan for answer in answers if answer.WhichOneof("answer") == "plan"]
        assert (len(planned), len(refused)) == (MAX_WAITING_ADMISSIONS, too_many)
        assert {(error.reason, error.metadata["limit"], error.retry_delay.nanos) for error in refused} == {
            ("OVERLOADED", str(MAX_WAITING_ADMISSIONS), 100_000_000)
        }
        assert sum(len(plan.admitted_sequence_ids) for plan in planned) == MAX_WAITING_ADMISSIONS
        assert statistics_of(pool.ledger).sequence_count == MAX_WAITING_ADMISSIONS
        assert servicer.statistics().refused_plans == {Reason.OVERLOADED: too_many}
        assert servicer.statistics().num_waiting_admissions == 0

    run(body)


def test_steps_are_planned_between_the_parts_of_a_long_admission() -> None:
    async def body() -> None:
        catalog = Catalog(5)
        geometry = replace(GEOMETRY, block_size=16, num_blocks=10_000, max_sequence_tokens=140_000)
        pool = catalog.register(Registration("p", 1, 0, 0, geometry, "w"), signing_key=b"key")
        assert pool is not None
        for lease_id in ("long", "steps"):
            catalog.open_lease(pool, lease_id, ttl_s=60, now=0.0)
        servicer, context = CacheServicer(catalog, clock=lambda: 0.0), cast(Any, None)
        answered: list[str] = []

        async def requests(lease_id: str, *plans: pb.PlanStepRequest) -> AsyncIterator[PlanRequest]:
            for plan in plans:
                plan.lease_id, plan.epoch = lease_id, 1
                yield PlanRequest(plan.SerializeToString())
                await asyncio.sleep(0)

        async def ask(lease_id: str, *plans: pb.PlanStepRequest) -> None:
            async for answer in servicer.PlanSteps(requests(lease_id, *plans), context):
                assert pb.PlanStepsResponse.FromString(answer).WhichOneof("answer") == "plan"
                answered.append(lease_id)

        admission = pb.Admission(sequence_id=1, token_ids=[number % 100 for number in range(131_072)])
        steps = [pb.PlanStepRequest() for _ in range(40)]
        await asyncio.gather(ask("long", pb.PlanStepRequest(admissions=[admission])), ask("steps", *steps))
        num_parts = 131_072 // 16_384
        assert answered.index("long") >= num_parts

    asyncio.run(body())


# -- plans --------------------------------------------------------------------------------------------------------

SMALL = Geometry(
    block_size=4,
    num_blocks=9,
    block_bytes=1,
    max_sequences=6,
    max_sequence_tokens=24,
    vocab_size=100,
    model="",
    model_fingerprint="",
    num_host_blocks=50,
)
MOST = SMALL.max_sequences
LARGE = replace(SMALL, max_sequences=2**31 - 1)


PLANS: dict[str, Callable[[range], dict[str, Any]]] = {
    "release_sequence_ids": lambda ids: {"release_sequence_ids": ids},
    "return_hints": lambda ids: {
        "return_hints": [pb.ReturnHint(sequence_id=seq_id, not_expected=True) for seq_id in ids]
    },
    "offload_sequence_ids": lambda ids: {"offload_sequence_ids": ids},
    "expected_prompts": lambda ids: {"expected_prompts": [expected_prompt([seq_id]) for seq_id in ids]},
    "trim_sequence_ids": lambda ids: {"trim_sequence_ids": ids, "trim_token_counts": ids},
    "forks": lambda ids: {"forks": [pb.Fork(child_sequence_ids=[seq_id]) for seq_id in ids]},
    "forks.child_sequence_ids": lambda ids: {
        "forks": [pb.Fork(child_sequence_ids=ids[:1]), pb.Fork(child_sequence_ids=ids[1:])]
    },
    "extends.sequence_ids": lambda ids: {"extends": pb.Extends(sequence_ids=ids, token_counts=ids)},
    "extends.token_counts": lambda ids: {"extends": pb.Extends(sequence_ids=ids[:MOST], token_counts=ids)},
    "restores": lambda ids: {"restores": [pb.Restore(sequence_id=seq_id) for seq_id in ids]},
    "admissions": lambda ids: {"admissions": [pb.Admission(sequence_id=seq_id) for seq_id in ids]},
}
"""Plans with these sequences in one kind of items."""


def refuse_plan(plan: pb.PlanStepRequest, geometry: Geometry) -> dict[str, str]:
    """Field, value and limit."""
    refusal = refusal_of(lambda: decode_plan(plan, geometry))
    assert refusal.reason is Reason.INVALID_ARGUMENT
    return refusal.metadata


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_at_most_as_many_items_of_a_kind_as_the_pool_has_room_for_sequences(name: str) -> None:
    decode_plan(pb.PlanStepRequest(**PLANS[name](range(MOST))), SMALL)
    refused = refuse_plan(pb.PlanStepRequest(**PLANS[name](range(MOST + 1))), SMALL)
    assert refused == {"field": name, "value": f"{MOST + 1} entries", "limit": f"at most {MOST} entries"}


@pytest.mark.parametrize("name", sorted(PLANS.keys() - {"extends.token_counts"}))
def test_a_pool_for_more_sequences_takes_no_larger_plans(name: str) -> None:
    most = _core.MAX_PLAN_ITEMS
    decode_plan(pb.PlanStepRequest(**PLANS[name](range(most))), LARGE)
    refused = refuse_plan(pb.PlanStepRequest(**PLANS[name](range(most + 1))), LARGE)
    assert refused == {"field": name, "value": f"{most + 1} entries", "limit": f"at most {most} entries"}


def test_the_children_of_a_plans_forks_begin_with_so_many_tokens_together() -> None:
    most = _core.MAX_FORKED_TOKENS

    def forks(*children: tuple[int, int]) -> pb.PlanStepRequest:
        made = [pb.Fork(child_sequence_ids=range(count), token_count=num_tokens) for count, num_tokens in children]
        return pb.PlanStepRequest(forks=made)

    decode_plan(forks((4, most // 4)), SMALL)
    for plan in (forks((3, most // 4), (1, most // 4 + 1)), forks((4, most // 4), (1, 1), (1, -most))):
        refused = refuse_plan(plan, SMALL)
        value, limit = f"{most + 1} tokens", f"at most {most} of all children"
        assert refused == {"field": "forks.token_count", "value": value, "limit": limit}
    longest = replace(SMALL, block_size=2**12, num_blocks=2**13, max_sequence_tokens=most + 1)
    decode_plan(forks((1, most + 1)), longest)


def expected_prompt(token_ids: Iterable[int]) -> pb.ExpectedPrompt:
    return pb.ExpectedPrompt(token_ids=token_ids, expected_in=duration_pb2.Duration(seconds=1))


TOKENS: dict[str, Callable[[int], dict[str, Any]]] = {
    "admissions.token_ids": lambda size: {
        "admissions": [pb.Admission(token_ids=[1]), pb.Admission(token_ids=[1] * (size - 1))]
    },
    "expected_prompts.token_ids": lambda size: {
        "expected_prompts": [expected_prompt([1]), expected_prompt([1] * (size - 1))]
    },
    "extends.append_token_ids": lambda size: {
        "extends": pb.Extends(
            sequence_ids=[1], token_counts=[1], append_token_counts=[size], append_token_ids=[1] * size
        )
    },
}
"""Plans that bring so many tokens."""


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("longest", [24, 300_000])
def test_a_plan_brings_tokens_up_to_a_number_or_one_prompt_of_the_greatest_length(name: str, longest: int) -> None:
    geometry = replace(SMALL, block_size=2**12, num_blocks=2**8, max_sequence_tokens=longest)
    most = max(longest, _core.MAX_PLAN_TOKENS)
    decode_plan(pb.PlanStepRequest(**TOKENS[name](most)), geometry)
    refused = refuse_plan(pb.PlanStepRequest(**TOKENS[name](most + 1)), geometry)
    assert refused == {"field": name, "value": f"{most + 1} entries", "limit": f"at most {most} entries"}


def test_expected_prompts_have_the_tokens_that_admissions_leave() -> None:
    most = _core.MAX_PLAN_TOKENS
    admissions = [pb.Admission(token_ids=[1] * (most - 5))]
    decode_plan(pb.PlanStepRequest(admissions=admissions, expected_prompts=[expected_prompt([1] * 5)]), SMALL)
    plan = pb.PlanStepRequest(admissions=admissions, expected_prompts=[expected_prompt([1] * 3)] * 2)
    refused = refuse_plan(plan, SMALL)
    assert refused == {"field": "expected_prompts.token_ids", "value": "6 entries", "limit": "at most 5 entries"}


def test_fields_that_are_not_known_do_not_count() -> None:
    ledger = Ledger("p", 0, SMALL)
    ledger.open_lease("", ttl_s=30.0, now=0.0)
    assert Planned(ledger.plan(PlanRequest(b"\xa0\x06\x01"), now=0.0)).step_number == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x12\x03abc", id="a string for the epoch"),
        pytest.param(b"\x0a\x01a\x58\x01", id="a number for a return hint"),
    ],
)
def test_fields_of_another_type_are_malformed(body: bytes) -> None:
    with pytest.raises(ValueError, match="invalid wire type"):
        PlanRequest(body)


@pytest.mark.parametrize("reserved", [0, 30, 60])
def test_a_prompt_that_is_too_long_is_refused_by_its_length_and_not_read(reserved: int) -> None:
    """The items beside it are taken."""
    ledger = Ledger("p", 1, SMALL)
    ledger.open_lease("a", ttl_s=30.0, now=0.0)
    long = pb.Admission(sequence_id=1, token_ids=[-1] * 40, reserved_token_count=reserved)
    plan = pb.PlanStepRequest(admissions=[long, pb.Admission(sequence_id=2, token_ids=[1, 2])])
    plan.lease_id, plan.epoch = "a", 1
    planned = Planned(ledger.plan(PlanRequest(plan.SerializeToString()), now=0.0))
    (refused,) = planned.refusals
    assert (refused.seq_id, refused.refusal.reason) == (1, Reason.SEQUENCE_TOO_LONG)
    length = {"value": str(max(40, reserved)), "limit": "24", "limited_by": "model"}
    assert refused.refusal.metadata == {"sequence_id": "1", **length}
    assert planned.admitted_ids == [2]


# -- prefixes -----------------------------------------------------------------------------------------------------


def refuse_prefix(token_ids: list[int], *pools: Geometry) -> tuple[Reason, dict[str, str]]:
    refusal = refusal_of(lambda: messages.decode_prefix(token_ids, b"", b"", pools))
    return refusal.reason, refusal.metadata


def test_a_prefix_is_one_that_a_sequence_of_one_of_the_pools_can_begin_with() -> None:
    longer = replace(SMALL, max_sequence_tokens=30, vocab_size=50)
    for pools, most in (([SMALL], 24), ([SMALL, longer], 30)):
        assert len(messages.decode_prefix([1] * most, b"", b"", pools)) == 4 * most
        reason, metadata = refuse_prefix([1] * (most + 1), *pools)
        limits = {"field": "token_ids", "value": f"{most + 1} entries", "limit": f"at most {most} entries"}
        assert (reason, metadata) == (Reason.INVALID_ARGUMENT, limits)
    for value in (-1, 100, -(2**31), 2**31 - 1):
        outside = Reason.TOKEN_OUT_OF_RANGE, {"index": "1", "value": str(value), "limit": "99"}
        assert refuse_prefix([99, value, value], SMALL, longer) == outside
    assert refuse_prefix([50], longer)[1] == {"index": "0", "value": "50", "limit": "49"}
    assert messages.decode_prefix([99], b"", b"", [longer, SMALL])
