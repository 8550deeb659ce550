"""HTTP/2 streams on a simulated connection, as gRPC's core keeps them: messages in order, windows, and their ends.

A stream has a Half in each process. A half sends by calling the other one later, through the connection's link. Of each
operation (send a message, receive one) one may be pending, as in gRPC: a pending one that is given up stays pending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple

from grpc._cython import cygrpc
from robustness.simulation.connections import End
from robustness.simulation.links import ORDER_S, Deliver

PREFIX_BYTES = 5
"""In front of each message: its length."""

Metadata = tuple[tuple[str, str | bytes], ...]


class Status(NamedTuple):
    """The end of a call: code is a number of grpc.StatusCode."""

    code: int
    details: str
    metadata: Metadata = ()

    @property
    def in_words(self) -> str:
        """For a story."""
        return f"status {self.code} {self.details}".rstrip()


class _Turn:
    """Awaited, it lets the other callbacks of the process run once: what gRPC knows comes through its own loop."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield


TURN = _Turn()


class Half:
    """One side of a stream."""

    __slots__ = (
        "_arriving_bytes",
        "_end",
        "_ends_input",
        "_is_output_ended",
        "_missing_bytes",
        "_next_arrival",
        "_pending",
        "_reader",
        "_unreturned_bytes",
        "_window_bytes",
        "_writer",
        "inbox",
        "is_over",
        "link",
        "name",
        "peer",
        "process",
    )

    peer: Any  # the other Half, set by who makes both

    def __init__(self, end: End, name: str) -> None:
        self._end, self.link, self.process = end, end.link, end.process
        self.name = name
        self.inbox: deque[bytes] = deque()
        self.is_over = False
        """Nothing is sent or taken any more. Messages that have arrived may still be read."""
        self._ends_input = False
        self._is_output_ended = False
        self._next_arrival = 0.0
        self._window_bytes = end.link.network.window_bytes
        self._unreturned_bytes = 0
        """Read, and not yet said to the peer."""
        self._arriving_bytes = 0
        """The part of a message that the peer's window does not take."""
        self._missing_bytes = 0
        self._pending: bytes | None = None
        """A message that waits for the window. `_writer` is its sender."""
        self._writer: asyncio.Future[bool] | None = None
        self._reader: asyncio.Future[bytes | None] | None = None

    # Operations of this process.

    async def receive(self) -> bytes | None:
        """The next message; None at the end, and while another one is awaited."""
        if self.inbox:
            data = self.inbox.popleft()
            self._note_read(len(data))
            if self._ends_input and not self.inbox:
                self.on_drained()
            await TURN
            return data
        if self._ends_input or self.is_over or self._reader is not None:
            await TURN
            return None
        reader: asyncio.Future[bytes | None] = self.process.loop.create_future()
        self._reader = reader
        if self._arriving_bytes:
            self._make_room()
        return await reader

    async def send(self, data: bytes) -> None:
        """Returns when the message has left. Raises ExecuteBatchError if it can't."""
        if self._pending is not None:
            raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8")
        if self.is_over or self._is_output_ended:
            await TURN
            raise cygrpc.ExecuteBatchError('Failed "execute_batch"')
        num_bytes = len(data) + PREFIX_BYTES
        if num_bytes <= self._window_bytes:
            self._window_bytes -= num_bytes
            self.transmit(self.peer.take_message, data)
            await TURN
            return
        self._missing_bytes, self._window_bytes = num_bytes - self._window_bytes, 0
        self._pending, self._writer = data, self.process.loop.create_future()
        self.transmit(self.peer.take_beginning, self._missing_bytes)
        if not await self._writer:
            raise cygrpc.ExecuteBatchError('Failed "execute_batch"')

    def transmit(self, deliver: Deliver, *args: Any) -> None:
        """Call `deliver`, which is the peer's, behind all that was sent before."""
        end = self._end
        arrival = self.link.send(self._next_arrival, end.peer.process, deliver, *args)
        self._next_arrival = arrival + ORDER_S
        if arrival > end.latest:
            end.latest = arrival

    def end_output(self) -> None:
        """Nothing more is sent, behind a message that waits."""
        if self._is_output_ended or self.is_over:
            return
        self._is_output_ended = True
        if self._pending is None:
            self.transmit(self.peer.end_input)

    def refuse_output(self) -> None:
        """Nothing more can be sent: the peer takes nothing."""
        self._is_output_ended = True
        if self._pending is not None:
            self._settle_writer(False)

    def finish(self) -> None:
        """Nothing is sent or taken any more. What is pending fails; messages that have arrived may be read."""
        if self.is_over:
            return
        self.is_over = True
        self._end.streams.pop(self, None)
        if self._pending is not None:
            self._settle_writer(False)
        self._settle_reader()

    def on_drained(self) -> None:
        """The last message before the end has been read."""

    # Frames of the peer.

    def take_message(self, data: bytes) -> None:
        """A message has arrived."""
        if self.is_over:
            return
        reader = self._reader
        if reader is None:
            self.inbox.append(data)
            return
        self._reader = None
        self._note_read(len(data))
        if not reader.done():  # else it was given up, and its message is lost
            reader.set_result(data)

    def take_beginning(self, missing_bytes: int) -> None:
        """A message has arrived in part: the rest needs room."""
        self._arriving_bytes = missing_bytes
        if self._reader is not None:
            self._make_room()

    def take_room(self, num_bytes: int) -> None:
        """The peer has read so many bytes."""
        self._window_bytes += num_bytes
        if self._pending is None or self._window_bytes < self._missing_bytes or self.is_over:
            return
        self._window_bytes -= self._missing_bytes
        self.transmit(self.peer.take_message, self._pending)
        self._settle_writer(True)
        if self._is_output_ended:
            self.transmit(self.peer.end_input)

    def end_input(self) -> None:
        """The peer sends nothing more."""
        self._ends_input = True
        if not self.inbox:
            self._settle_reader()

    def break_off(self, reason: str) -> None:
        """The connection is gone."""
        self.inbox.clear()
        self.finish()

    def abandon(self) -> None:
        """Nobody of this process waits any more."""
        self.is_over = True

    def _make_room(self) -> None:
        num_bytes, self._arriving_bytes = self._arriving_bytes, 0
        self._unreturned_bytes -= num_bytes
        self._return_room(num_bytes)

    def _note_read(self, num_bytes: int) -> None:
        self._unreturned_bytes += num_bytes + PREFIX_BYTES
        if 2 * self._unreturned_bytes >= self.link.network.window_bytes:
            num_bytes, self._unreturned_bytes = self._unreturned_bytes, 0
            self._return_room(num_bytes)

    def _return_room(self, num_bytes: int) -> None:
        """Not in order with messages: it is about the other direction."""
        if self.is_over:
            return
        link = self.link
        link.send(link.windows_stand_until, self._end.peer.process, self.peer.take_room, num_bytes)

    def _settle_writer(self, has_left: bool) -> None:
        writer, self._pending, self._writer = self._writer, None, None
        if writer is not None and not writer.done():
            writer.set_result(has_left)
        self.on_sent(has_left)

    def on_sent(self, has_left: bool) -> None:
        """The message that waited has left, or never will."""

    def _settle_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
