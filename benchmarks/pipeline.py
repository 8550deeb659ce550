"""The engine, the books and the worker's host over a device that sleeps: the time between two steps, and where it goes.

Everything of a decode step but the device is the real thing: the scheduler, cachemgr's core, the gate, the executor's
tables, batches and static memory, both of the worker's threads. They share one process and its interpreter, without
gRPC: `a boundary` lets each answer come a while later instead, as through two services.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from empty_model import EmptyModel
from in_process import LEASE_TTL_S, InProcessAnswer, InProcessCache, InProcessServices, InProcessWorker
from report import Findings, benchmark, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2
from quire.client import Engine, EngineConfig, SamplingParams
from quire.compute.v1 import worker_service_pb2
from quire.kernels.ring_layout import TAGS
from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor, LaunchedStep, StepResult
from quire.worker.run.graphs import Stage, StaticDecode, Whole
from quire.worker.sampling.sampler import Way

BLOCK_SIZE = 16
PROMPT_TOKENS = 16
PERIOD_TO_REACH_MS = 0.7
"""Of one sequence on a device that takes 0.6 ms, with four steps in flight."""


@dataclass(frozen=True, slots=True)
class Row:
    """A load: sequences, the device's time of a step, steps in flight, the graphs of a step, and the boundary's time
    of an answer."""

    num_seqs: int
    step_ms: float
    in_flight: int
    step_graph: str
    boundary_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Of decode steps with all sequences: the time from one to the next, the processor's share of it, the device's
    waiting, and the model thread's part, all in ms and medians but the second, which is a mean."""

    row: Row
    period_ms: float
    host_ms: float
    idle_ms: float
    launch_ms: float
    num_steps: int


ROWS = (
    Row(1, 0.6, 2, "parts"),
    Row(1, 0.6, 4, "parts"),
    Row(1, 0.6, 4, "one"),
    Row(1, 0.6, 2, "one", boundary_ms=1.0),
    Row(1, 0.6, 4, "one", boundary_ms=1.0),
    Row(32, 1.5, 4, "parts"),
    Row(32, 1.5, 4, "one"),
    Row(256, 5.0, 2, "parts"),
    Row(256, 5.0, 2, "one"),
)


class SleepingModel(EmptyModel):
    """A model with static decode steps, which nothing computes."""

    class _OnDevice(AttentionStep):
        @classmethod
        def reads_lengths_on_device(cls, specs: Any) -> bool:
            return True

    step_kind = _OnDevice

    @property
    def attention_specs(self) -> Any:
        return self.specs


class SleepingDecode(StaticDecode):
    """Static memory with graphs that hold nothing. A whole step writes the tags of its tokens, as the device does."""

    def _replay(self, stage: Stage | Way | Whole, bucket: int) -> None:
        if isinstance(stage, Whole) and self.ring is not None:
            slot = self.ring._slot
            num_seqs = int(self.ring._host_slots[slot, 1])
            self.ring._host_words[slot, :num_seqs] = (self.ring._turn % TAGS + 1) << 32


class SleepingStep(LaunchedStep):
    """A launched step with tokens that are there at a given time."""

    def __init__(self, launched: LaunchedStep, ends_at_s: float, step_s: float) -> None:
        self._launched, self._ends_at_s, self._step_s = launched, ends_at_s, step_s
        self.result = launched.result

    def collect(self) -> StepResult:
        """See LaunchedStep.collect."""
        time.sleep(max(0.0, self._ends_at_s - time.perf_counter()))
        return replace(self._launched.collect(), prepare_s=0.0, forward_s=self._step_s, sample_s=0.0)


class SleepingExecutor(Executor):
    """An executor of steps that take a device some time, one after the other."""

    def __init__(self, model: PagedModel, pool: KVPool, *, max_num_seqs: int, row: Row) -> None:
        width = -(-model.max_model_len // pool.block_size)
        decode = SleepingDecode(model, pool, max_num_seqs=max_num_seqs, max_blocks_per_seq=width)
        if row.step_graph == "one":
            decode.make_ring()
        super().__init__(model, pool, max_num_seqs=max_num_seqs, decode=decode)
        self.runs_ahead = True
        self._step_s = row.step_ms / 1e3
        self._free_at_s = 0.0
        self._num_seqs = row.num_seqs
        self.begun_s: list[float] = []
        """The time at which the device began each decode step of all sequences."""
        self.idle_s: list[float] = []
        self.launch_s: list[float] = []

    def launch(self, step: AcceptedStep) -> LaunchedStep:
        """See Executor.launch."""
        started = time.perf_counter()
        launched = super().launch(step)
        now = time.perf_counter()
        if not step.grant.run_sequence_ids:
            return launched
        if list(step.grant.run_token_counts) == [1] * self._num_seqs:
            self.begun_s.append(max(now, self._free_at_s))
            self.idle_s.append(max(0.0, now - self._free_at_s))
            self.launch_s.append(now - started)
        self._free_at_s = max(now, self._free_at_s) + self._step_s
        return SleepingStep(launched, self._free_at_s, self._step_s)


class Cache(InProcessCache):
    """Plans that are answered a while later."""

    delay_s = 0.0

    async def plan(self, request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        """See CacheApi.plan."""
        answer = await super().plan(request)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return answer


class Worker(InProcessWorker):
    """A worker on a GPU as clients are told, with answers that come a while later."""

    device, delay_s = "cpu", 0.0

    async def get_model(self) -> worker_service_pb2.GetModelResponse:
        """See WorkerApi.get_model."""
        model = await super().get_model()
        model.device = self.device
        return model

    async def run(self, request: worker_service_pb2.RunStepRequest) -> InProcessAnswer:
        """See WorkerApi.run."""
        answer = await super().run(request)
        return DelayedAnswer(answer, self.delay_s) if self.delay_s else answer


class DelayedAnswer(InProcessAnswer):
    """The answer of a step, a while after its end."""

    def __init__(self, answer: InProcessAnswer, delay_s: float) -> None:
        async def delayed() -> worker_service_pb2.RunStepResponse:
            response = await answer.result()
            await asyncio.sleep(delay_s)
            return response

        self._task = asyncio.ensure_future(delayed())

    async def result(self) -> worker_service_pb2.RunStepResponse:
        """See StepAnswer.result."""
        return await asyncio.shield(self._task)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the collector from what is there, as the services do."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def measure_row(row: Row, num_new: int) -> Pace:
    """Decode so many tokens of each sequence."""
    model = SleepingModel(max_num_seqs=row.num_seqs, max_model_len=PROMPT_TOKENS + num_new + 8)
    executors: list[SleepingExecutor] = []

    def make_executor(model: PagedModel, pool: KVPool, *, max_num_seqs: int) -> Executor:
        executors.append(SleepingExecutor(model, pool, max_num_seqs=max_num_seqs, row=row))
        return executors[0]

    services = InProcessServices(
        model,
        num_blocks=row.num_seqs * -(-model.max_model_len // BLOCK_SIZE) + 2,
        block_size=BLOCK_SIZE,
        max_num_seqs=row.num_seqs,
        max_step_tokens=8192,
        make_executor=make_executor,
    )
    cache, worker = Cache(services), Worker(services)
    cache.delay_s = worker.delay_s = row.boundary_ms / 1e3
    worker.device = "cuda:0" if row.in_flight > 2 else "cpu"
    config = EngineConfig(
        max_step_tokens=8192, max_running_sequences=row.num_seqs, lease_ttl_s=LEASE_TTL_S, verify=False
    )
    try:
        async with Engine(cache, lambda _: worker, config=config) as engine:
            prompts = [[(7 * seq + token) % 60 for token in range(PROMPT_TOKENS)] for seq in range(row.num_seqs)]
            params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
            with frozen_heap():
                steps, used = engine.statistics().computed_steps, time.process_time()
                await engine.complete(prompts, params)
                host_s = (time.process_time() - used) / (engine.statistics().computed_steps - steps)
    finally:
        services.close()
    (executor,) = executors
    periods = [later - earlier for earlier, later in zip(executor.begun_s, executor.begun_s[1:], strict=False)]
    return Pace(
        row,
        period_ms=round(1e3 * statistics.median(periods), 3),
        host_ms=round(1e3 * host_s, 3),
        idle_ms=round(1e3 * statistics.median(executor.idle_s[1:]), 3),
        launch_ms=round(1e3 * statistics.median(executor.launch_s), 3),
        num_steps=len(executor.begun_s),
    )


def measure(quick: bool, progress: Progress, *, pattern: str = "") -> Findings:
    """--quick: two loads, 24 tokens."""
    rows = [row for row in ((ROWS[1], ROWS[4]) if quick else ROWS) if pattern in name_of(row)]
    paces = []
    for row in progress.track(rows, description="loads"):
        paces.append(asyncio.run(measure_row(row, 24 if quick else 400)))
    made = table(
        "decode steps, ms", "load", "period", "to reach", "processor a step", "device waits", "launch", "steps"
    )
    for pace in paces:
        to_reach = f"{PERIOD_TO_REACH_MS}" if pace.row in ROWS[1:3] else ""
        figures = (pace.host_ms, pace.idle_ms, pace.launch_ms)
        cells = [f"{pace.period_ms:.2f}", to_reach, *(f"{value:.2f}" for value in figures), str(pace.num_steps)]
        made.add_row(name_of(pace.row), *cells)
    return Findings(
        [made],
        {"rows": [{"load": name_of(pace.row), **asdict(pace)} for pace in paces]},
        notes=["A period is never below the device's time. Processor time is that of all threads of the process."],
    )


def gpu_items(given: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what lists of the JSON have with these parameters: the fields that name each item."""
    return {"rows": [{"load": name_of(row)} for row in ROWS if given["pattern"] in name_of(row)]}


def name_of(row: Row) -> str:
    """The name of a load in the table."""
    boundary = f", answers {row.boundary_ms:g} ms later" if row.boundary_ms else ""
    graph = "one graph" if row.step_graph == "one" else "parts"
    return f"{row.num_seqs} x {row.step_ms:g} ms, {graph}, {row.in_flight} in flight{boundary}"


OPTIONS = (click.Option(["--rows", "pattern"], default="", help="Only loads with this in their name."),)
main = benchmark("pipeline", measure, packages=("torch",), options=OPTIONS)

if __name__ == "__main__":
    main()
