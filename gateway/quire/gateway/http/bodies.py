"""The bodies of requests: a limit for one, a limit for all of a caller together, a time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request

from quire.gateway.errors import HttpError
from quire.gateway.http.streams import CallerGone

if TYPE_CHECKING:
    from quire.gateway.gateway import Caller, RequestLimits

TIMEOUT_S = 60.0
"""A body that has not come within this time is given up."""

Count = Callable[[int], None]
"""Counts more bytes of a body. Raises HttpError, 429, if its caller's open bodies would have too many."""


class OpenBodies:
    """Bytes that have come of bodies, by caller: of each request from its first byte until its answer begins.

    The limit is for a caller's own, so that no caller's bodies keep out another caller's.
    """

    def __init__(self, limits: "RequestLimits") -> None:
        self._limits = limits
        self._num_bytes: Counter[str] = Counter()

    @contextmanager
    def opened(self, caller: "Caller") -> Iterator[Count]:
        """Within the block a body is open."""
        own = 0

        def count(num_bytes: int) -> None:
            nonlocal own
            limit = self._limits.max_open_body_bytes
            if self._num_bytes[caller.name] + num_bytes > limit:
                message = f"the bodies of this caller's open requests would have more than {limit} bytes together"
                raise HttpError(429, message, code="too_many_open_bodies")
            self._num_bytes[caller.name] += num_bytes
            own += num_bytes

        try:
            yield count
        finally:
            self._num_bytes[caller.name] -= own
            if not self._num_bytes[caller.name]:
                del self._num_bytes[caller.name]

    async def read(self, request: Request, count: Count) -> bytes:
        """Return the body. Raises HttpError: 413 if it is larger than the limit, 408 if it does not come, 429."""
        limit = self._limits.max_body_bytes
        too_large = HttpError(413, f"the body has more than {limit} bytes", code="body_too_large")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    count(len(part))
                    parts.append(part)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {TIMEOUT_S:g} s", code="request_timeout") from None
        except ClientDisconnect:
            raise CallerGone from None
        return b"".join(parts)
