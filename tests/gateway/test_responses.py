"""POST /v1/responses, asked by OpenAI's client, over real services."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from gateway.chat_gateway import MODEL, serve_chats

from quire.cli.launch import LocalServices

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": PLACE, "strict": True},
    {"type": "function", "name": "time", "parameters": PLACE, "strict": True},
]


@pytest.fixture(scope="module")
def client(chat_services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with serve_chats(chat_services, log=tmp_path_factory.mktemp("gateway") / "log") as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {"seed": 3} | fields.pop("extra_body", {})
    return client.responses.create(
        **({"model": MODEL, "input": "Hello", "max_output_tokens": 8} | fields), extra_body=extra
    )


def test_an_answer_has_a_message_and_usage(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be brief.", metadata={"a": "b"})
    [item] = answer.output
    assert (answer.object, answer.store, answer.metadata) == ("response", True, {"a": "b"})
    assert answer.output_text
    assert item.content[0].text == answer.output_text
    assert answer.status == item.status
    if answer.status == "incomplete":
        assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert ask(client, instructions="Be brief.").usage.input_tokens_details.cached_tokens > 0


def test_the_events_of_a_text_have_their_order_and_numbers(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == events[-3].part.text == whole.output_text
    assert events[0].response.status == "in_progress"
    assert events[0].response.usage is None
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_a_text_that_ends_is_completed(client: openai.OpenAI) -> None:
    format = {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}
    answer = ask(client, text={"format": format}, max_output_tokens=200)
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), PLACE)


def test_log_probabilities_are_included(client: openai.OpenAI) -> None:
    answer = ask(client, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert ask(client).output[0].content[0].logprobs == []


def test_a_function_is_called_and_its_result_goes_back(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_output_tokens=200)
    [call] = answer.output
    assert (call.type, call.status) == ("function_call", "completed")
    jsonschema.validate(json.loads(call.arguments), PLACE)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    items = [{"role": "user", "content": "Hello"}, call.model_dump(exclude_none=True), result]
    again = ask(client, input=items, tools=TOOLS)
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_the_events_of_a_call(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "time"}
    events = list(ask(client, tools=TOOLS, tool_choice=choice, max_output_tokens=200, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert events[2].item.name == events[-2].item.name == "time"
    deltas = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
    assert deltas == events[-3].arguments == events[-2].item.arguments == events[-1].response.output[0].arguments
    jsonschema.validate(json.loads(deltas), PLACE)


def test_an_assistants_text_and_calls_are_one_message(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    messages: list[Any] = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "Hi",
            "tool_calls": [
                {"id": call_id, "type": "function", "function": {"name": "time", "arguments": "{}"}}
                for call_id in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert ask(client, input=items, max_output_tokens=1).usage.input_tokens == chat.usage.prompt_tokens


BAD = [
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"type": "thought"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, "input[0].id"),
    ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "f"}]}, "input[0].input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
    ({"input": [{"role": "user", "content": "x", "kind": 3}]}, "input[0].kind"),
    ({"input": "x" * 5_000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "always"}, "truncation"),
    ({"include": ["everything"]}, "include[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "tools[0].format.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"text": {"verbosity": "none"}}, "text.verbosity"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "strong"}}}}, "text.format"),
    ({"reasoning": {"depth": 3}}, "reasoning.depth"),
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"surprise": 1}, "surprise"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param


def test_what_only_advises_is_accepted(client: openai.OpenAI) -> None:
    answer = ask(client, store=False, background=False, truncation="auto", text={"verbosity": "low"})
    assert (answer.store, answer.truncation, answer.text.verbosity) == (False, "disabled", "low")
