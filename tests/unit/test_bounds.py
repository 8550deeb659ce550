"""What is bounded: when it is full the next is refused and told when to ask again, and those before lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr import messages
from quire.cachemgr.bounds import MAX_WAITING_ADMISSIONS, RECOUNT_INTERVAL_S, LeaseCounts, Places
from quire.cachemgr.catalog import Catalog, Registration
from quire.cachemgr.errors import CallRefused, Reason, Refusal
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.servicer import REMEMBER_LEASES_S, CacheServicer, LeaseAnswers, Turns

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
    asyncio.run(asyncio.wait_for(body(), 30))


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


async def requests_of(plan: pb.PlanStepRequest) -> AsyncIterator[pb.PlanStepsRequest]:
    yield pb.PlanStepsRequest(plan=plan)


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
            return answer

        answers = await asyncio.gather(*(admit(number) for number in range(MAX_WAITING_ADMISSIONS + too_many)))
        refused = [answer.error for answer in answers if answer.WhichOneof("answer") == "error"]
        planned = [answer.plan for answer in answers if answer.WhichOneof("answer") == "plan"]
        assert (len(planned), len(refused)) == (MAX_WAITING_ADMISSIONS, too_many)
        assert {(error.reason, error.metadata["limit"], error.retry_delay.nanos) for error in refused} == {
            ("OVERLOADED", str(MAX_WAITING_ADMISSIONS), 100_000_000)
        }
        assert sum(len(plan.admitted_sequence_ids) for plan in planned) == MAX_WAITING_ADMISSIONS
        assert pool.ledger.statistics().num_sequences == MAX_WAITING_ADMISSIONS
        assert servicer.statistics().refused_plans == {Reason.OVERLOADED: too_many}
        assert servicer.statistics().num_waiting_admissions == 0

    run(body)


# -- plans --------------------------------------------------------------------------------------------------------

MOST = messages.MAX_PLAN_ITEMS


PLANS: dict[str, Callable[[range], dict[str, Any]]] = {
    "release_sequence_ids": lambda ids: {"release_sequence_ids": ids},
    "return_hints": lambda ids: {
        "return_hints": [pb.ReturnHint(sequence_id=seq_id, not_expected=True) for seq_id in ids]
    },
    "trim_sequence_ids": lambda ids: {"trim_sequence_ids": ids, "trim_token_counts": ids},
    "forks.child_sequence_ids": lambda ids: {
        "forks": [pb.Fork(child_sequence_ids=ids[:1]), pb.Fork(child_sequence_ids=ids[1:])]
    },
    "extends.sequence_ids": lambda ids: {"extends": pb.Extends(sequence_ids=ids, token_counts=ids)},
    "admissions": lambda ids: {"admissions": [pb.Admission(sequence_id=seq_id) for seq_id in ids]},
}
"""Plans with these sequences in one kind of items."""


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_too_many_items_is_refused(name: str) -> None:
    plan = pb.PlanStepRequest(**PLANS[name](range(MOST + 1)))
    refusal = refusal_of(lambda: messages.decode_plan(plan))
    assert refusal.reason is Reason.INVALID_ARGUMENT
    limits = {"field": name, "value": f"{MOST + 1} entries", "limit": f"at most {MOST} entries"}
    assert refusal.metadata == limits


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_as_many_items_as_may_be_is_read(name: str) -> None:
    messages.decode_plan(pb.PlanStepRequest(**PLANS[name](range(MOST))))
