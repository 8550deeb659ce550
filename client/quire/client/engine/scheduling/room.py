"""The room in the pool, as known from the answers to the last plans. Pure."""

from collections import abc
from dataclasses import dataclass, field, fields

from quire.client.engine.scheduling.plans import Blocks, SchedulerLimits
from quire.client.engine.scheduling.policy import PoolView
from quire.client.engine.scheduling.sequence import Sequence
from quire.client.errors import QuireError

# Reasons of refusals for lack of room: in the pool, or within this client's quota.
NO_BLOCKS = frozenset({"OUT_OF_BLOCKS", "QUOTA_EXCEEDED"})


@dataclass(frozen=True, slots=True)
class Pressure:
    """Preemptions for running sequences since one has ended.

    num_plans     plans with such preemptions
    is_by_quota   the last of these lacked quota, not blocks of the pool
    """

    num_plans: int = 0
    is_by_quota: bool = False


@dataclass(frozen=True, slots=True)
class Awaited:
    """A sequence that was refused an admission, and the blocks without which it would be refused again."""

    sequence: Sequence
    num_blocks: int


@dataclass(slots=True)
class Room:
    """Forgotten with the pool.

    limits                  of the pool and of the model
    blocks                  after the last plan
    num_free_host_blocks    of the host tier, those that no offload was chosen for yet
    pressure                by which admissions leave blocks to running sequences
    starved                 of the running sequences that the last plan refused blocks, the first in rank
    awaited                 of the newcomers that the last plan with any refused blocks, the first in rank
    cached_ratio            of admitted tokens lately: how far a budget for admissions goes
    num_stalls              plans without a run, one after the other
    gives_way               a group was preempted for another client: the plan that releases it admits nothing, so that
                            the other client can plan before its return
    short_tenants           tenants of which an admission was refused by their quota, and none accepted since
    starved_tenants         tenants of running sequences that the last plan refused by their quota
    max_chunk_tokens        the most tokens of prompts in a plan, since windowed layer groups had no blocks for more;
                            None: as many as a step may have
    """

    limits: SchedulerLimits
    blocks: Blocks
    num_free_host_blocks: int
    pressure: Pressure = Pressure()
    starved: Sequence | None = None
    awaited: Awaited | None = None
    cached_ratio: float = 0.0
    num_stalls: int = 0
    gives_way: bool = False
    short_tenants: set[str] = field(default_factory=set)
    starved_tenants: set[str] = field(default_factory=set)
    max_chunk_tokens: int | None = None

    @classmethod
    def of_empty_pool(cls, limits: SchedulerLimits) -> "Room":
        """Before the first plan."""
        return cls(limits, Blocks(free=limits.num_blocks, cached=0, active=0, retired=0), limits.num_host_blocks)

    def reset(self, limits: SchedulerLimits) -> None:
        """Begin with another pool, or with a pool that has forgotten everything."""
        fresh = Room.of_empty_pool(limits)
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))

    def view(self, running: abc.Sequence[Sequence]) -> PoolView:
        """Return the state that a policy decides by."""
        return PoolView(self.limits, running, self.starved, self.pressure.num_plans)

    def observe_admission(self, *, num_tokens: int, num_cached: int) -> None:
        """Count an admission's tokens found in the prefix cache."""
        self.cached_ratio = 0.5 * self.cached_ratio + 0.5 * num_cached / num_tokens

    def line(self, waiting: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        """Return the waiting sequences without those that wait for a quota.

        Of a tenant over its quota the first one is tried again; none while a running sequence of the tenant lacks
        quota.
        """
        if not self.short_tenants and not self.starved_tenants:
            return waiting
        line, seen = [], set(self.starved_tenants)
        for sequence in waiting:
            if sequence.tenant not in seen:
                line.append(sequence)
            if sequence.tenant in self.short_tenants:
                seen.add(sequence.tenant)
        return line

    def spare(self, error: QuireError) -> int:
        """Return the blocks that this client could have had when it was refused more."""
        if error.reason == "QUOTA_EXCEEDED":
            return error.number("limit", 0) - error.number("held", 0)
        return error.number("free", self.blocks.free + self.blocks.cached)

    def blocks_awaited_by(self, first_in_line: Sequence) -> int:
        """Return the blocks without which the first in the queue need not be tried again; 0 if it was not refused."""
        awaited = self.awaited
        return awaited.num_blocks if awaited is not None and awaited.sequence is first_in_line else 0

    def shorten_chunks(self, num_asked: int, *, needed: int, coming: int) -> None:
        """Ask for fewer tokens of prompts than the num_asked that needed more blocks than are coming.

        From a half to an eighth, as these blocks allow, so that few plans are refused before one fits.
        """
        self.max_chunk_tokens = max(1, min(num_asked // 2, max(num_asked // 8, num_asked * coming // needed)))

    def lengthen_chunks(self) -> None:
        """Ask for up to twice as many tokens of prompts again, if there are blocks for them by now."""
        if self.max_chunk_tokens is None:
            return
        doubled = 2 * self.max_chunk_tokens
        if self.limits.tables.num_chunk_blocks(doubled) <= self.blocks.free + self.blocks.cached:
            self.max_chunk_tokens = doubled if doubled < self.limits.max_step_tokens else None

    def on_end(self) -> None:
        """A running sequence ended, and the pressure with it.

        The first in the queue is tried again, and none before it: it had to leave more to others.
        """
        self.pressure = Pressure()
        self.max_chunk_tokens = None
        if self.awaited is not None:
            self.awaited = Awaited(self.awaited.sequence, min(self.awaited.num_blocks, 1))
