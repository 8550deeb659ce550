"""Which sequences get drafts in the next step, and how many: those that give most tokens a second. Pure.

Drafts follow a known token, so a sequence with drafts does not run ahead. There are three ways, and the one with most
expected tokens a second is taken.

    ahead     no drafts: each sequence has a token in each step, and steps are planned while another one runs
    together  no step is planned while another one runs, so each step has all sequences, and any may have drafts
    between   the others run ahead. Those with drafts are held back while their tokens are being sampled, so they are in
              every second step. For the few that copy among many that do not

The chance of each draft is what the sequence's guesses showed so far (guessing.py), the time of a step what steps of so
many tokens took (step_costs.py).
"""

from collections import abc
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush

from quire.client.engine.caching import CacheUse
from quire.client.engine.scheduling.guessing import DrafterCounts, Guesses
from quire.client.engine.scheduling.lookup import AnswerLookup, Drafter, PromptLookup, RecentAnswers
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.queues import Queues, by_rank, id_of
from quire.client.engine.scheduling.sequence import Sequence, SequenceState
from quire.client.engine.scheduling.step_costs import StepCosts
from quire.client.engine.speculative import SpeculativeConfig

_LEAST_CHANCE = 0.2
"""Of a first guess, for its sequence to be thought of at all."""
_LEAST_GAIN = 1.05
"""Times the tokens a second without drafts, expected of the first step with them."""
_WEIGHT = 0.1
"""Of one step in the average gain."""
_FIRST_GAIN = 1.1
_PROVEN = 64
"""Steps together after which the next beginning is as easy as the first one."""
_HARDEST_GAIN = 3.0
_FORGETS = 0.999
_PROBE_CHANCE = 0.7
_FIRST_PROBE = 16
_PROBE_EVERY = 128
"""Steps before the first probe, and between two of them later: a step with drafts that do not seem to pay, when most
guesses come true, to measure it. The first step of a size is often slow, so the first probes come soon. After so many
steps with drafts one without is measured again, too."""


_EPSILON_S = 1e-9


class Way(Enum):
    """How steps follow one another."""

    AHEAD = "ahead"
    TOGETHER = "together"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True)
class Choice:
    """A way, the number of drafts of each sequence, and the tokens a second, as a multiple of those without drafts."""

    way: Way
    counts: abc.Sequence[int]
    gain: float


class Trial:
    """A time in which sequences run together: begun when much is expected, ended when too little has come of it.

    What is expected is an estimate, and trials begin where it is too high. So after each trial that did not pay the
    next one has to promise twice as much, and after a long time without one less again.
    """

    __slots__ = ("_gain", "_least_gain", "_num_steps", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._gain = 0.0  # the average over the steps of this trial
        self._least_gain = _LEAST_GAIN
        self._num_steps = 0

    @property
    def least_gain(self) -> float:
        """The gain that has to be expected, to begin."""
        return self._least_gain

    def expect(self, gain: float) -> None:
        """Begin if this gain, expected of the next step, is enough."""
        self._least_gain = max(_LEAST_GAIN, 1.0 + _FORGETS * (self._least_gain - 1.0))
        if gain > self._least_gain:
            self.is_on, self._gain, self._num_steps = True, _FIRST_GAIN, 0

    def take(self, gain: float) -> None:
        """Take the gain of a step together. End if they do not pay on average."""
        self._gain += _WEIGHT * (gain - self._gain)
        self._num_steps += 1
        if self._num_steps == _PROVEN:
            self._least_gain = _LEAST_GAIN
        if self._gain <= 1.0:
            self.is_on = False
            self._least_gain = min(_HARDEST_GAIN, 2.0 * self._least_gain - 1.0)

    def stop(self) -> None:
        """End, whether it pays or not."""
        self.is_on = False


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one sequence."""

    sequence: Sequence
    token_ids: abc.Sequence[int]


def best_choice(
    chances: abc.Sequence[abc.Sequence[float]],
    num_others: int,
    costs: StepCosts,
    *,
    budget: int,
    ways: abc.Collection[Way] = tuple(Way),
) -> Choice:
    """Return the best of these ways for sequences with these chances of their drafts.

    num_others    sequences that decode and have no guess
    budget        the most drafts together
    """
    num_all = num_others + len(chances)
    ahead = num_all / max(_EPSILON_S, costs.device_s(num_all) + costs.gap_ahead_s)
    made = [Choice(Way.AHEAD, [0] * len(chances), 1.0)] if Way.AHEAD in ways else []
    if Way.TOGETHER in ways:
        rate, counts = _most_tokens(chances, num_all, costs.gap_alone_s, costs, budget=budget)
        made.append(Choice(Way.TOGETHER, counts, rate / ahead))
    if Way.BETWEEN in ways and num_others > len(chances):
        other_s = costs.device_s(num_others) + 2 * costs.gap_ahead_s
        rate, counts = _most_tokens(chances, num_all, other_s, costs, budget=budget, num_before=num_others)
        made.append(Choice(Way.BETWEEN, counts, rate / ahead))
    return max(made, key=_gain_of)


def _gain_of(choice: Choice) -> float:
    return choice.gain


def _most_tokens(
    chances: abc.Sequence[abc.Sequence[float]],
    num_decodes: int,
    other_s: float,
    costs: StepCosts,
    *,
    budget: int,
    num_before: int = 0,
) -> tuple[float, list[int]]:
    """Return the most tokens a second, and the drafts of each sequence then. The most probable drafts come first.

    num_before    tokens of the time other_s
    """
    counts = [0] * len(chances)
    line = [(-each[0], index) for index, each in enumerate(chances) if each]
    heapify(line)
    tokens = float(num_decodes + num_before)
    best, best_counts = tokens / max(_EPSILON_S, costs.device_s(num_decodes) + other_s), counts.copy()
    for num_drafts in range(1, budget + 1):
        if not line:
            break
        chance, index = heappop(line)
        tokens -= chance
        counts[index] += 1
        if counts[index] < len(chances[index]):
            heappush(line, (-chances[index][counts[index]], index))
        rate = tokens / max(_EPSILON_S, costs.device_s(num_decodes + num_drafts) + other_s)
        if rate > best:
            best, best_counts = rate, counts.copy()
    return best, best_counts


def _probe(guessing: abc.Mapping[Sequence, abc.Sequence[float]], *, most: int) -> dict[Sequence, int]:
    """Return drafts for sequences with probable guesses, so many together at most."""
    counts: dict[Sequence, int] = {}
    for sequence, chances in guessing.items():
        count = min(most, len(chances))
        if count and chances[0] > _PROBE_CHANCE:
            counts[sequence] = count
            most -= count
    return counts


class Speculation:
    """Gives sequences their drafts."""

    def __init__(self, config: SpeculativeConfig, queues: Queues) -> None:
        """Hold back sequences of these queues, by the costs of steps that are measured."""
        self.costs = StepCosts()
        self._config = config
        self._least_chance = _LEAST_CHANCE if config.adaptive else 0.0
        self._queues = queues
        self._recent = RecentAnswers(size=config.prompt_lookup_min, most=config.prompt_lookup_max)
        names = ("ngram", "suffix") if config.method == "suffix" else ("ngram",)
        self.counts = {name: DrafterCounts() for name in names}
        self._hopeful: dict[Sequence, None] = {}  # of the batch, with a guess that may be worth a draft
        self._held: dict[Sequence, None] = {}
        self._together = Trial()
        self._num_asked = 0  # sequences of the last step together, and their drafts
        self._num_drafts = 0
        self._num_accepted = 0  # of these
        self._steps_without = 0
        self._steps_with = 0  # one after the other
        self._probe_after = _FIRST_PROBE

    # The life of a sequence.

    def begin(self, sequence: Sequence) -> None:
        """Let a new sequence guess, if it may have drafts."""
        if not _may_draft(sequence):
            return
        size, most = self._config.prompt_lookup_min, self._config.prompt_lookup_max
        num_expected = len(sequence.token_ids) + sequence.max_tokens
        drafters: list[Drafter] = [PromptLookup(size=size, most=most, num_expected=num_expected)]
        if "suffix" in self.counts and _shares(sequence):
            drafters.append(AnswerLookup(self._recent.of(sequence.tenant, sequence.cache.salt, sequence.cache.adapter)))
        sequence.guesses = Guesses(drafters, self.counts)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence; its answer is one of the recent ones."""
        self._hopeful.pop(sequence, None)
        self._held.pop(sequence, None)
        if sequence.guesses is None:
            return
        sequence.guesses = None
        if "suffix" in self.counts and _shares(sequence):
            self._recent.of(sequence.tenant, sequence.cache.salt, sequence.cache.adapter).add(
                sequence.token_ids, sequence.num_prompt_tokens
            )

    def take(self, sequence: Sequence, drafts: abc.Sequence[int] | None, num_new: int) -> None:
        """Take the new tokens of a sequence that goes on: num_new of a step with these drafts, or one without any."""
        guesses = sequence.guesses
        if guesses is None:
            return
        if drafts is None:
            guesses.take(sequence.token_ids)
        else:
            guesses.take_drafted(sequence.token_ids, drafts, num_new)
            self._num_accepted += num_new - 1
        if sequence.batch is None:
            return
        if guesses.next_chance > self._least_chance:
            self._hopeful[sequence] = None
        else:
            self._hopeful.pop(sequence, None)

    # The next step.

    def drafts(self, limits: SchedulerLimits, *, is_running: bool) -> dict[int, Drafts] | None:
        """Hold sequences back or let them go, and return the drafts of those that are ready for them, by id.

        None if the step in flight (is_running) has to end first: the sequences run together.
        """
        self._held = {sequence: None for sequence in self._held if sequence.is_held}
        if not (self._may_draft_now(limits) and self._num_decoding):
            self._together.stop()
        if self._together.is_on and is_running:
            return None
        self._steps_without += 1
        if not (self._hopeful or self._held or self._together.is_on):
            return {}
        if not self._may_draft_now(limits):
            self._let_go(list(self._held))
            return {}
        chosen = self._choose(self._candidates(), limits)
        if self._together.is_on and is_running:  # from now on
            return None
        made: dict[int, Drafts] = {}
        for sequence, count in chosen.items():
            if not sequence.is_held:
                self._hold(sequence)
            if not sequence.num_sampling and (drafts := _drafts_of(sequence, count)):
                made[id_of(sequence)] = drafts
        self._let_go([each for each in self._held if id_of(each) not in made])
        if made:
            self._steps_without = 0
            self._steps_with += 1
        else:
            self._steps_with = 0
        return made

    @property
    def _num_decoding(self) -> int:
        return len(self._queues.batch.members) + len(self._held)

    def _may_draft_now(self, limits: SchedulerLimits) -> bool:
        # Beams take turns with the others by rank; a suspect runs alone.
        return bool(limits.max_draft_count) and not self._queues.groups and not self._queues.suspects

    def _candidates(self) -> list[Sequence]:
        """Return the sequences with guesses that may be drafts of the next step, or of the one behind it."""
        hopeful = [each for each in self._hopeful if each.batch is not None and each.num_left > 1]
        self._hopeful = dict.fromkeys(hopeful)
        ready = [each for each in self._held if not each.num_sampling]
        return sorted((each for each in (*ready, *hopeful) if each not in self._queues.followers), key=by_rank)

    def _choose(self, candidates: abc.Sequence[Sequence], limits: SchedulerLimits) -> dict[Sequence, int]:
        """Choose the way, and the sequences that get drafts in it, with the number of these."""
        num_all = self._num_decoding
        if not num_all or not self.costs.is_known:
            return {}
        most = min(self._config.num_speculative_tokens, limits.max_draft_count)
        guessing = {each: chances for each in candidates if (chances := _chances_of(each, most))}
        budget = max(0, limits.max_decode_tokens - num_all)
        if not self._config.adaptive:
            self._together.is_on = 2 * len(guessing) >= num_all
            return {each: len(chances) for each, chances in guessing.items()}
        if self._together.is_on:
            self._judge()
        is_on = self._together.is_on
        ways = (Way.TOGETHER,) if is_on else tuple(Way)
        choice = best_choice([*guessing.values()], num_all - len(guessing), self.costs, budget=budget, ways=ways)
        if not is_on:
            self._together.expect(choice.gain if choice.way is Way.TOGETHER else 0.0)
        if self._together.is_on or choice.gain > (1.0 if self._held else self._together.least_gain):
            counts = choice.counts if self._steps_with < _PROBE_EVERY else [0] * len(guessing)
            self._num_asked, self._num_drafts, self._num_accepted = num_all, sum(counts), 0
            return {each: count for each, count in zip(guessing, counts, strict=True) if count}
        if self._steps_without <= self._probe_after:
            return {}
        probed = _probe(guessing, most=max(most, num_all))
        if probed:
            self._probe_after = min(_PROBE_EVERY, 2 * self._probe_after)
        return probed

    def _judge(self) -> None:
        """Take the gain of the last step together, by the tokens that came."""
        costs, num_all = self.costs, self._num_asked
        together_s = costs.device_s(num_all + self._num_drafts) + costs.gap_alone_s
        ahead_s = costs.device_s(num_all) + costs.gap_ahead_s
        if num_all and together_s:
            self._together.take((num_all + self._num_accepted) / num_all * ahead_s / together_s)
        self._num_asked = 0

    def _hold(self, sequence: Sequence) -> None:
        self._hopeful.pop(sequence, None)
        self._queues.hold(sequence)
        self._held[sequence] = None

    def _let_go(self, sequences: abc.Iterable[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.num_sampling:
                del self._held[sequence]
                self._queues.let_go(sequence)


def _may_draft(sequence: Sequence) -> bool:
    """Return whether a request's sequence may have drafts; docs/how-to/speculative-decoding.md has the reasons."""
    return sequence.group is None and sequence.params.speculative


def _shares(sequence: Sequence) -> bool:
    """Return whether a sequence uses, and adds to, what other ones of its tenant have."""
    return sequence.cache.cache_use is CacheUse.READ_AND_WRITE


def _chances_of(sequence: Sequence, most: int) -> list[float]:
    if sequence.guesses is None or sequence.state is not SequenceState.RUNNING:
        return []
    return sequence.guesses.chances(min(most, sequence.num_left - 1))


def _drafts_of(sequence: Sequence, count: int) -> Drafts | None:
    if not count or sequence.guesses is None:
        return None
    token_ids = sequence.guesses.propose(sequence.token_ids, count)
    return Drafts(sequence, token_ids) if token_ids else None
