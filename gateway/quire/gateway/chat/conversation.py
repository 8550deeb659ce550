"""The parts of a chat: messages, and the tools on offer, as bodies of requests bring them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.gateway.chat.arguments import arguments_of
from quire.gateway.chat.cache_fields import KeptEnds
from quire.gateway.chat.json_schemas import closed
from quire.gateway.chat.prefix_ends import BehindTool, InMessage, Message, PrefixEnd
from quire.gateway.chat.tools import Tool
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import Fields, object_of, text_of

MAX_MESSAGES = 8_192
MAX_PARTS = 1_024
"""Parts of the content of one message."""
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""The most calls of one message."""
PARSED, PARSED_ARGUMENTS = "parsed", "parsed_arguments"
"""Fields that OpenAI's packages add to what they parse: a caller sends them back with the answer. They are ignored."""
ROLES = ("system", "developer", "user", "assistant", "tool")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_LIMIT = "1 to 64 letters, digits, underscores, dashes or dots"

GivenTool = tuple[Tool, Mapping[str, Any]]
"""A tool, and how the template gets it."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool, which the answer has to call."""

    name: str


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that the model may call.

    tools       the tools that a call may be of
    shown       how the template gets them
    is_forced   the answer is calls, and nothing else
    parallel    several calls in one answer are allowed
    """

    tools: tuple[Tool, ...] = ()
    shown: tuple[Mapping[str, Any], ...] = ()
    is_forced: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as the template gets them, and the other parts of the prompt.

    continues   the model continues the last message, and begins no other
    further     values that the template gets by name
    kept        ends of prefixes to keep in the cache
    """

    messages: Sequence[Message]
    offer: OfferedTools = OfferedTools()
    add_generation_prompt: bool = True
    continues: bool = False
    further: Mapping[str, Any] = field(default_factory=dict)
    kept: Sequence[PrefixEnd] = ()


# -- messages -----------------------------------------------------------------------------------------------------


def read_messages(fields: Fields, kept: KeptEnds) -> list[Message]:
    """Return the messages of a chat completion, and collect the ends of prefixes to keep.

    Raises HttpError: 400 with the field's path.
    """
    fields.require("messages")
    given = fields.objects("messages", max_length=MAX_MESSAGES) or []
    if not given:
        raise invalid(fields.path_of("messages"), [], "a list of at least one message")
    return [_message(each, index, kept) for index, each in enumerate(given)]


def _message(fields: Fields, index: int, kept: KeptEnds) -> Message:
    fields.require("role")
    role = fields.choice("role", ROLES)
    message: Message = {"role": role}
    if (name := fields.string("name")) is not None:
        message["name"] = name
    if role == "assistant":
        _read_answer(fields, message)
    elif role == "tool":
        fields.require("tool_call_id")
        message["tool_call_id"] = fields.string("tool_call_id")
    if "tool_calls" not in message or fields.has("content"):
        fields.require("content")
        message["content"] = read_content(fields, "content", kinds=("text",), kept=kept, message=index)
    fields.take("content")
    kept.take(fields, InMessage(index, len(message["content"]) if message.get("content") else None))
    fields.end()
    return message


def _read_answer(fields: Fields, message: Message) -> None:
    """Read the fields that only an assistant's message has."""
    for name in ("reasoning_content", "reasoning"):
        if (reasoning := fields.string(name)) is not None:
            message["reasoning_content"] = reasoning
    calls = fields.objects("tool_calls", max_length=MAX_TOOL_CALLS)
    if calls:
        message["tool_calls"] = [_call(each) for each in calls]
    fields.refuse("function_call", "give tool_calls")
    fields.refuse("audio", "only text is")
    fields.ignore("refusal", "annotations", PARSED)


def read_content(fields: Fields, name: str, *, kinds: Sequence[str], kept: KeptEnds, message: int) -> str:
    """Return the content of a message as one text: parts are joined by line feeds. Collects the ends of parts to keep.

    Raises HttpError for a part that is no text.
    """
    path, value = fields.path_of(name), fields.take(name)
    if isinstance(value, str):
        return text_of(path, value)
    if not isinstance(value, list):
        raise invalid(path, value, "a string or a list of parts")
    texts: list[str] = []
    num_chars = -1
    for part in fields.objects(name, max_length=MAX_PARTS) or []:
        texts.append(_text_of_part(part, kinds))
        num_chars += 1 + len(texts[-1])
        kept.take(part, InMessage(message, num_chars))
        part.end()
    return "\n".join(texts)


def _text_of_part(part: Fields, kinds: Sequence[str]) -> str:
    part.require("type")
    part.choice("type", kinds)
    part.require("text")
    text = part.string("text") or ""
    part.ignore("annotations", "logprobs", "citations", PARSED)
    return text


def _call(fields: Fields) -> dict[str, Any]:
    """Return a call as templates expect it: the arguments are an object, where clients send its JSON text."""
    fields.choice("type", ("function",))
    fields.require("function")
    function = fields.object("function")
    assert function is not None
    function.require("name")
    call = call_message(fields.string("id", ""), function.string("name") or "", function.string("arguments", ""))
    function.ignore(PARSED_ARGUMENTS)
    function.end()
    fields.ignore("index")
    fields.end()
    return call


def call_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as templates expect it: its arguments are an object, also if they were cut off."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


# -- tools --------------------------------------------------------------------------------------------------------


def read_tools(fields: Fields, kept: KeptEnds) -> OfferedTools:
    """Return the tools on offer of a chat completion, and collect the ends of prefixes to keep.

    Raises HttpError: 400 with the field's path.
    """
    given = {
        f"{fields.path_of('tools')}[{index}]": _tool(each, index, kept)
        for index, each in enumerate(fields.objects("tools", max_length=MAX_TOOLS) or [])
    }
    parallel = fields.boolean("parallel_tool_calls", True)
    return offer_of(list(given.values()), _choice(fields, names_of(given)), parallel=parallel)


def names_of(given: Mapping[str, GivenTool]) -> list[str]:
    """Return the names of tools by path. Raises HttpError if two have one name."""
    names: list[str] = []
    for path, (tool, _) in given.items():
        if tool.name in names:
            raise invalid(path, tool.name, "a name that no other tool has")
        names.append(tool.name)
    return names


def offer_of(given: Sequence[GivenTool], choice: str | NamedTool, *, parallel: bool) -> OfferedTools:
    """Return the offer of these tools; choice is "none", "auto", "required" or the tool to call."""
    if choice == "none" or not given:
        return OfferedTools()
    tools = tuple(tool for tool, _ in given)
    shown = tuple(shown for _, shown in given)
    if isinstance(choice, NamedTool):
        chosen = tuple(tool for tool in tools if tool.name == choice.name)
        return OfferedTools(chosen, shown, is_forced=True, parallel=False)
    return OfferedTools(tools, shown, is_forced=choice == "required", parallel=parallel)


def _tool(fields: Fields, index: int, kept: KeptEnds) -> GivenTool:
    fields.require("type")
    fields.choice("type", ("function",))
    fields.require("function")
    function = fields.object("function") or fields
    tool = function_of(function)
    kept.take(function, BehindTool(index))
    function.end()
    kept.take(fields, BehindTool(index))
    fields.end()
    return tool


def function_of(fields: Fields) -> GivenTool:
    """Return the function that fields describe. Raises HttpError: 400 with the field's path."""
    return tool_of(fields, name_of(fields), schema="parameters", is_strict=fields.boolean("strict", True))


def tool_of(fields: Fields, name: str, *, schema: str, is_strict: bool = True) -> GivenTool:
    """Return a tool of this name with the description in fields; `schema` is the field of its arguments' JSON schema.

    A strict tool takes no argument that its schema does not name.

    Raises HttpError: 400 with the field's path.
    """
    description = fields.string("description")
    parameters = fields.mapping(schema)
    if parameters is not None and parameters.get("type", "object") != "object":
        path = f"{fields.path_of(schema)}.type"
        raise invalid(path, parameters["type"], "'object', since arguments have names")
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    if parameters is not None:
        shown["parameters"] = parameters
    arguments = (
        {"type": "object", "properties": {}, "additionalProperties": False} if parameters is None else parameters
    )
    return Tool(name, closed(arguments) if is_strict else arguments), {"type": "function", "function": shown}


def name_of(fields: Fields) -> str:
    """Return a tool's name. Raises HttpError: 400 with the field's path."""
    fields.require("name")
    name = fields.string("name") or ""
    if not _NAME.fullmatch(name):
        raise invalid(fields.path_of("name"), name, _NAME_LIMIT)
    return name


def _choice(fields: Fields, names: Sequence[str]) -> str | NamedTool:
    path, value = fields.path_of("tool_choice"), fields.take("tool_choice")
    if not isinstance(value, dict):
        return choice_of(path, value, names)
    choice = object_of(path, value, ignored=fields.ignored)
    choice.require("type")
    choice.choice("type", ("function",))
    choice.require("function")
    function = choice.object("function") or choice
    named = NamedTool(chosen_name(function, names))
    function.end()
    choice.end()
    return named


def choice_of(path: str, value: Any, names: Sequence[str]) -> str:
    """Return a choice that names no tool: "none", "auto" or "required". Raises HttpError."""
    if value is None:
        return "auto"
    if not isinstance(value, str) or value not in ("none", "auto", "required"):
        raise invalid(path, value, "'none', 'auto', 'required' or a function by its name")
    if value == "required" and not names:
        raise HttpError(400, f"{path} is 'required', and there are no tools", code="invalid_value", param=path)
    return value


def chosen_name(fields: Fields, names: Sequence[str]) -> str:
    """Return the name of a tool on offer. Raises HttpError."""
    fields.require("name")
    name = fields.string("name") or ""
    if name not in names:
        raise invalid(fields.path_of("name"), name, "the name of a tool in tools")
    return name
