"""Whatever is sent, there is a clear answer, nothing changes, and both servers still serve."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from integration.protocol_client import (
    CACHE_SERVICE,
    MAX_SEQUENCES,
    NUM_BLOCKS,
    VOCAB_SIZE,
    WORKER_SERVICE,
    LeaseHolder,
    Pair,
    RefusedError,
    StandInWorker,
    ask,
    draw_tokens,
)

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2

CreateLease = Callable[..., LeaseHolder]
Generate = Callable[[list[int], int], list[int]]
MOST = 2**31 - 1
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
PROMPT = draw_tokens(9, seed=1)


@dataclass(frozen=True)
class Wrong:
    """A request, and its answer; `metadata` are required entries of the answer's."""

    request: dict[str, Any]
    reason: str
    code: grpc.StatusCode = INVALID
    metadata: dict[str, str] = field(default_factory=dict)

    def check(self, error: RefusedError) -> None:
        assert (error.code, error.reason) == (self.code, self.reason)
        assert error.metadata.items() >= self.metadata.items()
        assert error.message
        if self.reason == "INVALID_ARGUMENT":
            assert error.metadata.get("field")


@pytest.fixture
def running(lease: LeaseHolder) -> LeaseHolder:
    """A lease with sequence 1, which has 9 tokens computed and one sampled."""
    lease.run(lease.admit((1, PROMPT)))
    lease.await_settled()
    return lease


@pytest.fixture
def still_right(running: LeaseHolder, generate: Generate) -> Iterator[None]:
    """After the test the lease goes on as if nothing had been asked."""
    yield
    running.go_on(1, num_steps=2)
    tokens = running.tokens[1]
    assert tokens == PROMPT + generate(PROMPT, len(tokens) - len(PROMPT))


# -- plans --------------------------------------------------------------------------------------------------------


def admission(seq_id: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {"admissions": [{"sequence_id": seq_id, "token_ids": tokens} | fields]}


def extends(**fields: Any) -> dict[str, Any]:
    return {"extends": {"sequence_ids": [1], "token_counts": [1]} | fields}


def fork(parent: int, children: list[int], at: int) -> dict[str, Any]:
    return {"forks": [{"parent_sequence_id": parent, "child_sequence_ids": children, "token_count": at}]}


def trim(seq_id: int, to: int) -> dict[str, Any]:
    return {"trim_sequence_ids": [seq_id], "trim_token_counts": [to]}


# Of the whole call: nothing of it is applied, and no step number is taken.
WRONG_PLANS = {
    "unknown lease": Wrong({"lease_id": "0" * 32}, "LEASE_NOT_FOUND", NOT_FOUND, {"lease_id": "00000000"}),
    "no lease": Wrong({"lease_id": ""}, "LEASE_NOT_FOUND", NOT_FOUND),
    "no epoch": Wrong({"epoch": 0}, "EPOCH_CHANGED", grpc.StatusCode.ABORTED, {"value": "0", "pool": "default"}),
    "negative epoch": Wrong({"epoch": -1}, "EPOCH_CHANGED", grpc.StatusCode.ABORTED, {"value": "-1"}),
    "request_id too long": Wrong({"request_id": "a" * 65}, "INVALID_ARGUMENT", INVALID, {"field": "request_id"}),
    "request_id too long in bytes": Wrong({"request_id": "ä" * 33}, "INVALID_ARGUMENT"),
    "trims of different lengths": Wrong(
        {"trim_sequence_ids": [1, 2], "trim_token_counts": [1]},
        "INVALID_ARGUMENT",
        INVALID,
        {"field": "trim_token_counts"},
    ),
    "extends without counts": Wrong(
        extends(token_counts=[]), "INVALID_ARGUMENT", INVALID, {"field": "extends.token_counts"}
    ),
    "extends with counts too many": Wrong(extends(token_counts=[1, 1]), "INVALID_ARGUMENT"),
    "the same sequence twice": Wrong(
        extends(sequence_ids=[1, 1], token_counts=[1, 1]),
        "INVALID_ARGUMENT",
        INVALID,
        {"field": "extends.sequence_ids"},
    ),
    "appends of different lengths": Wrong(
        extends(append_token_counts=[1, 1], append_token_ids=[1, 2]), "INVALID_ARGUMENT"
    ),
    "appends without counts": Wrong(extends(append_token_ids=[1]), "INVALID_ARGUMENT"),
    "appends that do not add up": Wrong(extends(append_token_counts=[2], append_token_ids=[1]), "INVALID_ARGUMENT"),
    "negative appends": Wrong(extends(append_token_counts=[-1]), "INVALID_ARGUMENT"),
    "appends to nothing": Wrong({"extends": {"append_token_ids": [1]}}, "INVALID_ARGUMENT"),
    "fork without children": Wrong(
        fork(1, [], at=5), "INVALID_ARGUMENT", INVALID, {"field": "forks.child_sequence_ids"}
    ),
    "negative budget": Wrong(
        {"admission_token_budget": -1}, "INVALID_ARGUMENT", INVALID, {"field": "admission_token_budget", "value": "-1"}
    ),
    "host copies of no kind": Wrong(
        {"host_copy_use": 4}, "INVALID_ARGUMENT", INVALID, {"field": "host_copy_use", "value": "4"}
    ),
    "negative reserve": Wrong({"admission_reserve_block_count": -1}, "INVALID_ARGUMENT"),
    "negative limit of an admission": Wrong(admission(2, PROMPT, max_compute_token_count=-1), "INVALID_ARGUMENT"),
    "salt too long": Wrong(admission(2, PROMPT, salt=bytes(65)), "INVALID_ARGUMENT", INVALID, {"value": "65 bytes"}),
    "a good item beside a bad one": Wrong(
        {"release_sequence_ids": [1], **admission(2, PROMPT), "trim_token_counts": [1]}, "INVALID_ARGUMENT"
    ),
}


@pytest.mark.parametrize("wrong", WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_a_plan_that_is_wrong_changes_nothing(
    wrong: Wrong, pair: Pair, running: LeaseHolder, still_right: None
) -> None:
    planned = pair.statistics().planned_step_count
    with pair.untouched(), pytest.raises(RefusedError) as caught:
        running.plan(**wrong.request)
    wrong.check(caught.value)
    assert caught.value.domain == "cache.quire.dev"
    assert pair.statistics().planned_step_count == planned


POOL_TOKENS = 4 * (NUM_BLOCKS - 1)

# Of one item: it is refused by itself.
WRONG_ITEMS = {
    "empty prompt": Wrong(admission(2, []), "EMPTY_PROMPT", INVALID, {"sequence_id": "2"}),
    "prompt longer than the pool": Wrong(
        admission(2, [1] * (POOL_TOKENS + 1)),
        "SEQUENCE_TOO_LONG",
        INVALID,
        {"value": str(POOL_TOKENS + 1), "limit": str(POOL_TOKENS), "limited_by": "pool", "sequence_id": "2"},
    ),
    "token beyond the vocabulary": Wrong(
        admission(2, [1, VOCAB_SIZE, 1]),
        "TOKEN_OUT_OF_RANGE",
        INVALID,
        {"index": "1", "value": str(VOCAB_SIZE), "limit": str(VOCAB_SIZE - 1), "sequence_id": "2"},
    ),
    "negative token": Wrong(admission(2, [-1]), "TOKEN_OUT_OF_RANGE", INVALID, {"index": "0", "value": "-1"}),
    "appended token beyond the vocabulary": Wrong(
        extends(append_token_counts=[1], append_token_ids=[MOST]), "TOKEN_OUT_OF_RANGE", INVALID, {"value": str(MOST)}
    ),
    "negative sequence": Wrong(admission(-1, PROMPT), "INVALID_ARGUMENT", INVALID, {"field": "sequence_id"}),
    "sequence that is there": Wrong(
        admission(1, PROMPT), "SEQUENCE_EXISTS", grpc.StatusCode.ALREADY_EXISTS, {"sequence_id": "1"}
    ),
    "fork to a sequence that is there": Wrong(
        fork(1, [1], at=3), "SEQUENCE_EXISTS", grpc.StatusCode.ALREADY_EXISTS, {"sequence_id": "1"}
    ),
    "fork to a negative sequence": Wrong(fork(1, [-7], at=3), "INVALID_ARGUMENT", INVALID, {"value": "-7"}),
    "unknown sequence": Wrong(extends(sequence_ids=[2]), "SEQUENCE_NOT_FOUND", NOT_FOUND, {"sequence_id": "2"}),
    "trim of an unknown sequence": Wrong(trim(2, 1), "SEQUENCE_NOT_FOUND", NOT_FOUND, {"sequence_id": "2"}),
    "fork of an unknown sequence": Wrong(fork(2, [3], at=1), "SEQUENCE_NOT_FOUND", NOT_FOUND, {"sequence_id": "2"}),
    "no tokens to compute": Wrong(extends(token_counts=[0]), "INVALID_ARGUMENT", INVALID, {"value": "0"}),
    "negative tokens to compute": Wrong(extends(token_counts=[-5]), "INVALID_ARGUMENT", INVALID, {"value": "-5"}),
    "more to compute than there is": Wrong(
        extends(token_counts=[2]),
        "NOTHING_TO_COMPUTE",
        PRECONDITION,
        {"sequence_id": "1", "value": "2", "limit": "1"},
    ),
    "more to compute than the pool holds": Wrong(
        extends(token_counts=[MOST]), "SEQUENCE_TOO_LONG", INVALID, {"limit": str(POOL_TOKENS)}
    ),
    "trim to nothing": Wrong(
        trim(1, 0), "POSITION_OUT_OF_RANGE", INVALID, {"sequence_id": "1", "value": "0", "limit": "10"}
    ),
    "trim to less than nothing": Wrong(trim(1, -MOST - 1), "POSITION_OUT_OF_RANGE"),
    "trim to more than there is": Wrong(trim(1, 11), "POSITION_OUT_OF_RANGE", INVALID, {"value": "11", "limit": "10"}),
    "fork at the start": Wrong(fork(1, [2], at=0), "POSITION_OUT_OF_RANGE", INVALID, {"value": "0", "limit": "10"}),
    "fork behind the end": Wrong(fork(1, [2], at=11), "POSITION_OUT_OF_RANGE", INVALID, {"value": "11", "limit": "10"}),
    "too few blocks": Wrong(
        admission(2, draw_tokens(112, seed=2)),
        "OUT_OF_BLOCKS",
        EXHAUSTED,
        {"sequence_id": "2", "needed": "28", "free": "27", "retired": "0"},
    ),
    "too few blocks beside the reserve": Wrong(
        admission(2, draw_tokens(20, seed=2)) | {"admission_reserve_block_count": 23},
        "OUT_OF_BLOCKS",
        EXHAUSTED,
        {"sequence_id": "2", "needed": "28", "free": "27", "retired": "0"},
    ),
    "reserve of more than there is": Wrong(
        admission(2, [1]) | {"admission_reserve_block_count": MOST}, "OUT_OF_BLOCKS", EXHAUSTED, {"free": "27"}
    ),
}


@pytest.mark.parametrize("wrong", WRONG_ITEMS.values(), ids=WRONG_ITEMS)
def test_an_item_that_is_wrong_changes_nothing(
    wrong: Wrong, pair: Pair, running: LeaseHolder, still_right: None
) -> None:
    with pair.untouched():
        wrong.check(running.refused(**wrong.request))
        running.await_settled()


def test_a_bad_item_does_not_spoil_the_others(pair: Pair, running: LeaseHolder, still_right: None) -> None:
    prompts = {2: [1, VOCAB_SIZE], 3: list(PROMPT), 4: [], 5: PROMPT[::-1]}
    running.tokens |= prompts
    plan = running.plan(
        admissions=[{"sequence_id": seq_id, "token_ids": tokens} for seq_id, tokens in prompts.items()],
        extends={"sequence_ids": [9], "token_counts": [1]},
    )
    assert [refusal.sequence_id for refusal in plan.refusals] == [9, 2, 4]
    assert [refusal.item for refusal in plan.refusals] == [
        cache_service_pb2.PLAN_ITEM_EXTEND,
        cache_service_pb2.PLAN_ITEM_ADMISSION,
        cache_service_pb2.PLAN_ITEM_ADMISSION,
    ]
    assert list(plan.admitted_sequence_ids) == [3, 5]
    running.run(plan)


def test_a_prompt_longer_than_the_model_is_refused(pair: Pair, attach: Callable[[], StandInWorker]) -> None:
    worker = attach()
    worker.register("small-model")
    lease = worker.create_lease(pair, "small-model")
    lease.admit((1, [1] * 24))
    (refusal,) = lease.plan(admissions=[{"sequence_id": 2, "token_ids": [1] * 25}]).refusals
    assert refusal.error.reason == "SEQUENCE_TOO_LONG"
    expected = {"sequence_id": "2", "value": "25", "limit": "24", "limited_by": "model"}
    assert dict(refusal.error.metadata) == expected
    lease.delete()


def test_a_sequence_does_not_grow_beyond_the_pool(pair: Pair, running: LeaseHolder) -> None:
    running.run(running.plan(release_sequence_ids=[1]))
    running.tokens[2] = draw_tokens(80, seed=3)
    running.run(running.admit((2, running.tokens[2])))
    running.await_settled()
    more = draw_tokens(39, seed=4)
    running.tokens[2] += more
    appended = {"append_token_counts": [39], "append_token_ids": more}
    running.run(running.accepted(running.plan(extends={"sequence_ids": [2], "token_counts": [40], **appended})))
    assert len(running.tokens[2]) == POOL_TOKENS + 1
    running.await_settled()
    with pair.untouched():
        error = running.refused(extends={"sequence_ids": [2], "token_counts": [1]})
        running.await_settled()
    assert error.reason == "SEQUENCE_TOO_LONG"


def test_blocks_that_are_retired_are_counted(pair: Pair, running: LeaseHolder) -> None:
    plans = [running.admit((2, draw_tokens(80, seed=5))), running.plan(release_sequence_ids=[2])]
    assert plans[1].block_counts.retired_count == 20
    plans.append(running.plan(**admission(3, draw_tokens(40, seed=6))))
    error = RefusedError.of_message(plans[2].refusals[0].error)
    assert (error.code, error.reason) == (EXHAUSTED, "OUT_OF_BLOCKS")
    assert error.metadata == {"sequence_id": "3", "needed": "10", "free": "7", "retired": "20"}
    for plan in plans:
        running.run(plan, skip=True)
    running.await_settled()
    running.run(running.admit((3, draw_tokens(40, seed=6))))


def test_too_many_sequences(pair: Pair, running: LeaseHolder, create_lease: CreateLease, still_right: None) -> None:
    other = create_lease()
    others = range(2, MAX_SEQUENCES + 1)
    other.run(other.admit(*((seq_id, draw_tokens(3, seed=seq_id)) for seq_id in others)))
    other.await_settled()
    expected = {"sequence_id": "50", "limit": str(MAX_SEQUENCES)}
    with pair.untouched():
        for request in (admission(50, PROMPT), fork(1, [50], at=5)):
            error = running.refused(**request)
            assert (error.code, error.reason) == (EXHAUSTED, "TOO_MANY_SEQUENCES")
            assert error.metadata == expected
        running.await_settled()
    assert pair.worker_statistics().sequence_count == MAX_SEQUENCES


def test_too_many_steps_in_flight(pair: Pair, running: LeaseHolder, still_right: None) -> None:
    plans = [running.plan() for _ in range(64)]
    with pair.untouched(), pytest.raises(RefusedError) as caught:
        running.plan()
    assert (caught.value.code, caught.value.reason) == (EXHAUSTED, "TOO_MANY_STEPS")
    assert caught.value.metadata == {"limit": "64"}
    for plan in plans:
        running.run(plan)
    running.await_settled()


def test_the_budget_of_admissions(running: LeaseHolder, still_right: None) -> None:
    prompts = {2: draw_tokens(5, seed=2), 3: draw_tokens(5, seed=3), 4: draw_tokens(5, seed=4)}
    running.tokens |= prompts
    admissions = [{"sequence_id": seq_id, "token_ids": tokens} for seq_id, tokens in prompts.items()]
    plan = running.plan(admissions=admissions, admission_token_budget=8)
    assert list(plan.run_token_counts) == [5, 3]
    (refusal,) = plan.refusals
    assert (refusal.sequence_id, refusal.error.reason) == (4, "TOKEN_BUDGET_SPENT")
    assert (refusal.error.code, dict(refusal.error.metadata)) == (EXHAUSTED.value[0], {"sequence_id": "4"})
    running.run(plan)


# -- other calls --------------------------------------------------------------------------------------------------


def ttl(seconds: int, nanos: int = 0) -> dict[str, Any]:
    return {"pool": "default", "ttl": Duration(seconds=seconds, nanos=nanos)}


WRONG_CALLS = {
    "ttl too short": ("CreateLease", Wrong(ttl(0, 999_999_999), "INVALID_ARGUMENT", INVALID, {"field": "ttl"})),
    "ttl of nothing": ("CreateLease", Wrong(ttl(0), "INVALID_ARGUMENT", INVALID, {"field": "ttl"})),
    "ttl too long": ("CreateLease", Wrong(ttl(3600, 1_000_000), "INVALID_ARGUMENT", INVALID, {"field": "ttl"})),
    "negative ttl": ("CreateLease", Wrong(ttl(-5), "INVALID_ARGUMENT", INVALID, {"field": "ttl"})),
    "ttl of ages": ("CreateLease", Wrong(ttl(2**62), "INVALID_ARGUMENT", INVALID, {"field": "ttl"})),
    "negative ttl of ages": ("CreateLease", Wrong(ttl(-(2**63)), "INVALID_ARGUMENT", INVALID, {"field": "ttl"})),
    "lease's request_id too long": ("CreateLease", Wrong({"request_id": "a" * 65}, "INVALID_ARGUMENT")),
    "lease of an unknown pool": (
        "CreateLease",
        Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND, {"pool": "none"}),
    ),
    "renewal of an unknown lease": ("RenewLease", Wrong({"lease_id": "a"}, "LEASE_NOT_FOUND", NOT_FOUND)),
    "sequence of an unknown lease": ("GetSequence", Wrong({"lease_id": "a"}, "LEASE_NOT_FOUND", NOT_FOUND)),
    "unknown pool": ("GetPool", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND, {"pool": "none"})),
    "leases of an unknown pool": ("ListLeases", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND)),
    "sequences of an unknown pool": ("ListSequences", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND)),
    "blocks of an unknown pool": ("ListBlocks", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND)),
    "lookup in an unknown pool": (
        "LookupPrefix",
        Wrong({"pool": "none", "token_ids": [1]}, "POOL_NOT_FOUND", NOT_FOUND),
    ),
    "lookup of nothing": ("LookupPrefix", Wrong({}, "EMPTY_PROMPT")),
    "lookup of a token beyond the vocabulary": (
        "LookupPrefix",
        Wrong(
            {"pool": "default", "token_ids": [1, VOCAB_SIZE]},
            "TOKEN_OUT_OF_RANGE",
            metadata={"index": "1", "value": str(VOCAB_SIZE)},
        ),
    ),
    "lookup of a negative token": ("LookupPrefix", Wrong({"pool": "default", "token_ids": [-1]}, "TOKEN_OUT_OF_RANGE")),
    "explanation of a token beyond the vocabulary": (
        "ExplainPrefix",
        Wrong({"pool": "default", "token_ids": [VOCAB_SIZE]}, "TOKEN_OUT_OF_RANGE"),
    ),
    "pin of a token beyond the vocabulary": (
        "PinPrefix",
        Wrong({"pool": "default", "token_ids": [VOCAB_SIZE]}, "TOKEN_OUT_OF_RANGE"),
    ),
    "lookup with a salt too long": ("LookupPrefix", Wrong({"token_ids": [1], "salt": bytes(65)}, "INVALID_ARGUMENT")),
    "reset of an unknown pool": ("ResetPrefixCache", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND)),
    "audit of an unknown pool": ("AuditPool", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND)),
    "statistics of an unknown pool": ("GetStatistics", Wrong({"pool": "none"}, "POOL_NOT_FOUND", NOT_FOUND)),
    "unknown state": (
        "ListBlocks",
        Wrong({"pool": "default", "state": 9}, "INVALID_ARGUMENT", INVALID, {"field": "state", "value": "9"}),
    ),
}
for method, largest in {"ListPools": 1_000, "ListLeases": 1_000, "ListSequences": 1_000, "ListBlocks": 10_000}.items():
    pool = {} if method == "ListPools" else {"pool": "default"}
    for page_size in (-1, largest + 1, MOST):
        WRONG_CALLS[f"{method} with a page of {page_size}"] = (
            method,
            Wrong(pool | {"page_size": page_size}, "INVALID_ARGUMENT", INVALID, {"field": "page_size"}),
        )
    for token in ("/1", "!", "²", "9" * 5_000, "a\n", "٣"):
        WRONG_CALLS[f"{method} from {token[:9]!r}"] = (
            method,
            Wrong(pool | {"page_token": token}, "INVALID_ARGUMENT", INVALID, {"field": "page_token"}),
        )


@pytest.mark.parametrize(("method", "wrong"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_call_that_is_wrong_changes_nothing(
    method: str, wrong: Wrong, pair: Pair, running: LeaseHolder, still_right: None
) -> None:
    request = getattr(cache_service_pb2, f"{method}Request")(**wrong.request)
    with pair.untouched(), pytest.raises(RefusedError) as caught:
        ask(getattr(pair.cache, method), request)
    wrong.check(caught.value)
    assert caught.value.domain == "cache.quire.dev"


@pytest.mark.parametrize("block_count", [2**24 + 1, MOST])
def test_a_pool_whose_books_would_not_fit_into_memory_is_refused(
    block_count: int, attach: Callable[[], StandInWorker]
) -> None:
    with pytest.raises(RefusedError) as caught:
        attach().register("vast", block_count=block_count)
    assert (caught.value.code, caught.value.reason) == (INVALID, "INVALID_ARGUMENT")
    assert caught.value.metadata["field"] == "geometry.block_count"


@pytest.mark.parametrize("char", ["x", "\0", "ä", "\U0001f9ca"])
def test_a_refusal_that_quotes_what_is_long_still_arrives(char: str, pair: Pair) -> None:
    """A status longer than HTTP/2's limit for headers would come without its reason, and as another code."""
    with pytest.raises(RefusedError) as caught:
        ask(pair.cache.GetPool, cache_service_pb2.GetPoolRequest(pool=char * 16_000))
    Wrong({}, "POOL_NOT_FOUND", NOT_FOUND).check(caught.value)
    grant = grant_pb2.StepGrant(pool=char * 70_000, epoch=1).SerializeToString()
    with pytest.raises(RefusedError) as caught:
        ask(pair.worker.RunStep, worker_service_pb2.RunStepRequest(grant={"grant": grant}))
    Wrong({}, "EPOCH_CHANGED", grpc.StatusCode.ABORTED).check(caught.value)


# -- the worker ---------------------------------------------------------------------------------------------------

WRONG_SAMPLING: dict[str, dict[str, Any]] = {
    "negative temperature": {"temperature": -1},
    "temperature that is no number": {"temperature": math.nan},
    "infinite temperature": {"temperature": math.inf},
    "negative top_k": {"top_k": -1},
    "top_p of nothing": {"top_p": 0},
    "top_p above one": {"top_p": 1.5},
    "top_p that is no number": {"top_p": math.nan},
    "negative min_p": {"min_p": -0.1},
    "min_p above one": {"min_p": 2},
    "min_p that is no number": {"min_p": math.nan},
    "repetition penalty of nothing": {"repetition_penalty": 0},
    "infinite repetition penalty": {"repetition_penalty": math.inf},
    "presence penalty too large": {"presence_penalty": 2.5},
    "presence penalty that is no number": {"presence_penalty": math.nan},
    "negative log-probabilities": {"logprob_count": -1},
    "log-probabilities of too many": {"logprob_count": MOST},
    "one log-probability too many": {"logprob_count": 21},
    "prompt token beyond the vocabulary": {"prompt_token_ids": [1, VOCAB_SIZE]},
    "negative prompt token": {"prompt_token_ids": [-1]},
    "output token beyond the vocabulary": {"output_token_ids": [MOST]},
}


@pytest.mark.parametrize("sampling", WRONG_SAMPLING.values(), ids=WRONG_SAMPLING)
def test_sampling_that_can_not_be_is_refused(
    sampling: dict[str, Any], pair: Pair, running: LeaseHolder, still_right: None
) -> None:
    plan = running.extend(1)
    parameters = worker_service_pb2.SamplingParameters(**sampling)
    inputs = [worker_service_pb2.SequenceInput(sequence_id=1, sampling=parameters)]
    with pair.untouched(), pytest.raises(RefusedError) as caught:
        running.run(plan, inputs=inputs)
    Wrong({}, "INVALID_ARGUMENT").check(caught.value)
    assert caught.value.domain == "compute.quire.dev"
    running.run(plan)  # the number is not used up


@pytest.mark.parametrize("block_ids", [[NUM_BLOCKS], [-1], [0, 1, MOST], [-MOST - 1]], ids=str)
def test_checksums_of_blocks_that_are_none(block_ids: list[int], pair: Pair) -> None:
    with pytest.raises(RefusedError) as caught:
        ask(pair.worker.ChecksumBlocks, worker_service_pb2.ChecksumBlocksRequest(block_ids=block_ids))
    assert (caught.value.code, caught.value.reason) == (INVALID, "BLOCK_OUT_OF_RANGE")
    assert caught.value.metadata == {"value": str(block_ids[-1]), "limit": str(NUM_BLOCKS - 1)}


def test_checksums_of_too_many_blocks(pair: Pair) -> None:
    with pytest.raises(RefusedError) as caught:
        ask(pair.worker.ChecksumBlocks, worker_service_pb2.ChecksumBlocksRequest(block_ids=[1] * 10_001))
    Wrong({}, "INVALID_ARGUMENT").check(caught.value)


def test_the_checksum_of_a_block_is_the_same_however_often_it_is_asked_for(pair: Pair, running: LeaseHolder) -> None:
    ids = [1, 2, 1, 0, 2, 1] * 1_500 + [3]
    each = pair.checksums()
    request = worker_service_pb2.ChecksumBlocksRequest(block_ids=ids)
    assert list(ask(pair.worker.ChecksumBlocks, request).checksums) == [each[block_id] for block_id in ids]


# -- bytes --------------------------------------------------------------------------------------------------------

SERVICES: dict[str, tuple[Any, Any]] = {
    CACHE_SERVICE: (cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"], cache_service_pb2),
    WORKER_SERVICE: (worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"], worker_service_pb2),
}
METHODS = [
    pytest.param(name, method, id=method.name)
    if service is SERVICES[CACHE_SERVICE][0]
    else pytest.param(name, method, id=f"worker {method.name}")
    for name, (service, _) in SERVICES.items()
    for method in service.methods
]
CLEAN = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
}


def send_bytes(pair: Pair, service: str, method: Any, data: bytes) -> RefusedError | None:
    """Sends bytes as the one request of a call; returns how it failed, None if it did not."""
    channel = pair.cache_channel if service == CACHE_SERVICE else pair.worker_channel
    path = f"/{service}/{method.name}"
    try:
        if method.client_streaming:
            for _ in channel.stream_stream(path)(iter([data]), timeout=DEADLINE_S):
                pass
        elif method.server_streaming:
            call = channel.unary_stream(path)(data, timeout=DEADLINE_S)
            next(call, None)
            call.cancel()  # a watch does not end by itself
        else:
            channel.unary_unary(path)(data, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return RefusedError.of_call(error)
    return None


def full(message: Any, *, depth: int = 0) -> Any:
    """A message of this type with every field set to something."""
    filled = message()
    for descriptor in filled.DESCRIPTOR.fields:
        if descriptor.containing_oneof is not None and filled.WhichOneof(descriptor.containing_oneof.name):
            continue
        if descriptor.message_type is not None:
            if depth < 3 and not descriptor.message_type.GetOptions().map_entry:
                nested = full(descriptor.message_type._concrete_class, depth=depth + 1)
                target = getattr(filled, descriptor.name)
                target.add().CopyFrom(nested) if descriptor.is_repeated else target.CopyFrom(nested)
            continue
        kinds = {descriptor.CPPTYPE_STRING: b"seven" if descriptor.type == descriptor.TYPE_BYTES else "seven"}
        kinds |= {descriptor.CPPTYPE_BOOL: True, descriptor.CPPTYPE_FLOAT: 0.5, descriptor.CPPTYPE_ENUM: 1}
        value = kinds.get(descriptor.cpp_type, 7)
        if descriptor.is_repeated:
            getattr(filled, descriptor.name).append(value)
        else:
            setattr(filled, descriptor.name, value)
    return filled


def is_message(method: Any, data: bytes) -> bool:
    """True if the method may accept these bytes: a message of unknown fields."""
    try:
        method.input_type._concrete_class.FromString(data)
    except DecodeError:
        return False
    return True


def check_clean(error: RefusedError | None) -> None:
    if error is not None:
        assert error.code in CLEAN, error
        assert error.reason


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_bytes_at_random_are_answered(
    service: str, method: Any, pair: Pair, running: LeaseHolder, still_right: None
) -> None:
    generator = random.Random(f"{service}/{method.name}")
    with pair.untouched():
        for size in (1, 2, 3, 5, 8, 13, 50, 200, 3000) * 3:
            data = generator.randbytes(size)
            if not is_message(method, data):
                check_clean(send_bytes(pair, service, method, data))


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_a_message_that_is_cut_off_is_answered(
    service: str, method: Any, pair: Pair, running: LeaseHolder, still_right: None
) -> None:
    data = full(method.input_type._concrete_class).SerializeToString()
    with pair.untouched():
        for end in range(1, len(data), max(1, len(data) // 40)):
            check_clean(send_bytes(pair, service, method, data[:end]))
        check_clean(send_bytes(pair, service, method, data))


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_the_last_byte_missing_is_invalid(service: str, method: Any, pair: Pair) -> None:
    data = full(method.input_type._concrete_class).SerializeToString()
    if not data:
        data = b"\x0a\x05"
    error = send_bytes(pair, service, method, data[:-1] if len(data) > 2 else data)
    assert error is not None
    assert (error.code, error.reason) == (INVALID, "INVALID_ARGUMENT")


def test_an_unknown_method_is_answered(pair: Pair) -> None:
    for channel, service in ((pair.cache_channel, CACHE_SERVICE), (pair.worker_channel, WORKER_SERVICE)):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{service}/Nothing")(b"", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_unknown_fields_are_passed_over(pair: Pair, running: LeaseHolder, still_right: None) -> None:
    request: Message = cache_service_pb2.GetPoolRequest(pool="default")
    data = request.SerializeToString() + b"\xa2\x7d\x05later"
    answer = pair.cache_channel.unary_unary(f"/{CACHE_SERVICE}/GetPool")(data, timeout=DEADLINE_S)
    assert cache_service_pb2.GetPoolResponse.FromString(answer).pool.name == "default"
