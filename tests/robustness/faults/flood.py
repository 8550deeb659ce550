"""Bounded attacks on a real cachemgr and a real worker: large calls, unfinished messages, many calls at once.

`make flood` runs every case, `--case NAME` one, `--quick` all of them smaller. A case is a function in CASES. It
attacks one of the services and returns the answers by reason. Each case bounds the service's resident memory (at its
peak and afterwards, above that before the case) and the answers that may come. The table has the figures; a bound that
is broken ends the run with status 1. Times are shown and not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
import click
import grpc
import psutil
from certificates import sha256
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from rich.console import Console
from rich.table import Table
from robustness.faults.raw import UnfinishedCall
from robustness.fuzz.names import varint

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.compute.v1 import worker_service_pb2

MODEL = Path(__file__).parents[3] / "deploy/demo/model"
MIB = 2**20
MB = 10**6
TIMEOUT_S = 60.0
SAMPLE_INTERVAL_S = 0.01
SETTLE_S = 3.0
"""The pause before memory is measured after an attack: freed memory is returned to the system after a second."""
TOKENS = {"alice": "client", "wanda": "worker", "olga": "operator"}
"""Names of callers, which are their tokens, and their roles."""
SERVICES = {"cachemgr": "/quire.cache.v1.CacheService/", "worker": "/quire.compute.v1.WorkerService/"}
STEP_METHOD = {"cachemgr": "PlanStep", "worker": "RunStep"}
STREAM_METHOD = {"cachemgr": "PlanSteps", "worker": "RunSteps"}
OPERATOR_METHOD = {"cachemgr": "AuditPool", "worker": "ChecksumBlocks"}
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
LARGE_REQUESTS: dict[str, tuple[Any, tuple[str, ...], Message]] = {
    "cachemgr": (
        cache_service_pb2.PlanStepRequest.DESCRIPTOR,
        ("admissions", "token_ids"),
        cache_service_pb2.PlanStepRequest(lease_id="0" * 32),
    ),
    "worker": (
        worker_service_pb2.RunStepRequest.DESCRIPTOR,
        ("inputs", "token_ids"),
        worker_service_pb2.RunStepRequest(),
    ),
}
"""By service: what STEP_METHOD takes, the path to a field of tokens, and the fields before it."""
Answers = Counter[str]


@dataclass(frozen=True)
class Target:
    """A service under attack. `scale` shortens what repeats: 1 in a full run."""

    name: str
    process: ServiceProcess
    scale: float = 1.0

    @property
    def socket_path(self) -> str:
        return self.process.address.removeprefix("unix:")

    def path(self, method: str) -> str:
        return SERVICES[self.name] + method

    def times(self, count: int) -> int:
        """So many repetitions of a full run, here."""
        return max(1, round(count * self.scale))

    def rss(self) -> int:
        """Resident memory, in bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)


Attack = Callable[[Target], Awaitable[Answers]]


@dataclass(frozen=True)
class Case:
    """An attack, the answers it may get, and how far it may raise the service's resident memory."""

    attack: Attack
    answers: frozenset[str]
    max_peak_mib: float
    max_kept_mib: float


@dataclass
class Result:
    """Figures of one case on one service. Memory is above that before the case, in bytes."""

    case: Case
    service: str
    answers: Answers = field(default_factory=Counter)
    peak_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0

    def broken_bounds(self) -> Iterator[str]:
        for what, found, limit in (
            ("peak", self.peak_bytes, self.case.max_peak_mib),
            ("kept", self.kept_bytes, self.case.max_kept_mib),
        ):
            if found > limit * MIB:
                yield f"{what} {found / MIB:.0f} MiB, at most {limit:g}"
        if wrong := set(self.answers) - self.case.answers:
            yield f"answers {', '.join(sorted(wrong))}"
        if not self.answers:
            yield "no answers"


CASES: dict[str, Case] = {}


def case(*answers: str, max_peak_mib: float, max_kept_mib: float) -> Callable[[Attack], Attack]:
    """Puts an attack into CASES under its function's name."""

    def add(attack: Attack) -> Attack:
        CASES[attack.__name__] = Case(attack, frozenset(answers), max_peak_mib, max_kept_mib)
        return attack

    return add


# -- calls --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def dialed(target: Target) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(target.process.address, options=OPTIONS) as channel:
        yield channel


def metadata_of(caller: str | None) -> tuple[tuple[str, str], ...]:
    return () if caller is None else (("authorization", f"Bearer {caller}"),)


async def answer_to(call: Awaitable[object]) -> str:
    """OK, the reason of a refusal, or the code of a failure without one."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    return "OK"


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if status is None or not any(detail.Unpack(info) for detail in status.details[:1]):
        return error.code().name
    return info.reason


async def call_many(target: Target, method: str, body: bytes, *, times: int, caller: str | None) -> Answers:
    """Unary calls, one after the other, each on a connection of its own."""
    answers: Answers = Counter()
    for _ in range(times):
        async with dialed(target) as channel:
            call = channel.unary_unary(target.path(method))
            answers[await answer_to(call(body, metadata=metadata_of(caller), timeout=TIMEOUT_S))] += 1
    return answers


def large_request(service: str, num_bytes: int) -> bytes:
    """A request of STEP_METHOD with a token for each byte. It is of an unknown lease, or without a valid grant."""
    message, path, head = LARGE_REQUESTS[service]
    numbers = []
    for name in path:
        descriptor = message.fields_by_name[name]
        numbers.append(descriptor.number)
        message = descriptor.message_type
    body = bytes([1]) * num_bytes
    for number in reversed(numbers):
        body = _field(number, body)
    return head.SerializeToString() + body


def _field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


# -- cases --------------------------------------------------------------------------------------------------------


@case("CREDENTIALS_MISSING", max_peak_mib=32, max_kept_mib=32)
async def refused_without_a_token(target: Target) -> Answers:
    """Eight calls of 60 MB."""
    body = large_request(target.name, 60 * MB)
    return await call_many(target, STEP_METHOD[target.name], body, times=target.times(8), caller=None)


@case("ROLE_MISSING", max_peak_mib=32, max_kept_mib=32)
async def refused_without_the_role(target: Target) -> Answers:
    """Eight calls of 60 MB by a caller without the role."""
    body = large_request(target.name, 60 * MB)
    return await call_many(target, OPERATOR_METHOD[target.name], body, times=target.times(8), caller="alice")


@case("LEASE_NOT_FOUND", "BAD_SIGNATURE", max_peak_mib=640, max_kept_mib=128)
async def refused_by_the_service(target: Target) -> Answers:
    """Eight calls, nearly as large as the method takes, that may be made and that the service refuses."""
    body = large_request(target.name, {"cachemgr": 4, "worker": 30}[target.name] * MB)
    return await call_many(target, STEP_METHOD[target.name], body, times=target.times(8), caller="alice")


@case("INVALID_ARGUMENT", max_peak_mib=256, max_kept_mib=96)
async def too_large_for_the_method(target: Target) -> Answers:
    """Eight calls of 30 MB of a method with small messages."""
    body = large_request(target.name, 30 * MB)
    method = {"cachemgr": "RenewLease", "worker": "GetModel"}[target.name]
    return await call_many(target, method, body, times=target.times(8), caller="alice")


async def leave_unfinished(target: Target, method: str, *, caller: str | None) -> Answers:
    """Forty connections with a message of 31 MB each that lacks its last byte.

    Answers are "ended" (the server ended the call) or "open" after TIMEOUT_S.
    """
    calls = [
        UnfinishedCall(target.path(method), 31 * MB, metadata=metadata_of(caller)) for _ in range(target.times(40))
    ]
    answers: Answers = Counter()
    try:
        for call in calls:
            await call.open(target.socket_path)
        sending = [asyncio.create_task(call.send()) for call in calls]
        done, waiting = await asyncio.wait(
            [asyncio.create_task(call.is_ended.wait()) for call in calls], timeout=TIMEOUT_S
        )
        answers.update({"ended": len(done), "open": len(waiting)})
        for task in (*sending, *waiting):
            task.cancel()
    finally:
        for call in calls:
            await call.close()
    return +answers


@case("ended", max_peak_mib=32, max_kept_mib=32)
async def unfinished_without_a_token(target: Target) -> Answers:
    """Forty messages that do not end, of unauthorized callers."""
    return await leave_unfinished(target, STEP_METHOD[target.name], caller=None)


@case("ended", max_peak_mib=768, max_kept_mib=192)
async def unfinished(target: Target) -> Answers:
    """Forty messages that do not end, of an authorized caller: at most as docs/reference/security.md says."""
    return await leave_unfinished(target, STEP_METHOD[target.name], caller="alice")


@case("LEASE_NOT_FOUND", "BAD_SIGNATURE", "OVERLOADED", max_peak_mib=128, max_kept_mib=96)
async def many_steps(target: Target) -> Answers:
    """3,000 plans or steps at once, each of 2 KB."""
    body = large_request(target.name, 2_000)
    async with dialed(target) as channel:
        call = channel.unary_unary(target.path(STEP_METHOD[target.name]))
        calls = [call(body, metadata=metadata_of("alice"), timeout=TIMEOUT_S) for _ in range(target.times(3_000))]
        return Counter(await asyncio.gather(*map(answer_to, calls)))


@case("OPEN", "OVERLOADED", max_peak_mib=512, max_kept_mib=384)
async def many_streams(target: Target) -> Answers:
    """9,000 streams at once, each with a first message. An OPEN one was answered, or is still open."""
    body = b""
    async with dialed(target) as channel:
        call = channel.stream_stream(target.path(STREAM_METHOD[target.name]))
        streams = [call(metadata=metadata_of("alice"), timeout=TIMEOUT_S) for _ in range(target.times(9_000))]

        async def first_answer(stream: grpc.aio.StreamStreamCall) -> str:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(body)  # fails if the call has ended; reading says why it has
            try:
                answer = await stream.read()
            except grpc.aio.AioRpcError as error:
                return reason_of(error)
            return "OPEN" if answer is not grpc.aio.EOF else (await stream.code()).name

        answers = Counter(await asyncio.gather(*map(first_answer, streams)))
        for stream in streams:
            stream.cancel()
        return answers


# -- running ------------------------------------------------------------------------------------------------------


async def measure(target: Target, case: Case) -> Result:
    result = Result(case, target.name)
    before = target.rss()

    async def watch() -> None:
        while True:
            result.peak_bytes = max(result.peak_bytes, target.rss() - before)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    watching = asyncio.create_task(watch())
    begun = time.monotonic()
    try:
        result.answers = await case.attack(target)
    finally:
        watching.cancel()
    result.seconds = time.monotonic() - begun
    result.kept_bytes = await settled(target) - before
    return result


async def settled(target: Target) -> int:
    """The lowest resident memory while SETTLE_S pass, in bytes."""
    lowest, end = target.rss(), time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        await asyncio.sleep(SAMPLE_INTERVAL_S)
        lowest = min(lowest, target.rss())
    return lowest


@contextlib.contextmanager
def services() -> Iterator[LocalServices]:
    """Both services, with authentication."""
    with tempfile.TemporaryDirectory(prefix="quire-flood-", dir="/tmp") as name:
        folder = Path(name)
        tokens, worker_token = folder / "tokens", folder / "wanda.token"
        tokens.write_text("".join(f"{name} {roles} {sha256(name)}\n" for name, roles in TOKENS.items()))
        worker_token.write_text("wanda")
        worker_token.chmod(0o600)
        with LocalServices.start(
            model=MODEL,
            num_blocks=64,
            runtime_dir=folder / "run",
            extra_cachemgr_args=("--token-file", str(tokens)),
            extra_worker_args=(
                *("--dtype", "float32", "--threads", "1", "--block-size", "16"),
                *("--token-file", str(tokens), "--cachemgr-token-file", str(worker_token)),
            ),
        ) as started:
            yield started


def run_cases(names: Sequence[str], *, scale: float) -> Iterator[tuple[str, Result]]:
    """Each case against each service. Every case finds fresh processes, so that none inherits another's memory."""
    for name in names:
        with services() as started:
            for service in (started.cachemgr, started.worker):
                target = Target(service.name, service, scale)
                yield name, asyncio.run(measure(target, CASES[name]))


@click.command()
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Only these.")
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
def main(names: tuple[str, ...], quick: bool) -> None:
    """Attack both services with a bounded load and print the memory that they took."""
    table = Table("case", "service", "answers", "peak MiB", "kept MiB", "seconds", "broken bounds")
    broken = False
    for name, result in run_cases(names or list(CASES), scale=0.1 if quick else 1.0):
        bounds = list(result.broken_bounds())
        broken |= bool(bounds)
        answers = ", ".join(f"{count} {answer}" for answer, count in result.answers.most_common())
        figures = (f"{result.peak_bytes / MIB:.0f}", f"{result.kept_bytes / MIB:.0f}", f"{result.seconds:.1f}")
        table.add_row(name, result.service, answers, *figures, "; ".join(bounds))
        print(name, result.service, answers, *figures, "; ".join(bounds), file=sys.stderr, flush=True)
    Console(width=150).print(table)
    sys.exit(broken)


if __name__ == "__main__":
    main()
