"""JSON schemas of callers: closed for `strict`, and with other white space. Pure.

A schema without additionalProperties allows any further keys, and a model may write them without end. OpenAI's strict
schemas allow none. Here they are closed: each object schema in them that says nothing of further keys allows none.
"""

from collections.abc import Mapping
from typing import Any

OPTIONS = "x-guidance"
"""The keyword for options of the worker's compiler."""

_SAYS_OF_FURTHER_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties")


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with objects of no other keys than those that it names; the given one is not changed.

    A schema with an allOf of several parts is returned as it is: a closed part would forbid the keys of the others.
    """
    return schema if _has_several_parts(schema) else _closed(schema, is_part=False)


def with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with these options of the worker's compiler; those that it has itself win."""
    own = schema.get(OPTIONS)
    return {**schema, OPTIONS: {**options, **(own if isinstance(own, Mapping) else {})}}


def _closed(schema: Any, *, is_part: bool) -> Any:
    """is_part: the schema around it names keys of the same object."""
    if isinstance(schema, list):
        return [_closed(each, is_part=is_part) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    names_keys = "properties" in schema
    made = dict(schema)
    for name in _SCHEMAS_BY_NAME:
        if isinstance(schema.get(name), Mapping):
            made[name] = {key: _closed(each, is_part=False) for key, each in schema[name].items()}
    for name in _SCHEMAS:
        if name in schema:
            made[name] = _closed(schema[name], is_part=False)
    for name in _BRANCHES:
        if name in schema:
            made[name] = _closed(schema[name], is_part=is_part or names_keys)
    if not is_part and _is_object(schema) and not _leaves_keys_to_others(schema):
        made["additionalProperties"] = False
    return made


def _is_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return "properties" in schema or kind == "object" or (isinstance(kind, list) and "object" in kind)


def _leaves_keys_to_others(schema: Mapping[str, Any]) -> bool:
    """True if a schema says itself which further keys there are, or if its branches do."""
    if any(name in schema for name in _SAYS_OF_FURTHER_KEYS):
        return True
    branches = [each for name in _BRANCHES if isinstance(schema.get(name), list) for each in schema[name]]
    return "$ref" in schema or any(
        isinstance(each, Mapping) and (_is_object(each) or "$ref" in each) for each in branches
    )


def _has_several_parts(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_several_parts, schema))
    if not isinstance(schema, Mapping):
        return False
    parts = schema.get("allOf")
    return (isinstance(parts, list) and len(parts) > 1) or any(map(_has_several_parts, schema.values()))
