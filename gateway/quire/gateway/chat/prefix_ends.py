"""Ends of prefixes of a conversation that a caller wants kept. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InMessage:
    """A place in a message: behind so many characters of its content, or behind all of it."""

    message: int
    num_chars: int | None = None


@dataclass(frozen=True, slots=True)
class BehindTool:
    """The place behind a tool of the offer."""

    tool: int


@dataclass(frozen=True, slots=True)
class BehindAll:
    """The end of the prompt."""


Place = InMessage | BehindTool | BehindAll


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """The end of a prefix to keep for ttl_s seconds after its last use. path is the field that asks for it."""

    path: str
    place: Place
    ttl_s: float
