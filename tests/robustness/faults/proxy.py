"""A gRPC proxy that passes messages on without reading them, and can be told to do it badly.

A `Link` stands between one kind of caller and one server. "up" is towards the server, "down" are its answers. Messages
are the unit: bytes of one can't be lost or doubled without the connection's end. gRPC itself loses messages only
together with their stream, so a lost one here is either followed by a cut, or tests that its receiver notices the
loss.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

UP, DOWN = "up", "down"
STREAMS = ("PlanSteps", "RunSteps", "AttachPool")
"""Methods with messages that can be lost or doubled one by one. Of others the call is doubled, or its answer lost."""
OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_send_message_length", 2**26),
    ("grpc.max_receive_message_length", 2**26),
)
Context = grpc.aio.ServicerContext[bytes, bytes]
Call = grpc.aio.StreamStreamCall[bytes, bytes]
Observe = Callable[[object, str, str, bytes], None]
"""Called with a call, its method, the way and a message that is passed on to the server, or that comes from it."""


@dataclass(eq=False)
class Exchange:
    """One call through a link."""

    call: Call
    method: str
    is_cut: bool = False
    half_closed: bool = False

    def cut(self) -> None:
        """Both sides hear that the connection is gone."""
        self.is_cut = True
        self.call.cancel()

    async def half_close(self) -> None:
        """The server hears that the caller has nothing more to say."""
        if not self.half_closed:
            self.half_closed = True
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.call.done_writing()


@dataclass(eq=False)
class Direction:
    """The faults of the next messages in one direction."""

    flows: asyncio.Event = field(default_factory=asyncio.Event)
    num_lost: int = 0
    num_doubled: int = 0
    num_late: int = 0
    late_s: float = 0.0

    def __post_init__(self) -> None:
        self.flows.set()

    async def copies(self) -> int:
        """The number of copies of the next message to pass on, once it may be."""
        if self.num_late:
            self.num_late -= 1
            await asyncio.sleep(self.late_s)
        await self.flows.wait()
        if self.num_lost:
            self.num_lost -= 1
            return 0
        if self.num_doubled:
            self.num_doubled -= 1
            return 2
        return 1

    def heal(self) -> None:
        self.flows.set()
        self.num_lost = self.num_doubled = self.num_late = 0


class Link(grpc.GenericRpcHandler):
    """Listens at one address and passes every call on to another; enter it with `async with`.

    on_message is called with each message that comes, before anything becomes of it; observe with what the server gets
    and answers.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: str,
        target: str,
        on_message: Callable[[], None],
        observe: Observe = lambda *_: None,
    ) -> None:
        self.name = name
        self.address = listen
        self.directions = {UP: Direction(), DOWN: Direction()}
        self.num_messages: Counter[str] = Counter()
        self._target = target
        self._on_message = on_message
        self._observe = observe
        self._is_cut = False
        self._admits = asyncio.Event()
        self._admits.set()
        self._exchanges: set[Exchange] = set()

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
        self._server = grpc.aio.server(options=(*OPTIONS, ("grpc.so_reuseport", 0)))
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._admits.set()
        await self._server.stop(0)
        await self._channel.close()

    # -- faults

    def cut(self) -> None:
        """Ends open streams; nothing passes until it is healed."""
        self._is_cut = True
        for exchange in self._exchanges:
            exchange.cut()

    def heal(self) -> None:
        """From here on everything is passed on as it comes."""
        self._is_cut = False
        for direction in self.directions.values():
            direction.heal()

    def hold(self) -> None:
        """Calls that come wait."""
        self._admits.clear()

    def release(self) -> None:
        """Calls that wait, and those that come, are passed on."""
        self._admits.set()

    async def half_close(self) -> None:
        """Closes the callers' side of open streams."""
        for exchange in list(self._exchanges):
            await exchange.half_close()

    # -- passing on

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """For gRPC: the handler of any method."""
        method = handler_call_details.method

        async def behave(_: Any, context: Context) -> None:
            await self._pass(method, context)

        return grpc.stream_stream_rpc_method_handler(behave)

    async def _pass(self, method: str, context: Context) -> None:
        await self._admits.wait()
        if self._is_cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link is cut")
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if not key.startswith(("grpc-", "user-agent", ":"))
        ]
        open_call = self._channel.stream_stream(method)
        exchange = Exchange(open_call(timeout=context.time_remaining(), metadata=metadata), method)
        self._exchanges.add(exchange)
        is_stream = method.endswith(STREAMS)
        if is_stream:
            pumping = asyncio.create_task(self._pump_up(exchange, context))
        else:
            pumping = asyncio.create_task(self._ask(exchange, context, open_call, metadata))
        try:
            await self._pump_down(exchange, context, is_stream=is_stream)
        except asyncio.CancelledError:
            if not exchange.is_cut:
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was cut")
        finally:
            self._exchanges.discard(exchange)
            exchange.call.cancel()
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    async def _pump_up(self, exchange: Exchange, context: Context) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (message := await context.read()) is not grpc.aio.EOF:
                self._seen(UP)
                for _ in range(await self.directions[UP].copies()):
                    if not exchange.half_closed:
                        self._observe(exchange.call, exchange.method, UP, message)
                        await exchange.call.write(message)
            await exchange.half_close()

    async def _ask(self, exchange: Exchange, context: Context, open_call: Any, metadata: Any) -> None:
        """A call of one request: one that is doubled is made twice, one that is lost is cut."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            message = await context.read()
            self._seen(UP)
            copies = await self.directions[UP].copies()
            if not copies:
                exchange.cut()
                return
            if copies > 1:
                again = open_call(timeout=context.time_remaining(), metadata=metadata)
                self._observe(again, exchange.method, UP, message)
                await again.write(message)
                await again.done_writing()
                if (answer := await again.read()) is not grpc.aio.EOF:
                    self._observe(again, exchange.method, DOWN, answer)
            self._observe(exchange.call, exchange.method, UP, message)
            await exchange.call.write(message)
            await exchange.half_close()

    async def _pump_down(self, exchange: Exchange, context: Context, *, is_stream: bool) -> None:
        call = exchange.call
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._seen(DOWN)
                self._observe(call, exchange.method, DOWN, message)
                copies = await self.directions[DOWN].copies()
                if exchange.is_cut:
                    raise asyncio.CancelledError
                if not copies and not is_stream:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
                for _ in range(copies if is_stream else 1):
                    await context.write(message)
        except grpc.aio.AioRpcError:
            pass  # its status is passed on below
        code = await call.code()
        if code is grpc.StatusCode.CANCELLED and exchange.is_cut:
            raise asyncio.CancelledError
        trailing = tuple(await call.trailing_metadata() or ())
        if code is not grpc.StatusCode.OK:
            await context.abort(code, await call.details() or "", trailing)
        context.set_trailing_metadata(trailing)

    def _seen(self, way: str) -> None:
        self.num_messages[way] += 1
        self._on_message()
