"""The number of open calls of a server: over a real gRPC server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quire.serving.errors import CallEnded
from quire.serving.interceptor import HandlerGuard, overloaded

SERVICE = "quire.test.Held"
MAX_CALLS = 2


class Held:
    """Calls that end when the test says so."""

    def __init__(self) -> None:
        self.arrived = asyncio.Semaphore(0)
        self.released = asyncio.Event()

    async def hold(self, request: StringValue, context: Any) -> StringValue:
        self.arrived.release()
        await self.released.wait()
        return request

    async def refuse_late(self, request: StringValue, context: Any) -> StringValue:
        """Refuses a caller that is gone, if it goes before it is refused."""
        self.arrived.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.released.set()
            raise CallEnded(overloaded("test.quire.dev", 1)) from None
        return request

    async def hold_stream(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield await self.hold(request, context)


def with_server(tmp_path: Path, body: Callable[[grpc.aio.Channel, HandlerGuard, Held], Awaitable[None]]) -> None:
    async def main() -> None:
        held = Held()
        guard = HandlerGuard(domain="test.quire.dev", fatal=(), on_fatal=lambda error: None, max_calls=MAX_CALLS)
        server = grpc.aio.server(interceptors=(guard,))
        coding = {"request_deserializer": StringValue.FromString, "response_serializer": StringValue.SerializeToString}
        methods = {
            "Unary": grpc.unary_unary_rpc_method_handler(held.hold, **coding),
            "Late": grpc.unary_unary_rpc_method_handler(held.refuse_late, **coding),
            "Stream": grpc.unary_stream_rpc_method_handler(held.hold_stream, **coding),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
                await asyncio.wait_for(body(channel, guard, held), DEADLINE_S)
        finally:
            await server.stop(None)

    asyncio.run(main())


async def call(channel: grpc.aio.Channel, method: str) -> list[str]:
    """The answer of a call."""
    coding = (StringValue.SerializeToString, StringValue.FromString)
    if method != "Stream":
        return [(await channel.unary_unary(f"/{SERVICE}/{method}", *coding)(StringValue(value="a"))).value]
    return [
        answer.value async for answer in channel.unary_stream(f"/{SERVICE}/{method}", *coding)(StringValue(value="a"))
    ]


@pytest.mark.parametrize("method", ["Unary", "Stream"])
def test_calls_beyond_the_limit_are_refused_and_those_before_are_answered(tmp_path: Path, method: str) -> None:
    async def body(channel: grpc.aio.Channel, guard: HandlerGuard, held: Held) -> None:
        open_calls = [asyncio.ensure_future(call(channel, each)) for each in ("Unary", "Stream")]
        for _ in open_calls:
            await held.arrived.acquire()
        assert guard.statistics().num_open == MAX_CALLS
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method)
        said = rpc_status.from_call(caught.value)
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert said.details[0].Unpack(info)
        assert said.details[1].Unpack(retry)
        assert (info.reason, dict(info.metadata)) == ("OVERLOADED", {"limit": str(MAX_CALLS)})
        assert retry.retry_delay.ToMilliseconds() == 100
        probe = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert (await probe).status == health_pb2.HealthCheckResponse.SERVING
        held.released.set()
        assert await asyncio.gather(*open_calls) == [["a"], ["a"]]
        assert await call(channel, method) == ["a"]
        assert guard.statistics().refused == {(f"/{SERVICE}/{method}", "OVERLOADED"): 1}

    with_server(tmp_path, body)


def test_a_call_that_its_client_gives_up_is_not_open_any_more(tmp_path: Path) -> None:
    async def body(channel: grpc.aio.Channel, guard: HandlerGuard, held: Held) -> None:
        for method in ("Unary", "Stream") * MAX_CALLS:
            given_up = asyncio.ensure_future(call(channel, method))
            await held.arrived.acquire()
            given_up.cancel()
            while guard.statistics().num_open:
                await asyncio.sleep(0)
        assert guard.statistics().refused == {}

    with_server(tmp_path, body)


def test_a_caller_that_has_gone_is_no_failure_of_the_handler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(channel: grpc.aio.Channel, guard: HandlerGuard, held: Held) -> None:
        calling = asyncio.ensure_future(call(channel, "Late"))
        await held.arrived.acquire()
        await channel.close()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await held.released.wait()

    with_server(tmp_path, body)
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
