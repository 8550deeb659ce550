"""The one table from domain errors to gRPC statuses."""

from __future__ import annotations

from grpc import StatusCode

from quire.cachemgr.errors import Reason, Refusal
from quire.serving.errors import ErrorStatus

DOMAIN = "cache.quire.dev"

STATUS_CODES: dict[Reason, StatusCode] = {
    Reason.INVALID_ARGUMENT: StatusCode.INVALID_ARGUMENT,
    Reason.REQUEST_ID_REUSED: StatusCode.INVALID_ARGUMENT,
    Reason.EMPTY_PROMPT: StatusCode.INVALID_ARGUMENT,
    Reason.SEQUENCE_TOO_LONG: StatusCode.INVALID_ARGUMENT,
    Reason.TOKEN_OUT_OF_RANGE: StatusCode.INVALID_ARGUMENT,
    Reason.POSITION_OUT_OF_RANGE: StatusCode.INVALID_ARGUMENT,
    Reason.POOL_NOT_FOUND: StatusCode.NOT_FOUND,
    Reason.LEASE_NOT_FOUND: StatusCode.NOT_FOUND,
    Reason.SEQUENCE_NOT_FOUND: StatusCode.NOT_FOUND,
    Reason.SEQUENCE_EXISTS: StatusCode.ALREADY_EXISTS,
    Reason.EPOCH_CHANGED: StatusCode.ABORTED,
    Reason.NOTHING_TO_COMPUTE: StatusCode.FAILED_PRECONDITION,
    Reason.POOL_ALREADY_ATTACHED: StatusCode.FAILED_PRECONDITION,
    Reason.TERM_SUPERSEDED: StatusCode.FAILED_PRECONDITION,
    Reason.OUT_OF_BLOCKS: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_SEQUENCES: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_STEPS: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOKEN_BUDGET_SPENT: StatusCode.RESOURCE_EXHAUSTED,
    Reason.POOL_DETACHED: StatusCode.UNAVAILABLE,
    Reason.SHUTTING_DOWN: StatusCode.UNAVAILABLE,
    Reason.CREDENTIALS_MISSING: StatusCode.UNAUTHENTICATED,
    Reason.TOKEN_REJECTED: StatusCode.UNAUTHENTICATED,
    Reason.ROLE_MISSING: StatusCode.PERMISSION_DENIED,
}


def to_error_status(refusal: Refusal) -> ErrorStatus:
    """A refusal as the servers send it."""
    code = STATUS_CODES[refusal.reason]
    return ErrorStatus(code, refusal.reason.value, refusal.message, DOMAIN, refusal.metadata)
