"""Leases by themselves: until when, and what they remember."""

from __future__ import annotations

import pytest

from quire.cachemgr._core import Books, StepPlan
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.leases import REMEMBERED_PLANS, SPARE_ENTRIES, ExpiryQueue, Lease, LeaseState
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


# -- what was answered ----------------------------------------------------------------------------------------------


def plans(count: int) -> list[StepPlan]:
    sizes = {"num_blocks": 4, "block_size": 2, "max_sequences": 1, "max_sequence_tokens": 4, "vocab_size": 4}
    books = Books(**sizes, model_fingerprint="f", policy="lru")
    books.open_lease("a", "")
    counts = {"extend_ids": b"", "extend_token_counts": b"", "appends": None}
    return [books.plan("a", StepRequest(), 0.0, **counts) for _ in range(count)]


def test_an_answer_is_recalled_by_its_request_id_for_the_same_request_only() -> None:
    lease, [plan, other] = lease_of(), plans(2)
    lease.remember("r", b"1", plan)
    lease.remember("", b"2", other)
    assert (lease.recall("r", b"1"), lease.recall("s", b"1"), lease.recall("", b"2")) == (plan, None, None)
    with pytest.raises(CallRefused) as refused:
        lease.recall("r", b"2")
    assert refused.value.refusal.reason is Reason.REQUEST_ID_REUSED


def test_the_oldest_answers_are_forgotten_first_and_all_when_the_lease_starts_anew() -> None:
    lease, answers = lease_of(), plans(REMEMBERED_PLANS + 1)
    for number, plan in enumerate(answers):
        lease.remember(str(number), b"1", plan)
    recalled = [lease.recall(str(number), b"1") for number in range(len(answers))]
    assert recalled == [None, *answers[1:]]
    lease.start_anew()
    assert [lease.recall(str(number), b"1") for number in range(len(answers))] == [None] * len(answers)
