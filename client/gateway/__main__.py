"""The gateway process: flags, wiring, start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import click

from quire.client.credentials import Credentials
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.errors import NotFound, OutOfRoom, QuireError, Unavailable
from quire.client.gateway.app import make_app
from quire.client.gateway.backend import Backend, EngineBackend
from quire.client.gateway.config import OWN_FLAGS, GatewayOptions
from quire.client.gateway.door import Door
from quire.client.gateway.engine_service import engine_server
from quire.client.gateway.metrics import DoorMetrics
from quire.client.gateway.server import HttpServer
from quire.serving.addresses import DEFAULT_HTTP_LISTEN
from quire.serving.dialing import DialOptions
from quire.serving.flags import DIAL_FLAGS, add_flags, command_settings
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions, dial_options, server_options
from quire.serving.runtime import keep_little_free_memory, tune_garbage_collector
from quire.serving.security import Security
from quire.serving.server import CannotStartError, StoppedAtOnceError, StopSignals, run
from quire.serving.systemd import ServiceManager

log = logging.getLogger("quire.gateway")

DOMAIN = "gateway.quire.dev"
_RETRY_S = 0.5
# What may be over when it is tried again: services are started in any order.
_TEMPORARY = (NotFound, OutOfRoom, Unavailable)


async def serve(
    options: ServerOptions, signals: StopSignals, *, gateway: GatewayOptions, credentials: Credentials
) -> None:
    """Serve until a signal. Raises CannotStartError."""
    security = secure(options)
    door = Door({}, DoorMetrics(), limits=gateway.limits)
    async with contextlib.AsyncExitStack() as stack:
        if options.metrics_listen is not None:
            read = partial(_read_metrics, door)
            stack.enter_context(MetricsPage(options.metrics_listen, read, security=security))
        server = HttpServer(make_app(door), door, tls=security.tls)
        stack.push_async_callback(server.close)
        await server.start(options.listen)
        log.info("listening addresses=%s", ",".join(door.addresses))
        stops: list[Callable[[], Awaitable[None]]] = [partial(_stop, server, signals, options.drain_timeout_s)]
        if gateway.grpc_listen:
            opened = engine_server(door, gateway.grpc_listen, security=options.security)
            engine, servicer = await stack.enter_async_context(opened)
            timeout_s = options.drain_timeout_s
            stops.append(partial(engine.serve_until_signal, signals, drain=servicer.drain, drain_timeout_s=timeout_s))
        backend = await stack.enter_async_context(_open_backend(gateway, credentials))
        door.backends = dict.fromkeys(backend.model_names, backend)
        stack.push_async_callback(server.close)  # before the engine is
        tune_garbage_collector()
        keep_little_free_memory()
        print(f"serving {backend.model_names[0]} at {' '.join(door.addresses)}", flush=True)
        if gateway.grpc_listen:
            await engine.announce_serving()
        ServiceManager(os.environ).ready(f"serving at {' '.join(door.addresses)}")
        await asyncio.gather(*(stop() for stop in stops))
        log.info("stopped")


async def _stop(server: HttpServer, signals: StopSignals, timeout_s: float) -> None:
    """Wait for a signal, and drain the HTTP server."""
    await signals.first()
    log.info("draining timeout_s=%g", timeout_s)
    ServiceManager(os.environ).stopping(f"draining, for at most {timeout_s:g} s")
    await _drain(server, signals, timeout_s)


async def _drain(server: HttpServer, signals: StopSignals, timeout_s: float) -> None:
    """Wait until requests have ended or the time is over. Raises StoppedAtOnceError on a second signal."""
    drained, hurried = [asyncio.create_task(each) for each in (server.drain(), signals.second())]
    done, _ = await asyncio.wait([drained, hurried], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, hurried):
        task.cancel()
    await asyncio.gather(drained, hurried, return_exceptions=True)
    if hurried in done:
        raise StoppedAtOnceError
    if not done:
        log.warning("drain timed out open_requests=%d", server.num_open)


def _read_metrics(door: Door) -> Any:
    return door.metrics.families(door.models)


def secure(options: ServerOptions) -> Security:
    """Return the server's TLS. Raises FileError, or AddressError for plain text where others can read it."""
    if options.security.token_file is not None:
        raise CannotStartError("--token-file: keys are not supported yet")
    return options.secure(roles={}, domain=DOMAIN)


@contextlib.asynccontextmanager
async def _open_backend(gateway: GatewayOptions, credentials: Credentials) -> AsyncGenerator[Backend, None]:
    """Within the block there is a backend; entering it waits for the services."""
    config = EngineConfig(
        pool=gateway.pool,
        max_waiting_requests=gateway.max_waiting_requests,
        max_waiting_tokens=gateway.max_waiting_tokens,
        max_unread_tokens=gateway.max_unread_tokens,
    )
    told = ""
    while True:
        engine = Engine.connect(gateway.cachemgr, credentials=credentials, config=config, tokenizer=gateway.tokenizer)
        try:
            await engine.start()
            break
        except _TEMPORARY as error:
            await engine.close()
            if error.reason != told:
                log.warning("waiting for the services: %s", error)
            told = error.reason
            await asyncio.sleep(_RETRY_S)
        except (QuireError, OSError, ValueError) as error:
            await engine.close()
            raise CannotStartError(str(error)) from error
    try:
        names = gateway.served_model_name or (engine.model.model,)
        yield EngineBackend(engine, names, tokenizer_source=gateway.tokenizer)
    finally:
        await engine.close()


@click.command(name="serve", cls=ServerCommand, context_settings=command_settings("QUIRE_SERVE"))
@server_options(default_listen=DEFAULT_HTTP_LISTEN, without=("--health-listen", "--token-listen"))
@dial_options("cachemgr")
@add_flags(OWN_FLAGS)
def main(server: ServerOptions, cachemgr_dial: DialOptions, **own: Any) -> None:
    """Serve text over HTTP, as OpenAI's API has it: the front door.

    A client of cachemgr and of the pool's worker. Waits for them if they are not there yet; prints a line when it
    serves. See docs/http.md for the endpoints.

    \b
    Example:
      quire serve --cachemgr unix:/run/quire/cachemgr.sock --served-model-name llama --listen 127.0.0.1:8000
    """
    configure_logging(server.log_level, server.log_format)
    gateway = GatewayOptions(**own)
    credentials = Credentials(**{name: getattr(cachemgr_dial, name) for name in DIAL_FLAGS})
    if server.only_check:
        server.end_check(lambda: secure(server))
    settings = partial(serve, gateway=gateway, credentials=credentials)
    sys.exit(run(lambda signals: settings(server, signals)))


if __name__ == "__main__":
    main(prog_name="quire serve")
