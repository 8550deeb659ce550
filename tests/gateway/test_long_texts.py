"""Long texts and large bodies: what can't fit is refused unread, and the rest does not stop the gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import Gateway

from quire.gateway.texts import ShortestFirst

SENTENCE = "The quick brown fox jumps over the lazy dog. "
LONG = SENTENCE * 110_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}, "messages"),
    ],
)
def test_a_text_that_can_not_fit_is_refused_by_its_length(
    path: str, body: dict[str, Any], param: str, http_client: httpx.Client
) -> None:
    answer = http_client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "characters, which are at least" in error["message"]
    if path != "/v1/messages":
        assert (error["param"], error["code"]) == (param, "sequence_too_long")


def test_a_text_may_be_counted_that_does_not_fit_up_to_a_limit(http_client: httpx.Client) -> None:
    assert http_client.post("/tokenize", json={"prompt": SENTENCE * 20_000}).json()["count"] > 100_000
    error = http_client.post("/tokenize", json={"prompt": LONG}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "invalid_argument")


@pytest.mark.parametrize("value", ["1234", "[]", '{"a":1}'])
def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(value: str, http_client: httpx.Client) -> None:
    body = f'{{"prompt": [{",".join([value] * 1_100_000)}]}}'
    answer = http_client.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")


def test_other_callers_are_answered_while_long_texts_are_encoded(gateway: Gateway) -> None:
    """Several of these at once stopped the gateway, with /health, for their whole time."""
    body = json.dumps({"prompt": SENTENCE * 23_000}).encode()
    encoded: list[int] = []

    def encode() -> None:
        encoded.append(httpx.post(f"{gateway.url}/tokenize", content=body, timeout=DEADLINE_S).status_code)

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    num_answers = 0
    with gateway.client() as client:
        while len(encoded) < len(threads):
            assert client.get("/health").status_code == 200
            num_answers += not encoded
    for thread in threads:
        thread.join(DEADLINE_S)
    assert encoded == [200] * len(threads)
    assert num_answers > 1, "/health was answered before the first text was encoded"


def test_the_shortest_text_is_next() -> None:
    async def main() -> None:
        threads, order = ShortestFirst(1), []
        begin = threading.Event()
        first = asyncio.create_task(threads.run(9, begin.wait))
        await asyncio.sleep(0)
        others = [asyncio.create_task(threads.run(length, lambda n=length: order.append(n))) for length in (5, 3, 4, 1)]
        await asyncio.sleep(0)
        others[2].cancel()
        await asyncio.sleep(0)
        begin.set()
        await asyncio.gather(first, *others, return_exceptions=True)
        assert order == [1, 3, 5]
        with pytest.raises(ZeroDivisionError):
            await threads.run(1, lambda: 1 // 0)

    asyncio.run(main())
