"""Errors as Anthropic's clients read them: as an answer, and as the last event of a stream."""

from __future__ import annotations

import json

import pytest

from quire.gateway.anthropic.errors import error_event, error_response
from quire.gateway.errors import HttpError, invalid

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


@pytest.mark.parametrize("status", TYPES)
def test_an_error_keeps_its_status_and_has_anthropics_word_for_it(status: int) -> None:
    error = HttpError(status, "why", code="the_code", retry_after_s=2.5 if status == 429 else None)
    answer = error_response(error, "id-1")
    assert (answer.status_code, answer.headers["request-id"]) == (status, "id-1")
    details = {"error_code": "the_code"}
    shown = {"type": "error", "error": {"type": TYPES[status], "message": "why", "details": details}}
    assert json.loads(bytes(answer.body)) == {**shown, "request_id": "id-1"}
    assert answer.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
    name, data = error_event(error).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == shown


def test_the_message_names_the_field_once() -> None:
    named = error_response(invalid("top_k", -3, "at least -1"), "x")
    assert json.loads(bytes(named.body))["error"]["message"] == "top_k is -3, must be at least -1"
    other = error_response(HttpError(400, "it has too many tokens", code="x", param="messages"), "x")
    assert json.loads(bytes(other.body))["error"]["message"] == "messages: it has too many tokens"
