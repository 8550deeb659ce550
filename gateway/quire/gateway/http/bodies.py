"""Reading of a request's body, within a limit and a time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from quire.gateway.errors import HttpError
from quire.gateway.http.streams import CallerGone
from quire.gateway.limits import Count

TIMEOUT_S = 60.0
"""A body that has not come within this time is given up."""


async def read_body(request: Request, count: Count, *, max_bytes: int) -> bytes:
    """Return the body. Raises HttpError: 413 if it is larger than the limit, 408 if it does not come, 429."""
    too_large = HttpError(413, f"the body has more than {max_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                count(len(part))
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {TIMEOUT_S:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise CallerGone from None
    return b"".join(parts)
