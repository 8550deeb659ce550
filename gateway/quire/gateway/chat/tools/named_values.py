"""Arguments that are written one by one, with values as they are: texts, or JSON, by the tool's schema. Pure."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from quire.gateway.chat.tools.events import Arguments, Tool
from quire.gateway.chat.tools.source import Source, Steps, num_begun
from quire.gateway.chat.tools.tool_format import Grammar, UnwritableSchema

_MAX_DEPTH = 16
"""The most `$ref`s that are followed, and the deepest alternatives that are looked at."""
_DEFINITIONS = ("$defs", "definitions")
# Keywords of a root that can name arguments elsewhere than in `properties`.
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")
_TEXT = frozenset({"string"})
_ANY = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types of JSON that a value may have by its schema, as far as its keywords say so."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ANY
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    if "const" in schema:
        return frozenset({_kind_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind_of, schema["enum"]))
    if isinstance(schema.get("$ref"), str):
        return kinds_of(_resolve(schema["$ref"], root), root, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return frozenset().union(*(kinds_of(each, root, depth + 1) for each in schema[name]))
    return _ANY


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of a reference within a document, None if there is none."""
    value: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def literal_of(text: str) -> tuple[str, str]:
    """Return a value as JSON, and its type: of JSON, or of a literal as Python writes it. Raises ValueError."""
    text = text.strip()
    try:
        return text, _kind_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False), _kind_of(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("neither JSON nor a literal") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a text: a string if that has one of these types, and its literal has another one, or none."""
    try:
        found, kind = ("", "string") if kinds <= _TEXT else literal_of(text)
    except ValueError:
        found, kind = "", "string"
    if kind == "integer" and "integer" not in kinds and "number" in kinds:
        kind = "number"
    fits = kind in kinds - _TEXT or ("string" not in kinds and found)
    return found if fits else json.dumps(text, ensure_ascii=False)


class ArgumentsWriter:
    """Writes an object of arguments as JSON, one argument after the other."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._separator = "{"

    def kinds(self, key: str) -> frozenset[str]:
        """Return the types that an argument may have."""
        properties = self._tool.schema.get("properties")
        return kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, self._tool.schema)

    def key(self, key: str) -> Arguments:
        """Return the beginning of an argument."""
        separator, self._separator = self._separator, ", "
        return Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")

    def argument(self, key: str, value: str) -> Iterator[Arguments]:
        """Return an argument by the JSON of its value."""
        yield self.key(key)
        yield Arguments(value)

    def end(self) -> Arguments:
        """Return the object's end."""
        return Arguments("{}" if self._separator == "{" else "}")


def read_argument(
    source: Source, writer: ArgumentsWriter, key: str, *, closing: str, followers: tuple[str, ...]
) -> Steps[bool]:
    """Read a value up to its closing tag, which is one if it is followed by one of some texts, or by nothing.

    A line feed at each end of the value is not part of it. A text is given out while it is written. Return False if the
    text ended within the value.
    """
    yield from source.takes("\n")
    source.commit()
    if writer.kinds(key) <= _TEXT:
        yield writer.key(key)
        yield Arguments('"')
        last = yield from _pass_value(source, closing, followers, streams=True)
        if last is not None:
            yield Arguments(_escaped(last) + '"')
        return last is not None
    is_begun = (yield from source.sees("{", "[")) and not (yield from source.pass_value())
    value = yield from _pass_value(source, closing, followers, streams=False, may_be_last=not is_begun)
    if value is not None:
        yield from writer.argument(key, json_of(value, writer.kinds(key)))
    return value is not None


def _pass_value(
    source: Source, closing: str, followers: tuple[str, ...], *, streams: bool, may_be_last: bool = True
) -> Steps[str | None]:
    """Pass over a value and its closing tag; return the part that was not given out, None if the tag is missing.

    may_be_last: the tag may also be the end of all text.
    """
    index = source.at
    while True:
        found = source.text.find(closing, index)
        index = found + len(closing) if found >= 0 else len(source.text)
        if found >= 0 and (yield from _is_followed(source, index, followers, may_be_last)):
            value = source.text[:found].removesuffix("\n")
            source.at = index
            source.commit()
            return value
        if found < 0:
            index -= num_begun(source.text, (f"\n{closing}", closing))
        if streams and index:
            yield Arguments(_escaped(source.text[:index]))
            source.at, index = index, 0
            source.commit()
        if found >= 0:
            continue
        if source.is_whole:
            source.at = len(source.text)
            return None
        yield None


def _is_followed(source: Source, index: int, followers: tuple[str, ...], may_be_last: bool) -> Steps[bool]:
    """Return whether one of some texts follows at an index, or nothing, or what the text's end leaves of them."""
    source.at = index
    yield from source.space()
    if (yield from source.sees(*followers)):
        return True
    return may_be_last and source.is_whole and any(each.startswith(source.rest) for each in followers)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# -- grammars -----------------------------------------------------------------------------------------------------


def arguments_of(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return name, schema and need of each argument. Raises UnwritableSchema if `properties` does not name all."""
    schema = tool.schema
    elsewhere = [name for name in _ELSEWHERE if name in schema]
    if elsewhere:
        message = f"the schema of {tool.name!r} has {elsewhere[0]!r} beside 'properties', which this model can't follow"
        raise UnwritableSchema(message)
    given = schema.get("properties", {})
    properties = dict(given) if isinstance(given, Mapping) else {}
    required = [each for each in schema.get("required", ()) if isinstance(each, str)]
    properties |= {name: {} for name in required if name not in properties}
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return [
        (name, {**definitions, **each} if isinstance(each, Mapping) else {}, name in required)
        for name, each in properties.items()
    ]


def write_value(grammar: Grammar, rule: str, schema: Mapping[str, Any], *, closing: str) -> str:
    """Add a rule for a value and its closing tag; return its name. Raises UnwritableSchema."""
    kinds = kinds_of(schema, schema)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in choices]
        return grammar.add(rule, " | ".join(grammar.spell(text + closing) for text in texts))
    if "string" not in kinds:
        return grammar.add(rule, f"{grammar.add_json(f'{rule}_json', schema)} {grammar.spell(closing)}")
    return grammar.add_text(rule, end=closing, pattern=_pattern_of(schema) if kinds <= _TEXT else "(?s:.*)")


def _pattern_of(schema: Mapping[str, Any]) -> str:
    """Return a regular expression for the length of a text. Raises UnwritableSchema for another form of it."""
    for name in ("pattern", "format"):
        if name in schema:
            raise UnwritableSchema(f"this model writes a text as it is, so {name!r} of its schema can't be followed")
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(?s:.{{{low},{high}}})"
