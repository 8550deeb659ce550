"""Parts of an answer, as they are found in its text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; schema is the JSON schema of its arguments, which are an object."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call of a tool begins; its arguments follow. id is the model's own name of the call, if its format has one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """A further piece of the arguments, JSON text, of the call that began last."""

    text: str


Event = Text | Reasoning | CallBegan | Arguments


def joined(events: list[Event]) -> list[Event]:
    """Return the same events with neighbouring pieces of one kind put together."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if not isinstance(event, CallBegan) and type(event) is type(last):
            assert not isinstance(last, CallBegan | None)
            result[-1] = type(event)(last.text + event.text)
        else:
            result.append(event)
    return result
