"""Scripts of streams: how each side ends them, and what the other one sees."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from robustness.simulation.comparison.scripting import (
    Watched,
    answer,
    echo,
    is_waiting,
    outcome,
    script,
    server_stream,
    stream,
    unary,
)
from robustness.simulation.comparison.stages import OPTIONS, Stage

from quire.cache.v1.reasons import Reason
from quire.client.channel import decode_rpc_error
from quire.serving.errors import CallEnded, ErrorStatus


@script
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


@script
async def client_cancels_stream(stage: Stage) -> None:
    watched = Watched(stage)

    await stage.serve(stream=watched.echo)
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


@script
async def reading_task_is_cancelled(stage: Stage) -> None:
    watched = Watched(stage)

    await stage.serve(stream=watched.echo)
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


@script
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


@script
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


@script
async def connection_breaks_during_read(stage: Stage) -> None:
    watched = Watched(stage)

    await stage.serve(stream=watched.echo)
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


@script
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


@script
async def server_stands_still(stage: Stage) -> None:
    await stage.serve(unary=answer)
    stage.pause()
    options = dict(OPTIONS) | {"grpc.min_reconnect_backoff_ms": 300}
    async with stage.channel(tuple(options.items())) as channel:
        stage.client.append(await outcome(unary(channel)(b"1", timeout=0.1)))
        stage.client.append(await outcome(unary(channel)(b"1", timeout=5)))


@script
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


@script
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


@script
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


@script
async def server_stops_at_once(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(stream=watched.forever)
    async with stage.channel() as channel:
        call = stream(channel)()
        await watched.began.wait()
        await stage.stop(None)
        stage.client.append(await outcome(call.read()))
        await watched.ended.wait()


@script
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


@script
async def generator_client(stage: Stage) -> None:
    async def requests() -> Any:
        for number in range(3):
            yield b"%d" % number

    await stage.serve(stream=echo)
    async with stage.channel() as channel:
        call = stream(channel)(requests())
        stage.client += [message.decode() async for message in call]
        stage.client.append((await call.code()).name)
