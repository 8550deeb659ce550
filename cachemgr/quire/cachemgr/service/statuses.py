"""The one table from domain errors to gRPC statuses, and when asking again may help."""

from __future__ import annotations

from grpc import StatusCode

from quire.cachemgr.errors import CallRefused, Reason, Refusal
from quire.serving.errors import AWAY_RETRY_DELAY_S, OVERLOADED_RETRY_DELAY_S, ErrorStatus, answering

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
    Reason.PREFIX_NOT_CACHED: StatusCode.NOT_FOUND,
    Reason.SEQUENCE_EXISTS: StatusCode.ALREADY_EXISTS,
    Reason.EPOCH_CHANGED: StatusCode.ABORTED,
    Reason.CURSOR_EXPIRED: StatusCode.ABORTED,
    Reason.NOTHING_TO_COMPUTE: StatusCode.FAILED_PRECONDITION,
    Reason.POOL_ALREADY_ATTACHED: StatusCode.FAILED_PRECONDITION,
    Reason.TERM_SUPERSEDED: StatusCode.FAILED_PRECONDITION,
    Reason.SEQUENCE_OFFLOADED: StatusCode.FAILED_PRECONDITION,
    Reason.SEQUENCE_BUSY: StatusCode.FAILED_PRECONDITION,
    Reason.OUT_OF_BLOCKS: StatusCode.RESOURCE_EXHAUSTED,
    Reason.OUT_OF_HOST_BLOCKS: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_SEQUENCES: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_STEPS: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOKEN_BUDGET_SPENT: StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUOTA_EXCEEDED: StatusCode.RESOURCE_EXHAUSTED,
    Reason.PIN_BUDGET_SPENT: StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_LEASES: StatusCode.RESOURCE_EXHAUSTED,
    Reason.OVERLOADED: StatusCode.RESOURCE_EXHAUSTED,
    Reason.POOL_DETACHED: StatusCode.UNAVAILABLE,
    Reason.SHUTTING_DOWN: StatusCode.UNAVAILABLE,
    Reason.CREDENTIALS_MISSING: StatusCode.UNAUTHENTICATED,
    Reason.TOKEN_REJECTED: StatusCode.UNAUTHENTICATED,
    Reason.ROLE_MISSING: StatusCode.PERMISSION_DENIED,
}

# In seconds. A reason without an entry is not cured by waiting: the caller has to change something first, for
# PIN_BUDGET_SPENT unpin.
RETRY_DELAYS_S: dict[Reason, float] = {
    # A step or two later: blocks and rows of sequences are freed as steps end, outcomes as they are reported.
    Reason.OUT_OF_BLOCKS: 0.02,
    Reason.OUT_OF_HOST_BLOCKS: 0.02,
    Reason.TOO_MANY_SEQUENCES: 0.02,
    Reason.TOO_MANY_STEPS: 0.02,
    # Likewise: the token that it waits for is reported.
    Reason.SEQUENCE_BUSY: 0.02,
    # The next plan has a budget of its own.
    Reason.TOKEN_BUDGET_SPENT: 0.0,
    # Only sequences of the same tenant that end make room.
    Reason.QUOTA_EXCEEDED: 0.1,
    # Longer than the queue takes: a full queue is empty after tens of milliseconds.
    Reason.OVERLOADED: OVERLOADED_RETRY_DELAY_S,
    # The shortest ttl of a lease.
    Reason.TOO_MANY_LEASES: 1.0,
    Reason.POOL_DETACHED: AWAY_RETRY_DELAY_S,
    Reason.SHUTTING_DOWN: AWAY_RETRY_DELAY_S,
}


def to_error_status(refusal: Refusal) -> ErrorStatus:
    """A refusal as the servers send it."""
    code = STATUS_CODES[refusal.reason]
    delay_s = RETRY_DELAYS_S.get(refusal.reason)
    return ErrorStatus(code, refusal.reason.value, refusal.message, DOMAIN, refusal.metadata, delay_s)


refusing = answering(CallRefused, lambda refused: to_error_status(refused.refusal))
"""For a handler: makes its refusals the status of its call."""
