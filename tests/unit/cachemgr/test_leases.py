"""Leases: their ends, and their kept answers."""

from __future__ import annotations

import pytest
from planning import Planned, StepRequest, plan_step

from quire.cachemgr._core import GRACE_S, REMEMBERED_PLANS, Ledger
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.service.expiry import TICK_S, UNNOTICED_S, HeldTime
from quire.cachemgr.service.messages import statistics_of

SIZES = Geometry(
    block_size=2,
    num_blocks=4,
    block_bytes=1,
    max_sequences=1,
    max_sequence_tokens=4,
    vocab_size=4,
    model="m",
    model_fingerprint="f",
)


def ledger_with(**expiries: float) -> Ledger:
    """Leases of 10 s that end at these times."""
    ledger = Ledger("pool", 1, SIZES)
    for lease_id, expires_at in expiries.items():
        ledger.open_lease(lease_id, ttl_s=10.0, now=expires_at - 10.0)
    return ledger


# -- time -----------------------------------------------------------------------------------------------------------


def test_leases_expire_in_order_unless_they_were_renewed_ended_or_gone() -> None:
    ledger = ledger_with(c=3.0, a=1.0, b=2.0, d=4.0, e=3.5)
    assert (ledger_with().inspector.next_expiry(), ledger.inspector.next_expiry()) == (None, 1.0)
    assert ledger.end_lease("b")
    assert ledger.renew_lease("a", now=-5.0).expires_at == 5.0
    ledger.lease_fenced("c")
    assert ledger.expire_leases(0.9) == []
    assert ledger.expire_leases(4.0) == ["e", "d"]
    assert ledger.inspector.next_expiry() == 5.0
    assert ledger.expire_leases(5.0) == ["a"]
    assert ledger.inspector.next_expiry() is None
    assert [(lease.lease_id, lease.is_ending) for lease in ledger.inspector.leases()] == [
        (name, True) for name in "abde"
    ]


def test_a_lease_that_has_ended_is_not_renewed() -> None:
    ledger = ledger_with(a=1.0)
    ledger.end_lease("a")
    for lease_id in ("a", "nobody"):
        with pytest.raises(CallRefused) as refused:
            ledger.renew_lease(lease_id, now=0.0)
        assert refused.value.refusal.reason is Reason.LEASE_NOT_FOUND


def test_time_in_which_the_loop_was_held_is_found() -> None:
    held_time = HeldTime(100.0)
    looks = [100.25, 100.5, 100.5, 100.75, 108.75, 109.0, 109.3, 109.61]
    assert [round(held_time.look(now), 6) for now in looks] == [0, 0, 0, 0, 7.75, 0, 0, 0.06]


def test_a_look_that_comes_in_time_adds_up_to_no_held_time() -> None:
    """A loop that is held for less than this is not noticed; leases are ended so much later instead."""
    assert TICK_S < UNNOTICED_S < GRACE_S
    held_time = HeldTime(0.0)
    assert [held_time.look(number * TICK_S) for number in range(1, 9)] == [0.0] * 8


@pytest.mark.parametrize("late_s", [0.06, 0.5, 5.0])
def test_a_lease_that_is_not_renewed_ends_also_when_the_loop_is_always_late(late_s: float) -> None:
    ledger, now = ledger_with(a=10.0), 0.0
    held_time = HeldTime(now)
    while not ledger.expire_leases(now):
        now += TICK_S + late_s
        if held_s := held_time.look(now):
            ledger.extend_leases(held_s, now)
        assert now < 10.0 * (TICK_S + late_s) / TICK_S + 10.0


def test_a_lease_gets_the_grace_time_once_also_across_epochs() -> None:
    before, after = ledger_with(a=1.0), ledger_with()
    before.extend_leases(0.0, 2.0)
    after.adopt_lease(before.inspector.lease("a"))
    after.extend_leases(0.5, 3.0)
    assert after.inspector.lease("a").expires_at == 2.5 + GRACE_S
    assert after.inspector.next_expiry() == 2.0 + GRACE_S


# -- what was answered ----------------------------------------------------------------------------------------------


def ledger_with_answers(request_ids: list[str]) -> tuple[Ledger, list[Planned]]:
    """A lease, and its empty plans under these request ids."""
    ledger = Ledger("pool", 1, SIZES)
    ledger.open_lease("a", ttl_s=30.0, now=0.0)
    return ledger, [plan_again(ledger, each) for each in request_ids]


def plan_again(ledger: Ledger, request_id: str) -> Planned:
    return plan_step(ledger, "a", StepRequest(), now=0.0, request_id=request_id)


def test_an_answer_is_given_again_by_its_request_id_for_the_same_request_only() -> None:
    ledger, _ = ledger_with_answers(["r", ""])
    assert [plan_again(ledger, each).step_number for each in ("r", "", "s", "s")] == [1, 3, 4, 4]
    with pytest.raises(CallRefused) as refused:
        plan_step(ledger, "a", StepRequest(releases=[1]), now=0.0, request_id="r")
    assert refused.value.refusal.reason is Reason.REQUEST_ID_REUSED
    assert refused.value.refusal.metadata == {"request_id": "r"}


def test_refusals_are_counted_once_however_often_the_answer_is_given() -> None:
    ledger, _ = ledger_with_answers([])
    for _ in range(2):
        plan_step(ledger, "a", StepRequest(offloads=[1]), now=0.0, request_id="r")
    assert statistics_of(ledger).refusal_counts == {Reason.SEQUENCE_NOT_FOUND: 1}


def test_the_oldest_answers_are_forgotten_first_and_all_with_the_lease() -> None:
    request_ids = [str(number) for number in range(REMEMBERED_PLANS + 1)]
    ledger, answers = ledger_with_answers(request_ids)
    again = [plan_again(ledger, each).step_number for each in request_ids[1:]]
    assert again == [answer.step_number for answer in answers[1:]]
    assert plan_again(ledger, request_ids[0]).step_number == REMEMBERED_PLANS + 2
    ledger.end_lease("a")
    ledger.lease_fenced("a")
    ledger.open_lease("a", ttl_s=30.0, now=1.0)
    assert plan_again(ledger, request_ids[-1]).step_number == 1
