"""POST /v1/messages as Anthropic's clients send it, over real services."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pages
import pytest
from deadlines import DEADLINE_S
from gateway.chat_gateway import MODEL
from gateway.conftest import ROOT, Gateway, key_lines
from gateway.test_docs import DEFAULT
from package_environments import environment

from quire.cli.launch import LocalServices

PAGE = "docs/how-to/use-your-client.md"
ANTHROPIC = "anthropic==2.10.0"
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": PLACE},
    {"name": "time", "input_schema": PLACE, "cache_control": {"type": "ephemeral"}},
]
CONTEXT = 2_048
"""Tokens that the model has room for."""
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(chat_services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    gateway = Gateway(chat_services.cachemgr_address, log=tmp_path_factory.mktemp("gateway") / "log")
    try:
        with gateway.client(headers={"anthropic-version": "2023-06-01", "x-api-key": "none"}) as client:
            yield client
    finally:
        gateway.close()


def post(client: httpx.Client, path: str = "", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 8, "messages": HELLO, "seed": 3} | fields
    if path:
        body = {name: value for name, value in body.items() if name not in ("max_tokens", "seed")}
    return client.post(f"/v1/messages{path}", json=body)


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = post(client, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def count(client: httpx.Client, **fields: Any) -> int:
    answer = post(client, "/count_tokens", **fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the data of the events of a stream, each of which has its type as its name."""
    answer = post(client, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client puts together from events. Checks their order."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    inputs: dict[int, str] = {}
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            if event["delta"]["type"] == "text_delta":
                message["content"][-1]["text"] += event["delta"]["text"]
            else:
                assert event["delta"]["type"] == "input_json_delta"
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            is_open = False
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert not is_open
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = {"output_tokens": message["usage"]["output_tokens"]}  # the prompt is cached at the second time
    return message | {"id": "", "content": content, "usage": usage}


def test_an_answer_has_text_and_usage(client: httpx.Client) -> None:
    answer = ask(client, system="Be brief.")
    [block] = answer["content"]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["id"].startswith("msg_")
    assert block["type"] == "text"
    assert block["text"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = ask(client, system="Be brief.")["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count(client, system="Be brief.")
    assert usage["output_tokens"] == 8


def test_a_stream_is_the_same_message(client: httpx.Client) -> None:
    whole, streamed = ask(client), message_of(stream(client))
    assert without_ids(streamed) == without_ids(whole)


def test_a_tool_is_called_and_its_result_goes_back(client: httpx.Client) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    answer = ask(client, **asked)
    [call] = answer["content"]
    assert (call["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
    assert call["name"] in ("weather", "time")
    jsonschema.validate(call["input"], PLACE)
    streamed = message_of(stream(client, **asked))
    assert without_ids(streamed) == without_ids(answer)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "12 degrees"}
    messages = [*HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert ask(client, messages=messages, tools=TOOLS)["content"]


def test_a_tool_is_chosen_by_name_or_not_at_all(client: httpx.Client) -> None:
    answer = ask(client, tools=TOOLS, tool_choice={"type": "tool", "name": "time"}, max_tokens=200)
    assert [block["name"] for block in answer["content"]] == ["time"]
    assert count(client, tools=TOOLS, tool_choice={"type": "none"}) == count(client)
    assert count(client, tools=TOOLS, tool_choice={"type": "auto"}) > count(client)


def test_a_call_that_is_cut_shows_its_text(client: httpx.Client) -> None:
    asked = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "time"}}
    answers = (ask(client, **asked, max_tokens=number) for number in range(10, 200))
    answer = next(each for each in answers if "INVALID_JSON" in each["content"][0].get("input", {}))
    assert answer["stop_reason"] == "max_tokens"
    [call] = answer["content"]
    assert call["input"]["INVALID_JSON"].startswith("{")


def test_the_stop_sequence_that_ended_the_text_is_named(client: httpx.Client) -> None:
    text = ask(client, max_tokens=32)["content"][0]["text"]
    answer = ask(client, max_tokens=32, stop_sequences=["never written", text[3:5]])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[3:5])
    assert text.startswith(answer["content"][0]["text"])
    assert text[3:5] not in answer["content"][0]["text"]
    assert message_of(stream(client, max_tokens=32, stop_sequences=[text[3:5]]))["stop_sequence"] == text[3:5]


def test_an_answer_that_ends_by_itself(client: httpx.Client) -> None:
    config = {"format": {"type": "json_schema", "schema": PLACE}, "effort": "xhigh"}
    answer = ask(client, output_config=config, max_tokens=200)
    assert answer["stop_reason"] == "end_turn"
    jsonschema.validate(json.loads(answer["content"][0]["text"]), PLACE)


def test_more_tokens_than_the_model_has_room_for_are_a_limit_and_no_error(client: httpx.Client) -> None:
    each = count(client, system="word " * 200) - count(client, system="word " * 100)
    system = "word " * ((CONTEXT - 100) * 100 // each)
    num_left = CONTEXT - count(client, system=system)
    answer = ask(client, system=system, max_tokens=64_000, ignore_eos=True)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert 0 < answer["usage"]["output_tokens"] <= num_left
    refused = post(client, system=system * 2).json()["error"]
    assert refused["type"] == "invalid_request_error"
    assert refused["message"].startswith("messages: ")


def test_the_last_message_of_an_assistant_is_continued(client: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    begun = count(client, messages=messages)
    whole = count(client, messages=[*messages, *HELLO])
    assert count(client) < begun < whole
    assert ask(client, messages=messages)["content"][0]["text"]


CLAUDE_CODE: dict[str, Any] = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=0aaa9;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is Friday.</system-reminder>"},
                {"type": "text", "text": "Fix it", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "The file first.", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "eA=="},
                {"type": "text", "text": "I read two files.", "citations": None},
                {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"path": "a"}},
                {"type": "tool_use", "id": "toolu_02", "name": "mcp__files__list", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": [{"type": "text", "text": "x = 1"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_02",
                    "content": "no such folder",
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Go on"},
            ],
        },
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Read a file.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        },
        {
            "type": "custom",
            "name": "mcp__files__list",
            "input_schema": {"type": "object", "properties": {}},
            "defer_loading": True,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_account_2_session_3"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "max"},
}


def test_the_shapes_of_claude_code(client: httpx.Client) -> None:
    """The prompt is the one that a chat completion of the same conversation has."""

    def function(name: str, **arguments: str) -> dict[str, Any]:
        return {"name": name, "arguments": json.dumps(arguments)}

    calls = [("toolu_01", function("Read", path="a")), ("toolu_02", function("mcp__files__list"))]
    messages = [
        {"role": "system", "content": "You are an agent.\nBe brief."},
        {"role": "user", "content": "<system-reminder>Today is Friday.</system-reminder>\nFix it"},
        {
            "role": "assistant",
            "content": "I read two files.",
            "reasoning_content": "The file first.",
            "tool_calls": [{"id": call_id, "type": "function", "function": each} for call_id, each in calls],
        },
        {"role": "tool", "tool_call_id": "toolu_01", "content": "x = 1"},
        {"role": "tool", "tool_call_id": "toolu_02", "content": "Error: no such folder"},
        {"role": "user", "content": "Go on"},
    ]
    tools = [
        {
            "type": "function",
            "function": {
                **{name: tool[name] for name in ("name", "description") if name in tool},
                "parameters": tool["input_schema"],
            },
        }
        for tool in CLAUDE_CODE["tools"][:2]
    ]
    chat = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 4, "seed": 3}
    chat |= {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}
    whole = client.post("/v1/chat/completions", json=chat).json()
    num_tokens = len(whole["prompt_token_ids"])
    body = {"model": MODEL, "max_tokens": 32_000, "stream": True, "seed": 3, **CLAUDE_CODE}
    counted = client.post("/v1/messages/count_tokens?beta=true", json={"model": MODEL, **CLAUDE_CODE})
    assert counted.json() == {"input_tokens": num_tokens}
    answer = client.post("/v1/messages?beta=true", json=body | {"max_tokens": 4, "stream": False}).json()
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == num_tokens - usage["input_tokens"] > num_tokens - 8
    assert answer["content"] == [{"type": "text", "text": whole["choices"][0]["message"]["content"]}]


def test_neighbours_of_one_role_are_one_message(client: httpx.Client) -> None:
    apart = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert count(client, messages=apart) == count(client, messages=[{"role": "user", "content": "a\nb"}])


TOOL_USE = {"type": "tool_use", "id": "t", "name": "time", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is []"),
    ({"messages": [{"role": "user", "content": []}]}, "messages is []"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type is 'image'"),
    ({"messages": [{"role": "user", "content": [TOOL_USE]}]}, "messages[0].content[0].type is 'tool_use'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0].type is 'image'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [TOOL_USE]}]}, "messages[1].content has tool_use"),
    ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "messages[1].content has no text"),
    ({"messages": [{"role": "user", "content": "x", "kind": 3}]}, "messages[0].kind"),
    ({"system": 3}, "system is 3"),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1] is 'weather'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "run"}}, "tool_choice.name is 'run'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "all"}}, "tool_choice.type is 'all'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any'"),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    ({"stop_sequences": [3]}, "stop_sequences[0] is 3"),
    ({"stop": "x"}, "stop is not supported: give stop_sequences"),
    ({"thinking": {"type": "always"}}, "thinking.type is 'always'"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type is 'text'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "strong"}}}}, "output_config.format"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"n": 2}, "n is not supported"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"surprise": 1}, "'surprise' is no field"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_field_is_named(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    for more in ({}, {"stream": True}):
        answer = post(client, **fields, **more)
        body = answer.json()
        assert (answer.status_code, body["type"]) == (400, "error")
        assert body["error"]["type"] == "invalid_request_error"
        assert message in body["error"]["message"]
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_all_errors_below_the_path_have_one_shape(client: httpx.Client) -> None:
    cases = [
        (client.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (post(client, model="other"), 404, "not_found_error"),
        (client.post("/v1/messages/batches", json={}), 404, "not_found_error"),
        (client.get("/v1/messages"), 405, "invalid_request_error"),
        (client.post("/v1/messages", content=b"x" * (16 * 2**20 + 1)), 413, "request_too_large"),
    ]
    for answer, status, kind in cases:
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert "param" in client.get("/v1/other").json()["error"]


KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}


@pytest.fixture(scope="module")
def keyed(chat_services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with keys, at which bob may use one token a minute, and bodies have 1 MiB."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(key_lines(KEYS) + key_lines({"watcher": "key-of-watcher"}, "worker"))
    (folder / "limits").write_text("[tenants.bob]\ntokens_per_minute = 1\n")
    flags = ("--api-keys", str(folder / "keys"), "--tenant-limits", str(folder / "limits"))
    gateway = Gateway(chat_services.cachemgr_address, *flags, "--max-body-bytes", str(2**20), log=folder / "log")
    yield gateway
    gateway.close()


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_is_in_either_header(keyed: Gateway, header: str) -> None:
    def status(key: str) -> tuple[int, Any]:
        with keyed.client(headers={header: key if header == "x-api-key" else f"Bearer {key}"}) as client:
            answer = post(client)
            assert client.get("/v1/models").status_code == answer.status_code
            return answer.status_code, answer.json().get("error", {}).get("type")

    assert status("key-of-alice") == (200, None)
    assert status("key-of-carol") == (401, "authentication_error")
    assert status("key-of-watcher") == (403, "permission_error")
    with keyed.client() as client:
        assert post(client, "/count_tokens").json()["error"]["type"] == "authentication_error"


@pytest.mark.verify
def test_the_package_of_anthropic(keyed: Gateway) -> None:
    program = ROOT / "tests/gateway/anthropic_program.py"
    said = run_with_package(program, keyed.url, MODEL, KEYS["alice"], KEYS["bob"])
    assert (said.returncode, said.stdout) == (0, "done\n"), said.stderr


@pytest.mark.verify
def test_the_example_of_the_page(keyed: Gateway, tmp_path: Path) -> None:
    block = pages.block(PAGE, test="tests/gateway/test_messages.py")
    text = block.text.replace(DEFAULT, keyed.url).replace('model="model"', f'model="{MODEL}"')
    program = tmp_path / "program.py"
    program.write_text(text.replace('api_key="none"', f'api_key="{KEYS["alice"]}"'))
    said = run_with_package(program)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.strip()


def run_with_package(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [environment("anthropic", ANTHROPIC) / "python", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
