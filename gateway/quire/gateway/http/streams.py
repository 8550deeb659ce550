"""Answers in pieces, as server-sent events, and cancellation of work when its caller disconnects.

A stream's memory is bounded twice. `send` returns only once the connection's buffer has room, so unsent tokens stay
with the engine; and the engine fails a request with too many unread tokens (EngineConfig.max_unread_tokens).
A caller that reads nothing for the gateway's send timeout is disconnected.

A stream begins with its first event, or after BEGIN_S. A request that is refused sooner gets a status. Then a comment
is sent whenever the stream was silent for a while: proxies cut silent connections. An error of a stream that has begun
is its last event.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.client.errors import QuireError
from quire.gateway.errors import HttpError, http_error_of
from quire.gateway.limits import STREAM_PING_S, RequestLimits
from quire.serving.logs import describe_exception

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)
Taken = TypeVar("Taken", contravariant=True)
Result = TypeVar("Result")

BEGIN_S = 0.5
"""A stream without an event begins after this time."""
_BEGUN_AT_ONCE = 8
DONE = b"data: [DONE]\n\n"
SEND_KEY = "send"
"""The server's own `send` in a scope's state: what others wrap around it is for the beginning of an answer."""
PING = b": ping\n\n"
"""A comment, which clients skip: it says that the connection is alive."""
_encode = msgspec.json.Encoder().encode
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class CallerGone(Exception):
    """The caller has closed the connection, and does not read an answer."""


def encode_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. A lone surrogate becomes a question mark."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _dumps(value).encode(errors="replace")


def event_of(value: Any, *, name: str | None = None) -> bytes:
    """Return one server-sent event: a value as JSON, with the event's name if it has one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode_json(value) + b"\n\n"


class Answer(Protocol[Taken]):
    """Makes an answer's events of the items that it takes."""

    def push(self, item: Taken, /) -> bytes:
        """Take the next item; return its events, which may be none."""

    def finish(self) -> bytes:
        """Return the events behind the last item's."""


def error_event(error: HttpError) -> bytes:
    """Return the event of an error within a stream."""
    return event_of(error.body)


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of work. If the caller disconnects meanwhile, cancel work and raise CallerGone.

    The body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        return await task
    finally:
        watch.cancel()
        await _cancel(task)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end, so that its resources are free when this returns."""
    task.cancel()
    if not task.done():
        await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


class EventStream(Response, Generic[Item]):
    """An answer of server-sent events.

    The items are closed when the answer ends: at the last one, when the caller goes, or when the caller takes nothing
    for send_timeout_s. An error of theirs is the last event; then there is no [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        items: "Primed[Item]",
        answer: Answer[Item],
        *,
        send_timeout_s: float,
        ping_s: float = STREAM_PING_S,
        headers: Mapping[str, str] | None = None,
        encode_error: Callable[[HttpError], bytes] = error_event,
    ) -> None:
        """encode_error makes the event of an error, for an API that has another shape for it."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._items = items
        self._answer = answer
        self._send_timeout_s = send_timeout_s
        self._ping_s = ping_s
        self._encode_error = encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        async with contextlib.aclosing(self._items):
            with contextlib.suppress(CallerGone):
                await while_connected(Request(scope, receive), self._send(send, scope["state"].get(SEND_KEY, send)))

    async def _send(self, send: Send, send_body: Send) -> None:
        async with _watched(send_body, timeout_s=self._send_timeout_s, ping_s=self._ping_s) as watch:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for item in self._items:
                    if event := self._answer.push(item):
                        await watch.send(event)
                if event := self._answer.finish():
                    await watch.send(event)
            except CallerGone:
                raise
            except Exception as error:
                await watch.send(self._encode_error(_http_error_of(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _http_error_of(error: Exception) -> HttpError:
    """Return the error that ends a stream, and log it."""
    found = http_error_of(error) if isinstance(error, QuireError) else error
    if not isinstance(found, HttpError):
        log.error("an endpoint failed: %s", describe_exception(error))
        return HttpError(500, "the server failed on this request; its log has the place", code="internal_error")
    log.log(logging.WARNING if found.status >= 500 else logging.INFO, "a stream failed code=%s", found.code)
    return found


@contextlib.asynccontextmanager
async def _watched(send: Send, *, timeout_s: float, ping_s: float) -> AsyncGenerator["_SendWatch", None]:
    """End the block with CallerGone when one of its sends takes longer. Send comments while the block sends nothing."""
    limit = asyncio.timeout(None)
    try:
        async with limit:
            watch = _SendWatch(send, limit, timeout_s=timeout_s, ping_s=ping_s)
            try:
                yield watch
            finally:
                await watch.close()
    except TimeoutError:
        if limit.expired():
            raise CallerGone from None
        raise


class _SendWatch:
    """Watches all sends of a stream with two timers: one for each send costs as much as the JSON of a token."""

    def __init__(self, send: Send, limit: asyncio.Timeout, *, timeout_s: float, ping_s: float) -> None:
        self._send = send
        self._limit = limit
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()  # when the last send began
        self._began_s: float | None = None  # the present send's
        self._timer = self._loop.call_later(timeout_s, self._look)
        self._ping_timer = self._loop.call_later(ping_s, self._look_for_silence)
        self._ping: asyncio.Task[None] | None = None

    async def send(self, event: bytes) -> None:
        self._began_s = self._last_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._began_s = None

    def _look(self) -> None:
        now = self._loop.time()
        ends_s = (now if self._began_s is None else self._began_s) + self._timeout_s
        if now >= ends_s:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(ends_s, self._look)

    def _look_for_silence(self) -> None:
        now = self._loop.time()
        if self._began_s is None and now >= self._last_s + self._ping_s:
            self._last_s = now
            self._ping = asyncio.ensure_future(self.send(PING))
        self._ping_timer = self._loop.call_at(
            max(self._last_s + self._ping_s, now + self._ping_s / 4), self._look_for_silence
        )

    async def close(self) -> None:
        self._timer.cancel()
        self._ping_timer.cancel()
        if self._ping is not None:
            await _cancel(self._ping)


async def begin_stream(
    items: "Closable[Item]",
    answer: Answer[Item],
    limits: RequestLimits,
    *,
    headers: Mapping[str, str] | None = None,
    encode_error: Callable[[HttpError], bytes] = error_event,
) -> EventStream[Item]:
    """Return the events of items as an answer, within the gateway's limits, once it may begin; see primed."""
    return EventStream(
        await primed(items),
        answer,
        send_timeout_s=limits.send_timeout_s,
        ping_s=limits.stream_ping_s,
        headers=headers,
        encode_error=encode_error,
    )


class Closable(Protocol[Item_co]):
    """Items that come, until they are closed: an asynchronous generator, or an object like one."""

    def __aiter__(self) -> AsyncIterator[Item_co]:
        """Return itself."""

    def __anext__(self) -> Awaitable[Item_co]:
        """Wait for the next item."""

    def aclose(self) -> Awaitable[None]:
        """End the work on further items."""


async def primed(items: Closable[Item], *, within_s: float = BEGIN_S) -> "Primed[Item]":
    """Wait for the first item, but no longer than this; return all items.

    So an error before the first item is an HTTP status, unless it comes late, and not an event.
    """
    first = asyncio.ensure_future(items.__anext__())
    try:
        await asyncio.wait([first], timeout=within_s)
        if first.done() and isinstance(error := first.exception(), Exception) and not _is_end(error):
            raise error
    except BaseException:
        await _cancel(first)
        await items.aclose()
        raise
    return Primed(first, items)


def _is_end(error: Exception) -> bool:
    return isinstance(error, StopAsyncIteration)


class Primed(Generic[Item]):
    """Items, of which the first has come or is awaited. Unlike a generator it can be closed before it is iterated."""

    def __init__(self, first: "asyncio.Future[Item]", rest: Closable[Item]) -> None:
        self._first: asyncio.Future[Item] | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Item]:
        return self._rest.__anext__() if self._first is None else self._begin(self._first)

    async def _begin(self, first: "asyncio.Future[Item]") -> Item:
        item = await first
        self._first = None
        return item

    async def aclose(self) -> None:
        """End the work on further items."""
        if self._first is not None:
            await _cancel(self._first)
        await self._rest.aclose()


async def _let_others_run(index: int) -> None:
    """Let the event loop turn after each few streams that begin: the beginning of one takes a millisecond."""
    if index % _BEGUN_AT_ONCE == _BEGUN_AT_ONCE - 1:
        await asyncio.sleep(0)


async def merged(streams: Sequence[Closable[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Iterate over several streams at once: (index of the stream, item). The first error ends all.

    An item is taken from a stream only once the one before it was taken from here.
    """
    ready: list[tuple[int, Item] | BaseException | None] = []
    news, taken = asyncio.Event(), asyncio.Event()  # taken: all that is ready now

    async def pump(index: int, stream: Closable[Item]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    ready.append((index, item))
                    news.set()
                    await taken.wait()
        except Exception as error:
            ready.append(error)
        else:
            ready.append(None)
        news.set()

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(index, stream)))
            await _let_others_run(index)
        num_open = len(streams)
        while num_open:
            await news.wait()
            news.clear()
            (entries, ready), (waiting, taken) = (ready, []), (taken, asyncio.Event())
            for entry in entries:
                if isinstance(entry, BaseException):
                    raise entry
                if entry is None:
                    num_open -= 1
                else:
                    yield entry
            waiting.set()
    finally:
        for task in tasks:
            await _cancel(task)


async def collected(streams: Sequence[AsyncIterator[Item]]) -> list[list[Item]]:
    """Return all items of each stream; the first error cancels all."""

    async def drain(stream: AsyncIterator[Item]) -> list[Item]:
        return [item async for item in stream]

    tasks: list[asyncio.Task[list[Item]]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(drain(stream)))
            await _let_others_run(index)
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            await _cancel(task)
