"""Schemas of callers that are closed for `strict`, and their white space."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.chat.json_schemas import closed, with_options

CLOSED = {"additionalProperties": False}
NAMED = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, NAMED | CLOSED),
        ({"properties": {"a": NAMED}}, {"properties": {"a": NAMED | CLOSED}} | CLOSED),
        ({"type": ["object", "null"]}, {"type": ["object", "null"]} | CLOSED),
        (NAMED | {"additionalProperties": True}, NAMED | {"additionalProperties": True}),
        ({"additionalProperties": NAMED}, {"additionalProperties": NAMED | CLOSED}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": NAMED | CLOSED}),
        ({"prefixItems": [NAMED, {}]}, {"prefixItems": [NAMED | CLOSED, {}]}),
        ({"$defs": {"n": NAMED}, "$ref": "#/$defs/n"}, {"$defs": {"n": NAMED | CLOSED}, "$ref": "#/$defs/n"}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [NAMED | CLOSED, {"type": "null"}]}),
        (NAMED | {"anyOf": [{"required": ["a"]}]}, NAMED | CLOSED | {"anyOf": [{"required": ["a"]}]}),
        (NAMED | {"anyOf": [NAMED]}, NAMED | {"anyOf": [NAMED]}),
        ({"allOf": [NAMED]}, {"allOf": [NAMED | CLOSED]}),
        ({"properties": {"b": {"allOf": [NAMED, NAMED]}}}, {"properties": {"b": {"allOf": [NAMED, NAMED]}}}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        (
            {"properties": {"properties": {"type": "string"}}},
            {"properties": {"properties": {"type": "string"}}} | CLOSED,
        ),
    ],
)
def test_a_closed_schema_has_the_keys_that_it_names(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected
    assert "additionalProperties" not in NAMED


def test_options_of_the_schema_itself_win() -> None:
    schema = {"x-guidance": {"whitespace_flexible": True}}
    options = {"whitespace_flexible": False, "whitespace_pattern": "x"}
    assert with_options(schema, options) == {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "x"}}
    assert with_options({}, {"whitespace_flexible": False}) == {"x-guidance": {"whitespace_flexible": False}}
