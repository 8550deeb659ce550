"""Errors in the shape that Anthropic's clients read."""

from typing import Any

from starlette.responses import Response

from quire.gateway.errors import HttpError
from quire.gateway.http.endpoint import json_response
from quire.gateway.http.streams import event_of

REQUEST_ID_HEADER = "request-id"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_response(error: HttpError, request_id: str) -> Response:
    """Return an error as an answer. It keeps its status."""
    body = {**_body(error), "request_id": request_id}
    return json_response(body, error.status, {**error.headers, REQUEST_ID_HEADER: request_id})


def error_event(error: HttpError) -> bytes:
    """Return the event of an error that ends a stream."""
    return event_of(_body(error), name="error")


def _body(error: HttpError) -> dict[str, Any]:
    message = error.body["error"]["message"]
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = _TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "details": {"error_code": error.code}}}
