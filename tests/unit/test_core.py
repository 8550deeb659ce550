"""The core as Python sees it: bytes as the protos say, and what is wrong as exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from random import Random

import pytest
from planning import Admission, Fork, Planned, Restore, StepRequest, Trim, body_of, plan_step

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.cachemgr import _core
from quire.cachemgr._core import POLICIES, Books, root_hash
from quire.cachemgr.errors import BrokenInvariant, CallRefused
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.ledger import Ledger, StepOutcome

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


def decoded(request: StepRequest, lease_id: str = "lease") -> _core.StepRequest:
    return _core.StepRequest(body_of(request, lease_id), max_sequences=100, max_tokens=100)


def tokens(rng: Random, count: int) -> bytes:
    return b"".join(rng.randrange(2**31 - 1).to_bytes(4, "little") for _ in range(count))


def plans() -> Iterator[Planned]:
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
        plan = plan_step(ledger, "lease", request, now=0.0)
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
    for call in (books.steps_of, books.in_flight, lambda lease_id: books.plan(decoded(StepRequest(), lease_id), 0.0)):
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
    books.plan(decoded(request), 0.0)
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
        books.num_cached_tokens(b"12345", b"", "")
    with pytest.raises(ValueError, match="buffer underflow"):
        _core.StepRequest(b"\x0a\x05abc", max_sequences=1, max_tokens=1)
    with pytest.raises(ValueError, match="is no outcome"):
        books.settle(*("lease", 1, "perhaps"), seq_ids=b"", token_counts=b"", sampled_ids=b"", sampled_tokens=b"")
