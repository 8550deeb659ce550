"""Drafts over the contract, with plans and steps by hand: cachemgr grants them, the worker verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from integration.protocol_client import LeaseHolder, Pair, RefusedError, draw_tokens

from quire.cache.v1 import cache_service_pb2
from quire.compute.v1 import worker_service_pb2

PROMPT = draw_tokens(11, seed=4)
Generate = Callable[[list[int], int], list[int]]


def draft(lease: LeaseHolder, drafts: dict[int, list[int]], **fields: Any) -> cache_service_pb2.PlanStepResponse:
    """Plan a step in which sequences go on with drafts, or without any."""
    extends = cache_service_pb2.Extends(
        sequence_ids=drafts,
        token_counts=[1 + len(each) for each in drafts.values()],
        draft_token_counts=[len(each) for each in drafts.values()],
        draft_token_ids=[token for each in drafts.values() for token in each],
    )
    return lease.accepted(lease.plan(extends=extends, **fields))


def inputs_of(drafts: dict[int, list[int]]) -> list[worker_service_pb2.SequenceInput]:
    return [worker_service_pb2.SequenceInput(sequence_id=seq_id, token_ids=each) for seq_id, each in drafts.items()]


def verify(lease: LeaseHolder, drafts: dict[int, list[int]]) -> Sequence[int]:
    """Run a step with drafts; return how many tokens each sequence got."""
    given = {seq_id: each for seq_id, each in drafts.items() if each}
    return lease.run(draft(lease, drafts), inputs=inputs_of(given)).sampled_token_counts


def test_a_step_gives_the_accepted_drafts_and_one_token_more(
    pair: Pair, lease: LeaseHolder, generate: Generate
) -> None:
    expected = [*PROMPT, *generate(PROMPT, 24)]
    lease.run(lease.admit((1, PROMPT), (2, PROMPT[:5])))
    before = pair.worker_statistics()
    right = expected[len(PROMPT) + 1 :]
    wrong = [(token + 1) % 96 for token in right]
    assert verify(lease, {1: right[:3], 2: []}) == [4, 1]
    assert verify(lease, {1: [*right[4:6], *wrong[6:9]], 2: wrong[:1]})[0] == 3
    assert verify(lease, {1: wrong[7:11]}) == [1]
    lease.run(lease.extend(1, 2))
    assert lease.tokens[1] == expected[: len(PROMPT) + 10]
    assert lease.tokens[2] == [*PROMPT[:5], *generate(PROMPT[:5], len(lease.tokens[2]) - 5)]
    after = pair.worker_statistics()
    num_sampled = sum(map(len, lease.tokens.values())) - len(PROMPT) - 5
    assert after.sampled_token_count - before.sampled_token_count == num_sampled - 2
    assert after.computed_token_count - before.computed_token_count == num_sampled - 2
    assert pair.violations() == []


def test_each_accepted_draft_has_its_log_probabilities(lease: LeaseHolder, generate: Generate) -> None:
    expected = generate(PROMPT, 5)
    lease.run(lease.admit((1, PROMPT)))
    asked = worker_service_pb2.SamplingParameters(temperature=0, logprob_count=2)
    entry = worker_service_pb2.SequenceInput(sequence_id=1, token_ids=expected[1:4], sampling=asked)
    answer = lease.run(draft(lease, {1: expected[1:4]}), inputs=[entry])
    assert list(answer.sampled_token_ids) == expected[1:]
    assert [entry.top_token_ids[0] for entry in answer.logprobs] == expected[1:]
    assert [entry.sampled_logprob for entry in answer.logprobs] == [entry.top_logprobs[0] for entry in answer.logprobs]


def test_other_drafts_than_those_of_the_plan_are_refused_and_the_right_ones_run(
    lease: LeaseHolder, generate: Generate
) -> None:
    expected = generate(PROMPT, 4)
    lease.run(lease.admit((1, PROMPT)))
    plan = draft(lease, {1: expected[1:3]})
    for given, reason in (
        ([expected[1], expected[2] ^ 1], "TOKENS_MISMATCH"),
        (expected[:3], "INVALID_ARGUMENT"),
        ([], "INVALID_ARGUMENT"),
    ):
        with pytest.raises(RefusedError) as caught:
            lease.run(plan, inputs=inputs_of({1: given}))
        assert (caught.value.reason, caught.value.metadata["sequence_id"]) == (reason, "1")
    lease.run(plan, inputs=inputs_of({1: expected[1:3]}))
    assert lease.tokens[1] == [*PROMPT, *expected]


def test_a_sequence_whose_step_with_drafts_fails_goes_on(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    expected = generate(PROMPT, 8)
    lease.run(lease.admit((1, PROMPT)))
    with pair.fault("fail"), pytest.raises(RefusedError) as caught:
        lease.run(draft(lease, {1: expected[1:3]}), inputs=inputs_of({1: expected[1:3]}))
    assert caught.value.reason == "STEP_FAILED"
    lease.run(lease.extend(1))
    assert verify(lease, {1: expected[2:5]}) == [4]
    assert lease.tokens[1] == [*PROMPT, *expected[:6]]
