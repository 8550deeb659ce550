"""Finds the ends of prefixes to keep in the rendered prompt.

A template may write the parts of a conversation in any order and form. So the conversation is rendered a second time
with a stand-in at each end. Up to the first difference between both texts the places are certain.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.gateway.chat.prefix_ends import BehindAll, BehindTool, InMessage, Message, Place, PrefixEnd


class StandIns:
    """Stand-ins for the ends of prefixes in one conversation. No caller knows them."""

    def __init__(self, ends: Sequence[PrefixEnd]) -> None:
        self._ends = ends
        self._nonce = secrets.token_hex(8)
        self._pattern = re.compile(rf"{self._nonce}y([0-9]+)y")

    def _of(self, index: int) -> str:
        # Letters and digits: a template's filters leave them as they are.
        return f"{self._nonce}y{index}y"

    def put(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Mapping[str, Any]]]:
        """Return messages and tools with the stand-ins."""
        marked, shown = [dict(message) for message in messages], list(tools)
        # From the end on, so that the places before it stay.
        by_place = sorted(enumerate(self._ends), key=lambda each: _order(each[1].place), reverse=True)
        for index, end in by_place:
            place = end.place
            if isinstance(place, BehindTool) and place.tool + 1 < len(shown):
                shown[place.tool + 1] = _with_name(shown[place.tool + 1], self._of(index))
            elif isinstance(place, BehindTool):
                first = next((i for i, each in enumerate(messages) if each["role"] not in ("system", "developer")), 0)
                self._begin_next(messages, marked, first, index)
            elif isinstance(place, InMessage) and place.num_chars is not None:
                position = _position_in(messages[place.message]["content"], place.num_chars)
                _insert(marked[place.message], position, self._of(index))
            elif isinstance(place, InMessage):
                self._begin_next(messages, marked, place.message + 1, index)
        return marked, shown

    def _begin_next(self, messages: Sequence[Message], marked: Sequence[Message], first: int, index: int) -> None:
        """Put a stand-in at the beginning of the next message with a content."""
        for message, shown in zip(messages[first:], marked[first:], strict=True):
            if content := message.get("content"):
                _insert(shown, _position_in(content, 0), self._of(index))
                return

    def places_in(self, text: str, marked: str) -> list[int | None]:
        """Return the characters of the text before each end; None for one that the template does not show.

        text is the rendered conversation, marked the one with stand-ins.
        """
        places: list[int | None] = [len(text) if isinstance(end.place, BehindAll) else None for end in self._ends]
        position = behind = 0
        differs = False
        for found in self._pattern.finditer(marked):
            if not differs:
                segment = marked[behind : found.start()]
                num_equal = _num_equal(segment, text, position)
                position, behind, differs = position + num_equal, found.end(), num_equal < len(segment)
            index = int(found[1])
            places[index] = position if places[index] is None else places[index]  # it may be shown again
        return places


def _order(place: Place) -> tuple[int, int, float]:
    if isinstance(place, BehindTool):
        return 0, place.tool, 0
    if isinstance(place, InMessage):
        return 1, place.message, float("inf") if place.num_chars is None else place.num_chars
    return 2, 0, 0


def _with_name(tool: Mapping[str, Any], stand_in: str) -> dict[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "name": stand_in + function["name"]}}


def _position_in(content: str, num_chars: int) -> int:
    """Return the position of a stand-in in a content: on the side of the spaces there that a template may strip."""
    before, behind = content[:num_chars], content[num_chars:]
    if not behind.strip():
        return len(before.rstrip())
    if not before.strip():
        return len(content) - len(behind.lstrip())
    return num_chars


def _insert(message: Message, position: int, stand_in: str) -> None:
    content = message["content"]
    message["content"] = content[:position] + stand_in + content[position:]


def _num_equal(segment: str, text: str, position: int) -> int:
    """Return the characters of a segment that a text has from this position on."""
    if text.startswith(segment, position):
        return len(segment)
    other = text[position : position + len(segment)]
    return next((i for i, pair in enumerate(zip(segment, other, strict=False)) if pair[0] != pair[1]), len(other))
