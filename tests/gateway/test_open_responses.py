"""/v1/responses: what Codex sends, responses that are kept, and the cases of Open Responses' compliance suite."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from deadlines import DEADLINE_S
from gateway.chat_gateway import MODEL
from gateway.conftest import ROOT, Gateway, key_lines
from package_environments import environment

from quire.cli.launch import LocalServices

TYPES = "openresponses-types==2.4.0"
KEPT_BYTES = 20_000
"""Of each tenant."""
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Run a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"enum": ["ls", "pwd"]}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
}
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA", "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done!"},
        {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": {"type": "exec", "command": []}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "{}"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    ],
    "tools": [
        SHELL,
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        PATCH,
        {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": []},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a3b4-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "service_tier": "priority",
    "client_metadata": {"x-codex-turn-metadata": "{}"},
}


@pytest.fixture(scope="module")
def gateway(chat_services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    keys = folder / "keys"
    keys.write_text(key_lines(KEYS))
    gateway = Gateway(
        *(chat_services.cachemgr_address, "--api-keys", str(keys), "--responses-kept-bytes", str(KEPT_BYTES)),
        log=folder / "log",
    )
    yield gateway
    gateway.close()


@pytest.fixture
def alice(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with client_of(gateway, "alice") as client:
        yield client


@pytest.fixture
def bob(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with client_of(gateway, "bob") as client:
        yield client


def client_of(gateway: Gateway, tenant: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=DEADLINE_S)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 8} | fields
    return client.responses.create(**body, extra_body={"seed": 3})


def num_tokens(client: openai.OpenAI, items: Any, **fields: Any) -> int:
    return int(ask(client, input=items, max_output_tokens=1, store=False, **fields).usage.input_tokens)


def events_of(gateway: Gateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, as Codex reads them: by their data."""
    with gateway.client(headers={"Authorization": f"Bearer {KEYS['alice']}"}) as client:
        answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: ")]


# -- Codex --------------------------------------------------------------------------------------------------------


def test_the_request_of_codex_is_answered(gateway: Gateway, alice: openai.OpenAI) -> None:
    events = events_of(gateway, CODEX | {"max_output_tokens": 8, "seed": 3})
    response = events[-1]["response"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert response["tools"] == [SHELL, *CODEX["tools"][1:]]
    assert (response["store"], response["text"]["verbosity"]) == (False, "low")
    assert response["prompt_cache_key"] == CODEX["prompt_cache_key"]
    items = CODEX["input"]
    fields = {"instructions": CODEX["instructions"], "tools": CODEX["tools"]}
    plain = [item for item in items if item["type"] not in ("reasoning", "web_search_call")]
    assert num_tokens(alice, items, **fields) == num_tokens(alice, plain, **fields) == response["usage"]["input_tokens"]


def test_a_developers_message_behind_the_instructions_belongs_to_them(alice: openai.OpenAI) -> None:
    """Codex sends both, and Qwen's templates take a system's message at the beginning alone."""
    developer, *rest = CODEX["input"]
    joined = f"{CODEX['instructions']}\n{developer['content'][0]['text']}"
    num_apart = num_tokens(alice, CODEX["input"], instructions=CODEX["instructions"])
    assert num_apart == num_tokens(alice, rest, instructions=joined)


@pytest.mark.parametrize("tool", [SHELL, PATCH], ids=lambda tool: str(tool["type"]))
def test_ids_agree_in_all_events_and_in_the_answer(gateway: Gateway, tool: dict[str, Any]) -> None:
    choice = {"type": tool["type"], "name": tool["name"]}
    schema = {"format": {"type": "json_schema", "name": "x", "schema": SHELL["parameters"]}}
    for more in ({"tool_choice": choice}, {"tool_choice": "none", "text": schema}):
        events = events_of(gateway, CODEX | {"tools": [tool], "max_output_tokens": 60, "seed": 3} | more)
        added, done = (
            [event["item"] for event in events if event["type"] == f"response.output_item.{when}"]
            for when in ("added", "done")
        )
        output = events[-1]["response"]["output"]
        assert [item["id"] for item in added] == [item["id"] for item in done]
        assert done == output
        assert {event["item_id"] for event in events if "item_id" in event} == {item["id"] for item in output}
        assert [item.get("call_id") for item in added] == [item.get("call_id") for item in output]
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_a_tool_of_free_text_is_called_with_text(gateway: Gateway, alice: openai.OpenAI) -> None:
    body = CODEX | {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}, "seed": 3}
    events = events_of(gateway, body | {"max_output_tokens": 300})
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    kinds = [event["type"].removeprefix("response.") for event in events[2:-1]]
    input_kinds = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds == ["output_item.added", *input_kinds, "output_item.done"]
    assert events[3]["delta"] == events[4]["input"] == item["input"]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
    user = {"role": "user", "content": "Hello"}
    assert num_tokens(alice, [user, item, result], tools=[PATCH]) > num_tokens(alice, [user], tools=[PATCH])


def test_only_allowed_tools_are_called(alice: openai.OpenAI) -> None:
    tools = [SHELL, SHELL | {"name": "run"}, {"type": "web_search"}]
    allowed = [{"type": "function", "name": "run"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    answer = ask(alice, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)
    assert [item.name for item in answer.output] == ["run"]


# -- kept responses -----------------------------------------------------------------------------------------------


def test_a_response_is_fetched_continued_and_deleted(alice: openai.OpenAI) -> None:
    first = ask(alice, instructions="Be brief.")
    assert alice.responses.retrieve(first.id) == first
    with pytest.raises(openai.BadRequestError):
        alice.responses.retrieve(first.id, stream=True)
    second = ask(alice, input="And now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    items = [
        {"role": "user", "content": "Hello"},
        first.output[0].model_dump(exclude_none=True),
        {"role": "user", "content": "And now?"},
    ]
    assert second.usage.input_tokens == num_tokens(alice, items), "the instructions are not continued"
    listed = list(alice.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed] == ["message"] * 3
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert listed[1].id == first.output[0].id
    pages = alice.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in pages] == [item.id for item in reversed(listed)]
    third = ask(alice, input=[{"type": "item_reference", "id": first.output[0].id}, items[2]], store=False)
    assert third.usage.input_tokens == num_tokens(alice, items[1:])
    alice.responses.delete(first.id)
    for gone in (first.id, third.id):
        with pytest.raises(openai.NotFoundError):
            alice.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(alice, previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_stream_is_kept_when_its_last_event_comes(alice: openai.OpenAI) -> None:
    for event in ask(alice, stream=True):
        last = event
    assert alice.responses.retrieve(last.response.id) == last.response


def test_a_response_is_not_there_for_another_tenant(alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    answer = ask(alice)
    for request in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            request(answer.id)
    for fields in (
        {"previous_response_id": answer.id},
        {"input": [{"type": "item_reference", "id": answer.output[0].id}]},
    ):
        with pytest.raises(openai.BadRequestError):
            ask(bob, **fields)
    assert alice.responses.retrieve(answer.id) == answer


def test_the_id_of_a_request_makes_no_two_responses_one(alice: openai.OpenAI) -> None:
    asked = {"extra_headers": {"X-Request-Id": "turn/1?"}}
    first, second = ask(alice, **asked), ask(alice, **asked)
    assert first.id != second.id
    assert "turn-1-" in first.id
    assert alice.responses.retrieve(first.id) == first


def test_the_oldest_responses_of_a_tenant_make_room(gateway: Gateway, alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    others = ask(bob)
    first = ask(alice)
    for _ in range(20):
        ask(alice, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(first.id)
    assert bob.responses.retrieve(others.id) == others
    assert gateway.metric("quire_gateway_kept_responses") > 1
    assert 0 < gateway.metric("quire_gateway_kept_response_bytes") <= len(KEYS) * KEPT_BYTES
    assert gateway.metric("quire_gateway_kept_responses_dropped_total") > 0


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=none"])
def test_a_bad_page_is_refused(gateway: Gateway, alice: openai.OpenAI, query: str) -> None:
    path = f"/v1/responses/{ask(alice).id}/input_items?{query}"
    with gateway.client(headers={"Authorization": f"Bearer {KEYS['alice']}"}) as client:
        answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


# -- Open Responses -----------------------------------------------------------------------------------------------


@pytest.mark.verify
def test_the_cases_of_open_responses(gateway: Gateway) -> None:
    program = ROOT / "tests/gateway/open_responses_program.py"
    command = [environment("openresponses", TYPES) / "python", program, gateway.url, MODEL, KEYS["alice"]]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (said.returncode, said.stdout) == (0, "6 cases\n"), said.stderr[-5000:]
