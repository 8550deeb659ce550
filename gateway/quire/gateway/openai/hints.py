"""Advice of a body on what is kept in the prefix cache: our own `cache_hints`, and the envelope of routers. Pure."""

import math
from typing import Any

from quire.cache.v1.admission_bounds import LEAST_PRIORITY, MAX_EXPECTED_S, MAX_RANGES, MAX_RETENTION_S, MOST_PRIORITY
from quire.client.engine.caching import Retention
from quire.compute.v1.sampling_ranges import Range
from quire.gateway.errors import invalid, made_at
from quire.gateway.fields import Fields, object_of

MAX_ACTIONS = 1024
"""Actions of an envelope."""

_EXPECTED_S = Range(f"[0, {MAX_EXPECTED_S:.0f}]")
_TTL_S = Range(f"(0, {MAX_RETENTION_S:.0f}]")
_VERSIONS = ("1", "1.0")
_KEEP, _EXPECT, _DROP, _FETCH = "kv.keep", "kv.expect", "kv.drop", "kv.fetch"


def read_hints(hints: Fields) -> dict[str, Any]:
    """Return `cache_hints` as fields of CacheParams. Raises HttpError: 400 with the field's path."""
    expected_s = hints.number("expected_in_s", allowed=_EXPECTED_S)
    if hints.boolean("not_expected"):
        if expected_s is not None:
            raise invalid(hints.path_of("not_expected"), True, "false, or expected_in_s left out")
        expected_s = math.inf
    ranges = [_retention(each) for each in hints.objects("retention", max_length=MAX_RANGES) or ()]
    hints.end()
    return {"expected_back_s": expected_s, "retention": tuple(ranges)}


def read_envelope(fields: Fields) -> dict[str, Any]:
    """Return the actions of `kv_hints` as fields of CacheParams; of several of one type the last one counts.

    vLLM, SGLang, TensorRT-LLM and Dynamo share this envelope. Actions of unknown types and versions are ignored, which
    the answer's header says with the reason. Raises HttpError: 400 with the field's path for a known action that is
    wrong.
    """
    envelope = fields.object("kv_hints")
    if envelope is None:
        return {}
    envelope.string("protocol_version")
    envelope.string("message_id")
    values: dict[str, Any] = {}
    for index, each in enumerate(envelope.array("actions", max_length=MAX_ACTIONS) or ()):
        action = object_of(f"{envelope.path_of('actions')}[{index}]", each)
        kind, version = action.take("action_type"), action.take("action_version")
        if (reason := _why_ignored(kind, version)) is not None:
            fields.without_effect[f"{envelope.path_of('actions')}[{index}]"] = reason
        else:
            values |= _action(action, kind)
    return values


def _why_ignored(kind: Any, version: Any) -> str | None:
    """Return why an action has no effect; None if it has one."""
    if kind not in (_KEEP, _EXPECT, _DROP, _FETCH):
        return "unknown_type"
    if str(version) not in _VERSIONS:
        return "unknown_version"
    return "nothing_to_fetch_from" if kind == _FETCH else None


def _action(action: Fields, kind: str) -> dict[str, Any]:
    """Return what a known action asks for."""
    payload = action.object("payload") or Fields({}, action.path_of("payload"))
    if kind == _DROP:
        return {"expected_back_s": math.inf}
    if kind == _EXPECT:
        payload.require("in_s")
        return {"expected_back_s": payload.number("in_s", allowed=_EXPECTED_S)}
    priority = payload.integer("priority", MOST_PRIORITY, low=LEAST_PRIORITY, high=MOST_PRIORITY)
    ttl_s = payload.number("ttl_s", allowed=_TTL_S)
    return {"retention": (Retention(payload.integer("num_tokens", 0), priority, ttl_s),)}


def _retention(given: Fields) -> Retention:
    names = ("num_tokens", "priority", "ttl_s")
    for name in names[:2]:
        given.require(name)
    values = {name: given.take(name) for name in names}
    given.end()
    return made_at({f"retention.{name}": given.path_of(name) for name in names}, Retention, **values)
