"""<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>: Kimi K2. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.gateway.chat.tools.events import Tool
from quire.gateway.chat.tools.sections import SectionFormat
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import Grammar

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID_LETTERS = re.compile(r"[A-Za-z0-9_.:-]*")
_ID = re.compile(r"(?:functions\.)?([A-Za-z0-9_.-]+)(?::[0-9]+)?")


class Kimi(SectionFormat):
    """Ids of calls with arguments. An id has the name of the tool and the number of the call within the chat."""

    name = "kimi-k2"
    section = _SECTION
    call_marks = _CALL
    openings = (_SECTION[0], _CALL[0])
    markers = (*_SECTION, *_CALL, _ARGUMENTS)

    def call(self, source: Source, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Read a call."""
        yield from source.space()
        call_id = yield from source.word(_ID_LETTERS)
        found = _ID.fullmatch(call_id)
        if found is None or found[1] not in tools or not (yield from source.takes_all(_ARGUMENTS)):
            return False
        return (yield from self.arguments(source, found[1], id=call_id))

    def head(self, grammar: Grammar, name: str) -> str:
        """Return an expression for an id."""
        return f"{json.dumps(f'functions.{name}:')} /[0-9]{{1,3}}/ {grammar.spell(_ARGUMENTS)}"
