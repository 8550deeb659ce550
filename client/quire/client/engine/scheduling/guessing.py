"""One sequence's drafters, and how often their guesses come true. Pure.

Every token that comes is compared with what was guessed for its place, whether it was drafted or not. So a sequence
learns what drafts would give while it has none, and that costs no step anything.

A guess behind many that came true is better than a first one. So each has a class: how many before it, one after the
other, came true. A class that is little known is taken for as good as the one below it, and a sequence that knows
little takes the rates of all sequences with the same drafter.
"""

from collections import abc
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from quire.client.engine.scheduling.lookup import Drafter

_NUM_CLASSES = 7
_FORGETS = 0.9
_OF_ALL_FORGETS = 0.999
_WEIGHT_OF_ALL = 4.0
_FIRST_RATE = 0.1


def _class_of(num_right: int) -> int:
    """0, 1, 2 and 3 each alone, up to 7, up to 15, and more."""
    return num_right if num_right < 4 else min(_NUM_CLASSES - 1, num_right.bit_length() + 1)


class Rates:
    """Shares of guesses that came true, by class; older ones count less."""

    __slots__ = ("_forgets", "_right", "_taken")

    def __init__(self, forgets: float) -> None:
        """The weight of what was counted before, after each one more of its class."""
        self._forgets = forgets
        self._right = [0.0] * _NUM_CLASSES
        self._taken = [0.0] * _NUM_CLASSES

    def take(self, num_right: int, is_right: bool) -> None:
        """Count a guess behind so many that came true."""
        index = _class_of(num_right)
        self._right[index] = self._forgets * self._right[index] + is_right
        self._taken[index] = self._forgets * self._taken[index] + 1.0

    def by_class(self) -> list[float]:
        """Return the share of each class that came true; that of the class below counts as one guess."""
        rates, rate = [], _FIRST_RATE
        for right, taken in zip(self._right, self._taken, strict=True):
            rate = (right + rate) / (taken + 1.0)
            rates.append(rate)
        return rates

    def rate(self, num_right: int, of_all: abc.Sequence[float]) -> float:
        """Return the share that came true; that of all sequences, by class, counts as some guesses more."""
        index = _class_of(num_right)
        return (self._right[index] + _WEIGHT_OF_ALL * of_all[index]) / (self._taken[index] + _WEIGHT_OF_ALL)


@dataclass(slots=True)
class DrafterCounts:
    """The drafts of one drafter that came true and that did not, and its rates over all sequences.

    runs       runs with drafts
    drafted    drafts in them
    accepted   of these, those that were the tokens sampled
    """

    runs: int = 0
    drafted: int = 0
    accepted: int = 0
    rates: Rates = field(default_factory=lambda: Rates(_OF_ALL_FORGETS))


@dataclass(slots=True)
class _Track:
    """A drafter of one sequence, and what became of its guesses. num_right of them came true, one after the other."""

    drafter: Drafter
    of_all: DrafterCounts
    rates: Rates = field(default_factory=lambda: Rates(_FORGETS))
    guess: int | None = None
    num_right: int = 0

    def compare(self, *, is_right: bool) -> None:
        """Count a guess."""
        self.rates.take(self.num_right, is_right)
        self.of_all.rates.take(self.num_right, is_right)
        self.num_right = self.num_right + 1 if is_right else 0

    def guess_next(self, tokens: abc.Sequence[int]) -> None:
        """Guess the next token."""
        guessed = self.drafter.propose(tokens, 1)
        self.guess = guessed[0] if guessed else None

    def chances(self, most: int) -> list[float]:
        """Return for the next so many guesses the chance that it is right, and all before it; without one none."""
        if self.guess is None:
            return []
        of_all = self.of_all.rates.by_class()
        return list(accumulate((self.rates.rate(self.num_right + n, of_all) for n in range(most)), mul))

    @property
    def next_chance(self) -> float:
        """The chance that the guess of the next token is right; 0 without one."""
        return self.chances(1)[0] if self.guess is not None else 0.0


class Guesses:
    """The guesses of one sequence, by the drafter with the most probable one."""

    __slots__ = ("_best", "_num_seen", "_tracks")

    def __init__(self, drafters: abc.Sequence[Drafter], counts: abc.Mapping[str, DrafterCounts]) -> None:
        """counts are those of all sequences, by drafter."""
        self._tracks = [_Track(drafter, counts[drafter.name]) for drafter in drafters]
        self._best = self._tracks[0]
        self._num_seen = 0

    def take(self, tokens: abc.Sequence[int]) -> None:
        """Take all tokens of the sequence, of which the last one is new, and guess the next one."""
        is_next = len(tokens) == self._num_seen + 1
        for track in self._tracks:
            if is_next and track.guess is not None:
                track.compare(is_right=track.guess == tokens[-1])
            else:
                track.num_right = 0
        self._guess_next(tokens)

    def take_drafted(self, tokens: abc.Sequence[int], drafts: abc.Sequence[int], num_new: int) -> None:
        """Take all tokens of the sequence, of which the last num_new are what a step with drafts gave.

        All but the last of these were drafts that came true. If there is a draft more, it may have been compared.
        """
        best = self._best
        best.of_all.runs += 1
        best.of_all.drafted += len(drafts)
        best.of_all.accepted += num_new - 1
        for _ in range(num_new - 1):
            best.compare(is_right=True)
        if num_new <= len(drafts):
            best.compare(is_right=drafts[num_new - 1] == tokens[-1])
        for track in self._tracks:
            if track is not best:
                track.num_right = 0
        self._guess_next(tokens)

    def _guess_next(self, tokens: abc.Sequence[int]) -> None:
        self._num_seen = len(tokens)
        for track in self._tracks:
            track.guess_next(tokens)
        if len(self._tracks) > 1:
            self._best = max(self._tracks, key=lambda track: track.next_chance)

    def propose(self, tokens: abc.Sequence[int], most: int) -> abc.Sequence[int]:
        """Return at most so many guesses behind the tokens of the sequence."""
        return self._best.drafter.propose(tokens, most)

    @property
    def next_chance(self) -> float:
        """The chance that the guess of the next token is right; 0 without one."""
        return self._best.next_chance

    def chances(self, most: int) -> list[float]:
        """Return for the next so many guesses the chance that it is right, and all before it."""
        return self._best.chances(most)
