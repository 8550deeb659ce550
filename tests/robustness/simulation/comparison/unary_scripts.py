"""Scripts of unary calls, of connecting, and of metadata and status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from robustness.simulation.comparison.scripting import (
    SOON_S,
    Watched,
    answer,
    echo,
    is_waiting,
    outcome,
    script,
    server_stream,
    stream,
    unary,
    until_answered,
)
from robustness.simulation.comparison.stages import Stage

from quire.cache.v1.reasons import Reason
from quire.client.cache_client import NOT_LISTENING
from quire.client.channel import decode_rpc_error
from quire.serving.errors import CallEnded, ErrorStatus


@script
async def unary_is_answered(stage: Stage) -> None:
    await stage.serve(unary=answer)
    async with stage.channel() as channel:
        call = unary(channel)(b"1", timeout=5)
        stage.client.append(await outcome(call))
        stage.client.append(f"{(await call.code()).name} {call.done()} {call.cancelled()}")
        stage.client += [await outcome(unary(channel)(b"%d" % number)) for number in range(3)]


@script
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


@script
async def unary_handler_fails(stage: Stage) -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise KeyError("secret")

    await stage.serve(unary=fail)
    async with stage.channel() as channel:
        try:
            await unary(channel)(b"1")
        except grpc.aio.AioRpcError as error:
            stage.client.append(f"{error.code().name} {error.details()} {decode_rpc_error(error).reason}")


@script
async def method_is_unknown(stage: Stage) -> None:
    await stage.serve(unary=answer)
    async with stage.channel() as channel:
        stage.client.append(await outcome(stream(channel)().read()))
        stage.client.append(await outcome(server_stream(channel)(b"1").read()))


@script
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


@script
async def nobody_listens(stage: Stage) -> None:
    async with stage.channel() as channel:
        for _ in range(3):  # the first one fails when connecting has failed, others at once
            try:
                await unary(channel)(b"1", timeout=5)
            except grpc.aio.AioRpcError as error:
                says_so = any(sign in str(error.details()) for sign in NOT_LISTENING)
                stage.client.append(f"{error.code().name} {says_so}")
        call = stream(channel)()
        stage.client.append(await outcome(call.wait_for_connection()))
        stage.client.append(await outcome(call.write(b"1")))
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(server_stream(channel)(b"1").read()))
        stage.client.append(await outcome(server_stream(channel)(b"1").wait_for_connection()))


@script
async def nobody_listens_yet(stage: Stage) -> None:
    async with stage.channel() as channel:
        stage.client.append(await outcome(unary(channel)(b"1")))
        await stage.serve(unary=answer)
        stage.client.append(await until_answered(channel))


@script
async def server_restarts(stage: Stage) -> None:
    await stage.serve(unary=answer, stream=echo)
    async with stage.channel() as channel:
        await meet_a_killed_server(stage, channel, stage.kill)
        await stage.serve(unary=answer)
        stage.client.append(await until_answered(channel))


async def meet_a_killed_server(stage: Stage, channel: grpc.aio.Channel, kill: Callable[[], None]) -> None:
    """A client's view before and after."""
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


@script
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


@script
async def unary_is_late(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(unary=watched.forever)
    async with stage.channel() as channel:
        call = unary(channel)(b"1", timeout=SOON_S)
        stage.client.append(await outcome(call))
        await watched.ended.wait()
        stage.client.append(f"{call.done()} {call.cancelled()} {(await call.code()).name}")


@script
async def stream_is_late(stage: Stage) -> None:
    watched = Watched(stage)
    await stage.serve(server_stream=watched.forever)
    async with stage.channel() as channel:
        call = server_stream(channel)(b"1", timeout=SOON_S)
        stage.client.append(await outcome(call.read()))
        stage.client.append(await outcome(call.read()))
        await watched.ended.wait()


@script
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


@script
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
