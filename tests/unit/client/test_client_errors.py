"""Reasons become exceptions; calls and streams over a real gRPC server in this process, which does as a test says."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from google.rpc import error_details_pb2, status_pb2

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc, error_pb2
from quire.cli.command_line import explain
from quire.cli.snapshot import UnreachableError, answering
from quire.client import channel
from quire.client.cache_client import CacheClient, keep_lease_alive
from quire.client.channel import RetryPolicy, decode_error
from quire.client.errors import (
    REASONS,
    EpochChanged,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutOfRoom,
    ProtocolViolation,
    QuireError,
    RequestFailed,
    StepFailed,
    StepRefused,
    Unavailable,
    error_of_reason,
)
from quire.client.worker_client import WorkerClient
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

QUICK = RetryPolicy(max_attempts=4, first_delay_s=0.001, max_delay_s=0.002)


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_keeps_its_name_and_numbers(reason: str) -> None:
    error = decode_error(error_pb2.Error(code=3, reason=reason, message="no", metadata={"value": "7"}))
    assert type(error) is REASONS[reason]
    assert (error.reason, error.message, error.number("value")) == (reason, "no", 7)
    assert str(error) == f"{reason}: no"


RAW = (
    "failed to connect to all addresses; last error: UNKNOWN: unix:/run/quire/cachemgr.sock: connect failed "
    "(unix:/run/quire/cachemgr.sock): Connection refused"
)


def test_a_command_shows_no_text_of_grpc() -> None:
    away = Unavailable(RAW, reason="UNAVAILABLE")
    given_up = RequestFailed(f"given up after 8 recoveries, the last one for: {away}; tokens delivered: 3")
    given_up.__cause__ = away
    for error in (away, given_up):
        told = explain(error).message
        assert "Connection refused" in told
        assert "quire stats" in told
        assert "last error" not in told
        assert "\n" not in told
    assert "given up after 8 recoveries, the last one for: Connection refused; tokens delivered: 3" in told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Unavailable(RAW), "(Connection refused)"),
        (Unavailable("Deadline Exceeded", reason="DEADLINE_EXCEEDED"), "(no answer within 5 s)"),
        (QuireError("Method not found!", reason="UNIMPLEMENTED"), "(another service is there)"),
        (Unavailable("x: Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)"), "does not use gRPC"),
        (Unavailable("x: connection attempt timed out before receiving SETTINGS frame"), "did not answer in time"),
    ],
)
def test_a_cachemgr_that_does_not_answer_is_named_with_what_to_do(error: QuireError, told: str) -> None:
    with pytest.raises(UnreachableError) as caught, answering("unix:/run/quire/cachemgr.sock"):
        raise error
    assert caught.value.message.startswith("no cachemgr answers at unix:/run/quire/cachemgr.sock (")
    assert told in caught.value.message
    assert "quire up" in caught.value.message


def test_what_cachemgr_itself_says_is_passed_on() -> None:
    with pytest.raises(NotFound), answering("unix:/run/quire/cachemgr.sock"):
        raise NotFound("no pool 'x'", reason="POOL_NOT_FOUND")


def test_an_error_in_an_answer_says_when_to_ask_again() -> None:
    assert decode_error(error_pb2.Error(reason="OVERLOADED")).retry_after_s is None
    for delay_s in (0.0, 0.25):
        error = error_pb2.Error(reason="OVERLOADED")
        error.retry_delay.FromNanoseconds(int(delay_s * 1e9))
        assert decode_error(error).retry_after_s == delay_s


def test_an_unknown_reason_is_still_an_error() -> None:
    error = error_of_reason("OF_A_LATER_VERSION", "hm")
    assert type(error) is QuireError
    assert error.reason == "OF_A_LATER_VERSION"


def test_epoch_changed_says_which() -> None:
    error = error_of_reason("EPOCH_CHANGED", "", {"epoch": "12"})
    assert isinstance(error, EpochChanged)
    assert error.epoch == 12


def test_metadata_can_not_be_changed() -> None:
    error = error_of_reason("OUT_OF_BLOCKS", "", {"needed": "1"})
    with pytest.raises(TypeError):
        error.metadata["needed"] = "2"  # type: ignore[index]


def test_channel_options_are_explicit() -> None:
    options = dict(channel.CHANNEL_OPTIONS)
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 64 * 2**20
    assert "grpc.keepalive_time_ms" in options


def test_waits_between_attempts_grow_to_a_limit() -> None:
    delays = list(RetryPolicy(max_attempts=8, first_delay_s=0.1, max_delay_s=0.4).delays_s())
    assert len(delays) == 7
    assert all(0.05 <= delays[0] <= 0.1 and 0.2 <= delay <= 0.4 for delay in delays[3:])


# Over gRPC.


def status_of(code: grpc.StatusCode, reason: str, *, retry_delay_s: float | None = None, **metadata: str) -> Any:
    """A status with an ErrorInfo, and a RetryInfo before it if asked for, as grpcio's abort_with_status takes it."""
    status = status_pb2.Status(code=code.value[0], message="refused")
    if retry_delay_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_delay_s * 1e9))
        status.details.add().Pack(retry)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="cache.quire.dev", metadata=metadata))

    class AsStatus(grpc.Status):
        def __init__(self) -> None:
            self.code, self.details = code, "refused"
            self.trailing_metadata = (("grpc-status-details-bin", status.SerializeToString()),)

    return AsStatus()


class Cache(cache_service_pb2_grpc.CacheServiceServicer):
    """Does what `leases` and `plans` say, one entry per call."""

    def __init__(self) -> None:
        self.leases: list[Any] = []
        self.plans: list[Any] = []
        self.request_ids: list[str] = []
        self.streams = 0
        self.stream_ended = asyncio.Event()

    async def CreateLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.request_ids.append(request.request_id)
        status = self.leases.pop(0) if self.leases else None
        if status is not None:
            await context.abort_with_status(status)
        return cache_service_pb2.CreateLeaseResponse(lease_id="lease", epoch=5)

    async def RenewLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.request_ids.append("renew")
        status = self.leases.pop(0) if self.leases else None
        if status is not None:
            await context.abort_with_status(status)
        return cache_service_pb2.RenewLeaseResponse()

    async def PlanSteps(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        try:
            async for answer in self.answers(requests, context):
                yield answer
        finally:
            self.stream_ended.set()

    async def answers(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self.request_ids.append(request.plan.request_id)
            action = self.plans.pop(0) if self.plans else None
            if action == "break":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if action == "end":
                return
            if action == "silence":
                continue
            if isinstance(action, error_pb2.Error):
                yield cache_service_pb2.PlanStepsResponse(error=action)
            elif action == "empty":
                yield cache_service_pb2.PlanStepsResponse()
            else:
                plan = cache_service_pb2.PlanStepResponse(step_number=request.plan.epoch)
                yield cache_service_pb2.PlanStepsResponse(plan=plan)


class Worker(worker_service_pb2_grpc.WorkerServiceServicer):
    """Reads steps while `reads` is set, answers what `answers` gets, and breaks when told."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.seen: list[bytes] = []
        self.arrived = asyncio.Event()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    async def RunSteps(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async def read() -> None:
            await self.reads.wait()
            async for request in requests:
                self.seen.append(request.step.grant.grant)
                self.arrived.set()

        reading = asyncio.create_task(read())
        try:
            while (answer := await self.answers.get()) != "break":
                yield answer
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        finally:
            reading.cancel()


def with_server(tmp_path: Path, body: Callable[[str, Cache, Worker], Awaitable[None]]) -> None:
    async def main() -> None:
        cache, worker = Cache(), Worker()
        server = grpc.aio.server()
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        address = f"unix:{tmp_path}/s"
        server.add_insecure_port(address)
        await server.start()
        try:
            await asyncio.wait_for(body(address, cache, worker), DEADLINE_S)
        finally:
            await server.stop(None)

    asyncio.run(main())


def test_error_info_of_a_status_decides(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.leases = [status_of(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", field="ttl", value="0")]
        with pytest.raises(InvalidRequest) as caught:
            await client.create_lease("", ttl_s=1)
        assert caught.value.metadata["field"] == "ttl"
        cache.leases = [status_of(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")]
        with pytest.raises(LeaseLost):
            await client.renew_lease("gone")
        await client.close()

    with_server(tmp_path, body)


def test_a_lease_is_asked_for_again_under_one_request_id(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.leases = [status_of(grpc.StatusCode.UNAVAILABLE, "POOL_DETACHED")] * 3
        assert (await client.create_lease("", ttl_s=1)).lease_id == "lease"
        assert len(cache.request_ids) == 4
        assert len(set(cache.request_ids)) == 1
        cache.leases = [status_of(grpc.StatusCode.UNAVAILABLE, "POOL_DETACHED")] * 4
        with pytest.raises(Unavailable) as caught:
            await client.create_lease("", ttl_s=1)
        assert caught.value.reason == "POOL_DETACHED"
        await client.close()

    with_server(tmp_path, body)


class Broken:
    """A connection that breaks in the midst of a call, in gRPC's words."""

    code, details, trailing_metadata = grpc.StatusCode.INTERNAL, "Internal error from Core", ()


def test_a_connection_that_breaks_in_the_midst_of_a_call_is_an_absence(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.leases = [Broken()]
        assert (await client.create_lease("p", ttl_s=1.0)).lease_id == "lease"
        cache.leases = [Broken()] * QUICK.max_attempts
        with pytest.raises(Unavailable) as caught:
            await client.create_lease("p", ttl_s=1.0)
        assert caught.value.reason == "INTERNAL"
        await client.close()

    with_server(tmp_path, body)


def test_a_server_that_says_when_to_ask_again_is_asked_then(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client, loop = CacheClient(address, retry=QUICK), asyncio.get_running_loop()
        cache.leases = [status_of(grpc.StatusCode.UNAVAILABLE, "POOL_DETACHED", retry_delay_s=0.05)] * 2
        asked = loop.time()
        assert (await client.create_lease("", ttl_s=1)).lease_id == "lease"
        assert loop.time() - asked >= 0.1
        cache.leases = [status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_LEASES", retry_delay_s=1.5)]
        with pytest.raises(OutOfRoom) as caught:
            await client.create_lease("", ttl_s=1)
        assert caught.value.retry_after_s == 1.5
        cache.leases = [status_of(grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")]
        with pytest.raises(NotFound) as lost:
            await client.create_lease("", ttl_s=1)
        assert lost.value.retry_after_s is None
        await client.close()

    with_server(tmp_path, body)


def test_a_method_the_server_does_not_have_is_an_error_by_its_code(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        with pytest.raises(QuireError) as caught:
            await client.get_pool()
        assert caught.value.reason == "UNIMPLEMENTED"
        await client.close()

    with_server(tmp_path, body)


def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        client = CacheClient(f"unix:{tmp_path}/nobody", retry=QUICK, timeout_s=5)
        with pytest.raises(Unavailable):
            await client.create_lease("", ttl_s=1)
        with pytest.raises(Unavailable):
            await client.plan(cache_service_pb2.PlanStepRequest(request_id="1"))
        await client.close()

    asyncio.run(main())


def plan_request(number: int, request_id: str = "") -> cache_service_pb2.PlanStepRequest:
    return cache_service_pb2.PlanStepRequest(epoch=number, request_id=request_id or str(number))


def test_plans_share_a_stream_that_outlives_their_errors(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.plans = [None, error_pb2.Error(code=8, reason="TOO_MANY_STEPS"), "empty", None]
        assert (await client.plan(plan_request(1))).step_number == 1
        with pytest.raises(OutOfRoom):
            await client.plan(plan_request(2))
        with pytest.raises(ProtocolViolation):
            await client.plan(plan_request(3))
        assert (await client.plan(plan_request(4))).step_number == 4
        assert cache.streams == 1
        await client.close()

    with_server(tmp_path, body)


@pytest.mark.parametrize("accident", ["break", "end"])
def test_a_plan_is_sent_again_under_its_request_id_when_the_stream_breaks(tmp_path: Path, accident: str) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.plans = [None, accident, None]
        await client.plan(plan_request(1))
        assert (await client.plan(plan_request(2))).step_number == 2
        assert cache.request_ids == ["1", "2", "2"]
        assert cache.streams == 2
        await client.close()

    with_server(tmp_path, body)


def test_a_plan_without_request_id_is_not_sent_again(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.plans = ["break"]
        with pytest.raises(Unavailable):
            await client.plan(cache_service_pb2.PlanStepRequest())
        assert cache.request_ids == [""]
        await client.close()

    with_server(tmp_path, body)


def test_a_late_answer_breaks_the_stream_and_is_never_taken_for_another(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=RetryPolicy(max_attempts=1), timeout_s=0.05)
        cache.plans = ["silence", None]
        with pytest.raises(Unavailable) as caught:
            await client.plan(plan_request(1))
        assert caught.value.reason == "DEADLINE_EXCEEDED"
        await cache.stream_ended.wait()
        client._plans._timeout_s = DEADLINE_S
        assert (await client.plan(plan_request(2))).step_number == 2
        await client.close()

    with_server(tmp_path, body)


def test_an_answer_nobody_waits_for_any_more_is_not_taken_for_another(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        await client.plan(plan_request(1))
        given_up = asyncio.create_task(client.plan(plan_request(2)))
        # Given up while it is written it would break the stream, since it may be there in part.
        while cache.request_ids != ["1", "2"] or client._plans._write_lock.locked():
            await asyncio.sleep(0)
        given_up.cancel()
        assert (await client.plan(plan_request(3))).step_number == 3
        assert cache.streams == 1
        await client.close()

    with_server(tmp_path, body)


def step_request(name: bytes) -> worker_service_pb2.RunStepRequest:
    request = worker_service_pb2.RunStepRequest()
    request.grant.grant = name
    return request


def answer(number: int) -> worker_service_pb2.RunStepsResponse:
    return worker_service_pb2.RunStepsResponse(step=worker_service_pb2.RunStepResponse(step_number=number))


def test_steps_are_sent_before_others_are_answered_and_answered_in_order(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = WorkerClient(address, retry=QUICK)
        first, second = await client.run(step_request(b"a")), await client.run(step_request(b"b"))
        while worker.seen != [b"a", b"b"]:
            worker.arrived.clear()
            await worker.arrived.wait()
        for one in (answer(1), worker_service_pb2.RunStepsResponse(error=error_pb2.Error(reason="STEP_FAILED"))):
            worker.answers.put_nowait(one)
        with pytest.raises(StepFailed):
            await second.result()
        assert (await first.result()).step_number == 1
        await client.close()

    with_server(tmp_path, body)


def test_a_broken_stream_fails_every_step_on_it_and_the_next_opens_another(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = WorkerClient(address, retry=QUICK)
        lost = [await client.run(step_request(b"a")), await client.run(step_request(b"b"))]
        worker.answers.put_nowait("break")
        for step in lost:
            with pytest.raises(Unavailable):
                await step.result()
        worker.answers.put_nowait(
            worker_service_pb2.RunStepsResponse(error=error_pb2.Error(reason="STEP_OUT_OF_ORDER"))
        )
        with pytest.raises(StepRefused):
            await (await client.run(step_request(b"c"))).result()
        await client.close()

    with_server(tmp_path, body)


@pytest.mark.parametrize("accident", ["late", "too many answers"])
def test_a_stream_that_breaks_while_a_request_is_written_is_an_error_of_that_request(
    tmp_path: Path, accident: str
) -> None:
    """gRPC raises a cancellation for the write: a task that believed it would end without an error."""

    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = WorkerClient(address, retry=QUICK, step_timeout_s=0.2 if accident == "late" else 20.0)
        worker.reads.clear()
        writing = asyncio.create_task(client.run(step_request(bytes(2**23))))  # more than fits the stream's window
        if accident == "too many answers":
            worker.answers.put_nowait(answer(1))
            worker.answers.put_nowait(answer(2))
        step = await writing
        if accident == "late":
            with pytest.raises(Unavailable, match="no answer within"):
                await step.result()
        client._steps._timeout_s = DEADLINE_S
        worker.reads.set()
        step = await client.run(step_request(b"a"))
        worker.answers.put_nowait(answer(3))
        assert (await step.result()).step_number == 3
        await client.close()

    with_server(tmp_path, body)


def test_a_request_that_is_given_up_while_it_is_written_breaks_the_stream(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = WorkerClient(address, retry=QUICK)
        first = await client.run(step_request(b"a"))
        await worker.arrived.wait()
        worker.reads.clear()
        await client.hang_up()
        writing = asyncio.create_task(client.run(step_request(bytes(2**23))))
        await asyncio.wait([writing], timeout=0.1)
        assert writing.cancel()
        await asyncio.wait([writing])
        assert writing.cancelled()
        with pytest.raises(Unavailable, match="closed"):
            await first.result()
        await client.close()

    with_server(tmp_path, body)


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_a_server_that_never_says_a_word_is_late(tmp_path: Path, timeout_s: float) -> None:
    """It has accepted the connection, so that is no error; and the first request waits for the stream to be open."""

    async def body() -> None:
        client = WorkerClient(f"unix:{tmp_path}/s", retry=QUICK, step_timeout_s=timeout_s)
        for _ in range(2):
            step = await asyncio.wait_for(client.run(step_request(b"a")), DEADLINE_S)
            with pytest.raises(Unavailable, match="no answer within"):
                await step.result()
        await client.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        asyncio.run(body())


def test_closing_fails_what_waits(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = WorkerClient(address, retry=QUICK)
        step = await client.run(step_request(b"a"))
        await client.close()
        with pytest.raises(Unavailable):
            await step.result()

    with_server(tmp_path, body)


def test_a_lease_is_renewed_until_it_is_lost(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        cache.leases = [None, None, status_of(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")]
        lost = await keep_lease_alive(client, "lease", ttl_s=0.003, last_renewal=lambda: 0.0)
        assert lost.reason == "LEASE_NOT_FOUND"
        assert cache.request_ids == ["renew"] * 3
        await client.close()

    with_server(tmp_path, body)


def test_a_lease_that_calls_renew_is_left_alone(tmp_path: Path) -> None:
    async def body(address: str, cache: Cache, worker: Worker) -> None:
        client = CacheClient(address, retry=QUICK)
        loop = asyncio.get_running_loop()
        keeper = asyncio.create_task(keep_lease_alive(client, "lease", ttl_s=0.003, last_renewal=loop.time))
        for _ in range(50):
            await asyncio.sleep(0)
        keeper.cancel()
        assert cache.request_ids == []
        await client.close()

    with_server(tmp_path, body)
