"""Keeps special tokens' texts in what callers sent apart from those that a chat template writes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any


class ContentMarks:
    """Stand-ins for special tokens' texts in one chat, while a template renders it. No caller knows them."""

    def __init__(self, special_texts: Collection[str]) -> None:
        self._texts = sorted(special_texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._nonce = secrets.token_hex(8)
        self._numbers = {text: index for index, text in enumerate(self._texts)}

    def hide(self, value: Any) -> Any:
        """Return a JSON value with stand-ins in all of its strings. Cost: one pass over the strings."""
        if isinstance(value, str):
            return self._pattern.sub(self._stand_in, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def _stand_in(self, found: re.Match[str]) -> str:
        # Letters and digits: a template's filters leave them as they are.
        return f"{self._nonce}x{self._numbers[found[0]]}x"

    def parts(self, text: str) -> list[str]:
        """Return a rendered text in parts, of which every second one is a special token's text that a caller wrote."""
        parts = re.split(rf"{self._nonce}x([0-9]+)x", text)
        return [self._texts[int(part)] if index % 2 else part for index, part in enumerate(parts)]

    def reveal(self, text: str) -> str:
        """Return a text with the callers' words in place of the stand-ins."""
        return "".join(self.parts(text))
