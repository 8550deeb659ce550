"""Requests that arrive slowly or are large, over a real gRPC server in this process."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.service import roles as cachemgr_roles
from quire.compute.v1 import worker_service_pb2
from quire.serving import receiving
from quire.serving.access import Access
from quire.serving.errors import CallEnded
from quire.serving.interceptor import HandlerGuard, overloaded
from quire.serving.receiving import MAX_ARRIVING, Arrivals
from quire.worker.service import roles as worker_roles

SERVICE = "quire.test.Received"
DOMAIN = "test.quire.dev"


class Request:
    """A decoded message that can be watched."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class Handlers:
    """Remembers the requests that were decoded, without keeping them."""

    def __init__(self) -> None:
        self.decoded: list[weakref.ref[Request]] = []

    def decode(self, data: bytes) -> Request:
        request = Request(data)
        self.decoded.append(weakref.ref(request))
        return request

    async def refuse(self, request: Request, context: Any) -> StringValue:
        try:
            raise KeyError(request)
        except KeyError:
            raise CallEnded(overloaded(DOMAIN, 1)) from None

    async def fail(self, request: Request, context: Any) -> StringValue:
        raise KeyError(request)

    async def refuse_stream(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            raise CallEnded(overloaded(DOMAIN, len(request.data)))
            yield


def with_server(
    tmp_path: Path,
    body: Callable[[grpc.aio.Channel, HandlerGuard, Handlers], Awaitable[None]],
    *,
    access: Access | None = None,
) -> None:
    async def main() -> None:
        handlers = Handlers()
        guard = HandlerGuard(domain=DOMAIN, fatal=(), on_fatal=lambda error: None, access=access)
        server = grpc.aio.server(interceptors=(guard,))
        coding = {"request_deserializer": handlers.decode, "response_serializer": StringValue.SerializeToString}
        methods = {
            "Refuse": grpc.unary_unary_rpc_method_handler(handlers.refuse, **coding),
            "Fail": grpc.unary_unary_rpc_method_handler(handlers.fail, **coding),
            "RefuseStream": grpc.stream_stream_rpc_method_handler(handlers.refuse_stream, **coding),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
                await asyncio.wait_for(body(channel, guard, handlers), DEADLINE_S)
        finally:
            await server.stop(None)

    asyncio.run(main())


async def refusal(call: Awaitable[Any]) -> tuple[str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason, dict(info.metadata)


@pytest.mark.parametrize("method", ["Refuse", "Fail", "RefuseStream"])
def test_a_refused_request_is_freed_without_the_garbage_collector(tmp_path: Path, method: str) -> None:
    async def body(channel: grpc.aio.Channel, guard: HandlerGuard, handlers: Handlers) -> None:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                if method == "RefuseStream":
                    await refusal(channel.stream_stream(f"/{SERVICE}/{method}")(iter([b"a"])).read())
                else:
                    await refusal(channel.unary_unary(f"/{SERVICE}/{method}")(b"a"))
            while any(request() for request in handlers.decoded):
                await asyncio.sleep(0)
            assert len(handlers.decoded) == 3
        finally:
            gc.enable()

    with_server(tmp_path, body)


@pytest.mark.parametrize("method", ["Refuse", "RefuseStream"])
def test_a_caller_who_may_not_call_is_refused_before_there_is_a_message(tmp_path: Path, method: str) -> None:
    async def body(channel: grpc.aio.Channel, guard: HandlerGuard, handlers: Handlers) -> None:
        silent = asyncio.Event()

        async def no_request() -> AsyncIterator[bytes]:
            await silent.wait()
            yield b""

        call = channel.stream_stream(f"/{SERVICE}/{method}")(no_request())
        assert (await refusal(call.read()))[0] == "CREDENTIALS_MISSING"
        assert not handlers.decoded
        silent.set()

    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice client {'0' * 64}\n")
    with_server(tmp_path, body, access=Access({}, token_file=tokens, domain=DOMAIN))


def test_a_request_that_does_not_arrive_ends_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "ARRIVAL_TIMEOUT_S", 0.0)

    async def body(channel: grpc.aio.Channel, guard: HandlerGuard, handlers: Handlers) -> None:
        silent = asyncio.Event()

        async def no_request() -> AsyncIterator[bytes]:
            await silent.wait()
            yield b""

        reason, metadata = await refusal(channel.stream_unary(f"/{SERVICE}/Refuse")(no_request()))
        assert (reason, "limit" in metadata) == ("OVERLOADED", True)
        silent.set()

    with_server(tmp_path, body)


class SlowContext:
    """A call with a message that arrives when the test says so."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.arrived = asyncio.Event()

    async def read(self) -> bytes:
        self.begun.set()
        await self.arrived.wait()
        return b"here"


def test_requests_that_do_not_arrive_give_way_to_others() -> None:
    async def main() -> None:
        arrivals = Arrivals(contended_timeout_s=0.0)
        contexts: list[Any] = [SlowContext() for _ in range(MAX_ARRIVING)]
        stuck = [asyncio.create_task(arrivals.read(context)) for context in contexts]
        for context in contexts:
            await context.begun.wait()
        contexts[0].arrived.set()
        assert await stuck[0] == b"here"
        again: Any = SlowContext()
        stuck.append(asyncio.create_task(arrivals.read(again)))
        await again.begun.wait()
        assert not any(task.done() for task in stuck[1:]), "nobody waits"
        prompt: Any = SlowContext()
        prompt.arrived.set()
        assert await arrivals.read(prompt) == b"here"
        outcomes = await asyncio.gather(*stuck[1:], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimeoutError] * MAX_ARRIVING

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_the_limits_are_of_methods_that_are_there() -> None:
    for table, module in ((cachemgr_roles, cache_service_pb2), (worker_roles, worker_service_pb2)):
        (service,) = module.DESCRIPTOR.services_by_name.values()
        methods = {f"/{service.full_name}/{method.name}" for method in service.methods}
        assert set(table.MESSAGE_LIMITS) <= methods
