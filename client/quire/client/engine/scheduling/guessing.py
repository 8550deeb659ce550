"""One sequence's drafters, and how often their guesses come true. Pure.

Every token that comes is compared with what was guessed for its place, whether it was drafted or not. So a sequence
learns what drafts would give while it has none, and that costs no step anything.

A guess behind many that came true is better than a first one. So each has a class: how many before it, one after the
other, came true. A sequence that knows little takes the rates of all sequences with the same drafter.
"""

from collections import abc
from dataclasses import dataclass, field

from quire.client.engine.scheduling.lookup import Drafter

_NUM_CLASSES = 7
_FORGETS = 0.9
_OF_ALL_FORGETS = 0.999
_WEIGHT_OF_ALL = 4.0
_FIRST_RATE = 0.5


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

    def rate(self, num_right: int, *, otherwise: float, weight: float) -> float:
        """Return the share that came true; otherwise counts as the share of so many more."""
        index = _class_of(num_right)
        return (self._right[index] + weight * otherwise) / (self._taken[index] + weight)


@dataclass(slots=True)
class DrafterCounts:
    """What became of the drafts of one drafter, and its rates over all sequences.

    runs       runs with drafts
    drafted    drafts in them
    accepted   of these, those that were the tokens sampled
    """

    runs: int = 0
    drafted: int = 0
    accepted: int = 0
    rates: Rates = field(default_factory=lambda: Rates(_OF_ALL_FORGETS))


class Guesses:
    """The guesses of one sequence."""

    __slots__ = ("_counts", "_drafters", "_guess", "_num_right", "_num_seen", "_rates", "drafter")

    def __init__(self, drafters: abc.Sequence[Drafter], counts: abc.Mapping[str, DrafterCounts]) -> None:
        """The first of the drafters that knows a place is asked. counts are those of all sequences, by drafter."""
        self._drafters = drafters
        self._counts = counts
        self._rates = Rates(_FORGETS)
        self._num_seen = 0
        self._num_right = 0
        self._guess: int | None = None
        self.drafter = drafters[0].name

    def take(self, tokens: abc.Sequence[int]) -> None:
        """Take all tokens of the sequence, of which the last ones are new, and guess the next one."""
        num_new = len(tokens) - self._num_seen if self._num_seen else 0
        self._num_seen = len(tokens)
        if num_new == 1 and self._guess is not None:
            self._compare(self._guess == tokens[-1])
        elif num_new != 1:
            self._num_right = 0
        self._guess_next(tokens)

    def take_drafted(self, tokens: abc.Sequence[int], drafts: abc.Sequence[int], num_new: int) -> None:
        """Take all tokens of the sequence, of which the last num_new are what a step with drafts gave.

        All but the last of these were drafts that came true. If there is a draft more, it did not.
        """
        counts = self._counts[self.drafter]
        counts.runs += 1
        counts.drafted += len(drafts)
        counts.accepted += num_new - 1
        for _ in range(num_new - 1):
            self._compare(is_right=True)
        if num_new <= len(drafts):
            self._compare(drafts[num_new - 1] == tokens[-1])
        self._num_seen = len(tokens)
        self._guess_next(tokens)

    def _compare(self, is_right: bool) -> None:
        self._rates.take(self._num_right, is_right)
        self._counts[self.drafter].rates.take(self._num_right, is_right)
        self._num_right = self._num_right + 1 if is_right else 0

    def _guess_next(self, tokens: abc.Sequence[int]) -> None:
        guessed = self.propose(tokens, 1)
        self._guess = guessed[0] if guessed else None

    def propose(self, tokens: abc.Sequence[int], most: int) -> abc.Sequence[int]:
        """Return at most so many guesses behind the tokens of the sequence."""
        for drafter in self._drafters:
            if guessed := drafter.propose(tokens, most):
                self.drafter = drafter.name
                return guessed
        return ()

    @property
    def next_chance(self) -> float:
        """The chance that the guess of the next token is right; 0 without one."""
        return 0.0 if self._guess is None else self._chance_behind(self._num_right)

    def chances(self, most: int) -> list[float]:
        """Return for the next so many guesses the chance that it is right, and all before it."""
        made, chance = [], 1.0
        if self._guess is None:
            return []
        for index in range(most):
            chance *= self._chance_behind(self._num_right + index)
            made.append(chance)
        return made

    def _chance_behind(self, num_right: int) -> float:
        of_all = self._counts[self.drafter].rates.rate(num_right, otherwise=_FIRST_RATE, weight=1.0)
        return self._rates.rate(num_right, otherwise=of_all, weight=_WEIGHT_OF_ALL)
