"""Refusals of EngineService. The code and the retry delay of each reason are options in engine_service.proto."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.client.errors import EngineStopped, InvalidRequest, OutOfRoom, QuireError, Unavailable
from quire.engine.v1 import engine_service_pb2
from quire.engine.v1.reasons import DOMAIN as DOMAIN
from quire.engine.v1.reasons import Reason as Reason
from quire.gateway.errors import HttpError, cause_of
from quire.serving.errors import CallEnded, ErrorStatus

MAX_SHOWN = 100
"""The most characters of a value in a message, so that the limit after it is not cut off."""


_OF_INPUT = {Reason.EMPTY_PROMPT, Reason.SEQUENCE_TOO_LONG, Reason.TOKEN_OUT_OF_RANGE}
# By the codes and statuses of the HTTP API.
_OF_CODE = {
    "model_not_found": Reason.MODEL_NOT_FOUND,
    "queue_full": Reason.QUEUE_FULL,
    "overloaded": Reason.OVERLOADED,
    "shutting_down": Reason.SHUTTING_DOWN,
}
_OF_STATUS = {
    400: Reason.INVALID_ARGUMENT,
    401: Reason.TOKEN_REJECTED,
    403: Reason.ROLE_MISSING,
    404: Reason.MODEL_NOT_FOUND,
    413: Reason.INVALID_ARGUMENT,
    429: Reason.LIMIT_EXCEEDED,
    503: Reason.SERVICE_AWAY,
}
# Fields that are called otherwise in the protos.
_RENAMED = {
    "timeout_s": "timeout",
    "expected_back_s": "expected_in",
    "retention.num_tokens": "retention.token_count",
    "retention.ttl_s": "retention.ttl",
    "breakpoints.num_tokens": "breakpoints.token_count",
    "breakpoints.ttl_s": "breakpoints.ttl",
}
_HOLDERS: Mapping[str, str] = {
    field.name: holder
    for holder, message in (
        ("parameters", engine_service_pb2.GenerationParameters),
        ("cache", engine_service_pb2.CacheParameters),
    )
    for field in message.DESCRIPTOR.fields
}
# The worker's name for the parameters of a sequence.
_OF_WORKER = "sampling."


def status_of(
    reason: Reason,
    message: str,
    metadata: Mapping[str, str] | None = None,
    *,
    retry_after_s: float | None = None,
) -> ErrorStatus:
    """Return the status of a reason. retry_after_s None: as long as such a refusal usually takes."""
    return ErrorStatus.of(reason, message, DOMAIN, metadata, retry_delay_s=retry_after_s)


def invalid(field: str, value: object, limit: str) -> ErrorStatus:
    """Return the status of one field: its path in the request, the value, and the limit."""
    metadata = {"field": field, "value": str(value), "limit": limit}
    return status_of(Reason.INVALID_ARGUMENT, f"{field} is {value}; must be {limit}", metadata)


def status_of_error(error: QuireError | HttpError) -> ErrorStatus:
    """Return the status of an error of the engine, of the thin clients or of the gateway."""
    if isinstance(error, HttpError):
        return _status_of_http(error)
    cause = cause_of(error)
    metadata = {**cause.metadata, **error.metadata}
    if isinstance(cause, InvalidRequest):
        return _status_of_input(cause, metadata)
    return status_of(_reason_of(cause), error.message, metadata, retry_after_s=cause.retry_after_s)


def _reason_of(error: QuireError) -> Reason:
    if error.reason in (Reason.QUEUE_FULL, Reason.TOO_SLOW):
        return Reason[error.reason]
    if isinstance(error, OutOfRoom):
        return Reason.OVERLOADED
    if isinstance(error, Unavailable | EngineStopped):
        return Reason.SERVICE_AWAY
    return Reason.GENERATION_FAILED


def _status_of_input(error: InvalidRequest, metadata: dict[str, str]) -> ErrorStatus:
    reason = Reason[error.reason] if error.reason in _OF_INPUT else Reason.INVALID_ARGUMENT
    message = error.message
    if "field" in metadata:
        field = metadata["field"] = path_of(metadata["field"])
        if metadata.keys() >= {"value", "limit"}:
            message = f"{field} is {_shown(metadata['value'])}; must be {metadata['limit']}"
    return status_of(reason, message, metadata)


def _shown(value: str) -> str:
    return value if len(value) <= MAX_SHOWN else f"{value[: MAX_SHOWN - 1]}…"


def path_of(field: str) -> str:
    """Return the path in a GenerateRequest of a field of SamplingParams, of CacheParams or of a worker's refusal."""
    field = field.removeprefix(_OF_WORKER)
    field = _RENAMED.get(field, field)
    holder = _HOLDERS.get(field.partition(".")[0])
    return field if holder is None else f"{holder}.{field}"


def _status_of_http(error: HttpError) -> ErrorStatus:
    reason = _OF_CODE.get(error.code) or _OF_STATUS.get(error.status, Reason.GENERATION_FAILED)
    metadata = {} if error.param is None else {"field": error.param}
    return status_of(reason, error.message, metadata, retry_after_s=error.retry_after_s)


@contextmanager
def answering() -> Iterator[None]:
    """Make the call's status of an error that the block raises."""
    try:
        yield
    except (QuireError, HttpError) as error:
        raise CallEnded(status_of_error(error)) from None
