"""The measured time of a step, by its number of tokens; so it is known whether drafts pay. Pure.

    a step planned while another one runs    seconds(n) + the gap of such steps: little
    a step planned when none runs            seconds(n) + the gap of such steps: the device waits for the plan

Drafts need the outcome of the step before, so their steps are of the second kind.
"""

from bisect import bisect_left

_WEIGHT = 0.1
_MOST = 4.0
"""A step that took more than this many times as long as expected counts as one that took this long: the machine was
busy with something else."""


class Average:
    """An average that forgets: of a few values their mean, then the newest counts a tenth."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def take(self, value: float) -> None:
        """Take one value more."""
        if self.count and value < self.value / _MOST:
            self.count = 0  # what came before was too long: the first steps of a worker are
        elif self.count:
            value = min(value, _MOST * self.value)
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (value - self.value)


class StepCosts:
    """Seconds of steps by their number of tokens, in classes that are a quarter wide."""

    def __init__(self) -> None:
        self._classes: dict[int, tuple[Average, Average]] = {}  # tokens, seconds
        self._known: list[tuple[float, float]] = []  # the averages of each, in order
        self._ahead = Average()
        self._alone = Average()
        self._plan = Average()

    def observe(self, num_tokens: int, *, device_s: float, period_s: float, is_ahead: bool) -> None:
        """Learn from a step: its time on the device, and all the time that it took this engine."""
        tokens, seconds = self._classes.setdefault(_class_of(num_tokens), (Average(), Average()))
        tokens.take(num_tokens)
        seconds.take(device_s)
        self._known = sorted((tokens.value, seconds.value) for tokens, seconds in self._classes.values())
        (self._ahead if is_ahead else self._alone).take(max(0.0, period_s - device_s))

    def observe_plan(self, seconds: float) -> None:
        """Learn the time of a plan: the gap of steps that are not planned ahead, before there was one."""
        self._plan.take(seconds)

    @property
    def is_known(self) -> bool:
        """True when there are enough measurements to decide by."""
        return len(self._known) > 1 or any(seconds.count > 1 for _, seconds in self._classes.values())

    @property
    def gap_ahead_s(self) -> float:
        """The time between two steps of which one was planned while the other ran."""
        return self._ahead.value

    @property
    def gap_alone_s(self) -> float:
        """The time before a step that is planned when none runs."""
        return self._alone.value if self._alone.count > 1 else self._ahead.value + self._plan.value

    def device_s(self, num_tokens: float) -> float:
        """Return the time of a step of so many tokens on the device: by the nearest measured ones, in between."""
        known = self._known
        if not known:
            return 0.0
        above = bisect_left(known, (num_tokens, 0.0))
        if above == 0:
            return known[0][1]
        if above == len(known):
            tokens, seconds = known[-1]
            return seconds * num_tokens / tokens  # no less than in proportion: it is not known to be cheaper
        (low, low_s), (high, high_s) = known[above - 1], known[above]
        share = (num_tokens - low) / (high - low)
        return max(low_s, low_s + share * (high_s - low_s))


def _class_of(num_tokens: int) -> int:
    """Return the number of a class: 1 to 4 each alone, then four for each doubling."""
    if num_tokens < 4:
        return num_tokens
    exponent = num_tokens.bit_length() - 3
    return 4 * exponent + (num_tokens >> exponent)
