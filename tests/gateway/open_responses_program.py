"""The cases of Open Responses' compliance suite: URL MODEL KEY. test_open_responses.py runs it in an environment.

The suite itself is no package. Its cases are written here again, and every answer and event is checked against the
types of the specification, openresponses-types. Two fields are added: a stop string, at which the small model's text
is complete, and a tool_choice, since that model calls nothing by itself. The case with an image is left out: the
gateway serves text.
"""

import json
import sys
import urllib.request
from typing import Any

import openresponses_types as types

URL, MODEL, KEY = sys.argv[1:]
ITEM = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "maxLength": 8}},
            "required": ["location"],
            "additionalProperties": False,
        },
    }
]
EVENTS = {
    "response.created": types.ResponseCreatedStreamingEvent,
    "response.in_progress": types.ResponseInProgressStreamingEvent,
    "response.completed": types.ResponseCompletedStreamingEvent,
    "response.output_item.added": types.ResponseOutputItemAddedStreamingEvent,
    "response.output_item.done": types.ResponseOutputItemDoneStreamingEvent,
    "response.content_part.added": types.ResponseContentPartAddedStreamingEvent,
    "response.content_part.done": types.ResponseContentPartDoneStreamingEvent,
    "response.output_text.delta": types.ResponseOutputTextDeltaStreamingEvent,
    "response.output_text.done": types.ResponseOutputTextDoneStreamingEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaStreamingEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneStreamingEvent,
}


def message(role: str, text: str) -> ITEM:
    return {"type": "message", "role": role, "content": text}


def read(items: list[ITEM], **fields: Any) -> str:
    body = {"model": MODEL, "input": items, "stop": ["e", " "], "seed": 3, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{URL}/v1/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def whole(items: list[ITEM], **fields: Any) -> ITEM:
    """Return a complete answer that is as the specification says."""
    answer: ITEM = json.loads(read(items, **fields))
    types.ResponseResource.model_validate(answer)
    assert answer["output"]
    assert answer["status"] == "completed", answer
    return answer


def streamed(items: list[ITEM], **fields: Any) -> list[ITEM]:
    """Return the events of a complete answer, each of which is as the specification says."""
    lines = read(items, stream=True, **fields).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    assert events[-1]["type"] == "response.completed", events[-1]
    return events


WEATHER = [message("user", "What's the weather like in San Francisco?")]
FORCED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "stop": []}

whole([message("user", "Say hello in exactly 3 words.")])
assert len(streamed([message("user", "Count from 1 to 5.")])) > 4
whole([message("system", "You are a pirate. Always respond in pirate speak."), message("user", "Say hello.")])
assert [item["type"] for item in whole(WEATHER, **FORCED)["output"]] == ["function_call"]
called = streamed(WEATHER, **FORCED)
for kind in ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"):
    found = [event for event in called if event["type"] == f"response.{kind}"]
    assert found, kind
    assert all(event.get("item", {"type": "function_call"})["type"] == "function_call" for event in found)
whole(
    [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
        message("user", "What is my name?"),
    ]
)
print("6 cases")
