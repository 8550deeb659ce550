"""Publishes one pool's changes over ZMQ, as vLLM's engines do, for consumers that come late and go, too.

A batch is three frames: the topic, the sequence number (8 bytes, big-endian), the events. Sequence numbers begin with
the time of the start, in microseconds since 1970: consumers skip a batch with a lower number than the last one, and so
would not hear a publisher that was started again and counted from 0.

After a subscription everything is published again, to all consumers: AllBlocksCleared, then the blocks. This is done
at most once in SNAPSHOT_INTERVAL_S. A consumer that sees a gap asks the replay socket. A request is an empty frame and
the first sequence number. Each answer is an empty frame, a number and its batch; the last one has the number -1 and no
batch. If the batches are not kept any more, everything is published again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import zmq
import zmq.asyncio

from quire.integrations.kv_events.copies import CopyChange
from quire.integrations.kv_events.encoding import encode_batch, parts_of
from quire.integrations.kv_events.replica import AllCleared, Change
from quire.serving.addresses import AddressError, AddressInUseError, TcpAddress

log = logging.getLogger(__name__)

MAX_KEPT_BATCHES = 10_000
MAX_KEPT_BYTES = 64 * 2**20
SNAPSHOT_INTERVAL_S = 1.0
_MAX_BATCH_BLOCKS = 4_096
_MAX_QUEUED_BATCHES = 100_000
"""Messages that wait for one consumer. It misses further ones, and sees the gap."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
LINGER_MS = 500
"""The most time that closing waits for sent messages."""
_SUBSCRIBED = 1
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counts since the start; kept: batches, and their bytes, that a consumer can have again."""

    num_batches: int
    num_snapshots: int
    num_replays: int
    num_kept: int
    num_kept_bytes: int


class ReplayBuffer:
    """The last batches, by rising sequence number."""

    def __init__(self, *, max_batches: int = MAX_KEPT_BATCHES, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._begins_with_all = False

    def append(self, sequence: int, batch: bytes, *, clears: bool) -> None:
        """Keep a batch; one that begins with AllBlocksCleared makes all earlier ones needless."""
        if clears:
            self._batches.clear()
            self._num_bytes = 0
            self._begins_with_all = True
        self._batches.append((sequence, batch))
        self._num_bytes += len(batch)
        while len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._batches.popleft()[1])
            self._begins_with_all = False

    def since(self, sequence: int) -> list[tuple[int, bytes]] | None:
        """Return the batches from a number on; None if a consumer would miss some."""
        if not self._begins_with_all and (not self._batches or sequence < self._batches[0][0]):
            return None
        return [each for each in self._batches if each[0] >= sequence]

    @property
    def size(self) -> tuple[int, int]:
        """Return the numbers of batches and of their bytes."""
        return len(self._batches), self._num_bytes


class PoolPublisher:
    """The sockets of one pool, from the constructor to `close`. `serve` answers consumers meanwhile."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        addresses: Sequence[TcpAddress],
        *,
        replay_addresses: Sequence[TcpAddress] = (),
        topic: str = "",
        everything: Callable[[], Iterator[Change | CopyChange]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind the sockets; everything returns all that consumers may know. Raises AddressError, AddressInUseError."""
        self._topic = topic.encode()
        self._everything = everything
        self._clock = clock
        self._sequence = int(clock() * 1e6)
        self._kept = ReplayBuffer()
        self._is_wanted = asyncio.Event()  # everything, by a consumer
        self._num_batches = self._num_snapshots = self._num_replays = 0
        self._publishing = context.socket(zmq.XPUB)
        self._replaying = context.socket(zmq.ROUTER)
        self._publishing.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscription is heard, the topic's first one or not
        self._publishing.setsockopt(zmq.SNDHWM, _MAX_QUEUED_BATCHES)
        self._replaying.setsockopt(zmq.SNDHWM, 2 * MAX_KEPT_BATCHES)
        try:
            self.addresses = [_bind(self._publishing, "--listen", each) for each in addresses]
            self.replay_addresses = [_bind(self._replaying, "--replay-listen", each) for each in replay_addresses]
        except BaseException:
            self.close()
            raise

    def statistics(self) -> PublisherStatistics:
        """Return counts."""
        return PublisherStatistics(self._num_batches, self._num_snapshots, self._num_replays, *self._kept.size)

    def publish(self, changes: Iterable[Change | CopyChange]) -> None:
        """Send changes: in one batch, or in several if they store more than _MAX_BATCH_BLOCKS blocks."""
        for part in parts_of(changes, max_blocks=_MAX_BATCH_BLOCKS):
            self._publish_batch(part)

    def _publish_batch(self, changes: Sequence[Change | CopyChange]) -> None:
        self._sequence += 1
        self._num_batches += 1
        batch = encode_batch(changes, now=self._clock())
        self._kept.append(self._sequence, batch, clears=isinstance(changes[0], AllCleared))
        self._publishing.send_multipart([self._topic, self._sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch])

    async def serve(self) -> None:
        """Answer consumers until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear_subscriptions())
            tasks.create_task(self._answer_replays())
            tasks.create_task(self._send_snapshots())

    def close(self) -> None:
        """Close the sockets; sent messages may still arrive. Idempotent."""
        self._publishing.close(linger=LINGER_MS)
        self._replaying.close(linger=0)

    async def _hear_subscriptions(self) -> None:
        while True:
            frames = await self._publishing.recv_multipart()
            if frames[0][:1] == bytes([_SUBSCRIBED]):
                self._is_wanted.set()

    async def _send_snapshots(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            self._num_snapshots += 1
            self.publish(chain([AllCleared()], self._everything()))
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)

    async def _answer_replays(self) -> None:
        while True:
            consumer, *request = await self._replaying.recv_multipart()
            self._num_replays += 1
            if len(request) == 2 and len(request[1]) == _SEQUENCE_BYTES:
                kept = self._kept.since(int.from_bytes(request[1], "big"))
            else:
                log.warning("replay request ignored, it is not an empty frame and 8 bytes frames=%d", len(request))
                kept = []
            if kept is None:
                self._is_wanted.set()
            for sequence, batch in kept or ():
                await self._replaying.send_multipart([consumer, b"", sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch])
            await self._replaying.send_multipart([consumer, b"", _END, b""])


def _bind(socket: zmq.asyncio.Socket, flag: str, address: TcpAddress) -> TcpAddress:
    """Listen; return the address with the port that was taken for port 0."""
    socket.setsockopt(zmq.IPV6, int(":" in address.host))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    try:
        socket.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        kind = AddressInUseError if error.errno == zmq.EADDRINUSE else AddressError
        raise kind(f"{flag} {address}: {error.strerror}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return TcpAddress(address.host, int(bound.rpartition(":")[2]))
