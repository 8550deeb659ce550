"""Scripts for a client and a server: each end that a call can have, as quire's clients and servers may meet it.

Each function is one script. It runs on both stages of stages.py; what its sides note must be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from robustness.simulation.stages import OPTIONS, SERVICE, Stage

from quire.cache.v1.reasons import Reason
from quire.client.cache_client import NOT_LISTENING
from quire.client.channel import decode_rpc_error
from quire.serving.errors import CallEnded, ErrorStatus

KIB = 1024
SOON_S = 0.3
"""Long enough for whatever can happen to have happened."""


async def outcome(work: Awaitable[Any]) -> str:
    """What comes out of it, in words."""
    try:
        result = await work
    except grpc.aio.AioRpcError as error:
        return f"AioRpcError {error.code().name}"
    except (Exception, asyncio.CancelledError) as error:
        return type(error).__name__
    if result is grpc.aio.EOF:
        return "EOF"
    if isinstance(result, bytes):
        return result.decode() if len(result) < 100 else f"{len(result)} bytes"
    return str(result)


async def is_waiting(task: asyncio.Task[Any]) -> bool:
    """True if it does not end by itself."""
    _, pending = await asyncio.wait([task], timeout=SOON_S)
    return bool(pending)


def unary(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(f"/{SERVICE}/unary")


def server_stream(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(f"/{SERVICE}/server_stream")


def stream(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/stream")


async def echo(requests: Any, context: Any) -> Any:
    async for request in requests:
        yield request


async def answer(request: bytes, context: Any) -> bytes:
    return b"answer to " + request


class Watched:
    """A handler's end: noted, and waited for by the client's side of the script."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def forever(self, request: Any, context: Any) -> Any:
        async with self.noting():
            await asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def noting(self) -> Any:
        self.began.set()
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            self._stage.server.append(type(error).__name__)
            raise
        else:
            self._stage.server.append("returned")
        finally:
            self.ended.set()


# Unary calls.


async def unary_is_answered(stage: Stage) -> None:
    await stage.serve(unary=answer)
    async with stage.channel() as channel:
        call = unary(channel)(b"1", timeout=5)
        stage.client.append(await outcome(call))
        stage.client.append(f"{(await call.code()).name} {call.done()} {call.cancelled()}")
        stage.client += [await outcome(unary(channel)(b"%d" % number)) for number in range(3)]


async def unary_is_refused_with_details(stage: Stage) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        raise CallEnded(ErrorStatus.of(Reason.LEASE_NOT_FOUND, "no such lease", "test.quire.dev", {"lease_id": "7"}))

    await stage.serve(unary=refuse)
    async with stage.channel() as channel:
        try:
            await unary(channel)(b"1", metadata=(("x-request-id", "mine"),))
        except grpc.aio.AioRpcError as error:
            decoded = decode_rpc_error(error)
            told = dict(error.trailing_metadata())
            stage.client.append(f"{error.code().name} {error.details()} {type(decoded).__name__} {decoded.reason}")
            stage.client.append(f"{decoded.metadata} {told['x-request-id']}")


async def unary_handler_fails(stage: Stage) -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise KeyError("secret")

    await stage.serve(unary=fail)
    async with stage.channel() as channel:
        try:
            await unary(channel)(b"1")
        except grpc.aio.AioRpcError as error:
            stage.client.append(f"{error.code().name} {error.details()} {decode_rpc_error(error).reason}")


async def method_is_unknown(stage: Stage) -> None:
    await stage.serve(unary=answer)
    async with stage.channel() as channel:
        stage.client.append(await outcome(stream(channel)().read()))
        stage.client.append(await outcome(server_stream(channel)(b"1").read()))


async def metadata_crosses(stage: Stage) -> None:
    async def show(request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("kept", "yes"), ("raw-bin", b"\x00\xff")))
        return str(dict(context.invocation_metadata())["mine"]).encode()

    await stage.serve(unary=show)
    async with stage.channel() as channel:
        call = unary(channel)(b"1", metadata=(("mine", "value"),))
        stage.client.append(await outcome(call))
        told = dict(await call.trailing_metadata())
        stage.client.append(f"{told['kept']} {told['raw-bin']!r}")


async def nobody_listens(stage: Stage) -> None:
    async with stage.channel() as channel:
        for _ in range(3):  # the first one fails when connecting has failed, others at once
            try:
                await unary(channel)(b"1", timeout=5)
            except grpc.aio.AioRpcError as error:
                says_so = any(sign in error.details() for sign in NOT_LISTENING)
                stage.client.append(f"{error.code().name} {says_so}")
        call = stream(channel)()
        stage.client.append(await outcome(call.wait_for_connection()))
        stage.client.append(await outcome(call.write(b"1")))
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(server_stream(channel)(b"1").read()))
        stage.client.append(await outcome(server_stream(channel)(b"1").wait_for_connection()))


async def nobody_listens_yet(stage: Stage) -> None:
    async with stage.channel() as channel:
        stage.client.append(await outcome(unary(channel)(b"1")))
        await stage.serve(unary=answer)
        stage.client.append(await until_answered(channel))


async def until_answered(channel: grpc.aio.Channel) -> str:
    """The first outcome that is no failure."""
    while (seen := await outcome(unary(channel)(b"again"))).startswith("AioRpcError UNAVAILABLE"):
        await asyncio.sleep(0.02)
    return seen


async def server_restarts(stage: Stage) -> None:
    await stage.serve(unary=answer, stream=echo)
    async with stage.channel() as channel:
        await meet_a_killed_server(stage, channel, stage.kill)
        await stage.serve(unary=answer)
        stage.client.append(await until_answered(channel))


async def meet_a_killed_server(stage: Stage, channel: grpc.aio.Channel, kill: Callable[[], None]) -> None:
    """What a client sees before and after."""
    call = stream(channel)()
    await call.write(b"1")
    stage.client.append(await outcome(call.read()))
    reader = asyncio.create_task(outcome(call.read()))
    await is_waiting(reader)
    kill()
    stage.client.append(await reader)
    stage.client.append(await outcome(call.read()))
    stage.client.append(await outcome(call.write(b"2")))
    stage.client.append(await outcome(unary(channel)(b"1")))


async def connection_breaks_during_unary(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(unary=watched.forever)
    async with stage.channel() as channel:
        call = unary(channel)(b"1")
        waiter = asyncio.create_task(outcome(call))
        await watched.began.wait()
        stage.cut()
        stage.client.append(await waiter)
        await watched.ended.wait()
        watched.began.clear()
        watched.ended.clear()
        again = unary(channel)(b"2")
        await watched.began.wait()
        again.cancel()
        stage.client.append(await outcome(again))
        await watched.ended.wait()


async def unary_is_late(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(unary=watched.forever)
    async with stage.channel() as channel:
        call = unary(channel)(b"1", timeout=SOON_S)
        stage.client.append(await outcome(call))
        await watched.ended.wait()
        stage.client.append(f"{call.done()} {call.cancelled()} {(await call.code()).name}")


async def stream_is_late(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(server_stream=watched.forever)
    async with stage.channel() as channel:
        call = server_stream(channel)(b"1", timeout=SOON_S)
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(call.read()))
        await watched.ended.wait()


async def unary_is_cancelled(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(unary=watched.forever)
    async with stage.channel() as channel:
        call = unary(channel)(b"1")
        await watched.began.wait()
        stage.client.append(f"{call.cancel()} {call.cancel()}")
        stage.client.append(await outcome(call))
        stage.client.append(f"{(await call.code()).name} {await call.details()}")
        await watched.ended.wait()


async def unary_task_is_cancelled(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(unary=watched.forever)
    async with stage.channel() as channel:
        call = unary(channel)(b"1")
        task = asyncio.create_task(outcome(call))
        await watched.began.wait()
        task.cancel()
        stage.client.append(await task)
        stage.client.append(f"{call.done()} {call.cancelled()}")
        await watched.ended.wait()


# Streams.


async def stream_echoes(stage: Stage) -> None:
    await stage.serve(stream=echo)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.wait_for_connection()
        for number in range(5):
            await call.write(b"%d" % number)
            stage.client.append(await outcome(call.read()))
        await call.done_writing()
        stage.client.append(await outcome(call.write(b"late")))
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(call.read()))
        stage.client.append(f"{(await call.code()).name} {call.done()}")
        stage.client.append(await outcome(call.write(b"later")))
        stage.client.append(f"{call.cancel()}")


async def client_cancels_stream(stage: Stage) -> None:
    watched = Watched(stage)

    async def handle(requests: Any, context: Any) -> None:
        async with watched.noting():
            async for request in requests:
                await context.write(request)

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.write(b"1")
        stage.client.append(await outcome(call.read()))
        reader = asyncio.create_task(outcome(call.read()))
        stage.client.append(str(await is_waiting(reader)))
        call.cancel()
        stage.client.append(await reader)
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(call.write(b"2")))
        stage.client.append(await outcome(call.done_writing()))
        await watched.ended.wait()


async def reading_task_is_cancelled(stage: Stage) -> None:
    watched = Watched(stage)

    async def handle(requests: Any, context: Any) -> None:
        async with watched.noting():
            async for request in requests:
                await context.write(request)

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.write(b"1")
        stage.client.append(await outcome(call.read()))
        reader = asyncio.create_task(outcome(call.read()))
        await is_waiting(reader)
        reader.cancel()
        stage.client.append(await reader)
        stage.client.append(f"{call.done()} {call.cancelled()}")
        stage.client.append(await outcome(call.write(b"2")))
        await watched.ended.wait()


async def server_ends_stream_first(stage: Stage) -> None:
    async def once(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request
            return

    await stage.serve(stream=once)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.write(b"1")
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(call.write(b"2")))
        stage.client.append(await outcome(call.done_writing()))
        stage.client.append((await call.code()).name)


async def stream_ends_with_messages_unread(stage: Stage) -> None:
    ended = asyncio.Event()

    async def three(requests: Any, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)
        ended.set()

    await stage.serve(stream=three)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.wait_for_connection()
        await ended.wait()
        waiter = asyncio.create_task(outcome(call.code()))
        stage.client.append(f"{await is_waiting(waiter)} {call.done()}")
        for _ in range(5):
            stage.client.append(await outcome(call.read()))
        await waiter


async def stream_fails_with_messages_unread(stage: Stage) -> None:
    ended = asyncio.Event()

    async def three(requests: Any, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)
        ended.set()
        raise CallEnded(ErrorStatus.of(Reason.OVERLOADED, "too much", "test.quire.dev"))

    await stage.serve(stream=three)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.wait_for_connection()
        await ended.wait()
        waiter = asyncio.create_task(outcome(call.code()))
        stage.client.append(f"{await is_waiting(waiter)} {call.done()}")
        for _ in range(5):
            stage.client.append(await outcome(call.read()))
        await waiter


async def iteration_ends_by_error(stage: Stage) -> None:
    gate = asyncio.Event()

    async def three(request: bytes, context: Any) -> Any:
        for number in range(3):
            yield b"%d" % number
        await gate.wait()
        raise CallEnded(ErrorStatus.of(Reason.OVERLOADED, "too much", "test.quire.dev"))

    await stage.serve(server_stream=three)
    async with stage.channel() as channel:
        call = server_stream(channel)(b"1")
        try:
            async for message in call:
                stage.client.append(message.decode())
                if message == b"2":
                    gate.set()
        except grpc.aio.AioRpcError as error:
            stage.client.append(f"{error.code().name} {decode_rpc_error(error).reason}")


async def client_leaves_answers(stage: Stage) -> None:
    watched = Watched(stage)

    async def endless(request: bytes, context: Any) -> Any:
        async with watched.noting():
            while True:
                yield b"x" * KIB

    await stage.serve(server_stream=endless)
    async with stage.channel() as channel:
        call = server_stream(channel)(b"1")
        async for message in call:
            stage.client.append(f"{len(message)}")
            break
        call.cancel()
        await watched.ended.wait()


async def connection_breaks_during_read(stage: Stage) -> None:
    watched = Watched(stage)

    async def handle(requests: Any, context: Any) -> None:
        async with watched.noting():
            async for request in requests:
                await context.write(request)

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.write(b"1")
        stage.client.append(await outcome(call.read()))
        reader = asyncio.create_task(outcome(call.read()))
        await is_waiting(reader)
        stage.cut()
        stage.client.append(await reader)
        stage.client.append(f"{call.done()} {call.cancelled()} {(await call.code()).name}")
        stage.client.append(await outcome(call.write(b"2")))
        await watched.ended.wait()
        again = stream(channel)()
        await again.write(b"3")
        stage.client.append(await outcome(again.read()))
        watched.ended.clear()
        again.cancel()
        await watched.ended.wait()


async def connection_breaks_with_answers_unread(stage: Stage) -> None:
    written = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)
        written.set()
        await asyncio.get_running_loop().create_future()

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        stage.client.append(await outcome(call.read()))
        await written.wait()
        await asyncio.sleep(SOON_S)
        stage.cut()
        waiter = asyncio.create_task(outcome(call.code()))
        stage.client.append(f"{await is_waiting(waiter)}")
        for _ in range(4):
            stage.client.append(await outcome(call.read()))


async def client_cancels_with_answers_unread(stage: Stage) -> None:
    written = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)
        written.set()
        await asyncio.get_running_loop().create_future()

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        stage.client.append(await outcome(call.read()))
        await written.wait()
        await asyncio.sleep(SOON_S)
        call.cancel()
        for _ in range(4):
            stage.client.append(await outcome(call.read()))


async def requests_are_unread_when(stage: Stage, end: Callable[[Any], None]) -> None:
    """A handler that swallows its cancellation, and then reads."""
    noted = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        await context.write(b"ready")
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            for _ in range(3):
                stage.server.append(await outcome(context.read()))
            stage.server.append(await outcome(context.write(b"more")))
            noted.set()
            raise

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        stage.client.append(await outcome(call.read()))
        for number in range(2):
            await call.write(b"%d" % number)
        await asyncio.sleep(SOON_S)
        end(call)
        await noted.wait()


async def client_cancels_with_requests_unread(stage: Stage) -> None:
    await requests_are_unread_when(stage, lambda call: call.cancel())


async def connection_breaks_with_requests_unread(stage: Stage) -> None:
    await requests_are_unread_when(stage, lambda call: stage.cut())


async def deadline_passes_with_answers_unread(stage: Stage) -> None:
    async def handle(request: bytes, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)
        await asyncio.get_running_loop().create_future()

    await stage.serve(server_stream=handle)
    async with stage.channel() as channel:
        call = server_stream(channel)(b"1", timeout=2 * SOON_S)
        stage.client.append(await outcome(call.read()))
        await asyncio.sleep(3 * SOON_S)
        for _ in range(4):
            stage.client.append(await outcome(call.read()))


async def connection_breaks_during_writes(stage: Stage) -> None:
    """The code is INTERNAL if the write fails before the status is known, and UNAVAILABLE else."""
    watched = Watched(stage)
    await stage.serve(stream=watched.forever)
    async with stage.channel() as channel:
        call = stream(channel)()

        async def write_all() -> None:
            while True:
                await call.write(b"x" * 64 * KIB)

        writer = asyncio.create_task(outcome(write_all()))
        stage.client.append(f"{await is_waiting(writer)}")
        stage.cut()
        stage.client.append(str(await writer in ("AioRpcError INTERNAL", "AioRpcError UNAVAILABLE")))
        await watched.ended.wait()


async def slow_server_makes_client_wait(stage: Stage) -> None:
    gate = asyncio.Event()

    async def count(requests: Any, context: Any) -> Any:
        await gate.wait()
        num_bytes = 0
        async for request in requests:
            num_bytes += len(request)
        yield b"%d" % num_bytes

    async def write_all(call: Any) -> None:
        for _ in range(64):
            await call.write(b"x" * 64 * KIB)
        await call.done_writing()

    await stage.serve(stream=count)
    async with stage.channel() as channel:
        call = stream(channel)()
        writer = asyncio.create_task(write_all(call))
        stage.client.append(f"{await is_waiting(writer)}")
        gate.set()
        await writer
        stage.client.append(await outcome(call.read()))


async def slow_client_makes_server_wait(stage: Stage) -> None:
    watched = Watched(stage)

    async def many(requests: Any, context: Any) -> None:
        async with watched.noting():
            for _ in range(64):
                await context.write(b"x" * 64 * KIB)

    await stage.serve(stream=many)
    async with stage.channel() as channel:
        call = stream(channel)()
        waiter = asyncio.create_task(watched.ended.wait())
        stage.client.append(f"{await is_waiting(waiter)}")
        num_bytes = 0
        while (message := await call.read()) is not grpc.aio.EOF:
            num_bytes += len(message)
        stage.client.append(f"{num_bytes}")
        await waiter


async def window_is_filled_by_small_messages(stage: Stage) -> None:
    num_written, reached = 0, asyncio.Event()

    async def many(requests: Any, context: Any) -> None:
        nonlocal num_written
        while True:
            await context.write(b"x" * 1000)
            num_written += 1
            reached.set()

    await stage.serve(stream=many)
    async with stage.channel() as channel:
        call = stream(channel)()
        await reached.wait()
        await asyncio.sleep(SOON_S)
        stage.client.append(f"{num_written}")
        for _ in range(200):
            await call.read()
        await asyncio.sleep(SOON_S)
        stage.client.append(f"{200 < num_written < 300}")
        call.cancel()


async def writing_task_is_cancelled(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(stream=watched.forever)
    async with stage.channel() as channel:
        call = stream(channel)()

        async def write_all() -> None:
            while True:
                await call.write(b"x" * 64 * KIB)

        writer = asyncio.create_task(outcome(write_all()))
        stage.client.append(f"{await is_waiting(writer)}")
        writer.cancel()
        stage.client.append(await writer)
        stage.client.append(f"{call.done()} {call.cancelled()}")
        stage.client.append(await outcome(call.read()))
        await watched.ended.wait()


async def stream_is_cancelled_during_write(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(stream=watched.forever)
    async with stage.channel() as channel:
        call = stream(channel)()

        async def write_all() -> None:
            while True:
                await call.write(b"x" * 64 * KIB)

        writer = asyncio.create_task(outcome(write_all()))
        stage.client.append(f"{await is_waiting(writer)}")
        call.cancel()
        stage.client.append(await writer)
        await watched.ended.wait()


async def large_messages_pass(stage: Stage) -> None:
    await stage.serve(stream=echo)
    async with stage.channel() as channel:
        call = stream(channel)()
        for _ in range(3):
            writer = asyncio.create_task(call.write(b"x" * 1000 * KIB))
            stage.client.append(await outcome(call.read()))
            await writer
        call.cancel()


async def write_to_stream_cancelled_before_it_is_open(stage: Stage) -> None:
    await stage.serve(stream=echo)
    stage.pause()
    async with stage.channel() as channel:
        call = stream(channel)()
        writer = asyncio.create_task(outcome(call.write(b"1")))
        opening = asyncio.create_task(outcome(call.wait_for_connection()))
        reader = asyncio.create_task(outcome(call.read()))
        stage.client.append(f"{await is_waiting(writer)}")
        call.cancel()
        stage.client.append(f"{await is_waiting(writer)} {await is_waiting(opening)} {await reader}")
        writer.cancel()
        opening.cancel()


async def server_stands_still(stage: Stage) -> None:
    await stage.serve(unary=answer)
    stage.pause()
    options = dict(OPTIONS) | {"grpc.min_reconnect_backoff_ms": 300}
    async with stage.channel(tuple(options.items())) as channel:
        stage.client.append(await outcome(unary(channel)(b"1", timeout=0.1)))
        stage.client.append(await outcome(unary(channel)(b"1", timeout=5)))


async def channel_closes_with_open_calls(stage: Stage) -> None:
    watched, other = Watched(stage), Watched(stage)
    await stage.serve(stream=watched.forever, unary=other.forever)
    channel = stage.channel()
    call, single = stream(channel)(), unary(channel)(b"1")
    reader, waiter = asyncio.create_task(outcome(call.read())), asyncio.create_task(outcome(single))
    await watched.began.wait()
    await other.began.wait()
    await channel.close()
    stage.client += [await reader, await waiter]
    await watched.ended.wait()
    await other.ended.wait()

    async def late() -> Any:
        return await unary(channel)(b"2")

    stage.client.append(await outcome(late()))


async def guard_ends_streams(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(stream=watched.forever, unary=answer)
    async with stage.channel() as channel:
        call = stream(channel)()
        await watched.began.wait()
        stage.guard.end_streams()
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            stage.client.append(f"{error.code().name} {decode_rpc_error(error).reason}")
        await watched.ended.wait()
        stage.client.append(await outcome(unary(channel)(b"1")))


async def guard_ends_many_streams(stage: Stage) -> None:
    watched = [Watched(stage) for _ in range(8)]
    waiting = iter(watched)

    async def handle(requests: Any, context: Any) -> None:
        await next(waiting).forever(requests, context)

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        calls = [stream(channel)() for _ in watched]
        for each in watched:
            await each.began.wait()
        stage.guard.end_streams()
        stage.client += [await outcome(call.read()) for call in calls]


async def server_stops_at_once(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(stream=watched.forever)
    async with stage.channel() as channel:
        call = stream(channel)()
        await watched.began.wait()
        await stage.stop(None)
        stage.client.append(await outcome(call.read()))
        await watched.ended.wait()


async def server_stops_with_grace(stage: Stage) -> None:
    gate, began = asyncio.Event(), asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        began.set()
        await gate.wait()
        return b"in time"

    await stage.serve(unary=slow)
    async with stage.channel() as channel:
        call = asyncio.create_task(outcome(unary(channel)(b"1")))
        await began.wait()
        stopping = asyncio.create_task(stage.stop(10))
        await is_waiting(stopping)
        gate.set()
        stage.client.append(await call)
        await stopping


# What gRPC does with operations that are given up.


async def read_is_given_up_at_server(stage: Stage) -> None:
    """The message that comes next is lost, and until then another read gets EOF."""
    gate = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(SOON_S):
                await context.read()
        except TimeoutError:
            stage.server.append("timeout")
        stage.server.append(await outcome(context.read()))
        await context.write(b"ready")
        await gate.wait()
        stage.server.append(await outcome(context.read()))
        stage.server.append(await outcome(context.read()))

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        stage.client.append(await outcome(call.read()))
        await call.write(b"1")
        await call.write(b"2")
        await call.done_writing()
        await asyncio.sleep(SOON_S)
        gate.set()
        stage.client.append(await outcome(call.read()))


async def write_is_given_up_at_server(stage: Stage) -> None:
    """One message is sent at a time, and metadata goes with the first one: no status can be sent before it has left."""
    await give_up_a_write(stage, num_messages_before=0)


async def second_write_is_given_up_at_server(stage: Stage) -> None:
    """The status waits for the message."""
    await give_up_a_write(stage, num_messages_before=1)


async def give_up_a_write(stage: Stage, *, num_messages_before: int) -> None:
    noted = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        for _ in range(num_messages_before):
            await context.write(b"small")
        try:
            async with asyncio.timeout(SOON_S):
                await context.write(b"x" * 1000 * KIB)
        except TimeoutError:
            stage.server.append("timeout")
        stage.server.append(await outcome(context.write(b"again")))
        noted.set()
        raise CallEnded(ErrorStatus.of(Reason.OVERLOADED, "too much", "test.quire.dev"))

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.wait_for_connection()
        await noted.wait()
        for _ in range(num_messages_before + 1):
            stage.client.append(await outcome(call.read()))
        reader = asyncio.create_task(outcome(call.read()))
        if await is_waiting(reader):
            call.cancel()
        stage.client.append(await reader)


async def two_reads_at_once(stage: Stage) -> None:
    await stage.serve(stream=echo)
    async with stage.channel() as channel:
        call = stream(channel)()
        await call.write(b"1")
        stage.client.append(await outcome(call.read()))
        first = asyncio.create_task(outcome(call.read()))
        await is_waiting(first)
        second = asyncio.create_task(outcome(call.read()))
        stage.client.append(f"{await is_waiting(first)} {await is_waiting(second)}")
        call.cancel()
        stage.client += [await first, await second]


async def headers_come_early(stage: Stage) -> None:
    gate = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        await context.send_initial_metadata((("early", "yes"),))
        await gate.wait()
        stage.server.append(await outcome(context.send_initial_metadata(())))

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        stage.client.append(str(dict(await call.initial_metadata())["early"]))
        gate.set()
        stage.client.append(await outcome(call.read()))


async def server_writes_after_client_left(stage: Stage) -> None:
    left, noted = asyncio.Event(), asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        await context.write(b"1")
        try:
            await left.wait()
        except asyncio.CancelledError:
            stage.server.append(await outcome(context.write(b"2")))
            stage.server.append(await outcome(context.read()))
            noted.set()
            raise

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        stage.client.append(await outcome(call.read()))
        call.cancel()
        await noted.wait()


async def generator_client(stage: Stage) -> None:
    async def requests() -> Any:
        for number in range(3):
            yield b"%d" % number

    await stage.serve(stream=echo)
    async with stage.channel() as channel:
        call = stream(channel)(requests())
        stage.client += [message.decode() async for message in call]
        stage.client.append((await call.code()).name)


SCRIPTS = [
    unary_is_answered,
    unary_is_refused_with_details,
    unary_handler_fails,
    method_is_unknown,
    metadata_crosses,
    nobody_listens,
    nobody_listens_yet,
    server_restarts,
    connection_breaks_during_unary,
    unary_is_late,
    stream_is_late,
    unary_is_cancelled,
    unary_task_is_cancelled,
    stream_echoes,
    client_cancels_stream,
    reading_task_is_cancelled,
    server_ends_stream_first,
    stream_ends_with_messages_unread,
    stream_fails_with_messages_unread,
    iteration_ends_by_error,
    client_leaves_answers,
    connection_breaks_during_read,
    connection_breaks_with_answers_unread,
    client_cancels_with_answers_unread,
    client_cancels_with_requests_unread,
    connection_breaks_with_requests_unread,
    deadline_passes_with_answers_unread,
    connection_breaks_during_writes,
    slow_server_makes_client_wait,
    slow_client_makes_server_wait,
    window_is_filled_by_small_messages,
    writing_task_is_cancelled,
    stream_is_cancelled_during_write,
    large_messages_pass,
    write_to_stream_cancelled_before_it_is_open,
    server_stands_still,
    channel_closes_with_open_calls,
    guard_ends_streams,
    guard_ends_many_streams,
    server_stops_at_once,
    server_stops_with_grace,
    read_is_given_up_at_server,
    write_is_given_up_at_server,
    second_write_is_given_up_at_server,
    two_reads_at_once,
    headers_come_early,
    server_writes_after_client_left,
    generator_client,
]
