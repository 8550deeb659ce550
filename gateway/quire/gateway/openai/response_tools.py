"""The tools of a request to /v1/responses. Pure.

A function is offered as it is. A `custom` tool takes free text, and is offered as a function of one string. All
other kinds are of services that OpenAI runs, or of built-in knowledge of OpenAI's models: they are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.gateway.chat.cache_fields import KeptEnds
from quire.gateway.chat.conversation import (
    MAX_TOOLS,
    GivenTool,
    NamedTool,
    OfferedTools,
    choice_of,
    chosen_name,
    function_of,
    name_of,
    names_of,
    offer_of,
)
from quire.gateway.chat.prefix_ends import BehindTool
from quire.gateway.chat.tools import Tool
from quire.gateway.errors import invalid
from quire.gateway.fields import Fields, object_of

INPUT = "input"
"""The one argument of a custom tool's function."""

_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_FUNCTION_DEFAULTS = {"description": None, "parameters": None, "strict": None}


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools on offer, the names of those that are custom, and the tools as the answer lists them."""

    offer: OfferedTools
    custom_names: frozenset[str]
    listed: Sequence[Mapping[str, Any]]


def read_response_tools(fields: Fields, kept: KeptEnds) -> ResponseTools:
    """Return the tools of a body, and collect the ends of prefixes to keep.

    Raises HttpError: 400 with the field's path.
    """
    given: dict[str, GivenTool] = {}
    listed: list[Mapping[str, Any]] = []
    custom_names = set()
    values = fields.take("tools")
    for index, each in enumerate(fields.objects("tools", max_length=MAX_TOOLS) or []):
        each.require("type")
        kind, path = each.string("type"), f"{fields.path_of('tools')}[{index}]"
        listed.append(_FUNCTION_DEFAULTS | values[index] if kind == "function" else values[index])
        if kind == "function":
            given[path] = function_of(each)
            kept.take(each, BehindTool(len(given) - 1))
            each.end()
        elif kind == "custom":
            given[path] = _custom(each)
            custom_names.add(given[path][0].name)
    parallel = fields.boolean("parallel_tool_calls", True)
    offer = _offer(fields, given, parallel=parallel)
    return ResponseTools(offer, frozenset(custom_names), listed)


def _custom(fields: Fields) -> GivenTool:
    name, description = name_of(fields), fields.string("description")
    if (format := fields.object("format")) is not None:
        format.require("type")
        kind = format.choice("type", ("text", "grammar"))
        syntax, definition = format.string("syntax", ""), format.string("definition", "")
        format.end()
        if kind == "grammar":
            description = f"{description or ''}\n\nThe input follows this {syntax} grammar:\n{definition}".strip()
    fields.ignore("defer_loading")
    fields.end()
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    return Tool(name, _INPUT_SCHEMA), {"type": "function", "function": shown | {"parameters": _INPUT_SCHEMA}}


def _offer(fields: Fields, given: Mapping[str, GivenTool], *, parallel: bool) -> OfferedTools:
    path, value, names = fields.path_of("tool_choice"), fields.take("tool_choice"), names_of(given)
    tools = list(given.values())
    if not isinstance(value, dict):
        return offer_of(tools, choice_of(path, value, names), parallel=parallel)
    choice = object_of(path, value)
    choice.require("type")
    kind = choice.choice("type", ("function", "custom", "allowed_tools"))
    if kind != "allowed_tools":
        named = NamedTool(chosen_name(choice, names))
        choice.end()
        return offer_of(tools, named, parallel=parallel)
    mode = choice.choice("mode", ("auto", "required"), "auto")
    allowed = {_allowed_name(each, names) for each in choice.objects("tools", max_length=MAX_TOOLS) or []} - {None}
    choice.end()
    if not allowed:
        raise invalid(choice.path_of("tools"), [], "a list of at least one function or custom tool")
    offer = offer_of(tools, mode, parallel=parallel)
    return replace(offer, tools=tuple(tool for tool in offer.tools if tool.name in allowed))


def _allowed_name(fields: Fields, names: Sequence[str]) -> str | None:
    """Return the name of an allowed tool; None for a kind that is not offered."""
    fields.require("type")
    return chosen_name(fields, names) if fields.string("type") in ("function", "custom") else None
