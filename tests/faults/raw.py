"""gRPC calls whose messages do not end, by hand: HTTP/2 with flow control, for what no gRPC client sends."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence

from fuzz.frames import DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, STREAM, frame
from fuzz.frames import headers as call_headers

WINDOW_UPDATE = 8
ACK = 0x1
INITIAL_WINDOW = 65_535
MAX_FRAME_BYTES = 16_384
_INITIAL_WINDOW_SETTING = 4


class UnfinishedCall:
    """One call on a connection of its own. Its message says that it has `announced` bytes.

    `send` writes as many as the server's flow control lets it, at most `announced` less one.
    """

    def __init__(self, path: str, announced: int, *, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._opening = (
            PREFACE
            + frame(SETTINGS, 0, 0)
            + frame(HEADERS, END_HEADERS, STREAM, call_headers(path, *metadata))
            + frame(DATA, 0, STREAM, struct.pack(">BI", 0, announced))
        )
        self._unsent = announced - 1
        self._window = self._stream_window = INITIAL_WINDOW - 5
        self._initial_window = INITIAL_WINDOW
        self._may_send = asyncio.Event()
        self.num_sent = 0
        self.is_ended = asyncio.Event()
        """Set when the server ended the call or the connection."""

    async def open(self, socket_path: str) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(socket_path)
        self._writer.write(self._opening)
        self._hearing = asyncio.create_task(self._hear())

    async def send(self) -> None:
        """Returns when all but the last byte is sent, or the call was ended. Waits for the window."""
        chunk = bytes(MAX_FRAME_BYTES)
        with contextlib.suppress(ConnectionError):
            while self._unsent and not self.is_ended.is_set():
                size = min(self._unsent, self._window, self._stream_window, MAX_FRAME_BYTES)
                if size <= 0:
                    self._may_send.clear()
                    await self._may_send.wait()
                    continue
                self._writer.write(frame(DATA, 0, STREAM, chunk[:size]))
                await self._writer.drain()
                self._unsent -= size
                self._window -= size
                self._stream_window -= size
                self.num_sent += size

    async def close(self) -> None:
        self._hearing.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _hear(self) -> None:
        try:
            while not self.is_ended.is_set():
                head = await self._reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                self._hear_frame(kind, flags, int.from_bytes(head[5:], "big"), await self._reader.readexactly(size))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self.is_ended.set()
        self._may_send.set()

    def _hear_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == _INITIAL_WINDOW_SETTING:
                    self._stream_window += value - self._initial_window
                    self._initial_window = value
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream:
                self._stream_window += more
            else:
                self._window += more
        elif kind == _PING and not flags & ACK:
            self._writer.write(frame(_PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
            self.is_ended.set()
        self._may_send.set()


_PING = 6
