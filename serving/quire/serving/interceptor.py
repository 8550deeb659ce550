"""Wrap every handler of a server: count calls, authorize callers, bound large, late and malformed messages, handle
unexpected exceptions, end streams, and log calls.

gRPC alone answers an unexpected exception with UNKNOWN and the exception's text, which may quote the request; and a
malformed request the same way. Here the first becomes INTERNAL with a fixed text and a log line that names method,
type and place, and the second INVALID_ARGUMENT. An unauthorized caller is refused before either: gRPC reads the
request of a unary method before it calls the handler, so every method is registered as one with a stream of requests,
and its request is read here.

A refusal is raised as a value, CallEnded. The call is aborted where no reference to the request remains: gRPC's own
exception makes a cycle with the objects that its traceback refers to.

Every call has a request id: the caller's own (metadata x-request-id) or a random one. It is in the call's log lines
and in the trailing metadata of the answer.

Handlers are async functions or async generators. Others are not wrapped, which only a server without authentication
allows.
"""

import asyncio
import contextlib
import inspect
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from quire.cache.v1.reasons import Reason
from quire.serving import tracing
from quire.serving.access import Access, Evidence, caller, evidence_of, is_open, set_caller
from quire.serving.errors import CallEnded, ErrorStatus, abort
from quire.serving.logs import REQUEST_ID_KEY, Call, begin_call, describe_exception
from quire.serving.receiving import Decode, MalformedRequestError, Receiver

log = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler, with fields that the stubs leave untyped
Context = grpc.aio.ServicerContext[Any, Any]

MAX_CALLS = 8_192
"""Calls, streams included, that a server has open at a time."""

_ONE_WORD = re.compile(r"[!-~]*")


class _Stream:
    """An open stream and the task that handles it.

    A handler that is cancelled while gRPC sends a message for it can't send a status any more: gRPC allows one send
    at a time, and a generator does not even get the cancellation. So the end waits until the message is sent.
    """

    def __init__(self, task: asyncio.Task[Any], method: str, evidence: Evidence | None) -> None:
        self.task = task
        self.method = method
        self.evidence = evidence
        self.last_words: ErrorStatus | None = None
        self._num_writes = 0

    @property
    def is_ended(self) -> bool:
        """True if the server has ended it."""
        return self.last_words is not None

    def end(self, last_words: ErrorStatus) -> None:
        """Cancels the handler, now or after the message that is being sent; the client gets the status."""
        if self.last_words is None:
            self.last_words = last_words
            self._cancel_if_idle()

    def begin_write(self) -> None:
        """A message is about to be sent. None is, once the stream is to end."""
        if self.is_ended:
            raise asyncio.CancelledError
        self._num_writes += 1

    def end_write(self) -> None:
        """The message is sent."""
        self._num_writes -= 1
        if self.is_ended:
            self._cancel_if_idle()

    def _cancel_if_idle(self) -> None:
        if not self._num_writes:
            self.task.cancel()


class _WatchedContext:
    """The context of a stream, telling the stream when a message is being sent."""

    def __init__(self, context: Context, opened: _Stream) -> None:
        self._context = context
        self._opened = opened

    async def write(self, message: Any) -> None:
        """Write a message as the context does."""
        self._opened.begin_write()
        try:
            await self._context.write(message)
        finally:
            self._opened.end_write()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Calls that are open, and those that were refused since the start by method and reason."""

    num_open: int
    refused: Mapping[tuple[str, str], int]


class HandlerGuard(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server, once per method.

    fatal      exceptions after which the process must end; `on_fatal` is called with them
    domain     of the errors made here
    access     authorization; None: every caller may call every method
    message_limits  full method name -> bytes of a message; Receiver's
    max_calls  the most open calls, without those of health and reflection; more are refused (OVERLOADED)
    """

    def __init__(
        self,
        *,
        domain: str,
        fatal: tuple[type[BaseException], ...],
        on_fatal: Callable[[BaseException], None],
        access: Access | None = None,
        message_limits: Mapping[str, int] | None = None,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._domain = domain
        self._max_calls = max_calls
        self._num_open = 0
        self._refused: Counter[tuple[str, str]] = Counter()
        self._access = access
        self._receiver = Receiver(message_limits or {}, domain=domain)
        self._fatal = fatal
        self._on_fatal = on_fatal
        self._handlers: dict[str, Handler] = {}
        self._streams: dict[_Stream, None] = {}  # in the order in which they were opened
        self._ending_streams = False

    def statistics(self) -> CallStatistics:
        return CallStatistics(self._num_open, dict(self._refused))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        guarded = self._handlers.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # gRPC answers UNIMPLEMENTED; not kept, since method names come from the peer
            guarded = self._handlers[method] = self._guard(handler, method)
        return guarded

    def end_streams(self) -> None:
        """Ends the streams that are open, and those still to come, with UNAVAILABLE and the reason SHUTTING_DOWN."""
        self._ending_streams = True
        for opened in tuple(self._streams):
            opened.end(shutting_down(self._domain))

    def end_revoked_streams(self) -> None:
        """Ends the streams of callers that may not open them any more, with the status that a new call would get."""
        for opened in tuple(self._streams):
            if self._access is not None and opened.evidence is not None:
                decision = self._access.decide(opened.method, opened.evidence)
                if isinstance(decision, ErrorStatus):
                    opened.end(decision)

    def _begin(self, context: Context) -> Call:
        """Counts a call and gives it its id; `_end` has to follow."""
        metadata = context.invocation_metadata() or ()
        call = begin_call(metadata)
        tracing.begin_call(metadata)
        context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        self._num_open += 1
        return call

    def _end(self, call: Call, method: str, context: Context) -> None:
        """Counts it off; its log line, and its span."""
        self._num_open -= 1
        tracing.end_call(method, call.refused)
        if call.refused is None and not log.isEnabledFor(logging.DEBUG):
            return
        name, milliseconds = _as_one_word(caller().name), 1e3 * (time.perf_counter() - call.begun)
        if call.refused is None:
            log.debug("ended method=%s caller=%s duration_ms=%.3f", method, name, milliseconds)
            return
        code, reason = call.refused
        self._refused[method, reason] += 1
        if code is grpc.StatusCode.INTERNAL:
            return  # has been logged with its cause
        log.log(
            logging.WARNING if code is grpc.StatusCode.RESOURCE_EXHAUSTED else logging.INFO,
            "refused method=%s reason=%s code=%s caller=%s peer=%s duration_ms=%.3f",
            *(method, reason, code.name, name, context.peer(), milliseconds),
        )

    def _admit(self, method: str, context: Context) -> Evidence | None:
        """Raises CallEnded if there are too many calls, or if the caller may not make this one.

        Returns the evidence that authorized it, None without authentication.
        """
        if self._num_open > self._max_calls and not is_open(method):
            raise CallEnded(overloaded(self._domain, self._max_calls))
        if self._access is None or is_open(method):
            return None
        evidence = evidence_of(context)
        decision = self._access.decide(method, evidence)
        if isinstance(decision, ErrorStatus):
            raise CallEnded(decision)
        set_caller(decision)
        return evidence

    def _guard(self, handler: Handler, method: str) -> Handler:
        sides = (handler.request_streaming, handler.response_streaming)
        behavior = getattr(handler, "_".join("stream" if is_stream else "unary" for is_stream in sides))
        if not inspect.iscoroutinefunction(behavior) and not inspect.isasyncgenfunction(behavior):
            if self._access is not None and not is_open(method):
                raise TypeError(f"{method} is no coroutine function: its callers can't be authenticated")
            return handler
        handle = self._stream_handler if any(sides) else self._unary_handler
        make = grpc.stream_stream_rpc_method_handler if any(sides) else grpc.stream_unary_rpc_method_handler
        answered = self._ending(handle(behavior, method, handler), method)
        return make(answered, response_serializer=handler.response_serializer)

    def _ending(self, handle: Callable[[Context], Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        """The handler that gRPC calls. It begins the call, and aborts it when `handle` raises CallEnded."""

        async def answer(_: Any, context: Context) -> Any:
            call = self._begin(context)
            try:
                try:
                    return await handle(context)
                except Exception as error:
                    ended = self._status_of(error, method)
                # The exception is gone by now, and what its traceback held.
                await abort(context, ended)
            except grpc.aio.AbortError as aborted:
                # The call keeps this exception: its traceback must not keep the call.
                raise aborted.with_traceback(None) from None
            finally:
                self._end(call, method, context)
                del _, context

        return answer

    def _unary_handler(
        self, behavior: Callable[..., Any], method: str, handler: Handler
    ) -> Callable[[Context], Awaitable[Any]]:
        decode: Decode | None = handler.request_deserializer

        async def handle(context: Context) -> Any:
            self._admit(method, context)
            return await behavior(await self._receiver.read_one(context, method, decode), context)

        return handle

    def _stream_handler(
        self, behavior: Callable[..., Any], method: str, handler: Handler
    ) -> Callable[[Context], Awaitable[None]]:
        decode: Decode | None = handler.request_deserializer

        async def handle(context: Context) -> None:
            with self._opened(method, context) as opened:
                try:
                    if handler.request_streaming:
                        request = self._receiver.read_all(context, method, decode)
                    else:
                        request = await self._receiver.read_one(context, method, decode)
                    await _write_answers(behavior, request, _WatchedContext(context, opened))
                except asyncio.CancelledError:
                    raise CallEnded(await self._last_words(opened, context)) from None

        return handle

    @contextlib.contextmanager
    def _opened(self, method: str, context: Context) -> Iterator["_Stream"]:
        task = asyncio.current_task()
        assert task is not None, "gRPC runs handlers in tasks"
        opened = _Stream(task, method, self._admit(method, context))
        self._streams[opened] = None
        if self._ending_streams:
            opened.end(shutting_down(self._domain))
        try:
            yield opened
        finally:
            del self._streams[opened]

    async def _last_words(self, opened: "_Stream", context: Context) -> ErrorStatus:
        """Return the reason why we cancelled a stream. Raises CancelledError if it was its client."""
        if opened.last_words is None or context.cancelled():
            raise asyncio.CancelledError
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # takes a cancellation that is still to be delivered
        opened.task.uncancel()
        return opened.last_words

    def _status_of(self, error: Exception, method: str) -> ErrorStatus:
        """The answer to a call that this exception ended; an AbortError is raised again."""
        if isinstance(error, CallEnded):
            return error.error
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, MalformedRequestError):
            return malformed_request(self._domain)
        if isinstance(error, grpc.aio.InternalError):
            log.debug("caller disconnected during the answer method=%s", method)
            raise asyncio.CancelledError from error
        log.error("handler failed method=%s error=%s", method, describe_exception(error))
        if isinstance(error, self._fatal):
            self._on_fatal(error)
        return unexpected(self._domain)


async def _write_answers(behavior: Callable[..., Any], request: Any, context: Any) -> None:
    """Runs the handler of a stream: one that writes to its context, or one that yields its answers."""
    if inspect.iscoroutinefunction(behavior):
        await behavior(request, context)
        return
    async with contextlib.aclosing(behavior(request, context)) as answers:
        async for answer in answers:
            await context.write(answer)


def shutting_down(domain: str) -> ErrorStatus:
    """The end of a stream when the server stops."""
    return ErrorStatus.of(Reason.SHUTTING_DOWN, "the server is shutting down", domain)


def overloaded(domain: str, limit: int) -> ErrorStatus:
    """The error for a call above the limit of open calls."""
    return ErrorStatus.of(Reason.OVERLOADED, f"{limit} calls are open already", domain, {"limit": str(limit)})


def malformed_request(domain: str) -> ErrorStatus:
    """The error for bytes that are no message."""
    message = "the bytes received are not a message of this method's request type"
    return ErrorStatus.of(Reason.INVALID_ARGUMENT, message, domain, {"field": "request"})


def unexpected(domain: str) -> ErrorStatus:
    """The error for a defect of the server: nothing of the exception leaves the process."""
    return ErrorStatus(grpc.StatusCode.INTERNAL, "INTERNAL", "unexpected error in the server; see its log", domain)


def _as_one_word(name: str) -> str:
    """A certificate may give any name; in a line of text a value ends at a space."""
    return name if _ONE_WORD.fullmatch(name) else repr(name).replace(" ", "_")
