"""Drafts as messages: the forms that are refused, and what calls show of drafts in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planning import Admission, Planned, StepOutcome, StepRequest, lease_numbers_of, plan_step, report_of, sequence_of

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr._core import Ledger, PlanRequest, StepReport
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.metrics import COUNTERS
from quire.cachemgr.service import messages

MAX_DRAFTS = 4
WIRE_GEOMETRY: dict[str, Any] = {
    "block_size_tokens": 2,
    "block_count": 17,
    "block_bytes": 1,
    "max_sequence_count": 16,
    "max_sequence_tokens": 64,
    "vocabulary_size": 100,
    "max_draft_count": MAX_DRAFTS,
}


def geometry(**fields: Any) -> Geometry:
    return messages.decode_geometry(attach_pb2.PoolGeometry(**WIRE_GEOMETRY | fields))


@pytest.fixture
def ledger() -> Ledger:
    """Sequences 1 and 2 of three tokens each, and the token 9 that was sampled after them."""
    return drafting(geometry())


def drafting(sizes: Geometry) -> Ledger:
    ledger = Ledger("pool", 1, sizes, verify=True)
    ledger.open_lease("a", ttl_s=10.0, now=0.0)
    plan(ledger, admissions=[Admission(seq_id, pack(seq_id, 2, 3)) for seq_id in (1, 2)])
    ledger.settle(report_of("a", 1, seq_ids=[1, 2], token_counts=[3, 3], sampled_ids=[1, 2], sampled_tokens=[9, 9]))
    return ledger


def pack(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def plan(ledger: Ledger, **items: Any) -> Planned:
    return plan_step(ledger, "a", StepRequest(**items), now=0.0)


def draft(ledger: Ledger, **drafts: list[int]) -> Planned:
    """Extends sequences, named s1 and s2, with drafts."""
    by_id = {int(name[1:]): tokens for name, tokens in drafts.items()}
    counts = [1 + len(tokens) for tokens in by_id.values()]
    return plan(ledger, extend_ids=list(by_id), extend_token_counts=counts, drafts=by_id)


def refusal_of(ledger: Ledger, call: Callable[[], object]) -> str:
    """The message of an INVALID_ARGUMENT that changes nothing."""
    before = ledger.probe.state(None), lease_numbers_of(ledger, "a")
    with pytest.raises(CallRefused) as refused:
        call()
    assert (ledger.probe.state(None), lease_numbers_of(ledger, "a")) == before
    refusal = refused.value.refusal
    assert refusal.reason is Reason.INVALID_ARGUMENT
    assert {"field", "value", "limit"} <= set(refusal.metadata)
    return refusal.message


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        (
            {"token_counts": [2, 1], "draft_token_counts": [1], "draft_token_ids": [9]},
            "extends.draft_token_counts is 1 entries; must be 2 entries, as extends.sequence_ids",
        ),
        (
            {"token_counts": [1, 1], "draft_token_ids": [9]},
            "extends.draft_token_counts is 0 entries; must be 2 entries, as extends.sequence_ids",
        ),
        (
            {"token_counts": [3, 1], "draft_token_counts": [2, 0], "draft_token_ids": [9]},
            "extends.draft_token_counts is 2 in sum; must be the 1 draft_token_ids, none negative",
        ),
        (
            {"token_counts": [3, 1], "draft_token_counts": [2, -1], "draft_token_ids": [9]},
            "extends.draft_token_counts is 1 in sum; must be the 1 draft_token_ids, none negative",
        ),
        (
            {"token_counts": [6, 1], "draft_token_counts": [5, 0], "draft_token_ids": [9] * 5},
            "extends.draft_token_counts is 5; must be 0 to 4",
        ),
        (
            {"token_counts": [1, 1], "draft_token_counts": [1, 0], "draft_token_ids": [9]},
            "extends.token_counts is 1; must be 2, 1 more than the drafts",
        ),
        (
            {"token_counts": [1, 4], "draft_token_counts": [0, 2], "draft_token_ids": [9, 9]},
            "extends.token_counts is 4; must be 3, 1 more than the drafts",
        ),
        (
            {
                "token_counts": [1, 2],
                "draft_token_counts": [0, 1],
                "draft_token_ids": [9],
                "append_token_counts": [0, 1],
                "append_token_ids": [9],
            },
            "extends.append_token_counts is 1; must be 0 of a sequence with drafts",
        ),
    ],
)
def test_a_plan_with_malformed_drafts_is_refused(ledger: Ledger, extends: dict[str, Any], message: str) -> None:
    request = cache_service_pb2.PlanStepRequest(lease_id="a", epoch=1, extends={"sequence_ids": [1, 2], **extends})
    told = refusal_of(ledger, lambda: ledger.plan(PlanRequest(request.SerializeToString()), now=0.0))
    assert told == message


def test_a_pool_without_drafts_refuses_them() -> None:
    ledger = drafting(geometry(max_draft_count=0))
    told = refusal_of(ledger, lambda: draft(ledger, s1=[9]))
    assert told == "extends.draft_token_counts is 1; must be 0 to 0"
    extends = {"sequence_ids": [1], "token_counts": [1], "draft_token_counts": [0]}
    request = cache_service_pb2.PlanStepRequest(lease_id="a", epoch=1, extends=extends)
    plan = Planned(ledger.plan(PlanRequest(request.SerializeToString()), now=0.0))
    assert (plan.run_seq_ids, plan.run_draft_counts, plan.refusals) == ([1], [], [])


@pytest.mark.parametrize(
    ("drafts", "reason"),
    [([100], Reason.TOKEN_OUT_OF_RANGE), ([0, -1], Reason.TOKEN_OUT_OF_RANGE), ([0, 99], None)],
)
def test_drafts_are_of_the_vocabulary(ledger: Ledger, drafts: list[int], reason: Reason | None) -> None:
    plan = draft(ledger, s1=drafts, s2=[9])
    assert [(item.seq_id, item.refusal.reason) for item in plan.refusals] == ([(1, reason)] if reason else [])
    assert plan.run_seq_ids == ([2] if reason else [1, 2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sampled_token_counts": [2, 1]},
            "step_report.sampled_token_counts is 3 in sum; must be the 4 sampled_token_ids, each at least 1",
        ),
        (
            {"sampled_token_counts": [4, 0]},
            "step_report.sampled_token_counts is 4 in sum; must be the 4 sampled_token_ids, each at least 1",
        ),
        (
            {"sampled_token_counts": [4]},
            "step_report.sampled_token_counts is 1 entries; must be 2 entries, as sampled_sequence_ids",
        ),
        (
            {"sampled_token_counts": []},
            "step_report.sampled_token_ids is 4 entries; must be 2 entries, as sampled_sequence_ids",
        ),
        (
            {"sampled_token_counts": [2, 2]},
            "step_report.sampled_token_counts is 2 for sequence 1; must be 3, 1 more than its accepted drafts",
        ),
        (
            {"sampled_token_ids": [8, 9, 9, 9]},
            "step_report.sampled_token_ids is other tokens for sequence 1; must be its accepted drafts, and one token "
            "after them",
        ),
        ({"computed_token_counts": [7, 4]}, "step_report.sequence_ids is other runs; must be the runs of step 2"),
        ({"computed_token_counts": [3, 4]}, "step_report.sequence_ids is other runs; must be the runs of step 2"),
    ],
)
def test_a_report_that_does_not_fit_the_drafts_is_refused(ledger: Ledger, fields: dict[str, Any], message: str) -> None:
    draft(ledger, s1=[9, 9], s2=[8])
    right = {
        "lease_id": "a",
        "step_number": 2,
        "outcome": StepOutcome.COMPUTED.value,
        "sequence_ids": [1, 2],
        "computed_token_counts": [6, 4],
        "sampled_sequence_ids": [1, 2],
        "sampled_token_ids": [9, 9, 9, 9],
        "sampled_token_counts": [3, 1],
    }
    wrong = attach_pb2.StepReport(**right | fields)
    assert refusal_of(ledger, lambda: ledger.settle(StepReport(wrong.SerializeToString()))) == message
    ledger.settle(StepReport(attach_pb2.StepReport(**right).SerializeToString()))
    assert [sequence_of(ledger, "a", seq_id).num_tokens for seq_id in (1, 2)] == [7, 5]


def test_drafts_in_flight_are_shown_and_counted(ledger: Ledger) -> None:
    plan = draft(ledger, s1=[9, 9], s2=[8])
    assert (plan.run_starts, plan.run_token_counts, plan.run_draft_counts) == ([3, 3], [3, 2], [2, 1])
    assert plan.answer.given_run_indexes == plan.given_run_indexes == [0, 1]

    def shown(seq_id: int) -> cache_service_pb2.Sequence:
        return messages.encode_sequence(sequence_of(ledger, "a", seq_id), "a", with_blocks=False)

    sequence = shown(1)
    assert (sequence.draft_token_count, sequence.token_count) == (2, 7)
    assert (sequence.computed_token_count, sequence.scheduled_token_count) == (3, 6)
    ledger.settle(
        report_of(
            *("a", 2, StepOutcome.COMPUTED),
            seq_ids=[1, 2],
            token_counts=[5, 4],
            sampled_ids=[2, 1],
            sampled_tokens=[7, 9, 6],
            sampled_counts=[1, 2],
        )
    )
    sequence = shown(1)
    assert (sequence.draft_token_count, sequence.token_count) == (0, 6)
    assert (sequence.computed_token_count, sequence.scheduled_token_count) == (5, 5)
    assert (shown(2).token_count, ledger.probe.tokens("a", 1)) == (5, pack(1, 2, 3, 9, 9, 6))
    statistics = messages.statistics_of(ledger)
    read = {name: value_of(statistics) for name, (_, value_of) in COUNTERS.items() if "draft" in name}
    assert read == {"quire_cache_drafted_tokens": 3, "quire_cache_accepted_draft_tokens": 1}


def test_a_lease_that_ends_with_drafts_in_flight_gives_its_blocks_back(ledger: Ledger) -> None:
    draft(ledger, s1=[9, 9, 9, 9])
    assert ledger.expire_leases(11.0) == ["a"]
    ledger.lease_fenced("a")
    counts = messages.counts_of(ledger)
    assert (counts.active_count, counts.retired_count, counts.free_count + counts.cached_count) == (0, 0, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_draft_count": 65}, "geometry.max_draft_count is 65; must be 0 to 64"),
        ({"max_draft_count": -1}, "geometry.max_draft_count is -1; must be 0 to 64"),
        (
            {"max_draft_count": 1, "has_recurrent_state": True},
            "geometry.max_draft_count is 1; must be 0 to 0",
        ),
    ],
)
def test_a_limit_of_drafts_that_no_worker_has_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CallRefused) as refused:
        geometry(**fields)
    assert refused.value.refusal.message == message


def test_an_epoch_keeps_its_limit_of_drafts() -> None:
    known = geometry()
    assert messages.encode_geometry(known).max_draft_count == MAX_DRAFTS
    with pytest.raises(CallRefused) as refused:
        messages.require_same_geometry(attach_pb2.PoolGeometry(**WIRE_GEOMETRY | {"max_draft_count": 3}), known)
    assert refused.value.refusal.message == "geometry.max_draft_count is 3; must be 4, as this epoch was registered"
