"""Reasons of errors: each has a status, with the retry delay that fits it, and is provoked by a test."""

from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.cache.v1 import error_pb2
from quire.cache.v1 import reasons as cache
from quire.cache.v1.error_reason import ErrorReason
from quire.compute.v1 import reasons as compute
from quire.engine.v1 import reasons as engine
from quire.serving.errors import ErrorStatus, to_grpc_status, to_message

ROOT = Path(__file__).parents[3]
ALL: tuple[ErrorReason, ...] = (*cache.Reason, *compute.Reason, *engine.Reason)
REASONS = pytest.mark.parametrize("reason", ALL, ids=lambda reason: f"{type(reason).__module__} {reason}")


@REASONS
def test_each_reason_has_a_code(reason: ErrorReason) -> None:
    assert grpc.StatusCode[reason.status_code].value[0] == error_pb2.StatusCode.Value(f"STATUS_CODE_{reason.status_code}")


@REASONS
def test_a_reason_of_several_services_has_one_status(reason: ErrorReason) -> None:
    assert {(other.status_code, other.retry_delay_s) for other in ALL if other == reason} == {
        (reason.status_code, reason.retry_delay_s)
    }


@REASONS
def test_what_is_used_up_or_away_says_when_to_retry(reason: ErrorReason) -> None:
    may_help = reason.status_code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
    # Pins stay until they are taken back. The token that a busy sequence waits for is reported without the caller.
    expected = {"PIN_BUDGET_SPENT": False, "SEQUENCE_BUSY": True}.get(reason, may_help)
    assert (reason.retry_delay_s is not None) == expected
    assert 0 <= (reason.retry_delay_s or 0) <= 1


@REASONS
def test_each_reason_is_provoked_by_a_test_with_real_processes(reason: ErrorReason) -> None:
    files = [path for folder in ("integration", "gateway") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    assert any(f'"{reason.value}"' in path.read_text().upper() for path in files)


@pytest.mark.parametrize(
    ("reason", "delays_s"),
    [(cache.Reason.OUT_OF_BLOCKS, [0.02]), (cache.Reason.TOKEN_BUDGET_SPENT, [0]), (compute.Reason.BAD_SIGNATURE, [])],
)
def test_a_reason_becomes_a_status_and_a_message(reason: ErrorReason, delays_s: list[float]) -> None:
    error = ErrorStatus.of(reason, "7 are needed", "a.quire.dev", {"needed": "7"})
    status = to_grpc_status(error)
    assert (status.code, status.details) == (grpc.StatusCode[reason.status_code], "7 are needed")
    ((name, value),) = status.trailing_metadata
    assert name == "grpc-status-details-bin"
    sent = status_pb2.Status.FromString(value)
    first, *others = sent.details
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert first.Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "a.quire.dev", {"needed": "7"})
    assert all(detail.Unpack(retry) for detail in others)
    assert [retry.retry_delay.ToNanoseconds() / 1e9 for _ in others] == delays_s
    message = to_message(error)
    assert (message.code, message.reason, message.message) == (sent.code, reason, sent.message)
    assert dict(message.metadata) == {"needed": "7"}
    assert [message.retry_delay.ToNanoseconds() / 1e9] * message.HasField("retry_delay") == delays_s
