"""Scripts of messages that wait: for a reader, for the window, and for nobody when an operation was given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from robustness.simulation.comparison.scripting import (
    KIB,
    SOON_S,
    Watched,
    echo,
    is_waiting,
    outcome,
    script,
    server_stream,
    stream,
)
from robustness.simulation.comparison.stages import Stage

from quire.cache.v1.reasons import Reason
from quire.serving.errors import CallEnded, ErrorStatus


@script
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


@script
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


@script
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


@contextlib.asynccontextmanager
async def answers_unread(stage: Stage) -> AsyncIterator[Any]:
    """A call with three answers, of which the client has read one."""
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
        yield call


@script
async def connection_breaks_with_answers_unread(stage: Stage) -> None:
    async with answers_unread(stage) as call:
        stage.cut()
        waiter = asyncio.create_task(outcome(call.code()))
        stage.client.append(f"{await is_waiting(waiter)}")
        for _ in range(4):
            stage.client.append(await outcome(call.read()))


@script
async def client_cancels_with_answers_unread(stage: Stage) -> None:
    async with answers_unread(stage) as call:
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


@script
async def client_cancels_with_requests_unread(stage: Stage) -> None:
    await requests_are_unread_when(stage, lambda call: call.cancel())


@script
async def connection_breaks_with_requests_unread(stage: Stage) -> None:
    await requests_are_unread_when(stage, lambda call: stage.cut())


@script
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


@script
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


@script
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


@script
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


@script
async def window_is_filled_by_small_messages(stage: Stage) -> None:
    num_written, is_full, goes_on = 0, asyncio.Event(), asyncio.Event()

    async def many(requests: Any, context: Any) -> None:
        nonlocal num_written
        while True:
            await context.write(b"x" * 1000)
            num_written += 1
            if num_written >= 65:
                is_full.set()
            if num_written > 200:
                goes_on.set()

    await stage.serve(stream=many)
    async with stage.channel() as channel:
        call = stream(channel)()
        await is_full.wait()
        await asyncio.sleep(SOON_S)
        stage.client.append(f"{num_written}")
        for _ in range(200):
            await call.read()
        await goes_on.wait()
        stage.client.append("the writer goes on")
        call.cancel()


@script
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


@script
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


@script
async def writing_ends_behind_a_message_that_waits(stage: Stage) -> None:
    gate = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        await gate.wait()
        for _ in range(2):
            stage.server.append(await outcome(context.read()))

    await stage.serve(stream=handle)
    async with stage.channel() as channel:
        call = stream(channel)()
        writer = asyncio.create_task(outcome(call.write(b"x" * 3000 * KIB)))
        stage.client.append(f"{await is_waiting(writer)}")
        ending = asyncio.create_task(outcome(call.done_writing()))
        await is_waiting(ending)
        gate.set()
        stage.client += [await writer, await ending, await outcome(call.read())]


@script
async def large_messages_pass(stage: Stage) -> None:
    await stage.serve(stream=echo)
    async with stage.channel() as channel:
        call = stream(channel)()
        for _ in range(3):
            writer = asyncio.create_task(call.write(b"x" * 1000 * KIB))
            stage.client.append(await outcome(call.read()))
            await writer
        call.cancel()


@script
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


@script
async def write_is_given_up_at_server(stage: Stage) -> None:
    """One message is sent at a time, and metadata goes with the first one: no status can be sent before it has left."""
    await give_up_a_write(stage, num_messages_before=0)


@script
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


@script
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


@script
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


@script
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
