"""gRPC without its C core: the channel of a simulated process. grpc.aio's Python code runs on it as it is.

    open_channel     takes the place of grpc.aio.insecure_channel
    ChannelCore      connects, reconnects with backoff, and fails calls meanwhile, as a channel of one address does
    CallCore         one call at its client: when it opens, what it receives, how it ends

SimulatedServer is the other side: server.py.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from grpc._cython import cygrpc
from grpc.aio import _channel
from robustness.simulation.connections import End
from robustness.simulation.network import Network
from robustness.simulation.server import ServerHalf
from robustness.simulation.streams import TURN, Half, Metadata, Status

__all__ = ["SimulatedChannel", "open_channel"]

CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE = 1, 4, 13, 14
BACKOFF_FACTOR, BACKOFF_JITTER = 1.6, 0.2


def open_channel(network: Network, target: str, options: Any = None) -> SimulatedChannel:
    """A channel of the process that runs now."""
    process = network.world.running
    assert process is not None, "channels belong to processes"
    return SimulatedChannel(ChannelCore(network, process, target, dict(options or ())))


class SimulatedChannel(_channel.Channel):
    """grpc.aio's channel over a ChannelCore."""

    def __init__(self, core: ChannelCore) -> None:
        self._unary_unary_interceptors = []
        self._unary_stream_interceptors = []
        self._stream_unary_interceptors = []
        self._stream_stream_interceptors = []
        self._loop = core.process.loop
        self._channel = core
        self._active_calls: Any = _OrderedCalls()


class _OrderedCalls:
    """The calls that gRPC keeps in a WeakSet, in the order of addresses in memory: other ones in each run."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def add(self, call: Any) -> None:
        self._calls[call] = None

    def discard(self, call: Any) -> None:
        self._calls.pop(call, None)

    def clear(self) -> None:
        self._calls.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._calls)


class ChannelCore:
    """The connection of a channel. It is made for the first call, and again for a call after a break.

    While it can't be made, attempts go on with backoff, and each call fails at once.
    """

    def __init__(self, network: Network, process: Any, target: str, options: dict[str, Any]) -> None:
        self.network, self.world, self.process, self.target = network, network.world, process, target
        self._first_backoff_s = options.get("grpc.initial_reconnect_backoff_ms", 1_000) / 1e3
        self._longest_backoff_s = options.get("grpc.max_reconnect_backoff_ms", 120_000) / 1e3
        self._connect_timeout_s = options.get("grpc.min_reconnect_backoff_ms", 20_000) / 1e3
        self._keepalive_s = options.get("grpc.keepalive_time_ms", 0) / 1e3
        self._keepalive_timeout_s = options.get("grpc.keepalive_timeout_ms", 20_000) / 1e3
        self._backoff_s = self._first_backoff_s
        self._next_attempt_at = 0.0
        self._end: End | None = None
        self._is_connecting = False
        self._failure: Status | None = None
        """How the last attempt failed: calls fail so until one succeeds."""
        self._waiting: dict[CallCore, None] = {}
        self._is_closed = False

    # What grpc.aio calls.

    def get_registered_call_handle(self, method: bytes) -> int:
        return 0

    def call(self, method: bytes, deadline: float | None, *_: Any) -> CallCore:
        if self._is_closed:
            raise cygrpc.UsageError("Channel is closed.")
        return CallCore(self, method.decode(), None if deadline is None else deadline - time.time())

    def closing(self) -> None:
        self._is_closed = True

    def closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        if self._end is not None and self.process.is_alive:
            self._end.close()
        self._end = None

    # What calls need.

    def begin(self, call: CallCore) -> None:
        """Open the call, now or when there is a connection, or fail it."""
        if self._end is not None:
            call.open(self._end)
        elif self._failure is not None:
            self.process.loop.call_soon(call.end, self._failure)
        else:
            self._waiting[call] = None
            if not self._is_connecting:
                self._connect()

    def forget(self, call: CallCore) -> None:
        """The call needs no connection any more."""
        self._waiting.pop(call, None)

    def take_goaway(self) -> None:
        """The server stops: the next call needs another connection. Calls that are open go on."""
        self._end = None

    def _connect(self) -> None:
        self._is_connecting = True
        spread = 1.0 + BACKOFF_JITTER * (2.0 * self.network.random.random() - 1.0)
        self._next_attempt_at = self.world.now + self._backoff_s * spread
        self._backoff_s = min(BACKOFF_FACTOR * self._backoff_s, self._longest_backoff_s)
        timeout_s = max(self._connect_timeout_s, self._next_attempt_at - self.world.now)
        self.network.connect(self.process, self.target, timeout_s, self._connected, self._not_connected)

    def _connected(self, end: End) -> None:
        self._is_connecting, self._failure, self._backoff_s = False, None, self._first_backoff_s
        if self._is_closed:
            end.close()
            return
        self._end = end
        end.owner, end.on_lost = self, self._lost
        if self._keepalive_s:
            end.keep_alive(self._keepalive_s, self._keepalive_timeout_s)
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.open(end)

    def _not_connected(self, reason: str) -> None:
        self._is_connecting = False
        if self._is_closed:
            return
        last = f"UNKNOWN: {self.target}: {reason}"
        self._failure = Status(UNAVAILABLE, f"failed to connect to all addresses; last error: {last}")
        self.world.after(max(0.0, self._next_attempt_at - self.world.now), self._retry, process=self.process)
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.end(self._failure)

    def _retry(self) -> None:
        if not self._is_closed:
            self._connect()

    def _lost(self, reason: str) -> None:
        self._end = None


class ClientHalf(Half):
    """The client's side of a stream."""

    __slots__ = ("_call", "_held")

    def __init__(self, end: End, name: str, call: CallCore | None) -> None:
        super().__init__(end, name)
        self._call = call
        self._held: Status | None = None
        """A status behind messages that are still to be read."""

    def take_headers(self, metadata: Metadata) -> None:
        """The server has begun to answer."""
        if not self.is_over and self._call is not None:
            self._call.take_headers(metadata)

    def take_trailers(self, status: Status, answer: bytes | None) -> None:
        """The server has ended the call, a unary one with an answer."""
        call = self._call
        if self.is_over or call is None:
            return
        if self.inbox:
            self._held = status
            self.end_input()
            self.refuse_output()
            return
        self.finish()
        call.answer = answer
        call.end(status)

    def take_refusal(self) -> None:
        """The server has not looked at the call."""
        if not self.is_over and self._call is not None:
            self.finish()
            self._call.begin_again()

    def on_drained(self) -> None:
        held, call = self._held, self._call
        if held is not None and call is not None:
            self.finish()
            call.end(held)

    def break_off(self, reason: str) -> None:
        super().break_off(reason)
        call = self._call
        if call is None:
            return
        status = Status(UNAVAILABLE, reason)
        # What was pending and the status become known to the loop in any order.
        if self.link.network.random.random() < 0.5:
            self.process.loop.call_soon(call.end, status)
        else:
            call.end(status)

    def reset(self) -> None:
        """Give the stream up, and tell the server."""
        if not self.is_over:
            self.inbox.clear()
            self.transmit(self.peer.take_reset)
            self.finish()


class CallCore:
    """A call at its client: what grpc.aio's calls are made of."""

    def __init__(self, channel: ChannelCore, method: str, timeout_s: float | None) -> None:
        self.answer: bytes | None = None
        self._channel, self._method = channel, method
        self._loop = channel.process.loop
        self._half: ClientHalf | None = None
        self._metadata: Metadata = ()
        self._request: bytes | None = None
        self._progress: asyncio.Future[None] | None = None
        """Done when the call is open, a unary one when it has ended."""
        self._is_unary = False
        self._arrived: Status | None = None
        """Of a unary call: it is the call's status when who waits for the answer takes it, as with gRPC's batches."""
        self._initial_metadata: Metadata | None = None
        self._status: Any = None
        self._headers_waiters: list[asyncio.Future[None]] = []
        self._status_waiters: list[asyncio.Future[None]] = []
        self._done_callbacks: list[Callable[[], None]] = []
        self._is_locally_cancelled = False
        self._ends_at: float | None = None
        if timeout_s is not None:
            world = channel.world
            self._ends_at = world.now + timeout_s
            world.after(timeout_s, self._on_deadline)

    # What grpc.aio asks.

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code() == CANCELLED

    def is_ok(self) -> bool:
        return self._status is not None and self._status.code() == 0

    def is_locally_cancelled(self) -> bool:
        return self._is_locally_cancelled

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - self._channel.world.now)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        if self._status is not None:
            callback()
        else:
            self._done_callbacks.append(callback)

    async def status(self) -> Any:
        if self._status is None:
            self._status_waiters.append(waiter := self._loop.create_future())
            await waiter
        return self._status

    async def initial_metadata(self) -> Metadata | None:
        if self._initial_metadata is None:
            self._headers_waiters.append(waiter := self._loop.create_future())
            await waiter
        return self._initial_metadata

    # What grpc.aio does.

    def cancel(self, details: str) -> None:
        self._is_locally_cancelled = True
        self._set_status(Status(CANCELLED, details))
        if self._channel.process.is_alive:
            self._give_up()

    def set_internal_error(self, error: str) -> None:
        self._set_status(Status(INTERNAL, "Internal error from Core"), error)

    async def unary_unary(self, request: bytes, metadata: Metadata, context: Any = None) -> bytes | None:
        self._request, self._metadata, self._is_unary = request, metadata, True
        self._progress = self._loop.create_future()
        self._channel.begin(self)
        await self._progress
        if self._status is None and self._arrived is not None:
            self._set_status(self._arrived)
        return self.answer

    async def initiate_unary_stream(self, request: bytes, metadata: Metadata, context: Any = None) -> None:
        self._request = request
        await self._opened(metadata)
        await self.initial_metadata()

    async def initiate_stream_stream(
        self, metadata: Metadata, metadata_sent_observer: Callable[[], None], context: Any = None
    ) -> None:
        await self._opened(metadata)
        metadata_sent_observer()
        await self.initial_metadata()

    async def receive_serialized_message(self) -> Any:
        half = self._half
        if half is None:
            await TURN
            return cygrpc.EOF
        data = await half.receive()
        return cygrpc.EOF if data is None else data

    async def send_serialized_message(self, message: bytes) -> None:
        if self._half is None:
            raise cygrpc.ExecuteBatchError('Failed "execute_batch"')
        await self._half.send(message)

    async def send_receive_close(self) -> None:
        if self._half is not None:
            self._half.end_output()
        await TURN

    # What the channel and the stream do.

    def open(self, end: End) -> None:
        """There is a connection: send the call."""
        half = self._half = ClientHalf(end, self._method, self)
        peer = half.peer = ServerHalf(end.peer, self._method)
        peer.peer = half
        end.streams[half] = None
        timeout_s = self.time_remaining()
        half.transmit(peer.take_call, self._metadata, timeout_s, self._request, self._is_unary)
        if not self._is_unary:
            self._go_on()

    def begin_again(self) -> None:
        """The server has not looked at it: it stops. Messages of a stream are not kept for another attempt."""
        if self._request is None:
            self.end(Status(UNAVAILABLE, "GOAWAY received"))
            return
        self._half = None
        self._channel.begin(self)

    def take_headers(self, metadata: Metadata) -> None:
        """The server's metadata is there."""
        if self._initial_metadata is None:
            self._initial_metadata = metadata
            _wake(self._headers_waiters)

    def end(self, status: Status) -> None:
        """The call has ended, unless it was cancelled here."""
        if self._is_unary:
            self._arrived = self._arrived or status
        elif not self._is_locally_cancelled:
            self._set_status(status)
        self._go_on()

    async def _opened(self, metadata: Metadata) -> None:
        """Returns when the call is open, or has ended before."""
        self._metadata = metadata
        self._progress = self._loop.create_future()
        self._channel.begin(self)
        await self._progress

    def _go_on(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _set_status(self, status: Status, error: str | None = None) -> None:
        self._status = cygrpc.AioRpcStatus(status.code, status.details, status.metadata, error or status.details)
        if self._initial_metadata is None:
            self.take_headers(())
        _wake(self._status_waiters)
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            callback()

    def _give_up(self) -> None:
        self._channel.forget(self)
        if self._half is not None:
            self._half.reset()
        self._go_on()

    def _on_deadline(self) -> None:
        if self._status is None:
            self._channel.world.after(0.0, self._expire, process=self._channel.process)

    def _expire(self) -> None:
        if self._status is None and self._arrived is None:
            self.end(Status(DEADLINE_EXCEEDED, "Deadline Exceeded"))
            self._give_up()


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
