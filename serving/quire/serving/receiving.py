"""Receiving of requests: limits on a message's size, its time, and the number that arrive at once.

gRPC has one limit for all methods of a server, MAX_MESSAGE_BYTES, and applies it to the length in a message's header.
It receives a message into memory when the server requests it, and reports nothing before the message is complete.
Until then it holds no more than a stream's first flow-control window. So a call requests its message only after its
caller is authorized, and needs one of few places for that. The limit of the method is checked before the bytes are
decoded.

A message of a stream may be requested hours before it is sent, so it needs no place and has no deadline, except in
methods that are open to every caller.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import grpc

from quire.cache.v1.reasons import Reason
from quire.serving.access import caller, is_open
from quire.serving.errors import CallEnded, ErrorStatus
from quire.serving.runtime import MemoryTrim

Context = grpc.aio.ServicerContext[Any, Any]
Decode = Callable[[bytes], Any]

SMALL_MESSAGE_BYTES = 64 * 2**10
"""A message of a method that has no limit of its own: ids, names and numbers."""
PROMPT_MESSAGE_BYTES = 4 * 2**20
"""A message with prompts: 1.3 million tokens, each below 2^21 and so 3 bytes at most. Its parsing holds the event loop:
some 20 ms for each MiB of many small parts."""
MAX_MESSAGE_BYTES = 32 * 2**20
"""Any message: a step with 11 million tokens."""
MAX_ARRIVING = 8
"""Requests of a caller that arrive at a time, of methods with one limit. More wait for a place."""
LARGE_MESSAGE_BYTES = 2**20
"""The memory of a message of this size or more is returned to the system at the end of its call."""
ARRIVAL_TIMEOUT_S = 20.0
"""Time for a request to arrive, from when it has its place."""
CONTENDED_TIMEOUT_S = 5.0
SMALL_CONTENDED_TIMEOUT_S = 2.0
"""The timeout of a call while others wait for a place, and of small messages. Far above the needs of a busy machine."""


class MalformedRequestError(Exception):
    """The bytes are no message of the method's request type."""


class Arrivals:
    """The places of one caller. A request that does not arrive loses its place sooner if others wait for one."""

    def __init__(self, contended_timeout_s: float) -> None:
        self._contended_timeout_s = contended_timeout_s
        self._places = asyncio.Semaphore(MAX_ARRIVING)
        self._deadlines: set[asyncio.Timeout] = set()
        self._num_waiting = 0

    async def read(self, context: Context) -> Any:
        """The message's bytes, or grpc.aio.EOF. Raises TimeoutError."""
        if self._places.locked():
            self._hurry()
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            timeout_s = self._contended_timeout_s if self._num_waiting else ARRIVAL_TIMEOUT_S
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await context.read()
                finally:
                    self._deadlines.discard(deadline)
        finally:
            self._places.release()

    def _hurry(self) -> None:
        latest = asyncio.get_running_loop().time() + self._contended_timeout_s
        for deadline in self._deadlines:
            when = deadline.when()
            if when is not None and when > latest and not deadline.expired():
                deadline.reschedule(latest)


class Receiver:
    """Reads the requests of a server's calls.

    limits   full method name -> bytes that a message of it may have; SMALL_MESSAGE_BYTES for others
    domain   of the errors made here
    """

    def __init__(self, limits: Mapping[str, int], *, domain: str) -> None:
        self._limits = limits
        self._domain = domain
        self._memory = MemoryTrim()
        self._arrivals: WeakValueDictionary[tuple[str, int], Arrivals] = WeakValueDictionary()

    async def read_one(self, context: Context, method: str, decode: Decode | None) -> Any:
        """The request of a call that has one. Raises CallEnded, MalformedRequestError."""
        limit = self._limits.get(method, SMALL_MESSAGE_BYTES)
        try:
            data = await self._arrivals_of(caller().name, limit).read(context)
        except TimeoutError:
            raise self._incomplete() from None
        if data is grpc.aio.EOF:
            raise MalformedRequestError
        return self._decoded(data, limit, decode)

    async def read_all(self, context: Context, method: str, decode: Decode | None) -> AsyncIterator[Any]:
        """The requests of a stream. Raises CallEnded, MalformedRequestError."""
        limit = self._limits.get(method, SMALL_MESSAGE_BYTES)
        is_timed = is_open(method)
        while True:
            data = await (self._read_in_time(context) if is_timed else context.read())
            if data is grpc.aio.EOF:
                return
            message = self._decoded(data, limit, decode)
            del data  # while the stream waits for the next one
            yield message
            del message

    async def _read_in_time(self, context: Context) -> Any:
        """The message's bytes, or grpc.aio.EOF. Raises CallEnded."""
        try:
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
                return await context.read()
        except TimeoutError:
            raise self._incomplete() from None

    def _arrivals_of(self, name: str, limit: int) -> Arrivals:
        found = self._arrivals.get((name, limit))
        if found is None:
            is_small = limit <= SMALL_MESSAGE_BYTES
            found = Arrivals(SMALL_CONTENDED_TIMEOUT_S if is_small else CONTENDED_TIMEOUT_S)
            self._arrivals[name, limit] = found
        return found

    def _incomplete(self) -> CallEnded:
        self._memory.plan()
        return CallEnded(incomplete_request(self._domain))

    def _decoded(self, data: bytes, limit: int, decode: Decode | None) -> Any:
        if len(data) > LARGE_MESSAGE_BYTES:
            self._memory.plan()
        if len(data) > limit:
            raise CallEnded(request_too_large(self._domain, len(data), limit))
        if decode is None:
            return data
        try:
            return decode(data)
        except Exception as error:
            raise MalformedRequestError from error


def request_too_large(domain: str, num_bytes: int, limit: int) -> ErrorStatus:
    """The answer to a message with more bytes than its method takes."""
    message = f"the request has {num_bytes} bytes; this method takes at most {limit} bytes"
    metadata = {"field": "request", "value": f"{num_bytes} bytes", "limit": f"at most {limit} bytes"}
    return ErrorStatus.of(Reason.INVALID_ARGUMENT, message, domain, metadata)


def incomplete_request(domain: str) -> ErrorStatus:
    """The answer to a message that did not arrive in time. The sender may be slow: a retry may succeed."""
    limit = f"complete within {ARRIVAL_TIMEOUT_S:g} s, or {SMALL_CONTENDED_TIMEOUT_S:g} s while others wait"
    message = f"the request is incomplete; must be {limit}"
    return ErrorStatus.of(Reason.OVERLOADED, message, domain, {"limit": limit})
