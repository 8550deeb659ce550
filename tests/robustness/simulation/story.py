"""The lines of a story: what a frame on its way says, in words of the contract."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2

LONGEST_TEXT = 260
_ALWAYS_THE_SAME = ("geometry", "signing_key", "timings", "expire_time", "worker_address")
_QUIET = ("ping", "pong", "answer ping", "window", "room")
"""Frames that no story needs."""


def line_of(sender: str, receiver: str, deliver: Callable[..., None], args: tuple[Any, ...]) -> str | None:
    """A line about a frame that arrives; None if it says nothing."""
    owner = getattr(deliver, "__self__", None)
    name = str(getattr(owner, "name", type(owner).__name__.lower()))
    what = deliver.__name__.lstrip("_").removeprefix("take_").replace("_", " ")
    if what in _QUIET:
        return None
    is_request = type(owner).__name__ == "ServerHalf"
    words = [word for arg in args if (word := _word_of(arg, name, is_request=is_request))]
    return " ".join([f"{sender} -> {receiver} {name.rpartition('/')[2]} {what}", *words])


def _word_of(arg: Any, method: str, *, is_request: bool) -> str:
    if isinstance(arg, bytes):
        return _text_of(arg, method, is_request=is_request)
    if isinstance(arg, str | int) and not isinstance(arg, bool):
        return str(arg)
    return str(getattr(arg, "in_words", ""))


def _text_of(data: bytes, method: str, *, is_request: bool) -> str:
    kinds = _kinds().get(method)
    if kinds is None:
        return f"{len(data)} bytes"
    try:
        message = kinds[0 if is_request else 1].FromString(data)
    except DecodeError:
        return f"{len(data)} bytes that are no message"
    grants = [_words(grant_pb2.StepGrant.FromString(signed.grant)) for signed in _signed_grants_in(message)]
    text = _words(message)
    return " ".join([text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…", *(f"GRANT {g}" for g in grants)])


def _words(message: Message) -> str:
    return text_format.MessageToString(message, as_one_line=True, use_short_repeated_primitives=True)


def _signed_grants_in(message: Any) -> list[grant_pb2.SignedGrant]:
    """The grants of a message, taken out of it with what is the same in the whole story."""
    found = []
    for field, value in message.ListFields():
        if isinstance(value, grant_pb2.SignedGrant):
            copy = grant_pb2.SignedGrant()
            copy.CopyFrom(value)
            found.append(copy)
            message.ClearField(field.name)
        elif field.name in _ALWAYS_THE_SAME:
            message.ClearField(field.name)
        elif isinstance(value, Message):
            found += _signed_grants_in(value)
        elif field.type == field.TYPE_MESSAGE:
            for each in value:  # of a map its keys
                found += _signed_grants_in(each) if isinstance(each, Message) else []
    return found


@functools.cache
def _kinds() -> dict[str, tuple[type[Any], type[Any]]]:
    """The messages of each method: the request's kind, the answer's."""
    return {
        f"/{service.full_name}/{method.name}": (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
        for file in (cache_service_pb2.DESCRIPTOR, worker_service_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
