"""The worker's own work per decode step: processor time from a grant's arrival to the launched step, and to the answer.

    quire bench control-plane worker --windows 10

The model computes nothing. Gate, executor, block tables, sampler and threads are those of every worker, and steps are
launched as on a GPU; the sampler's greatest logit is on the CPU, and counted. The grants are cachemgr's, made before.
Every 16th sequence gets a block in each step. Not counted is gRPC, which hands over and takes bytes.

    grant to launched   RunStepsRequest bytes -> read, checked, tables, batch, launch
    answer and report   the tokens -> bytes of RunStepsResponse and of AttachPoolRequest; the threads' hand-overs
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import torch
import uvloop
from empty_model import VOCABULARY, EmptyModel
from in_process import InProcessCache, InProcessServices
from report import Findings, benchmark, spread, table
from rich.progress import Progress

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.compute.v1 import worker_service_pb2
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor, LaunchedStep
from quire.worker.service.servicer import encode_ended

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
LAUNCHED_TO_REACH_MS = {256: 0.5}
NUM_WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sequences that decode, and steps in a window."""

    running: tuple[int, ...] = (256, 1024)
    steps: int = 100


QUICK = Sizes(running=(8, 16), steps=3)


@dataclass(frozen=True, slots=True)
class Work:
    """Processor time per decode step, ms, of each window of steps."""

    num_running: int
    launched_ms: list[float]
    answered_ms: list[float]


class ClockedExecutor(Executor):
    """An Executor that launches steps ahead, and counts the processor time of that."""

    launch_s = 0.0

    def launch(self, step: AcceptedStep) -> LaunchedStep:
        """See Executor.launch."""
        begun = time.thread_time()
        try:
            return super().launch(step)
        finally:
            self.launch_s += time.thread_time() - begun


def clocked_executor(model: PagedModel, pool: KVPool, *, max_num_seqs: int) -> ClockedExecutor:
    """An executor that runs ahead, as on a GPU."""
    executor = ClockedExecutor(model, pool, max_num_seqs=max_num_seqs)
    executor.runs_ahead = True
    return executor


class Bench:
    """A worker with sequences that decode, and the cachemgr that grants their steps."""

    def __init__(self, services: InProcessServices, executor: ClockedExecutor, lease_id: str) -> None:
        self._services = services
        self._executor = executor
        self._cache = InProcessCache(services)
        self._lease_id = lease_id
        self._reports: list[attach_pb2.StepReport] = []
        services.steps.reports.send = self._send

    def _send(self, report: attach_pb2.StepReport) -> None:
        """Encode a report as the attachment does, and keep it from cachemgr until the step is measured."""
        attach_pb2.AttachPoolRequest(step_report=report).SerializeToString()
        self._reports.append(report)

    async def admit(self, num_seqs: int) -> None:
        """Begin sequences of different lengths."""
        plan = self._plan()
        prompts = [prompt_of(number) for number in range(num_seqs)]
        for seq_id, prompt in enumerate(prompts):
            plan.admissions.add(sequence_id=seq_id, token_ids=prompt)
        step = worker_service_pb2.RunStepRequest(grant=(await self._cache.plan(plan)).grant)
        for seq_id, prompt in enumerate(prompts):
            sampling = worker_service_pb2.SamplingParameters(temperature=0.0)
            step.inputs.add(sequence_id=seq_id, token_ids=prompt, sampling=sampling)
        encode_ended(await self._services.steps.accept(step))
        self._settle()

    async def decode(self, num_seqs: int) -> tuple[float, float]:
        """One token of each sequence: processor seconds to the launched step, and from there to the answer's end."""
        plan, steps = self._plan(), self._services.steps
        plan.extends.sequence_ids.extend(range(num_seqs))
        plan.extends.token_counts.extend([1] * num_seqs)
        step = worker_service_pb2.RunStepRequest(grant=(await self._cache.plan(plan)).grant)
        received = worker_service_pb2.RunStepsRequest(step=step).SerializeToString()
        begun, begun_here, launched_before = time.process_time(), time.thread_time(), self._executor.launch_s
        request = worker_service_pb2.RunStepsRequest.FromString(received)
        answer = steps.accept(request.step, await steps.follow_grammars(request.step))
        read_s = time.thread_time() - begun_here
        worker_service_pb2.RunStepsResponse(step=encode_ended(await answer)).SerializeToString()
        taken_s = time.process_time() - begun
        launched_s = read_s + self._executor.launch_s - launched_before
        self._settle()
        return launched_s, taken_s - launched_s

    def _plan(self) -> cache_service_pb2.PlanStepRequest:
        epoch = self._services.pool.ledger.epoch
        return cache_service_pb2.PlanStepRequest(lease_id=self._lease_id, epoch=epoch)

    def _settle(self) -> None:
        for report in self._reports:
            self._services.settle(report)
        self._reports.clear()


def prompt_of(number: int) -> list[int]:
    """A prompt that shares no block with others of numbers up to 4,095; of 16 in turn each has another length."""
    return [number // VOCABULARY, number % VOCABULARY, *[0] * (BLOCK_SIZE - 2 + number % BLOCK_SIZE)]


async def measure_work(num_seqs: int, *, steps: int, windows: int) -> Work:
    """Windows of decode steps of so many sequences."""
    num_tokens = 2 * BLOCK_SIZE + NUM_WARM_UP_STEPS + steps * windows
    model = EmptyModel(max_num_seqs=num_seqs, max_model_len=MAX_MODEL_LEN)
    made: list[ClockedExecutor] = []

    def make(model: PagedModel, pool: KVPool, *, max_num_seqs: int) -> Executor:
        made.append(clocked_executor(model, pool, max_num_seqs=max_num_seqs))
        return made[0]

    services = InProcessServices(
        model,
        num_blocks=num_seqs * -(-num_tokens // BLOCK_SIZE) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_step_tokens=2 * BLOCK_SIZE * num_seqs,
        make_executor=make,
    )
    lease = await InProcessCache(services).create_lease("default", ttl_s=0.0)
    bench = Bench(services, made[0], lease.lease_id)
    try:
        await bench.admit(num_seqs)
        for _ in range(NUM_WARM_UP_STEPS):
            await bench.decode(num_seqs)
        gc.collect()
        gc.freeze()
        found = [[await bench.decode(num_seqs) for _ in range(steps)] for _ in range(windows)]
    finally:
        gc.unfreeze()
        services.close()
    launched_ms = [_mean_ms([launched for launched, _ in window]) for window in found]
    return Work(num_seqs, launched_ms, [_mean_ms([answered for _, answered in window]) for window in found])


def _mean_ms(seconds: Sequence[float]) -> float:
    return round(sum(seconds) / len(seconds) * 1e3, 4)


def measure(quick: bool, progress: Progress, *, windows: int) -> Findings:
    torch.set_num_threads(1)
    sizes = QUICK if quick else Sizes()
    works = []
    for num_seqs in progress.track(sizes.running, description="decode steps of an empty model"):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            works.append(runner.run(measure_work(num_seqs, steps=sizes.steps, windows=2 if quick else windows)))
    headings = ("sequences", "grant to launched", "to reach", "answer and report")
    made = table("the worker's own work per decode step: processor time, ms", *headings, words=0)
    for work in works:
        to_reach = LAUNCHED_TO_REACH_MS.get(work.num_running, "")
        made.add_row(
            *(str(work.num_running), spread(work.launched_ms, ".2f"), str(to_reach), spread(work.answered_ms, ".2f"))
        )
    return Findings([made], {"sizes": asdict(sizes), "work_per_step": [asdict(work) for work in works]})


WINDOWS = click.Option(["--windows"], default=10, show_default=True, type=click.IntRange(min=1), help="Of 100 steps.")
main = benchmark("control-plane worker", measure, packages=("protobuf", "numpy", "torch", "uvloop"), options=(WINDOWS,))

if __name__ == "__main__":
    main()
