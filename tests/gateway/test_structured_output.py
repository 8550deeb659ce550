"""Structured output ends: packages of others parse what the demo model writes in 200 tokens.

The values of the answers are few: the demo model writes prose into a free string and does not end it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from deadlines import DEADLINE_S
from gateway.chat_templates import CHATML
from gateway.conftest import MODEL, Gateway
from package_environments import environment
from pydantic import BaseModel, Field

from quire.cli.launch import LocalServices

MAX_TOKENS = 200
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
SAID: list[Any] = [{"role": "user", "content": "Who is she?"}]
PACKAGES = {
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-openai==1.7.3",),
}
CLASSES = """
import sys
from typing import Literal
from pydantic import BaseModel, Field

url, model, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Tag(BaseModel):
    label: Literal["new", "old"]
    score: int = Field(ge=0, le=100)

class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    is_here: bool
    tag: Tag
"""
INSTRUCTOR = """
import instructor, openai

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none"), mode=mode)
    said = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Who is she?"}], response_model=Person,
        max_tokens=max_tokens, max_retries=0, temperature=0, seed=3,
    )
    print(said.model_dump_json())
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_tokens=max_tokens, temperature=0, seed=3)
for method in ("json_schema", "function_calling"):
    print(chat.with_structured_output(Person, method=method).invoke("Who is she?").model_dump_json())
"""


class Tag(BaseModel):
    """A part of a person."""

    label: Literal["new", "old"]
    score: int = Field(ge=0, le=100)


class Person(BaseModel):
    """An answer."""

    name: Literal["Ada", "Grace"]
    is_here: bool
    tag: Tag


@pytest.fixture(scope="module")
def gateway(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that gives the demo's model a chat template."""
    folder = tmp_path_factory.mktemp("chats")
    template = folder / "template.jinja"
    template.write_text(CHATML)
    gateway = Gateway(services.cachemgr_address, "--chat-template", str(template), log=folder / "log")
    yield gateway
    gateway.close()


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_openai_parses(client: openai.OpenAI, temperature: float) -> None:
    fields: Any = {"model": MODEL, "temperature": temperature, "seed": 3}
    answer = client.chat.completions.parse(messages=SAID, response_format=Person, max_tokens=MAX_TOKENS, **fields)
    assert isinstance(answer.choices[0].message.parsed, Person)
    del fields["seed"]
    response = client.responses.parse(input="Who is she?", text_format=Person, max_output_tokens=MAX_TOKENS, **fields)
    assert isinstance(response.output_parsed, Person)


def test_what_openai_parsed_can_be_sent_back(client: openai.OpenAI) -> None:
    """The package adds `parsed` and `parsed_arguments` to the answers that a caller appends to its messages."""
    fields: Any = {"model": MODEL, "temperature": 0}
    text = client.chat.completions.parse(messages=SAID, response_format=Person, max_tokens=MAX_TOKENS, **fields)
    call = client.chat.completions.parse(
        messages=SAID,
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice={"type": "function", "function": {"name": "Person"}},
        max_tokens=MAX_TOKENS,
        **fields,
    )
    for answer in (text.choices[0].message, call.choices[0].message):
        sent: Any = [*SAID, answer.model_dump(warnings=False), *SAID]
        assert client.chat.completions.create(messages=sent, max_tokens=1, **fields).choices
    response = client.responses.parse(input="Who is she?", text_format=Person, max_output_tokens=MAX_TOKENS, **fields)
    output = [item.model_dump(exclude_none=True, warnings=False) for item in response.output]
    assert output[0]["content"][0]["parsed"]
    called = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "parsed_arguments": {}}
    result = {"type": "function_call_output", "call_id": "a", "output": "1"}
    again: Any = [*output, called, result]
    assert client.responses.create(input=again, max_output_tokens=1, **fields).output is not None


def test_a_strict_schema_has_no_further_keys(client: openai.OpenAI) -> None:
    asked = {"name": "person", "schema": PERSON, "strict": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=SAID,
        response_format={"type": "json_schema", "json_schema": asked},  # type: ignore[typeddict-item]
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        seed=100,
        n=8,
    )
    whole = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert whole
    assert all(json.loads(text).keys() <= {"name", "age"} for text in whole)


@pytest.mark.parametrize(
    ("options", "may_be_indented", "may_have_further_keys"),
    [
        ({}, False, True),
        ({"disable_any_whitespace": True}, False, True),
        ({"disable_any_whitespace": False}, True, True),
        ({"whitespace_pattern": "\n"}, True, True),
        ({"disable_additional_properties": True}, False, False),
    ],
)
def test_options_of_vllm_say_what_json_may_have(
    client: openai.OpenAI, options: dict[str, Any], *, may_be_indented: bool, may_have_further_keys: bool
) -> None:
    texts = [
        choice.text
        for seed in range(2)
        for choice in client.completions.create(
            model=MODEL,
            prompt="A person:",
            max_tokens=60,
            temperature=1.5,
            seed=seed,
            n=16,
            extra_body={"structured_outputs": {"json": PERSON, **options}},
        ).choices
    ]
    assert any("\n" in text for text in texts) is may_be_indented
    assert any(re.search(r'[{,]\s*"(?!name"|age")', text) for text in texts) is may_have_further_keys


@pytest.mark.parametrize("others", [{"regex": "a"}, {"json": True}, {"choice": ["a"]}])
def test_options_of_json_are_for_json(client: openai.OpenAI, others: dict[str, Any]) -> None:
    body = {"structured_outputs": {"disable_any_whitespace": True, **others}}
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.disable_any_whitespace must be given with"):
        client.completions.create(model=MODEL, prompt="A", max_tokens=1, extra_body=body)


@pytest.mark.verify
@pytest.mark.parametrize(("name", "program"), [("instructor", INSTRUCTOR), ("langchain", LANGCHAIN)])
def test_other_packages_parse(gateway: Gateway, tmp_path: Path, name: str, program: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(CLASSES + program)
    python = environment(name, *PACKAGES[name]) / "python"
    command = [python, path, gateway.url, MODEL, str(MAX_TOKENS)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.returncode == 0, said.stderr
    answers = said.stdout.splitlines()
    assert len(answers) == 2
    for answer in answers:
        Person.model_validate_json(answer)
