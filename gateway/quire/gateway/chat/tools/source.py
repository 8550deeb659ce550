"""Text that arrives in pieces, and the steps that read it. Pure.

A format reads its text from the beginning to the end, as if it were there: it is a generator that yields events, and
None where it needs more text to go on. So the events do not depend on where the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from quire.gateway.chat.tools.events import Arguments, Event, Reasoning, Text

T = TypeVar("T")
Steps = Generator[Event | None, None, T]
"""Steps that read text: they yield events, or None to ask for more text, and return a T."""

MAX_WORD = 512
"""The most letters of one word."""

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"\s*")


class Source:
    """Text that arrives in pieces, with a cursor. A step may set the cursor back, up to the last commit.

    text      what has arrived and was not committed
    at        the cursor, an index into text
    is_whole  no more text arrives
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_whole = False

    @property
    def rest(self) -> str:
        """The text behind the cursor."""
        return self.text[self.at :]

    @property
    def is_over(self) -> bool:
        """No text is left, and none arrives."""
        return self.is_whole and self.at == len(self.text)

    def commit(self) -> None:
        """Forget the text before the cursor."""
        self.text, self.at = self.text[self.at :], 0

    def space(self) -> Steps[None]:
        """Pass over white space."""
        yield from self.word(_SPACE, longest=None)

    def word(self, pattern: re.Pattern[str], *, longest: int | None = MAX_WORD) -> Steps[str]:
        """Pass over letters of a class, and return them; the pattern matches any number of them."""
        while True:
            found = pattern.match(self.text, self.at)
            end = self.at if found is None else found.end()
            if longest is not None:
                end = min(end, self.at + longest)
            if end < len(self.text) or self.is_whole or (longest is not None and end - self.at == longest):
                word, self.at = self.text[self.at : end], end
                return word
            yield None

    def sees(self, *literals: str) -> Steps[bool]:
        """Return whether one of these texts is next."""
        while True:
            if any(self.text.startswith(each, self.at) for each in literals):
                return True
            rest = self.rest if len(self.text) - self.at < max(map(len, literals)) else None
            if self.is_whole or rest is None or not any(each.startswith(rest) for each in literals):
                return False
            yield None

    def takes(self, literal: str) -> Steps[bool]:
        """Pass over a text if it is next, and return whether it was."""
        is_next = yield from self.sees(literal)
        if is_next:
            self.at += len(literal)
        return is_next

    def ends_with(self, literal: str) -> Steps[bool]:
        """Pass over a closing text, or its beginning if that is the end of all text; return whether it was there."""
        if (yield from self.takes(literal)):
            return True
        return bool(self.rest) and self.is_cut(literal)

    def is_cut(self, *literals: str) -> bool:
        """Return whether all text ends here, or within one of these texts; then pass over it."""
        if not self.is_whole or not any(each.startswith(self.rest) for each in literals):
            return False
        self.at = len(self.text)
        return True

    def takes_all(self, *parts: str) -> Steps[bool]:
        """Pass over texts with white space before each; return whether all were there."""
        for part in parts:
            yield from self.space()
            if not (yield from self.takes(part)):
                return False
        return True

    def pass_value(self, *, depth: int = 0, streams: bool = False) -> Steps[bool]:
        """Pass over a JSON object or array, found by its brackets; return whether its end was there.

        depth     so many brackets are open already
        streams   it is given out as arguments while it arrives, and committed
        """
        index, in_string = self.at, False
        while True:
            while found := (_IN_STRING if in_string else _OUTSIDE_STRING).search(self.text, index):
                index = found.end()
                if found[0] == "\\":
                    if index == len(self.text):
                        index -= 1  # the escaped letter has not arrived
                        break
                    index += 1
                elif found[0] == '"':
                    in_string = not in_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                    if depth == 0:
                        if streams:
                            yield Arguments(self.text[self.at : index])
                        self.at = index
                        if streams:
                            self.commit()
                        return True
            else:
                index = len(self.text)
            if streams and index > self.at:
                yield Arguments(self.text[self.at : index])
                self.at = index
                self.commit()
                index = 0
            if self.is_whole:
                self.at = len(self.text) if streams else self.at
                return False
            yield None

    def until(
        self,
        markers: Collection[str],
        *,
        hidden: Collection[str] = (),
        kind: type[Text] | type[Reasoning] = Text,
    ) -> Steps[str | None]:
        """Give out text up to one of some markers; return it, with the cursor before it, or None at the text's end.

        hidden are special tokens' texts that are left out.
        """
        literals = sorted({*markers, *hidden}, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        while True:
            found = pattern.search(self.text, self.at)
            end = found.start() if found else len(self.text) - self._num_held(literals)
            if end > self.at:
                yield kind(self.text[self.at : end])
            self.at = end
            self.commit()
            if found is not None:
                if found[0] in markers:
                    return found[0]
                self.at = len(found[0])
                continue
            if self.is_whole:
                return None
            yield None

    def _num_held(self, literals: Sequence[str]) -> int:
        """Return how many letters at the end may be the beginning of one of these texts."""
        return 0 if self.is_whole else num_begun(self.text, literals, start=self.at)


def num_begun(text: str, literals: Collection[str], *, start: int = 0) -> int:
    """Return the length of the longest end of a text with which one of some texts begins."""
    longest = max(map(len, literals), default=1) - 1
    sizes = range(min(longest, len(text) - start), 0, -1)
    return next((n for n in sizes if any(len(each) > n and text.endswith(each[:n]) for each in literals)), 0)


class Reader:
    """Runs the steps of a format over text that arrives in pieces."""

    def __init__(self, steps: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = steps(self._source)

    def push(self, text: str) -> list[Event]:
        """Take text; return the decided part."""
        self._source.text += text
        return self._run()

    def finish(self) -> list[Event]:
        """Return what was undecided at the end of the text."""
        self._source.is_whole = True
        return self._run()

    def _run(self) -> list[Event]:
        events = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events
