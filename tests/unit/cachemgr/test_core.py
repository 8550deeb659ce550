"""The core's Python interface: bytes of proto messages, and errors as exceptions."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from random import Random
from typing import Any

import pytest
from planning import (
    Admission,
    Breakpoint,
    Fork,
    Planned,
    Restore,
    StepOutcome,
    StepRequest,
    Trim,
    body_of,
    plan_step,
    report_of,
)

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import POLICIES, Ledger, PlanRequest, StepReport, answer_on_stream, root_hash
from quire.cachemgr.errors import BrokenInvariant, CallRefused, Reason
from quire.cachemgr.geometry import Geometry, LayerGroup

SIZES = {
    "num_blocks": 400,
    "num_host_blocks": 50,
    "block_size": 2,
    "max_sequences": 100,
    "max_sequence_tokens": 100,
    "vocab_size": 2**31 - 1,
}


MODEL: dict[str, Any] = {"block_bytes": 1, "model": "m", "model_fingerprint": "m"}
GEOMETRY = Geometry(**SIZES, **MODEL, max_drafts=2)
LAYER_GROUPS = (LayerGroup(LayerGroupKind.FULL, 0, 2), LayerGroup(LayerGroupKind.SLIDING, 3, 2))


def make_ledger(policy: str = "lru") -> Ledger:
    ledger = Ledger("pool", 1, GEOMETRY, policy=policy)
    ledger.open_lease("lease", ttl_s=30.0, now=0.0)
    return ledger


def tokens(rng: Random, count: int) -> bytes:
    return b"".join(rng.randrange(2**31 - 1).to_bytes(4, "little") for _ in range(count))


def plans() -> Iterator[Planned]:
    """Plans with something in every list, refusals too."""
    return chain(plans_for(GEOMETRY), plans_for(replace(GEOMETRY, layer_groups=LAYER_GROUPS)))


def plans_for(geometry: Geometry) -> Iterator[Planned]:
    ledger, rng = Ledger("pool", 7, geometry), Random(0)
    ledger.open_lease("lease", ttl_s=1.0, now=0.0)
    prompts = [tokens(rng, 1 + rng.randrange(40)) for _ in range(8)]
    last, kept = 2**31 - 1, [Breakpoint(1, 60.0)]
    for step in range(1, 9):
        request = StepRequest(
            releases=[step - 3, last],
            offloads=[step + 19, last],
            trims=[Trim(step - 1, 1)],
            forks=[Fork(step - 2, [step + 50, 2**31 - 1 - step], 1)],
            extend_ids=[step - 1, 99, *([40] if step > 1 else ())],
            extend_token_counts=[1, 1, *([3] if step > 1 else ())],
            appends={step - 1: tokens(rng, 1)},
            drafts={40: [1, 2]} if step > 1 else {},
            restores=[Restore(step + 18)],
            admissions=[
                *([Admission(40, tokens(rng, 1))] if step == 1 else ()),
                Admission(step, prompts[step - 1], adapter=bytes([step % 3]) * 32 if step % 3 else b""),
                Admission(step + 20, prompts[0] + prompts[step - 1], breakpoints=kept, explains_miss=True),
            ],
        )
        plan = plan_step(ledger, "lease", request, now=0.0)
        ledger.reset_prefix_cache()  # so that restores copy
        yield plan
        drafts = plan.run_draft_counts or [0] * len(plan.run_starts)  # all of which are rejected
        runs = zip(plan.run_starts, plan.run_token_counts, drafts, strict=True)
        ends = [start + count - num_drafts for start, count, num_drafts in runs]
        sampled = [seq_id for seq_id, samples in zip(plan.run_seq_ids, plan.run_samples, strict=True) if samples]
        ledger.settle(
            report_of(
                *("lease", step, StepOutcome.COMPUTED),
                seq_ids=plan.run_seq_ids,
                token_counts=ends,
                sampled_ids=sampled,
                sampled_tokens=[2**31 - 2] * len(sampled),
            )
        )


def test_a_grants_bytes_are_those_of_the_message() -> None:
    seen: set[str] = set()
    for plan in plans():
        encoded = plan.core.encode_grant("pööl", -(2**63), 2**63 - 1, "lease")
        grant = grant_pb2.StepGrant.FromString(encoded)
        assert (grant.pool, grant.epoch, grant.term, grant.lease_id) == ("pööl", -(2**63), 2**63 - 1, "lease")
        assert encoded == grant.SerializeToString(deterministic=True)
        seen |= {field.name for field, _ in grant.ListFields()}
    assert seen == set(grant_pb2.StepGrant.DESCRIPTOR.fields_by_name), "no plan has anything in some field"


def test_an_answers_bytes_are_those_of_the_message() -> None:
    seen = {"grant", "refusals"}
    for plan in plans():
        encoded = plan.core.encode_answer()
        assert encoded == plan.answer.SerializeToString(deterministic=True)
        assert plan.has_refusals
        for field in ("step_number", "run_starts", "run_token_counts", "given_run_indexes"):
            assert getattr(plan.answer, field) == getattr(plan.grant, field)
        assert plan.answer.run_sequence_ids == plan.grant.run_sequence_ids
        seen |= {field.name for field, _ in plan.answer.ListFields()}
    assert seen == set(cache_service_pb2.PlanStepResponse.DESCRIPTOR.fields_by_name)


def test_a_signed_answer_is_the_answer_with_its_grant_and_the_hmac_of_that() -> None:
    for key in (b"", b"key", b"k" * 32, b"k" * 64, b"k" * 65):
        for plan in plans():
            signed = cache_service_pb2.PlanStepResponse.FromString(plan.core.encode_signed("pool", 7, 8, "lease", key))
            assert signed.grant.grant == plan.core.encode_grant("pool", 7, 8, "lease")
            assert signed.grant.signature == hmac.digest(key, signed.grant.grant, "sha256")
            signed.ClearField("grant")
            assert signed.SerializeToString(deterministic=True) == plan.core.encode_answer()


def test_a_stream_has_the_same_plans_and_answers_in_a_message_of_its_own() -> None:
    body = body_of(StepRequest(admissions=[Admission(1, bytes(4))]), "lease", request_id="r")
    plan = cache_service_pb2.PlanStepRequest.FromString(body)
    on_stream = cache_service_pb2.PlanStepsRequest(plan=plan).SerializeToString()
    other = cache_service_pb2.PlanStepsRequest(plan={"request_id": "r"}).SerializeToString()
    ledger = make_ledger()
    first = Planned(ledger.plan(PlanRequest(body), now=0.0))
    for repeated in (on_stream, on_stream + b"\xa0\x06\x01"):
        assert PlanRequest.on_stream(repeated).lease_id == "lease"
        assert Planned(ledger.plan(PlanRequest.on_stream(repeated), now=0.0)).answer == first.answer
    with pytest.raises(CallRefused) as refused:
        ledger.plan(PlanRequest.on_stream(on_stream + other), now=0.0)  # protobuf takes both parts for one message
    assert refused.value.refusal.reason is Reason.REQUEST_ID_REUSED
    assert (PlanRequest.on_stream(b"").lease_id, PlanRequest(b"").lease_id) == ("", "")
    for answer in (b"", first.core.encode_answer(), first.core.encode_signed("pool", 1, 1, "lease", b"k")):
        message = cache_service_pb2.PlanStepsResponse.FromString(answer_on_stream(answer))
        assert message.WhichOneof("answer") == "plan"
        assert message.plan == cache_service_pb2.PlanStepResponse.FromString(answer)


def test_a_request_is_planned_once() -> None:
    ledger, request = make_ledger(), PlanRequest(body_of(StepRequest(admissions=[Admission(1, bytes(4))]), "lease"))
    assert request.has_admissions
    assert Planned(ledger.plan(request, now=0.0)).admitted_ids == [1]
    before = ledger.probe.state()
    with pytest.raises(ValueError, match="planned already"):
        ledger.plan(request, now=0.0)
    assert ledger.probe.state() == before
    for items, has_admissions in ((StepRequest(restores=[Restore(1)]), True), (StepRequest(releases=[1]), False)):
        assert PlanRequest(body_of(items, "lease")).has_admissions == has_admissions


def test_a_workers_message_is_a_report_or_something_else() -> None:
    report = attach_pb2.StepReport(report_number=7, lease_id="lease", step_number=1)
    for message, number in (
        (attach_pb2.AttachPoolRequest(step_report=report), 7),
        (attach_pb2.AttachPoolRequest(lease_opened={"lease_id": "lease"}), None),
        (attach_pb2.AttachPoolRequest(), None),
    ):
        found = StepReport.on_stream(message.SerializeToString())
        assert (None if found is None else found.report_number) == number
    opened = attach_pb2.AttachPoolRequest(lease_opened={"lease_id": "lease"}).SerializeToString()
    reported = attach_pb2.AttachPoolRequest(step_report=report).SerializeToString()
    assert StepReport.on_stream(reported + opened) is None
    assert StepReport.on_stream(opened + reported) is not None
    with pytest.raises(ValueError, match="buffer underflow"):
        StepReport.on_stream(b"\x12\x05abc")


LONG = Geometry(**(SIZES | {"block_size": 16, "num_blocks": 12_000, "max_sequence_tokens": 80_000}), **MODEL)


def test_hashes_of_long_prompts_are_computed_in_parts_and_change_nothing() -> None:
    rng = Random(0)
    prompt, other = tokens(rng, 40_000), tokens(rng, 40_001)
    admissions = [
        Admission(1, prompt, tenant="t"),
        Admission(2, other, salt=b"s"),
        Admission(3, prompt + other + other),
    ]
    request = StepRequest(admissions=[*admissions, Admission(4, prompt, tenant="t")])
    states = []
    for in_parts, names_tenants in ((False, True), (True, True), (True, False)):
        ledger = Ledger("pool", 1, LONG)
        ledger.open_lease("lease", ttl_s=30.0, now=0.0)
        before, body, num_parts = ledger.probe.state(), PlanRequest(body_of(request, "lease")), 0
        while in_parts and ledger.hash_part(body, names_tenants=names_tenants):
            num_parts += 1
        assert (num_parts, ledger.probe.state()) == (6 if in_parts else 0, before)
        planned = Planned(ledger.plan(body, now=0.0, names_tenants=True))
        assert (planned.admitted_ids, planned.admitted_cached_counts) == ([1, 2, 4], [0, 0, 39_984])
        assert [refused.seq_id for refused in planned.refusals] == [3], "it is too long"
        states.append(ledger.probe.state())
        assert not ledger.hash_part(body)
    assert states[0] == states[1] == states[2]


def test_what_is_short_is_hashed_when_it_is_planned_and_what_has_no_lease_not_at_all() -> None:
    ledger = Ledger("pool", 1, LONG)
    ledger.open_lease("lease", ttl_s=30.0, now=0.0)
    for lease_id, num_tokens, is_parted in (
        ("lease", 16_384, False),
        ("lease", 40_000, True),
        ("other", 40_000, False),
    ):
        request = StepRequest(admissions=[Admission(1, bytes(4 * num_tokens))])
        assert ledger.hash_part(PlanRequest(body_of(request, lease_id))) == is_parted


def test_the_root_of_a_chain_is_what_the_protocol_says() -> None:
    expected = sha256(b"quire prefix v1")
    for part in ("tenant é".encode(), b"salt", b"model"):
        expected.update(len(part).to_bytes(8, "little") + part)
    assert root_hash("tenant é", b"salt", "model") == expected.digest()


def test_a_call_that_would_leave_the_books_wrong_says_so() -> None:
    with pytest.raises(BrokenInvariant, match="lease is opened twice"):
        make_ledger().open_lease("lease", ttl_s=30.0, now=0.0)


def test_what_is_not_there_is_told() -> None:
    ledger = make_ledger()
    with pytest.raises(KeyError):
        ledger.probe.steps_in_flight("other")
    for call in (
        lambda: ledger.plan(PlanRequest(body_of(StepRequest(), "other")), now=0.0),
        lambda: ledger.inspector.sequence("other", 1),
    ):
        with pytest.raises(CallRefused, match="no lease other…"):
            call()
    assert (
        ledger.inspector.find_lease("other"),
        ledger.inspector.tenant_of("other"),
        ledger.inspector.tenant_use("other"),
    ) == (None, None, None)
    assert (
        ledger.inspector.sequence("lease", 1),
        ledger.probe.tokens("other", 1),
        ledger.probe.sequence_ids("other"),
    ) == (None, None, [])
    with pytest.raises(KeyError, match="mru"):
        make_ledger(policy="mru")
    assert POLICIES == ["lineage", "lru"]


def test_a_report_names_a_token_for_each_sequence_it_sampled_for() -> None:
    ledger = make_ledger()
    plan_step(ledger, "lease", StepRequest(admissions=[Admission(1, bytes(4)), Admission(2, bytes(4))]), now=0.0)
    before = ledger.probe.state()
    report = report_of("lease", 1, seq_ids=[1, 2], token_counts=[1, 1], sampled_ids=[1, 2], sampled_tokens=[0])
    with pytest.raises(CallRefused, match="sampled_token_ids is 1 entries; must be 2 entries"):
        ledger.settle(report)
    assert ledger.probe.state() == before


def test_bytes_that_are_no_list_and_no_message_are_told() -> None:
    ledger = make_ledger()
    with pytest.raises(ValueError, match="5 bytes are no list of 4-byte numbers"):
        ledger.inspector.num_cached_tokens(b"12345", salt=b"", tenant="")
    for decode in (PlanRequest, PlanRequest.on_stream):
        with pytest.raises(ValueError, match="buffer underflow"):
            decode(b"\x0a\x05abc")
    with pytest.raises(ValueError, match="buffer underflow"):
        PlanRequest.on_stream(b"\x0a\x05\x0a\x05abc")
    with pytest.raises(ValueError, match="buffer underflow"):
        StepReport(b"\x12\x05abc")


def test_those_who_wait_for_a_change_are_told_of_each() -> None:
    told: list[None] = []
    ledger = Ledger("pool", 1, GEOMETRY, listeners={lambda: told.append(None)})
    ledger.open_lease("lease", ttl_s=30.0, now=0.0)
    assert not told
    plan_step(ledger, "lease", StepRequest(), now=0.0)
    ledger.settle(report_of("lease", 1))
    ledger.end_lease("lease")
    ledger.advance(9.0)
    assert len(told) == 2
    ledger.lease_fenced("lease")
    ledger.lease_fenced("lease")
    assert len(told) == 3
