"""Which pool, which epoch, which lease: what happens when workers come, go and come back."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import Admission, StepOutcome, StepRequest, lease_numbers_of, plan_step, report_of

from quire.cache.v1 import attach_pb2
from quire.cachemgr.catalog import (
    MAX_TERM,
    AttachedPool,
    BegunEmpty,
    CarriedOver,
    Catalog,
    KeptMemory,
    NewEpoch,
    Registration,
    SavedPool,
)
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.service.attachments import Attachments

GEOMETRY = Geometry(
    block_size=2,
    num_blocks=9,
    block_bytes=64,
    max_sequences=4,
    max_sequence_tokens=16,
    vocab_size=10,
    model="m",
    model_fingerprint="f",
)
TERM = 5


def registration(
    pool: str = "a", epoch: int = 1, *, highest_term: int = 0, attached_term: int = 0, **told: Any
) -> Registration:
    return Registration(pool, epoch, highest_term, attached_term, GEOMETRY, f"unix:/{pool}", **told)


def attach(catalog: Catalog, key: bytes = b"key", **fields) -> AttachedPool:
    pool = catalog.register(registration(**fields), signing_key=key)
    assert isinstance(pool, AttachedPool)
    return pool


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(TERM, verify=True)


def refusal_of(call) -> Reason:
    with pytest.raises(CallRefused) as refused:
        call()
    return refused.value.refusal.reason


def test_pools_are_listed_by_name_and_found_by_it(catalog: Catalog) -> None:
    second, first = attach(catalog, pool="b"), attach(catalog, pool="a")
    assert catalog.pools() == [first, second]
    assert catalog.pool("b") is second


def test_no_name_means_the_only_pool(catalog: Catalog) -> None:
    assert refusal_of(lambda: catalog.pool("")) is Reason.POOL_NOT_FOUND
    only = attach(catalog)
    assert catalog.pool("") is only
    attach(catalog, pool="b")
    assert refusal_of(lambda: catalog.pool("")) is Reason.POOL_NOT_FOUND
    assert refusal_of(lambda: catalog.pool("c")) is Reason.POOL_NOT_FOUND


def test_a_worker_that_obeyed_a_newer_term_is_not_ruled(catalog: Catalog) -> None:
    call = lambda: catalog.register(registration(highest_term=TERM + 1), signing_key=b"k")  # noqa: E731
    assert refusal_of(call) is Reason.TERM_SUPERSEDED
    assert catalog.pools() == []
    attach(catalog, highest_term=TERM)


def test_a_worker_with_reports_that_are_refused_again_and_again_begins_a_new_epoch(catalog: Catalog) -> None:
    pool = attach(catalog)
    pool.num_refused_reports = 1
    assert attach(catalog) is pool, "it may have been a slip: the worker sends its reports again"
    pool.num_refused_reports = 2
    assert catalog.register(registration(), signing_key=b"k") == NewEpoch(TERM)
    pool.is_attached = False
    assert attach(catalog, epoch=2).num_refused_reports == 0


# -- a cachemgr with a clock that was set back ----------------------------------------------------------------------

HIGHER = TERM + 100


def register(catalog: Catalog, *, uptime_s: float, term_step: int = 1, **fields: Any) -> AttachedPool | NewEpoch:
    told = registration(**fields)
    return catalog.register(told, signing_key=b"k", uptime_s=uptime_s, term_step=term_step)


def test_a_cachemgr_that_started_later_rules_under_a_higher_term(catalog: Catalog) -> None:
    told = {"highest_term": HIGHER, "attached_term": HIGHER, "highest_term_age_s": 60.0}
    assert register(catalog, uptime_s=59.0, term_step=7, **told) == NewEpoch(HIGHER + 7)
    assert catalog.pools() == []
    # The worker has obeyed it, and may have lost the stream since.
    pool = attach(catalog, epoch=2, highest_term=HIGHER + 7)
    assert (pool.term, pool.terms) == (HIGHER + 7, (HIGHER + 7,))
    assert attach(catalog, pool="other").term == TERM, "a worker's term is for its own pool"
    pool.is_attached = False
    assert attach(catalog, epoch=2, highest_term=HIGHER + 7, attached_term=HIGHER + 7) is pool
    pool.is_attached = False
    assert attach(catalog, epoch=3).term == HIGHER + 7, "a new worker is ruled under no lower term than the one before"


def test_an_epoch_without_a_history_begins_at_once_under_the_higher_term(catalog: Catalog) -> None:
    pool = register(catalog, uptime_s=1.0, highest_term=HIGHER, highest_term_age_s=60.0)
    assert isinstance(pool, AttachedPool)
    assert pool.term == HIGHER + 1


@pytest.mark.parametrize("age_s", [0.0, 59.0, 60.0])
def test_a_cachemgr_that_may_have_started_earlier_is_superseded(catalog: Catalog, age_s: float) -> None:
    told = {"highest_term": HIGHER, "attached_term": HIGHER, "highest_term_age_s": age_s}
    assert refusal_of(lambda: register(catalog, uptime_s=60.0, **told)) is Reason.TERM_SUPERSEDED
    assert catalog.pools() == []


def test_a_cachemgr_that_has_ruled_the_pool_before_is_superseded(catalog: Catalog) -> None:
    pool = attach(catalog)
    pool.is_attached = False
    told = {"epoch": 2, "highest_term": HIGHER, "attached_term": HIGHER, "highest_term_age_s": 1.0}
    assert refusal_of(lambda: register(catalog, uptime_s=9.0, **told)) is Reason.TERM_SUPERSEDED
    assert catalog.pool("a") is pool


def test_of_two_cachemgrs_with_clocks_set_back_the_older_is_superseded() -> None:
    """Both hear of the worker while it has not obeyed either; then it obeys the later one."""
    first, second = Catalog(TERM, verify=True), Catalog(TERM, verify=True)
    told: dict[str, Any] = {"highest_term": HIGHER, "attached_term": HIGHER, "highest_term_age_s": 60.0}
    assert register(first, uptime_s=9.0, term_step=3, **told) == NewEpoch(HIGHER + 3)
    assert register(second, uptime_s=8.0, term_step=5, **told) == NewEpoch(HIGHER + 5)
    ruled = attach(second, epoch=2, highest_term=HIGHER + 5)
    told = {"epoch": 2, "highest_term": ruled.term, "attached_term": ruled.term, "highest_term_age_s": 1.0}
    assert refusal_of(lambda: register(first, uptime_s=9.0, **told)) is Reason.TERM_SUPERSEDED


def test_known_books_are_not_gone_on_with_under_a_higher_term(catalog: Catalog) -> None:
    pool = attach(catalog)
    pool.is_attached = False
    told = {"highest_term": HIGHER, "attached_term": TERM, "highest_term_age_s": 60.0}
    assert register(catalog, uptime_s=1.0, **told) == NewEpoch(HIGHER + 1)


def test_the_highest_term_of_all_has_none_above_it(catalog: Catalog) -> None:
    told = {"highest_term": MAX_TERM, "highest_term_age_s": 60.0}
    assert refusal_of(lambda: register(catalog, uptime_s=1.0, **told)) is Reason.TERM_SUPERSEDED


# -- epochs --------------------------------------------------------------------------------------------------------


def test_an_epoch_that_another_cachemgr_has_ruled_meanwhile_is_a_strangers(catalog: Catalog) -> None:
    """It attached here, the answer was lost, an older cachemgr took it and ran steps, and now it is back."""
    pool = attach(catalog)
    pool.is_attached = False
    assert catalog.register(registration(highest_term=TERM - 1, attached_term=TERM - 1), signing_key=b"k") == NewEpoch(
        TERM
    )
    assert not pool.is_attached
    assert attach(catalog, attached_term=TERM) is pool
    pool.is_attached = False
    assert attach(catalog) is pool, "the answer was lost, and nobody else heard of it"


def test_a_worker_that_fences_another_pools_lease_changes_nothing(catalog: Catalog) -> None:
    first, second = attach(catalog), attach(catalog, pool="b")
    catalog.open_lease(first, "lease", ttl_s=10, now=0.0)
    catalog.lease_fenced(second, "lease")
    assert catalog.pool_of("lease") is first
    assert catalog.tenant_of("lease") == ""
    catalog.lease_fenced(first, "lease")
    assert refusal_of(lambda: catalog.pool_of("lease")) is Reason.LEASE_NOT_FOUND


def test_a_second_worker_of_the_same_name_is_refused_while_the_first_is_attached(catalog: Catalog) -> None:
    first = attach(catalog)
    call = lambda: catalog.register(registration(epoch=2), signing_key=b"k")  # noqa: E731
    assert refusal_of(call) is Reason.POOL_ALREADY_ATTACHED
    assert catalog.pool("a") is first
    assert first.ledger.epoch == 1


def test_the_same_worker_may_come_back_before_its_old_stream_is_found_dead(catalog: Catalog) -> None:
    pool = attach(catalog, key=b"first")
    assert catalog.register(registration(attached_term=TERM, highest_term=TERM), signing_key=b"second") is pool
    assert pool.signing_key == b"first"


def test_a_worker_that_is_back_keeps_its_books_and_its_key(catalog: Catalog) -> None:
    pool = attach(catalog, key=b"first")
    catalog.open_lease(pool, "lease", ttl_s=10.0, now=0.0)
    pool.is_attached = False
    again = catalog.register(registration(attached_term=TERM, highest_term=TERM), signing_key=b"second")
    assert again is pool
    assert (pool.is_attached, pool.signing_key) == (True, b"first")
    assert catalog.pool_of("lease") is pool


def test_a_stranger_with_a_history_has_to_begin_a_new_epoch(catalog: Catalog) -> None:
    assert catalog.register(registration(epoch=9, attached_term=3), signing_key=b"k") == NewEpoch(TERM)
    assert catalog.pools() == []
    pool = attach(catalog)
    pool.is_attached = False
    assert catalog.register(registration(epoch=9, attached_term=3), signing_key=b"k") == NewEpoch(TERM)
    assert catalog.pool("a") is pool


def test_open_leases_go_on_in_a_new_epoch_without_their_sequences(catalog: Catalog) -> None:
    pool = attach(catalog)
    catalog.open_lease(pool, "open", ttl_s=10.0, now=0.0, tenant="acme")
    catalog.open_lease(pool, "ended", ttl_s=10.0, now=0.0)
    admission = Admission(1, bytes(12))
    plan = plan_step(pool.ledger, "open", StepRequest(admissions=[admission]), epoch=1, now=1.0, request_id="r")
    assert plan.step_number == 1
    pool.ledger.end_lease("ended")
    pool.is_attached = False

    fresh = attach(catalog, key=b"new", epoch=2)
    assert fresh is not pool
    assert (fresh.signing_key, fresh.ledger.epoch) == (b"new", 2)
    assert catalog.pool_of("open") is fresh
    assert refusal_of(lambda: catalog.pool_of("ended")) is Reason.LEASE_NOT_FOUND
    lease = fresh.ledger.inspector.lease("open")
    assert (lease.tenant, lease.is_ending, lease.expires_at) == ("acme", False, 11.0)
    assert fresh.ledger.probe.sequence_ids("open") == []
    old = lambda: plan_step(fresh.ledger, "open", StepRequest(), epoch=1, now=2.0, request_id="r")  # noqa: E731
    assert refusal_of(old) is Reason.EPOCH_CHANGED
    again = plan_step(fresh.ledger, "open", StepRequest(admissions=[admission]), epoch=2, now=2.0, request_id="r")
    assert (again.step_number, again.admitted_cached_counts) == (1, [0])
    assert fresh.ledger.expire_leases(12.0) == ["open"]


def test_a_fenced_lease_is_gone(catalog: Catalog) -> None:
    pool = attach(catalog)
    catalog.open_lease(pool, "lease", ttl_s=10.0, now=0.0)
    pool.ledger.end_lease("lease")
    assert catalog.pool_of("lease") is pool
    catalog.lease_fenced(pool, "lease")
    catalog.lease_fenced(pool, "lease")
    assert refusal_of(lambda: catalog.pool_of("lease")) is Reason.LEASE_NOT_FOUND


# -- what a cachemgr before has kept ------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> SavedPool:
    """A pool with three leases, one of which has ended; step 1 of the first is reported, step 2 is in flight."""
    before = Catalog(TERM, verify=True, begin_state=lambda pool: tmp_path)
    pool = attach(before, key=b"kept")
    for lease_id in ("lease", "other", "ended"):
        before.open_lease(pool, lease_id, ttl_s=10.0, now=0.0, tenant="t")
    pool.ledger.end_lease("ended")
    plan = plan_step(
        pool.ledger, "lease", StepRequest(admissions=[Admission(1, bytes(12))]), epoch=1, now=1.0, request_id="r"
    )
    pool.ledger.settle(
        report_of(
            *("lease", 1, StepOutcome.COMPUTED),
            seq_ids=plan.run_seq_ids,
            token_counts=[3],
            sampled_ids=[1],
            sampled_tokens=[5],
            report_number=1,
        )
    )
    plan_step(pool.ledger, "lease", StepRequest(extend_ids=[1], extend_token_counts=[1]), epoch=1, now=2.0)
    return SavedPool("a", 1, GEOMETRY, "unix:/a", b"kept", (TERM, TERM + 1))


@pytest.fixture
def recovered(saved: SavedPool, tmp_path: Path) -> Catalog:
    catalog = Catalog(TERM + 1, verify=True)
    catalog.recover(saved, tmp_path, now=100.0)
    return catalog


def test_what_was_kept_goes_on(recovered: Catalog) -> None:
    pool = recovered.pool("a")
    assert (pool.is_attached, pool.acknowledged_report, pool.signing_key) == (False, 1, b"kept")
    assert recovered.pool_of("other") is pool
    leases = {
        lease.lease_id: (lease.is_ending, lease.tenant, lease.expires_at) for lease in pool.ledger.inspector.leases()
    }
    assert leases == {
        "ended": (True, "t", 110.0),
        "lease": (False, "t", 110.0),
        "other": (False, "t", 110.0),
    }
    assert lease_numbers_of(pool.ledger, "lease")[:3] == (3, 1, 1)
    again = plan_step(
        pool.ledger, "lease", StepRequest(admissions=[Admission(1, bytes(12))]), epoch=1, now=101.0, request_id="r"
    )
    assert again.step_number == 1
    assert pool.ledger.expire_leases(110.5) == ["other"], "the plan has renewed its lease"


@pytest.mark.parametrize("attached_term", [0, TERM, TERM + 1])
def test_a_worker_that_those_have_ruled_who_wrote_it_is_back(recovered: Catalog, attached_term: int) -> None:
    pool = attach(recovered, attached_term=attached_term, next_steps={"lease": 3, "other": 1}, acknowledged_report=1)
    assert pool is recovered.pool("a")
    assert pool.is_attached


@pytest.mark.parametrize(
    "told",
    [
        {"attached_term": TERM - 1},
        {"attached_term": TERM, "next_steps": {"lease": 4}},
        {"attached_term": TERM, "next_steps": {"unknown": 1}},
        {"attached_term": TERM, "acknowledged_report": 2},
    ],
)
def test_a_worker_that_has_done_more_than_was_kept_begins_a_new_epoch(recovered: Catalog, told: dict[str, Any]) -> None:
    assert recovered.register(registration(**told), signing_key=b"k") == NewEpoch(TERM + 1)
    assert not recovered.pool("a").is_attached


def test_what_is_not_whole_is_not_recovered(saved: SavedPool, tmp_path: Path) -> None:
    log = tmp_path / "log-0"
    log.write_bytes(log.read_bytes()[:-1])
    catalog = Catalog(TERM + 1)
    with pytest.raises(OSError, match="torn or damaged"):
        catalog.recover(saved, tmp_path, now=0.0)
    assert catalog.pools() == []
    assert refusal_of(lambda: catalog.pool_of("lease")) is Reason.LEASE_NOT_FOUND


# -- memory that outlives its worker --------------------------------------------------------------------------------

ALL_WHOLE = b"\xff\xff"
PROMPT = array("i", [1, 2, 3, 4, 5]).tobytes()


def kept(**told: Any) -> dict[str, Any]:
    """The fields of a registration of a worker that has found the memory of epoch 1."""
    fields = {"epoch": 1, "attached_term": TERM, "num_accepted_steps": 1, "whole_blocks": ALL_WHOLE}
    return {"epoch": 2, "memory_id": "m", "kept_memory": KeptMemory(**fields | told)}


@pytest.fixture
def dead(catalog: Catalog) -> AttachedPool:
    """A pool with two cached blocks of a sequence, of a worker that has died."""
    pool = attach(catalog, memory_id="m")
    catalog.open_lease(pool, "lease", ttl_s=10.0, now=0.0)
    step = plan_step(pool.ledger, "lease", StepRequest(admissions=[Admission(1, PROMPT)]), now=0.0)
    report = report_of(
        "lease", step.step_number, seq_ids=[1], token_counts=[5], sampled_ids=[1], sampled_tokens=[6], report_number=1
    )
    pool.ledger.settle(report)
    pool.is_attached = False
    return pool


def num_cached(pool: AttachedPool) -> int:
    return pool.ledger.inspector.num_cached_tokens(PROMPT, salt=b"")


def test_published_blocks_outlive_the_worker_with_its_memory(catalog: Catalog, dead: AttachedPool) -> None:
    catalog.open_lease(dead, "ended", ttl_s=10.0, now=0.0)
    dead.ledger.end_lease("ended")
    pool = attach(catalog, b"new key", **kept())
    assert (pool.memory, num_cached(pool)) == (CarriedOver(num_kept=2, num_dropped=0), 4)
    assert (pool.ledger.epoch, pool.signing_key, pool.acknowledged_report) == (2, b"new key", 0)
    assert plan_step(pool.ledger, "lease", StepRequest(admissions=[Admission(1, PROMPT)]), now=0.0).step_number == 1
    assert catalog.tenant_of("ended") is None
    assert attach(catalog, **kept()) is pool, "the same registration on another stream changes nothing"


def test_blocks_that_the_worker_does_not_find_whole_are_dropped(catalog: Catalog, dead: AttachedPool) -> None:
    pool = attach(catalog, **kept(whole_blocks=b"\x02"))
    assert (pool.memory, num_cached(pool)) == (CarriedOver(num_kept=1, num_dropped=1), 2)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"epoch": 3}, "the books are of epoch 1, the memory of 3"),
        ({"attached_term": TERM + 1}, "another cachemgr, of term 6, has ruled the epoch since"),
        ({"num_accepted_steps": 0}, "0 steps ran on the memory; by the books 1 were reported and 1 planned"),
        ({"num_accepted_steps": 2}, "2 steps ran on the memory; by the books 1 were reported and 1 planned"),
    ],
)
def test_memory_and_books_that_do_not_fit_begin_empty(
    catalog: Catalog, dead: AttachedPool, told: dict[str, Any], reason: str
) -> None:
    pool = attach(catalog, **kept(**told))
    assert (pool.memory, num_cached(pool)) == (BegunEmpty(reason), 0)
    assert pool.ledger.inspector.find_lease("lease") is not None


def test_other_memory_another_geometry_and_reports_that_did_not_fit_begin_empty(
    catalog: Catalog, dead: AttachedPool
) -> None:
    other = attach(catalog, **kept() | {"memory_id": "another holder's"})
    assert other.memory == BegunEmpty("the books are of memory 'm', the worker has \"another holder's\"")
    other.is_attached = False
    told = registration(**kept(epoch=2, num_accepted_steps=0) | {"epoch": 3, "memory_id": "another holder's"})
    pool = catalog.register(replace(told, geometry=replace(GEOMETRY, model_fingerprint="g")), signing_key=b"k")
    assert isinstance(pool, AttachedPool)
    assert pool.memory == BegunEmpty("the pool has another geometry or model")
    pool.is_attached = False
    pool.num_refused_reports = 2
    again = replace(registration(**kept(epoch=3, num_accepted_steps=0)), epoch=4, memory_id="another holder's")
    refused = catalog.register(replace(again, geometry=pool.ledger.geometry), signing_key=b"k")
    assert isinstance(refused, AttachedPool)
    assert refused.memory == BegunEmpty("the worker's reports did not fit the books")


def test_memory_without_books_begins_empty(catalog: Catalog) -> None:
    assert attach(catalog, **kept()).memory == BegunEmpty("there are no books of the pool")


def test_an_attached_worker_is_not_replaced_by_one_on_its_memory(catalog: Catalog, dead: AttachedPool) -> None:
    dead.is_attached = True
    assert refusal_of(lambda: attach(catalog, **kept())) is Reason.POOL_ALREADY_ATTACHED
    assert num_cached(dead) == 4


def test_messages_of_the_dead_worker_do_not_reach_the_books_that_go_on(catalog: Catalog, dead: AttachedPool) -> None:
    pool = attach(catalog, **kept())
    plan_step(pool.ledger, "lease", StepRequest(admissions=[Admission(1, PROMPT)]), now=0.0)
    late = report_of("lease", 1, seq_ids=[1], token_counts=[5], sampled_ids=[1], sampled_tokens=[6], report_number=2)
    fenced = attach_pb2.AttachPoolRequest(lease_fenced=attach_pb2.LeaseFenced(lease_id="lease"))
    for message in (late, fenced):
        Attachments(catalog)._hear(dead, message)
    assert pool.ledger.inspector.last_report == 0
    assert pool.ledger.inspector.find_lease("lease") is not None
