"""HTTP/2 frame by frame, for what no gRPC client sends: a message cut off, or of another length than it says."""

from __future__ import annotations

import asyncio
import random
import struct

from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame
from robustness.fuzz.surface import Method

STREAM = 1
MAX_FRAME_BYTES = 16_384


def opening(path: str, *metadata: tuple[str, str]) -> bytes:
    """Return what begins a connection, and a gRPC call on it."""
    headers = HeadersFrame(STREAM, _header_block(path, *metadata), flags=["END_HEADERS"])
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize() + headers.serialize()


def _header_block(path: str, *metadata: tuple[str, str]) -> bytes:
    """Return the headers of a gRPC call, each one spelled out."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        **dict(metadata),
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())


def _text(value: str) -> bytes:
    assert len(value) < 0x7F, "longer ones have a length of several bytes"
    return bytes([len(value)]) + value.encode()


def conversation(rng: random.Random, method: Method, data: bytes) -> tuple[bytes, bool]:
    """The bytes of a call with this message, and whether it has to be answered.

    The message's prefix says another length, or that it is compressed; or what follows it is missing, or too much. gRPC
    answers a unary call only if there is a whole message: else it waits for the client's deadline.
    """
    length = rng.choice((len(data) + 1, len(data) * 2 + 5, max(0, len(data) - 1), 0, 2**32 - 1, 65 * 2**20, len(data)))
    prefixed = struct.pack(">BI", rng.choice((0, 0, 0, 1, 2, 255)), length) + data
    is_whole = prefixed[:1] == b"\0" and length == len(data)
    if rng.random() < 0.3:
        is_whole = False
        prefixed = prefixed[: rng.randrange(len(prefixed))]
    size = rng.choice((1, 7, 1_000, MAX_FRAME_BYTES)) if len(prefixed) < 1_000 else MAX_FRAME_BYTES
    parts = [prefixed[at : at + size] for at in range(0, len(prefixed), size)] or [b""]
    frames = [DataFrame(STREAM, part).serialize() for part in parts]
    ending = rng.choice(("end", "end", "reset", "broken", "silence"))
    if ending == "end":
        frames[-1] = DataFrame(STREAM, parts[-1], flags=["END_STREAM"]).serialize()
    elif ending == "reset":
        frames.append(RstStreamFrame(STREAM, error_code=8).serialize())
    elif ending == "broken":
        frames[-1] = frames[-1][: rng.randrange(len(frames[-1]))]
    is_answered = method.client_streaming or (is_whole and not method.server_streaming)
    return opening(method.path) + b"".join(frames), is_answered and ending == "end"


async def converse(socket_path: str, sent: bytes, *, is_answered: bool, timeout_s: float) -> str:
    """Says it and returns how it ended: "answered", "reset", "closed", or "left" by us. Raises TimeoutError."""
    reader, writer = await asyncio.open_unix_connection(socket_path)
    try:
        writer.write(sent)
        await writer.drain()
        if not is_answered:
            return "left"
        async with asyncio.timeout(timeout_s):
            return await _end_of_stream(reader)
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.close()


async def _end_of_stream(reader: asyncio.StreamReader) -> str:
    while True:
        frame = await read_frame(reader)
        if isinstance(frame, DataFrame) or is_last(frame):
            return "answered"
        if isinstance(frame, RstStreamFrame | GoAwayFrame):
            return "reset"


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Return the next frame. Raises IncompleteReadError at the end of the connection."""
    frame, size = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
    frame.parse_body(memoryview(await reader.readexactly(size)))
    return frame


def is_last(frame: Frame) -> bool:
    """Return True for the trailers of a call."""
    return isinstance(frame, HeadersFrame) and "END_STREAM" in frame.flags
