"""The words of scripts: calls, what comes of them, and handlers that many need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from types import ModuleType
from typing import Any

import grpc
from robustness.simulation.comparison.stages import SERVICE, Script, Stage

KIB = 1024
SOON_S = 0.3
"""Long enough for whatever can happen to have happened."""

_scripts: dict[str, list[Script]] = {}


def script(played: Script) -> Script:
    """Note a script, to be played on both stages. What its sides note must be the same."""
    _scripts.setdefault(played.__module__, []).append(played)
    return played


def scripts_of(*modules: ModuleType) -> list[Script]:
    """Return the scripts of these modules, in their order."""
    return [played for module in modules for played in _scripts[module.__name__]]


async def outcome(work: Awaitable[Any]) -> str:
    """Return its outcome, in words."""
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


async def until_answered(channel: grpc.aio.Channel) -> str:
    """The first outcome that is no failure."""
    while (seen := await outcome(unary(channel)(b"again"))).startswith("AioRpcError UNAVAILABLE"):
        await asyncio.sleep(0.02)
    return seen


class Watched:
    """A handler's end: noted, and waited for by the client's side of the script."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def forever(self, request: Any, context: Any) -> Any:
        async with self.noting():
            await asyncio.get_running_loop().create_future()

    async def echo(self, requests: Any, context: Any) -> None:
        async with self.noting():
            async for request in requests:
                await context.write(request)

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
