"""The gate: what passes, what does not and why, and that a refusal changes nothing."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from quire.cache.v1 import grant_pb2
from quire.worker.grant.errors import Refused
from quire.worker.grant.gate import Gate

EPOCH, TERM, KEY = 7, 100, bytes(range(32))


@pytest.fixture
def gate() -> Gate:
    """Attached, with the lease "a" at step 1 and "b" at step 3."""
    gate = Gate("pool", EPOCH)
    gate.attach(TERM, KEY, ["a", "b"])
    for step_number in (1, 2):
        assert passes(gate, lease_id="b", step_number=step_number)
    return gate


def sign(key: bytes = KEY, **fields: Any) -> tuple[grant_pb2.SignedGrant, grant_pb2.StepGrant]:
    grant = grant_pb2.StepGrant(**{"pool": "pool", "epoch": EPOCH, "lease_id": "a", "step_number": 1} | fields)
    data = grant.SerializeToString()
    return grant_pb2.SignedGrant(grant=data, signature=hmac.digest(key, data, "sha256")), grant


def passes(gate: Gate, **fields: Any) -> bool:
    """Checks a grant and uses it up."""
    signed, grant = sign(**fields)
    gate.check(signed, grant)
    gate.use(grant)
    return True


def refusal(gate: Gate, key: bytes = KEY, **fields: Any) -> Refused:
    """Why a grant does not pass."""
    before = gate.statistics()
    with pytest.raises(Refused) as caught:
        gate.check(*sign(key, **fields))
    assert gate.statistics() == before
    return caught.value


def test_steps_pass_in_order_and_once(gate: Gate) -> None:
    for step_number in range(1, 6):
        error = refusal(gate, step_number=step_number + 1)
        assert (error.reason, error.metadata) == (
            "STEP_OUT_OF_ORDER",
            {"value": str(step_number + 1), "limit": str(step_number)},
        )
        assert passes(gate, step_number=step_number)
        assert refusal(gate, step_number=step_number).reason == "STEP_OUT_OF_ORDER"


@pytest.mark.parametrize("step_number", [-1, 0, 2, 2**62])
def test_only_the_next_number_passes(step_number: int, gate: Gate) -> None:
    assert refusal(gate, step_number=step_number).reason == "STEP_OUT_OF_ORDER"
    assert passes(gate)


def test_a_step_that_is_checked_and_not_used_may_come_again(gate: Gate) -> None:
    signed, grant = sign()
    gate.check(signed, grant)
    gate.check(signed, grant)
    assert passes(gate)


def test_leases_have_numbers_of_their_own(gate: Gate) -> None:
    assert passes(gate, lease_id="b", step_number=3)
    assert passes(gate, lease_id="a", step_number=1)
    assert refusal(gate, lease_id="c").reason == "LEASE_FENCED"


def test_another_key_does_not_sign(gate: Gate) -> None:
    assert refusal(gate, bytes(32)).reason == "BAD_SIGNATURE"


def test_every_bit_of_a_grant_is_signed(gate: Gate) -> None:
    signed, grant = sign(run_sequence_ids=[1], write_block_ids=[5])
    for field in ("grant", "signature"):
        data = getattr(signed, field)
        for index in range(len(data)):
            changed = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
            forged = grant_pb2.SignedGrant(grant=signed.grant, signature=signed.signature)
            setattr(forged, field, changed)
            with pytest.raises(Refused) as caught:
                gate.check(forged, grant)
            assert caught.value.reason == "BAD_SIGNATURE"


@pytest.mark.parametrize("length", [0, 1, 31, 33])
def test_a_signature_has_one_length(length: int, gate: Gate) -> None:
    signed, grant = sign()
    signed.signature = (signed.signature * 2)[:length]
    with pytest.raises(Refused) as caught:
        gate.check(signed, grant)
    assert caught.value.reason == "BAD_SIGNATURE"


def test_a_grant_of_another_epoch_or_pool_does_not_pass(gate: Gate) -> None:
    error = refusal(gate, epoch=EPOCH + 1)
    assert (error.reason, error.metadata) == ("EPOCH_CHANGED", {"value": str(EPOCH + 1), "epoch": str(EPOCH)})
    assert refusal(gate, pool="other").reason == "EPOCH_CHANGED"


def test_nothing_passes_before_the_first_attachment() -> None:
    gate = Gate("pool", EPOCH)
    gate.open_lease("a")
    error = refusal(gate)
    assert (error.reason, error.metadata) == ("POOL_DETACHED", {"pool": "pool"})
    assert (gate.attached_term, gate.highest_term) == (0, 0)


def test_a_fenced_lease_does_not_pass_any_more(gate: Gate) -> None:
    gate.fence_lease("a")
    error = refusal(gate)
    assert (error.reason, error.metadata) == ("LEASE_FENCED", {"lease_id_prefix": "a"})
    gate.fence_lease("a")
    assert passes(gate, lease_id="b", step_number=3)


def test_a_refusal_shows_only_the_beginning_of_a_lease(gate: Gate) -> None:
    error = refusal(gate, lease_id="0123456789abcdef")
    assert error.metadata == {"lease_id_prefix": "01234567"}
    assert "89abcdef" not in str(error)


def test_to_open_a_lease_again_changes_nothing(gate: Gate) -> None:
    gate.open_lease("b")
    assert passes(gate, lease_id="b", step_number=3)


def test_an_attachment_of_the_same_epoch_goes_on_with_its_leases(gate: Gate) -> None:
    assert gate.attach(TERM, KEY, ["b", "c"]) == ["a"]
    assert refusal(gate, lease_id="a").reason == "LEASE_FENCED"
    assert passes(gate, lease_id="b", step_number=3)
    assert passes(gate, lease_id="c")
    assert gate.attached_term == TERM


def test_a_new_epoch_forgets_leases_and_key(gate: Gate) -> None:
    gate.begin_epoch(EPOCH + 1)
    assert (gate.epoch, gate.attached_term, gate.highest_term) == (EPOCH + 1, 0, TERM)
    assert refusal(gate).reason == "EPOCH_CHANGED"
    assert refusal(gate, epoch=EPOCH + 1).reason == "POOL_DETACHED"
    other = bytes(32)
    assert gate.attach(TERM + 1, other, ["a"]) == []
    assert refusal(gate, epoch=EPOCH + 1).reason == "BAD_SIGNATURE"
    signed, grant = sign(other, epoch=EPOCH + 1)
    gate.check(signed, grant)
    assert gate.statistics().num_open_leases == 1


def test_a_lower_term_is_not_obeyed(gate: Gate) -> None:
    with pytest.raises(ValueError, match=f"term {TERM - 1} is below {TERM}"):
        gate.attach(TERM - 1, bytes(32), [])
    assert passes(gate)
    gate.obey(TERM + 5)
    with pytest.raises(ValueError, match="obeyed before"):
        gate.attach(TERM, KEY, ["a"])
    assert gate.highest_term == TERM + 5
    gate.begin_epoch(EPOCH + 1)
    with pytest.raises(ValueError, match="obeyed before"):
        gate.obey(TERM)
