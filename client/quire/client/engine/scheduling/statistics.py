"""The scheduler's numbers. Pure."""

from dataclasses import dataclass, fields

from quire.client.engine.scheduling.flight import Flight
from quire.client.engine.scheduling.queues import Queues


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Present numbers of sequences by state, and counters since the beginning."""

    num_waiting: int
    num_running: int
    num_following: int
    num_draining: int
    num_offloaded: int
    num_steps_in_flight: int
    planned_steps: int
    failed_steps: int
    admissions: int
    admitted_tokens: int
    cached_tokens: int
    forks: int
    preemptions: int
    offloads: int
    restores: int
    restored_tokens: int
    scheduled_tokens: int
    sampled_tokens: int
    discarded_tokens: int
    refusals: int
    resets: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(slots=True)
class Counters:
    """Counters since the beginning. Each piece of the scheduler counts its own work."""

    planned_steps: int = 0
    failed_steps: int = 0
    admissions: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    forks: int = 0
    preemptions: int = 0
    offloads: int = 0
    restores: int = 0
    restored_tokens: int = 0
    scheduled_tokens: int = 0
    sampled_tokens: int = 0
    discarded_tokens: int = 0
    refusals: int = 0
    resets: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def statistics_of(queues: Queues, flight: Flight, counters: Counters) -> SchedulerStatistics:
    """Return the present numbers and the counters. Cost: the sequences that wait, once one was offloaded."""
    away = (*queues.waiting, *queues.draining) if counters.offloads or queues.offloads else ()
    return SchedulerStatistics(
        num_waiting=len(queues.waiting) + len(queues.apart) + len(queues.postponed),
        num_running=len(queues.running),
        num_following=sum(map(len, queues.followers.values())),
        num_draining=len(queues.draining),
        num_offloaded=sum(sequence.host_id is not None for sequence in away),
        num_steps_in_flight=len(flight),
        **{f.name: getattr(counters, f.name) for f in fields(counters)},
    )
