"""The gateway: the same requests through HTTP and through an engine in this process; tokens a second, first byte.

    quire bench serving door
    quire bench serving door --peers        also through `transformers serve`, in an environment that this makes once

A worker serves a Llama of 56 M parameters in float32 on this machine. Streams: so many requests at once, each read to
its end, by an engine of this process or through `quire serve` over a connection each. First byte: one request of one
token after another, without other load. Processor time is that of the process that has the engine: this one, or the
gateway's. The ways of a row run one right after the other, in another order each round;
medians of the rounds.

Both servers get the same bytes: a text, and the number of tokens to generate. The tokens are those that the server
counts in the `usage` of a stream's last event. `transformers serve` runs with continuous batching over as many blocks
of the same size. The table says so where the peer's streams did not all end with their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from environments import PeerUnavailable
from in_process import LEASE_TTL_S
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import llama_56m, number_tokenizer, tiny_llama
from report import Findings, benchmark, plain, table
from rich.progress import Progress
from transformers_serve import NAME as PEER
from transformers_serve import transformers_serve

from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig, SamplingParams

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048
FIRST_BYTE = "first byte"
HEAD_END = b"\r\n\r\n"
STREAMS_TIMEOUT_S = 120.0
"""For a round of streams; one that takes longer counts as failed."""
logging.getLogger("quire.client").setLevel(logging.ERROR)


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
    rounds: int = 7
    num_blocks: int = 2048
    vocabulary: int = 32_000


QUICK = Sizes(streams=((1, 8), (4, 8)), first_bytes=4, rounds=1, num_blocks=128, vocabulary=512)

Answer = Callable[[], tuple[float, int]]
"""Returns seconds to a request's first chunk, and the number of its tokens. Raises StreamFailed."""
Generate = Callable[[str, int], Awaitable[Answer]]
"""Runs a request with a prompt and a number of tokens to its end."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to generate, and the process that has the engine; None: it is not looked at."""

    generate: Generate
    process: psutil.Process | None = None

    def processor_s(self) -> float:
        """Return the processor time of the process since its start."""
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)


class StreamFailed(Exception):
    """A server's answer is an error, or has not all tokens."""


def by_engine(engine: Engine) -> Generate:
    async def generate(prompt: str, num_new: int) -> Answer:
        began, first_s, count = time.perf_counter(), 0.0, 0
        async for chunk in engine.generate(prompt, SamplingParams(max_tokens=num_new, temperature=0)):
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
        if not self.ended.done():  # cancelled, if the streams took too long
            self.ended.set_result(None)

    def parse(self) -> tuple[float, int]:
        """Return seconds to the first event, and the tokens that the server counted. Raises StreamFailed."""
        answer = b"".join(self._parts)
        if b" 200 " not in answer.partition(HEAD_END)[0]:
            raise StreamFailed(f"the server answered {answer[:200]!r}")
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        if not counts:
            raise StreamFailed(f"a stream ended without its usage: {answer[-200:]!r}")
        return self._first_s, counts[-1]


def by_http(url: str, model: str) -> Generate:
    host, _, port = url.removeprefix("http://").partition(":")

    async def generate(prompt: str, num_new: int) -> Answer:
        fields = {"model": model, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "stream": True}
        body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        request = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(lambda: _Stream(request), host, int(port))
        try:
            await stream.ended
        finally:
            transport.abort()
        return stream.parse

    return generate


def prompts(sizes: Sizes, count: int, seed: int) -> list[str]:
    """Texts of so many tokens each: the tokenizer's tokens are numbers."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(3, sizes.vocabulary, (count, sizes.prompt_tokens)).tolist()
    return [" ".join(map(str, token_ids)) for token_ids in drawn]


async def tokens_per_s(sizes: Sizes, count: int, num_new: int, generate: Generate, seed: int) -> float:
    """Raises StreamFailed if not all streams had all of their tokens in time."""
    each = prompts(sizes, count, seed)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(STREAMS_TIMEOUT_S):
            answers = await asyncio.gather(*(generate(prompt, num_new) for prompt in each))
    except TimeoutError:
        raise StreamFailed(f"{count} streams did not end within {STREAMS_TIMEOUT_S:g} s") from None
    elapsed_s = time.perf_counter() - began
    if short := [found for found in (answer()[1] for answer in answers) if found != num_new]:
        raise StreamFailed(f"{len(short)} of {count} streams had other than {num_new} tokens: {short[:4]}")
    return count * num_new / elapsed_s


async def first_byte_s(sizes: Sizes, generate: Generate, seed: int) -> float:
    return statistics.median([(await generate(each, 1))()[0] for each in prompts(sizes, sizes.first_bytes, seed)])


@contextlib.asynccontextmanager
async def ways_to(model: Path, sizes: Sizes, *, peers: bool) -> AsyncIterator[tuple[dict[str, Way], str]]:
    """Yield the ways to generate by name, and why the peer is not among them, if it was asked for."""
    flags = ("--dtype", "float32", "--device", "cpu", "--block-size", str(BLOCK_SIZE))
    served = {"num_blocks": sizes.num_blocks, "block_size": BLOCK_SIZE, "max_step_tokens": MAX_STEP_TOKENS}
    config = EngineConfig(lease_ttl_s=LEASE_TTL_S, max_step_tokens=MAX_STEP_TOKENS, verify=False)
    async with contextlib.AsyncExitStack() as stack:
        services = stack.enter_context(
            LocalServices.start(
                model=model,
                num_blocks=sizes.num_blocks,
                extra_worker_args=flags,
                http_listen=("127.0.0.1:0",),
                extra_gateway_args=("--served-model-name", str(model)),
            )
        )
        assert services.gateway is not None
        engine = await stack.enter_async_context(Engine.connect(services.cachemgr_address, config=config))
        by_gateway = by_http(services.gateway.urls[0], str(model))
        ways = {
            "engine": Way(by_engine(engine), psutil.Process()),
            "HTTP": Way(by_gateway, psutil.Process(services.gateway.pid)),
        }
        absent = ""
        if peers:
            try:
                peer = stack.enter_context(transformers_serve(model, model / "peer.log", **served))
                ways[PEER] = Way(by_http(peer, str(model)))
            except PeerUnavailable as error:
                absent = str(error)
        yield ways, absent


@dataclass(slots=True)
class Found:
    """Figures of every round.

    rounds    by row and way: tokens a second of so many streams, or seconds to the first byte
    used_s    by row and way: seconds of processor time of the way's process
    failed    why the peer failed in a row, by row; it is not tried again there
    absent    why the peer was not measured, if it was asked for
    """

    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    used_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: str = ""

    async def add(self, row: str, name: str, way: Way, measured: Callable[[Generate], Awaitable[float]]) -> None:
        """Measure a way once more. Raises StreamFailed if a stream of Quire's fails."""
        if name == PEER and row in self.failed:
            return
        used_s = way.processor_s()
        try:
            value = await measured(way.generate)
        except (StreamFailed, OSError) as error:
            if name != PEER:
                raise
            self.failed[row] = str(error)
            self.rounds[row].pop(PEER, None)
        else:
            self.rounds.setdefault(row, {}).setdefault(name, []).append(value)
            self.used_s.setdefault(row, {}).setdefault(name, []).append(way.processor_s() - used_s)


async def measure_all(sizes: Sizes, quick: bool, progress: Progress, *, peers: bool) -> Found:
    """Raises StreamFailed if a stream of Quire's fails."""
    with tempfile.TemporaryDirectory() as name:
        (tiny_llama if quick else llama_56m)(Path(name))
        number_tokenizer(Path(name), sizes.vocabulary)
        async with ways_to(Path(name), sizes, peers=peers) as (ways, absent):
            found = Found(absent=absent)
            rows: dict[str, Callable[..., Awaitable[float]]] = {
                str(count): partial(tokens_per_s, sizes, count, num_new) for count, num_new in sizes.streams
            }
            rows[FIRST_BYTE] = partial(first_byte_s, sizes)
            task = progress.add_task("first requests", total=sizes.rounds * len(rows) * len(ways))
            for each in ways.values():
                with contextlib.suppress(StreamFailed, OSError):  # the rounds will show it
                    await tokens_per_s(sizes, sizes.streams[-1][0], 2, each.generate, 0)
            for number in range(1, sizes.rounds + 1):
                # The machine's speed drifts: a row's ways run one right after the other, in another order each round.
                order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
                for row, measure_row in rows.items():
                    for way in order:
                        progress.update(task, description=f"round {number}/{sizes.rounds}, {way}: {row}")
                        await found.add(row, way, ways[way], partial(measure_row, seed=number))
                        progress.advance(task)
    return found


def measure(quick: bool, progress: Progress, *, peers: bool) -> Findings:
    sizes = QUICK if quick else Sizes()
    found = asyncio.run(measure_all(sizes, quick, progress, peers=peers))
    rows = {row: {way: statistics.median(each) for way, each in ways.items()} for row, ways in found.rounds.items()}
    first = rows.pop(FIRST_BYTE)
    figures: dict[str, Any] = {
        "streams": {row: {**ways, **ratios_of(found.rounds[row])} for row, ways in rows.items()},
        "processor_us_per_token": {
            str(count): {
                way: 1e6 * statistics.median(found.used_s[str(count)][way]) / (count * num_new)
                for way in ("engine", "HTTP")
            }
            for count, num_new in sizes.streams
        },
        "first_byte_s": {**first, "difference": first["HTTP"] - first["engine"]},
    }
    notes = [
        "The clients, the servers and the worker share the cores of one machine. The client reads bytes while the "
        "streams run, and their tokens afterwards.",
    ]
    if peers:
        figures["peer"] = {"name": PEER, "absent": found.absent, "failed": found.failed}
        notes.append(f"{PEER}: {found.absent or 'continuous batching, the same model, blocks and requests'}.")
        notes += [f"{PEER}, {row}: {why}." for row, why in found.failed.items()]
    return Findings([table_of(figures)], figures, lambda: plot(figures), notes)


def ratios_of(ways: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Speeds over HTTP as a part of the engine's and of the peer's; each is the median of the rounds."""
    pairs = {"ratio": "engine", "peer_ratio": PEER}
    return {
        name: statistics.median(http / other for http, other in zip(ways["HTTP"], ways[way], strict=True))
        for name, way in pairs.items()
        if way in ways
    }


def table_of(figures: dict[str, Any]) -> Any:
    peer = figures.get("peer")
    headings = ["engine", "HTTP", "HTTP / engine", "µs, engine", "µs, HTTP"]
    made = table(
        "gateway: tokens/s, and processor time a token",
        "streams",
        *headings,
        *((PEER, f"HTTP / {PEER}") if peer else ()),
    )
    for count, each in figures["streams"].items():
        used_us = figures["processor_us_per_token"][count]
        cells = [f"{each['engine']:.0f}", f"{each['HTTP']:.0f}", f"{each['ratio']:.3f}"]
        cells += [f"{used_us[way]:.0f}" for way in ("engine", "HTTP")]
        if peer:
            cells += [f"{each[PEER]:.0f}", f"{each['peer_ratio']:.2f}"] if PEER in each else ["failed", ""]
        made.add_row(count, *cells)
    first = figures["first_byte_s"]
    cells = [f"{1e3 * first[way]:.1f} ms" for way in ("engine", "HTTP")] + [
        f"+{1e3 * first['difference']:.1f} ms",
        "",
        "",
    ]
    if peer:
        cells += [f"{1e3 * first[PEER]:.1f} ms", ""] if PEER in first else ["failed", ""]
    made.add_row(FIRST_BYTE, *cells)
    return made


def plot(figures: dict[str, Any]) -> Figure:
    """Tokens a second by number of streams, every way."""
    figure, axes = pyplot.subplots(figsize=(4.5, 3.2))
    counts = list(figures["streams"])
    ways = [way for way in ("engine", "HTTP", PEER) if any(way in each for each in figures["streams"].values())]
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        heights = [figures["streams"][count].get(way, 0.0) for count in counts]
        places = [index + (number - (len(ways) - 1) / 2) * width for index in range(len(counts))]
        axes.bar(places, heights, width=width, label=way)
    axes.set_xticks(range(len(counts)), counts)
    axes.set_xlabel("streams")
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=8)
    plain(axes)
    return figure


main = benchmark(
    "serving door",
    measure,
    packages=("numpy", "torch", "transformers", "grpcio", "uvicorn", "starlette"),
    flags={"--peers": f"Also {PEER}, in an environment that is made if it is not there."},
)

if __name__ == "__main__":
    main()
