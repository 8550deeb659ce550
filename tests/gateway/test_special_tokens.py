"""Special tokens of a model in chats: its markers of calls, and their texts in what callers send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from gateway.chat_gateway import MODEL, save_chat_model, serve_chats, start_chats
from gateway.chat_templates import KIMI

from quire.cli.launch import LocalServices
from quire.gateway.chat.tools.formats import TOOL_FORMATS

MARKERS = TOOL_FORMATS["kimi-k2"].markers
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
CALLED = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which Kimi's markers are special tokens: it has more logits than its tokenizer has tokens."""
    from tokenizers import AddedToken, Tokenizer

    folder = save_chat_model(tmp_path_factory.mktemp("kimi"), KIMI)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def services(model: Path) -> Iterator[LocalServices]:
    with start_chats(model) as services:
        yield services


@pytest.fixture(scope="module")
def client(services: LocalServices, model: Path) -> Iterator[openai.OpenAI]:
    with serve_chats(services, log=model / "gateway.log") as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "seed": 3, "max_tokens": 1} | fields)


def prompt_of(client: openai.OpenAI, messages: list[Any], **fields: Any) -> list[int]:
    token_ids: list[int] = ask(client, messages, extra_body={"return_token_ids": True}, **fields).prompt_token_ids
    return token_ids


def test_calls_between_special_tokens_are_found_and_the_tokens_stay_hidden(client: openai.OpenAI) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    fields = {**CALLED, "parallel_tool_calls": False}
    [choice] = ask(client, hello, extra_body={"return_token_ids": True}, **fields).choices
    [call] = choice.message.tool_calls
    assert call.id.startswith("functions.weather:")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    jsonschema.validate(json.loads(call.function.arguments), PLACE)
    chunks = [chunk.choices[0] for chunk in ask(client, hello, stream=True, **fields)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    again = ask(client, [*hello, choice.message.model_dump(), result], tools=TOOLS, max_tokens=30)
    assert again.choices[0].message


def spelled(model: Path, text: str) -> list[int]:
    """Return a text's tokens without special ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


def special_of(model: Path, token_ids: list[int]) -> list[str]:
    """Return the special tokens among some tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [text for each in token_ids if (text := tokenizer.id_to_token(each)) in MARKERS]


@pytest.mark.parametrize("marker", MARKERS)
def test_a_special_token_s_text_is_text_in_what_a_caller_sends(marker: str, client: openai.OpenAI, model: Path) -> None:
    function = {"name": "f", "description": marker}
    for messages, tools in (
        ([{"role": "user", "content": f"a {marker}b"}], []),
        ([{"role": "user", "content": [{"type": "text", "text": marker}]}], []),
        ([{"role": "system", "content": marker}, {"role": "user", "content": "x"}], []),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}], []),
        ([{"role": "user", "content": "x"}], [{"type": "function", "function": function}]),
    ):
        prompt = prompt_of(client, messages, **({"tools": tools} if tools else {}))
        assert special_of(model, prompt) == []
        letters = spelled(model, marker)
        assert any(prompt[at : at + len(letters)] == letters for at in range(len(prompt)))


def test_the_template_s_own_special_tokens_stay_special(client: openai.OpenAI, model: Path) -> None:
    function = {"name": "weather", "arguments": json.dumps({"city": f"Rome {MARKERS[0]}"})}
    call = {"id": "functions.weather:0", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call["id"], "content": f"{MARKERS[1]}12 degrees"}
    prompt = prompt_of(client, [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result])
    section_begin, section_end, call_begin, call_end, arguments = MARKERS
    assert special_of(model, prompt) == [section_begin, call_begin, arguments, call_end, section_end]


def test_the_operator_can_let_them_be_special_tokens(services: LocalServices, model: Path, tmp_path: Path) -> None:
    with serve_chats(services, "--special-tokens-in-content", log=tmp_path / "log") as client:
        assert special_of(model, prompt_of(client, [{"role": "user", "content": f"a {MARKERS[0]}"}])) == [MARKERS[0]]
