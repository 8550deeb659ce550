"""A part of door.py's run, and tests that its checks find violations."""

from __future__ import annotations

import asyncio
import json

import pytest
from robustness.fuzz.bodies import FIELDS, http_request
from robustness.fuzz.door import fuzz, judge_http
from robustness.fuzz.drive import Broken

NUM_REQUESTS = 600


def test_requests_at_the_edges_change_no_token_of_a_stream_beside_them() -> None:
    report = asyncio.run(fuzz(1, iter(range(NUM_REQUESTS))))
    assert report.failures == []
    assert report.answers.total() == NUM_REQUESTS
    assert report.watched
    assert set(FIELDS) <= {name for name, _ in report.answers}


def test_a_request_is_a_function_of_its_seed_and_number() -> None:
    assert [http_request(3, number) for number in range(50)] == [http_request(3, number) for number in range(50)]


def answer(status: int, body: object, kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


ERROR = {"message": "n is 0", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        answer(500, {"error": ERROR}),
        answer(400, {"error": {**ERROR, "param": None}}),
        answer(400, {"error": {**ERROR, "message": ""}}),
        answer(400, b"Invalid HTTP request", "text/plain"),
        answer(200, b'{"logprob": NaN}'),
        answer(200, b'{"a": 1}')[:-1],
        answer(200, b'data: {"choices": []}\n\n', "text/event-stream"),
        answer(200, b'data: {"error": {"code": "internal_error"}}\n\n', "text/event-stream"),
    ],
)
def test_wrong_answers_are_found(data: bytes) -> None:
    with pytest.raises(Broken):
        judge_http(data)


def test_right_answers_are_told_apart() -> None:
    assert judge_http(answer(400, {"error": ERROR})) == "400 invalid_value"
    assert judge_http(answer(200, {})) == "200"
    assert judge_http(answer(200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', "text/event-stream")) == "200"
