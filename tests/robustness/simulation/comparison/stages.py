"""Two stages for one script of a client and a server: real gRPC over unix sockets, and the simulated transport.

A script makes calls, notes what each side sees, and breaks things by the methods of its stage. The real stage has a
relay between client and server: what it does to its connections is what a dying server or a network does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
from robustness.simulation.network import Network
from robustness.simulation.server import SimulatedServer
from robustness.simulation.surroundings import surroundings
from robustness.simulation.transport import open_channel
from robustness.simulation.world import Process, World

from quire.serving.interceptor import HandlerGuard
from quire.serving.server import SERVER_OPTIONS

SERVICE = "test.Scripts"
FIXED_WINDOWS = ("grpc.http2.bdp_probe", 0)
"""Else windows grow with the traffic."""
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    FIXED_WINDOWS,
)
_KINDS = {
    "unary": grpc.unary_unary_rpc_method_handler,
    "server_stream": grpc.unary_stream_rpc_method_handler,
    "stream": grpc.stream_stream_rpc_method_handler,
}
LIMIT_S = 30.0


class Stage(Protocol):
    """The place of a script's run. Handlers are given by the name of their kind: unary, server_stream, stream."""

    client: list[str]
    server: list[str]
    guard: HandlerGuard

    async def serve(self, **handlers: Callable[..., Any]) -> None:
        """Begin to listen, also after `kill`."""

    async def stop(self, grace_s: float | None) -> None:
        """Stop the server as gRPC does."""

    def channel(self, options: Any = OPTIONS) -> grpc.aio.Channel:
        """A channel to the server's address."""

    def cut(self) -> None:
        """Break all connections."""

    def kill(self) -> None:
        """Nothing listens any more, and all connections break."""

    def pause(self) -> None:
        """The server's process stands still: its kernel accepts connections."""


Script = Callable[[Stage], Awaitable[None]]


def generic_handler(handlers: dict[str, Callable[..., Any]]) -> grpc.GenericRpcHandler:
    methods: dict[str, Any] = {name: _KINDS[name.rstrip("0123456789")](handler) for name, handler in handlers.items()}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def new_guard() -> HandlerGuard:
    limits = {f"/{SERVICE}/{name}": 2**22 for name in _KINDS}
    return HandlerGuard(domain="test.quire.dev", fatal=(), on_fatal=lambda error: None, message_limits=limits)


class Relay:
    """Between the client's address and the server's."""

    def __init__(self, address: Path, server: Path) -> None:
        self._address, self._server = address, server
        self._transports: list[asyncio.WriteTransport] = []
        self._listener: asyncio.Server | None = None
        self._is_paused = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._address.unlink(missing_ok=True)
        self._listener = await asyncio.start_unix_server(self._join, self._address)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.append(writer.transport)
        if self._is_paused:
            return
        there_reader, there_writer = await asyncio.open_unix_connection(self._server)
        self._transports.append(there_writer.transport)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._copy(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2**16):
                target.write(data)
                await target.drain()
        target.close()

    def cut(self) -> None:
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def pause(self) -> None:
        self._is_paused = True

    async def close(self) -> None:
        self.stop_listening()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _new_server(guard: HandlerGuard, address: Path, handlers: dict[str, Callable[..., Any]]) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=(guard,), options=(*SERVER_OPTIONS, FIXED_WINDOWS))
    server.add_generic_rpc_handlers((generic_handler(handlers),))
    server.add_insecure_port(f"unix:{address}")
    return server


class RealStage:
    """grpc.aio on the running loop."""

    def __init__(self, folder: Path) -> None:
        self.client: list[str] = []
        self.server: list[str] = []
        self.guard = new_guard()
        self._folder = folder
        self._address, self._behind = folder / "address", folder / "server"
        self._relay = Relay(self._address, self._behind)
        self._servers: list[grpc.aio.Server] = []

    async def serve(self, **handlers: Callable[..., Any]) -> None:
        self._relay.stop_listening()
        self.guard = new_guard()
        self._behind = self._folder / f"server{len(self._servers)}"
        server = _new_server(self.guard, self._behind, handlers)
        await server.start()
        self._servers.append(server)
        self._relay = Relay(self._address, self._behind)
        await self._relay.start()

    async def stop(self, grace_s: float | None) -> None:
        await self._servers[-1].stop(grace_s)

    def channel(self, options: Any = OPTIONS) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self._address}", options=options)

    def cut(self) -> None:
        self._relay.cut()

    def kill(self) -> None:
        self._relay.stop_listening()
        self._relay.cut()

    def pause(self) -> None:
        self._relay.pause()

    async def close(self) -> None:
        await self._relay.close()
        for server in self._servers:
            await server.stop(None)


class SimulatedStage:
    """Two processes of a world."""

    ADDRESS = "unix:/run/server.sock"

    def __init__(self, world: World, network: Network) -> None:
        self.client: list[str] = []
        self.server: list[str] = []
        self.guard = new_guard()
        self._world, self._network = world, network
        self._process: Process | None = None
        self._server: SimulatedServer | None = None

    @property
    def process(self) -> Process:
        """The server's."""
        assert self._process is not None, "nothing is served yet"
        return self._process

    async def serve(self, **handlers: Callable[..., Any]) -> None:
        self.guard = new_guard()
        process = self._process = self._world.start("server")
        server = self._server = SimulatedServer(self._network, process, self.ADDRESS, self.guard)
        server.add_generic_rpc_handlers((generic_handler(handlers),))
        await self._elsewhere(server.start())

    async def stop(self, grace_s: float | None) -> None:
        assert self._server is not None
        await self._elsewhere(self._server.stop(grace_s))

    async def _elsewhere(self, work: Any) -> None:
        """Await what runs in the server's process."""
        done = asyncio.Event()
        self.process.spawn(work).add_done_callback(lambda _: done.set())
        await done.wait()

    def channel(self, options: Any = OPTIONS) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.ADDRESS, options=options)

    def cut(self) -> None:
        self._network.cut("client", "server")

    def kill(self) -> None:
        self.process.end()

    def pause(self) -> None:
        self.process.paused_until = self._world.now + 1000.0


Seen = tuple[list[str], list[str]]
"""By the client and by the server."""


def play_simulated(script: Script, seed: int, *, tells: Callable[[str], None] | None = None) -> Seen:
    """Run a script in a world of this seed."""
    world = World(seed)
    network = Network(world, seed)
    if tells is not None:
        world.tell, network.tells = tells, True
    stage = SimulatedStage(world, network)
    with surroundings(world, partial(open_channel, network)):
        task = world.start("client").spawn(_limited(script, stage))
        assert world.run_until(task.done, limit_s=2 * LIMIT_S), "the script has not ended"
        task.result()
    for process in list(world.processes):
        process.end()
    return stage.client, stage.server


@contextlib.contextmanager
def kept_worlds() -> Iterator[None]:
    """Free no world while another one runs. What the tasks of a world do when they are freed is nobody's concern."""
    gc.disable()
    try:
        yield
    finally:
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        logging.disable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
        gc.enable()
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook


async def play_real(script: Script, folder: Path) -> Seen:
    """Run a script over real gRPC, with sockets in a folder."""
    stage = RealStage(folder)
    try:
        await _limited(script, stage)
    finally:
        await stage.close()
    return stage.client, stage.server


async def serve_forever(address: Path, **handlers: Callable[..., Any]) -> None:
    """Serve, in a process of its own, until it is killed. Says when it is ready."""
    server = _new_server(new_guard(), address, handlers)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


async def _limited(script: Script, stage: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        await script(stage)
