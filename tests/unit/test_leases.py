"""Leases by themselves: until when, and what they remember."""

from __future__ import annotations

import pytest

from quire.cachemgr._core import REMEMBERED_PLANS, Books, StepPlan
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.leases import (
    LET_IN_S,
    SPARE_ENTRIES,
    TICK_S,
    UNNOTICED_S,
    ExpiryQueue,
    HeldTime,
    Lease,
    LeaseState,
)
from quire.cachemgr.plans import StepRequest


def lease_of(lease_id: str = "a", *, expires_at: float = 10.0) -> Lease:
    return Lease(lease_id, "pool", 10.0, expires_at)


# -- time -----------------------------------------------------------------------------------------------------------


def test_leases_expire_in_order_unless_they_were_renewed_ended_or_gone() -> None:
    queue = ExpiryQueue()
    assert queue.next_expiry() is None
    leases = {name: lease_of(name, expires_at=at) for name, at in [("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 4.0)]}
    for lease in leases.values():
        queue.add(lease)
    assert queue.next_expiry() == 1.0
    leases["b"].state = LeaseState.FENCING
    leases["a"].expires_at = 5.0
    del leases["c"]
    assert queue.pop_expired(leases, 0.9) == []
    assert queue.pop_expired(leases, 4.0) == [leases["d"]]
    assert queue.next_expiry() == 5.0
    assert queue.pop_expired(leases, 5.0) == [leases["a"]]
    assert queue.next_expiry() is None


def test_leases_that_ended_do_not_pile_up() -> None:
    queue = ExpiryQueue()
    leases = {f"kept {number}": lease_of(f"kept {number}", expires_at=1e6 + number) for number in range(300)}
    for lease in leases.values():
        queue.add(lease)
    for number in range(20_000):
        lease = lease_of(f"brief {number}", expires_at=1e5 + number)
        queue.add(lease)
        lease.state = LeaseState.FENCING
        assert len(queue) <= 2 * (len(leases) + 1) + SPARE_ENTRIES
    assert queue.pop_expired(leases, 2e5) == []
    assert queue.pop_expired(leases, 2e6) == list(leases.values())


def test_a_renewed_lease_has_its_whole_time_again() -> None:
    lease = lease_of(expires_at=3.0)
    lease.renew(2.5)
    assert lease.expires_at == 12.5


def test_time_in_which_the_loop_was_held_is_found() -> None:
    held_time = HeldTime(100.0)
    looks = [100.25, 100.5, 100.5, 100.75, 108.75, 109.0, 109.3, 109.61]
    assert [round(held_time.look(now), 6) for now in looks] == [0, 0, 0, 0, 7.75, 0, 0, 0.06]


def test_a_look_that_comes_in_time_adds_up_to_no_held_time() -> None:
    """A loop that is held for less than this is not noticed; leases are ended so much later instead."""
    assert TICK_S < UNNOTICED_S < LET_IN_S
    held_time = HeldTime(0.0)
    assert [held_time.look(number * TICK_S) for number in range(1, 9)] == [0.0] * 8


@pytest.mark.parametrize(
    ("expires_at", "extended"), [(105.0, 113.0), (100.01, 109.0), (99.0, 109.0), (108.5, 116.5)], ids=str
)
def test_a_held_loop_takes_no_time_of_a_lease_and_leaves_some_to_read_renewals(
    expires_at: float, extended: float
) -> None:
    """Held from 100.0 to 108.0."""
    lease = lease_of(expires_at=expires_at)
    lease.extend(8.0, 108.0)
    assert lease.expires_at == extended


@pytest.mark.parametrize("late_s", [0.06, 0.5, 5.0])
def test_a_lease_that_is_not_renewed_ends_also_when_the_loop_is_always_late(late_s: float) -> None:
    lease, now = lease_of(expires_at=10.0), 0.0
    held_time = HeldTime(now)
    while now < lease.expires_at:
        now += TICK_S + late_s
        if held_s := held_time.look(now):
            lease.extend(held_s, now)
        assert now < 10.0 * (TICK_S + late_s) / TICK_S + 10.0


def test_a_lease_is_let_in_once_for_each_renewal() -> None:
    lease = lease_of(expires_at=1.0)
    lease.extend(0.0, 2.0)
    assert lease.expires_at == 2.0 + LET_IN_S
    lease.extend(0.5, 3.0)
    assert lease.expires_at == 2.5 + LET_IN_S
    lease.renew(3.0)
    lease.extend(0.0, 14.0)
    assert lease.expires_at == 14.0 + LET_IN_S


# -- what was answered ----------------------------------------------------------------------------------------------


def books_with_answers(request_ids: list[str]) -> tuple[Books, list[StepPlan]]:
    """A lease, and its plans under these request ids with the digest b"1"."""
    sizes = {
        "num_blocks": 4,
        "num_host_blocks": 0,
        "block_size": 2,
        "max_sequences": 1,
        "max_sequence_tokens": 4,
        "vocab_size": 4,
    }
    books = Books(**sizes, model_fingerprint="f", policy="lru")
    books.open_lease("a", "", 30.0)
    counts = {"extend_ids": b"", "extend_token_counts": b"", "appends": None}
    plans = [books.plan("a", StepRequest(), 0.0, **counts, request_id=each, digest=b"1") for each in request_ids]
    return books, plans


def numbers(plans: list[StepPlan | None]) -> list[int | None]:
    return [None if plan is None else plan.step_number for plan in plans]


def test_an_answer_is_recalled_by_its_request_id_for_the_same_request_only() -> None:
    books, _ = books_with_answers(["r", ""])
    assert numbers([books.recall("a", each, b"1") for each in ("r", "s", "")]) == [1, None, None]
    assert books.recall("b", "r", b"1") is None
    with pytest.raises(CallRefused) as refused:
        books.recall("a", "r", b"2")
    assert refused.value.refusal.reason is Reason.REQUEST_ID_REUSED
    assert refused.value.refusal.metadata == {"request_id": "r"}


def test_the_oldest_answers_are_forgotten_first_and_all_with_the_lease() -> None:
    request_ids = [str(number) for number in range(REMEMBERED_PLANS + 1)]
    books, answers = books_with_answers(request_ids)
    assert numbers([books.recall("a", each, b"1") for each in request_ids]) == [None, *numbers(answers[1:])]
    books.close_lease("a")
    books.open_lease("a", "", 30.0)
    assert [books.recall("a", each, b"1") for each in request_ids] == [None] * len(request_ids)
