"""Growing sequences against newcomers in a pool far too small: preemptions, wasted work, throughput, fairness.

    quire bench pressure

The engine's scheduler and cachemgr's books, through their messages, two steps in flight as in the engine; time is
counted in steps and no model runs, so that every run on every machine has one result. The same requests are run in
four ways: a pool with room for all, as a reference; the engine's own policy, which admits all requests that fit and
preempts the last arrived and computes its tokens again; the same policy with a host tier that has room for all
preempted sequences, with copies at no cost; and admissions that declare the longest length, so that cachemgr admits
them only with a reservation, and none is preempted.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from books import EPOCH, LEASE, Books, report_of
from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, percent, plain, summary, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.cachemgr._core import PlanRequest, StepReport
from quire.cachemgr.service import messages
from quire.client.engine.messages import decode_granted_step, encode_plan
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.plans import SchedulerLimits, StepInFlight
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason

BLOCK_SIZE = 16
NUM_BLOCKS, ROOMY_BLOCKS = 256, 8_192
NUM_REQUESTS, QUICK_REQUESTS = 192, 12
PROMPT_TOKENS, NEW_TOKENS = (32, 256), (64, 512)
STEPS_BETWEEN_ARRIVALS = 4.0
MAX_STEP_TOKENS, MAX_RUNNING = 512, 64
STEPS_IN_FLIGHT = 2
SAMPLED_TOKEN = 7
MOST_DRAWN = 100
"""Steps that the picture shows, about."""
STATES = ("full", "partial", "retired", "cached", "free")


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    arrives_at: int
    num_prompt: int
    num_new: int

    @property
    def num_tokens_to_run(self) -> int:
        """At its longest: the last token generated is never run."""
        return self.num_prompt + self.num_new - 1

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens_to_run // BLOCK_SIZE)

    @property
    def prompt(self) -> list[int]:
        """Like no other's."""
        return [self.number + 1000, *range(self.num_prompt - 1)]


@dataclass(frozen=True, slots=True)
class Result:
    """The results of all requests. Steps from arrival: to the first token, to the last one, by request."""

    way: str
    num_blocks: int
    num_steps: int
    num_generated: int
    num_computed: int
    num_wasted: int
    """Tokens that were computed before, or computed for a dropped result."""
    num_preemptions: int
    num_offloads: int
    num_restored: int
    """Tokens that came back from the host tier."""
    first_token_steps: list[int]
    last_token_steps: list[int]
    speeds: list[float]
    """New tokens per step from arrival to the last token, by request."""
    blocks: list[list[int]] = field(default_factory=list)
    """By step, as STATES."""

    @property
    def drawn_every(self) -> int:
        """The picture shows one of so many steps."""
        return max(1, len(self.blocks) // MOST_DRAWN)

    @property
    def fairness(self) -> float:
        """Jain's index of the speeds: 1 if all are equal, 1 / requests if one has everything."""
        return sum(self.speeds) ** 2 / (len(self.speeds) * sum(speed**2 for speed in self.speeds))


def draw_requests(count: int) -> list[Request]:
    generator = np.random.default_rng(0)
    arrivals = np.floor(np.cumsum(generator.exponential(STEPS_BETWEEN_ARRIVALS, count))).astype(int)
    prompts = generator.integers(*PROMPT_TOKENS, count, endpoint=True)
    new = generator.integers(*NEW_TOKENS, count, endpoint=True)
    columns = (range(count), arrivals.tolist(), prompts.tolist(), new.tolist())
    return [Request(*row) for row in zip(*columns, strict=True)]


class Run:
    """One way of serving the requests."""

    def __init__(self, way: str, num_blocks: int, *, num_host_blocks: int = 0, reserves: bool) -> None:
        self._way = way
        self._num_blocks = num_blocks
        self._books = Books(num_blocks, block_size=BLOCK_SIZE, num_host_blocks=num_host_blocks)
        self._reserves = reserves
        self._request_ids = itertools.count()
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_step_tokens=MAX_STEP_TOKENS,
                max_running_sequences=MAX_RUNNING,
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_sequence_tokens=2**16,
                vocabulary_size=2**16,
                num_host_blocks=num_host_blocks,
            )
        )
        self._flight: deque[tuple[StepInFlight, Any]] = deque()
        self._requests: dict[int, Request] = {}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._num_plans = 0
        self._num_steps = 0
        self._blocks: list[list[int]] = []

    def serve(self, requests: Sequence[Request], on_end: Callable[[], None]) -> Result:
        """All of them; `on_end` is called for each that has ended."""
        coming = deque(requests)
        while len(self._last) < len(requests):
            while coming and coming[0].arrives_at <= self._num_steps:
                self._add(coming.popleft())
            if not self._scheduler.has_work:
                self._num_steps += 1  # no request has arrived yet
                continue
            planned = self._plan()
            if len(self._flight) >= STEPS_IN_FLIGHT or not planned:
                self._settle(on_end)
        return self._result(requests)

    def _add(self, request: Request) -> None:
        params = SamplingParams(max_tokens=request.num_new, ignore_eos=True)
        limits, request_id = self._scheduler.limits, next(self._request_ids)
        (sequence,) = new_samples(limits, request_id, request.prompt, params, end_token_ids=(), seed=0)
        self._scheduler.add([sequence])
        self._requests[sequence.request_id] = request

    def _plan(self) -> bool:
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return False
        self._num_plans += 1
        asked = encode_plan(plan, lease_id=LEASE, epoch=EPOCH, request_id=str(self._num_plans))
        for admission in asked.admissions if self._reserves else ():
            request = self._requests[plan.sequences[admission.sequence_id].request_id]
            admission.reserved_token_count = request.num_tokens_to_run
        planned = self._books.ledger.plan(PlanRequest(asked.SerializeToString()), now=0.0)
        encoded = planned.encode_answer() + messages.encode_refusals(planned)
        answer = cache_service_pb2.PlanStepResponse.FromString(encoded)
        step = self._scheduler.on_planned(plan, decode_granted_step(answer))
        if step.failed:
            raise RuntimeError(f"a request failed: {step.failed[0].error}")
        grant = grant_pb2.StepGrant.FromString(planned.encode_grant("", EPOCH, 1, LEASE))
        self._flight.append((step, grant))
        return True

    def _settle(self, on_end: Callable[[], None]) -> None:
        """The oldest step has been computed: a token for each run that samples."""
        step, grant = self._flight.popleft()
        report = report_of(grant, token=SAMPLED_TOKEN)
        self._books.ledger.settle(StepReport(report.SerializeToString()))
        self._num_steps += bool(report.sequence_ids)
        sampled, tokens = list(report.sampled_sequence_ids), list(report.sampled_token_ids)
        accepted, _ = self._scheduler.on_step_done(step, sampled, tokens)
        for sequence in accepted.sequences:
            self._note(sequence.request_id, accepted.ended.get(sequence), on_end)
        if report.sequence_ids:
            self._blocks.append(self._count_blocks())

    def _note(self, request_id: int, reason: FinishReason | None, on_end: Callable[[], None]) -> None:
        request = self._requests[request_id]
        self._first.setdefault(request.number, self._num_steps - request.arrives_at)
        if reason is not None:
            self._last[request.number] = self._num_steps - request.arrives_at
            on_end()

    def _count_blocks(self) -> list[int]:
        """As STATES. Partial: a sequence's last block that has room for more tokens."""
        counts = messages.counts_of(self._books.ledger)
        sequences = self._books.ledger.inspector.sequences_from(LEASE, 0, self._num_blocks)
        partial = sum(sequence.num_scheduled < sequence.num_blocks * BLOCK_SIZE for sequence in sequences)
        return [
            *(counts.active_count - partial, partial),
            *(counts.retired_count, counts.cached_count, counts.free_count),
        ]

    def _result(self, requests: Sequence[Request]) -> Result:
        counters = self._scheduler.statistics()
        numbers = [request.number for request in requests]
        num_generated = sum(request.num_new for request in requests)
        needed = sum(request.num_tokens_to_run for request in requests)
        return Result(
            self._way,
            self._num_blocks,
            num_steps=self._num_steps,
            num_generated=num_generated,
            num_computed=counters.scheduled_tokens,
            num_wasted=counters.scheduled_tokens - needed,
            num_preemptions=counters.preemptions,
            num_offloads=counters.offloads,
            num_restored=counters.restored_tokens,
            first_token_steps=[self._first[number] for number in numbers],
            last_token_steps=[self._last[number] for number in numbers],
            speeds=[round(request.num_new / self._last[request.number], 4) for request in requests],
            blocks=self._blocks,
        )


def measure(quick: bool, progress: Progress) -> Findings:
    requests = draw_requests(QUICK_REQUESTS if quick else NUM_REQUESTS)
    num_blocks = max(request.num_blocks for request in requests) * 2 if quick else NUM_BLOCKS
    ways = [
        ("room for all", ROOMY_BLOCKS, 0, False),
        ("preempt, recompute", num_blocks, 0, False),
        ("preempt, host tier", num_blocks, ROOMY_BLOCKS, False),
        ("reserve the longest", num_blocks, 0, True),
    ]
    task = progress.add_task("", total=len(ways) * len(requests))
    results = []
    for way, blocks, host_blocks, reserves in ways:
        progress.update(task, description=way)
        run = Run(way, blocks, num_host_blocks=host_blocks, reserves=reserves)
        results.append(run.serve(requests, lambda: progress.advance(task)))
    figures = {
        "block_size": BLOCK_SIZE,
        "max_step_tokens": MAX_STEP_TOKENS,
        "max_running_sequences": MAX_RUNNING,
        "num_requests": len(requests),
        "prompt_tokens": summary([request.num_prompt for request in requests]),
        "new_tokens": summary([request.num_new for request in requests]),
        "states": STATES,
        "results": [as_json(result) for result in results],
    }
    notes = ["What copies to the host tier take is not counted: steps are."]
    return Findings([result_table(requests, results)], figures, lambda: plot(results[1:]), notes)


def as_json(result: Result) -> dict[str, Any]:
    """Quantiles in place of what there is for each request, and of the steps those that are drawn."""
    named = asdict(result) | {"fairness": result.fairness, "drawn_every_steps": result.drawn_every}
    for name in ("first_token_steps", "last_token_steps", "speeds"):
        named[name] = summary(named[name])
    return named | {"blocks": result.blocks[:: result.drawn_every]}


def result_table(requests: Sequence[Request], results: Sequence[Result]) -> Any:
    """Ways as columns."""
    num_tokens = sum(request.num_prompt + request.num_new for request in requests)
    title = f"{len(requests)} requests, {num_tokens:,} tokens, one every {STEPS_BETWEEN_ARRIVALS:g} steps"
    made = table(title, "", *(f"{result.way}, {result.num_blocks:,} blocks" for result in results))

    def add(name: str, cell: Callable[[Result], str]) -> None:
        made.add_row(name, *map(cell, results))

    add("preemptions", lambda result: f"{result.num_preemptions:,}")
    add("of these to the host tier", lambda result: f"{result.num_offloads:,}")
    add("tokens restored from there", lambda result: f"{result.num_restored:,}")
    add("tokens computed", lambda result: f"{result.num_computed:,}")
    add("of these wasted", lambda result: f"{result.num_wasted:,} ({percent(result.num_wasted / result.num_computed)})")
    add("steps until all have ended", lambda result: f"{result.num_steps:,}")
    add("new tokens per step", lambda result: f"{result.num_generated / result.num_steps:.1f}")
    add("steps to the first token, median", lambda result: f"{statistics.median(result.first_token_steps):,.0f}")
    add("steps to the first token, longest", lambda result: f"{max(result.first_token_steps):,}")
    add("steps to the last token, median", lambda result: f"{statistics.median(result.last_token_steps):,.0f}")
    add("fairness of speeds (Jain)", lambda result: f"{result.fairness:.3f}")
    return made


def plot(results: Sequence[Result]) -> Figure:
    """Blocks by state over the steps, a panel per way."""
    figure, panels = pyplot.subplots(len(results), 1, figsize=(10, 7.2), sharex=True)
    colours = ("tab:blue", "tab:cyan", "tab:orange", "0.8", "white")
    for axes, result in zip(panels, results, strict=True):
        steps = range(0, len(result.blocks), result.drawn_every)
        columns = zip(*(result.blocks[step] for step in steps), strict=True)
        drawn = axes.stackplot(steps, *columns, labels=STATES, colors=colours)
        drawn[-1].set_edgecolor("0.6")
        axes.set_ylabel("blocks")
        axes.set_ylim(0, result.num_blocks)
        axes.set_title(f"{result.way}: {result.num_preemptions} preemptions, {result.num_steps:,} steps", fontsize=10)
        plain(axes)
    panels[-1].set_xlabel("step")
    panels[0].legend(fontsize=8, loc="lower left", ncols=len(STATES))
    return figure


main = benchmark("pressure", measure, packages=("numpy",))

if __name__ == "__main__":
    main()
