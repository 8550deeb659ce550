"""Random mixed load on one ledger, every call timed: the slowest call, garbage collection included.

One client per lease, with random requests in each step: admissions of 1 to 32,768 tokens after shared prefixes, whole
or in chunks, extends of all running sequences, forks, trims with other tokens appended, releases. It keeps up to
three steps in flight; one in fifty fails or is skipped. At random a client stops renewing its lease, which expires
and is fenced, and another client begins. The pool is full of cached blocks from the start. Time is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from core import (
    MAX_SEQUENCE_TOKENS,
    Core,
    Progress,
    Report,
    Wishes,
    expire_leases,
    fence_lease,
    make_ledger,
    open_lease,
    plan,
    progress,
)
from workload import BLOCK_SIZE, Prompts, fill

from quire.cache.v1 import attach_pb2
from quire.cachemgr._core import Ledger

NUM_CLIENTS = 48
MAX_RUNNING = 64
MAX_IN_FLIGHT = 3
TTL_S = 20.0
CALL_S = 0.001
"""Simulated time that passes with each call."""
NUM_PREFIXES = 64
FAILING = 0.02
SILENT = 0.0002
NUM_WORST = 20

BINS_PER_OCTAVE = 4

Result = TypeVar("Result")

Call: TypeAlias = tuple[int, int, int, int, str]
"""The sort key, the call's number, nanoseconds, nanoseconds of processor time, a description."""


@dataclass(slots=True)
class Timings:
    """Calls by kind: a histogram with four bins per octave of microseconds, and the worst calls of all."""

    bins: dict[str, Counter[int]] = field(default_factory=dict)
    slowest: dict[str, int] = field(default_factory=dict)
    slowest_cpu: dict[str, int] = field(default_factory=dict)
    """By this thread's processor time: without what others on the machine took."""
    worst: list[Call] = field(default_factory=list)
    worst_by_cpu_time: list[Call] = field(default_factory=list)
    """Heaps of the NUM_WORST worst."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def measure(self, kind: str, call: Callable[[], tuple[Result, int]], detail: Callable[[Result], str]) -> Result:
        """Makes a call that returns its result and nanoseconds, and enters it."""
        started = time.thread_time_ns()
        result, taken = call()
        cpu = time.thread_time_ns() - started
        number = next(self._numbers)
        bin_number = math.floor(math.log2(max(taken, 1) / 1000) * BINS_PER_OCTAVE)
        self.bins.setdefault(kind, Counter())[bin_number] += 1
        self.slowest[kind] = max(self.slowest.get(kind, 0), taken)
        self.slowest_cpu[kind] = max(self.slowest_cpu.get(kind, 0), cpu)
        if len(self.worst) < NUM_WORST or taken > self.worst[0][0] or cpu > self.worst_by_cpu_time[0][0]:
            what = f"{kind}: {detail(result)}"
            keep_worst(self.worst, (taken, number, taken, cpu, what))
            keep_worst(self.worst_by_cpu_time, (cpu, number, taken, cpu, what))
        return result

    def count(self, kind: str | None = None) -> int:
        return self._merged(kind).total()

    def _merged(self, kind: str | None) -> Counter[int]:
        return sum(self.bins.values(), Counter()) if kind is None else self.bins[kind]

    def quantile_us(self, quantile: float, kind: str | None = None) -> float:
        """Upper edge of the bin that the quantile is in: at most 19 % too much."""
        bins = self._merged(kind)
        left = quantile * bins.total()
        for bin_number in sorted(bins):
            left -= bins[bin_number]
            if left <= 0:
                return float(2 ** ((bin_number + 1) / BINS_PER_OCTAVE))
        return 0.0

    def summary(self) -> dict[str, Any]:
        rows = {}
        for kind in (None, *sorted(self.bins)):
            kinds = self.bins if kind is None else (kind,)
            rows[kind or "all"] = {
                "calls": self.count(kind),
                "p50_us": self.quantile_us(0.5, kind),
                "p99_us": self.quantile_us(0.99, kind),
                "p9999_us": self.quantile_us(0.9999, kind),
                "max_us": max(self.slowest[each] for each in kinds) / 1000,
                "max_cpu_us": max(self.slowest_cpu[each] for each in kinds) / 1000,
            }
        histogram = {
            f"{2 ** (number / BINS_PER_OCTAVE):.2f}": count for number, count in sorted(self._merged(None).items())
        }
        worst = {"worst": as_json(self.worst), "worst_by_cpu_time": as_json(self.worst_by_cpu_time)}
        return {"kinds": rows, "histogram_from_us": histogram} | worst


def keep_worst(heap: list[Call], call: Call) -> None:
    heapq.heappush(heap, call)
    if len(heap) > NUM_WORST:
        heapq.heappop(heap)


def as_json(calls: list[Call]) -> list[dict[str, Any]]:
    """Worst first."""
    return [
        {"us": taken / 1000, "cpu_us": cpu / 1000, "call": number, "what": what}
        for _, number, taken, cpu, what in sorted(calls, reverse=True)
    ]


class Client:
    """One lease and its client's state. Refused sequences are released."""

    def __init__(self, load: MixedLoad, lease_id: str) -> None:
        self._load = load
        self.lease_id = lease_id
        self.running: list[int] = []
        self.in_flight: deque[Report] = deque()
        self._given_up: list[int] = []
        self._ids = itertools.count(1)

    def wish(self) -> Wishes:
        """The requests for the next step."""
        random_, running = self._load.random, self.running
        wishes = Wishes(self._given_up, [], [], [], {}, [])
        self._given_up = []
        for _ in range(random_.choice((0, 0, 0, 1, 2)) + 4 * (len(running) > MAX_RUNNING)):
            if running:
                wishes.releases.append(running.pop(random_.randrange(len(running))))
        trimmed = {seq_id for seq_id in running if random_.random() < 0.01 and self._trim(wishes, seq_id)}
        for seq_id in running:
            count = 1 if seq_id in trimmed else self._to_compute(seq_id)
            if count:
                wishes.extends.append((seq_id, count))
        if running and random_.random() < 0.1:
            self._fork(wishes, random_.choice(running))
        while random_.random() < 0.4 and len(running) < MAX_RUNNING:
            tokens, seq_id = self._load.prompt(), next(self._ids)
            wishes.admissions.append((seq_id, tokens, random_.choice((0, 0, 512))))
            running.append(seq_id)
        return wishes

    def _sequence(self, seq_id: int) -> Progress | None:
        return progress(self._load.ledger, self.lease_id, seq_id)

    def _to_compute(self, seq_id: int) -> int:
        """Tokens for the next run: a chunk of the known ones, or the one being sampled."""
        sequence = self._sequence(seq_id)
        if sequence is None:
            return 0
        return min(512, max(sequence.num_known - sequence.num_scheduled, 1))

    def _trim(self, wishes: Wishes, seq_id: int) -> bool:
        """Takes back some tokens and puts one other in their place."""
        sequence = self._sequence(seq_id)
        if sequence is None or sequence.num_known < 2:
            return False
        kept = max(1, min(sequence.num_computed, sequence.num_known - 1 - self._load.random.randrange(20)))
        wishes.trims.append((seq_id, kept))
        wishes.appends[seq_id] = self._load.random.randrange(1000)
        return True

    def _fork(self, wishes: Wishes, parent_id: int) -> None:
        sequence = self._sequence(parent_id)
        if sequence is None or any(seq_id == parent_id for seq_id, _ in wishes.trims):
            return
        child_ids = [next(self._ids) for _ in range(self._load.random.randint(1, 4))]
        wishes.forks.append((parent_id, child_ids, sequence.num_known))
        self.running += child_ids

    def give_up(self, refused_ids: set[int]) -> None:
        """Releases the refused sequences with the next step."""
        self.running = [seq_id for seq_id in self.running if seq_id not in refused_ids]
        self._given_up += refused_ids


class MixedLoad:
    """The ledger, its clients and the timings."""

    def __init__(self, num_blocks: int, *, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.timings = Timings()
        self.num_refused: Counter[str] = Counter()
        self.now = 0.0
        self._prompts = Prompts(seed=2)
        self._prefixes = [self._prompts.tokens(4096) for _ in range(NUM_PREFIXES)]
        core = Core(0, ledger=make_ledger(num_blocks))
        fill(core, self._prompts, num_blocks)
        self.ledger: Ledger = core.ledger
        self._lease_numbers = itertools.count()
        self._clients: list[Client] = []
        while len(self._clients) < NUM_CLIENTS:
            self._begin_client()

    def prompt(self) -> list[int]:
        """Lengths even on a logarithmic scale, from one token to the longest sequence; half begin like others."""
        length = int(2 ** self.random.uniform(0, math.log2(MAX_SEQUENCE_TOKENS - 1024)))
        tokens = self._prompts.tokens(length)
        if self.random.random() < 0.5:
            shared = self.random.choice(self._prefixes)
            return (shared[: BLOCK_SIZE * self.random.randint(1, 256)] + tokens)[: MAX_SEQUENCE_TOKENS - 1024]
        return tokens

    def run(self, seconds: float, on_progress: Callable[[float], None] = lambda _: None) -> None:
        """Until this much time has passed."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            for _ in range(50):
                self._turn(self.random.choice(self._clients))
            self._expire()
            on_progress(passed)

    def _turn(self, client: Client) -> None:
        """One call for one client: a plan, or the report of the oldest step in flight."""
        self.now += CALL_S
        if self.random.random() < SILENT:
            self._clients.remove(client)
            self._begin_client()
            return
        if len(client.in_flight) >= MAX_IN_FLIGHT or (client.in_flight and self.random.random() < 0.5):
            self._settle(client)
        else:
            self._plan(client)

    def _plan(self, client: Client) -> None:
        wishes = client.wish()
        request = wishes.request()
        planned = self.timings.measure(
            "plan",
            lambda: plan(self.ledger, client.lease_id, request, now=self.now),
            lambda _: describe(wishes),
        )
        client.in_flight.append(Report(planned))
        client.give_up({seq_id for _, seq_id, _ in planned.refusals})
        self.num_refused.update(refusal.reason.value for _, _, refusal in planned.refusals)

    def _settle(self, client: Client) -> None:
        report = client.in_flight.popleft()
        outcome = attach_pb2.STEP_OUTCOME_COMPUTED
        if report.is_doomed(self.ledger, client.lease_id) or self.random.random() < FAILING:
            outcome = self.random.choice((attach_pb2.STEP_OUTCOME_FAILED, attach_pb2.STEP_OUTCOME_SKIPPED))
        self.timings.measure(
            "settle",
            lambda: (None, report.settle(self.ledger, client.lease_id, outcome)),
            lambda _: f"{attach_pb2.StepOutcome.Name(outcome)}, {report.num_runs} runs",
        )

    def _expire(self) -> None:
        expired = self.timings.measure(
            "expire_leases", lambda: expire_leases(self.ledger, now=self.now), lambda found: f"{len(found)} expired"
        )
        for lease_id, num_sequences in expired.items():
            self._clients = [client for client in self._clients if client.lease_id != lease_id]
            self._fence(lease_id, num_sequences)
        while len(self._clients) < NUM_CLIENTS:
            self._begin_client()

    def _fence(self, lease_id: str, num_sequences: int) -> None:
        self.timings.measure(
            "lease_fenced", lambda: (None, fence_lease(self.ledger, lease_id)), lambda _: f"{num_sequences} sequences"
        )

    def _begin_client(self) -> None:
        lease_id = f"client {next(self._lease_numbers)}"
        self.timings.measure(
            "open_lease",
            lambda: (None, open_lease(self.ledger, lease_id, ttl_s=TTL_S, now=self.now)),
            lambda _: "a new client",
        )
        self._clients.append(Client(self, lease_id))


def describe(wishes: Wishes) -> str:
    """The size of the requests."""
    num_tokens = sum(len(tokens) for _, tokens, _ in wishes.admissions)
    return (
        f"{len(wishes.releases)} releases, {len(wishes.trims)} trims, {len(wishes.forks)} forks, "
        f"{len(wishes.extends)} extends, {len(wishes.admissions)} admissions of {num_tokens} tokens"
    )
