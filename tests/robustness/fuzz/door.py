"""Requests that a client should not send, to all doors of one gateway, beside a stream that must not notice.

    python tests/robustness/fuzz/door.py                               4,000 requests, seed 1
    python tests/robustness/fuzz/door.py --requests 20000 --seed 2
    python tests/robustness/fuzz/door.py --only 1:317                  one of these requests alone

The doors are HTTP, EngineService and Shepherd's VllmEngine. The witness is a plain stream, again and again: its tokens
must be those of an undisturbed run. Its longest wait between two tokens is shown. Exits with 1 if an answer, the
witness, the process, its log or the books are not as they have to be, and says which request it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))
import conftest  # noqa: F401 - the environment of tests, before gRPC is imported

# isort: split
import grpc
import httpx
import psutil
import uvloop
from deadlines import DEADLINE_S
from gateway.conftest import Gateway
from integration.protocol_client import CHANNEL_OPTIONS, Pair, await_that
from robustness.fuzz.bodies import Ending, HttpRequest, http_request
from robustness.fuzz.drive import Answer, Broken, judge, refusal_of
from robustness.fuzz.messages import Generator, Message
from robustness.fuzz.surface import GATEWAY, SHEPHERD

from quire.cli.launch import LocalServices

ROOT = Path(__file__).parents[3]
DOORS = ("http", "http", GATEWAY, SHEPHERD)
"""The door of request k is entry k modulo 4."""
LANES = 8
PATIENCE_S = 3.0
"""A client that has no complete answer by then leaves: many tokens may be on their way."""
ENDLESS = {"SubscribeKvEvents"}
STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 429)
OF_NO_FIELD = {"invalid_json", "invalid_request", "invalid_http"}
"""Codes of a 400 that no field of the body is to blame for."""
FAILURES = ("endpoint failed", "handler failed", "unexpected error", "Traceback")
"""Texts that a log has of a failure that nobody foresaw."""
WITNESS = {
    "prompt": "The default value of this parameter",
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@dataclass(frozen=True, slots=True)
class Watched:
    """A stream of the witness: its tokens, and the seconds between two events, that before the first one included."""

    token_ids: Sequence[int]
    waits_s: Sequence[float]


@dataclass
class Report:
    """The results of a run."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By endpoint or method, and by status and code, reason, or what the client did."""
    failures: list[str] = field(default_factory=list)
    undisturbed: Watched = field(default_factory=lambda: Watched((), ()))
    watched: list[Watched] = field(default_factory=list)
    open_at_longest: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def waits_s(self) -> list[float]:
        return sorted(wait for each in self.watched for wait in each.waits_s)


class Door:
    """A gateway with all doors, and clients of them. Made by `started`."""

    def __init__(self, services: LocalServices, gateway: Gateway, channels: dict[str, Any]) -> None:
        self.services = services
        self.gateway = gateway
        self._channels = channels
        url = httpx.URL(gateway.url)
        self._address = (url.host, url.port or 80)

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator[Door]:
        worker = ("--threads", "1", "--dtype", "float32", "--max-num-seqs", "32")
        with LocalServices.start(
            model=ROOT / "deploy/demo/model", num_blocks=512, extra_worker_args=worker
        ) as services:
            folder = services.runtime_dir
            engine_service = f"unix:{folder}/engine.sock"
            flags = ("--pool", "default", "--grpc-listen", engine_service, "--shepherd", "127.0.0.1:0")
            gateway = Gateway(services.cachemgr_address, *flags, log=folder / "gateway.log")
            addresses = {GATEWAY: engine_service}
            try:
                while SHEPHERD not in addresses:
                    line = gateway.next_line()
                    if "VllmEngine" in line or "hepherd" in line:
                        addresses[SHEPHERD] = line.rpartition("grpc://")[2]
                channels = {
                    door: grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
                    for door, address in addresses.items()
                }
                yield cls(services, gateway, channels)
                for channel in channels.values():
                    await channel.close()
            finally:
                gateway.close()

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def http(self, request: HttpRequest) -> str:
        """Send a request. Returns its status and code, or what the client did. Raises Broken."""
        sent = _bytes_of(request, self._address)
        sent = sent[: -(len(request.body) // 2) or None] if request.ending is Ending.CUTS else sent
        try:
            async with asyncio.timeout(PATIENCE_S):
                data = await self._exchange(request, sent)
        except TimeoutError:
            if request.path.endswith(("tokenize", "count_tokens")):
                raise Broken(f"no answer within {PATIENCE_S} s") from None
            return "left"
        if request.ending is not Ending.READS:
            return request.ending.name.lower()
        return judge_http(data)

    async def _exchange(self, request: HttpRequest, sent: bytes) -> bytes:
        """Return the answer; what has come of it if the client does not read it, or the server does not read it all."""
        loop = asyncio.get_running_loop()
        with socket.create_connection(self._address) as connection:
            connection.setblocking(False)
            with contextlib.suppress(ConnectionError):  # the answer to a body that is too large comes before its end
                await loop.sock_sendall(connection, sent)
            data = bytearray()
            if request.ending in (Ending.CUTS, Ending.LEAVES_AT_ONCE):
                return b""
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(connection, 2**16):
                    data += part
                    if request.ending is Ending.LEAVES:
                        break
            return bytes(data)

    # -- gRPC -----------------------------------------------------------------------------------------------------

    async def grpc(self, message: Message) -> str:
        """Send a message. Returns its reason, or OK, or what the client did. Raises Broken."""
        method, channel = message.method, self._channels[message.method.process]
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                if method.server_streaming:
                    call = channel.unary_stream(method.path)(message.data, timeout=DEADLINE_S)
                    async for part in call:
                        parts.append(part)
                        if method.name in ENDLESS:
                            call.cancel()
                            break
                else:
                    parts.append(await channel.unary_unary(method.path)(message.data, timeout=DEADLINE_S))
                answer = Answer(tuple(parts), grpc.StatusCode.OK)
        except TimeoutError:
            return "left"
        except grpc.aio.AioRpcError as error:
            answer = Answer.of(error)
        return refusal_of(answer, judge(method, answer)) or "OK"

    # -- the witness ----------------------------------------------------------------------------------------------

    async def watch(self, client: httpx.AsyncClient, **fields: Any) -> Watched:
        """Read a plain stream to its end. Raises Broken if it does not end as it has to."""
        token_ids: list[int] = []
        waits_s: list[float] = []
        line, last = "", time.perf_counter()
        async with client.stream("POST", "/v1/completions", json={**WITNESS, **fields}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    waits_s.append(now - last)
                    last = now
                    for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                        token_ids += choice.get("token_ids") or ()
                if line.startswith("data: [DONE]"):
                    return Watched(tuple(token_ids), tuple(waits_s))
        raise Broken(f"the witness ended with {answer.status_code} {line[:300]!r} after {len(token_ids)} tokens")


def _bytes_of(request: HttpRequest, address: tuple[str, int]) -> bytes:
    headers = {"Host": "{}:{}".format(*address), "Connection": "close", "Content-Type": "application/json"}
    headers |= {"Content-Length": str(len(request.body)), **dict(request.headers)}
    if "Upgrade" in headers:
        headers["Connection"] = "Upgrade, close"
    lines = [f"POST {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + request.body


def judge_http(data: bytes) -> str:
    """Return the status and the code of an answer as it came. Raises Broken if no request may be answered like this."""
    if not data:
        raise Broken("the connection was closed without an answer")
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except http.client.HTTPException as error:
        raise Broken(f"the answer breaks off: {error!r} {data[-200:]!r}") from None
    shown = f"{response.status} {body[:400]!r}"
    if response.status not in STATUSES:
        raise Broken(f"not a status for this: {shown}")
    if response.headers.get_content_type() == "text/event-stream":
        return f"200 {judge_events(body)}".strip()
    try:
        answer = json.loads(body, parse_constant=_refuse_constant)
    except ValueError as error:
        raise Broken(f"not JSON, {error}: {shown}") from None
    if response.status == 200:
        return "200"
    return f"{response.status} {judge_error(response.status, answer.get('error'), shown)}"


def judge_error(status: int, error: Any, shown: str) -> str:
    """Return the code of an error. Raises Broken if it has no text, or does not name its field."""
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        raise Broken(f"not an error: {shown}")
    if "details" in error:  # Anthropic's form: the message begins with the field
        return str(error["details"]["error_code"])
    if status in (400, 422) and not error["param"] and error["code"] not in OF_NO_FIELD:
        raise Broken(f"does not name the field: {shown}")
    return str(error["code"])


def judge_events(body: bytes) -> str:
    """Return the code of a stream's error; empty if it has none. Raises Broken if the stream does not end."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line, parse_constant=_refuse_constant) for line in lines if line != "[DONE]"]
    if not events:
        raise Broken(f"a stream without an event: {body[:400]!r}")
    last = events[-1]
    error = last.get("error") or (last.get("response") or {}).get("error")
    if error:
        code = error.get("code") or error.get("details", {}).get("error_code")
        if code in (None, "internal_error", "server_error", "engine_stopped"):
            raise Broken(f"a stream ends with {lines[-2:]}")
        return str(code)
    if "[DONE]" not in lines and last.get("type") not in ("message_stop", "response.completed", "response.incomplete"):
        raise Broken(f"a stream does not end: {lines[-2:]}")
    return ""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class _Received:
    """The bytes of an answer, as a socket for http.client."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class Requests:
    """Request k of a seed, to its door."""

    def __init__(self, door: Door, seed: int) -> None:
        self.seed = seed
        self._door = door
        self._generators = {process: Generator(seed, process) for process in (GATEWAY, SHEPHERD)}

    def draw(self, number: int) -> HttpRequest | Message:
        name = DOORS[number % len(DOORS)]
        return http_request(self.seed, number) if name == "http" else self._generators[name].message(number)

    async def send(self, number: int) -> tuple[str, str]:
        """Return the endpoint or method, and the answer. Raises Broken."""
        drawn = self.draw(number)
        if isinstance(drawn, HttpRequest):
            return drawn.path, await self._door.http(drawn)
        return drawn.method.path, await self._door.grpc(drawn)


async def fuzz(seed: int, numbers: Iterator[int], *, minutes: float = float("inf")) -> Report:
    """Start a gateway, send these requests, fewer if time is over, and look at everything in the end."""
    report = Report()
    async with Door.started() as door, httpx.AsyncClient(base_url=door.gateway.url, timeout=DEADLINE_S) as client:
        report.undisturbed = await door.watch(client)
        again = await door.watch(client)
        if again.token_ids != report.undisturbed.token_ids:
            report.failures.append("the witness differs without a disturbance")
        requests, opened = Requests(door, seed), set[int]()
        ended = asyncio.Event()
        began = time.monotonic()

        async def lane() -> None:
            for number in numbers:
                opened.add(number)
                try:
                    report.answers[await requests.send(number)] += 1
                except Broken as problem:
                    report.failures.append(f"{seed}:{number} {_name(requests.draw(number))}: {problem}")
                finally:
                    opened.discard(number)
                if time.monotonic() - began > 60 * minutes:
                    return

        async def witness() -> None:
            while not ended.is_set():
                watched = await door.watch(client)
                if not report.waits_s or max(watched.waits_s) > report.waits_s[-1]:
                    report.open_at_longest = tuple(_name(requests.draw(number)) for number in sorted(opened))
                report.watched.append(watched)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(witness())
            async with asyncio.TaskGroup() as lanes:
                for _ in range(LANES):
                    lanes.create_task(lane())
            ended.set()
        report.seconds = time.monotonic() - began
        if any(each.token_ids != report.undisturbed.token_ids for each in report.watched):
            report.failures.append("the witness has other tokens than without the requests")
        for path in ("/health", "/ready"):
            status = (await client.get(path)).status_code
            if status != 200:
                report.failures.append(f"{path} is {status}")
        report.failures += await asyncio.to_thread(last_look, door)
    return report


def last_look(door: Door) -> list[str]:
    """Return what is not as it has to be: sequences that are left, the books, the process, the log."""
    pair = Pair(door.services)
    try:
        await_that("no sequence is left", lambda: not pair.pool().block_counts.active_count)
        found = [f"AuditPool: {violation}" for violation in pair.violations()]
    finally:
        pair.close()
    if not psutil.pid_exists(door.gateway.process.pid) or door.gateway.process.poll() is not None:
        found.append("the gateway has ended")
    lines = door.gateway.log.read_text().splitlines()
    return found + [f"log: {line}" for line in lines if any(text in line for text in FAILURES)]


def _name(drawn: HttpRequest | Message) -> str:
    if isinstance(drawn, Message):
        return f"{drawn.method.path} {drawn.data[:300].hex()}"
    return f"{drawn.path} {drawn.ending.name} {drawn.headers or ''} {drawn.body[:400]!r}"


def show(report: Report, *, seed: int) -> None:
    """Print the answers by endpoint, the witness's waiting, and what went wrong."""
    by_name: dict[str, Counter[str]] = {}
    for (name, answer), count in report.answers.items():
        by_name.setdefault(name, Counter())[answer] += count
    for name, answers in sorted(by_name.items()):
        listed = ", ".join(f"{answer} {count:,}" for answer, count in answers.most_common())
        print(f"{name}: {answers.total():,}: {listed}")
    waits = report.waits_s
    print(f"seed {seed}: {report.answers.total():,} requests in {report.seconds:,.0f} s")
    print(
        f"the witness: {len(report.watched)} streams of {WITNESS['max_tokens']} tokens; waits between two events, ms:"
    )
    before = sorted(report.undisturbed.waits_s)
    for name, times in (("undisturbed", before), ("beside the requests", waits)):
        if times:
            shown = [
                f"{part:.0%} {1e3 * times[min(len(times) - 1, int(part * len(times)))]:,.1f}" for part in (0.5, 0.99)
            ]
            print(f"  {name}: {', '.join(shown)}, longest {1e3 * times[-1]:,.1f}")
    for each in report.open_at_longest:
        print(f"  open after the longest: {each[:300]}")
    for failure in report.failures:
        print(f"FAILED {failure[:1500]}")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4_000, metavar="NUMBER", help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (%(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop earlier, after so long")
    parser.add_argument("--only", metavar="SEED:NUMBER", help="send one request alone")
    arguments = parser.parse_args()
    seed, numbers = arguments.seed, iter(range(arguments.requests))
    if arguments.only:
        seed, number = map(int, arguments.only.split(":"))
        numbers = iter([number])
    report = uvloop.run(fuzz(seed, numbers, minutes=arguments.minutes))
    show(report, seed=seed)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
