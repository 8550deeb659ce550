"""Streams of generated tokens, with the time at which each part of an answer came: over HTTP, and from an engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engines import greedy

from quire.client import Engine

HEAD_END = b"\r\n\r\n"
EVENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)


class StreamFailed(Exception):
    """A server's answer is an error, or has not all of its tokens."""


@dataclass(slots=True)
class Stream:
    """One answer.

    began       perf_counter() when the request was sent
    times       perf_counter() of each part with tokens
    num_tokens  of all parts
    """

    began: float = 0.0
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps_s(self) -> list[float]:
        """From a part with tokens to the next one."""
        return [after - before for before, after in pairwise(self.times)]


Ask = Callable[[Sequence[int], int, Stream], Awaitable[None]]
"""Generates so many tokens behind a prompt, and fills the stream. Raises StreamFailed."""


def by_engine(engine: Engine) -> Ask:
    async def ask(prompt: Sequence[int], num_new: int, stream: Stream) -> None:
        stream.began = time.perf_counter()
        async for chunk in engine.generate(prompt, greedy(num_new)):
            if chunk.token_ids:
                stream.times.append(time.perf_counter())
                stream.num_tokens += len(chunk.token_ids)

    return ask


class _Connection(asyncio.Protocol):
    """The bytes of one answer with their times. They are parsed after the last one came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.parts: list[tuple[float, bytes]] = []
        self.began = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.began = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():  # cancelled, if the time was over
            self.ended.set_result(None)


def by_http(url: str, model: str) -> Ask:
    host, _, port = url.removeprefix("http://").partition(":")

    async def ask(prompt: Sequence[int], num_new: int, stream: Stream) -> None:
        fields = {"model": model, "prompt": list(prompt), "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        # Each event has the tokens so far: several may come in one.
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = json.dumps({**fields, "stream": True, "stream_options": options}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        request = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(lambda: _Connection(request), host, int(port))
        try:
            await connection.ended
        finally:
            transport.abort()
            read_answer(connection.began, connection.parts, stream)

    return ask


def read_answer(began: float, parts: Sequence[tuple[float, bytes]], stream: Stream) -> None:
    """Fill the stream from the parts of an answer. Raises StreamFailed if the answer is an error."""
    stream.began = began
    answer, ends = b"".join(data for _, data in parts), []
    if answer and b" 200 " not in answer.partition(HEAD_END)[0]:
        raise StreamFailed(f"the server answered {answer[:200]!r}")
    total = 0
    for at, data in parts:
        total += len(data)
        ends.append((total, at))
    arrivals = iter(ends)
    end, at = next(arrivals, (0, began))
    for event in EVENT.finditer(answer):
        while event.end() > end:
            end, at = next(arrivals)
        content = json.loads(event[1])
        if "error" in content:
            raise StreamFailed(f"a stream ended with {content['error']}")
        count = (content.get("usage") or {}).get("completion_tokens", 0)
        if count > stream.num_tokens:
            stream.num_tokens = count
            stream.times.append(at)


async def run_streams(ask: Ask, prompts: Sequence[Sequence[int]], num_new: int, *, seconds: float) -> list[Stream]:
    """Generate behind all prompts at once; after so many seconds what is open ends, with the tokens that it has.

    Raises StreamFailed if a stream has not all of its tokens before that, or not one.
    """
    streams = [Stream() for _ in prompts]
    tasks = [asyncio.create_task(ask(prompt, num_new, stream)) for prompt, stream in zip(prompts, streams, strict=True)]
    done, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task, stream in zip(tasks, streams, strict=True):
        if task in done:
            task.result()
        if not stream.times or (task in done and stream.num_tokens != num_new):
            raise StreamFailed(f"a stream had {stream.num_tokens} of {num_new} tokens")
    return streams
