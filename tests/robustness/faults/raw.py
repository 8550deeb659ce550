"""gRPC calls with messages that do not end, by hand: HTTP/2 with flow control, for bytes that no gRPC client sends."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence

from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from robustness.fuzz.frames import MAX_FRAME_BYTES, STREAM, is_last, opening, read_frame

INITIAL_WINDOW = 65_535


class UnfinishedCall:
    """One call on a connection of its own. Its message says that it has `announced` bytes.

    `send` writes as many as the server's flow control lets it, at most `announced` less one.
    """

    def __init__(self, path: str, announced: int, *, metadata: Sequence[tuple[str, str]] = ()) -> None:
        prefix = DataFrame(STREAM, struct.pack(">BI", 0, announced))
        self._opening = opening(path, *metadata) + prefix.serialize()
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
                self._writer.write(DataFrame(STREAM, chunk[:size]).serialize())
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
                self._hear_frame(await read_frame(self._reader))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self.is_ended.set()
        self._may_send.set()

    def _hear_frame(self, frame: Frame) -> None:
        if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            window = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._initial_window)
            self._stream_window += window - self._initial_window
            self._initial_window = window
            self._writer.write(SettingsFrame(0, flags=["ACK"]).serialize())
        elif isinstance(frame, WindowUpdateFrame):
            if frame.stream_id:
                self._stream_window += frame.window_increment
            else:
                self._window += frame.window_increment
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            self._writer.write(PingFrame(0, frame.opaque_data, flags=["ACK"]).serialize())
        elif isinstance(frame, RstStreamFrame | GoAwayFrame) or is_last(frame):
            self.is_ended.set()
        self._may_send.set()
