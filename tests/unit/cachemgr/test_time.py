"""Time in the books: every call reads a pool without expired pins and advice.

The servicer runs in process with a clock that the test sets. Nothing else comes between the clock and the call.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from planning import Admission, Retention, StepRequest, plan_step
from unit.cachemgr.test_looking import EPOCH, GEOMETRY, admit, make_ledger, settle

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr.blocks import BlockShare
from quire.cachemgr.catalog import Catalog, Registration
from quire.cachemgr.process import read_metrics
from quire.cachemgr.service.messages import int32_bytes
from quire.cachemgr.service.servicer import CacheServicer
from quire.serving.access import Identity, Role, set_caller
from quire.serving.interceptor import CallStatistics

LEASE = "a" * 32
PIN_TTL_S, ADVICE_TTL_S, LEASE_TTL_S = 5.0, 8.0, 60.0
PINNED, ADVISED = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]

CHANGING = {
    *("CreateLease", "RenewLease", "DeleteLease", "PlanStep", "PlanSteps", "AttachPool"),
    *("PinPrefix", "UnpinPrefix", "ResetPrefixCache"),
}
READING: dict[str, Any] = {
    "GetPool": pb.GetPoolRequest(),
    "ListPools": pb.ListPoolsRequest(),
    "WatchPools": pb.WatchPoolsRequest(),
    "ListLeases": pb.ListLeasesRequest(),
    "GetSequence": pb.GetSequenceRequest(lease_id=LEASE, sequence_id=2),
    "ListSequences": pb.ListSequencesRequest(),
    "ListBlocks": pb.ListBlocksRequest(),
    "ListTenants": pb.ListTenantsRequest(),
    "WatchBlocks": pb.WatchBlocksRequest(),
    "LookupPrefix": pb.LookupPrefixRequest(token_ids=PINNED),
    "ExplainPrefix": pb.ExplainPrefixRequest(token_ids=PINNED),
    "CheckAdmission": pb.CheckAdmissionRequest(admission=pb.Admission(sequence_id=9, token_ids=range(20, 32))),
    "ListPins": pb.ListPinsRequest(),
    "AuditPool": pb.AuditPoolRequest(),
    "GetStatistics": pb.GetStatisticsRequest(),
}
SHOW_PINS = {"ListBlocks", "ListTenants", "WatchBlocks", "CheckAdmission", "ListPins", "GetStatistics"}
SHOW_ADVICE = {"ListBlocks", "WatchBlocks"}


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class World:
    """A pool of 8 blocks: 2 are pinned, 2 are worth more than others for a time, a sequence has 1."""

    def __init__(self) -> None:
        self.clock = Clock()
        catalog = Catalog(1, policy="lru", verify=True)
        everything = BlockShare(0, GEOMETRY.num_blocks - 1, GEOMETRY.num_blocks - 1, 4)
        catalog.set_shares(lambda num_blocks: (everything, {}))
        geometry = replace(GEOMETRY, max_sequence_tokens=64)
        pool = catalog.register(Registration("pool", EPOCH, 0, 0, geometry, "nowhere"), signing_key=b"k")
        assert pool is not None
        self.catalog, self.pool, self.ledger = catalog, pool, pool.ledger
        catalog.open_lease(pool, LEASE, ttl_s=LEASE_TTL_S, now=self.clock.now)
        self.servicer = CacheServicer(catalog, clock=self.clock)
        self._cache(PINNED, [])
        self.ledger.pin_prefix(int32_bytes(PINNED), salt=b"", tenant="", ttl_s=PIN_TTL_S, now=self.clock.now)
        self._cache(ADVISED, [Retention(0, 9, ttl_s=ADVICE_TTL_S)])
        admit(self.ledger, LEASE, 2, 11)
        settle(self.ledger, LEASE)

    def _cache(self, tokens: list[int], retention: list[Retention]) -> None:
        admission = Admission(1, int32_bytes(tokens), retention=retention)
        for request in (StepRequest(admissions=[admission]), StepRequest(releases=[1])):
            assert not plan_step(self.ledger, LEASE, request, now=self.clock.now).has_refusals
            settle(self.ledger, LEASE)

    def answer(self, method: str) -> Any:
        """The first answer to a call."""

        async def call() -> Any:
            set_caller(Identity("", frozenset(Role)))
            answering = getattr(self.servicer, method)(READING[method], None)
            if not hasattr(answering, "__anext__"):
                return await answering
            try:
                return await anext(answering)
            finally:
                await answering.aclose()

        return asyncio.run(call())


@pytest.fixture(autouse=True)
def _wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)


@pytest.fixture
def world() -> World:
    return World()


def test_every_call_is_known_to_read_or_to_change() -> None:
    methods = pb.DESCRIPTOR.services_by_name["CacheService"].methods_by_name
    assert READING.keys() | CHANGING == set(methods)
    assert not READING.keys() & CHANGING


@pytest.mark.parametrize("method", READING)
@pytest.mark.parametrize("elapsed_s", [PIN_TTL_S, ADVICE_TTL_S])
def test_a_call_reads_no_pin_and_no_advice_whose_time_is_over(method: str, elapsed_s: float) -> None:
    early, late, planned = World(), World(), World()
    for world in (late, planned):
        world.clock.now += elapsed_s
    # What a plan does first.
    planned.ledger.advance(planned.clock.now)
    answer = late.answer(method)
    if method == "WatchBlocks":  # the other one has two changes more behind it
        answer.cursor = planned.answer(method).cursor
    assert answer == planned.answer(method)
    if method in (SHOW_PINS if elapsed_s == PIN_TTL_S else SHOW_ADVICE):
        early.clock.now += elapsed_s - 1.0
        assert early.answer(method) != answer


def test_a_dry_run_is_refused_for_a_pin_as_long_as_that_stands(world: World) -> None:
    def check() -> pb.AdmissionCheck:
        (check,) = world.answer("CheckAdmission").checks
        return check

    assert (check().refusal.reason, check().available_block_count) == ("OUT_OF_BLOCKS", 5)
    world.clock.now += PIN_TTL_S
    assert (check().accepted, check().available_block_count) == (True, 7)


def test_metrics_show_no_pin_whose_time_is_over(world: World) -> None:
    class Server:
        def statistics(self) -> CallStatistics:
            return CallStatistics(num_open=0, refused={})

    def num_pinned() -> float:
        server: Any = Server()
        families = {family.name: family for family in read_metrics(world.catalog, world.servicer, server)}
        return families["quire_kv_pinned_blocks"].samples[0].value

    assert num_pinned() == 2
    world.clock.now += PIN_TTL_S
    assert num_pinned() == 0


def test_listeners_are_told_of_an_end_and_of_nothing_else(world: World) -> None:
    told: list[float] = []
    world.catalog.listeners("pool")[lambda: told.append(world.clock.now)] = None
    begun = world.clock.now
    assert world.ledger.inspector.next_end() == begun + PIN_TTL_S
    for elapsed_s in (1.0, PIN_TTL_S, PIN_TTL_S + 1, ADVICE_TTL_S, ADVICE_TTL_S + 1, LEASE_TTL_S):
        world.clock.now = begun + elapsed_s
        world.answer("GetPool")
        world.answer("ListBlocks")
    assert told == [begun + PIN_TTL_S, begun + ADVICE_TTL_S]
    assert world.ledger.inspector.next_end() is None


def test_a_ledger_without_pins_and_advice_has_no_next_end() -> None:
    ledger = make_ledger(a="")
    admit(ledger, "a", 1, 1, 2, 3)
    ledger.advance(1e6)
    assert ledger.inspector.next_end() is None
