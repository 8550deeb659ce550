"""[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...}: Mistral. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from quire.gateway.chat.tools.events import Tool
from quire.gateway.chat.tools.json_objects import read_arguments, read_objects, repeated, write_objects
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import NAME, Grammar, OpenedFormat

_OPENING, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID = re.compile(r"[A-Za-z0-9_-]*")
_LIST = re.compile(r"\[TOOL_CALLS\]\s*\[")


class _Mistral(OpenedFormat):
    """Both ways of writing, which a model may mix."""

    openings = (_OPENING,)
    markers = (_OPENING, _ARGS, _CALL_ID)

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read a list of objects, or one call."""
        yield from source.space()
        if (yield from source.sees("{", "[")):
            yield from source.takes("[")
            if not (yield from read_objects(source, tools, (",", ";"))):
                return False
            end = source.at
            yield from source.space()
            if not (yield from source.takes("]")):
                source.at = end
            return True
        name = yield from source.word(NAME)
        if name not in tools:
            return False
        if (yield from source.takes(_CALL_ID)):
            yield from source.word(_ID)
        yield from source.takes(_ARGS)
        yield from source.space()
        if not (yield from source.sees("{")):
            return False
        yield from read_arguments(source, name)
        return True


class MistralList(_Mistral):
    """A list of objects: Mistral's models up to 2024."""

    name = "mistral"

    def reads(self, text: str, tool: Tool, arguments: Mapping[str, object]) -> bool:
        """Return whether a text has one call, in a list."""
        return bool(_LIST.search(text)) and super().reads(text, tool, arguments)

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for a list of objects."""
        objects = repeated(write_objects(grammar, tools, "arguments"), ", ", parallel=parallel)
        return grammar.add("calls", f'{grammar.spell(_OPENING)} "[" {objects} "]"')


class MistralArgs(_Mistral):
    """A name and its arguments for each call: Mistral's models since 2025."""

    name = "mistral-args"

    def reads(self, text: str, tool: Tool, arguments: Mapping[str, object]) -> bool:
        """Return whether a text has one call, and no list."""
        return not _LIST.search(text) and super().reads(text, tool, arguments)

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for names with arguments."""
        opening, args = grammar.spell(_OPENING), grammar.spell(_ARGS)
        calls = [
            grammar.add(
                f"call_{index}", f"{opening} {json.dumps(tool.name)} {args} {grammar.add_arguments(index, tool)}"
            )
            for index, tool in enumerate(tools)
        ]
        call = grammar.add("call", " | ".join(calls))
        return grammar.add("calls", f"{call}+" if parallel else call)
