"""Arguments of calls that come back in a conversation: JSON objects, or what `max_tokens` left of one. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

_STRUCTURE = re.compile(r'["\\{}\[\],]')


def arguments_of(text: str) -> dict[str, Any]:
    """Return the object of a text. One that was cut off is closed; any other text becomes the argument `arguments`.

    Templates need an object, and clients send back what a model wrote.
    """
    for candidate in (text or "{}", *_closed(text)):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {"arguments": text}


def _closed(text: str) -> list[str]:
    """Return the beginning of a JSON object, closed where it ends, and where its last complete part ends."""
    closing: list[str] = []
    in_string, index, complete = False, 0, ""
    while found := _STRUCTURE.search(text, index):
        index, letter = found.end(), found[0]
        if letter == "\\":
            index += 1
        elif letter == '"':
            in_string = not in_string
        elif in_string:
            continue
        elif letter in "{[":
            closing.append("}" if letter == "{" else "]")
            complete = text[:index] + "".join(reversed(closing))
        elif letter == ",":
            complete = text[: found.start()] + "".join(reversed(closing))
        elif closing:
            closing.pop()
    end = "".join(reversed(closing))
    begun = text[:-1] if index > len(text) else text  # an escape without its letter
    return [begun + ('"' if in_string else "") + end, complete]
