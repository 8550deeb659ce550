"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>, one after the other: Hermes, Qwen 2.5 and 3. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quire.gateway.chat.tools.events import Tool
from quire.gateway.chat.tools.json_objects import read_objects, repeated, write_objects
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import Grammar, OpenedFormat

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_BRACKETS = re.compile(r"[\s\[]*")
_CLOSING_BRACKETS = re.compile(r"[\s\]}]*")


class Hermes(OpenedFormat):
    """Objects between tags, as a rule one in each."""

    name = "hermes"
    openings = (_OPENING,)
    markers = (_OPENING, _CLOSING)

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read the objects up to the closing tag."""
        yield from source.word(_BRACKETS)
        if not (yield from read_objects(source, tools, (",", ";"))):
            return False
        end = source.at
        yield from source.word(_CLOSING_BRACKETS)
        if not (yield from source.ends_with(_CLOSING)):
            source.at = end
        return True

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for objects between tags."""
        opening, closing = grammar.spell(f"{_OPENING}\n"), grammar.spell(f"\n{_CLOSING}")
        call = grammar.add("call", f"{opening} {write_objects(grammar, tools, 'arguments')} {closing}")
        return grammar.add("calls", repeated(call, "\n", parallel=parallel))
