"""[f(x=1, y="a"), g()], and nothing before it: Llama 4, and others that were told to. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence

from quire.gateway.chat.tools.events import CallBegan, Tool
from quire.gateway.chat.tools.json_objects import repeated
from quire.gateway.chat.tools.named_values import ArgumentsWriter, arguments_of, kinds_of, literal_of
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import NAME, Grammar, OpenedFormat

_START, _END = "<|python_start|>", "<|python_end|>"
_KEY = re.compile(r"[A-Za-z0-9_]*")
_CUT_KEY = re.compile(r"[A-Za-z0-9_]*\s*")
_PART = re.compile(r"""[^"'()\[\]{},\\]*""")


class Pythonic(OpenedFormat):
    """A list of calls as Python writes them, with arguments by name."""

    name = "pythonic"
    openings = (_START,)
    markers = (_START, _END)
    instruction = "[func_name1("

    def read(self, source: Source, tools: Mapping[str, Tool], *, hidden: Collection[str] = ()) -> Steps[None]:
        """Read an answer that may begin with a list of calls."""
        if not (yield from self.calls(source, tools, "")):
            source.at = 0
        yield from super().read(source, tools, hidden=hidden)

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read a list."""
        if not (yield from source.takes_all("[")) or not (yield from self._call(source, tools)):
            return False
        while (yield from self._goes_on(source)):
            start = source.at
            if not (yield from self._call(source, tools)):
                source.at = start
                break
        end = source.at
        if not (yield from source.takes_all("]")):
            source.at = end
            return True
        end = source.at
        yield from source.space()
        if not (yield from source.takes(_END)):
            source.at = end
        return True

    def _goes_on(self, source: Source) -> Steps[bool]:
        end = source.at
        goes_on = yield from source.takes_all(",")
        if not goes_on:
            source.at = end
        return goes_on

    def _call(self, source: Source, tools: Mapping[str, Tool]) -> Steps[bool]:
        yield from source.space()
        name = yield from source.word(NAME)
        if name not in tools or not (yield from source.takes_all("(")):
            return False
        key = yield from self._key(source)
        if not key and not (yield from source.sees(")")):
            return False
        source.commit()
        yield CallBegan(name)
        writer = ArgumentsWriter(tools[name])
        while key:
            start = source.at
            is_closed = yield from _pass_expression(source)
            text = source.text[start : source.at]
            if not is_closed:
                yield writer.key(key)
                return True
            yield from writer.argument(key, _json_of(text))
            source.commit()
            key = (yield from self._key(source)) if (yield from source.takes(",")) else ""
        yield from source.space()
        if (yield from source.takes(")")) or not _is_cut(source):
            yield writer.end()
        source.commit()
        return True

    def _key(self, source: Source) -> Steps[str]:
        """Pass over `key=` and return the key; "" if something else is next."""
        start = source.at
        yield from source.space()
        key = yield from source.word(_KEY)
        if key and (yield from source.takes_all("=")):
            yield from source.space()
            return key
        source.at = start
        yield from source.space()
        return ""

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for a list of calls."""
        names = [f"call_{index}" for index in range(len(tools))]
        for name, tool in zip(names, tools, strict=True):
            grammar.add(
                name, f"{json.dumps(tool.name + '(')} {self._write_arguments(grammar, name, tool)} {json.dumps(')')}"
            )
        call = grammar.add("call", " | ".join(names))
        return grammar.add("calls", f'"[" {repeated(call, ", ", parallel=parallel)} "]"')

    def _write_arguments(self, grammar: Grammar, rule: str, tool: Tool) -> str:
        """Return an expression for arguments with commas between them: optional ones come behind the required ones."""
        written: dict[bool, list[str]] = {True: [], False: []}
        for index, (key, schema, is_required) in enumerate(arguments_of(tool)):
            value = self._write_value(grammar, f"{rule}_{index}_value", schema)
            written[is_required].append(grammar.add(f"{rule}_{index}", f"{json.dumps(key + '=')} {value}"))
        required, optional = written[True], written[False]
        first = ' ", " '.join(required)
        if required or not optional:
            return " ".join([first, *(f'(", " {each})?' for each in optional)])
        rests = [
            " ".join([each, *(f'(", " {more})?' for more in optional[at + 1 :])]) for at, each in enumerate(optional)
        ]
        return f"({' | '.join(rests)})?"

    def _write_value(self, grammar: Grammar, rule: str, schema: Mapping[str, object]) -> str:
        if kinds_of(schema, schema) == {"boolean"} and "enum" not in schema and "const" not in schema:
            return '("True" | "False")'
        return grammar.add_json(rule, schema)


def _is_cut(source: Source) -> bool:
    """Return whether all text ends within a key; then pass over it."""
    if not source.is_whole or not _CUT_KEY.fullmatch(source.rest):
        return False
    source.at = len(source.text)
    return True


def _json_of(text: str) -> str:
    try:
        return literal_of(text)[0]
    except ValueError:
        return json.dumps(text.strip(), ensure_ascii=False)  # an expression, which is not evaluated


def _pass_expression(source: Source) -> Steps[bool]:
    """Pass over an expression up to the comma or bracket behind it; return whether that was there."""
    depth = 0
    while True:
        yield from source.word(_PART, longest=None)
        letter = source.text[source.at : source.at + 1]
        if not letter:
            return False
        if depth == 0 and letter in ",)]}":
            return True
        if letter in "\"'" and not (yield from _pass_string(source, letter)):
            return False
        depth += (letter in "([{") - (letter in ")]}")
        source.at += letter not in "\"'"


def _pass_string(source: Source, quote: str) -> Steps[bool]:
    """Pass over a string; return whether its end was there."""
    source.at += 1
    pattern = re.compile(rf"[^{quote}\\]*")
    while True:
        yield from source.word(pattern, longest=None)
        rest = source.text[source.at : source.at + 2]
        if rest.startswith(quote):
            source.at += 1
            return True
        if len(rest) == 2:
            source.at += 2
        elif source.is_whole:
            source.at = len(source.text)
            return False
        else:
            yield None
