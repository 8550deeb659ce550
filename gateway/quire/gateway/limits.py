"""The limits of one request, and of the bodies that one caller has open. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError

MAX_TOKEN_IDS = 65_536
"""Token ids in a list that is not a prompt."""
STREAM_PING_S = 10.0
"""A stream that has been silent for this time gets a comment; some proxies cut silent ones after 60 s."""

Count = Callable[[int], None]
"""Counts more bytes of a body. Raises HttpError, 429, if its caller's open bodies would have too many."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request, and of a caller's open bodies.

    max_body_bytes     of a body
    max_open_body_bytes   of all bodies of a caller that are being read, or have no answer yet
    max_prompts        prompts of a request
    max_samples        prompts times n
    send_timeout_s     a caller that reads nothing of its stream for this time is disconnected
    stream_ping_s      a stream that has been silent for this time gets a comment
    strict_max_tokens  max_tokens beyond the room of the model and the pool is refused, else it is a ceiling
    ignores_unknown_fields   a field that no endpoint has is ignored, and named in the answer; else it is refused
    """

    max_body_bytes: int = 16 * 2**20
    max_open_body_bytes: int = 256 * 2**20
    max_prompts: int = 256
    max_samples: int = 1024
    send_timeout_s: float = 60.0
    stream_ping_s: float = STREAM_PING_S
    strict_max_tokens: bool = False
    ignores_unknown_fields: bool = False


class OpenBodies:
    """Bytes that have come of bodies, by caller: of each request from its first byte until its answer begins.

    Each caller has its own limit, so that the bodies of one caller keep out no other caller's.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limit = limits.max_open_body_bytes
        self._num_bytes: Counter[str] = Counter()

    @contextmanager
    def opened(self, caller: Caller) -> Iterator[Count]:
        """Within the block a body is open."""
        own = 0

        def count(num_bytes: int) -> None:
            nonlocal own
            if self._num_bytes[caller.name] + num_bytes > self._limit:
                message = f"the bodies of this caller's open requests would have more than {self._limit} bytes together"
                raise HttpError(429, message, code="too_many_open_bodies")
            self._num_bytes[caller.name] += num_bytes
            own += num_bytes

        try:
            yield count
        finally:
            self._num_bytes[caller.name] -= own
            if not self._num_bytes[caller.name]:
                del self._num_bytes[caller.name]
