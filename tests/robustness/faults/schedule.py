"""Which faults happen when: drawn from a seed, and nothing else.

A fault waits for a number of messages, on all links together since the schedule began, and not for a time: a busy
machine runs the same schedule slower. What ends a fault (a healed link, SIGCONT) is a time, since nothing may move
until then. The same seed is the same schedule; how the processes interleave in it is up to the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from robustness.faults.proxy import DOWN, UP
from robustness.faults.workload import NUM_FLEETING, NUM_PLAIN, NUM_REQUESTS

LEASE_TTL_S = 1.0
CLIENTS = ("a", "b")
PROCESSES = ("cachemgr", "worker", *CLIENTS)
FOLLOWER = "follower"
"""The second rank of a worker of two: "worker" is its first."""
HOLDER = "holder"
"""The process that keeps the worker's memory."""
BOTH = "cachemgr+worker"
"""Both at the same moment."""
ATTACH_LINK, STEPS_LINK = "attach", "steps"
LINKS = (ATTACH_LINK, STEPS_LINK, *(f"cache-{client}" for client in CLIENTS))
"""The links between worker and cachemgr, clients and worker, each client and cachemgr."""
LAST_MESSAGE = 220
"""Faults begin within this many messages: a schedule without faults has about twice as many."""
HOLDER_RATIO = 1 / 3
ADAPTERS_RATIO = 1 / 3
PAST_LEASE_S = (LEASE_TTL_S + 0.2, LEASE_TTL_S + 0.7)


class FaultKind(Enum):
    """The kinds of faults."""

    KILL = "kill"  # SIGKILL; what was killed is started again
    PAUSE = "pause"  # SIGSTOP, then SIGCONT
    OVERSLEEP = "oversleep"  # the same, longer than a lease lives
    CUT = "cut"  # calls fail, until the link is healed
    PARTITION = "partition"  # the same, longer than a lease lives
    FREEZE = "freeze"  # messages one way stand still: a reader that does not read
    HALF_CLOSE = "half-close"  # open streams have no more requests
    DELAY = "delay"  # messages one way come late, in order
    LOSE = "lose"  # messages one way do not come; workers' are lost with their stream
    DOUBLE = "double"  # messages one way come twice
    FULL_DISK = "full disk"  # the state directory has no room left
    BAD_DISK = "bad disk"  # of the cache: nothing can be read or written for a time; then bytes are changed, or gone


WEIGHTS = {
    FaultKind.KILL: 14,
    FaultKind.PAUSE: 10,
    FaultKind.OVERSLEEP: 4,
    FaultKind.CUT: 18,
    FaultKind.PARTITION: 3,
    FaultKind.FREEZE: 10,
    FaultKind.HALF_CLOSE: 6,
    FaultKind.DELAY: 12,
    FaultKind.LOSE: 8,
    FaultKind.DOUBLE: 12,
}
"""The weights of the kinds, of 97."""
OF_PROCESSES = (FaultKind.KILL, FaultKind.PAUSE, FaultKind.OVERSLEEP)
DURATIONS_S = {
    FaultKind.KILL: (0.0, 0.15),  # before it is started again
    FaultKind.PAUSE: (0.03, 0.5),
    FaultKind.OVERSLEEP: PAST_LEASE_S,
    FaultKind.CUT: (0.0, 0.4),
    FaultKind.PARTITION: PAST_LEASE_S,
    FaultKind.FREEZE: (0.05, 0.6),
    FaultKind.DELAY: (0.005, 0.1),  # of each message
    FaultKind.LOSE: (0.0, 0.1),  # before a worker's stream is cut
    FaultKind.FULL_DISK: (0.1, 0.6),
    FaultKind.BAD_DISK: (0.05, 0.5),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `target` is a process or a link; `way` and `count` are for faults of single messages."""

    kind: FaultKind
    target: str
    after_message: int
    duration_s: float = 0.0
    way: str = ""
    count: int = 0

    def __str__(self) -> str:
        parts = [f"at {self.after_message:3}: {self.kind.value} {self.target} {self.way}".rstrip()]
        if self.count:
            parts.append(f"{self.count} messages")
        if self.duration_s:
            parts.append(f"{self.duration_s:.3f} s")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one client: requests at once; some are cancelled after a number of tokens, one is read slowly.

    has_drafts: its engine drafts, and has given each answer before, so that drafts come true.
    """

    requests: tuple[int, ...]
    cancels: dict[int, int] = field(default_factory=dict)
    slow: int | None = None
    has_drafts: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of one seed."""

    seed: int
    faults: tuple[Fault, ...]
    tasks: dict[str, Task]


def draws_holder(seed: int) -> bool:
    """True if a schedule has a holder, unless its caller decides."""
    return random.Random(f"holder {seed}").random() < HOLDER_RATIO


def draws_adapters(seed: int) -> bool:
    """True if workers of a schedule have adapters, unless its caller decides."""
    return random.Random(f"adapters {seed}").random() < ADAPTERS_RATIO


def make_schedule(
    seed: int,
    *,
    kinds: Sequence[FaultKind] = tuple(WEIGHTS),
    num_ranks: int = 1,
    has_holder: bool = False,
) -> Schedule:
    """The schedule of a seed, with faults of these kinds only, for workers of one rank or two, or one with a holder.

    Where workers have a disk and faults are of all kinds, half of the seeds have one of the disk too.

    Others than the default's are another schedule.
    """
    processes = (*PROCESSES, *([FOLLOWER] if num_ranks == 2 else []), *([HOLDER, BOTH] if has_holder else []))
    generator = random.Random(f"schedule {seed}")
    tasks = {client: draw_task(generator) for client in CLIENTS}
    num_faults = generator.choice((1, 1, 2, 2, 3, 4))
    faults = [draw_fault(generator, kinds, processes) for _ in range(num_faults)]
    asking = random.Random(f"asking {seed}")  # of its own: what a seed was before these requests came, it still is
    tasks = {client: with_more_asked(asking, task) for client, task in tasks.items()}
    keeping = random.Random(f"keeping {seed}")
    tasks = {client: with_breakpoints(keeping, task) for client, task in tasks.items()}
    drafting = random.Random(f"drafts {seed}")  # for the same reason
    tasks = {client: replace(task, has_drafts=drafting.random() < 0.5) for client, task in tasks.items()}
    wearing = random.Random(f"bad disk {seed}")
    if has_disk(num_ranks, has_holder=has_holder) and set(WEIGHTS) <= set(kinds) and wearing.random() < 0.5:
        faults.append(draw_fault(wearing, [FaultKind.BAD_DISK]))
    return Schedule(seed, tuple(sorted(faults, key=lambda fault: fault.after_message)), tasks)


def has_disk(num_ranks: int, *, has_holder: bool) -> bool:
    """Return whether workers get a disk for their cache, which they take only with one rank."""
    return num_ranks == 1 and not has_holder


def draw_task(generator: random.Random) -> Task:
    requests = tuple(generator.sample(range(NUM_PLAIN), generator.randint(3, 6)))
    cancels = {requests[0]: generator.randint(1, 5)} if generator.random() < 0.4 else {}
    slow = requests[1] if generator.random() < 0.3 else None
    return Task(requests, cancels, slow)


def with_more_asked(generator: random.Random, task: Task) -> Task:
    """The task and some requests of tenants, with grammars and the like."""
    more = tuple(generator.sample(range(NUM_PLAIN, NUM_FLEETING), generator.randint(1, 3)))
    cancels = {more[0]: generator.randint(1, 5)} if generator.random() < 0.2 else {}
    return replace(task, requests=task.requests + more, cancels=task.cancels | cancels)


def with_breakpoints(generator: random.Random, task: Task) -> Task:
    """The task and some requests with breakpoints."""
    more = generator.sample(range(NUM_FLEETING, NUM_REQUESTS), generator.randint(1, 3))
    return replace(task, requests=(*task.requests, *more))


def draw_fault(generator: random.Random, kinds: Sequence[FaultKind], processes: Sequence[str] = PROCESSES) -> Fault:
    kind = generator.choices(kinds, [WEIGHTS.get(kind, 6) for kind in kinds])[0]
    after = generator.randint(1, LAST_MESSAGE)
    duration_s = generator.uniform(*DURATIONS_S.get(kind, (0.0, 0.0)))
    if kind is FaultKind.FULL_DISK:
        return Fault(kind, "cachemgr", after, duration_s)
    if kind is FaultKind.BAD_DISK:
        return Fault(kind, "worker", after, duration_s, generator.choice(("changed", "cut off", "removed")))
    if kind in OF_PROCESSES:
        return Fault(kind, generator.choice(processes), after, duration_s)
    link = generator.choice(LINKS)
    if kind in (FaultKind.CUT, FaultKind.PARTITION, FaultKind.HALF_CLOSE):
        return Fault(kind, link, after, duration_s)
    way = generator.choice((UP, DOWN))
    if kind is FaultKind.FREEZE:
        return Fault(kind, link, after, duration_s, way)
    return Fault(kind, link, after, duration_s, way, count=generator.randint(1, 2 if kind is FaultKind.LOSE else 6))
