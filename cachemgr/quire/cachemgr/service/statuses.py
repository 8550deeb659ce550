"""Makes gRPC statuses of refusals. The code and the retry delay of each reason are options in error.proto."""

from __future__ import annotations

from quire.cache.v1.reasons import DOMAIN as DOMAIN
from quire.cachemgr.errors import CallRefused, Refusal
from quire.serving.errors import ErrorStatus, answering


def to_error_status(refusal: Refusal) -> ErrorStatus:
    """A refusal as the servers send it."""
    return ErrorStatus.of(refusal.reason, refusal.message, DOMAIN, refusal.metadata)


refusing = answering(CallRefused, lambda refused: to_error_status(refused.refusal))
"""For a handler: makes its refusals the status of its call."""
