"""All of one schedule, drawn from its seed: the cluster's features, the callers' requests, and the faults.

Each seed turns features and kinds of faults on and off (swarm testing), so that rare pairs meet: a feature that is in
every schedule hides what happens without it. The parts are drawn from numbers of their own, so that leaving one out
changes no other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import Enum

from robustness.simulation.gateway import Call
from robustness.simulation.network import WINDOW_BYTES
from robustness.simulation.workload import NUM_REQUESTS, ModelKind, requests

from quire.client.engine.caching import Breakpoint
from quire.client.engine.sampling import SamplingParams

LAST_CALLBACK = 3_000
"""Faults begin within so many callbacks of all processes together: most schedules without faults have fewer."""
LEASE_TTL_S = 1.0
KEEPS_S = (1.0, 2.0, 10.0, 120.0)
LONGEST_KEEP_S = max(KEEPS_S)
PAST_LEASE_S = (LEASE_TTL_S + 0.2, LEASE_TTL_S + 1.5)


class FaultKind(Enum):
    """The kinds of faults. OF_PROCESSES and the like say what one is a fault of."""

    KILL = "kill"  # nothing of the process runs any more; it is started again
    TERMINATE = "terminate"  # SIGTERM: it drains, ends, and is started again
    PAUSE = "pause"  # SIGSTOP, then SIGCONT
    OVERSLEEP = "oversleep"  # the same, longer than a lease lives
    SLOW = "slow"  # each callback takes 20 to 500 times as long: a busy machine, a slow disk
    CLOCK = "clock"  # the wall clock of its machine jumps
    CUT = "cut"  # connections break
    PARTITION = "partition"  # nothing passes, for less or more than a lease
    FREEZE = "freeze"  # nothing passes one way
    HALF_CLOSE = "half-close"  # open streams have no more requests
    DELAY = "delay"  # the next messages come late
    LOSE_ANSWER = "lost answer"  # the next unary answer is lost with its connection
    DOUBLE = "doubled call"  # the next unary call is made twice
    POWER_LOSS = "power loss"  # cachemgr's machine starts again; what was written last is lost or torn
    FULL_DISK = "full disk"  # the state directory has no room
    FAIL_STEP = "failed step"  # the model raises
    DAMAGE = "damage"  # a grant can't be applied: the worker begins a new epoch
    HANG = "hang"  # a step takes very long
    LATE_REPORTS = "late reports"  # the worker's reports wait
    TWICE = "doubled report"  # the worker's next report comes twice
    LIE = "lie"  # the worker's next report is wrong: from then on answers may be, too
    LOST_RANK = "lost rank"  # the second rank of a worker ends
    RESET = "reset"  # an operator empties the prefix cache
    DETACH = "detach"  # the worker's stream breaks
    DISK_SLOW = "slow disk"  # the worker's: each call takes many times as long
    DISK_FULL = "full disk of a worker"  # no file can be made, and some bytes that were freed are not there again
    DISK_ERRORS = "disk errors"  # calls fail
    DISK_ROT = "changed bytes"  # a byte changes on the disk
    DISK_KILL = "kill in a call"  # the worker is killed in its next call of the disk but so many
    DISK_POWER = "power loss in a call"  # its machine starts again there: what was not flushed is lost or torn
    KILL_BOTH = "kill of both"  # of cachemgr and of a worker; in half of the cases the machine of the disk starts again
    DISK_RESET = "reset until it is done"  # an operator resets a tenant or all, and repeats the call while it fails


OF_PROCESSES = (FaultKind.KILL, FaultKind.TERMINATE, FaultKind.PAUSE, FaultKind.OVERSLEEP, FaultKind.SLOW)
OF_LINKS = (
    *(FaultKind.CUT, FaultKind.PARTITION, FaultKind.FREEZE, FaultKind.HALF_CLOSE, FaultKind.DELAY),
    *(FaultKind.LOSE_ANSWER, FaultKind.DOUBLE),
)
LIKELY = {FaultKind.LIE: 0.1}
"""Of the kinds that are possible, those that are rarely drawn: the answers behind them can't be compared."""
OF_CACHEMGR = (FaultKind.CLOCK, FaultKind.POWER_LOSS, FaultKind.FULL_DISK, FaultKind.RESET)
OF_WORKERS = (
    *(FaultKind.FAIL_STEP, FaultKind.DAMAGE, FaultKind.HANG, FaultKind.LATE_REPORTS, FaultKind.DETACH),
    *(FaultKind.TWICE, FaultKind.LIE, FaultKind.LOST_RANK),
)
OF_DISKS = (
    *(FaultKind.DISK_SLOW, FaultKind.DISK_FULL, FaultKind.DISK_ERRORS, FaultKind.DISK_ROT),
    *(FaultKind.DISK_KILL, FaultKind.DISK_POWER, FaultKind.KILL_BOTH, FaultKind.DISK_RESET),
)
FIRST_WITH_DISK = 10_000_000_000
"""Seeds from here on have a disk below the host tier. What they draw for it is drawn from numbers of its own."""
MOST_FAILED_STEPS = 2
NEED_STATE = (FaultKind.POWER_LOSS, FaultKind.FULL_DISK)


@dataclass(frozen=True, slots=True)
class DiskFeatures:
    """A worker's disk, and its sizes."""

    num_blocks: int
    file_bytes: int
    """The most bytes of a file."""
    write_rate: float


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of a cluster, and their sizes."""

    model: ModelKind = ModelKind.FULL
    block_size: int = 4
    num_blocks: int = 80
    num_host_blocks: int = 0
    host_cache_share: float = 0.0
    max_num_seqs: int = 8
    max_step_tokens: int = 48
    runs_ahead: bool = False
    num_ranks: int = 1
    num_pools: int = 1
    num_gateways: int = 1
    uses_router: bool = False
    has_shares: bool = False
    keeps_state: bool = False
    policy: str = "lineage"
    has_watcher: bool = False
    has_breakpoints: bool = False
    has_drafts: bool = False
    adapts_drafts: bool = False
    step_s: float = 0.002
    delay_s: float = 0.0003
    callback_s: float = 5e-6
    window_bytes: int = WINDOW_BYTES
    """Of a stream: messages that are longer are written in parts, and wait for their reader."""
    call_timeout_s: float = 1.0
    """Of clients. An engine asks again for a plan after a second, and gives the first one up."""
    failover_after_s: float = 0.5
    """A router's."""
    disk: DiskFeatures | None = field(default=None, repr=False)
    """Of each worker; left out of the text by which `simulated.py` knows what the seeds without one draw."""

    def names(self) -> list[str]:
        """The features that are on, in words: for the pairs that have met."""
        flags = (
            "runs_ahead",
            "uses_router",
            "has_shares",
            "keeps_state",
            "has_watcher",
            "has_breakpoints",
            "has_drafts",
            "adapts_drafts",
        )
        return [
            f"model: {self.model.value}",
            f"policy: {self.policy}",
            *(name.replace("_", " ") for name in flags if getattr(self, name)),
            *(["host tier"] if self.num_host_blocks else []),
            *(["copies of evicted blocks"] if self.host_cache_share else []),
            *(["small windows"] if self.window_bytes < WINDOW_BYTES else []),
            *(["late answers"] if self.call_timeout_s > 1.0 else []),
            *(["disk"] if self.disk is not None else []),
            *([f"{self.num_ranks} ranks"] if self.num_ranks > 1 else []),
            *([f"{self.num_pools} pools"] if self.num_pools > 1 else []),
            *([f"{self.num_gateways} gateways"] if self.num_gateways > 1 else []),
        ]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at a number of callbacks, of a process or of a link, which has two processes' names.

    size      seconds, or how many times slower
    way       which of both ways, or which of the lies
    """

    kind: FaultKind
    target: tuple[str, ...]
    at_callback: int
    size: float = 0.0
    way: int = 0

    def __str__(self) -> str:
        return f"at callback {self.at_callback}: {self.kind.value} {' - '.join(self.target)} {self.size:.3f}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of one seed."""

    seed: int
    features: Features
    calls: tuple[tuple[Call, ...], ...]
    """By gateway."""
    faults: tuple[Fault, ...]


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    features = draw_features(random.Random(f"features {seed}"))
    disk = random.Random(f"disk of a worker {seed}") if seed >= FIRST_WITH_DISK else None
    if disk is not None:
        features = with_disk(disk, features)
    calls = random.Random(f"calls {seed}")
    drawn = tuple(draw_calls(calls, features) for _ in range(features.num_gateways))
    # Of a generator of its own, so that everything else of a seed stays as it was without breakpoints.
    keeping = random.Random(f"breakpoints {seed}")
    if keeping.random() < 0.4:
        features = replace(features, has_breakpoints=True)
        drawn = tuple(tuple(draw_breakpoints(keeping, call) for call in each) for each in drawn)
    # Of another one, too.
    drafting = random.Random(f"drafts {seed}").random()
    features = replace(features, has_drafts=drafting < 0.5, adapts_drafts=drafting < 0.2)
    faults = draw_faults(random.Random(f"faults {seed}"), features)
    if disk is not None:
        drawn = tuple(draw_later_calls(disk, calls) for calls in drawn)
        faults = draw_disk_faults(disk, features, faults)
    return Schedule(seed, features, drawn, faults)


def draw_features(generator: random.Random) -> Features:
    uses_router = generator.random() < 0.2
    model = generator.choice((ModelKind.FULL, ModelKind.FULL, ModelKind.WINDOW, ModelKind.BOTH, ModelKind.CHUNKS))
    block_size = generator.choice((2, 4, 4, 8))
    least = least_blocks(model, block_size)
    num_blocks = least + int(least * generator.choice((0.0, 0.3, 1.0, 3.0)))
    num_host_blocks = generator.choice((0, 0, least, 3 * least))
    return Features(
        model=model,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        host_cache_share=0.5 if num_host_blocks == least else 0.0,
        max_num_seqs=generator.choice((3, 8, 16)),
        max_step_tokens=generator.choice((8, 16, 48, 256, 256)),
        runs_ahead=generator.random() < 0.5,
        num_ranks=generator.choice((1, 1, 1, 1, 2)),
        num_pools=2 if uses_router else 1,
        num_gateways=generator.choice((1, 1, 2)),
        uses_router=uses_router,
        has_shares=generator.random() < 0.3,
        keeps_state=generator.random() < 0.5,
        policy=generator.choice(("lineage", "lineage", "lru")),
        has_watcher=generator.random() < 0.3,
        step_s=generator.choice((0.0005, 0.002, 0.01)),
        delay_s=generator.choice((0.00005, 0.0003, 0.002)),
        callback_s=generator.choice((2e-6, 5e-6, 30e-6)),
        window_bytes=generator.choice((WINDOW_BYTES, WINDOW_BYTES, 400)),
        call_timeout_s=generator.choice((1.0, 3.0)),
        failover_after_s=generator.choice((0.02, 0.5)),
    )


def least_blocks(model: ModelKind, block_size: int) -> int:
    """The blocks of a pool that the longest sequence needs, and two more."""
    num_groups = 2 if model in (ModelKind.BOTH, ModelKind.CHUNKS) else 1
    return num_groups * -(-66 // block_size) + 2


def with_disk(generator: random.Random, features: Features) -> Features:
    """The same features, where a disk can be: one rank, copies of evicted blocks. And little room."""
    least = least_blocks(features.model, features.block_size)
    num_host_blocks = generator.choice((least // 2, least, 2 * least))
    disk = DiskFeatures(
        num_blocks=generator.choice((3, least, 3 * least, 10 * least)),
        file_bytes=generator.choice((1_000, 3_000, 1 << 20)),
        write_rate=generator.choice((1e4, 1e9, 1e9)),
    )
    return replace(
        features,
        num_blocks=least + generator.choice((0, least // 3, least)),
        num_host_blocks=num_host_blocks,
        host_cache_share=generator.choice((0.5, 1.0, 1.0)),
        num_ranks=1,
        disk=disk,
    )


def draw_later_calls(generator: random.Random, calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """These calls, and others that begin as one of them and come later, when copies may be on a disk."""
    every, known = requests(), {call.request for call in calls}
    beginnings = {beginning_of(call.request) for call in calls}
    single = [n for n in range(NUM_REQUESTS) if n not in known and isinstance(every[n].params, SamplingParams)]
    alike = [number for number in single if beginning_of(number) in beginnings]
    later = generator.sample(alike, min(len(alike), 4)) + generator.sample(single, 3)
    last_s = generator.choice((0.2, 1.0, 4.0))
    return *calls, *(Call(number, after_s=generator.uniform(0.05, last_s)) for number in dict.fromkeys(later))


def beginning_of(number: int) -> tuple[object, ...]:
    """Requests with the same one can use each other's blocks."""
    request = requests()[number]
    return request.params.tenant, request.cache.salt, request.prompt[:8]


def draw_disk_faults(generator: random.Random, features: Features, others: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """One to four faults of a few kinds that are about disks, with some of the others."""
    kinds = generator.sample(OF_DISKS, generator.randint(1, 4))
    drawn = [draw_fault(generator, generator.choice(kinds), features) for _ in range(generator.choice((1, 2, 3, 4)))]
    kept = [fault for fault in others if generator.random() < 0.5]
    return tuple(sorted(drawn + kept, key=lambda fault: fault.at_callback))


def draw_calls(generator: random.Random, features: Features) -> tuple[Call, ...]:
    """One to six requests; most come at once, and some callers leave or read slowly."""
    every = requests()
    # A router has no beam search, and a search has to fit the pool with all of its beams.
    has_beams = not features.uses_router and features.num_blocks * features.block_size > 450
    several = [n for n in range(NUM_REQUESTS) if has_beams or isinstance(every[n].params, SamplingParams)]
    calls = [Call(number) for number in generator.sample(several, generator.choice((1, 2, 2, 3, 3, 4, 6)))]
    if generator.random() < 0.3:
        calls = [replace(call, after_s=generator.uniform(0.0, 0.1)) for call in calls]
    if generator.random() < 0.3:
        calls[0] = replace(calls[0], leaves_after=generator.randint(1, 5))
    if generator.random() < 0.2:
        calls[-1] = replace(calls[-1], reads_s=0.03)
    if generator.random() < 0.3:
        mean_s = generator.choice((features.step_s, 0.05, 1.0))
        calls = [
            replace(call, leaves_after_s=generator.expovariate(1 / mean_s)) if generator.random() < 0.5 else call
            for call in calls
        ]
    return tuple(calls)


def draw_breakpoints(generator: random.Random, call: Call) -> Call:
    """The same call; of three in four the beginnings of the prompt are kept, one to four of them."""
    length = len(requests()[call.request].prompt)
    ends = sorted(generator.sample(range(1, length + 1), min(length, generator.choice((1, 1, 2, 4)))))
    breakpoints = tuple(Breakpoint(end, generator.choice(KEEPS_S)) for end in ends)
    explains = generator.random() < 0.5
    return replace(call, breakpoints=breakpoints, explains_miss=explains) if generator.random() < 0.75 else call


def draw_faults(generator: random.Random, features: Features) -> tuple[Fault, ...]:
    """None to five, of a few kinds; and often the end of a worker with requests that can move."""
    possible = [
        kind
        for kind in FaultKind
        if kind not in OF_DISKS
        and (features.keeps_state or kind not in NEED_STATE)
        and (features.num_ranks > 1 or kind is not FaultKind.LOST_RANK)
        and generator.random() < LIKELY.get(kind, 1.0)
    ]
    kinds = generator.sample(possible, generator.randint(1, 6))
    count = generator.choice((0, 1, 1, 2, 2, 3, 4, 5))
    drawn = [draw_fault(generator, generator.choice(kinds), features) for _ in range(count)]
    failing = [fault for fault in drawn if fault.kind is FaultKind.FAIL_STEP]
    # An engine gives a request up that is in three steps that fail.
    drawn = [fault for fault in drawn if fault not in failing[MOST_FAILED_STEPS:]]
    if features.uses_router and generator.random() < 0.5:  # its requests move
        worker = f"worker-{generator.randrange(features.num_pools)}"
        drawn.append(Fault(FaultKind.KILL, (worker,), generator.randint(200, 1_000), generator.uniform(0.5, 4.0)))
    return tuple(sorted(drawn, key=lambda fault: fault.at_callback))


def draw_fault(generator: random.Random, kind: FaultKind, features: Features) -> Fault:
    workers = [f"worker-{number}" for number in range(features.num_pools)]
    gateways = [f"gateway-{number}" for number in range(features.num_gateways)]
    links = [(peer, "cachemgr") for peer in (*gateways, *workers)]
    watchers = ["watcher"] if features.has_watcher else []
    links += [(watcher, "cachemgr") for watcher in watchers]
    links += [(gateway, worker) for gateway in gateways for worker in workers]
    if kind in OF_PROCESSES:
        target: tuple[str, ...] = (generator.choice(("cachemgr", *workers, *gateways, *watchers)),)
    elif kind in OF_LINKS:
        target = generator.choice(links)
    else:
        target = (generator.choice(workers) if kind in OF_WORKERS + OF_DISKS else "cachemgr",)
    low, high = SIZES.get(kind, (0.0, 0.0))
    # Half of them early: that is where everything begins.
    last = generator.choice((LAST_CALLBACK // 8, LAST_CALLBACK // 3, LAST_CALLBACK))
    return Fault(kind, target, generator.randint(1, last), generator.uniform(low, high), generator.randrange(8))


SIZES = {
    FaultKind.KILL: (0.0, 0.5),  # seconds before it is started again
    FaultKind.TERMINATE: (0.0, 0.5),
    FaultKind.PAUSE: (0.001, 0.5),
    FaultKind.OVERSLEEP: PAST_LEASE_S,
    FaultKind.SLOW: (20.0, 500.0),  # times
    FaultKind.CLOCK: (-100.0, 100.0),
    FaultKind.PARTITION: (0.01, PAST_LEASE_S[1] + 1.5),
    FaultKind.FREEZE: (0.01, 1.0),
    FaultKind.DELAY: (0.001, 0.3),
    FaultKind.POWER_LOSS: (0.0, 0.5),
    FaultKind.FULL_DISK: (0.01, 0.6),
    FaultKind.HANG: (0.05, 1.5),
    FaultKind.LATE_REPORTS: (0.001, 0.5),
    FaultKind.DISK_SLOW: (0.05, 3.0),
    FaultKind.DISK_FULL: (0.05, 15.0),
    FaultKind.DISK_ERRORS: (0.01, 3.0),
    FaultKind.DISK_KILL: (0.0, 40.0),  # calls before it
    FaultKind.DISK_POWER: (0.0, 40.0),
    FaultKind.KILL_BOTH: (0.0, 0.5),
}
"""Seconds, where nothing else is said."""
