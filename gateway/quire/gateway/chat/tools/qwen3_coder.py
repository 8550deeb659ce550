"""<tool_call><function=f><parameter=x>value</parameter></function></tool_call>: Qwen3-Coder, Qwen 3.5. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from quire.gateway.chat.tools.events import CallBegan, Tool
from quire.gateway.chat.tools.json_objects import repeated
from quire.gateway.chat.tools.named_values import ArgumentsWriter, arguments_of, read_argument, write_value
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import NAME, Grammar, OpenedFormat

_TAGS = ("<tool_call>", "</tool_call>")
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY = re.compile(r"[^>\n]*")


class Qwen3Coder(OpenedFormat):
    """Functions and parameters as tags."""

    name = "qwen3-coder"
    openings = (_TAGS[0], _FUNCTION)
    markers = _TAGS

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read a function, with the tags around it."""
        if opening == _TAGS[0] and not (yield from source.takes_all(_FUNCTION)):
            return False
        name = yield from source.word(NAME)
        if name not in tools or not (yield from source.takes(">")):
            return False
        source.commit()
        yield CallBegan(name)
        yield from self._parameters(source, ArgumentsWriter(tools[name]))
        end = source.at
        yield from source.space()
        if not (yield from source.ends_with(_TAGS[1])):
            source.at = end
        return True

    def _parameters(self, source: Source, writer: ArgumentsWriter) -> Steps[None]:
        while True:
            yield from source.space()
            if not (yield from source.takes(_PARAMETER)):
                break
            key = yield from source.word(_KEY)
            if not (yield from source.takes(">")):
                break
            followers = (_PARAMETER, _FUNCTION_END)
            if not (yield from read_argument(source, writer, key, closing=_PARAMETER_END, followers=followers)):
                return
        if (yield from source.takes(_FUNCTION_END)) or not source.is_cut(_FUNCTION_END, _PARAMETER):
            yield writer.end()

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for functions."""
        begin, end = grammar.spell(f"{_TAGS[0]}\n"), grammar.spell(f"{_FUNCTION_END}\n{_TAGS[1]}")
        names = [f"call_{index}" for index in range(len(tools))]
        for name, tool in zip(names, tools, strict=True):
            parameters = [
                self._write_parameter(grammar, f"{name}_{index}", *argument)
                for index, argument in enumerate(arguments_of(tool))
            ]
            function = json.dumps(f"{_FUNCTION}{tool.name}>\n")
            grammar.add(name, f"{begin} {function} {' '.join(parameters)} {end}")
        return grammar.add("calls", repeated(grammar.add("call", " | ".join(names)), "\n", parallel=parallel))

    def _write_parameter(
        self, grammar: Grammar, rule: str, key: str, schema: Mapping[str, object], is_required: bool
    ) -> str:
        value = write_value(grammar, f"{rule}_value", schema, closing=f"\n{_PARAMETER_END}\n")
        grammar.add(rule, f"{json.dumps(f'{_PARAMETER}{key}>' + chr(10), ensure_ascii=False)} {value}")
        return rule if is_required else f"{rule}?"
