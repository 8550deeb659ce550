"""Unexpected exceptions in the engine's work: mistakes of this package, of a custom policy or of a library. Pure.

One is about one request more often than not: its values, its text, its grammar. So it ends that request, and no other.
If the request is not known, all sequences run alone until the exception finds one that is (failures.py).
"""

from quire.client.engine.scheduling.sequence import Sequence
from quire.client.errors import RequestFailed


class RequestFault(Exception):
    """An unexpected exception, its cause, in the work for one sequence. The engine fails the request."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence.arrival)
        self.sequence = sequence


class BrokenInvariantError(AssertionError):
    """The state contradicts itself, so that nothing can be decided any more. The engine stops."""


class UnexpectedError(RequestFailed):
    """The error of a request that an unexpected exception, the cause, is about."""


def to_failure(error: BaseException) -> UnexpectedError:
    """Return the error of the request that an unexpected exception is about."""
    cause = error.__cause__ if isinstance(error, RequestFault) and error.__cause__ is not None else error
    failed = UnexpectedError(f"an unexpected error in the work for this request: {cause!r}")
    failed.__cause__ = cause
    return failed
