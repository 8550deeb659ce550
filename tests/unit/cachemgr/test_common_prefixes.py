"""Prefixes that several sequences have: when they are looked up, taken, counted, and lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import Admission, CacheUse, PlanItem, Planned, Retention, StepOutcome
from unit.cachemgr.test_ledger import EPOCH, Bench, geometry, pack, reasons

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import Ledger
from quire.cachemgr.errors import Reason
from quire.cachemgr.geometry import LayerGroup
from quire.cachemgr.service.messages import statistics_of

PREFIX = (1, 2, 3, 4)
"""Two blocks."""


def lru(**sizes: int) -> Bench:
    """A bench on a pool that evicts the block used longest ago."""
    return Bench(Ledger("pool", EPOCH, geometry(**sizes), policy="lru", verify=True))


def cache(bench: Bench, *tokens: int) -> None:
    """Compute tokens, and let their sequence go: full blocks of them can be found."""
    bench.admit(99, *tokens)
    bench.settle()
    bench.plan(releases=[99])
    bench.settle()


def found(bench: Bench, *tokens: int) -> int:
    return bench.ledger.inspector.num_cached_tokens(pack(*tokens), salt=b"")


def starts_of(plan: Planned) -> dict[int, int]:
    return dict(zip(plan.run_seq_ids, plan.run_starts, strict=True))


def test_admissions_that_are_refused_count_no_hits() -> None:
    """vLLM and Megatron-LM counted the prefix each time that a full pool refused it."""
    bench = lru(num_usable=4)
    cache(bench, *PREFIX, 5)
    bench.admit(1, 7, 8, 9)
    bench.settle()
    before = statistics_of(bench.ledger)
    for _ in range(100):
        assert reasons(bench.admit(2, *PREFIX, 5)) == [(PlanItem.ADMISSION, 2, Reason.OUT_OF_BLOCKS)]
        bench.settle()
    refused = statistics_of(bench.ledger)
    for name in ("admission_count", "admitted_token_count", "cached_token_count", "resumed_cached_token_count"):
        assert getattr(refused, name) == getattr(before, name), name
    bench.plan(releases=[1])
    bench.settle()
    assert bench.admit(2, *PREFIX, 5).admitted_cached_counts == [4]
    assert statistics_of(bench.ledger).cached_token_count == before.cached_token_count + 4


def test_a_found_prefix_is_taken_before_blocks_are_evicted_for_what_follows() -> None:
    """The prefix was used longest ago, and the pool has room for it and for what follows, and for no block more."""
    bench = lru(num_usable=6)
    cache(bench, *PREFIX)
    cache(bench, 11, 12, 13, 14, 15, 16, 17, 18)
    assert bench.counts() == (0, 6, 0, 0)
    both = [Admission(1, pack(*PREFIX, 5, 6, 7)), Admission(2, pack(*PREFIX, 8, 9, 10))]
    plan = bench.plan(admissions=both)
    assert plan.refusals == []
    assert plan.admitted_cached_counts == [4, 4]
    assert starts_of(plan) == {1: 4, 2: 4}
    assert bench.table(1)[:2] == bench.table(2)[:2]
    assert bench.counts() == (0, 0, 6, 0)


def test_a_run_begins_behind_what_its_own_plan_found() -> None:
    """A lookup before the plan, and the expectation of a client, say nothing of what the plan finds."""
    bench = lru(num_usable=4)
    cache(bench, *PREFIX)
    assert found(bench, *PREFIX, 5) == 4
    taken = Admission(1, pack(21, 22, 23, 24, 25, 26, 27, 28))
    bench.plan(admissions=[taken])
    bench.plan(releases=[1], admissions=[Admission(2, pack(*PREFIX, 5))])
    bench.settle()
    bench.settle()
    plan = bench.admit(2, *PREFIX, 5)
    assert plan.admitted_cached_counts == [0]
    assert starts_of(plan) == {2: 0}


@pytest.mark.parametrize("of", ["a step that fails", "a sequence that is released", "a lease that ends"])
def test_the_end_of_one_that_computes_a_common_prefix_costs_the_other_nothing(of: str) -> None:
    """Two compute one prefix at once, and the first of them ends before its step does."""
    bench = lru(num_usable=12)
    bench.admit(1, *PREFIX, 5)
    other = "a" if of == "a sequence that is released" else "b"
    bench.admit(2, *PREFIX, 6, lease_id=other)
    if other == "a":
        assert bench.table(1)[:2] == bench.table(2)[:2], "they share the blocks that are being filled"
        bench.plan(releases=[1])
        bench.settle()
    elif of == "a step that fails":
        bench.report(1, StepOutcome.FAILED)
    else:
        bench.ledger.end_lease("a")
        bench.ledger.lease_fenced("a")
    assert found(bench, *PREFIX, 7) == (4 if other == "a" else 0), "what was not computed is not found"
    bench.settle(lease_id=other)
    assert bench.sequence(2, other).num_computed == 5
    plan = bench.admit(3, *PREFIX, 8, lease_id="b")
    assert plan.admitted_cached_counts == [4]
    assert bench.table(3, "b")[:2] == bench.table(2, other)[:2]


# -- layer groups with windows --------------------------------------------------------------------------------------

WINDOW = 8
TURN, ANSWER = tuple(range(10, 34)), tuple(range(40, 64))


def windowed() -> Bench:
    """A pool for a full group and a windowed one."""
    groups = (LayerGroup(LayerGroupKind.FULL, 0, 1), LayerGroup(LayerGroupKind.SLIDING, WINDOW, 1))
    sizes = replace(geometry(num_usable=80, max_tokens=96, max_sequences=64), layer_groups=groups)
    return Bench(Ledger("pool", EPOCH, sizes, policy="lru", verify=True))


def converse(bench: Bench, keeps: str) -> None:
    """Compute a turn and its answer, and let them go; then evict a third of what is cached."""
    retention = [Retention(len(TURN), priority=9)] if keeps == "a priority" else []
    bench.plan(admissions=[Admission(1, pack(*TURN), retention=retention)])
    bench.settle()
    if keeps == "a pin":
        bench.ledger.pin_prefix(pack(*TURN), salt=b"", tenant="", ttl_s=60.0, now=1.0)
    bench.extend(1, count=1 + len(ANSWER), append=ANSWER)
    bench.settle()
    bench.extend(1)  # blocks behind the window are let go
    bench.settle()
    bench.plan(releases=[1])
    bench.settle()
    num_cached, seq_ids = bench.counts()[1], iter(range(2, 64))
    while bench.counts()[1] > num_cached * 2 // 3:
        bench.admit(next(seq_ids), 7, cache_use=CacheUse.NONE)
        bench.settle()


@pytest.mark.parametrize("keeps", ["nothing", "a priority", "a pin"])
def test_the_window_at_the_end_of_a_turn_is_there_as_long_as_it_is_kept(keeps: str) -> None:
    """vLLM#57610: a prompt that differs before the last window finds nothing, though the layers without one have it."""
    bench = windowed()
    converse(bench, keeps)
    whole = (*TURN, 9, *ANSWER)
    turn = 0 if keeps == "nothing" else len(TURN)
    assert found(bench, *TURN, 0) == turn
    assert found(bench, *whole, 0) >= turn
    why = bench.ledger.inspector.explain(pack(*TURN, 0), salt=b"", tenant="", with_other_tenants=False)
    assert (why.reason, why.missing and why.missing[1]) == (("none", None) if turn else ("window_evicted", 1))
