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
    """Seconds of steps by their number of tokens, in classes that are a quarter wide.

    A token of a prompt costs less than a decoded or drafted one, which is sampled and has keys of its own. So the steps
    that are known are those without prompts.
    """

    def __init__(self) -> None:
        self._classes: dict[int, tuple[Average, Average]] = {}  # tokens, seconds
        self._known: list[tuple[float, float]] = []  # the averages of each, in order
        self._prompt_token = Average()
        self._ahead = Average()
        self._alone = Average()
        self._plan = Average()

    def observe(
        self, num_tokens: int, *, device_s: float, period_s: float, is_ahead: bool, has_prompts: bool = False
    ) -> None:
        """Learn from a step: its time on the device, and all the time that it took this engine."""
        (self._ahead if is_ahead else self._alone).take(max(0.0, period_s - device_s))
        if has_prompts:
            self._prompt_token.take(device_s / num_tokens)
            return
        tokens, seconds = self._classes.setdefault(_class_of(num_tokens), (Average(), Average()))
        tokens.take(num_tokens)
        seconds.take(device_s)
        self._known = sorted((tokens.value, seconds.value) for tokens, seconds in self._classes.values())

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
        """Return the time of a step of so many decodes and drafts on the device; 0 while nothing is known.

        Between two measured ones it is on the line, and takes no more than the longer one. A longer one than all of
        them goes on as the last two do, up to twice as long, and beyond that in proportion: so what longer steps take
        is learned by one step for each doubling.
        """
        known = self._known
        if not known:
            return 0.0
        above = bisect_left(known, (num_tokens, 0.0))
        if above == 0:
            return known[0][1]
        if above < len(known):
            (low, low_s), (high, high_s) = known[above - 1], known[above]
            return high_s - (high - num_tokens) / (high - low) * max(0.0, high_s - low_s)
        most, most_s = known[-1]
        near = min(num_tokens, 2 * most)
        return (most_s + self._token_s * (near - most)) * num_tokens / near

    @property
    def _token_s(self) -> float:
        """The time of a token more than in the longest step measured."""
        if len(self._known) == 1:
            return min(self._prompt_token.value, self._known[0][1] / self._known[0][0])
        (low, low_s), (high, high_s) = self._known[-2:]
        return max(0.0, (high_s - low_s) / (high - low))


def _class_of(num_tokens: int) -> int:
    """Return the number of a class: 1 to 4 each alone, then four for each doubling."""
    if num_tokens < 4:
        return num_tokens
    exponent = num_tokens.bit_length() - 3
    return 4 * exponent + (num_tokens >> exponent)
