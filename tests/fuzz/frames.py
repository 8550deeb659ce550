"""HTTP/2 by hand, for what no gRPC client sends: a message of another length than its prefix says, or cut off."""

from __future__ import annotations

import asyncio
import random
import struct

from fuzz.surface import Method

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 0x1, 0x4
STREAM = 1
MAX_FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str, *metadata: tuple[str, str]) -> bytes:
    """Of a gRPC call, each one spelled out."""
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
    """What to send for a call with this message, and whether it has to be answered.

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
    frames = [frame(DATA, 0, STREAM, part) for part in parts]
    ending = rng.choice(("end", "end", "reset", "broken", "silence"))
    if ending == "end":
        frames[-1] = frame(DATA, END_STREAM, STREAM, parts[-1])
    elif ending == "reset":
        frames.append(frame(RST_STREAM, 0, STREAM, struct.pack(">I", 8)))
    elif ending == "broken":
        frames[-1] = frames[-1][: rng.randrange(len(frames[-1]))]
    begin = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, STREAM, headers(method.path))
    is_answered = method.client_streaming or (is_whole and not method.server_streaming)
    return begin + b"".join(frames), is_answered and ending == "end"


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
        head = await reader.readexactly(9)
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        await reader.readexactly(size)
        if kind == DATA or (kind == HEADERS and flags & END_STREAM):
            return "answered"
        if kind in (RST_STREAM, GOAWAY):
            return "reset"
