"""Calls that are JSON objects, {"name": "f", "arguments": {...}}, and calls of a name and a JSON object. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count

from quire.gateway.chat.tools.events import Arguments, CallBegan, Tool
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import NAME, Grammar

_KEYS = ('"arguments"', '"parameters"')
_BRACES = re.compile(r"\}*")


def read_object(source: Source, tools: Mapping[str, Tool], *, needs_arguments: bool = False) -> Steps[bool]:
    """Read a call that is one object; return False, with the cursor where it was, if there is none.

    Arguments are given out while they are written if the object begins with the name. Else they come with its end.
    needs_arguments: an object without arguments is no call. Otherwise, or if they are null, they are empty.
    """
    start = source.at
    name = yield from _read_head(source)
    if name in tools:
        yield from read_arguments(source, name)
        yield from _pass_rest(source)
        return True
    source.at = start
    if not (yield from source.sees("{")) or not (yield from source.pass_value()):
        source.at = start
        return False
    call = _call_of(source.text[start : source.at], tools, needs_arguments=needs_arguments)
    if call is None:
        source.at = start
        return False
    source.commit()
    yield CallBegan(call[0])
    yield Arguments(call[1])
    yield from source.word(_BRACES)
    return True


def read_arguments(source: Source, name: str, *, id: str | None = None) -> Steps[None]:
    """Read the arguments of a call, an object at the cursor, and give them out while they are written."""
    source.commit()
    yield CallBegan(name, id)
    yield from source.pass_value(streams=True)


def _read_head(source: Source) -> Steps[str]:
    """Pass over an object's beginning up to its arguments, an object; return its name, "" if it begins otherwise."""
    if not (yield from source.takes_all("{", '"name"', ":", '"')):
        return ""
    name = yield from source.word(NAME)
    if not (yield from source.takes('"')) or not (yield from source.takes_all(",")):
        return ""
    yield from source.space()
    if not (yield from source.sees(*_KEYS)):
        return ""
    source.at = source.text.index('"', source.at + 1) + 1
    if not (yield from source.takes_all(":")):
        return ""
    yield from source.space()
    return name if (yield from source.sees("{")) else ""


def _pass_rest(source: Source) -> Steps[None]:
    """Pass over an object's end, behind its arguments. A brace that is missing, or one too many, is no text."""
    yield from source.space()
    if source.is_over or (yield from source.sees(",", "}")):
        yield from source.pass_value(depth=1)
        yield from source.word(_BRACES)
    source.commit()


def _call_of(text: str, tools: Mapping[str, Tool], *, needs_arguments: bool) -> tuple[str, str] | None:
    """Return name and arguments of a whole object, None if it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in tools:
        return None
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if not given and needs_arguments:
        return None
    arguments = given[0] if given else None
    if arguments is None or arguments == "":
        return name, "{}"
    if isinstance(arguments, str):
        return (name, arguments) if _is_object(arguments) else None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_objects(source: Source, tools: Mapping[str, Tool], separators: Sequence[str], **options: bool) -> Steps[bool]:
    """Read calls with white space, or a separator, between them; return whether there was one."""
    for number in count():
        start = source.at
        yield from source.space()
        if number and (yield from source.sees(*separators)):
            source.at += 1
            yield from source.space()
        if not (yield from read_object(source, tools, **options)):
            source.at = start
            return number > 0
    raise AssertionError


def write_objects(grammar: Grammar, tools: Sequence[Tool], key: str) -> str:
    """Add rules for an object that is a call of one of these tools; return the name of the rule."""
    names = []
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        names.append(grammar.add(f"object_{index}", f'{head} {grammar.add_arguments(index, tool)} "}}"'))
    return grammar.add("object", " | ".join(names))


def repeated(rule: str, separator: str, *, parallel: bool) -> str:
    """Return an expression for one of a rule, or for several if parallel."""
    between = json.dumps(separator) if separator else ""
    return f"{rule} ({between} {rule})*" if parallel else rule
