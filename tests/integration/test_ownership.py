"""A step accesses its lease's blocks and computes its plan; any other is refused and accesses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import (
    BLOCK_SIZE,
    MAX_STEP_TOKENS,
    NUM_BLOCKS,
    LeaseHolder,
    Pair,
    RefusedError,
    ask,
    await_that,
    draw_tokens,
    unsigned,
)

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2

CreateLease = Callable[..., LeaseHolder]
Generate = Callable[[list[int], int], list[int]]
FENCING = cache_service_pb2.LEASE_STATE_FENCING
PROMPT = draw_tokens(21, seed=1)
NUM_NEW = 12


def begin(lease: LeaseHolder, seq_id: int, prompt: list[int], **fields: Any) -> cache_service_pb2.PlanStepResponse:
    """Admits a sequence and runs its first step."""
    plan = lease.admit((seq_id, prompt), **fields)
    lease.run(plan)
    return plan


def fork(parent: int, *children: int, at: int) -> dict[str, Any]:
    return {
        "forks": [cache_service_pb2.Fork(parent_sequence_id=parent, child_sequence_ids=children, token_count=at)],
    }


# -- what is computed ---------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(lease: LeaseHolder, generate: Generate) -> None:
    begin(lease, 1, PROMPT)
    lease.go_on(1, num_steps=NUM_NEW - 1)
    assert lease.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)


def test_sequences_in_one_batch_do_not_see_each_other(lease: LeaseHolder, generate: Generate) -> None:
    prompts = {seq_id: draw_tokens(3 + 4 * seq_id, seed=seq_id) for seq_id in range(4)}
    lease.run(lease.admit(*prompts.items()))
    lease.go_on(*prompts, num_steps=NUM_NEW - 1)
    assert lease.tokens == {seq_id: prompt + generate(prompt, NUM_NEW) for seq_id, prompt in prompts.items()}


def test_a_known_prefix_is_not_computed_again(pair: Pair, create_lease: CreateLease, generate: Generate) -> None:
    first, second = create_lease(), create_lease()
    begin(first, 1, PROMPT)
    first.await_settled()
    assert pair.cached_tokens(PROMPT) == 20
    before = pair.worker_statistics().computed_token_count
    plan = begin(second, 1, PROMPT)
    assert list(plan.admitted_cached_token_counts) == [20]
    assert list(plan.run_token_counts) == [1]
    assert pair.worker_statistics().computed_token_count == before + 1
    assert pair.statistics().shared_block_count == 5
    second.go_on(1, num_steps=NUM_NEW - 1)
    assert second.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)


def test_at_least_one_token_is_left_to_compute(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    prompt = PROMPT[:20]
    begin(lease, 1, prompt)
    lease.await_settled()
    assert pair.cached_tokens(prompt) == 16
    plan = begin(lease, 2, prompt)
    assert list(plan.run_token_counts) == [4]
    lease.go_on(1, 2, num_steps=3)
    assert lease.tokens[1] == lease.tokens[2] == prompt + generate(prompt, 4)


def test_a_burst_of_equal_prompts_computes_the_prefix_once(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    before = pair.worker_statistics().computed_token_count
    plan = lease.admit((1, PROMPT), (2, PROMPT), (3, PROMPT))
    assert list(plan.admitted_cached_token_counts) == [0, 20, 20]
    lease.run(plan)
    assert pair.worker_statistics().computed_token_count == before + 23
    lease.go_on(1, 2, 3, num_steps=NUM_NEW - 1)
    expected = PROMPT + generate(PROMPT, NUM_NEW)
    assert lease.tokens == {1: expected, 2: expected, 3: expected}


def test_sequences_of_other_salts_share_nothing(pair: Pair, lease: LeaseHolder) -> None:
    begin(lease, 1, PROMPT, salt=b"a")
    lease.await_settled()
    assert pair.cached_tokens(PROMPT, salt=b"a") == 20
    assert pair.cached_tokens(PROMPT) == pair.cached_tokens(PROMPT, salt=b"b") == 0
    assert list(begin(lease, 2, PROMPT, salt=b"b").admitted_cached_token_counts) == [0]
    assert pair.statistics().shared_block_count == 0


def test_a_fork_copies_the_block_that_is_written(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    before = pair.statistics(), pair.worker_statistics().copied_block_count
    begin(lease, 1, PROMPT)
    lease.go_on(1, num_steps=1)  # 23 tokens: the last block is partly filled
    plan = lease.plan(**fork(1, 2, 3, at=23), extends={"sequence_ids": [1, 2, 3], "token_counts": [1, 1, 1]})
    lease.tokens |= {2: lease.tokens[1][:23], 3: lease.tokens[1][:23]}
    lease.run(lease.accepted(plan))
    statistics = pair.statistics()
    assert statistics.fork_count - before[0].fork_count == 2
    assert statistics.copied_block_count - before[0].copied_block_count == 2
    assert pair.worker_statistics().copied_block_count - before[1] == 2
    assert statistics.shared_block_count == 5
    lease.go_on(1, 2, 3, num_steps=NUM_NEW - 3)
    expected = PROMPT + generate(PROMPT, NUM_NEW)
    assert lease.tokens == {1: expected, 2: expected, 3: expected}


@pytest.mark.parametrize("position", [1, 5, 8, 20, 21], ids=lambda position: f"at {position}")
def test_a_fork_that_goes_its_own_way_leaves_its_parent_alone(
    position: int, lease: LeaseHolder, generate: Generate
) -> None:
    begin(lease, 1, PROMPT)
    lease.await_settled()
    other = draw_tokens(7, seed=2)
    lease.tokens[2] = PROMPT[:position] + other
    plan = lease.plan(
        **fork(1, 2, at=position),
        extends={
            "sequence_ids": [2, 1],
            "token_counts": [8, 1],
            "append_token_counts": [7, 0],
            "append_token_ids": other,
        },
    )
    lease.run(lease.accepted(plan))
    lease.go_on(1, 2, num_steps=NUM_NEW - 2)
    assert lease.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert lease.tokens[2] == PROMPT[:position] + other + generate(PROMPT[:position] + other, NUM_NEW - 1)


def test_a_trimmed_sequence_goes_on_from_what_is_left(lease: LeaseHolder, generate: Generate) -> None:
    begin(lease, 1, PROMPT)
    lease.go_on(1, num_steps=NUM_NEW - 1)
    expected = list(lease.tokens[1])
    lease.await_settled()
    del lease.tokens[1][25:]
    extends = {
        "sequence_ids": [1],
        "token_counts": [1],
        "append_token_counts": [1],
        "append_token_ids": expected[24:25],
    }
    lease.run(lease.accepted(lease.plan(trim_sequence_ids=[1], trim_token_counts=[24], extends=extends)))
    lease.go_on(1, num_steps=7)
    assert lease.tokens[1] == expected == PROMPT + generate(PROMPT, NUM_NEW)


def test_tokens_may_be_appended(lease: LeaseHolder, generate: Generate) -> None:
    begin(lease, 1, PROMPT)
    lease.await_settled()
    answer = lease.tokens[1][-1]
    turn = draw_tokens(6, seed=3)
    lease.tokens[1] += turn
    extends = {"sequence_ids": [1], "token_counts": [7], "append_token_counts": [6], "append_token_ids": turn}
    lease.run(lease.accepted(lease.plan(extends=extends)))
    lease.go_on(1, num_steps=4)
    prompt = [*PROMPT, answer, *turn]
    assert lease.tokens[1] == prompt + generate(prompt, 5)


def test_a_prompt_may_be_computed_in_chunks(lease: LeaseHolder, generate: Generate) -> None:
    plans = [lease.admit((1, PROMPT), max_compute_token_count=6)]
    answers = [lease.run(plans[0])]
    for count in (1, 8, 6):
        plans.append(lease.extend(1, counts=[count]))
        answers.append(lease.run(plans[-1]))
    assert [(plan.run_starts[0], plan.run_token_counts[0]) for plan in plans] == [(0, 6), (6, 1), (7, 8), (15, 6)]
    assert [len(answer.sequence_ids) for answer in answers] == [0, 0, 0, 1]
    lease.go_on(1, num_steps=4)
    assert lease.tokens[1] == PROMPT + generate(PROMPT, 5)


def test_steps_may_be_planned_before_the_last_has_run(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    plans = [lease.admit((1, PROMPT), (2, PROMPT[::-1]))]
    plans += [lease.extend(1, 2) for _ in range(NUM_NEW - 1)]
    assert all(not plan.given_run_indexes for plan in plans[1:])
    assert lease.sequence(1).computed_token_count == 0
    assert lease.sequence(1).scheduled_token_count == 21 + NUM_NEW - 1
    for plan in plans:
        lease.run(plan)
    lease.await_settled()
    assert lease.sequence(1).computed_token_count == 21 + NUM_NEW - 1
    assert lease.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert lease.tokens[2] == PROMPT[::-1] + generate(PROMPT[::-1], NUM_NEW)


def test_only_what_was_computed_is_found(pair: Pair, lease: LeaseHolder) -> None:
    plan = lease.admit((1, PROMPT))
    assert pair.cached_tokens(PROMPT) == 0
    with pair.held() as hold:
        running = lease.start(plan)
        hold.await_running()
        assert pair.cached_tokens(PROMPT) == 0
    lease.finish(running)
    lease.await_settled()
    assert pair.cached_tokens(PROMPT) == 20


def test_a_full_pool_evicts_and_stays_right(pair: Pair, lease: LeaseHolder, generate: Generate) -> None:
    before = pair.statistics().evicted_block_count
    for round_number in range(4):
        for seq_id in range(3):
            prompt = draw_tokens(40, seed=10 + (round_number + seq_id) % 5)
            begin(lease, seq_id, prompt)
            assert lease.tokens[seq_id] == prompt + generate(prompt, 1)
            lease.run(lease.plan(release_sequence_ids=[seq_id]))
            lease.await_settled()
    assert pair.statistics().evicted_block_count > before


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(lease: LeaseHolder, request: worker_service_pb2.RunStepRequest) -> RefusedError:
    """The refusal of a step that must not run."""
    with pytest.raises(RefusedError) as caught:
        ask(lease.pair.worker.RunStep, request)
    assert caught.value.domain == "compute.quire.dev"
    return caught.value


@pytest.fixture
def running_lease(lease: LeaseHolder) -> LeaseHolder:
    """A lease with sequence 1, which has run a prompt and one more step."""
    begin(lease, 1, PROMPT)
    lease.go_on(1, num_steps=1)
    lease.await_settled()
    return lease


@pytest.fixture
def goes_on(running_lease: LeaseHolder, generate: Generate) -> Any:
    """True if the right next step still runs, and with the right tokens. Call it last."""

    def goes_on(*, num_steps: int = 3) -> None:
        running_lease.go_on(1, num_steps=num_steps)
        tokens = running_lease.tokens[1]
        assert tokens == PROMPT + generate(PROMPT, len(tokens) - len(PROMPT))

    return goes_on


def test_a_replayed_step_is_refused(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    plan = running_lease.extend(1)
    step = running_lease.step(plan)
    running_lease.run(plan)
    running_lease.await_settled()
    with pair.untouched():
        error = refused(running_lease, step)
        again = refused(running_lease, running_lease.step(plan, skip=True))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER")
    assert error.metadata == again.metadata == {"value": "3", "limit": "4"}
    goes_on()


def test_a_step_that_runs_is_not_accepted_twice(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    plan = running_lease.extend(1)
    with pair.held() as hold:
        running = running_lease.start(plan)
        hold.await_running()
        error = refused(running_lease, running_lease.step(plan))
    running_lease.finish(running)
    assert error.reason == "STEP_OUT_OF_ORDER"
    goes_on()


def test_a_step_before_its_turn_is_refused(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    plans = [running_lease.extend(1), running_lease.extend(1)]
    with pair.untouched():
        error = refused(running_lease, running_lease.step(plans[1]))
    assert error.reason == "STEP_OUT_OF_ORDER"
    assert error.metadata == {"value": "4", "limit": "3"}
    for plan in plans:
        running_lease.run(plan)
    goes_on()


def signature_of_zeros(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return grant_pb2.SignedGrant(grant=signed.grant, signature=bytes(32))


def signature_left_out(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return grant_pb2.SignedGrant(grant=signed.grant)


def signature_cut(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return grant_pb2.SignedGrant(grant=signed.grant, signature=signed.signature[:31])


def signature_with_one_bit_flipped(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    signature = bytes([signed.signature[0] ^ 1]) + signed.signature[1:]
    return grant_pb2.SignedGrant(grant=signed.grant, signature=signature)


def with_other_content(signed: grant_pb2.SignedGrant, **fields: Any) -> grant_pb2.SignedGrant:
    grant = unsigned(signed)
    for name, value in fields.items():
        grant.ClearField(name)  # type: ignore[arg-type]
        grant.MergeFrom(grant_pb2.StepGrant(**{name: value}))
    return grant_pb2.SignedGrant(grant=grant.SerializeToString(), signature=signed.signature)


def with_other_blocks(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    writes = {"write_sequence_ids": [1], "write_first_indexes": [0], "write_block_counts": [1]}
    return with_other_content(signed, **writes, write_block_ids=[NUM_BLOCKS - 1])


def with_a_copy(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return with_other_content(signed, copy_source_block_ids=[1], copy_target_block_ids=[NUM_BLOCKS - 1])


def with_other_step_number(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return with_other_content(signed, step_number=unsigned(signed).step_number + 1)


def with_other_term(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return with_other_content(signed, term=unsigned(signed).term + 1)


def with_a_byte_more(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return grant_pb2.SignedGrant(grant=signed.grant + b"\xa0\x06\x01", signature=signed.signature)


def not_a_grant(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return grant_pb2.SignedGrant(grant=b"\xff" * 40, signature=signed.signature)


def nothing(signed: grant_pb2.SignedGrant) -> grant_pb2.SignedGrant:
    return grant_pb2.SignedGrant()


FORGERIES = (
    signature_of_zeros,
    signature_left_out,
    signature_cut,
    signature_with_one_bit_flipped,
    with_other_blocks,
    with_a_copy,
    with_other_step_number,
    with_other_term,
    with_a_byte_more,
    not_a_grant,
    nothing,
)


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize("skip", [False, True], ids=["run", "skip"])
def test_a_forged_grant_is_refused(
    forge: Callable[[grant_pb2.SignedGrant], grant_pb2.SignedGrant],
    skip: bool,
    pair: Pair,
    running_lease: LeaseHolder,
    goes_on: Any,
) -> None:
    plan = running_lease.extend(1)
    step = running_lease.step(plan, skip=skip)
    step.grant.CopyFrom(forge(plan.grant))
    with pair.untouched():
        error = refused(running_lease, step)
    assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "BAD_SIGNATURE")
    running_lease.run(plan)
    goes_on(num_steps=1)


def test_the_grant_of_a_lease_that_was_deleted_is_refused(
    pair: Pair, create_lease: CreateLease, running_lease: LeaseHolder, goes_on: Any
) -> None:
    other = create_lease()
    plan = other.admit((1, draw_tokens(9, seed=4)))
    other.delete()
    await_that("the lease is gone", lambda: not pair.has_lease(other.lease_id))
    with pair.untouched():
        error = refused(other, other.step(plan))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_FENCED")
    assert error.metadata == {"lease_id_prefix": other.lease_id[:8]}
    with pytest.raises(RefusedError, match="LEASE_NOT_FOUND"):
        other.plan()
    goes_on()


def test_a_lease_can_not_reach_the_sequences_of_another(
    pair: Pair, create_lease: CreateLease, running_lease: LeaseHolder, goes_on: Any
) -> None:
    other = create_lease()
    extends = {"sequence_ids": [1], "token_counts": [1]}
    with pair.untouched():
        assert other.refused(extends=extends).reason == "SEQUENCE_NOT_FOUND"
        assert other.refused(trim_sequence_ids=[1], trim_token_counts=[1]).reason == "SEQUENCE_NOT_FOUND"
        assert other.refused(**fork(1, 2, at=1)).reason == "SEQUENCE_NOT_FOUND"
        other.run(other.plan(release_sequence_ids=[1]))
        with pytest.raises(RefusedError, match="SEQUENCE_NOT_FOUND"):
            other.sequence(1)
    goes_on()


# -- a client that lies -------------------------------------------------------------------------------------------


def given(seq_id: int, *token_ids: int) -> worker_service_pb2.SequenceInput:
    return worker_service_pb2.SequenceInput(sequence_id=seq_id, token_ids=token_ids)


PROMPT_2 = draw_tokens(9, seed=5)
LIES: dict[str, tuple[list[Any], str]] = {
    "other tokens": ([given(2, *PROMPT_2[:-1], PROMPT_2[-1] ^ 1)], "TOKENS_MISMATCH"),
    "tokens in another order": ([given(2, *PROMPT_2[::-1])], "TOKENS_MISMATCH"),
    "tokens that are none": ([given(2, *PROMPT_2[:-1], -1)], "TOKENS_MISMATCH"),
    "no tokens": ([], "INVALID_ARGUMENT"),
    "no tokens for the sequence": ([given(2)], "INVALID_ARGUMENT"),
    "a token too few": ([given(2, *PROMPT_2[:-1])], "INVALID_ARGUMENT"),
    "a token too many": ([given(2, *PROMPT_2, 7)], "INVALID_ARGUMENT"),
    "tokens for a run that goes on by itself": ([given(2, *PROMPT_2), given(1, 7)], "INVALID_ARGUMENT"),
    "tokens for a sequence that is not there": ([given(2, *PROMPT_2), given(3, 7)], "INVALID_ARGUMENT"),
    "tokens for two sequences swapped": ([given(1, *PROMPT_2)], "INVALID_ARGUMENT"),
    "the same sequence twice": ([given(2, *PROMPT_2), given(2, *PROMPT_2)], "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize(("inputs", "reason"), LIES.values(), ids=LIES)
def test_a_client_that_lies_is_refused(
    inputs: list[Any], reason: str, pair: Pair, running_lease: LeaseHolder, goes_on: Any, generate: Generate
) -> None:
    running_lease.tokens[2] = list(PROMPT_2)
    plan = running_lease.extend(1, admissions=[cache_service_pb2.Admission(sequence_id=2, token_ids=PROMPT_2)])
    with pair.untouched():
        error = refused(running_lease, running_lease.step(plan, inputs=inputs))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    if reason == "TOKENS_MISMATCH":
        assert error.metadata == {"sequence_id": "2"}
    running_lease.run(plan)
    assert running_lease.tokens[2] == PROMPT_2 + generate(PROMPT_2, 1)
    goes_on(num_steps=1)


def test_a_step_of_more_tokens_than_the_worker_computes_is_refused_and_may_be_skipped(
    pair: Pair, running_lease: LeaseHolder, goes_on: Any
) -> None:
    plan = running_lease.admit(*((seq_id, draw_tokens(MAX_STEP_TOKENS // 2 + 1, seed=seq_id)) for seq_id in (2, 3)))
    with pair.untouched():
        error = refused(running_lease, running_lease.step(plan))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert error.metadata["field"] == "grant.run_token_counts"
    assert error.metadata["limit"] == f"at most {MAX_STEP_TOKENS} per step"
    running_lease.run(plan, skip=True)
    running_lease.await_settled()
    running_lease.run(running_lease.plan(release_sequence_ids=[2, 3]))
    goes_on()


# -- steps that compute nothing -----------------------------------------------------------------------------------


def test_a_skipped_step_fails_those_that_build_on_it(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    plans = [running_lease.extend(1) for _ in range(3)]
    assert not running_lease.run(plans[0], skip=True).sequence_ids
    checksums = pair.checksums()
    for plan in plans[1:]:
        with pytest.raises(RefusedError) as caught:
            running_lease.run(plan, inputs=[])
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "PRIOR_STEP_FAILED")
        assert caught.value.metadata["step_number"] == str(plan.step_number)
    assert pair.checksums() == checksums
    running_lease.await_settled()
    goes_on()


def test_steps_that_are_all_skipped_are_all_answered(running_lease: LeaseHolder, goes_on: Any) -> None:
    for plan in [running_lease.extend(1) for _ in range(3)]:
        assert running_lease.run(plan, skip=True).step_number == plan.step_number
    running_lease.await_settled()
    goes_on()


def test_a_skipped_step_changes_the_tables(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    running_lease.run(running_lease.admit((2, PROMPT_2)), skip=True)
    running_lease.await_settled()
    assert running_lease.sequence(2).computed_token_count == 0
    assert pair.cached_tokens(PROMPT_2) == 0
    assert pair.worker_statistics().sequence_count == 2
    running_lease.run(running_lease.extend(2, counts=[9]))
    running_lease.run(running_lease.plan(release_sequence_ids=[2]), skip=True)
    running_lease.await_settled()
    assert pair.worker_statistics().sequence_count == 1
    goes_on()


def test_a_step_that_the_model_fails_on_is_reported_and_the_lease_goes_on(
    pair: Pair, running_lease: LeaseHolder, goes_on: Any, generate: Generate
) -> None:
    plans = [
        running_lease.extend(1, admissions=[cache_service_pb2.Admission(sequence_id=2, token_ids=PROMPT_2)]),
        running_lease.extend(1),
    ]
    running_lease.tokens[2] = list(PROMPT_2)
    with pair.fault("fail"), pytest.raises(RefusedError) as caught:
        running_lease.run(plans[0])
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
    assert caught.value.metadata == {"step_number": str(plans[0].step_number)}
    with pytest.raises(RefusedError, match="PRIOR_STEP_FAILED") as caught:
        running_lease.run(plans[1])
    assert caught.value.metadata["failed_step_number"] == str(plans[0].step_number)
    running_lease.await_settled()
    assert pair.cached_tokens(PROMPT_2) == 0
    assert running_lease.sequence(2).computed_token_count == 0
    running_lease.run(running_lease.extend(2, counts=[9]))
    assert running_lease.tokens[2] == PROMPT_2 + generate(PROMPT_2, 1)
    goes_on()


def test_a_burst_whose_first_step_fails_shares_nothing_of_it(
    pair: Pair, lease: LeaseHolder, generate: Generate
) -> None:
    first = lease.admit((1, PROMPT))
    second = lease.admit((2, PROMPT))
    assert list(second.admitted_cached_token_counts) == [20]
    lease.run(first, skip=True)
    with pytest.raises(RefusedError, match="PRIOR_STEP_FAILED"):
        lease.run(second)
    lease.await_settled()
    assert pair.cached_tokens(PROMPT) == 0
    for seq_id in (1, 2):
        left = len(PROMPT) - lease.sequence(seq_id).computed_token_count
        lease.run(lease.extend(seq_id, counts=[left]))
        lease.await_settled()
    lease.go_on(1, 2, num_steps=2)
    assert lease.tokens[1] == lease.tokens[2] == PROMPT + generate(PROMPT, 3)


def test_sampling_parameters_hold_from_the_step_that_brought_them(lease: LeaseHolder) -> None:
    sampling = worker_service_pb2.SamplingParameters(temperature=1, seed=5)
    plan = lease.admit((1, PROMPT))
    lease.run(plan, inputs=lease.inputs(plan, sampling=sampling))
    skipped, plan = lease.admit((2, PROMPT[::-1])), lease.admit((3, PROMPT))
    lease.run(skipped, skip=True)
    with pytest.raises(RefusedError, match="PRIOR_STEP_FAILED"):
        lease.run(plan, inputs=lease.inputs(plan, sampling=sampling))
    lease.await_settled()
    lease.run(lease.extend(3, counts=[len(PROMPT) - lease.sequence(3).computed_token_count]))
    lease.go_on(1, 3, num_steps=NUM_NEW)
    length = len(lease.tokens[3])
    assert lease.tokens[3] == lease.tokens[1][:length]


# -- when blocks come back ----------------------------------------------------------------------------------------


def test_a_released_block_is_not_handed_out_while_a_step_may_touch_it(
    pair: Pair, create_lease: CreateLease, generate: Generate
) -> None:
    holder, other = create_lease(), create_lease()
    long_prompt, wanted = draw_tokens(90, seed=6), draw_tokens(40, seed=7)
    plan = holder.admit((1, long_prompt))
    with pair.held() as hold:
        running = holder.start(plan)
        hold.await_running()
        release = holder.plan(release_sequence_ids=[1])
        assert release.block_counts.retired_count == 23
        error = other.plan(admissions=[cache_service_pb2.Admission(sequence_id=1, token_ids=wanted)]).refusals[0].error
        assert error.reason == "OUT_OF_BLOCKS"
        assert dict(error.metadata) == {"sequence_id": "1", "needed": "10", "free": "7", "retired": "23"}
    assert holder.finish(running).sampled_token_ids == generate(long_prompt, 1)
    holder.run(release)
    await_that("the blocks are back", lambda: not pair.counts().retired_count)
    lease = create_lease()
    begin(lease, 1, wanted)
    assert lease.tokens[1] == wanted + generate(wanted, 1)


def test_the_blocks_of_a_lease_come_back_only_when_none_of_its_steps_runs(
    pair: Pair, create_lease: CreateLease, generate: Generate
) -> None:
    holder = create_lease()
    plans = [holder.admit((1, PROMPT)), holder.extend(1)]
    with pair.held() as hold:
        running = holder.start(plans[0])
        hold.await_running()
        num_open = pair.worker_statistics().open_lease_count
        holder.delete()
        await_that("the worker refuses its steps", lambda: pair.worker_statistics().open_lease_count < num_open)
        assert refused(holder, holder.step(plans[1])).reason == "LEASE_FENCED"
        create_lease()  # the worker has answered this order, and with it what it could say before
        (fenced,) = [lease for lease in pair.leases() if holder.lease_id.startswith(lease.lease_id_prefix)]
        assert fenced.state == FENCING
        assert pair.counts().active_count == 6
        with pytest.raises(RefusedError, match="LEASE_NOT_FOUND"):
            holder.plan()
    assert holder.finish(running).sampled_token_ids == generate(PROMPT, 1)
    await_that("the lease is gone", lambda: not pair.has_lease(holder.lease_id))
    assert pair.counts().active_count == 0


def test_a_lease_that_expires_is_fenced_before_its_blocks_come_back(pair: Pair, create_lease: CreateLease) -> None:
    holder = create_lease(ttl_s=1.0)
    plan = holder.admit((1, PROMPT))
    before = pair.statistics().expired_lease_count
    with pair.held() as hold:
        running = holder.start(plan)
        hold.await_running()
        await_that("it has expired", lambda: pair.statistics().expired_lease_count == before + 1)
        await_that("the worker refuses its steps", lambda: not pair.worker_statistics().open_lease_count)
        create_lease()
        assert pair.has_lease(holder.lease_id)
        assert pair.counts().active_count == 6
    holder.finish(running)
    await_that("the lease is gone", lambda: not pair.has_lease(holder.lease_id))


def test_what_a_lease_computed_stays_findable_after_it(
    pair: Pair, create_lease: CreateLease, generate: Generate
) -> None:
    holder = create_lease()
    begin(holder, 1, PROMPT)
    holder.delete()
    await_that("the lease is gone", lambda: not pair.has_lease(holder.lease_id))
    assert pair.counts().cached_count == len(PROMPT) // BLOCK_SIZE
    later = create_lease()
    assert list(begin(later, 1, PROMPT).admitted_cached_token_counts) == [20]
    assert later.tokens[1] == PROMPT + generate(PROMPT, 1)


# -- idempotency --------------------------------------------------------------------------------------------------


def test_a_repeated_plan_is_applied_once(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    before = pair.statistics().planned_step_count
    running_lease.tokens[2] = list(PROMPT_2)
    request = running_lease.plan_request(
        request_id="p",
        extends={"sequence_ids": [1], "token_counts": [1]},
        admissions=[
            cache_service_pb2.Admission(sequence_id=2, token_ids=PROMPT_2),
            cache_service_pb2.Admission(sequence_id=3),
        ],
    )
    first = ask(pair.cache.PlanStep, request)
    books = pair.books()
    assert ask(pair.cache.PlanStep, request) == first
    running_lease.run(first)
    running_lease.await_settled()
    assert ask(pair.cache.PlanStep, request) == first
    assert pair.statistics().planned_step_count == before + 1
    assert [block.block_id for block in pair.blocks(lease_id=running_lease.lease_id)] == [
        block.block_id for block in books[0] if block.reference_count
    ]
    goes_on()


def test_a_request_id_for_another_plan_is_refused(pair: Pair, running_lease: LeaseHolder, goes_on: Any) -> None:
    extends = {"sequence_ids": [1], "token_counts": [1]}
    running_lease.run(running_lease.plan(request_id="p", extends=extends))
    running_lease.await_settled()
    with pair.untouched(), pytest.raises(RefusedError) as caught:
        running_lease.plan(request_id="p")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED")
    assert caught.value.metadata == {"request_id": "p"}
    goes_on()


def test_a_repeated_lease_is_made_once(pair: Pair, create_lease: CreateLease) -> None:
    before = len(pair.leases())
    first = create_lease(request_id="lease")
    assert create_lease(request_id="lease") == first
    assert len(pair.leases()) == before + 1
    with pytest.raises(RefusedError) as caught:
        create_lease(request_id="lease", ttl_s=7)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED")
    assert len(pair.leases()) == before + 1


def test_a_repeated_lease_that_has_ended_is_not_answered(pair: Pair, create_lease: CreateLease) -> None:
    first = create_lease(request_id="ended")
    first.delete()
    for _ in range(2):
        with pytest.raises(RefusedError) as caught:
            create_lease(request_id="ended")
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")
        await_that("the lease is gone", lambda: not pair.has_lease(first.lease_id))
    assert create_lease(request_id="another").lease_id != first.lease_id


def test_repeated_leases_that_are_asked_for_together_are_one(pair: Pair, create_lease: CreateLease) -> None:
    request = cache_service_pb2.CreateLeaseRequest(pool="default", request_id="together")
    calls = [pair.cache.CreateLease.future(request, timeout=DEADLINE_S) for _ in range(8)]
    answers = [call.result() for call in calls]
    assert all(answer == answers[0] for answer in answers)
    LeaseHolder(pair, answers[0].lease_id, 0, 0).delete()


def test_a_lease_may_be_deleted_twice(pair: Pair, lease: LeaseHolder) -> None:
    lease.delete()
    lease.delete()
    await_that("the lease is gone", lambda: not pair.has_lease(lease.lease_id))
    lease.delete()
    LeaseHolder(pair, "never was", 0, 0).delete()
    with pytest.raises(RefusedError, match="LEASE_NOT_FOUND"):
        lease.renew()
