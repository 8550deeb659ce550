"""POST /v1/chat/completions, asked by OpenAI's client, over real services."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from deadlines import DEADLINE_S
from gateway.chat_gateway import MODEL, save_chat_model, serve_chats, start_chats
from gateway.chat_templates import BY_FORMAT, CHATML, GLM, UNKNOWN

from quire.cli.launch import LocalServices

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat_model"), CHATML)


@pytest.fixture(scope="module")
def services(model: Path) -> Iterator[LocalServices]:
    with start_chats(model) as services:
        yield services


@pytest.fixture(scope="module")
def client(services: LocalServices, model: Path) -> Iterator[openai.OpenAI]:
    with serve_chats(services, log=model / "gateway.log") as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any] | None = None, **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": messages or HELLO, "seed": 3, "max_tokens": 8} | fields
    return client.chat.completions.create(**asked)


def refusal(client: openai.OpenAI, messages: list[Any] | None = None, **fields: Any) -> openai.BadRequestError:
    """Return the 400 that a request gets."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages, **fields)
    return caught.value


def test_an_answer_has_a_message_a_reason_and_usage(client: openai.OpenAI) -> None:
    answer = ask(client)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = ask(client)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_usage_in_each_event_and_max_tokens_as_a_ceiling(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    whole = ask(client, n=2, max_tokens=12)
    chunks = list(ask(client, n=2, max_tokens=12, stream=True, stream_options=options))
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.usage.prompt_tokens}
    assert [chunk.usage.completion_tokens for chunk in chunks][-2:] == [whole.usage.completion_tokens] * 2
    answer = ask(client, max_tokens=10**9)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, n=2, max_tokens=12)
    chunks = list(ask(client, n=2, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    texts, roles, reasons = {0: "", 1: ""}, {}, {}
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.usage is None
        [choice] = chunk.choices
        roles.setdefault(choice.index, choice.delta.role)
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert roles == {0: "assistant", 1: "assistant"}
    assert [texts[choice.index] for choice in whole.choices] == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_log_probabilities_of_each_token(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    chunks = ask(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_without_a_limit_an_answer_may_be_as_long_as_the_context(client: openai.OpenAI) -> None:
    schema = {"type": "string", "minLength": 300, "maxLength": 310} | COMPACT
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(client, max_tokens=openai.NOT_GIVEN, response_format=format)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 128
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_the_smaller_limit_counts(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=9, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3


def test_parts_of_text_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    of_parts = ask(client, [{"role": "user", "content": parts}], extra_body={"return_token_ids": True})
    of_text = ask(client, [{"role": "user", "content": "Hel\nlo"}], extra_body={"return_token_ids": True})
    assert of_parts.prompt_token_ids == of_text.prompt_token_ids


def test_a_developer_is_the_system_to_a_template_that_knows_none(client: openai.OpenAI) -> None:
    given = {"extra_body": {"return_token_ids": True}}
    developer = ask(client, [HELLO[0] | {"role": "developer"}, HELLO[1]], **given)
    assert developer.prompt_token_ids == ask(client, **given).prompt_token_ids


def test_a_message_is_continued(client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    given = {"return_token_ids": True, "continue_final_message": True, "add_generation_prompt": False}
    answer = ask(client, messages, extra_body=given)
    begun = ask(client, extra_body={"return_token_ids": True})
    added = len(answer.prompt_token_ids) - len(begun.prompt_token_ids)
    assert answer.prompt_token_ids[:-added] == begun.prompt_token_ids
    assert added == 4  # of "I am": the tests' tokens are letters


def test_the_template_gets_values_of_the_caller(client: openai.OpenAI) -> None:
    def num_tokens(**extra: Any) -> int:
        return ask(client, extra_body=extra).usage.prompt_tokens

    assert num_tokens(chat_template_kwargs={"enable_thinking": False}) > num_tokens()


# -- tools --------------------------------------------------------------------------------------------------------


def test_a_call_that_is_required_has_arguments_of_its_schema(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=200)
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        schema = {"weather": WEATHER, "time": TIME}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_tool_asked_for_by_name_is_called(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=200)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_calls_stream_by_their_index(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 8}
    whole = ask(client, **fields).choices[0].message
    calls: dict[int, dict[str, str]] = {}
    content, reason, num_pieces = "", None, 0
    for chunk in ask(client, stream=True, **fields):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason
        for piece in choice.delta.tool_calls or []:
            num_pieces += 1
            if piece.id:
                calls[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
            calls[piece.index]["arguments"] += piece.function.arguments or ""
    found = [(call["name"], call["arguments"]) for _, call in sorted(calls.items())]
    assert found == [(call.function.name, call.function.arguments) for call in whole.tool_calls]
    assert content == ""
    assert reason in ("tool_calls", "length")
    assert num_pieces > len(calls)
    assert len({call["id"] for call in calls.values()}) == len(calls)


def test_calls_and_their_results_go_back_to_the_model(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    again = ask(client, [*HELLO, message.model_dump(), result], tools=TOOLS)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_text_without_a_call_is_content(client: openai.OpenAI) -> None:
    plain = ask(client, tools=TOOLS, max_tokens=20)
    assert plain.choices[0].message.tool_calls is None
    assert plain.choices[0].message.content
    hidden = ask(client, tools=TOOLS, tool_choice="none")
    assert hidden.usage.prompt_tokens == ask(client).usage.prompt_tokens


# -- bad input ----------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
BAD = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "kind": 1}]}, "messages[0].kind"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters.type",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"type": "object", "properties": {"a": {"type": "strong"}}},
                    },
                }
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strong"}}}}, "response_format"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 100_000}, "n"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"surprise": 1}, "surprise"),
    ({"messages": [{"role": "user", "content": "x" * 5_000}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    error = refusal(client, extra_body={**fields})
    assert error.param == param
    assert error.code
    assert param.rsplit(".", maxsplit=1)[-1] in error.message or param in ("messages", "tools", "response_format")


def test_a_bad_field_of_a_stream_is_a_status(client: openai.OpenAI) -> None:
    assert refusal(client, stream=True, messages=[{"role": "user", "content": "x" * 5_000}]).param == "messages"


def test_text_that_is_no_character_is_refused(client: openai.OpenAI) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "\ud800"}]}).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{client.base_url}chat/completions", content=body, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_a_model_without_a_template_says_how_to_give_one(services: LocalServices, model: Path, tmp_path: Path) -> None:
    bare, template, log = tmp_path / "tokenizer.json", tmp_path / "template.jinja", tmp_path / "gateway.log"
    bare.write_bytes((model / "tokenizer.json").read_bytes())
    with serve_chats(services, "--tokenizer", str(bare), log=log) as client:
        assert "--chat-template FILE" in refusal(client).message
    template.write_text(
        "{% if messages | length > 2 %}{{ raise_exception('at most two') }}{% endif %}{{ messages[0].content }}"
    )
    with serve_chats(services, "--tokenizer", str(bare), "--chat-template", str(template), log=log) as client:
        assert ask(client).choices[0].message.content
        error = refusal(client, [USER, USER, USER])
        assert error.param == "messages"
        assert "at most two" in error.message


def test_a_template_that_can_not_be_compiled_ends_the_start(
    services: LocalServices, model: Path, tmp_path: Path
) -> None:
    template, log = tmp_path / "template.jinja", tmp_path / "gateway.log"
    template.write_text("{% if %}")
    with (
        pytest.raises(AssertionError, match="line 1"),
        serve_chats(services, "--chat-template", str(template), log=log),
    ):
        pass


def test_the_format_of_calls_can_be_given(services: LocalServices, model: Path, tmp_path: Path) -> None:
    with serve_chats(services, "--tool-parser", "llama3", log=tmp_path / "gateway.log") as client:
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        answer = ask(client, max_tokens=200, logprobs=True, **fields)
        assert answer.choices[0].message.tool_calls
        spelled = "".join(entry.token for entry in answer.choices[0].logprobs.content)
        assert spelled.startswith('{"name": ')
        assert '"parameters": {' in spelled


def test_a_format_of_calls_that_is_not_known_is_refused_with_the_list(services: LocalServices, tmp_path: Path) -> None:
    log, template = tmp_path / "gateway.log", tmp_path / "template.jinja"
    with (
        pytest.raises(AssertionError, match=r"'xml' is not one of 'hermes', 'llama3', .*'harmony'"),
        serve_chats(services, "--tool-parser", "xml", log=log),
    ):
        pass
    template.write_text(UNKNOWN)
    with serve_chats(services, "--chat-template", str(template), log=log) as client:
        for choice in ("auto", "required"):
            error = refusal(client, tools=TOOLS, tool_choice=choice)
            assert error.param == "tools"
            assert "--tool-parser hermes | llama3" in error.message
        assert ask(client, tools=TOOLS, tool_choice="none").choices[0].message.content
    with serve_chats(services, "--chat-template", str(template), "--tool-parser", "hermes", log=log) as client:
        answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
        assert answer.choices[0].message.tool_calls


@pytest.mark.parametrize("name", ["qwen3-coder", "deepseek-v3", "pythonic", "harmony"])
def test_a_forced_call_has_the_template_s_format(
    name: str, services: LocalServices, model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(BY_FORMAT[name])
    with serve_chats(services, "--chat-template", str(template), log=tmp_path / "gateway.log") as client:
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        [choice] = ask(client, max_tokens=300, **fields).choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        jsonschema.validate(json.loads(call.function.arguments), {"weather": WEATHER, "time": TIME}[call.function.name])
        result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
        assert ask(client, [*HELLO, choice.message.model_dump(), result], tools=TOOLS).choices


def test_a_call_that_max_tokens_cut_off_says_so_and_can_be_sent_back(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for stream in (False, True):
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 42}
        answer = ask(client, stream=stream, **fields)
        reasons = [each.choices[0].finish_reason for each in answer] if stream else [answer.choices[0].finish_reason]
        assert reasons[-1] == "length"
    message = ask(client, **fields).choices[0].message
    with pytest.raises(ValueError, match="line 1"):
        json.loads(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    assert ask(client, [*HELLO, message.model_dump(), result], tools=TOOLS).choices[0].message


# -- reasoning ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a gateway with a template that ends its prompts with <think>."""
    folder = tmp_path_factory.mktemp("thinking")
    (folder / "template.jinja").write_text(GLM)
    with serve_chats(services, "--chat-template", str(folder / "template.jinja"), log=folder / "log") as client:
        yield client


def test_reasoning_has_a_field_of_its_own(thinking: openai.OpenAI, services: LocalServices, tmp_path: Path) -> None:
    message = ask(thinking).choices[0].message
    assert message.content is None
    assert message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in ask(thinking, stream=True)]
    pieces = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(pieces) == message.reasoning_content
    assert not any(delta.content for delta in deltas)
    template = tmp_path / "template.jinja"
    template.write_text(GLM)
    arguments = ("--chat-template", str(template), "--reasoning-parser", "none")
    with serve_chats(services, *arguments, log=tmp_path / "log") as client:
        whole = ask(client).choices[0].message
        assert whole.content.strip() == message.reasoning_content
        assert not hasattr(whole, "reasoning_content")


def test_an_answer_by_a_grammar_is_content_though_the_prompt_began_reasoning(thinking: openai.OpenAI) -> None:
    message = ask(thinking, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0].message
    assert message.content in ("yes", "no")


def test_a_forced_call_comes_after_the_reasoning_that_the_prompt_began(thinking: openai.OpenAI) -> None:
    [choice] = ask(thinking, tools=TOOLS, tool_choice="required").choices
    assert choice.finish_reason == "length"
    assert choice.message.reasoning_content
    assert choice.message.tool_calls is None


def test_responses_have_reasoning_as_an_item(thinking: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 8, "extra_body": {"seed": 3}}
    answer = thinking.responses.create(**fields)
    [item] = answer.output
    assert (answer.status, item.type, item.summary) == ("incomplete", "reasoning", [])
    assert item.content[0].type == "reasoning_text"
    events = list(thinking.responses.create(stream=True, **fields))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"reasoning_text.delta"}
    assert kinds[-4:] == ["reasoning_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert text == item.content[0].text == events[-4].text
