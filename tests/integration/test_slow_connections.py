"""A server on a busy machine: it accepts a connection, and speaks HTTP/2 only later. The client waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S

from quire.cli import health
from quire.client.channel import CHANNEL_OPTIONS
from quire.worker.service import attachment

SERVICE, METHOD = "quire.test.Slow", "Echo"
Options = tuple[tuple[str, int], ...]
DIALERS: dict[str, Options] = {
    "client": CHANNEL_OPTIONS,
    "launch": health._CHANNEL_OPTIONS,
    "attachment": attachment.CHANNEL_OPTIONS,
}
# Gives a connection up after a tenth of a second: the least that gRPC allows.
IMPATIENT: Options = (("grpc.enable_http_proxy", 0), ("grpc.min_reconnect_backoff_ms", 100))


class SilentListener:
    """Accepts connections to a unix socket, and passes nothing on before `speak` is set."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.speak = asyncio.Event()
        self.accepted = asyncio.Event()

    async def serve(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        self.accepted.set()
        await self.speak.wait()
        far_in, far_out = await asyncio.open_unix_connection(self._target)
        await asyncio.gather(pump(near_in, far_out), pump(far_in, near_out))


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


async def echo(request: bytes, context: Any) -> bytes:
    return request


@contextlib.asynccontextmanager
async def silent_server(folder: Path) -> Any:
    handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(echo)})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{folder}/target")
    await server.start()
    listener = SilentListener(folder / "target")
    async with await asyncio.start_unix_server(listener.serve, folder / "silent"):
        yield listener
        await server.stop(None)


def dial(folder: Path, options: Options) -> tuple[grpc.aio.Channel, Callable[[], Awaitable[bytes]]]:
    channel = grpc.aio.insecure_channel(f"unix:{folder}/silent", options=options)
    method = channel.unary_unary(f"/{SERVICE}/{METHOD}")

    async def call() -> bytes:
        answer: bytes = await method(b"hello", timeout=DEADLINE_S)
        return answer

    return channel, call


@pytest.mark.parametrize("options", DIALERS.values(), ids=DIALERS)
def test_a_connection_that_is_accepted_late_fails_no_call(options: Options, tmp_path: Path) -> None:
    async def main() -> None:
        async with silent_server(tmp_path) as listener:
            patient, call = dial(tmp_path, options)
            impatient, other_call = dial(tmp_path, IMPATIENT)
            async with patient, impatient:
                answer = asyncio.ensure_future(call())
                await listener.accepted.wait()
                with pytest.raises(grpc.aio.AioRpcError):  # a tenth of a second has passed
                    await other_call()
                listener.speak.set()
                assert await answer == b"hello"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
