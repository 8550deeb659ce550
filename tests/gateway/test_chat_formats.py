"""Formats of answers, as they are found in chat templates: by what a template writes, in the processes that render."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway.chat_templates import BY_FORMAT, CHATML, GEMMA, GLM, HARMONY, LLAMA4, UNKNOWN

from quire.gateway.chat.arguments import arguments_of
from quire.gateway.chat.conversation import call_message
from quire.gateway.chat.models import CallLayout, ChatOptions, find_formats
from quire.gateway.chat.templates import Templates, TemplateSource
from quire.gateway.chat.tools.answers import AnswerFormat
from quire.gateway.chat.tools.formats import TOOL_FORMATS

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def found_in(text: str, **options: Any) -> tuple[AnswerFormat, CallLayout]:
    """Return the formats of a template."""

    async def main() -> tuple[AnswerFormat, CallLayout]:
        templates = Templates(TemplateSource({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"}))
        try:
            return await find_formats(templates, ChatOptions(**options))
        finally:
            await templates.close()

    return asyncio.run(main())


def rendered(text: str, messages: list[dict[str, Any]]) -> str:
    """Return a chat, rendered as the gateway renders it."""

    async def main() -> str:
        templates = Templates(TemplateSource({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"}))
        try:
            _, layout = await find_formats(templates, ChatOptions())
            return await templates.render([layout.apply(each) for each in messages], tools=TOOLS)
        finally:
            await templates.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", BY_FORMAT)
def test_the_format_of_calls_is_what_the_template_writes(name: str) -> None:
    answers, _ = found_in(BY_FORMAT[name])
    assert answers.tools is TOOL_FORMATS[name]


def test_a_template_that_asks_for_pythonic_calls_gets_these() -> None:
    assert found_in(LLAMA4)[0].tools is TOOL_FORMATS["pythonic"]


@pytest.mark.parametrize("text", [UNKNOWN, GEMMA, "{{ messages[0].content }}", "{{ raise_exception('no') }}"])
def test_an_unknown_format_is_taken_for_none(text: str) -> None:
    assert found_in(text)[0].tools is None


def test_a_given_format_counts() -> None:
    answers, layout = found_in(BY_FORMAT["deepseek-v3"], tools=TOOL_FORMATS["hermes"])
    assert answers.tools is TOOL_FORMATS["hermes"]
    assert layout == CallLayout(arguments_are_text=True, content_is_null=True)


@pytest.mark.parametrize(
    ("text", "name"), [(GLM, "think"), (CHATML, "think"), (HARMONY, "harmony"), (GEMMA, None), ("[THINK]", "mistral")]
)
def test_the_format_of_reasoning_is_what_the_template_has(text: str, name: str | None) -> None:
    found = found_in(text)[0].reasoning
    assert (found and found.name) == name
    assert found_in(text, has_reasoning=False)[0].reasoning is None


# -- calls that come back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_FORMAT)
@pytest.mark.parametrize("arguments", ['{"city": "Ro', '{"city": ', "{", "", '{"a": [1, {"b": "x\\', "no JSON", "[1]"])
def test_a_call_that_was_cut_off_can_be_sent_back(name: str, arguments: str) -> None:
    call_id = "functions.f:0" if name == "kimi-k2" else "abcdefghi"
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [call_message(call_id, "f", arguments)]},
        {"role": "tool", "tool_call_id": call_id, "content": "12 degrees"},
    ]
    assert "12 degrees" in rendered(BY_FORMAT[name], messages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1', {"a": 1}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": "b", "c', {"a": "b"}),
        ('{"a": "b", "c": tr', {"a": "b"}),
        ('{"a": [1, {"b": "}]"}, {"c"', {"a": [1, {"b": "}]"}, {}]}),
        ("words", {"arguments": "words"}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
    ],
)
def test_arguments_that_were_cut_off_are_closed(text: str, expected: dict[str, Any]) -> None:
    assert arguments_of(text) == expected


def test_every_beginning_of_arguments_is_an_object() -> None:
    text = json.dumps({"a": 'x"\\\n', "b": [1.5, {"c": None, "d": [[], {}]}], "e": True})
    for end in range(1, len(text)):
        assert "arguments" not in arguments_of(text[:end])
