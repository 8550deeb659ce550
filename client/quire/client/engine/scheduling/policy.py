"""The scheduler's exchangeable decisions: rank, victim, reserve, admission, and the division of a step. Pure.

The scheduler keeps the rules that make every request end, with any policy:

    - Only running sequences below the needy one in rank are offered as victims, so the first in rank keeps its blocks.
    - Sequences of equal rank are ordered by arrival.
    - When no sequence runs, the first in the queue is admitted without asking the policy.
    - A sequence suspected of breaking the model runs alone; the others are preempted as far as it needs their blocks.
    - The first running prompt in rank gets at least one token of each step.
"""

from bisect import bisect_right
from collections import Counter, abc
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Protocol

from quire.client.engine.scheduling.fairness import FairShares, divide
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.sequence import Sequence, SequenceState

# Admissions leave the blocks that running sequences will need within this many steps, or more under pressure.
_RESERVE_STEPS = 4
_MAX_DOUBLINGS = 62
_NO_WEIGHTS: abc.Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PoolView:
    """The state that a policy decides by.

    limits                 of the pool and of the model
    running                sequences that hold blocks, the first in rank first
    starved                of the running sequences that the last plan refused blocks, the first in rank; None: no one
    num_preempting_plans   plans that preempted for a running sequence, since a running sequence ended
    """

    limits: SchedulerLimits
    running: abc.Sequence[Sequence]
    starved: Sequence | None = None
    num_preempting_plans: int = 0


class Policy(Protocol):
    """The decisions of an Engine's scheduler. A policy reads sequences, never changes them, and belongs to one engine.

    An error that a method raises stops the engine.
    """

    def rank(self, sequence: Sequence, view: PoolView) -> tuple[int, ...]:
        """Return the place of a new sequence in every order; lower is served first, equals by arrival.

        All ranks have the same length. Asked once per sequence.
        """
        ...

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended, and will not be asked about any more. Called once per sequence."""
        ...

    def victim(
        self, needy: Sequence, candidates: abc.Sequence[Sequence], *, missing_blocks: int, view: PoolView
    ) -> Sequence | None:
        """Return the candidate to preempt for a sequence that lacks so many blocks; None: it waits.

        needy runs, or waits for admission. candidates are the running sequences below it in rank, at least one, in
        order of rank. If needy is a suspect they are all other running sequences, and after None the last of them is
        preempted. Called again until enough blocks are freed. A waiting sequence that lacks a place, not blocks, needs
        one block.
        """
        ...

    def reserve(self, newcomer: Sequence, *, num_beside: int, view: PoolView) -> int:
        """Return the blocks that must stay free after the admission of newcomer and num_beside others with it.

        0 or more. Sent with the plan: cachemgr refuses the admissions that leave fewer.
        """
        ...

    def admits(self, newcomer: Sequence, view: PoolView) -> bool:
        """Return True if a sequence may get blocks now; it waits for admission, or is to be forked.

        Asked in order of rank, for a plan; after False no later one is asked.
        """
        ...

    def divide(self, prompts: abc.Sequence[Sequence], newcomer: Sequence | None, *, budget: int) -> abc.Sequence[int]:
        """Return how many tokens of each running prompt the next step computes.

        prompts are in order of rank and have two or more tokens to compute. budget is in tokens; newcomers get the
        rest of it. newcomer is the first of them in the queue; None: none is admitted now.
        """
        ...


def in_order(prompts: abc.Iterable[Sequence], budget: int) -> list[int]:
    """Divide a step so that each prompt gets all that it can use, the first in rank first."""
    counts = []
    for prompt in prompts:
        counts.append(min(prompt.num_schedulable_tokens, budget))
        budget -= counts[-1]
    return counts


class PriorityPolicy:
    """The default: by SamplingParams.priority, then fair between tenants, then by arrival.

    docs/reference/scheduling.md describes it; fairness.py has the arithmetic of tenants.
    """

    def __init__(self, weights: abc.Mapping[str, float] = _NO_WEIGHTS) -> None:
        """weights: a tenant's part of what all tenants with work get; 1 if it is not named. Raises InvalidRequest."""
        self._shares = FairShares(weights)

    def set_weights(self, weights: abc.Mapping[str, float]) -> None:
        """Take other weights from now on. Raises InvalidRequest, nothing changed."""
        self._shares.set_weights(weights)

    def rank(self, sequence: Sequence, view: PoolView) -> tuple[int, ...]:
        """Higher priority first; of equals, the tenants in turn."""
        return (-sequence.priority, self._shares.add(sequence, view.running))

    def ended(self, sequence: Sequence) -> None:
        """The tenant has one sequence less."""
        self._shares.end(sequence)

    def victim(
        self, needy: Sequence, candidates: abc.Sequence[Sequence], *, missing_blocks: int, view: PoolView
    ) -> Sequence | None:
        """Of the lowest priority and the largest tenant, the one that loses least work per block of use.

        Of equals it is the last in rank. A sequence that waits for admission takes blocks and places from lower
        priorities, and from tenants with more running sequences than its own.
        """
        loads = self._shares.loads(view.running)
        if needy.state is SequenceState.WAITING and not needy.is_suspect:
            candidates = [
                holder for holder in candidates if holder.priority < needy.priority or loads.may_take(needy, holder)
            ]
        tables = view.limits.tables

        def price(victim: Sequence) -> tuple[int, float, float]:
            lost = victim.num_scheduled_tokens - victim.num_shared_tokens
            per_block = lost / min(victim.num_own_blocks(tables), missing_blocks)
            return victim.priority, -loads.of(victim.tenant), per_block

        return min(reversed(candidates), key=price, default=None)

    def reserve(self, newcomer: Sequence, *, num_beside: int, view: PoolView) -> int:
        """Running sequences of no lower priority keep the blocks for their next steps: more after each preemption."""
        num_sequences = bisect_right(view.running, -newcomer.priority, key=_by_priority) + num_beside
        num_steps = _RESERVE_STEPS << min(view.num_preempting_plans, _MAX_DOUBLINGS)
        num_steps = min(num_steps, max(_RESERVE_STEPS, view.limits.num_blocks * view.limits.block_size))
        num_slots = num_sequences * view.limits.tables.num_slots(num_steps)
        return -(-num_slots // view.limits.block_size)

    def admits(self, newcomer: Sequence, view: PoolView) -> bool:
        """Running sequences that lack blocks go first, unless their priority is lower or their tenant has more."""
        starved = view.starved
        if starved is None or newcomer.priority != starved.priority:
            return starved is None or newcomer.priority > starved.priority
        return self._shares.loads(view.running).may_take(newcomer, starved)

    def divide(self, prompts: abc.Sequence[Sequence], newcomer: Sequence | None, *, budget: int) -> abc.Sequence[int]:
        """By priority, then by weight between tenants, then in order of rank. A newcomer's tenant has its part, too."""
        counts: list[int] = []
        for level, group in groupby(prompts, key=_by_priority):
            members = list(group)
            demands: Counter[str] = Counter()
            for prompt in members:
                demands[prompt.tenant] += prompt.num_schedulable_tokens
            if newcomer is not None and _by_priority(newcomer) == level:
                demands[newcomer.tenant] += len(newcomer.token_ids)
            given = dict(divide(demands, self._shares.weight, budget))
            budget -= sum(given.values())
            for prompt in members:
                counts.append(min(prompt.num_schedulable_tokens, given[prompt.tenant]))
                given[prompt.tenant] -= counts[-1]
        return counts


def _by_priority(sequence: Sequence) -> int:
    return -sequence.priority
