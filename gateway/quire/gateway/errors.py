"""Errors as HTTP answers, in the shape that OpenAI's clients read. Pure.

400  the request can never succeed as it is           param names the field, if one is the cause
401  the caller sent no key, or an unknown one
403  the caller may not do this
404  a model or a path that does not exist
413  the body is too large
429  not now: a queue, the pool or a quota is full    Retry-After has the delay for a retry
499  the client has disconnected and does not read this one
500  a defect of this server
503  a service is unavailable, or this server is stopping
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from quire.client.errors import (
    AccessDenied,
    EngineStopped,
    InvalidRequest,
    NotFound,
    OutOfRoom,
    QuireError,
    RequestFailed,
    Unavailable,
)

Made = TypeVar("Made")

RETRY_AFTER_S = 1.0
"""The delay for a retry, if the error has none itself."""
MAX_MESSAGE_LENGTH = 1024
"""Characters of a message that are sent: it may quote the request."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_RETRIED = (429, 503)


class HttpError(Exception):
    """An answer that is an error.

    status          the HTTP status
    code            why, in lower case with underscores; clients branch on it
    param           the field to blame, as a path: "messages[0].role"; None: no field
    retry_after_s   the request may succeed after this time; None: nothing is said, but for 429 and 503
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[: MAX_MESSAGE_LENGTH - 1]}…"
        self.code = code
        self.param = param
        self.retry_after_s = RETRY_AFTER_S if retry_after_s is None and status in _RETRIED else retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON body, {"error": {...}}."""
        return {
            "error": {
                "message": self.message.encode(errors="replace").decode(),  # a lone surrogate is not sent
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it; Retry-After is in whole seconds."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(param: str, value: object, limit: str) -> HttpError:
    """Return the 400 of one field: its path, the value, and the limit."""
    text = repr(value)
    shown = text if len(text) <= 100 else f"{text[:99]}…"
    return HttpError(400, f"{param} is {shown}, must be {limit}", code="invalid_value", param=param)


def http_error_of(error: QuireError, names: Mapping[str, str] = MappingProxyType({})) -> HttpError:
    """Return the HTTP answer for an error of the client or the engine. The code is the reason in lower case.

    names are the caller's for fields of the engine.
    """
    cause = cause_of(error)
    param = cause.metadata.get("field") if isinstance(cause, InvalidRequest) else None
    return HttpError(
        _status_of(cause),
        error.message,
        code=cause.reason.lower(),
        param=None if param is None else names.get(param, param),
        retry_after_s=cause.retry_after_s,
    )


def cause_of(error: QuireError) -> QuireError:
    """Return the error that a request failed of, where the engine's own error only says that it gave up."""
    if isinstance(error, RequestFailed) and isinstance(error.__cause__, QuireError):
        return error.__cause__
    return error


# The first class that fits counts.
_STATUSES: tuple[tuple[type[QuireError], int], ...] = (
    (InvalidRequest, 400),
    (AccessDenied, 403),
    (OutOfRoom, 429),
    (Unavailable, 503),
    (EngineStopped, 503),
    (NotFound, 503),  # of a pool: the caller named none
)


def _status_of(error: QuireError) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def make(kind: Callable[..., Made], **values: Any) -> Made:
    """Return kind(**values). Raises HttpError for InvalidRequest."""
    try:
        return kind(**values)
    except InvalidRequest as error:
        raise http_error_of(error) from None


def made_at(paths: Mapping[str, str], kind: Callable[..., Made], **values: Any) -> Made:
    """Return kind(**values). Raises HttpError that names a field by its path in the body, not as kind does."""
    try:
        return make(kind, **values)
    except HttpError as error:
        if error.param is not None and (path := paths.get(error.param)) is not None:
            error.message = error.message.replace(error.param, path, 1)
            error.param = path
        raise
