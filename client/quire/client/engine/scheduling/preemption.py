"""Take the blocks of running sequences for others that lack blocks or a place. Pure.

A preempted sequence returns by re-admission or, if the pool has a host tier with room and copying there and back is
measured to be cheaper than computing again, by a restore. Both share one queue. Only sequences below the needy one in
rank are preempted, and the policy chooses among them. So the first in rank is never preempted for another sequence of
this client. shortage.py decides when a sequence lacks blocks.
"""

from collections import abc

from quire.client.engine.scheduling.policy import Policy
from quire.client.engine.scheduling.queues import Queues
from quire.client.engine.scheduling.room import Room
from quire.client.engine.scheduling.sequence import Sequence
from quire.client.engine.scheduling.statistics import Counters
from quire.client.engine.scheduling.tier import TierCosts


class Preemption:
    """Chooses running sequences and takes them out of the pool."""

    def __init__(self, queues: Queues, room: Room, policy: Policy, costs: TierCosts, counters: Counters) -> None:
        self._queues = queues
        self._room = room
        self._policy = policy
        self._costs = costs
        self._counters = counters

    def preempt_for(
        self, needy: Sequence, missing: int, *, unscheduled: abc.Set[int] = frozenset(), of_tenant: bool = False
    ) -> int:
        """Preempt until so many blocks will be freed, or no candidate is left; returns how many will be.

        unscheduled are the ids with a run that cachemgr has planned, and that no sequence knows of yet. of_tenant: only
        sequences of the same tenant can make room.
        """
        coming = 0
        while coming < missing and (victim := self.victim_for(needy, missing - coming, of_tenant)) is not None:
            coming += self._num_coming_from(victim)
            self.preempt(victim, unscheduled=unscheduled)
        return coming

    def victim_for(self, needy: Sequence, missing: int, of_tenant: bool = False) -> Sequence | None:
        """Return the sequence to preempt for one that lacks so many blocks; None if there is none."""
        # With a suspect all others are paused and would hold the blocks for ever.
        if needy.is_suspect:
            candidates = [sequence for sequence in self._queues.running if sequence.unit is not needy.unit]
        else:
            candidates = self._queues.below(needy)
        if of_tenant:
            candidates = [other for other in candidates if other.tenant == needy.tenant]
        if not candidates:  # as in each plan while a queue waits for places: a policy may look at all that run
            return None
        view = self._room.view(self._queues.running)
        victim = self._policy.victim(needy, candidates, missing_blocks=missing, view=view)
        return candidates[-1] if victim is None and needy.is_suspect else victim

    def preempt_for_place(self) -> None:
        """If all places are taken, preempt a sequence below the first in the queue, one with each plan."""
        queues = self._queues
        if not queues.waiting or queues.suspects:
            return
        withheld = self._room.short_tenants | self._room.starved_tenants
        first = next((sequence for sequence in queues.waiting if sequence.tenant not in withheld), None)
        if first is not None and queues.num_places_taken + first.num_places > self._room.limits.num_places:
            self.preempt_for(first, 1)

    def preempt(self, sequence: Sequence, *, unscheduled: abc.Set[int] = frozenset()) -> None:
        """Take a running sequence, or its group, out of the pool. unscheduled is as in preempt_for."""
        self._counters.preemptions += 1 if sequence.group is None else len(sequence.group.running)
        # In the host tier a sequence with an unknown run would return with an unexpected token. cachemgr offloads none
        # with drafts in flight.
        may_offload = sequence.group is None and sequence.seq_id not in unscheduled and not sequence.num_drafts
        is_offloaded = may_offload and self._is_worth_offloading(sequence)
        self._queues.preempt(sequence, is_offloaded=is_offloaded)
        if is_offloaded:
            self._room.num_free_host_blocks -= self._host_blocks_of(sequence.num_host_tokens)

    def _num_coming_from(self, victim: Sequence) -> int:
        """Return the blocks that a victim's release frees. For a group at least; shared blocks count once."""
        tables = self._room.limits.tables
        each = [beam.num_own_blocks(tables) for beam in (victim.group.running if victim.group else ())]
        return max(each) + len(each) - 1 if each else victim.num_own_blocks(tables)

    def _is_worth_offloading(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_scheduled_tokens
        num_blocks = self._host_blocks_of(num_tokens)
        if num_blocks > self._room.num_free_host_blocks:
            return False
        return self._costs.prefers_offload(
            num_lost_tokens=num_tokens - sequence.num_shared_tokens,
            num_bytes=num_blocks * self._room.limits.block_bytes,
        )

    def _host_blocks_of(self, num_tokens: int) -> int:
        return max(1, self._room.limits.tables.num_blocks(num_tokens, num_tokens))
