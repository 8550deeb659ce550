"""A step as a client sends it, held against its grant; and the reports of steps that ended."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.worker.grant.decoding import AcceptedStep, decode_grant, decode_step
from quire.worker.grant.errors import Refused
from quire.worker.run.executor import Outcome, StepResult
from quire.worker.service.steps import Reports, make_report

LIMITS = {"vocab_size": 100, "max_sequence_tokens": 20, "max_step_tokens": 10, "max_logprobs": 5}


def digest(*tokens: int) -> bytes:
    """As the proto says: SHA-256 of little-endian int32."""
    return sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).digest()[:16]


# Sequence 4 brings three tokens, 5 goes on by itself, 6 brings one.
GRANT = grant_pb2.StepGrant(
    epoch=1,
    lease_id="a",
    step_number=9,
    run_sequence_ids=[4, 5, 6],
    run_starts=[0, 7, 2],
    run_token_counts=[3, 1, 1],
    run_samples=[False, True, True],
    given_run_indexes=[0, 2],
    given_token_digests=digest(1, 2, 3) + digest(99),
)
RIGHT = {4: [1, 2, 3], 6: [99]}


def decode(*inputs: Any, grant: grant_pb2.StepGrant = GRANT, skip: bool = False, max_drafts: int = 0) -> AcceptedStep:
    entries = [worker_service_pb2.SequenceInput(**entry) for entry in inputs]
    request = worker_service_pb2.RunStepRequest(inputs=entries, skip=skip)
    return decode_step(request, grant, **LIMITS, max_drafts=max_drafts)


def entries(tokens: dict[int, list[int]]) -> list[dict[str, Any]]:
    return [{"sequence_id": seq_id, "token_ids": token_ids} for seq_id, token_ids in tokens.items()]


def refusal(*inputs: Any, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        decode(*inputs, **options)
    return caught.value


def test_the_right_tokens_go_to_their_runs() -> None:
    for inputs in (entries(RIGHT), entries(RIGHT)[::-1]):
        step = decode(*inputs)
        assert {run: tokens.tolist() for run, tokens in step.given_tokens.items()} == {0: [1, 2, 3], 2: [99]}
        assert all(tokens.dtype == np.int32 for tokens in step.given_tokens.values())
        assert (step.grant, dict(step.sampling), step.skip) == (GRANT, {}, False)


@pytest.mark.parametrize("tokens", [[1, 2, 4], [3, 2, 1], [-1, 2, 3], [1, 2, 2**31 - 1]], ids=str)
def test_other_tokens_are_refused(tokens: list[int]) -> None:
    error = refusal(*entries(RIGHT | {4: tokens}))
    assert (error.reason, error.metadata) == ("TOKENS_MISMATCH", {"sequence_id": "4"})


def test_the_tokens_of_each_run_are_checked() -> None:
    assert refusal(*entries(RIGHT | {6: [98]})).metadata == {"sequence_id": "6"}


@pytest.mark.parametrize("tokens", [[], [1, 2], [1, 2, 3, 4]], ids=str)
def test_other_counts_are_refused(tokens: list[int]) -> None:
    error = refusal(*entries(RIGHT | {4: tokens}))
    assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "inputs.token_ids")


@pytest.mark.parametrize(
    "inputs",
    [
        entries({6: [99]}),
        entries(RIGHT | {5: [7]}),
        entries(RIGHT | {7: [7]}),
        entries(RIGHT) + entries({4: [1, 2, 3]}),
        [*entries(RIGHT), {"sequence_id": 4, "sampling": {"temperature": 0}}],
    ],
    ids=["one left out", "for a run that goes on", "for no run", "twice", "in two entries"],
)
def test_inputs_that_do_not_fit_are_refused(inputs: list[dict[str, Any]]) -> None:
    assert refusal(*inputs).reason == "INVALID_ARGUMENT"


def test_a_step_has_a_limit_of_tokens() -> None:
    grant = grant_pb2.StepGrant()
    grant.CopyFrom(GRANT)
    grant.run_token_counts[0] = 9
    error = refusal(*entries(RIGHT), grant=grant)
    assert (error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "grant.run_token_counts")
    assert decode(grant=grant, skip=True).skip


def test_a_skipped_step_needs_no_tokens() -> None:
    step = decode(skip=True)
    assert (step.skip, dict(step.given_tokens)) == (True, {})


def test_sampling_may_come_with_and_without_tokens() -> None:
    sampling = {"temperature": 0.5, "top_k": 7, "logprob_count": 5, "prompt_token_ids": [1, 99]}
    step = decode(*entries(RIGHT), {"sequence_id": 5, "sampling": sampling})
    assert list(step.sampling) == [5]
    params = step.sampling[5].params
    assert (params.temperature, params.top_k, params.top_p, params.num_logprobs) == (0.5, 7, 1.0, 5)
    assert list(step.sampling[5].prompt_token_ids) == [1, 99]


def test_sampling_that_is_unset_is_of_temperature_one() -> None:
    params = decode(*entries(RIGHT), {"sequence_id": 5, "sampling": {}}).sampling[5].params
    assert (params.temperature, params.top_p, params.repetition_penalty, params.num_logprobs) == (1.0, 1.0, 1.0, None)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprob_count": 6},
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"prompt_token_ids": [100]},
        {"output_token_ids": [-1]},
        {"prompt_token_ids": [1] * 21},
        {"prompt_token_ids": [1] * 11, "output_token_ids": [1] * 10},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(sampling: dict[str, Any]) -> None:
    assert refusal(*entries(RIGHT), {"sequence_id": 5, "sampling": sampling}).reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize("data", [b"", b"\xff", GRANT.SerializeToString()[:-1]], ids=["none", "noise", "cut off"])
def test_bytes_that_are_no_grant_are_not_signed(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        decode_grant(grant_pb2.SignedGrant(grant=data))
    assert caught.value.reason == "BAD_SIGNATURE"
    assert decode_grant(grant_pb2.SignedGrant(grant=GRANT.SerializeToString())) == GRANT


# -- drafts ---------------------------------------------------------------------------------------------------------

# Sequence 4 goes on with two drafts, 5 by itself.
DRAFTED = grant_pb2.StepGrant(
    epoch=1,
    lease_id="a",
    step_number=9,
    run_sequence_ids=[4, 5],
    run_starts=[6, 7],
    run_token_counts=[3, 1],
    run_samples=[True, True],
    given_run_indexes=[0],
    given_token_digests=digest(8, 9),
    run_draft_counts=[2, 0],
)


def drafted(**changes: Any) -> grant_pb2.StepGrant:
    grant = grant_pb2.StepGrant()
    grant.CopyFrom(DRAFTED)
    for name, value in changes.items():
        grant.ClearField(name)  # type: ignore[arg-type]
        getattr(grant, name).extend(value)
    return grant


def test_the_client_gives_the_drafts_of_a_run_alone() -> None:
    step = decode(*entries({4: [8, 9]}), grant=DRAFTED, max_drafts=2)
    assert {run: tokens.tolist() for run, tokens in step.given_tokens.items()} == {0: [8, 9]}
    assert refusal(*entries({4: [8, 10]}), grant=DRAFTED, max_drafts=2).reason == "TOKENS_MISMATCH"
    for tokens in ([7, 8, 9], [8], []):
        refused = refusal(*entries({4: tokens}), grant=DRAFTED, max_drafts=2)
        assert str(refused) == f"inputs.token_ids is {len(tokens)} tokens for sequence 4; must be 2 tokens"


@pytest.mark.parametrize(
    ("changes", "max_drafts", "message"),
    [
        ({}, 1, "grant.run_draft_counts is 2 for sequence 4; must be 0 to 1"),
        ({}, 0, "grant.run_draft_counts is 2 for sequence 4; must be 0 to 0"),
        ({"run_draft_counts": [-1, 0]}, 2, "grant.run_draft_counts is -1 for sequence 4; must be 0 to 2"),
        (
            {"run_draft_counts": [2]},
            2,
            "grant.run_draft_counts is 1 counts; must be empty, or 2 counts as there are runs",
        ),
        (
            {"run_token_counts": [2, 1]},
            2,
            "grant.run_token_counts is 2 for sequence 4; must be 3, the token sampled last and its drafts",
        ),
        (
            {"run_samples": [False, True]},
            2,
            "grant.run_samples is false for sequence 4; must be true, as it has drafts",
        ),
        (
            {"given_run_indexes": [1]},
            2,
            "grant.given_run_indexes is without run 0 for sequence 4; must be with run 0: it has drafts",
        ),
    ],
)
def test_drafts_that_can_not_be_verified_are_refused(changes: dict[str, Any], max_drafts: int, message: str) -> None:
    refused = refusal(*entries({4: [8, 9]}), grant=drafted(**changes), max_drafts=max_drafts)
    assert (refused.reason, str(refused)) == ("INVALID_ARGUMENT", message)


def test_a_run_with_drafts_has_no_tokens_of_a_prompt_to_score() -> None:
    entry = {"sequence_id": 4, "token_ids": [8, 9], "next_token_ids": [9], "prompt_logprob_count": 0}
    refused = refusal(entry, grant=DRAFTED, max_drafts=2)
    assert refused.metadata["field"] == "inputs.next_token_ids"
    assert "1 tokens; must be 0 to 0 tokens" in str(refused)


@pytest.mark.parametrize(("tokens", "computed"), [([30], [7, 8]), ([8, 31], [8, 8]), ([8, 9, 32], [9, 8])])
def test_a_report_counts_accepted_drafts_alone(tokens: list[int], computed: list[int]) -> None:
    result = StepResult(
        9,
        Outcome.COMPUTED,
        sampled_ids=[4, 5],
        sampled_tokens=[*tokens, 40],
        sampled_counts=[len(tokens), 1],
    )
    assert make_report(DRAFTED, result) == attach_pb2.StepReport(
        lease_id="a",
        step_number=9,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=[4, 5],
        computed_token_counts=computed,
        sampled_sequence_ids=[4, 5],
        sampled_token_ids=[*tokens, 40],
        sampled_token_counts=[len(tokens), 1],
    )


# -- reports ------------------------------------------------------------------------------------------------------


def test_a_computed_step_reports_its_tokens() -> None:
    report = make_report(GRANT, StepResult(9, Outcome.COMPUTED, sampled_ids=[5, 6], sampled_tokens=[30, 31]))
    assert report == attach_pb2.StepReport(
        lease_id="a",
        step_number=9,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=[4, 5, 6],
        computed_token_counts=[3, 8, 3],
        sampled_sequence_ids=[5, 6],
        sampled_token_ids=[30, 31],
    )


@pytest.mark.parametrize(
    ("outcome", "reported"),
    [
        (Outcome.FAILED, attach_pb2.STEP_OUTCOME_FAILED),
        (Outcome.PRIOR_FAILED, attach_pb2.STEP_OUTCOME_FAILED),
        (Outcome.SKIPPED, attach_pb2.STEP_OUTCOME_SKIPPED),
    ],
)
def test_a_step_that_computed_nothing_reports_no_tokens(outcome: Outcome, reported: Any) -> None:
    report = make_report(GRANT, StepResult(9, outcome))
    assert report == attach_pb2.StepReport(lease_id="a", step_number=9, outcome=reported)


def test_reports_are_kept_until_they_are_acknowledged() -> None:
    reports, sent = Reports(), list[int]()
    reports.add(attach_pb2.StepReport())
    reports.send = lambda report: sent.append(report.report_number)
    for _ in range(3):
        reports.add(attach_pb2.StepReport())
    assert sent == [2, 3, 4]
    reports.acknowledge(2)
    reports.acknowledge(1)
    assert [report.report_number for report in reports.kept()] == [3, 4]
    reports.begin_epoch()
    assert len(reports) == 0
    reports.add(attach_pb2.StepReport())
    assert sent[-1] == 1
