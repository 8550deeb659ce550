"""The demo's model as it comes: chats, tools and structured output have the form that was asked for."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = {"tools": [{"type": "function", "function": WEATHER}]}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it cold in Rome?"}]


def ask(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 60, **fields})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def test_it_chats(http_client: httpx.Client) -> None:
    assert ask(http_client, QUESTION)["content"].strip()


def test_it_calls_tools_and_takes_their_results(http_client: httpx.Client) -> None:
    said = ask(http_client, QUESTION, tool_choice="required", parallel_tool_calls=False, **TOOLS)
    (call,) = said["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}
    assert ask(http_client, [*QUESTION, said, result], tool_choice="none", **TOOLS)["content"].strip()


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"json": {"enum": ["cold", "warm"]}}}, ('"cold"', '"warm"')),
    ],
)
def test_it_follows_a_form(http_client: httpx.Client, fields: dict[str, Any], allowed: tuple[str, ...]) -> None:
    assert ask(http_client, QUESTION, **fields)["content"].strip() in allowed
