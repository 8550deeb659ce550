"""The front door: the same requests through HTTP and through an engine in this process; tokens a second, first byte.

    quire bench door

A worker serves a Llama of 56 M parameters in float32 on this machine. Streams: so many requests at once, each read to
its end, by an engine of this process or through `quire serve` over a connection each. First byte: one request of one
token after another, without other load. Both ways run in turns; medians of the rounds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from in_process import LEASE_TTL_S
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m, tiny_llama
from report import Findings, benchmark, plain, table
from rich.progress import Progress

from quire.client import Engine, EngineConfig, SamplingParams
from quire.client.cli.launch import LocalServices

MODEL = "bench"
BLOCK_SIZE = 16
HEAD_END = b"\r\n\r\n"
logging.getLogger("quire.client").setLevel(logging.ERROR)  # these models have no tokenizer, and need none


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of requests, and tokens.

    streams         numbers of requests at once, with the tokens that each generates
    prompt_tokens   of each request, its own
    first_bytes     requests of one token, of each way and round
    """

    streams: tuple[tuple[int, int], ...] = ((1, 64), (16, 64), (64, 32), (256, 16))
    prompt_tokens: int = 16
    first_bytes: int = 40
    rounds: int = 3
    num_blocks: int = 2048
    vocabulary: int = 32_000


QUICK = Sizes(streams=((1, 8), (4, 8)), first_bytes=4, rounds=1, num_blocks=128, vocabulary=512)

Answer = Callable[[], tuple[float, int]]
"""Returns seconds to a request's first chunk, and the number of its tokens."""
Generate = Callable[[list[int], int], Awaitable[Answer]]
"""Runs a request with a prompt and a number of tokens to its end."""


def by_engine(engine: Engine) -> Generate:
    async def generate(prompt: list[int], num_new: int) -> Answer:
        began, first_s, count = time.perf_counter(), 0.0, 0
        async for chunk in engine.generate(prompt, SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)):
            first_s = first_s or time.perf_counter() - began
            count += len(chunk.token_ids)
        return lambda: (first_s, count)

    return generate


class _Stream(asyncio.Protocol):
    """One request on a connection of its own, and the bytes of its answer. They are parsed after the last one came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parts: list[bytes] = []
        self._began = self._first_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._began = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._first_s and b"data: {" in data:
            self._first_s = time.perf_counter() - self._began
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def parse(self) -> tuple[float, int]:
        """Return seconds to the first event, and the tokens of all events."""
        answer = b"".join(self._parts)
        if b" 200 " not in answer.partition(HEAD_END)[0]:
            raise RuntimeError(f"the gateway answered {answer[:200]!r}")
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        return self._first_s, sum(len(choice["token_ids"]) for event in events for choice in event["choices"])


def by_http(url: str) -> Generate:
    host, _, port = url.removeprefix("http://").partition(":")

    async def generate(prompt: list[int], num_new: int) -> Answer:
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        request = f"{head}Connection: close\r\n\r\n".encode() + body
        _, stream = await asyncio.get_running_loop().create_connection(lambda: _Stream(request), host, int(port))
        await stream.ended
        return stream.parse

    return generate


def prompts(sizes: Sizes, count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    drawn: list[list[int]] = generator.integers(3, sizes.vocabulary, (count, sizes.prompt_tokens)).tolist()
    return drawn


async def tokens_per_s(generate: Generate, sizes: Sizes, count: int, num_new: int, seed: int) -> float:
    each = prompts(sizes, count, seed)
    began = time.perf_counter()
    answers = await asyncio.gather(*(generate(prompt, num_new) for prompt in each))
    elapsed_s = time.perf_counter() - began
    assert [answer()[1] for answer in answers] == [num_new] * count, "a stream did not have all of its tokens"
    return count * num_new / elapsed_s


async def first_byte_s(generate: Generate, sizes: Sizes, seed: int) -> float:
    return statistics.median([(await generate(each, 1))()[0] for each in prompts(sizes, sizes.first_bytes, seed)])


async def measure_all(sizes: Sizes, quick: bool, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("door", total=sizes.rounds * (len(sizes.streams) + 1) * 2)
    flags = ("--dtype", "float32", "--device", "cpu", "--block-size", str(BLOCK_SIZE))
    found: dict[str, Any] = {"streams": {str(n): {} for n, _ in sizes.streams}, "first_byte_s": {}}
    with tempfile.TemporaryDirectory() as name:
        (tiny_llama if quick else llama_56m)(Path(name))
        with LocalServices.start(
            model=name,
            num_blocks=sizes.num_blocks,
            extra_worker_args=flags,
            http_listen=("127.0.0.1:0",),
            extra_gateway_args=("--served-model-name", MODEL),
        ) as services:
            assert services.gateway is not None
            config = EngineConfig(lease_ttl_s=LEASE_TTL_S, verify=False)
            async with Engine.connect(services.cachemgr_address, config=config) as engine:
                ways = {"engine": by_engine(engine), "HTTP": by_http(services.gateway.urls[0])}
                for way in ways.values():
                    await tokens_per_s(way, sizes, sizes.streams[-1][0], 2, 0)
                for number in range(1, sizes.rounds + 1):
                    for way, generate in ways.items():
                        for count, num_new in sizes.streams:
                            speed = await tokens_per_s(generate, sizes, count, num_new, number)
                            found["streams"][str(count)].setdefault(way, []).append(speed)
                            progress.advance(task)
                        found["first_byte_s"].setdefault(way, []).append(await first_byte_s(generate, sizes, number))
                        progress.advance(task)
    return found


def measure(quick: bool, progress: Progress) -> Findings:
    sizes = QUICK if quick else Sizes()
    found = asyncio.run(measure_all(sizes, quick, progress))
    medians = {
        count: {way: statistics.median(each) for way, each in ways.items()} for count, ways in found["streams"].items()
    }
    first = {way: statistics.median(each) for way, each in found["first_byte_s"].items()}
    figures = {
        "streams": {count: {**ways, "ratio": ratio_of(found["streams"][count])} for count, ways in medians.items()},
        "first_byte_s": {**first, "difference": first["HTTP"] - first["engine"]},
    }
    notes = [
        "The client of both ways, the gateway, cachemgr and the worker share the cores of one machine; over HTTP the "
        "client is a process of its own, which reads bytes while the streams run and counts their tokens afterwards.",
        "The model has no tokenizer: prompts and answers are token ids.",
    ]
    return Findings([table_of(figures)], figures, lambda: plot(figures), notes)


def medians_of(ways: dict[str, Sequence[float]]) -> dict[str, float]:
    return {way: statistics.median(each) for way, each in ways.items()}


def ratio_of(ways: dict[str, Sequence[float]]) -> float:
    """HTTP over engine, the median of the rounds."""
    return statistics.median(http / engine for http, engine in zip(ways["HTTP"], ways["engine"], strict=True))


def table_of(figures: dict[str, Any]) -> Any:
    made = table("front door", "streams", "engine, tokens/s", "HTTP, tokens/s", "HTTP / engine")
    for count, each in figures["streams"].items():
        made.add_row(count, f"{each['engine']:.0f}", f"{each['HTTP']:.0f}", f"{each['ratio']:.3f}")
    first = figures["first_byte_s"]
    times = [f"{1e3 * first[way]:.1f} ms" for way in ("engine", "HTTP")]
    made.add_row("first byte", *times, f"+{1e3 * first['difference']:.1f} ms")
    return made


def plot(figures: dict[str, Any]) -> Figure:
    """Tokens a second by number of streams, both ways."""
    figure, axes = pyplot.subplots(figsize=(4.5, 3.2))
    counts = list(figures["streams"])
    for offset, way in ((-0.2, "engine"), (0.2, "HTTP")):
        heights = [figures["streams"][count][way] for count in counts]
        axes.bar([index + offset for index in range(len(counts))], heights, width=0.4, label=way)
    axes.set_xticks(range(len(counts)), counts)
    axes.set_xlabel("streams")
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=8)
    plain(axes)
    return figure


main = benchmark("door", measure, packages=("numpy", "torch", "transformers", "grpcio", "uvicorn", "starlette"))

if __name__ == "__main__":
    main()
