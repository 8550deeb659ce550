"""<tool_call>f<arg_key>x</arg_key><arg_value>value</arg_value></tool_call>: GLM 4.5 and later. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quire.gateway.chat.tools.events import CallBegan, Tool
from quire.gateway.chat.tools.json_objects import repeated
from quire.gateway.chat.tools.named_values import ArgumentsWriter, arguments_of, read_argument, write_value
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import NAME, Grammar, OpenedFormat

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_KEY_LETTERS = re.compile(r"[^<\n]*")


class Glm(OpenedFormat):
    """Keys and values as tags."""

    name = "glm"
    openings = (_OPENING,)
    markers = (_OPENING, _CLOSING, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read a name, and its keys and values."""
        yield from source.space()
        name = yield from source.word(NAME)
        if name not in tools:
            return False
        yield from source.space()
        if not (yield from source.sees(_KEY, _CLOSING)):
            return False
        source.commit()
        yield CallBegan(name)
        writer = ArgumentsWriter(tools[name])
        while (yield from source.takes_all(_KEY)):
            key = yield from source.word(_KEY_LETTERS)
            if not (yield from source.takes_all(_KEY_END, _VALUE)):
                break
            followers = (_KEY, _CLOSING)
            if not (yield from read_argument(source, writer, key, closing=_VALUE_END, followers=followers)):
                return True
        if (yield from source.takes(_CLOSING)) or not source.is_cut(_CLOSING, _KEY, _KEY_END, _VALUE):
            yield writer.end()
        return True

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for calls."""
        opening, closing = grammar.spell(_OPENING), grammar.spell(_CLOSING)
        names = [f"call_{index}" for index in range(len(tools))]
        for name, tool in zip(names, tools, strict=True):
            arguments = [
                self._write_argument(grammar, f"{name}_{index}", *argument)
                for index, argument in enumerate(arguments_of(tool))
            ]
            grammar.add(name, f"{opening} {grammar.spell(f'{tool.name}' + chr(10))} {' '.join(arguments)} {closing}")
        return grammar.add("calls", repeated(grammar.add("call", " | ".join(names)), "\n", parallel=parallel))

    def _write_argument(
        self, grammar: Grammar, rule: str, key: str, schema: Mapping[str, object], is_required: bool
    ) -> str:
        head = grammar.spell(f"{_KEY}{key}{_KEY_END}\n{_VALUE}")
        value = write_value(grammar, f"{rule}_value", schema, closing=_VALUE_END)
        grammar.add(rule, f'{head} {value} "\\n"')
        return rule if is_required else f"{rule}?"
