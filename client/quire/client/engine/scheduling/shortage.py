"""Answer a refusal of blocks: wait for them, preempt other sequences, or ask for fewer tokens. Pure.

A running sequence that lacks blocks, which neither retired blocks nor releases will cover, preempts some below it in
rank. If the policy names none, it waits and keeps its blocks. What waits for very long gives back what it holds:
another client of the pool may wait for it. A newcomer that is refused waits at the head of the queue until the blocks
that it needs can have become free.

cachemgr keeps no reserve of a quota. So after a preemption for quota, and until a running sequence has ended, no
sequence is admitted beside others.
"""

from collections import abc

from quire.client.engine.scheduling.plans import GrantedStep, Plan
from quire.client.engine.scheduling.policy import Policy
from quire.client.engine.scheduling.preemption import Preemption
from quire.client.engine.scheduling.queues import Queues, by_rank, id_of
from quire.client.engine.scheduling.room import Awaited, Pressure, Room
from quire.client.engine.scheduling.sequence import Sequence, SequenceState
from quire.client.engine.scheduling.statistics import Counters
from quire.client.errors import QuireError


class Shortage:
    """Answers refusals for lack of blocks."""

    def __init__(
        self,
        queues: Queues,
        room: Room,
        policy: Policy,
        preemption: Preemption,
        counters: Counters,
        *,
        by_tenant: bool,
    ) -> None:
        """by_tenant: a quota is the tenant's, not this client's."""
        self._queues = queues
        self._room = room
        self._policy = policy
        self._preemption = preemption
        self._counters = counters
        self._by_tenant = by_tenant

    def is_line_blocked(self, first: Sequence) -> bool:
        """Return True if the first in the queue was refused, and no block has become free since then."""
        if not self._queues.running:
            return False
        if self._room.pressure.is_by_quota and self._preemption.victim_for(first, 1) is None:
            return True
        available = self._coming(self._room.blocks.free + self._room.blocks.cached)
        return available < self._room.blocks_awaited_by(first)

    def await_blocks(self, newcomer: Sequence, error: QuireError, plan: Plan, granted: GrantedStep) -> None:
        """Let the first refused sequence wait for the blocks that it needs, and preempt others for them.

        The first sequence of each tenant that was refused by its quota waits too; other tenants do not wait for it.
        """
        is_of_tenant = self._is_of_tenant(error)
        # With no other sequence that could give it blocks, it asks for fewer below.
        is_alone = not any(not is_of_tenant or each.tenant == newcomer.tenant for each in self._queues.running)
        if is_of_tenant:
            if newcomer.tenant in self._room.short_tenants and not is_alone:
                return
        elif self._room.awaited is not None:
            return
        needed = self._needed_by(newcomer, error, plan.admission_reserve_blocks)
        if is_of_tenant:
            self._room.short_tenants.add(newcomer.tenant)
        else:
            self._room.awaited = Awaited(newcomer, needed)
        if newcomer.state is SequenceState.WAITING:
            coming = self._coming(self._room.spare(error))
            unscheduled = frozenset(granted.run_ids)
            made = self._preemption.preempt_for(
                newcomer, needed - coming, unscheduled=unscheduled, of_tenant=is_of_tenant
            )
            if needed > coming + made and is_alone:
                self._shorten_chunks(newcomer, plan, needed=needed, coming=coming + made)

    def relieve(self, needs: abc.Mapping[Sequence, QuireError], plan: Plan) -> None:
        """Make room for running sequences that were refused blocks. Of tenants with a quota, each for its own."""
        by_quota = {sequence: error for sequence, error in needs.items() if self._is_of_tenant(error)}
        self._room.starved_tenants = {sequence.tenant for sequence in by_quota}
        for tenant in sorted(self._room.starved_tenants):
            own = {sequence: error for sequence, error in by_quota.items() if sequence.tenant == tenant}
            self._relieve_some(own, plan)
        needs = {s: error for s, error in needs.items() if s not in by_quota and self._is_needy(s)}
        self._room.starved = min(needs, default=None, key=by_rank)
        if needs:
            self._relieve_some(needs, plan)

    def give_way(self, placeless: abc.Sequence[Sequence]) -> None:
        """Preempt a running group that has waited long for places of its beams. Another client may wait for those that
        it has."""
        groups = {beam.group for beam in placeless if beam.group is not None and beam.group.running}
        if groups and self._room.num_stalls >= self._room.limits.max_stalls:
            last = max((group.leader for group in groups), key=by_rank)
            self._preemption.preempt(last)
            self._room.gives_way = True

    def _relieve_some(self, needs: abc.Mapping[Sequence, QuireError], plan: Plan) -> None:
        """Make room for these, the first in rank first."""
        *_, last_refused = needs.values()
        of_tenant = self._is_of_tenant(last_refused)
        room, num_preemptions = self._coming(self._room.spare(last_refused)), self._counters.preemptions
        for sequence in sorted(needs, key=by_rank):
            if self._is_needy(sequence):  # it was not preempted for one above it
                room -= needs[sequence].number("needed", 1)
                holder = sequence
                if sequence.group is not None:
                    holder = min(sequence.group.running, key=by_rank)
                room += self._preemption.preempt_for(holder, -room, of_tenant=of_tenant)
        if self._counters.preemptions > num_preemptions and not of_tenant:
            is_by_quota = last_refused.reason == "QUOTA_EXCEEDED"
            self._room.pressure = Pressure(self._room.pressure.num_plans + 1, is_by_quota)
        if room >= 0 or self._shorten_longest(needs, plan, room):
            return
        if self._room.num_stalls >= self._room.limits.max_stalls:
            # No sequence of this client holds the missing blocks: preempt one for another client of the pool.
            self._preemption.preempt(max(filter(self._is_needy, needs), key=by_rank))

    def _coming(self, spare: int) -> int:
        """Return the blocks that there are, and those that are retired or about to be released."""
        return spare + self._room.blocks.retired + self._queues.num_releasing_blocks

    def _is_of_tenant(self, error: QuireError) -> bool:
        """Return True if only sequences of the same tenant can make room."""
        return self._by_tenant and error.reason == "QUOTA_EXCEEDED"

    def _is_needy(self, refused: Sequence) -> bool:
        """Return True if a sequence that was refused blocks runs, or if its group does."""
        return refused.state is SequenceState.RUNNING or refused in self._queues.apart

    def _needed_by(self, newcomer: Sequence, error: QuireError, reserve: int) -> int:
        """Return the number of blocks without which it is refused again. The plan's reserve may be for others too."""
        needed = error.number("needed", 1)
        if error.reason == "QUOTA_EXCEEDED":
            return needed
        if self._queues.suspects:
            return needed - reserve
        own = self._policy.reserve(newcomer, num_beside=0, view=self._room.view(self._queues.running))
        return needed - reserve + own + newcomer.num_places - 1

    def _shorten_longest(self, needs: abc.Mapping[Sequence, QuireError], plan: Plan, room: int) -> bool:
        """Ask for fewer tokens of the longest chunk that was refused. room is negative: the blocks that are missing."""
        needy = list(filter(self._is_needy, needs))
        if not needy:
            return False
        longest = max(needy, key=lambda sequence: _num_asked(plan, sequence))
        needed = needs[longest].number("needed", 1)
        return self._shorten_chunks(longest, plan, needed=needed, coming=room + needed)

    def _shorten_chunks(self, refused: Sequence, plan: Plan, *, needed: int, coming: int) -> bool:
        """Ask for fewer tokens of prompts, if that needs fewer blocks. Returns False if it does not."""
        num_asked = _num_asked(plan, refused)
        if num_asked < 2 or not self._room.limits.tables.has_windows:
            return False
        self._room.shorten_chunks(num_asked, needed=needed, coming=coming)
        return True


def _num_asked(plan: Plan, sequence: Sequence) -> int:
    """Return the tokens that a plan asked for, at most, of a sequence that was refused."""
    if sequence.state is SequenceState.RUNNING:
        return plan.extend_counts[plan.extend_ids.index(id_of(sequence))]
    return min(plan.admission_token_budget, len(sequence.token_ids))
