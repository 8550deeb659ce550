"""One table per service from reasons to statuses: complete, as the protos say, and provoked by a test, each row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.cache.v1 import error_pb2
from quire.cachemgr import errors as cache_errors
from quire.cachemgr.service import statuses as cache_statuses
from quire.gateway.grpc import errors as engine_errors
from quire.compute.v1 import worker_service_pb2
from quire.engine.v1 import engine_service_pb2
from quire.serving.errors import ErrorStatus, to_grpc_status, to_message
from quire.worker.grant import errors as worker_errors

ROOT = Path(__file__).parents[3]
PREFIX = "ERROR_REASON_"
MESSAGE = "the message, with 7 in it"


def cache_status(reason: Any) -> ErrorStatus:
    return cache_statuses.to_error_status(cache_errors.refuse(reason, MESSAGE, value=7, pool="a"))


def worker_status(reason: Any) -> ErrorStatus:
    return worker_errors.Refused(reason, MESSAGE, value=7, pool="a").status


def engine_status(reason: Any) -> ErrorStatus:
    return engine_errors.status_of(reason, MESSAGE, {"value": "7", "pool": "a"})


def retry_delay_s(detail: Any) -> float:
    """The delay of a RetryInfo."""
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    return float(retry.retry_delay.ToNanoseconds() / 1e9)


class Service:
    """The tables of one service that must agree."""

    def __init__(
        self, name: str, *, enum: Any, proto: str, errors: Any, table: Any, delays: Any, domain: str, status: Any
    ) -> None:
        self.name = name
        self.names_in_proto = {value.removeprefix(PREFIX) for value, _ in enum.items()} - {"UNSPECIFIED"}
        self.codes_in_proto = {
            reason: code
            for code, reason in re.findall(
                rf"  // ([A-Z_]+)\. [^\n]*\n(?:  //[^\n]*\n)*  {PREFIX}([A-Z_]+) = ", (ROOT / proto).read_text()
            )
        }
        self.reasons = list(errors.Reason)
        self.table = table
        self.delays = delays
        self.domain = domain
        self.status = status

    def retry_delays_s(self, reason: Any) -> list[float]:
        """None or one."""
        return [self.delays[reason]] if reason in self.delays else []


CACHE = Service(
    "cache",
    enum=error_pb2.ErrorReason,
    proto="protos/quire/cache/v1/error.proto",
    errors=cache_errors,
    table=cache_statuses.STATUS_CODES,
    delays=cache_statuses.RETRY_DELAYS_S,
    domain="cache.quire.dev",
    status=cache_status,
)
WORKER = Service(
    "worker",
    enum=worker_service_pb2.ErrorReason,
    proto="protos/quire/compute/v1/worker_service.proto",
    errors=worker_errors,
    table=worker_errors.STATUS_CODES,
    delays=worker_errors.RETRY_DELAYS_S,
    domain="compute.quire.dev",
    status=worker_status,
)
ENGINE = Service(
    "engine",
    enum=engine_service_pb2.ErrorReason,
    proto="protos/quire/engine/v1/engine_service.proto",
    errors=engine_errors,
    table=engine_errors.STATUS_CODES,
    delays=engine_errors.RETRY_DELAYS_S,
    domain="engine.quire.dev",
    status=engine_status,
)
SERVICES = pytest.mark.parametrize("service", [CACHE, WORKER, ENGINE], ids=lambda service: service.name)
ROWS = pytest.mark.parametrize(
    ("service", "reason"),
    [
        pytest.param(service, reason, id=f"{service.name} {reason}")
        for service in (CACHE, WORKER, ENGINE)
        for reason in service.reasons
    ],
)


@SERVICES
def test_enum_and_table_have_the_reasons_of_the_proto(service: Service) -> None:
    assert {reason.value for reason in service.reasons} == service.names_in_proto
    assert all(reason.name == reason.value for reason in service.reasons)
    assert set(service.table) == set(service.reasons)


@SERVICES
def test_the_proto_says_the_code_of_each_reason(service: Service) -> None:
    assert service.codes_in_proto == {reason.value: code.name for reason, code in service.table.items()}


@ROWS
def test_each_row_is_a_status_with_an_error_info_and_when_to_ask_again(service: Service, reason: Any) -> None:
    error = service.status(reason)
    status = to_grpc_status(error)
    assert status.code is service.table[reason] is not grpc.StatusCode.OK
    assert status.details == MESSAGE
    ((name, value),) = status.trailing_metadata
    assert name == "grpc-status-details-bin"
    sent = status_pb2.Status.FromString(value)
    assert (sent.code, sent.message) == (service.table[reason].value[0], MESSAGE)
    first, *others = sent.details
    info = error_details_pb2.ErrorInfo()
    assert first.Unpack(info)
    assert (info.reason, info.domain) == (reason.value, service.domain)
    assert dict(info.metadata) == {"value": "7", "pool": "a"}
    assert [retry_delay_s(detail) for detail in others] == service.retry_delays_s(reason)


@ROWS
def test_each_row_is_a_message_too(service: Service, reason: Any) -> None:
    message = to_message(service.status(reason))
    assert (message.code, message.reason, message.message) == (service.table[reason].value[0], reason.value, MESSAGE)
    assert dict(message.metadata) == {"value": "7", "pool": "a"}
    said = [message.retry_delay.ToNanoseconds() / 1e9] if message.HasField("retry_delay") else []
    assert said == service.retry_delays_s(reason)


@ROWS
def test_what_is_used_up_or_away_says_when_to_ask_again(service: Service, reason: Any) -> None:
    code = service.table[reason]
    may_help = code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    # Pins stay until they are taken back; what a busy sequence waits for comes by itself.
    expected = {"PIN_BUDGET_SPENT": False, "SEQUENCE_BUSY": True}.get(reason.value, may_help)
    assert bool(service.retry_delays_s(reason)) == expected
    assert all(0 <= delay_s <= 1 for delay_s in service.retry_delays_s(reason))


@ROWS
def test_each_reason_is_provoked_by_a_test_with_real_processes(service: Service, reason: Any) -> None:
    sources = [path.read_text() for path in (ROOT / "tests/integration").glob("test_*.py")]
    assert any(f'"{reason.value}"' in source for source in sources)
