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


def decode(*inputs: Any, grant: grant_pb2.StepGrant = GRANT, skip: bool = False) -> AcceptedStep:
    entries = [worker_service_pb2.SequenceInput(**entry) for entry in inputs]
    return decode_step(worker_service_pb2.RunStepRequest(inputs=entries, skip=skip), grant, **LIMITS)


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
