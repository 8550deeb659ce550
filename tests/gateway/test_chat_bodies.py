"""Chats and responses with odd values anywhere in their bodies: an answer, or a 400 that names the field."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.chat_gateway import MODEL, serve_chats

from quire.cli.launch import LocalServices

Place = tuple[str | int, ...]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 1e308, -0.5, "", "x", "\ud800", "\0", "x" * 3_000),
    *([], [None], [[]], [1], ["x"], [{}], {}, {"": ""}, {"type": "function"}, {"type": "text"}, {"role": "user"}),
    *([{"type": "function", "function": {}}], nested(50)),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "n": 1,
    "stream": False,
    "temperature": 1,
    "top_p": 1,
    "top_k": 5,
    "stop": ["x"],
    "stop_token_ids": [1],
    "logit_bias": {"3": 1},
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "continue_final_message": False,
    "cache_salt": "x",
    "cache_hints": {"expected_in_s": 1, "retention": [{"num_tokens": 8, "priority": 9, "ttl_s": 60}]},
    "priority": 1,
    "return_token_ids": True,
    "metadata": {},
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "chat/completions",
        CHAT
        | {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": True}
        | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    ("chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (
        "responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "instructions": "i",
            "max_output_tokens": 2,
            "tool_choice": "auto",
            "top_logprobs": 1,
            "stream": False,
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "low"},
            "metadata": {},
        },
    ),
]


@pytest.fixture(scope="module")
def url(chat_services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_chats(chat_services, log=tmp_path_factory.mktemp("gateway") / "log") as client:
        yield str(client.base_url)


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """Iterate over the places of all values within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*place, key)
        yield from places_in(each, (*place, key))


def with_odd_value(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    changed: Any = copy.deepcopy(body)
    *above, last = rng.choice(list(places_in(changed)))
    target = changed
    for key in above:
        target = target[key]
    target[last] = rng.choice(ODD)
    result: dict[str, Any] = changed
    return result


def check_bodies(url: str, *, seed: int, count: int) -> None:
    rng = random.Random(seed)
    statuses = []
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        for _ in range(count):
            path, body = rng.choice(BODIES)
            for _ in range(rng.choice([1, 1, 2])):
                body = with_odd_value(body, rng)
            content = json.dumps({"model": MODEL, **body}).encode()
            answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400), (content, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["param"], (content, answer.text)
    assert {200, 400} <= set(statuses)


def test_odd_values_are_refused_by_their_names(url: str) -> None:
    check_bodies(url, seed=1, count=120)


@pytest.mark.verify
def test_many_odd_values_are_refused_by_their_names(url: str) -> None:
    check_bodies(url, seed=2, count=3_000)
