"""The scheduler's exchangeable decisions: rank, victim, reserve and admission. Pure.

The scheduler keeps the rules that make every request end, with any policy:

    - Only running sequences below the needy one in rank are offered as victims, so the first in rank keeps its blocks.
    - Sequences of equal rank are ordered by arrival.
    - When no sequence runs, the first in line is admitted without asking the policy.
    - A sequence suspected of breaking the model runs alone; the others are preempted as far as it needs their blocks.
"""

from bisect import bisect_right
from collections import abc
from dataclasses import dataclass
from typing import Protocol

from quire.client.engine.plans import SchedulerLimits
from quire.client.engine.sequence import Sequence, SequenceState

# Admissions leave the blocks that running sequences will ask for within this many steps, or more under pressure.
_RESERVE_STEPS = 4
_MAX_DOUBLINGS = 62


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

    def rank(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the place of a new sequence in every order; lower is served first, equals by arrival.

        All ranks have the same length. Asked once per sequence.
        """
        ...

    def victim(
        self, needy: Sequence, candidates: abc.Sequence[Sequence], *, missing_blocks: int, view: PoolView
    ) -> Sequence | None:
        """Return the candidate to preempt for a sequence that lacks so many blocks; None: it waits.

        needy runs, or waits for admission. candidates are running sequences below it in rank, in order of rank. If
        needy is a suspect they are all other running sequences, and after None the last of them is preempted. Asked
        again until enough blocks come back. A waiting sequence that lacks a place, not blocks, asks for one block.
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


class PriorityPolicy:
    """The default: by SamplingParams.priority, then by arrival; docs/architecture.md describes it."""

    def rank(self, sequence: Sequence) -> tuple[int, ...]:
        """Higher priority first."""
        return (-sequence.priority,)

    def victim(
        self, needy: Sequence, candidates: abc.Sequence[Sequence], *, missing_blocks: int, view: PoolView
    ) -> Sequence | None:
        """Of the lowest priority, the one that loses least work per block of use; of equals the last in rank.

        A sequence that waits for admission takes blocks and places from lower priorities only.
        """
        if needy.state is SequenceState.WAITING and not needy.is_suspect:
            candidates = candidates[bisect_right(candidates, -needy.priority, key=_by_priority) :]
        block_size = view.limits.block_size

        def price(victim: Sequence) -> tuple[int, float]:
            lost = victim.num_scheduled_tokens - victim.num_shared_tokens
            return victim.priority, lost / min(victim.num_own_blocks(block_size), missing_blocks)

        return min(reversed(candidates), key=price, default=None)

    def reserve(self, newcomer: Sequence, *, num_beside: int, view: PoolView) -> int:
        """Running sequences of no lower priority keep the blocks for their next steps: more after each preemption."""
        num_sequences = bisect_right(view.running, -newcomer.priority, key=_by_priority) + num_beside
        num_steps = _RESERVE_STEPS << min(view.num_preempting_plans, _MAX_DOUBLINGS)
        num_steps = min(num_steps, max(_RESERVE_STEPS, view.limits.num_blocks * view.limits.block_size))
        return -(-num_sequences * num_steps // view.limits.block_size)

    def admits(self, newcomer: Sequence, view: PoolView) -> bool:
        """Running sequences that lack blocks go first, if their priority is not lower."""
        return view.starved is None or newcomer.priority > view.starved.priority


def _by_priority(sequence: Sequence) -> int:
    return -sequence.priority
