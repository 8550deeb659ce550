"""Refusals of the worker, and the one table from them to gRPC statuses."""

from __future__ import annotations

from enum import StrEnum

from grpc import StatusCode

from quire.serving.errors import AWAY_RETRY_DELAY_S, OVERLOADED_RETRY_DELAY_S, ErrorStatus

DOMAIN = "compute.quire.dev"


class Reason(StrEnum):
    """Why; the names of quire.compute.v1.ErrorReason without their prefix."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    TOKENS_MISMATCH = "TOKENS_MISMATCH"
    BLOCK_OUT_OF_RANGE = "BLOCK_OUT_OF_RANGE"
    BAD_SIGNATURE = "BAD_SIGNATURE"
    LEASE_FENCED = "LEASE_FENCED"
    STEP_OUT_OF_ORDER = "STEP_OUT_OF_ORDER"
    EPOCH_CHANGED = "EPOCH_CHANGED"
    PRIOR_STEP_FAILED = "PRIOR_STEP_FAILED"
    STEP_FAILED = "STEP_FAILED"
    POOL_DETACHED = "POOL_DETACHED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    OVERLOADED = "OVERLOADED"
    CREDENTIALS_MISSING = "CREDENTIALS_MISSING"
    TOKEN_REJECTED = "TOKEN_REJECTED"
    ROLE_MISSING = "ROLE_MISSING"


STATUS_CODES: dict[Reason, StatusCode] = {
    Reason.INVALID_ARGUMENT: StatusCode.INVALID_ARGUMENT,
    Reason.TOKENS_MISMATCH: StatusCode.INVALID_ARGUMENT,
    Reason.BLOCK_OUT_OF_RANGE: StatusCode.INVALID_ARGUMENT,
    Reason.BAD_SIGNATURE: StatusCode.PERMISSION_DENIED,
    Reason.LEASE_FENCED: StatusCode.FAILED_PRECONDITION,
    Reason.STEP_OUT_OF_ORDER: StatusCode.FAILED_PRECONDITION,
    Reason.EPOCH_CHANGED: StatusCode.ABORTED,
    Reason.PRIOR_STEP_FAILED: StatusCode.ABORTED,
    Reason.STEP_FAILED: StatusCode.INTERNAL,
    Reason.POOL_DETACHED: StatusCode.UNAVAILABLE,
    Reason.SHUTTING_DOWN: StatusCode.UNAVAILABLE,
    Reason.OVERLOADED: StatusCode.RESOURCE_EXHAUSTED,
    Reason.CREDENTIALS_MISSING: StatusCode.UNAUTHENTICATED,
    Reason.TOKEN_REJECTED: StatusCode.UNAUTHENTICATED,
    Reason.ROLE_MISSING: StatusCode.PERMISSION_DENIED,
}

# In seconds; a reason without an entry is not cured by waiting.
RETRY_DELAYS_S: dict[Reason, float] = {
    Reason.POOL_DETACHED: AWAY_RETRY_DELAY_S,
    Reason.SHUTTING_DOWN: AWAY_RETRY_DELAY_S,
    Reason.OVERLOADED: OVERLOADED_RETRY_DELAY_S,
}


class Refused(Exception):
    """A call or a step was refused; `metadata` holds every number of the message."""

    def __init__(self, reason: Reason, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = {name: str(value) for name, value in metadata.items()}

    @property
    def status(self) -> ErrorStatus:
        code, delay_s = STATUS_CODES[self.reason], RETRY_DELAYS_S.get(self.reason)
        return ErrorStatus(code, self.reason.value, str(self), DOMAIN, self.metadata, delay_s)


def invalid(name: str, value: object, limit: object, **metadata: object) -> Refused:
    """Refuse a field that is out of range: names the field, its value and the limit.

    metadata has the sequence_id if the field is the input of one sequence: the client fails that sequence alone.
    """
    message = f"{name} is {value}; must be {limit}"
    return Refused(Reason.INVALID_ARGUMENT, message, field=name, value=value, limit=limit, **metadata)
