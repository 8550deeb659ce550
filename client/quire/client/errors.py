"""Exceptions of the client.

    QuireError
    ├── InvalidRequest       the request can never succeed as it is; nothing was done
    ├── NotFound             a pool, a sequence or a cached prefix that does not exist
    ├── OutOfRoom            not now: blocks, sequences, steps, leases or queue places, or the tenant's share
    ├── LeaseLost            the lease ended or was fenced: make a new one, admit again
    ├── EpochChanged         the pool has a new epoch: continue with `epoch`, admit again
    ├── CursorExpired        the changes since a cursor are not kept any more: watch again without one
    ├── StepRefused          the worker refused a step before it touched anything
    ├── StepFailed           a step was accepted and computed nothing
    ├── AccessDenied         authentication failed, or the caller has no role for the method
    ├── CredentialsUnusable  a certificate, key or token given to the client can't be used
    ├── Unavailable          a server is unavailable or too slow; a retry may succeed
    ├── ProtocolViolation    a server's answer violates the contract
    ├── RequestFailed        the engine failed one request after its retries
    └── EngineStopped        the engine is closed, or its loop has failed

Servers send a reason and put every number into metadata; callers branch on the class or on `reason`, never on the
text. An error that ends a request of the engine also has the number of tokens that its caller has got, see
`delivered_token_counts`. This module uses no gRPC: channel.py makes reasons of messages and statuses.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quire.cache.v1 import reasons as cachemgr
from quire.cache.v1.error_reason import ErrorReason
from quire.compute.v1 import reasons as worker

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class QuireError(Exception):
    """Base of all.

    reason         a name of the contract's ErrorReason, or the client's own
    metadata       its numbers and names
    retry_after_s  asking again may help, not before this has passed; None: the server does not say so
    """

    default_reason = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    def number(self, key: str, default: int = 0) -> int:
        """An integer of the metadata; the default if it is missing or no integer."""
        try:
            return int(self.metadata[key])
        except (KeyError, ValueError):
            return default

    @property
    def is_about_input(self) -> bool:
        """Return True if a refusal names a field or a sequence of the request."""
        return "field" in self.metadata or "sequence_id" in self.metadata

    @property
    def delivered_token_counts(self) -> tuple[int, ...]:
        """Tokens that each sample of a request had delivered before this; empty if it is no error of a request.

        To continue the request: each sample's prompt and those tokens are the new prompt, max_tokens is less by their
        number, and the seed is the first one's plus the sample's index. Then the random numbers continue the first
        request's. The tokens do, too, except for rounding without --deterministic (docs/reference/scheduling.md,
        Seeds), and except with a presence or frequency penalty, a grammar or min_tokens: the delivered tokens then
        count as prompt.
        Engine.generate(delivered=...) has no such exceptions.
        """
        counts = self.metadata.get("delivered_token_counts", "")
        return tuple(int(count) for count in counts.split(",") if count.isdecimal())


class InvalidRequest(QuireError):
    """The request can never succeed as it is. Nothing was done."""

    default_reason = "INVALID_ARGUMENT"

    @classmethod
    def of_field(cls, field: str, value: object, limit: str, *, reason: str = "") -> "InvalidRequest":
        """The error of one field: its name, the value and the limit, in the text and in the metadata."""
        metadata = {"field": field, "value": repr(value), "limit": limit}
        return cls(f"{field} is {value!r}, must be {limit}", reason=reason, metadata=metadata)


class NotFound(QuireError):
    """A pool, a sequence or a cached prefix that does not exist."""

    default_reason = "NOT_FOUND"


class OutOfRoom(QuireError):
    """Not now: blocks, sequences, steps, leases, adapters or turns are used up, or the tenant's share of them."""

    default_reason = "OUT_OF_BLOCKS"


class LeaseLost(QuireError):
    """The lease ended or was fenced."""

    default_reason = "LEASE_NOT_FOUND"


class EpochChanged(QuireError):
    """The pool has new memory; all its sequences are lost."""

    default_reason = "EPOCH_CHANGED"

    @property
    def epoch(self) -> int:
        """The pool's epoch now, 0 if the server did not say."""
        return self.number("epoch")


class CursorExpired(QuireError):
    """The changes since the cursor are not kept any more. Watch again without one."""

    default_reason = "CURSOR_EXPIRED"


class StepRefused(QuireError):
    """The worker refused a step before it touched anything; its number is not used up."""

    default_reason = "STEP_OUT_OF_ORDER"


class StepFailed(QuireError):
    """A step was accepted and computed nothing."""

    default_reason = "STEP_FAILED"


class AccessDenied(QuireError):
    """Authentication failed (CREDENTIALS_MISSING, TOKEN_REJECTED), or the caller has no role for the method."""

    default_reason = "ROLE_MISSING"


class CredentialsUnusable(QuireError):
    """A certificate, key or token given to the client can't be used; nothing was sent."""

    default_reason = "CREDENTIALS_UNUSABLE"


class Unavailable(QuireError):
    """A server is unavailable or too slow."""

    default_reason = "UNAVAILABLE"


class WorkerUnavailable(Unavailable):
    """The worker is unavailable or too slow, and cachemgr is not."""


class ProtocolViolation(QuireError):
    """A server's answer violates the contract."""

    default_reason = "PROTOCOL_VIOLATION"


class RequestFailed(QuireError):
    """The engine gave up on one request; `__cause__` is the last error."""

    default_reason = "REQUEST_FAILED"


class EngineStopped(QuireError):
    """The engine is closed, or its loop has died; `__cause__` is the error that ended it."""

    default_reason = "ENGINE_STOPPED"


def after_delivery(error: QuireError, delivered: Sequence[int]) -> QuireError:
    """The error of a request after its samples delivered so many tokens, for its caller alone."""
    counts = [str(count) for count in delivered]
    copy = type(error)(
        f"{error.message}; tokens delivered: {', '.join(counts)}",
        reason=error.reason,
        metadata={**error.metadata, "delivered_token_counts": ",".join(counts)},
        retry_after_s=error.retry_after_s,
    )
    copy.__cause__ = error.__cause__
    return copy


_CLASS_OF_CODE: Mapping[str, type[QuireError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "NOT_FOUND": NotFound,
    "RESOURCE_EXHAUSTED": OutOfRoom,
    "INTERNAL": StepFailed,
    "UNAVAILABLE": Unavailable,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
}
# The reasons with another class than that of their code.
_CLASS_OF_REASON: Mapping[ErrorReason, type[QuireError]] = {
    cachemgr.Reason.LEASE_NOT_FOUND: LeaseLost,
    worker.Reason.LEASE_FENCED: LeaseLost,
    cachemgr.Reason.EPOCH_CHANGED: EpochChanged,
    cachemgr.Reason.CURSOR_EXPIRED: CursorExpired,
    cachemgr.Reason.SEQUENCE_BUSY: OutOfRoom,
    worker.Reason.ADAPTERS_IN_USE: OutOfRoom,
    worker.Reason.TOKENS_MISMATCH: StepRefused,
    worker.Reason.BAD_SIGNATURE: StepRefused,
    worker.Reason.STEP_OUT_OF_ORDER: StepRefused,
    worker.Reason.PRIOR_STEP_FAILED: StepFailed,
    # For AttachPool, which clients do not call.
    cachemgr.Reason.POOL_ALREADY_ATTACHED: ProtocolViolation,
    cachemgr.Reason.TERM_SUPERSEDED: ProtocolViolation,
}
REASONS: Mapping[str, type[QuireError]] = MappingProxyType(
    {
        reason.value: _CLASS_OF_REASON.get(reason) or _CLASS_OF_CODE[reason.status_code]
        for reason in (*cachemgr.Reason, *worker.Reason)
    }
)
"""The exception for each reason of cachemgr and of workers."""


def error_of_reason(
    reason: str, message: str, metadata: Mapping[str, str] = _NO_METADATA, *, retry_after_s: float | None = None
) -> QuireError:
    """The exception for a reason; a plain QuireError for one this client does not know."""
    kind = REASONS.get(reason, QuireError)
    return kind(message, reason=reason, metadata=metadata, retry_after_s=retry_after_s)
