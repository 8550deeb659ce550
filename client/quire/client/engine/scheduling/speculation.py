"""Which sequences get drafts in the next step, and how many: those that give most tokens a second. Pure.

A sequence that has drafts does not run ahead: its last token must be known. So it is held back until no step in flight
samples for it. Then it runs with drafts, or goes back to the others if drafts do not pay any more.

For a step there are three ways, and the one with most expected tokens a second is taken.

    ahead     no drafts: every sequence has one token in each step, and steps are planned while another one runs
    together  those with drafts are half of the sequences that decode, or more: no step is planned before the one with
              drafts has ended, so that each step has them all
    between   they are fewer: the others run ahead, and those with drafts are in every second step

The chance of each draft is what the sequence's guesses showed so far (guessing.py), the time of a step what steps of so
many tokens took (step_costs.py). A draft is worth its time if its chance, divided by the time it adds, is more than the
tokens a second without it.
"""

from collections import abc
from dataclasses import dataclass
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
"""Times the tokens a second without drafts, for sequences that run ahead to be held back."""
_PROBE_CHANCE = 0.7
_PROBE_EVERY = 128
"""Steps between two probes: a step with drafts that do not seem to pay, when most guesses come true, to measure it."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one sequence."""

    sequence: Sequence
    token_ids: abc.Sequence[int]


def best_counts(
    chances: abc.Sequence[abc.Sequence[float]], num_others: int, costs: StepCosts, *, budget: int, least_gain: float
) -> list[int]:
    """Return the number of drafts of each sequence with these chances; 0 for all if drafts do not pay.

    num_others    sequences that decode without drafts in the same time
    budget        the most drafts together
    least_gain    the least tokens a second, as a multiple of those without drafts
    """
    num_all = num_others + len(chances)
    alone = num_all / max(1e-9, costs.device_s(num_all) + costs.gap_ahead_s)
    together, of_together = _best_way(chances, num_all, costs.gap_alone_s, costs, budget=budget)
    if 2 * len(chances) < num_others + len(chances):
        ahead_s = costs.device_s(num_others) + 2 * costs.gap_ahead_s
        together, of_together = _best_way(chances, num_all, ahead_s, costs, budget=budget, num_before=num_others)
    return of_together if together > least_gain * alone else [0] * len(chances)


def _best_way(
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
    best, best_counts_ = 0.0, counts.copy()
    for num_drafts in range(1, budget + 1):
        if not line:
            break
        chance, index = heappop(line)
        tokens -= chance
        counts[index] += 1
        if counts[index] < len(chances[index]):
            heappush(line, (-chances[index][counts[index]], index))
        rate = tokens / max(1e-9, costs.device_s(num_decodes + num_drafts) + other_s)
        if rate > best:
            best, best_counts_ = rate, counts.copy()
    return best, best_counts_


class Speculation:
    """Gives sequences their drafts."""

    def __init__(self, config: SpeculativeConfig, queues: Queues, costs: StepCosts) -> None:
        """Hold back sequences of these queues, by these costs."""
        self._config = config
        self._queues = queues
        self._costs = costs
        self._recent = RecentAnswers(size=config.prompt_lookup_min, most=config.prompt_lookup_max)
        names = ("ngram", "suffix") if config.method == "suffix" else ("ngram",)
        self.counts = {name: DrafterCounts() for name in names}
        self._hopeful: dict[Sequence, None] = {}  # of the batch, with a guess that may be worth a draft
        self._held: dict[Sequence, None] = {}
        self._steps_without = 0

    # The life of a sequence.

    def begin(self, sequence: Sequence) -> None:
        """Let a new sequence guess, if it may have drafts."""
        if not _may_draft(sequence):
            return
        size, most = self._config.prompt_lookup_min, self._config.prompt_lookup_max
        num_expected = len(sequence.token_ids) + sequence.max_tokens
        drafters: list[Drafter] = [PromptLookup(size=size, most=most, num_expected=num_expected)]
        if "suffix" in self.counts and _shares(sequence):
            drafters.append(AnswerLookup(self._recent.of(sequence.tenant, sequence.cache.salt)))
        sequence.guesses = Guesses(drafters, self.counts)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence; its answer is one of the recent ones."""
        self._hopeful.pop(sequence, None)
        self._held.pop(sequence, None)
        if sequence.guesses is None:
            return
        sequence.guesses = None
        if "suffix" in self.counts and _shares(sequence):
            self._recent.of(sequence.tenant, sequence.cache.salt).add(sequence.token_ids, sequence.num_prompt_tokens)

    def take(self, sequence: Sequence, drafts: abc.Sequence[int] | None, num_new: int) -> None:
        """Take the new tokens of a sequence that goes on: num_new of a step with these drafts, or one without any."""
        guesses = sequence.guesses
        if guesses is None:
            return
        if drafts is None:
            guesses.take(sequence.token_ids)
        else:
            guesses.take_drafted(sequence.token_ids, drafts, num_new)
        if sequence.batch is None:
            return
        if guesses.next_chance > _LEAST_CHANCE:
            self._hopeful[sequence] = None
        else:
            self._hopeful.pop(sequence, None)

    # The next step.

    def drafts(self, limits: SchedulerLimits) -> dict[int, Drafts]:
        """Hold sequences back or let them go, and return the drafts of those that are ready for them, by id."""
        self._steps_without += 1
        self._held = {sequence: None for sequence in self._held if sequence.is_held}
        if not (self._hopeful or self._held):
            return {}
        if not self._may_draft_now(limits):
            self._let_go(list(self._held))
            return {}
        hopeful = [each for each in self._hopeful if each.batch is not None and each.num_left > 1]
        ready = [each for each in self._held if not each.num_sampling]
        waiting = [each for each in self._held if each.num_sampling]
        self._hopeful = dict.fromkeys(hopeful)
        chosen = self._choose([*ready, *hopeful], waiting, limits)
        for sequence in hopeful:
            if chosen.get(sequence):
                self._hold(sequence)
        made = {id_of(each): drafts for each in ready if (drafts := self._drafts_of(each, chosen.get(each, 0)))}
        self._let_go([each for each in ready if id_of(each) not in made])
        if made:
            self._steps_without = 0
        return made

    @property
    def waits_for_outcome(self) -> bool:
        """True if the next step has to have the sequences that are held back, and a token of theirs is not known."""
        num_decoding = len(self._queues.batch.members) + len(self._held)
        return 2 * len(self._held) >= num_decoding and any(each.num_sampling for each in self._held)

    def _may_draft_now(self, limits: SchedulerLimits) -> bool:
        # Beams take turns with the others by rank; a suspect runs alone.
        return bool(limits.max_draft_count) and not self._queues.groups and not self._queues.suspects

    def _choose(
        self, candidates: abc.Sequence[Sequence], waiting: abc.Sequence[Sequence], limits: SchedulerLimits
    ) -> dict[Sequence, int]:
        candidates = sorted((each for each in candidates if each not in self._queues.followers), key=by_rank)
        most = min(self._config.num_speculative_tokens, limits.max_draft_count)
        chances = [_chances_of(each, most) for each in candidates]
        num_others = len(self._queues.batch.members) + len(self._held) - len(candidates)
        if not candidates or not self._costs.is_known:
            return {}
        is_new = not any(each.is_held for each in candidates)
        counts = best_counts(
            chances,
            num_others,
            self._costs,
            budget=max(0, limits.max_decode_tokens - num_others - len(candidates)),
            least_gain=_LEAST_GAIN if is_new else 1.0,
        )
        if not any(counts) and not waiting and self._steps_without > _PROBE_EVERY:
            counts = [len(each) if each and each[0] > _PROBE_CHANCE else 0 for each in chances]
        return dict(zip(candidates, counts, strict=True))

    def _drafts_of(self, sequence: Sequence, count: int) -> Drafts | None:
        if not count or sequence.guesses is None:
            return None
        token_ids = sequence.guesses.propose(sequence.token_ids, count)
        return Drafts(sequence, token_ids) if token_ids else None

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
    return sequence.group is None and sequence.params.grammar is None and sequence.params.speculative


def _shares(sequence: Sequence) -> bool:
    """Return whether a sequence uses, and adds to, what other ones of its tenant have."""
    return sequence.cache.cache_use is CacheUse.READ_AND_WRITE


def _chances_of(sequence: Sequence, most: int) -> list[float]:
    if sequence.guesses is None or sequence.state is not SequenceState.RUNNING:
        return []
    return sequence.guesses.chances(min(most, sequence.num_left - 1))
