"""cachemgr, a worker that computes nothing, a client that measures, and clients that load: their processes.

Processes: `python -m quire.cachemgr`; the worker, which implements the attach protocol and reports every step as
computed with a token sampled for each run; the measuring client; and the load, clients that admit fresh prompts and
release them. A client that plans a step sends its grant to the worker over a unix socket, and has one step in flight
while it plans the next, as the engine does.

A latency runs from a message that is built to an answer that is decoded, serialisation included; a plan that is put
off because reports have fallen behind goes on counting. Every plan has a request_id. Clients run without garbage
collection, so that its pauses here are the server's.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import uvloop
from google.protobuf import duration_pb2

from quire.cache.v1 import attach_pb2, cache_service_pb2, cache_service_pb2_grpc, grant_pb2
from quire.cli.service_process import ServiceProcess
from quire.client.channel import decode_rpc_error, open_channel

POOL = "benchmark"
BLOCK_SIZE = 16
NUM_BLOCKS = 262_144
"""Eight clients with 64 unreported steps of a prompt each leave half of it."""
MAX_SEQUENCES = 4_096
MAX_SEQUENCE_TOKENS = 131_072
VOCAB_SIZE = 128_000
DECODE_SEQUENCES = 256
DECODE_PROMPT_TOKENS = 128
PROMPT_TOKENS = 4_096
LEASE_TTL_S = 60
QUANTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 99.99, 100)
"""Percentages of calls, kept for every row and restart."""
FRAME = struct.Struct("<I")
ENDED = struct.Struct("<q")
PUT_OFF_S = 0.001
BURST = 16
SETTLE_S = 0.02
"""For cachemgr to enter the reports of a burst."""
WARM_UP = 0.1
"""Part of a row's calls that is made before and not counted."""


# -- the measured rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """The concurrent work of other clients."""

    num_clients: int = 0
    in_one_process: bool = False
    on_streams: bool = False
    admissions_per_s: float = 0.0
    """The rate of all clients together; 0: as fast as they can."""
    calls: bool = True
    """False: they build their messages and send none, so that they take the cores and nothing of the server."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to measure. `kind` is a method of Measurer."""

    name: str
    kind: str
    on_stream: bool
    num_calls: int
    load: Load = Load()
    interval_s: float = 0.0
    """Calls begin at least so far apart: the time a step takes on the device."""


def rows(sizes: Sizes) -> list[Row]:
    """Everything, in the order in which it runs."""
    decode = Row("decode step, 256 sequences, stream", "decode", on_stream=True, num_calls=sizes.calls)
    admit = Row("admission, 4,096 fresh tokens, unary", "admit_fresh", on_stream=False, num_calls=sizes.admissions)
    loaded = replace(decode, num_calls=sizes.loaded_calls)
    clients, rate = sizes.num_clients, sizes.admissions_per_s
    return [
        Row("empty plan, unary", "empty", on_stream=False, num_calls=sizes.calls),
        Row("empty plan, stream", "empty", on_stream=True, num_calls=sizes.calls),
        decode,
        replace(decode, name="decode step, 256 sequences, stream, reports between bursts", kind="decode_bursts"),
        replace(decode, name=f"{decode.name}, every 10 ms", interval_s=0.01, num_calls=sizes.paced_calls),
        admit,
        replace(admit, name="admission, 4,096 fresh tokens, stream", on_stream=True),
        replace(admit, name="admission, 4,096 cached tokens, unary", kind="admit_cached"),
        replace(admit, name="admission, 4,096 cached tokens, stream", kind="admit_cached", on_stream=True),
        *(replace(loaded, name=f"decode step, {name}", load=load) for name, load in loads(clients, rate)),
    ]


def loads(clients: int, rate: float) -> list[tuple[str, Load]]:
    """The loads under which decode steps are measured."""
    processes, tasks = Load(clients), Load(clients, in_one_process=True)
    return [
        (f"{clients} processes compute, no calls", replace(processes, calls=False)),
        (f"{clients} processes admit, unary", processes),
        (f"{clients} processes admit, streams", replace(processes, on_streams=True)),
        (f"{clients} clients in one process admit, unary", tasks),
        (f"{clients} clients in one process admit, streams", replace(tasks, on_streams=True)),
        (f"{clients} processes admit {rate:g}/s, unary", replace(processes, admissions_per_s=rate)),
        (
            f"{clients} clients in one process admit {rate:g}/s, streams",
            replace(tasks, on_streams=True, admissions_per_s=rate),
        ),
    ]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the benchmark."""

    calls: int = 3_000
    loaded_calls: int = 600
    paced_calls: int = 300
    admissions: int = 600
    num_clients: int = 8
    admissions_per_s: float = 200.0


QUICK = Sizes(calls=30, loaded_calls=20, paced_calls=10, admissions=10, num_clients=2)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row in one restart. Quantiles in µs, as in QUANTILES."""

    row: str
    num_calls: int
    quantiles_us: list[float]
    put_off: int
    """Plans that met a lack of steps or blocks, because reports had fallen behind."""
    admissions_per_s: float
    """That the load got through."""
    busy_cores: dict[str, float]
    """CPU seconds per second, by kind of process; "others" are not of this benchmark."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """One row over all restarts: medians of their quantiles."""

    row: str
    p50_us: float
    p99_us: float
    max_us: float
    """The largest of all restarts."""
    samples: list[Sample] = field(default_factory=list)


def median_us(samples: Sequence[Sample], percent: float) -> float:
    """The median of the restarts' quantiles, which is in QUANTILES."""
    return statistics.median(sample.quantiles_us[QUANTILES.index(percent)] for sample in samples)


def figure_of(samples: list[Sample]) -> Quantiles:
    """The figure of one row's samples."""
    worst = max(sample.quantiles_us[-1] for sample in samples)
    return Quantiles(samples[0].row, median_us(samples, 50), median_us(samples, 99), worst, samples)


# -- clients ------------------------------------------------------------------------------------------------------


class Relay:
    """Sends grants to the worker and receives the ends of steps."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._in_flight = 0

    @classmethod
    async def open(cls, path: str) -> Relay:
        return cls(*await asyncio.open_unix_connection(path))

    async def run(self, grant: bytes, *, run_ahead: int = 1) -> None:
        """Sends a step; returns when all but `run_ahead` have ended."""
        self._writer.write(FRAME.pack(len(grant)) + grant)
        self._in_flight += 1
        while self._in_flight > run_ahead:
            await self._reader.readexactly(ENDED.size)
            self._in_flight -= 1

    async def idle(self) -> None:
        """Returns when every step has ended."""
        while self._in_flight:
            await self._reader.readexactly(ENDED.size)
            self._in_flight -= 1

    def close(self) -> None:
        self._writer.close()


class Client:
    """One lease on one channel, unary or on a stream."""

    def __init__(self, channel: grpc.aio.Channel, relay: Relay, *, on_stream: bool) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._relay = relay
        self._call = self._stub.PlanSteps() if on_stream else None
        self._num_plans = 0
        self._lease_id, self._epoch = "", 0
        self.put_off = 0
        self.is_refused = False
        """True if blocks were missing for something of the last plan."""

    @classmethod
    async def open(cls, address: str, relay_path: str, stack: AsyncExitStack, *, on_stream: bool) -> Client:
        """A client; its channel, socket and lease end with the stack."""
        channel = await stack.enter_async_context(open_channel(address))
        relay = await Relay.open(relay_path)
        stack.callback(relay.close)
        client = cls(channel, relay, on_stream=on_stream)
        await client.take_lease()
        stack.push_async_callback(client.close)
        return client

    async def take_lease(self) -> None:
        request = cache_service_pb2.CreateLeaseRequest(pool=POOL, ttl=duration_pb2.Duration(seconds=LEASE_TTL_S))
        lease = await self._stub.CreateLease(request, wait_for_ready=True)
        self._lease_id, self._epoch = lease.lease_id, lease.epoch

    async def close(self) -> None:
        await self._relay.idle()
        if self._call is not None:
            await self._call.done_writing()
        await self._stub.DeleteLease(cache_service_pb2.DeleteLeaseRequest(lease_id=self._lease_id))

    def message(self, **fields: Any) -> cache_service_pb2.PlanStepsRequest:
        """A plan with a request_id of its own."""
        self._num_plans += 1
        plan = cache_service_pb2.PlanStepRequest(
            lease_id=self._lease_id, epoch=self._epoch, request_id=f"plan-{self._num_plans:027d}", **fields
        )
        return cache_service_pb2.PlanStepsRequest(plan=plan)

    async def plan(self, message: cache_service_pb2.PlanStepsRequest) -> cache_service_pb2.PlanStepResponse:
        """The answer, asked for until the lease has no longer too many steps."""
        while (answer := await self._ask(message)) is None:
            self.put_off += 1
            await asyncio.sleep(PUT_OFF_S)
        self.is_refused = bool(answer.refusals)
        if any(refusal.error.reason != "OUT_OF_BLOCKS" for refusal in answer.refusals):
            raise RuntimeError(f"refused: {answer.refusals[0]}")
        self.put_off += self.is_refused
        return answer

    async def _ask(self, message: cache_service_pb2.PlanStepsRequest) -> cache_service_pb2.PlanStepResponse | None:
        """None: too many steps."""
        if self._call is None:
            try:
                return await self._stub.PlanStep(message.plan)
            except grpc.aio.AioRpcError as error:
                if decode_rpc_error(error).reason != "TOO_MANY_STEPS":
                    raise
                return None
        await self._call.write(message)
        read = await self._call.read()
        if read is grpc.aio.EOF or read.WhichOneof("answer") is None:
            raise RuntimeError("the stream has ended")
        if read.WhichOneof("answer") == "plan":
            return read.plan
        if read.error.reason != "TOO_MANY_STEPS":
            raise RuntimeError(f"no plan: {read.error.message}")
        return None

    async def timed_plan(
        self, message: cache_service_pb2.PlanStepsRequest
    ) -> tuple[int, cache_service_pb2.PlanStepResponse]:
        """Plans a step; the ns it took, and the answer, which is to be run."""
        start = time.perf_counter_ns()
        answer = await self.plan(message)
        return time.perf_counter_ns() - start, answer

    async def run(self, answer: cache_service_pb2.PlanStepResponse) -> None:
        """Has a planned step run; returns when all but it have ended."""
        await self._relay.run(answer.grant.grant)

    async def idle(self) -> None:
        """Returns when every step has ended."""
        await self._relay.idle()

    async def timed(self, message: cache_service_pb2.PlanStepsRequest) -> int:
        """Plans a step and has it run; the ns the plan took."""
        taken, answer = await self.timed_plan(message)
        await self.run(answer)
        return taken

    def admission(self, seq_id: int, tokens: list[int], **fields: Any) -> cache_service_pb2.PlanStepsRequest:
        return self.message(admissions=[cache_service_pb2.Admission(sequence_id=seq_id, token_ids=tokens)], **fields)


def draw_tokens(generator: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = generator.integers(0, VOCAB_SIZE, count).tolist()
    return tokens


def decode_admissions(generator: np.random.Generator) -> list[cache_service_pb2.Admission]:
    """Prompts of staggered lengths, so that each step one sequence in 16 needs a block, as in service."""
    return [
        cache_service_pb2.Admission(
            sequence_id=seq_id, token_ids=draw_tokens(generator, DECODE_PROMPT_TOKENS + seq_id % BLOCK_SIZE)
        )
        for seq_id in range(DECODE_SEQUENCES)
    ]


def decode_extends() -> cache_service_pb2.Extends:
    """One token of each of these sequences."""
    return cache_service_pb2.Extends(sequence_ids=range(DECODE_SEQUENCES), token_counts=[1] * DECODE_SEQUENCES)


class Measurer:
    """The kinds of rows, each a loop of timed calls. Returns ns per call, in order."""

    def __init__(self, client: Client, row: Row) -> None:
        self._client = client
        self._generator = np.random.default_rng()
        self._num_warm_up = max(1, int(WARM_UP * row.num_calls))
        self._num_calls = self._num_warm_up + row.num_calls
        self._interval_s = row.interval_s

    async def measure(self, kind: str) -> list[int]:
        taken: list[int] = await getattr(self, kind)()
        return taken[self._num_warm_up :]

    async def empty(self) -> list[int]:
        return [await self._client.timed(self._client.message()) for _ in range(self._num_calls)]

    async def decode(self) -> list[int]:
        """One step after the other; the report of one comes in while the next is planned."""
        await self._admit_running()
        taken = []
        begin = time.perf_counter()
        for index in range(self._num_calls):
            if self._interval_s:
                await asyncio.sleep(max(0.0, begin + index * self._interval_s - time.perf_counter()))
            taken.append(await self._client.timed(self._step()))
        return taken

    async def decode_bursts(self) -> list[int]:
        """Plans in bursts and lets the worker run them between: no report comes in while one is planned."""
        await self._admit_running()
        taken = []
        while len(taken) < self._num_calls:
            planned = [await self._client.timed_plan(self._step()) for _ in range(BURST)]
            taken += [each for each, _ in planned]
            for _, answer in planned:
                await self._client.run(answer)
            await self._client.idle()
            await asyncio.sleep(SETTLE_S)
        return taken[: self._num_calls]

    async def _admit_running(self) -> None:
        await self._client.timed(self._client.message(admissions=decode_admissions(self._generator)))

    def _step(self) -> cache_service_pb2.PlanStepsRequest:
        return self._client.message(extends=decode_extends())

    async def admit_fresh(self) -> list[int]:
        return await self._admit(lambda: draw_tokens(self._generator, PROMPT_TOKENS))

    async def admit_cached(self) -> list[int]:
        tokens = draw_tokens(self._generator, PROMPT_TOKENS)
        return await self._admit(lambda: tokens)

    async def _admit(self, draw: Callable[[], list[int]]) -> list[int]:
        taken = []
        for seq_id in range(self._num_calls):
            taken.append(await self._client.timed(self._client.admission(seq_id, draw())))
            await self._client.timed(self._client.message(release_sequence_ids=[seq_id]))
        return taken


async def admit_until(stopped: asyncio.Event, client: Client, *, interval_s: float, calls: bool) -> int:
    """Admits fresh prompts, each in place of the one before; how many."""
    generator = np.random.default_rng()
    loop = asyncio.get_running_loop()
    due = loop.time() + interval_s * generator.random()
    count, released = 0, list[int]()
    while not stopped.is_set():
        if interval_s:
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += interval_s
        tokens = draw_tokens(generator, PROMPT_TOKENS)
        if calls:
            await client.timed(client.admission(count, tokens, release_sequence_ids=released))
            released = [] if client.is_refused else [count]
            count += not client.is_refused
        else:
            client.admission(count, tokens).SerializeToString()
            await asyncio.sleep(0)
    return count


async def apply_load(load: Load, num_clients: int, stopped: asyncio.Event, where: Where) -> float:
    """Runs this process's clients until stopped; admissions per second. Calls ready before it begins."""
    async with AsyncExitStack() as stack:
        clients = [
            await Client.open(where.address, where.relay_path, stack, on_stream=load.on_streams)
            for _ in range(num_clients)
        ]
        interval_s = load.num_clients / load.admissions_per_s if load.admissions_per_s else 0.0
        start = time.perf_counter()
        counts = await asyncio.gather(
            *(admit_until(stopped, client, interval_s=interval_s, calls=load.calls) for client in clients)
        )
        return sum(counts) / (time.perf_counter() - start)


# -- the worker ---------------------------------------------------------------------------------------------------


def registration() -> attach_pb2.RegisterPool:
    """Of a pool's first epoch."""
    geometry = attach_pb2.PoolGeometry(
        block_size_tokens=BLOCK_SIZE,
        block_count=NUM_BLOCKS,
        block_bytes=65_536,
        max_sequence_count=MAX_SEQUENCES,
        max_sequence_tokens=MAX_SEQUENCE_TOKENS,
        vocabulary_size=VOCAB_SIZE,
        model="none",
        model_fingerprint="none",
    )
    return attach_pb2.RegisterPool(pool=POOL, epoch=1, geometry=geometry, worker_address="unix:/nowhere")


def report_of(grant: grant_pb2.StepGrant, report_number: int) -> attach_pb2.StepReport:
    """Everything is computed, and a token is sampled for each run that samples."""
    seq_ids = np.asarray(grant.run_sequence_ids, dtype=np.int32)
    ends = np.asarray(grant.run_starts, dtype=np.int32) + np.asarray(grant.run_token_counts, dtype=np.int32)
    samples = np.asarray(grant.run_samples, dtype=bool)
    return attach_pb2.StepReport(
        report_number=report_number,
        lease_id=grant.lease_id,
        step_number=grant.step_number,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=grant.run_sequence_ids,
        computed_token_counts=ends.tolist(),
        sampled_sequence_ids=seq_ids[samples].tolist(),
        sampled_token_ids=((ends * 31 + seq_ids * 7_919) % VOCAB_SIZE)[samples].tolist(),
    )


class NullWorker:
    """Reports every step as computed. Checks nothing, computes nothing.

    A step has ended, for its client, when its report is written: clients that do nothing but plan would otherwise run
    ahead of the reports until cachemgr refuses them.
    """

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[tuple[attach_pb2.AttachPoolRequest, Callable[[], None]]] = asyncio.Queue()
        self._num_reports = 0
        self.attached = asyncio.Event()

    async def attach(self, address: str) -> None:
        """Obeys one cachemgr until the stream ends."""
        self._say(register_pool=registration())
        async with open_channel(address) as channel:
            async for order in cache_service_pb2_grpc.CacheServiceStub(channel).AttachPool(self._said()):
                self._obey(order)

    def _obey(self, order: attach_pb2.AttachPoolResponse) -> None:
        match order.WhichOneof("message"):
            case "attached":
                self.attached.set()
            case "open_lease":
                self._say(lease_opened=attach_pb2.LeaseOpened(lease_id=order.open_lease.lease_id))
            case "fence_lease":
                self._say(lease_fenced=attach_pb2.LeaseFenced(lease_id=order.fence_lease.lease_id))
            case "reports_acknowledged":
                pass
            case kind:
                raise RuntimeError(f"unexpected order: {kind}")

    def _say(self, *, then: Callable[[], None] = lambda: None, **message: Any) -> None:
        self._outbox.put_nowait((attach_pb2.AttachPoolRequest(**message), then))

    async def _said(self) -> AsyncIterator[attach_pb2.AttachPoolRequest]:
        while True:
            message, then = await self._outbox.get()
            yield message
            then()

    async def serve_relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's steps, in order."""
        try:
            while True:
                (size,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                grant = grant_pb2.StepGrant.FromString(await reader.readexactly(size))
                self._report(grant, functools.partial(writer.write, ENDED.pack(grant.step_number)))
        except asyncio.IncompleteReadError:
            writer.close()

    def _report(self, grant: grant_pb2.StepGrant, then: Callable[[], None]) -> None:
        self._num_reports += 1
        self._say(step_report=report_of(grant, self._num_reports), then=then)


# -- processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """The addresses of cachemgr and of the worker's relay."""

    address: str
    relay_path: str


def run_worker(where: Where, pipe: Connection) -> None:
    """The worker's process: says "ready" when it is attached; ends with the stream."""

    async def main() -> None:
        worker = NullWorker()
        attaching = asyncio.create_task(worker.attach(where.address))
        async with await asyncio.start_unix_server(worker.serve_relay, where.relay_path, limit=2**22):
            await worker.attached.wait()
            pipe.send("ready")
            await attaching

    run_process(main)


def run_measurer(where: Where, pipe: Connection) -> None:
    """The measuring client's process: rows in, latencies in ns out, until None."""

    async def main() -> None:
        while (row := await asyncio.to_thread(pipe.recv)) is not None:
            async with AsyncExitStack() as stack:
                client = await Client.open(where.address, where.relay_path, stack, on_stream=row.on_stream)
                taken = await Measurer(client, row).measure(row.kind)
            pipe.send((taken, client.put_off))

    run_process(main)


def run_load(where: Where, pipe: Connection) -> None:
    """A load process: (load, clients here) in, then anything to stop it; admissions per second out; until None."""

    async def main() -> None:
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            load, num_clients = order
            stopped = asyncio.Event()
            applying = asyncio.create_task(apply_load(load, num_clients, stopped, where))
            await asyncio.to_thread(pipe.recv)
            stopped.set()
            pipe.send(await applying)

    run_process(main)


def run_process(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class Child:
    """A process of this benchmark and the pipe to it."""

    def __init__(self, target: Callable[[Where, Connection], None], where: Where) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=target, args=(where, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next message. Raises EOFError if the process has ended."""
        return self.pipe.recv()

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


class Services:
    """One restart: cachemgr, the worker, the measuring client, and load processes as they are needed."""

    def __init__(self, folder: Path, stack: ExitStack, *, pinned: bool, flags: Sequence[str] = ()) -> None:
        """pinned: cachemgr gets a core of its own, everything else the others. `flags` are further ones of it."""
        self._stack = stack
        self._where = Where(f"unix:{folder}/cachemgr.sock", f"{folder}/relay.sock")
        self._cachemgr = ServiceProcess(
            "cachemgr",
            target="quire.cachemgr",
            arguments=("--listen", self._where.address, "--log-level", "warning", *flags),
            address=self._where.address,
            log_path=folder / "cachemgr.log",
        )
        cores = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, cores)
        if pinned:
            os.sched_setaffinity(0, {min(cores)})
        self._cachemgr.start()
        stack.callback(self._cachemgr.terminate)
        if pinned:
            os.sched_setaffinity(0, cores - {min(cores)})
        self._cachemgr.wait_serving(30.0)
        self._worker = self._spawn(run_worker)
        self._worker.hear()
        self._measurer = self._spawn(run_measurer)
        self._loaders: list[Child] = []

    def _spawn(self, target: Callable[[Where, Connection], None]) -> Child:
        child = Child(target, self._where)
        self._stack.callback(child.end)
        return child

    def measure(self, row: Row) -> Sample:
        """One row."""
        rate = 0.0
        with self._loaded(row.load) as stop:
            before, start = self._cpu_seconds(), time.perf_counter()
            self._measurer.pipe.send(row)
            taken, put_off = self._measurer.hear()
            wall = time.perf_counter() - start
            busy = {name: (used - before[name]) / wall for name, used in self._cpu_seconds().items()}
            busy["others"] = 2 * busy["machine"] - sum(busy.values())
            rate = stop()
        quantiles = np.percentile(np.array(taken) / 1e3, QUANTILES, method="higher").round(1).tolist()
        cores = {name: round(used, 3) for name, used in busy.items()}
        return Sample(row.name, len(taken), quantiles, put_off, round(rate, 1), cores)

    @contextmanager
    def _loaded(self, load: Load) -> Iterator[Callable[[], float]]:
        """Within the block other clients work; the function stops them and says their admissions per second."""
        num_processes = min(load.num_clients, 1) if load.in_one_process else load.num_clients
        while len(self._loaders) < num_processes:
            self._loaders.append(self._spawn(run_load))
        loaders = self._loaders[:num_processes]
        for loader in loaders:
            loader.pipe.send((load, load.num_clients // num_processes))
        time.sleep(0.5 if loaders else 0.0)  # until they are at it

        def stop() -> float:
            for loader in loaders:
                loader.pipe.send("stop")
            return sum(loader.hear() for loader in loaders)

        yield stop

    def _cpu_seconds(self) -> dict[str, float]:
        """Used so far: by each kind of process, and by the machine."""

        def used(pids: list[int | None]) -> float:
            times = [psutil.Process(pid).cpu_times() for pid in pids]
            return sum(each.user + each.system for each in times)

        machine = psutil.cpu_times()
        return {
            "cachemgr": used([self._cachemgr.pid]),
            "worker": used([self._worker.process.pid]),
            "measuring client": used([self._measurer.process.pid]),
            "load": used([loader.process.pid for loader in self._loaders]),
            "machine": sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0),
        }


@contextmanager
def services(*, pinned: bool) -> Iterator[Services]:
    """Started, and ended with the block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Services(Path(folder), stack, pinned=pinned)
