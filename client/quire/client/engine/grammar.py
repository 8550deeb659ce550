"""Grammars: the texts that a sample may have. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.client.errors import InvalidRequest
from quire.compute.v1.sampling_ranges import MAX_CHOICES


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the text of a sample matches, from its first token to its end. Exactly one field is given.

    Raises InvalidRequest naming field, value and limit. The worker compiles the grammar, and may refuse it
    (docs/reference/grammars.md).

    json_schema   a JSON schema: JSON text, or what json.dumps makes JSON text of
    json_object   True: any JSON object
    regex         a regular expression for the whole text, in the syntax of Rust's crate regex
    lark          a grammar in llguidance's variant of Lark
    ebnf          a grammar in the EBNF of llama.cpp (GBNF)
    choice        texts of which one is chosen, 1 to 1,024
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    lark: str | None = None
    ebnf: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise InvalidRequest.of_field("grammar", given, f"one of {', '.join(field.name for field in fields(self))}")
        [kind] = given
        object.__setattr__(self, kind, _CHECKS.get(kind, _text)(f"grammar.{kind}", getattr(self, kind)))

    @property
    def num_letters(self) -> int:
        """Letters of its texts."""
        texts = (self.json_schema, self.regex, self.lark, self.ebnf, *(self.choice or ()))
        return sum(len(text) for text in texts if isinstance(text, str))


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.of_field(field, value, "a string")
    return _encodable(field, value)


def _schema(field: str, value: Any) -> str:
    if isinstance(value, str):
        return _encodable(field, value)
    try:
        return _encodable(field, json.dumps(dict(value) if isinstance(value, Mapping) else value))
    except (TypeError, ValueError) as error:
        raise InvalidRequest.of_field(field, value, f"a JSON schema: {error}") from error


def _true(field: str, value: Any) -> bool:
    if value is not True:
        raise InvalidRequest.of_field(field, value, "True")
    return True


def _texts(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest.of_field(field, value, "several strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest.of_field(field, len(value), f"1 to {MAX_CHOICES} strings")
    return tuple(_text(field, text) for text in value)


def _encodable(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.of_field(field, ascii(text[error.start]), "text without lone surrogates") from error
    return text


_CHECKS = {"json_schema": _schema, "json_object": _true, "choice": _texts}
