"""The core as Python sees it: bytes as the protos say, and what is wrong as exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from random import Random

import pytest

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.cachemgr._core import POLICIES, Books, StepPlan, root_hash
from quire.cachemgr.errors import BrokenInvariant, CallRefused
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.ledger import Ledger, StepOutcome
from quire.cachemgr.plans import Admission, Fork, Restore, StepRequest, Trim

SIZES = {
    "num_blocks": 400,
    "num_host_blocks": 50,
    "block_size": 2,
    "max_sequences": 100,
    "max_sequence_tokens": 100,
    "vocab_size": 2**31 - 1,
}


def make_books(**changes: object) -> Books:
    return Books(**(SIZES | {"model_fingerprint": "m", "policy": "lru"} | changes))  # type: ignore[arg-type]


def tokens(rng: Random, count: int) -> bytes:
    return b"".join(rng.randrange(2**31 - 1).to_bytes(4, "little") for _ in range(count))


def plans() -> Iterator[StepPlan]:
    """Plans with something in every list, refusals too."""
    geometry = Geometry(**SIZES, block_bytes=1, model="m", model_fingerprint="m")  # type: ignore[arg-type]
    ledger, rng = Ledger("pool", 7, geometry), Random(0)
    ledger.open_lease("lease", ttl_s=1.0, now=0.0)
    prompts = [tokens(rng, 1 + rng.randrange(40)) for _ in range(8)]
    last = 2**31 - 1
    for step in range(1, 9):
        request = StepRequest(
            releases=[step - 3, last],
            offloads=[step + 19, last],
            trims=[Trim(step - 1, 1)],
            forks=[Fork(step - 2, [step + 50, 2**31 - 1 - step], 1)],
            extend_ids=[step - 1, 99],
            extend_token_counts=[1, 1],
            appends={step - 1: tokens(rng, 1)},
            restores=[Restore(step + 18)],
            admissions=[Admission(step, prompts[step - 1]), Admission(step + 20, prompts[0] + prompts[step - 1])],
        )
        plan = ledger.plan("lease", 7, request, now=0.0)
        ledger.reset_prefix_cache()  # so that restores copy
        yield plan
        ends = [start + count for start, count in zip(plan.run_starts, plan.run_token_counts, strict=True)]
        sampled = [seq_id for seq_id, samples in zip(plan.run_seq_ids, plan.run_samples, strict=True) if samples]
        ledger.settle(
            *("lease", step, StepOutcome.COMPUTED),
            seq_ids=plan.run_seq_ids,
            token_counts=ends,
            sampled_ids=sampled,
            sampled_tokens=[2**31 - 2] * len(sampled),
        )


def grant_of(plan: StepPlan) -> grant_pb2.StepGrant:
    return grant_pb2.StepGrant(
        pool="pööl",
        epoch=-(2**63),
        term=2**63 - 1,
        lease_id="lease",
        step_number=plan.step_number,
        known_step_number=plan.known_step,
        released_sequence_ids=plan.released_ids,
        fork_parent_ids=plan.fork_parent_ids,
        fork_child_ids=plan.fork_child_ids,
        write_sequence_ids=plan.write_seq_ids,
        write_first_indexes=plan.write_first_indexes,
        write_block_counts=plan.write_block_counts,
        write_block_ids=plan.write_block_ids,
        copy_source_block_ids=plan.copy_sources,
        copy_target_block_ids=plan.copy_targets,
        offloaded_sequence_ids=plan.offloaded_ids,
        offload_source_block_ids=plan.offload_sources,
        offload_target_host_block_ids=plan.offload_targets,
        restore_source_host_block_ids=plan.restore_sources,
        restore_target_block_ids=plan.restore_targets,
        run_sequence_ids=plan.run_seq_ids,
        run_starts=plan.run_starts,
        run_token_counts=plan.run_token_counts,
        run_samples=plan.run_samples,
        given_run_indexes=plan.given_run_indexes,
        given_token_digests=plan.given_digests,
    )


def answer_of(plan: StepPlan) -> cache_service_pb2.PlanStepResponse:
    counts, host_counts = plan.counts, plan.host_counts
    assert host_counts is not None
    host = {"free_count": host_counts.free, "held_count": host_counts.held, "retired_count": host_counts.retired}
    return cache_service_pb2.PlanStepResponse(
        step_number=plan.step_number,
        run_sequence_ids=plan.run_seq_ids,
        run_starts=plan.run_starts,
        run_token_counts=plan.run_token_counts,
        given_run_indexes=plan.given_run_indexes,
        admitted_sequence_ids=plan.admitted_ids,
        admitted_cached_token_counts=plan.admitted_cached_counts,
        restored_sequence_ids=plan.restored_ids,
        restored_token_counts=plan.restored_counts,
        host_block_counts=cache_service_pb2.HostBlockCounts(**host),
        block_counts=cache_service_pb2.BlockCounts(
            free_count=counts.free,
            cached_count=counts.cached,
            active_count=counts.active,
            retired_count=counts.retired,
        ),
    )


def test_a_grants_bytes_are_those_of_the_message() -> None:
    seen: set[str] = set()
    for plan in plans():
        encoded = plan.encode_grant("pööl", -(2**63), 2**63 - 1, "lease")
        grant = grant_pb2.StepGrant.FromString(encoded)
        assert grant == grant_of(plan)
        assert encoded == grant_of(plan).SerializeToString(deterministic=True)
        seen |= {field.name for field, _ in grant.ListFields()}
    assert seen == set(grant_pb2.StepGrant.DESCRIPTOR.fields_by_name), "no plan has anything in some field"


def test_an_answers_bytes_are_those_of_the_message() -> None:
    seen = {"grant", "refusals"}
    for plan in plans():
        answer = cache_service_pb2.PlanStepResponse.FromString(plan.encode_answer())
        assert answer == answer_of(plan)
        assert plan.has_refusals
        seen |= {field.name for field, _ in answer.ListFields()}
    assert seen == set(cache_service_pb2.PlanStepResponse.DESCRIPTOR.fields_by_name)


def test_the_root_of_a_chain_is_what_the_protocol_says() -> None:
    expected = sha256(b"quire prefix v1")
    for part in ("tenant é".encode(), b"salt", b"model"):
        expected.update(len(part).to_bytes(8, "little") + part)
    assert root_hash("tenant é", b"salt", "model") == expected.digest()


def test_a_call_that_would_leave_the_books_wrong_says_so() -> None:
    books = make_books()
    books.open_lease("lease", "", 30.0)
    with pytest.raises(BrokenInvariant, match="lease is opened twice"):
        books.open_lease("lease", "", 30.0)


def test_what_is_not_there_is_told() -> None:
    books = make_books()
    empty = {"extend_ids": b"", "extend_token_counts": b"", "appends": None}
    for call in (books.steps_of, books.in_flight, lambda lease_id: books.plan(lease_id, StepRequest(), 0.0, **empty)):
        with pytest.raises(KeyError):
            call("lease")
    assert (books.sequence("lease", 1), books.tokens("lease", 1), books.sequence_ids("lease")) == (None, None, [])
    with pytest.raises(KeyError, match="mru"):
        make_books(policy="mru")
    assert POLICIES == ["lineage", "lru"]


def test_a_report_names_a_token_for_each_sequence_it_sampled_for() -> None:
    books = make_books()
    books.open_lease("lease", "", 30.0)
    request = StepRequest(admissions=[Admission(1, bytes(4)), Admission(2, bytes(4))])
    books.plan("lease", request, 0.0, extend_ids=b"", extend_token_counts=b"", appends=None)
    before = books.state()
    ids, ones = b"\1\0\0\0\2\0\0\0", b"\1\0\0\0" * 2
    with pytest.raises(CallRefused, match="sampled_token_ids is 1 entries; must be 2 entries"):
        books.settle(
            *("lease", 1, "computed"), seq_ids=ids, token_counts=ones, sampled_ids=ids, sampled_tokens=bytes(4)
        )
    assert books.state() == before


def test_ids_come_in_fours() -> None:
    books = make_books()
    books.open_lease("lease", "", 30.0)
    with pytest.raises(ValueError, match="5 bytes are no list of 4-byte numbers"):
        books.plan("lease", StepRequest(), 0.0, extend_ids=b"12345", extend_token_counts=b"", appends=None)
    with pytest.raises(ValueError, match="is no outcome"):
        books.settle(*("lease", 1, "perhaps"), seq_ids=b"", token_counts=b"", sampled_ids=b"", sampled_tokens=b"")
