"""The processes, the links between them, one schedule after the other, and the checks after each.

    client a ──cache-a──┐                    ┌──attach── worker
                        ├──► cachemgr ◄──────┤
    client b ──cache-b──┘                    └──attach── a second worker, held back until the first is killed
    both     ──steps───────────────────────────────────► worker

With a holder there is one worker, which is started again. It finds the memory of the one before it, unless the holder
was killed too.

Checks of every schedule:

    tokens    every request ends, and each of its samples is what it was without faults: nothing twice, nothing missing
    books     AuditPool finds nothing, whenever it is asked
    usage     what clients are told of the cache, and cachemgr's counters, are sums of its answers: see admissions.py
    the end   no lease, no sequence, no report that was not acknowledged; free + cached = pool, on both sides
    memory    with a holder: all published blocks outlive one more kill of the worker, each with the right checksum
    logs      no violation of ownership, no unexpected exception; no process ended that was not killed

A worker's wall clock can't be set back here; to a monotonic clock a jump looks like a process that was stopped for as
long (OVERSLEEP).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
from deadlines import DEADLINE_S, Deadline
from robustness.faults.admissions import Admissions
from robustness.faults.disk import SmallDisk, bad_disk
from robustness.faults.proxy import Link
from robustness.faults.schedule import (
    ATTACH_LINK,
    CLIENTS,
    FOLLOWER,
    HOLDER,
    STEPS_LINK,
    Fault,
    FaultKind,
    Schedule,
    Task,
    has_disk,
)
from robustness.faults.workload import (
    ADAPTERS,
    BLOCK_SIZE,
    MAX_STEP_TOKENS,
    NUM_BLOCKS,
    NUM_REQUESTS,
    SHARES,
    WINDOW,
    make_requests,
)

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
"""Of waits for the schedule's processes: counts the time in which they could run."""
POLL_S = 0.25
CALL_TIMEOUT_S = 5.0
AUDIT_PERIOD_S = 0.1
DESCRIBING_S = 1.0
END_OF_LOG = 40
"""Lines of each process that an error of the set-up shows."""
WORKER_SLOTS = (0, 1)
SIGNS = (
    *("violated", "Traceback", "never retrieved", "was destroyed", "pool damaged", "CRITICAL", "step failed"),
    *("loop has died", r"handler failed(?!.*ExecuteBatchError)"),  # that one: the caller has disconnected meanwhile
    *("their bytes were changed", r"memory kept .*\bdropped=[1-9]"),
)
"""Log lines that no fault excuses."""
ENVIRONMENT = {
    "QUIRE_VERIFY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "GRPC_VERBOSITY": "NONE",
}
GUARDED = Path(__file__).parents[3] / "client" / "quire" / "cli" / "guarded.py"
TEXT_MODEL = Path(__file__).parents[2] / "framework" / "text_model.py"
TARGETS = {
    "cachemgr": "quire.cachemgr",
    "worker": "quire.worker",
    "holder": "quire.worker.holder",
    "client": str(Path(__file__).with_name("client.py")),
}
STATE_DIR_FLAG = "--state-dir"
CARRIED = re.compile(r"memory kept .*\bcached=(\d+)")
"""cachemgr's log line about a new epoch on the memory of the one before."""


Process = asyncio.subprocess.Process | psutil.Process
"""Processes that a signal can be sent to."""


class HarnessError(Exception):
    """The processes could not be brought to where a schedule can begin."""


@dataclass
class Outcome:
    """The outcome of a schedule."""

    seed: int
    failures: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    not_reached: int = 0
    recoveries: int = 0
    preemptions: int = 0
    num_carried: int = 0
    """Blocks that outlived a worker."""
    num_tokens: int = 0
    num_messages: int = 0
    duration_s: float = 0.0


class Children:
    """Processes that end with this one."""

    def __init__(self) -> None:
        self._guard_read, self._guard_write = os.pipe()
        self._started: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._started:
            await child.kill()
        os.close(self._guard_read)
        os.close(self._guard_write)

    def pids(self) -> list[int]:
        """Those that have not ended."""
        return [child.pid for child in self._started if not child.ended.done()]

    async def start(self, kind: str, arguments: list[str], log: Path) -> Child:
        command = [sys.executable, "-P", str(GUARDED), str(self._guard_read), TARGETS[kind], *arguments]
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._guard_read,),
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
        self._started.append(Child(process, asyncio.ensure_future(process.wait()), log))
        return self._started[-1]


DTYPE_FLAGS = {False: ("--dtype", "float32"), True: ("--dtype", "bfloat16", "--deterministic")}
"""A worker's flags with which a sequence has the same tokens in any step; by Harness's `deterministic`."""


async def make_model(folder: Path, *, has_window: bool, adapters: Sequence[str] = ()) -> Path:
    """Save the model that workers load, and adapters beside it, in a process of its own: the harness has no torch."""
    model = folder / "model"
    command = [sys.executable, str(TEXT_MODEL), str(model), str(WINDOW if has_window else 0), *adapters]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | ENVIRONMENT)
    if await process.wait():
        raise HarnessError("the model can't be made")
    return model


@dataclass(eq=False)
class Child:
    """One process; `ended` has its exit status, negative for a signal."""

    process: asyncio.subprocess.Process
    ended: asyncio.Future[int]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(self.ended), DEADLINE_S)


@dataclass
class Delivery:
    """The delivery of one request: samples by index, and their ends."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)


class Checker:
    """Compares a client's deliveries with those without faults: one line per wrong sample."""

    def __init__(self, reference: dict[int, Delivery]) -> None:
        self._reference = reference
        self._deliveries: dict[int, Delivery] = {}
        self._failures: dict[tuple[int, int], str] = {}
        self.num_tokens = 0

    @property
    def failures(self) -> list[str]:
        return list(self._failures.values())

    def begin_anew(self) -> None:
        """The client was killed: its deliveries are lost with it, and were checked."""
        self._deliveries.clear()

    def take(self, event: dict[str, Any]) -> None:
        """One event of a request."""
        request = event["request"]
        delivery = self._deliveries.setdefault(request, Delivery())
        if "error" in event:
            self._fail(request, 0, f"failed: {event['error']}")
            return
        sample = event["sample"]
        if sample in delivery.finishes:
            self._fail(request, sample, "goes on after its end")
        known, expected = delivery.tokens.setdefault(sample, []), self._reference[request].tokens[sample]
        known += event["tokens"]
        self.num_tokens += len(event["tokens"])
        if known != expected[: len(known)]:
            wrong = next(n for n, token in enumerate(known) if expected[n : n + 1] != [token])
            self._fail(request, sample, f"token {wrong} is not the one without faults")
        if event["finish"] is not None:
            delivery.finishes[sample] = event["finish"]

    def finish(self, task: Task) -> None:
        """The task has ended: all of it must be delivered, except for cancelled requests."""
        for request in set(task.requests) - task.cancels.keys():
            found, expected = self._deliveries.get(request, Delivery()), self._reference[request]
            for sample, tokens in expected.tokens.items():
                ends = found.finishes.get(sample), expected.finishes[sample]
                if len(found.tokens.get(sample, ())) != len(tokens) or ends[0] != ends[1]:
                    count = f"{len(found.tokens.get(sample, ()))} of {len(tokens)} tokens"
                    self._fail(request, sample, f"{count}, finish {ends[0]} for {ends[1]}")

    def _fail(self, request: int, sample: int, what: str) -> None:
        self._failures.setdefault((request, sample), f"request {request} sample {sample}: {what}")


class ClientProcess:
    """A client, and the task it has. If it is killed, the next one gets the task anew."""

    def __init__(self, name: str, start: Callable[[str], Any]) -> None:
        self.name = name
        self._start = start
        self._connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self.child: Child

    async def start(self) -> None:
        """Returns when it is connected; one that is killed before is started again."""
        while True:
            self._connected = asyncio.get_running_loop().create_future()
            self.child = await self._start(self.name)
            either = (self._connected, self.child.ended)
            await asyncio.wait(either, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._connected.done():
                self._streams = self._connected.result()
                return
            if not self.child.ended.done():
                raise HarnessError(f"client {self.name} does not connect")

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected.set_result((reader, writer))

    async def run(self, number: int, task: Task) -> AsyncIterator[dict[str, Any]]:
        """The task's events; {"killed": True} if the process ends, and it begins again."""
        while True:
            reader, writer = self._streams
            order = {
                "task": number,
                "requests": task.requests,
                "cancels": task.cancels,
                "slow": task.slow,
                "has_drafts": task.has_drafts,
            }
            with contextlib.suppress(ConnectionError):
                writer.write(json.dumps(order).encode() + b"\n")
                while line := await reader.readline():
                    if not line.endswith(b"\n"):
                        break
                    event = json.loads(line)
                    if event["task"] == number:
                        yield event
                        if "done" in event:
                            return
            writer.close()
            yield {"killed": True}
            await self.start()


class Harness:
    """Everything in one folder; enter it with `async with`, then run schedules."""

    def __init__(
        self,
        folder: Path,
        *,
        state_dir: bool = False,
        small_disk: bool = False,
        num_ranks: int = 1,
        has_window: bool = False,
        deterministic: bool = False,
        has_holder: bool = False,
        has_adapters: bool = False,
    ) -> None:
        """With state_dir cachemgr keeps one; with small_disk it is on a file system of its own that can be filled.

        num_ranks is of each worker, 1 or 2. With has_window the model has two layer groups, one with a window.
        With deterministic the workers run in bfloat16 with --deterministic; else in float32.
        With has_holder a holder keeps the memory of one worker of one rank.
        With has_adapters workers of one rank have adapters, and most requests take one.
        """
        self.folder = folder
        self._has_window = has_window
        self._dtype_flags = DTYPE_FLAGS[deterministic]
        self._num_ranks = num_ranks
        self.has_holder = has_holder
        self._adapters = ADAPTERS if has_adapters else ()
        self._slots = WORKER_SLOTS[:1] if has_holder else WORKER_SLOTS
        self._state_dir = folder / "state" if state_dir else None
        self._disk = SmallDisk(folder / "state") if small_disk else None
        self._stack = contextlib.AsyncExitStack()
        self._num_messages = 0
        self._pending: list[Fault] = []
        self._faults: set[asyncio.Task[None]] = set()
        self._killing = asyncio.Lock()  # what is killed twice is started again before the second time
        self._numbers = itertools.count(1)
        self._active = WORKER_SLOTS[0]
        self._servers: dict[str, Child] = {}
        self._links: dict[str, Link] = {}
        self._admissions = Admissions(make_requests())
        self._log_sizes: dict[Path, int] = {}
        self._expected_ends: set[int] = set()
        self._clients = {name: ClientProcess(name, self._start_client) for name in CLIENTS}
        self.outcome = Outcome(0)
        """State of the running schedule."""

    # -- start and end

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        try:
            await self._set_up()
        except HarnessError as error:
            error.add_note(self._ends_of_logs())
            await self._stack.aclose()
            raise
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    def _ends_of_logs(self) -> str:
        ends = []
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            ends += [f"-- {log.name}, the last of {len(lines)} lines:", *lines[-END_OF_LOG:]]
        return "\n".join(ends)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _set_up(self) -> None:
        if self._disk is not None:
            self._stack.enter_context(self._disk)
        elif self._state_dir is not None:
            self._state_dir.mkdir(mode=0o700)
        self._children = await self._stack.enter_async_context(Children())
        self._model = await make_model(self.folder, has_window=self._has_window, adapters=self._adapters)
        (self.folder / "tenants.toml").write_text(SHARES)
        await self._open_links()
        server = await asyncio.start_unix_server(self._connected, self.folder / "harness.sock")
        self._stack.callback(server.close)
        for slot in self._slots[1:]:
            self._links[f"{ATTACH_LINK}{slot}"].hold()
        for name in ("cachemgr", *([HOLDER] if self.has_holder else []), *map("worker{}".format, self._slots)):
            await self._start(name)
        for client in self._clients.values():
            await client.start()
        self._open_stubs()
        await self._until("the pool is attached", self._is_attached, START_TIMEOUT_S)
        self._reference = await self._make_reference()

    async def _open_links(self) -> None:
        targets: dict[str, str] = {}
        for slot in self._slots:
            targets |= {f"{ATTACH_LINK}{slot}": "cachemgr", f"{STEPS_LINK}{slot}": f"worker{slot}"}
        for name, target in targets.items():
            link = Link(name, listen=self._at(name), target=self._at(target), on_message=self._on_message)
            self._links[name] = await self._stack.enter_async_context(link)
        for client in CLIENTS:
            link = Link(
                f"cache-{client}",
                listen=self._at(f"cache-{client}"),
                target=self._at("cachemgr"),
                on_message=self._on_message,
                observe=functools.partial(self._admissions.observe, client),
            )
            self._links[link.name] = await self._stack.enter_async_context(link)

    def _open_stubs(self) -> None:
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        options += (("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 100))
        names = ("cachemgr", *map("worker{}".format, self._slots))
        channels = [grpc.aio.insecure_channel(self._at(name), options=options) for name in names]
        for channel in channels:
            self._stack.push_async_callback(channel.close)
        self._cache: Any = cache_service_pb2_grpc.CacheServiceStub(channels[0])
        self._worker_stubs: list[Any] = [worker_service_pb2_grpc.WorkerServiceStub(each) for each in channels[1:]]

    def _at(self, name: str) -> str:
        return f"unix:{self.folder}/{name}.sock"

    async def _start(self, name: str) -> None:
        """Start a server by its name, which is also its socket's and its log's."""
        kind = name.rstrip("01")
        arguments = ["--listen", self._at(name)]
        if kind == "cachemgr":
            arguments += ["--tenants", str(self.folder / "tenants.toml")]
            arguments += [] if self._state_dir is None else [STATE_DIR_FLAG, str(self._state_dir)]
        elif kind == "worker":
            arguments += self._worker_arguments(int(name[-1]))
        self._servers[name] = await self._children.start(kind, arguments, self.folder / f"{name}.log")

    def _worker_arguments(self, slot: int) -> list[str]:
        arguments = ["--advertise", self._at(f"{STEPS_LINK}{slot}")]
        arguments += ["--cachemgr", self._at(f"{ATTACH_LINK}{slot}"), "--model", str(self._model)]
        arguments += [*self._dtype_flags, "--threads", "1", "--block-size", str(BLOCK_SIZE)]
        arguments += ["--num-blocks", str(NUM_BLOCKS), "--host-memory", "256K", "--host-cache-share", "0.5"]
        if has_disk(self._num_ranks, has_holder=self.has_holder):
            arguments += ["--disk-dir", str(self._disk_dir(slot)), "--disk-memory", "1M"]
        arguments += ["--max-num-seqs", "16"]
        arguments += ["--max-step-tokens", str(MAX_STEP_TOKENS), "--tensor-parallel-size", str(self._num_ranks)]
        arguments += ["--holder", self._at(HOLDER), "--verify-kept-blocks"] if self.has_holder else []
        for name in self._adapters:
            arguments += ["--lora", f"{name}={self.folder / name}"]
        return arguments

    def _disk_dir(self, slot: int) -> Path:
        return self.folder / f"disk{slot}"

    async def _start_client(self, name: str) -> Child:
        arguments = [name, self._at(f"cache-{name}"), str(self.folder / "harness.sock"), *self._adapters]
        return await self._children.start("client", arguments, self.folder / f"client-{name}.log")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:  # it was killed before it could say who it is
            writer.close()
            return
        hello = json.loads(line)
        self._clients[hello["client"]].connected(reader, writer)

    async def _make_reference(self) -> dict[int, Delivery]:
        """Each request by itself, without faults."""
        reference: dict[int, Delivery] = {}
        client = self._clients[CLIENTS[0]]
        for index, request in enumerate(make_requests()):
            delivery = reference[index] = Delivery()
            async for event in client.run(next(self._numbers), Task((index,))):
                if "error" in event or "killed" in event:
                    raise HarnessError(f"without faults: request {index}: {event}")
                if "sample" in event:
                    delivery.tokens.setdefault(event["sample"], []).extend(event["tokens"])
                    if event["finish"] is not None:
                        delivery.finishes[event["sample"]] = event["finish"]
            if len(delivery.finishes) != request.params.n:
                raise HarnessError(f"without faults: request {index}: {delivery.finishes}")
        assert len(reference) == NUM_REQUESTS
        return reference

    # -- one schedule

    async def run(self, schedule: Schedule) -> Outcome:
        """Runs it and checks everything. After a failure the processes may be in any state: make another Harness."""
        started = time.monotonic()
        outcome = self.outcome = Outcome(schedule.seed)
        self._num_messages = 0
        self._pending = list(schedule.faults)
        for log in self.folder.glob("*.log"):
            self._log_sizes.setdefault(log, log.stat().st_size)
        auditing = asyncio.create_task(self._audit_again_and_again())
        checkers = {name: Checker(self._reference) for name in schedule.tasks}
        tasks = [
            asyncio.create_task(self._serve(self._clients[name], task, checkers[name]))
            for name, task in schedule.tasks.items()
        ]
        try:
            deadline, late = self._deadline(END_TIMEOUT_S), set(tasks)
            while late and not deadline.has_passed():
                _, late = await asyncio.wait(late, timeout=POLL_S)
            if late:
                outcome.failures.append(f"{len(late)} clients not done within {deadline}")
                outcome.failures.append(f"then: {await self._describe()}")
                await self._ask_what_clients_wait_for()
            outcome.not_reached, self._pending = len(self._pending), []
            await self._heal()
            for task in set(tasks) - late:
                task.result()
            if not late:
                await self._await_rest()
            if self.has_holder and not outcome.failures:
                await self._check_memory()
        finally:
            auditing.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(auditing, *tasks, return_exceptions=True)
        for checker in checkers.values():
            outcome.failures += checker.failures
            outcome.num_tokens += checker.num_tokens
        self._check_processes()
        self._read_logs()
        outcome.num_messages = self._num_messages
        outcome.duration_s = time.monotonic() - started
        return outcome

    async def _serve(self, client: ClientProcess, task: Task, checker: Checker) -> None:
        async for event in client.run(next(self._numbers), task):
            if "killed" in event:
                checker.begin_anew()
                self._admissions.killed(client.name)
            elif "done" in event:
                self._count(event)
                self._admissions.ended(client.name)
            else:
                if "rehearsed" not in event:
                    checker.take(event)
                self._admissions.take(event)
        checker.finish(task)

    def _count(self, event: dict[str, Any]) -> None:
        self.outcome.recoveries += event["done"]["recoveries"]
        self.outcome.preemptions += event["done"]["scheduler"]["preemptions"]

    # -- faults

    def _on_message(self) -> None:
        self._num_messages += 1
        while self._pending and self._pending[0].after_message <= self._num_messages:
            task = asyncio.create_task(self._make(self._pending.pop(0)))
            self._faults.add(task)

    async def _make(self, fault: Fault) -> None:
        self.outcome.fired[f"{fault.kind.value} {fault.target}"] += 1
        if fault.kind is FaultKind.KILL:
            async with self._killing:
                await self._kill(fault)
        elif fault.kind in (FaultKind.PAUSE, FaultKind.OVERSLEEP):
            processes = [self._process(name) for name in fault.target.split("+")]
            send_to(processes, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            send_to(processes, signal.SIGCONT)
        elif fault.kind is FaultKind.FULL_DISK:
            assert self._disk is not None
            with self._disk.filled():
                await asyncio.sleep(fault.duration_s)
        elif fault.kind is FaultKind.BAD_DISK:
            with bad_disk(self._disk_dir(self._active), fault.way):
                await asyncio.sleep(fault.duration_s)
        else:
            await self._disturb(fault, self._link(fault.target))

    async def _disturb(self, fault: Fault, link: Link) -> None:
        if fault.kind in (FaultKind.CUT, FaultKind.PARTITION):
            link.cut()
            await asyncio.sleep(fault.duration_s)
            link.heal()
        elif fault.kind is FaultKind.HALF_CLOSE:
            await link.half_close()
        elif fault.kind is FaultKind.FREEZE:
            link.directions[fault.way].flows.clear()
            await asyncio.sleep(fault.duration_s)
            link.directions[fault.way].flows.set()
        elif fault.kind is FaultKind.DELAY:
            link.directions[fault.way].late_s = fault.duration_s
            link.directions[fault.way].num_late += fault.count
        elif fault.kind is FaultKind.DOUBLE:
            link.directions[fault.way].num_doubled += fault.count
        elif fault.kind is FaultKind.LOSE:
            link.directions[fault.way].num_lost += fault.count
            if (
                fault.target == ATTACH_LINK
            ):  # no call waits for a single answer: the messages in flight at the end are lost
                link.directions[fault.way].num_lost = 2**31
                await asyncio.sleep(fault.duration_s)
                link.cut()
                link.heal()

    async def _kill(self, fault: Fault) -> None:
        if fault.target in self._clients:
            await self._kill_child(self._clients[fault.target].child)
        elif fault.target in ("worker", FOLLOWER) and not self.has_holder:
            await self._hand_over(fault.target)
        else:
            await self._restart([self._server(name) for name in fault.target.split("+")], fault.duration_s)

    async def _hand_over(self, target: str) -> None:
        """Kill the active worker by one of its ranks. The second worker attaches instead."""
        slot, worker, process = self._active, self._child(target), self._process(target)
        self._active = 1 - slot
        self._links[f"{ATTACH_LINK}{slot}"].hold()
        await self._kill_child(worker, process)
        self._links[f"{ATTACH_LINK}{self._active}"].release()
        await self._start(f"worker{slot}")

    async def _restart(self, names: list[str], pause_s: float = 0.0) -> None:
        """Kill servers at the same moment, and start them again."""
        await asyncio.gather(*(self._kill_child(self._servers[name]) for name in names))
        await asyncio.sleep(pause_s)
        for name in names:
            await self._start(name)

    async def _kill_child(self, child: Child, process: Process | None = None) -> None:
        """End a child by SIGKILL to it, or to another process that must not end without it."""
        self._expected_ends.add(child.pid)
        if process is None:
            await child.kill()
            return
        ranks = [psutil.Process(child.pid), *followers_of(child)]
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(child.ended), DEADLINE_S)
        if not await self._until("no rank is left", lambda: has_none_left(ranks), END_TIMEOUT_S, is_failure=True):
            self.outcome.failures.append(f"ranks are left: {ranks}")

    def _server(self, target: str) -> str:
        return f"worker{self._active}" if target in ("worker", FOLLOWER) else target

    def _child(self, target: str) -> Child:
        return self._clients[target].child if target in self._clients else self._servers[self._server(target)]

    def _process(self, target: str) -> Process:
        child = self._child(target)
        return followers_of(child)[0] if target == FOLLOWER else child.process

    def _link(self, target: str) -> Link:
        return self._links[f"{target}{self._active}" if target in (ATTACH_LINK, STEPS_LINK) else target]

    async def _heal(self) -> None:
        """Every fault has ended, and all processes run again."""
        faults, self._faults = self._faults, set()
        await asyncio.gather(*faults)
        for link in self._links.values():
            link.heal()
        for client in self._clients.values():
            if client.child.pid in self._expected_ends and client.child.ended.done():  # it had nothing left to do
                await client.start()

    # -- checks

    async def _audit_again_and_again(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # away, or no pool yet
                await self._audit()
            await asyncio.sleep(AUDIT_PERIOD_S)

    async def _audit(self) -> None:
        request = cache_service_pb2.AuditPoolRequest(pool="default")
        answer = await self._cache.AuditPool(request, timeout=CALL_TIMEOUT_S)
        self.outcome.failures += [f"audit: {violation}" for violation in answer.violations]

    async def _await_rest(self) -> None:
        """I8, on both sides."""
        state = await self._until("every block is back", self._is_at_rest, END_TIMEOUT_S, is_failure=True)
        if state is None:
            self.outcome.failures.append(f"not at rest: {await self._describe()}")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._audit()
            pool = await self._pool()
            self.outcome.failures += self._admissions.compare(pool.epoch, await self._tenants())

    async def _check_memory(self) -> None:
        """Kill the worker once more, at rest: the next one has all published blocks, if the holder lived all the time.

        The memory behind it is the present holder's.
        """
        before = await self._pool()

        async def begins_anew() -> bool:
            return await self._is_attached() and (await self._pool()).epoch != before.epoch

        await self._restart([self._server("worker")])
        if not await self._until("a new epoch", begins_anew, START_TIMEOUT_S, is_failure=True):
            self.outcome.failures.append(f"no new epoch: {await self._describe()}")
            return
        published, found = (pool.block_counts.cached_count for pool in (before, await self._pool()))
        if not self.outcome.fired[f"{FaultKind.KILL.value} {HOLDER}"] and found != published:
            self.outcome.failures.append(f"{found} of {published} published blocks have outlived the worker")

    async def _tenants(self) -> Sequence[cache_service_pb2.Tenant]:
        request = cache_service_pb2.ListTenantsRequest(pool="default")
        return (await self._cache.ListTenants(request, timeout=CALL_TIMEOUT_S)).tenants

    async def _pool(self) -> cache_service_pb2.Pool:
        request = cache_service_pb2.GetPoolRequest(pool="default")
        return (await self._cache.GetPool(request, timeout=CALL_TIMEOUT_S)).pool

    async def _worker(self) -> worker_service_pb2.GetStatisticsResponse:
        stub = self._worker_stubs[self._active]
        return await stub.GetStatistics(worker_service_pb2.GetStatisticsRequest(), timeout=CALL_TIMEOUT_S)

    async def _num_disk_orders(self) -> int:
        """Blocks that orders about the disk hold; they end in the end, also on a bad disk."""
        request = cache_service_pb2.GetStatisticsRequest(pool="default")
        (statistics,) = (await self._cache.GetStatistics(request, timeout=CALL_TIMEOUT_S)).pools
        return statistics.disk_block_counts.retired_count

    async def _is_attached(self) -> bool:
        pool, worker = await self._pool(), await self._worker()
        return pool.attached and worker.attached and pool.epoch == worker.epoch and pool.term == worker.term

    async def _is_at_rest(self) -> bool:
        pool, worker = await self._pool(), await self._worker()
        counts = pool.block_counts
        tenants = await self._tenants()
        return (
            await self._is_attached()
            and not any(tenant.held_block_count or tenant.reserved_block_count for tenant in tenants)
            and counts.free_count + counts.cached_count == NUM_BLOCKS - 1
            and pool.host_block_counts.free_count + pool.host_block_counts.cached_count
            == pool.geometry.host_block_count
            and not await self._num_disk_orders()
            and not (pool.lease_count or pool.sequence_count)
            and not (worker.open_lease_count or worker.sequence_count or worker.step_in_flight_count)
            and not worker.unacknowledged_report_count
        )

    async def _describe(self) -> str:
        try:
            pool, worker = await self._pool(), await self._worker()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        pool.ClearField("geometry")
        return " ".join(f"pool: {pool} worker: {worker}".split())

    async def _ask_what_clients_wait_for(self) -> None:
        """Their logs say it then."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for client in self._clients.values():
                client.child.send(number)
            await asyncio.sleep(DESCRIBING_S)

    async def _until(
        self, what: str, condition: Callable[[], Any], timeout_s: float, *, is_failure: bool = False
    ) -> bool | None:
        deadline = self._deadline(timeout_s)
        while not deadline.has_passed():
            with contextlib.suppress(grpc.aio.AioRpcError):
                if await condition():
                    return True
            await asyncio.sleep(0.01)
        if is_failure:
            return None
        raise HarnessError(f"not within {deadline}: {what}")

    def _deadline(self, timeout_s: float) -> Deadline:
        """A deadline for all processes, and for this one, which has the links."""
        return Deadline(timeout_s, lambda: [os.getpid(), *self._children.pids()])

    def _check_processes(self) -> None:
        processes = self._servers | {f"client {name}": client.child for name, client in self._clients.items()}
        for name, child in processes.items():
            if child.ended.done():
                self.outcome.failures.append(f"{name} has ended by itself, status {child.ended.result()}")

    def _read_logs(self) -> None:
        for log in self.folder.glob("*.log"):
            with log.open("rb") as file:
                file.seek(self._log_sizes.get(log, 0))
                data = file.read()
            self._log_sizes[log] = self._log_sizes.get(log, 0) + len(data)
            for line in data.decode(errors="replace").splitlines():
                if carried := CARRIED.search(line):
                    self.outcome.num_carried += int(carried[1])
                if re.search("|".join(SIGNS), line):
                    self.outcome.failures.append(f"{log.name}: {line[:300]}")

    def keep_logs(self, folder: Path, schedule: Schedule, outcome: Outcome) -> None:
        """Copies what there is to find out from."""
        folder.mkdir(parents=True, exist_ok=True)
        for log in self.folder.glob("*.log"):
            shutil.copy(log, folder)
        lines = [*map(str, schedule.faults), *map(str, schedule.tasks.items()), "", *outcome.failures]
        (folder / "schedule.txt").write_text("\n".join(lines) + "\n")


def send_to(processes: list[Process], number: int) -> None:
    """Send a signal to those that have not ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            process.send_signal(number)


def followers_of(worker: Child) -> list[psutil.Process]:
    """The ranks of a worker but the first."""
    children = psutil.Process(worker.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


async def has_none_left(ranks: list[psutil.Process]) -> bool:
    """True if all of these have ended."""
    return not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def knows_state_dir() -> bool:
    """True if this cachemgr can keep its state."""
    command = [sys.executable, "-m", "quire.cachemgr", "--help"]
    return STATE_DIR_FLAG in subprocess.run(command, capture_output=True, text=True, check=True).stdout
