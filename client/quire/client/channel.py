"""The gRPC code of both thin clients: a channel, calls with deadlines and retries, ordered streams, decoded errors."""

import asyncio
import contextlib
import random
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from quire.cache.v1 import error_pb2
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import ProtocolViolation, QuireError, Unavailable, error_of_reason

Request = TypeVar("Request")
Response = TypeVar("Response")

_MAX_MESSAGE_BYTES = 64 * 2**20
# The time limit of one attempt to connect, in place of gRPC's own: as long as a call. A refused connection is retried
# with backoff, which this does not change.
_CONNECT_TIMEOUT_MS = 10_000
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)
# gRPC reports INTERNAL for a connection that broke during a call ("Internal error from Core").
_UNAVAILABLE_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
    }
)


def open_channel(address: str, credentials: Credentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """A channel to "unix:/path" or "host:port"; connects and reconnects by itself.

    Raises CredentialsUnusable, and InvalidRequest for a malformed address.
    """
    return credentials.open_channel(address, CHANNEL_OPTIONS)


def decode_rpc_error(error: grpc.aio.AioRpcError) -> QuireError:
    """The exception for a call that failed: by the ErrorInfo of its status, else by its code."""
    message = error.details() or error.code().name
    details = _details(error)
    info, retry = _unpacked(details, error_details_pb2.ErrorInfo), _unpacked(details, error_details_pb2.RetryInfo)
    if info is not None:
        retry_after_s = None if retry is None else _seconds(retry.retry_delay)
        return error_of_reason(info.reason, message, dict(info.metadata), retry_after_s=retry_after_s)
    if error.code() in _UNAVAILABLE_CODES:
        return Unavailable(message, reason=error.code().name)
    return QuireError(message, reason=error.code().name)


def last_cause(message: str) -> str:
    """Return the last of the causes in gRPC's message, such as "Connection refused". One way to poll adds errno."""
    return re.sub(r" \(\d+\)$", "", message.rpartition(": ")[2].strip(" ]"))


def decode_error(error: error_pb2.Error) -> QuireError:
    """The exception for an Error inside an answer."""
    retry_after_s = _seconds(error.retry_delay) if error.HasField("retry_delay") else None
    return error_of_reason(error.reason, error.message, dict(error.metadata), retry_after_s=retry_after_s)


def _details(error: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    """The details of a status, beside code and text."""
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            with contextlib.suppress(ValueError):  # DecodeError is one: not a Status, so no details
                return list(status_pb2.Status.FromString(value).details)
    return []


def _unpacked(details: list[any_pb2.Any], kind: Callable[[], Any]) -> Any:
    """The first detail of this type, None if there is none."""
    for detail in details:
        message = kind()
        with contextlib.suppress(ValueError):  # it is of the type by its name, and can't be read
            if detail.Unpack(message):
                return message
    return None


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retries of idempotent calls while the server is unavailable, and the waits in between."""

    max_attempts: int = 4
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0

    def delays_s(self) -> Iterator[float]:
        """Waits between attempts: doubling up to the limit, each shortened at random by up to a half."""
        delay_s = self.first_delay_s
        for _ in range(self.max_attempts - 1):
            yield delay_s * random.uniform(0.5, 1.0)
            delay_s = min(2 * delay_s, self.max_delay_s)


RETRIES = RetryPolicy()
ONCE = RetryPolicy(max_attempts=1)


async def retried(
    attempt: Callable[[], Awaitable[Response]], policy: RetryPolicy, *, after: type[QuireError] = Unavailable
) -> Response:
    """Return the result of the first attempt that does not raise `after`; raise the last one's error if there is none.

    Waits as long as the policy says, or as the server asked if that is longer.
    """
    for delay_s in policy.delays_s():
        try:
            return await attempt()
        except after as error:
            await asyncio.sleep(max(delay_s, error.retry_after_s or 0.0))
    return await attempt()


async def unary(
    method: Callable[..., Awaitable[Response]], request: Any, *, timeout_s: float, policy: RetryPolicy = ONCE
) -> Response:
    """Make one call with a deadline per attempt. Raises a QuireError. Only idempotent calls may have a policy."""

    async def attempt() -> Response:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise decode_rpc_error(error) from None

    return await retried(attempt, policy)


async def answers(call: grpc.aio.UnaryStreamCall[Any, Response]) -> AsyncGenerator[Response, None]:
    """The answers of a stream; the call ends with the generator. Raises QuireError."""
    try:
        async for answer in call:
            yield answer
    except grpc.aio.AioRpcError as error:
        raise decode_rpc_error(error) from None
    finally:
        call.cancel()


def is_being_cancelled() -> bool:
    """True if the running task was asked to end. gRPC raises CancelledError for reasons of its own, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class OrderedStream(Generic[Request, Response]):
    """A bidirectional stream where each request has one answer, in order. Opened when first used and after a break.

    When the stream breaks or an answer is late, every waiting request gets Unavailable, or the server's error: it is
    then unknown if the request was applied.
    """

    def __init__(self, open_call: Callable[[], grpc.aio.StreamStreamCall[Any, Any]], *, timeout_s: float) -> None:
        """open_call begins the stream; an answer later than timeout_s breaks it."""
        self._open_call = open_call
        self._timeout_s = timeout_s
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[asyncio.Future[Response], asyncio.TimerHandle]] = deque()
        self._write_lock = asyncio.Lock()
        self._is_open = False  # the server has been reached

    async def send(self, request: Request) -> asyncio.Future[Response]:
        """Write a request; returns when it is on its way. The future gets its answer, or a QuireError."""
        async with self._write_lock:
            call = self._call or self._open()
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Response] = loop.create_future()
            future.add_done_callback(_retrieve)  # a request that is no longer awaited may fail
            late = loop.call_later(self._timeout_s, self._on_late)
            self._waiting.append((future, late))
            try:
                await self._write(call, request, future)
            except grpc.aio.AioRpcError as error:
                self._break(decode_rpc_error(error))
            except asyncio.InvalidStateError:
                self._break(Unavailable("the stream has ended"))
            except asyncio.CancelledError:
                # Written in part or not at all: the order of answers can't be relied on any more.
                self._break(Unavailable("a request was given up while it was written"))
                # gRPC raises this also for a write to a stream that broke meanwhile: our caller did not cancel.
                if is_being_cancelled():
                    raise
            return future

    async def _write(
        self, call: grpc.aio.StreamStreamCall[Any, Any], request: Request, answer: asyncio.Future[Response]
    ) -> None:
        """Returns also if the stream is broken meanwhile, so that there is an answer already."""
        if not self._is_open:
            # A write waits for ever in gRPC if the stream is cancelled before it is open.
            opening = asyncio.create_task(call.wait_for_connection())
            opening.add_done_callback(_retrieve)
            either: tuple[asyncio.Future[Any], ...] = (opening, answer)
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                opening.cancel()
            if answer.done():
                return
            opening.result()
            self._is_open = True
        await call.write(request)

    async def close(self) -> None:
        """End the stream; requests that wait get Unavailable."""
        reader = self._reader
        self._break(Unavailable("the stream was closed"))
        if reader is not None:
            await asyncio.wait([reader])

    def _open(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        self._call = self._open_call()
        self._is_open = False
        self._reader = asyncio.create_task(self._read(self._call))
        return self._call

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        error: QuireError = Unavailable("the server has ended the stream")
        try:
            async for response in _responses(call):
                if not self._waiting:
                    error = ProtocolViolation("an answer without a request")
                    break
                future, late = self._waiting.popleft()
                late.cancel()
                if not future.done():
                    future.set_result(response)
        except grpc.aio.AioRpcError as rpc_error:
            error = decode_rpc_error(rpc_error)
        finally:
            if self._call is call:
                self._break(error)

    def _on_late(self) -> None:
        self._break(Unavailable(f"no answer within {self._timeout_s} s", reason="DEADLINE_EXCEEDED"))

    def _break(self, error: QuireError) -> None:
        call, reader, self._call, self._reader = self._call, self._reader, None, None
        waiting, self._waiting = self._waiting, deque()
        for future, late in waiting:
            late.cancel()
            if not future.done():
                future.set_exception(error)
        if call is not None:
            call.cancel()
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()


async def _responses(call: grpc.aio.StreamStreamCall[Any, Any]) -> AsyncIterator[Any]:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
