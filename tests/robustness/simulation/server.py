"""gRPC's server without its C core: each call is a task of the server's process, and passes the real HandlerGuard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from grpc._cython import cygrpc
from robustness.simulation.connections import End
from robustness.simulation.links import ORDER_S
from robustness.simulation.network import Network
from robustness.simulation.streams import TURN, Half, Metadata, Status
from robustness.simulation.world import Process

from quire.serving.interceptor import HandlerGuard
from quire.serving.server import SERVER_OPTIONS

RETRY_WITHIN_S = 0.01
"""After the first one, for a call that arrives twice."""
OK, UNKNOWN, UNIMPLEMENTED, UNAVAILABLE = 0, 2, 12, 14


@dataclass(slots=True)
class CallDetails:
    """The details that an interceptor sees."""

    method: str
    invocation_metadata: Any


class Nowhere(Half):
    """The client's side of a call with an answer that nobody takes."""

    __slots__ = ()

    def __init__(self, end: End, name: str) -> None:
        super().__init__(end, name)
        self.is_over = True

    def take_headers(self, metadata: Metadata) -> None:
        """Nothing."""

    def take_trailers(self, status: Status, answer: bytes | None) -> None:
        """Nothing."""


class ServerHalf(Half):
    """The server's side of a stream."""

    __slots__ = ("_ending", "_is_unary", "context")

    def __init__(self, end: End, name: str) -> None:
        super().__init__(end, name)
        self._is_unary = False
        self.context: SimulatedContext | None = None
        self._ending: tuple[Status, asyncio.Future[bool]] | None = None

    def take_call(self, metadata: Metadata, timeout_s: float | None, request: bytes | None, is_unary: bool) -> None:
        """The call has arrived."""
        if not self.is_over and self._end.is_open:
            self._is_unary = is_unary
            self._end.owner.take_call(self, metadata, timeout_s, request)

    def takes_second_copy(self) -> bool:
        """True if a fault wants this call to arrive twice."""
        link = self.peer.link
        if not (self._is_unary and link.doubles_call):
            return False
        link.doubles_call = False
        return True

    def copy(self) -> ServerHalf:
        """The same call once more, without a client."""
        copy = ServerHalf(self._end, self.name)
        copy.peer = Nowhere(self._end.peer, self.name)
        return copy

    def begin(self, context: SimulatedContext, request: bytes | None) -> None:
        """The call has arrived, a unary request with it."""
        self.context = context
        self._end.streams[self] = None
        if request is not None:
            self.inbox.append(request)
            self._ends_input = True

    async def send_status(self, status: Status, answer: bytes | None = None) -> None:
        """End the call, behind a message that waits. Raises ExecuteBatchError if the client has ended it."""
        if self.is_over:
            await TURN
            raise cygrpc.ExecuteBatchError('Failed "execute_batch"')
        if self._pending is None:
            self._end_call(status, answer)
            await TURN
            return
        self._ending = status, self.process.loop.create_future()
        if not await self._ending[1]:
            raise cygrpc.ExecuteBatchError('Failed "execute_batch"')

    def cancel(self, reason: str) -> None:
        """End the call at once, and its handler."""
        if not self.is_over:
            self.transmit(self.peer.take_trailers, Status(UNAVAILABLE, reason), None)
            self.break_off(reason)

    def take_reset(self) -> None:
        """The client has given the call up."""
        self.break_off("cancelled")

    def break_off(self, reason: str) -> None:
        if self.is_over:
            return
        super().break_off(reason)
        if self.context is not None:
            # The handler learns first that it reads nothing more.
            self.process.loop.call_soon(self.context.close)

    def on_sent(self, has_left: bool) -> None:
        if self._ending is None:
            return
        (status, ended), self._ending = self._ending, None
        if has_left:
            self._end_call(status, None)
        if not ended.done():
            ended.set_result(has_left)

    def _end_call(self, status: Status, answer: bytes | None) -> None:
        if self._is_unary and self.link.loses_answer:
            self.link.loses_answer = False
            self.link.network.break_connection(self._end)
        else:
            self.transmit(self.peer.take_trailers, status, answer)
        self.finish()


class SimulatedContext:
    """The part of a call that a handler has: grpc.aio.ServicerContext, as far as servers use it."""

    __slots__ = (
        "_abort_exception",
        "_begins_headers",
        "_code",
        "_details",
        "_half",
        "_has_sent_headers",
        "_is_ended",
        "_metadata",
        "_trailing_metadata",
        "serialize",
        "task",
    )

    def __init__(self, half: ServerHalf, metadata: Metadata) -> None:
        self._half, self._metadata = half, metadata
        self.task: asyncio.Task[None] | None = None
        self.serialize: Callable[[Any], bytes] | None = None
        self._code, self._details = OK, ""
        self._trailing_metadata: Metadata = ()
        self._abort_exception: Exception | None = None
        self._is_ended = False
        self._begins_headers = self._has_sent_headers = False

    async def read(self) -> Any:
        """The next message's bytes, or EOF."""
        self.raise_for_termination()
        data = await self._half.receive()
        self.raise_for_termination()
        return cygrpc.EOF if data is None else data

    async def write(self, message: Any) -> None:
        self.raise_for_termination()
        data = message if self.serialize is None else self.serialize(message)
        self._send_headers(())
        await self._half.send(data)
        self._has_sent_headers = True

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self.raise_for_termination()
        if self._has_sent_headers:
            raise cygrpc.UsageError("Send initial metadata failed: already sent")
        self._send_headers(tuple(metadata))
        await TURN
        self._has_sent_headers = True

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        if self._abort_exception is not None:
            raise cygrpc.UsageError("Abort already called!")
        self._abort_exception = cygrpc.AbortError("Locally aborted.")
        self._trailing_metadata = trailing_metadata or self._trailing_metadata
        self._code, self._details = code.value[0], details or self._details
        await self.end(self._code, self._details)
        raise self._abort_exception

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._trailing_metadata = tuple(metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing_metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code.value[0]

    def set_details(self, details: str) -> None:
        self._details = details

    def peer(self) -> str:
        return str(self._half.peer.process.name)

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def done(self) -> bool:
        return self._is_ended

    def cancelled(self) -> bool:
        """As gRPC does: true for a status that the handler has set."""
        return self._code == grpc.StatusCode.CANCELLED.value[0]

    # What the server does.

    def raise_for_termination(self) -> None:
        """A handler may go on after the end of its call."""
        if self._abort_exception is not None:
            raise self._abort_exception
        if self._is_ended:
            raise cygrpc.UsageError("RPC already finished.")

    async def answer(self, message: bytes | None) -> None:
        """End the call as the handler has said, a unary one with a message."""
        self.raise_for_termination()
        await self.end(self._code, self._details, message)

    async def end(self, code: int, details: str, message: bytes | None = None) -> None:
        self._is_ended = True
        if not self._has_sent_headers and self._begins_headers:
            # A write was given up before it had left. gRPC sends metadata once.
            raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8")
        await self._half.send_status(Status(code, details, self._trailing_metadata), message)

    async def fail(self, error: Exception) -> None:
        """End the call because of the handler's exception."""
        if not self._is_ended:
            await self.end(self._code or UNKNOWN, f"Unexpected {type(error)}: {error}")

    def close(self) -> None:
        """The client has ended the call, or its connection is gone."""
        if self.task is not None and not self._is_ended:
            self.task.cancel()

    def _send_headers(self, metadata: Metadata) -> None:
        if self._has_sent_headers:
            return
        if self._begins_headers:
            raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8")
        self._begins_headers = True
        half = self._half
        if not half.is_over:
            half.transmit(half.peer.take_headers, metadata)


class SimulatedServer:
    """A grpc.aio.Server of a process, as far as servicers are added to it."""

    def __init__(
        self, network: Network, process: Process, address: str, guard: HandlerGuard, options: Any = SERVER_OPTIONS
    ) -> None:
        self._network, self._process, self._guard = network, process, guard
        self.address = address
        given = dict(options)
        self._keepalive_s = given.get("grpc.keepalive_time_ms", 0) / 1e3
        self._keepalive_timeout_s = given.get("grpc.keepalive_timeout_ms", 20_000) / 1e3
        self._methods: dict[str, Any] = {}
        self._generic_handlers: list[grpc.GenericRpcHandler] = []
        self._ends: dict[End, None] = {}
        self._tasks: dict[asyncio.Task[None], ServerHalf] = {}
        self._is_stopping = False

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._generic_handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._methods.update({f"/{service}/{method}": handler for method, handler in handlers.items()})

    async def start(self) -> None:
        """Listen. Raises OSError if another process does."""
        self._network.listen(self._process, self.address, self._accept)

    async def stop(self, grace: float | None) -> None:
        """Accept nothing more; calls may end within the grace, in seconds, and are cancelled then."""
        self._is_stopping = True
        self._network.stop_listening(self.address)
        for end in self._ends:
            end.latest = end.link.send(end.latest + ORDER_S, end.peer.process, end.peer.take_goaway)
        if grace and self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace)
        for half in list(self._tasks.values()):
            half.cancel("Cancelling all calls")
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for end in self._ends:
            end.close()
        self._ends.clear()

    # What the network does.

    def take_call(self, half: ServerHalf, metadata: Metadata, timeout_s: float | None, request: bytes | None) -> None:
        """A call has arrived."""
        if self._is_stopping:
            half.transmit(half.peer.take_refusal)
            half.finish()
            return
        self._begin(half, metadata, timeout_s, request)
        if half.takes_second_copy():
            copy = half.copy()
            later_s = self._network.random.random() * RETRY_WITHIN_S
            self._network.world.after(later_s, self._begin, copy, metadata, timeout_s, request, process=self._process)

    def _accept(self, end: End) -> None:
        end.owner = self
        end.on_lost = lambda reason: self._ends.pop(end, None)
        self._ends[end] = None
        if self._keepalive_s:
            end.keep_alive(self._keepalive_s, self._keepalive_timeout_s)

    def _begin(self, half: ServerHalf, metadata: Metadata, timeout_s: float | None, request: bytes | None) -> None:
        context = SimulatedContext(half, metadata)
        half.begin(context, request)
        task = context.task = self._process.loop.create_task(self._handle(half.name, context))
        self._tasks[task] = half
        task.add_done_callback(self._tasks.pop)
        if timeout_s is not None:
            self._network.world.after(timeout_s, self._on_deadline, half)

    def _on_deadline(self, half: ServerHalf) -> None:
        if not half.is_over:
            self._network.world.after(0.0, half.take_reset, process=self._process)

    async def _handle(self, method: str, context: SimulatedContext) -> None:
        try:
            try:
                details = CallDetails(method, context.invocation_metadata())
                handler = await self._guard.intercept_service(self._find, details)
                if handler is None:
                    await context.end(UNIMPLEMENTED, "Method not found!")
                elif handler.response_streaming:
                    context.serialize = handler.response_serializer
                    await handler.stream_stream(None, context)
                    await context.answer(None)
                else:
                    answer = await handler.stream_unary(None, context)
                    context.raise_for_termination()
                    serialize = handler.response_serializer
                    await context.answer(answer if serialize is None else serialize(answer))
            except (cygrpc.AbortError, cygrpc.ExecuteBatchError):
                raise
            except Exception as error:
                await context.fail(error)
        except (cygrpc.AbortError, cygrpc.ExecuteBatchError, asyncio.CancelledError):
            pass  # gRPC logs the last two; the call stays as it is

    async def _find(self, details: grpc.HandlerCallDetails) -> Any:
        handler = self._methods.get(details.method)
        if handler is not None:
            return handler
        found = (generic.service(details) for generic in self._generic_handlers)
        return next((handler for handler in found if handler is not None), None)
