"""Drafters: guess the next tokens of a sequence by what followed its last tokens before. Pure.

    PromptLookup    before in the same sequence: its prompt, and what it has generated
    AnswerLookup    in recent answers of the same tenant

A drafter belongs to one sequence. It takes each token once, so a token costs the same in a long text as in a short one.
Once it has found a place it stays there, as long as the tokens that come are those that followed there.
"""

from array import array
from collections import OrderedDict, abc
from typing import Protocol

_MAX_INDEXED_AT_ONCE = 8192
"""Of a long prompt the rest is indexed with the next tokens: the engine's loop must not stand still."""
_MAX_PLACES = 16
"""Places with the same hash that are looked at."""
_LEAST_HEADS = 1024
_MOST_HEADS = 1 << 16
_BORDER = -1
"""Between two answers: no token has this id."""
MAX_ANSWER_TOKENS = 65_536
"""Of recent answers, by tenant, salt and adapter."""
MAX_TENANTS = 64


class Drafter(Protocol):
    """Guesses at the next tokens of one sequence."""

    @property
    def name(self) -> str:
        """The name in metrics."""

    def propose(self, tokens: abc.Sequence[int], most: int) -> abc.Sequence[int]:
        """Return at most so many guesses at the tokens behind these: those of the last call, and any behind them."""


class TextIndex:
    """The places in a growing text, by the `size` tokens before them.

    A table of hashes with the last place of each, and for each place the one before it with the same hash. It has 4
    bytes for a token, and 4 for a hash.
    """

    __slots__ = ("_before", "_heads", "_mask", "_most", "_size")

    def __init__(self, *, size: int, most: int, num_expected: int) -> None:
        """size, most: the fewest and the most tokens that agree; num_expected: tokens of the text, about."""
        num_heads = _LEAST_HEADS
        while num_heads < min(num_expected, _MOST_HEADS):
            num_heads *= 2
        self._size = size
        self._most = most
        self._mask = num_heads - 1
        self._heads = array("i", [-1]) * num_heads
        self._before = array("i", [-1]) * size

    def extend(self, text: abc.Sequence[int]) -> None:
        """Index the places that have a token behind them. The text is that of the last call, or more."""
        before, heads, size, mask = self._before, self._heads, self._size, self._mask
        first = len(before)
        for place in range(first, min(len(text), first + _MAX_INDEXED_AT_ONCE)):
            slot = hash(tuple(text[place - size : place])) & mask
            before.append(heads[slot])
            heads[slot] = place

    def find(self, text: abc.Sequence[int], tokens: abc.Sequence[int]) -> int | None:
        """Return the place in the text before which the last tokens are the same; of several the longest, the latest.

        None if fewer than `size` are.
        """
        size, end = self._size, len(tokens)
        if end < size:
            return None
        place = self._heads[hash(tuple(tokens[end - size : end])) & self._mask]
        best, longest = None, size - 1
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            length = self._agreement(text, place, tokens)
            if length > longest:
                best, longest = place, length
                if longest == self._most:
                    break
            place = self._before[place]
        return best

    def _agreement(self, text: abc.Sequence[int], place: int, tokens: abc.Sequence[int]) -> int:
        end = len(tokens)
        for length in range(min(self._most, place, end)):
            if text[place - 1 - length] != tokens[end - 1 - length]:
                return length
        return min(self._most, place, end)


class PromptLookup:
    """Copies what followed the last tokens earlier in the same sequence, itself included: a text that repeats."""

    name = "ngram"
    __slots__ = ("_index", "_num_seen", "_place")

    def __init__(self, *, size: int, most: int, num_expected: int) -> None:
        """The arguments are those of TextIndex."""
        self._index = TextIndex(size=size, most=most, num_expected=num_expected)
        self._num_seen = 0
        self._place: int | None = None

    def propose(self, tokens: abc.Sequence[int], most: int) -> abc.Sequence[int]:
        """See Drafter."""
        self._index.extend(tokens)
        self._place = _followed(tokens, self._place, tokens, self._num_seen)
        self._num_seen = len(tokens)
        if self._place is None:
            self._place = self._index.find(tokens, tokens)
        return () if self._place is None else _copied(tokens, self._place, most)


def _followed(text: abc.Sequence[int], place: int | None, tokens: abc.Sequence[int], num_seen: int) -> int | None:
    """Return the place behind the new tokens, if these are what the text has at the place before them; else None."""
    if place is None:
        return None
    for index in range(num_seen, len(tokens)):
        if place >= len(text) or text[place] != tokens[index]:
            return None
        place += 1
    return place


def _copied(tokens: abc.Sequence[int], place: int, most: int) -> abc.Sequence[int]:
    copied = list(tokens[place : place + most])
    period = len(tokens) - place
    while len(copied) < most:
        copied.append(copied[-period])
    return copied


class _Answers:
    """A part of the recent answers of a tenant, one behind the other."""

    __slots__ = ("index", "tokens")

    def __init__(self, *, size: int, most: int) -> None:
        self.tokens: list[int] = []
        self.index = TextIndex(size=size, most=most, num_expected=MAX_ANSWER_TOKENS // 2)


class TenantAnswers:
    """Recent answers of one tenant, salt and adapter: two parts, of which the older goes when the younger is full."""

    def __init__(self, *, size: int, most: int) -> None:
        """The arguments are those of TextIndex."""
        self._size = size
        self._most = most
        self.parts = [_Answers(size=size, most=most)]

    def add(self, tokens: abc.Sequence[int], num_prompt_tokens: int) -> None:
        """Take an answer, with the end of its prompt: what follows an equal prefix is found from its first token on."""
        first = max(0, num_prompt_tokens - self._most)
        answer = tokens[first : first + MAX_ANSWER_TOKENS // 2 - 1]
        part = self.parts[0]
        if len(part.tokens) + len(answer) >= MAX_ANSWER_TOKENS // 2:
            part = _Answers(size=self._size, most=self._most)
            self.parts[:] = [part, self.parts[0]]
        part.tokens.extend(answer)
        part.tokens.append(_BORDER)
        part.index.extend(part.tokens)


class RecentAnswers:
    """The recent answers of all tenants, each for itself; of the tenants those that answered last."""

    def __init__(self, *, size: int, most: int) -> None:
        """The arguments are those of TextIndex."""
        self._size = size
        self._most = most
        self._of: OrderedDict[tuple[str, bytes, bytes], TenantAnswers] = OrderedDict()

    def of(self, tenant: str, salt: bytes, adapter: bytes = b"") -> TenantAnswers:
        """Return the answers of a tenant under a salt, with an adapter."""
        key = tenant, salt, adapter
        answers = self._of.get(key)
        if answers is None:
            answers = self._of[key] = TenantAnswers(size=self._size, most=self._most)
            if len(self._of) > MAX_TENANTS:
                self._of.popitem(last=False)
        self._of.move_to_end(key)
        return answers


class AnswerLookup:
    """Copies what followed the last tokens in a recent answer of the same tenant, up to its end."""

    name = "suffix"
    __slots__ = ("_answers", "_num_seen", "_part", "_place")

    def __init__(self, answers: TenantAnswers) -> None:
        """Look in these answers."""
        self._answers = answers
        self._part: _Answers | None = None
        self._num_seen = 0
        self._place: int | None = None

    def propose(self, tokens: abc.Sequence[int], most: int) -> abc.Sequence[int]:
        """See Drafter."""
        part, place = self._part, None
        if part is not None:
            place = _followed(part.tokens, self._place, tokens, self._num_seen)
        self._num_seen = len(tokens)
        if part is None or place is None or part.tokens[place] == _BORDER:
            part, place = self._find(tokens)
        self._part, self._place = part, place
        if part is None or place is None:
            return ()
        copied = part.tokens[place : place + most]
        return copied[: copied.index(_BORDER)] if _BORDER in copied else copied

    def _find(self, tokens: abc.Sequence[int]) -> tuple[_Answers | None, int | None]:
        for part in self._answers.parts:
            place = part.index.find(part.tokens, tokens)
            if place is not None and part.tokens[place] != _BORDER:
                return part, place
        return None, None
