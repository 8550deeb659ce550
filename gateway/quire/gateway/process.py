"""A gateway from its settings to its end: wiring, start, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE
from quire.client.credentials import Credentials
from quire.client.engine.config import EngineConfig
from quire.client.engine.engine import Engine
from quire.client.engine.scheduling.policy import PriorityPolicy
from quire.client.engine.tracing import Tracing
from quire.client.errors import NotFound, OutOfRoom, QuireError, Unavailable
from quire.gateway.app import make_app
from quire.gateway.chat.models import ChatModels
from quire.gateway.config import GatewayOptions
from quire.gateway.gateway import Gateway
from quire.gateway.grpc.service import engine_server
from quire.gateway.http.browsers import browser_rules
from quire.gateway.http.server import HttpServer
from quire.gateway.metrics import GatewayMetrics
from quire.gateway.routing.backend import Backend, EngineBackend
from quire.gateway.routing.members import RouterConfig
from quire.gateway.routing.router import Router
from quire.gateway.security import secure
from quire.serving.addresses import Address
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions
from quire.serving.runtime import keep_little_free_memory, tune_garbage_collector
from quire.serving.server import CannotStartError, Server, StoppedAtOnceError, StopSignals
from quire.serving.systemd import ServiceManager
from quire.serving.tracing import provider

log = logging.getLogger("quire.gateway")

_RETRY_S = 0.1
# Errors that a retry may cure: services are started in any order.
_TEMPORARY = (NotFound, OutOfRoom, Unavailable)
SetWeights = Callable[[Mapping[str, float]], None]
Drain = Callable[[], Awaitable[None]]


async def serve(
    options: ServerOptions, signals: StopSignals, *, flags: GatewayOptions, credentials: Credentials
) -> None:
    """Serve until a signal. Raises CannotStartError."""
    security, keys, rate_limiter = secure(options, flags)
    manager = ServiceManager(os.environ)
    async with contextlib.AsyncExitStack() as stack:
        if manager.has_watchdog:
            stack.callback(asyncio.create_task(manager.feed_watchdog()).cancel)
        cache = CacheClient(flags.cachemgr, credentials=credentials)
        stack.push_async_callback(cache.close)
        names_tenants = flags.api_keys is not None
        gateway = Gateway({}, GatewayMetrics(), limits=flags.limits, cache=cache, names_tenants=names_tenants)
        gateway.responses, gateway.prompts = flags.kept_responses, flags.kept_prompts
        gateway.keys, gateway.rate_limiter = keys or gateway.keys, rate_limiter or gateway.rate_limiter
        if options.metrics_listen is not None:
            stack.enter_context(MetricsPage(options.metrics_listen, gateway.families, security=security))
        rules = browser_rules(
            options.listen, has_keys=flags.has_keys, origins=flags.allowed_origins, hosts=flags.allowed_hosts
        )
        server = HttpServer(make_app(gateway, rules), gateway, tls=security.tls)
        stack.push_async_callback(server.close)  # after the engines: requests that are still open get their errors
        await server.start(options.listen)
        log.info("listening addresses=%s", ",".join(gateway.addresses))
        stops: list[Callable[[], Awaitable[None]]] = [partial(_stop, server, signals, manager, options.drain_timeout_s)]
        if flags.grpc_listen:
            opened = engine_server(gateway, flags.grpc_listen, security=options.security, is_part=True)
            engine, servicer = await stack.enter_async_context(opened)
            timeout_s = options.drain_timeout_s
            stops.append(partial(engine.serve_until_signal, signals, drain=servicer.drain, drain_timeout_s=timeout_s))
        if flags.shepherd is not None:
            opening = _open_shepherd(flags, gateway, flags.shepherd, options)
            worker, drain = await stack.enter_async_context(opening)
            timeout_s = options.drain_timeout_s
            stops.append(partial(worker.serve_until_signal, signals, drain=drain, drain_timeout_s=timeout_s))
        backend, set_weights = await stack.enter_async_context(_open_backend(flags, credentials))
        if rate_limiter is not None:
            rate_limiter.send_weights_to(set_weights)
        if backend.tokenizer is not None:
            await asyncio.to_thread(backend.tokenizer.least_tokens, 0)  # the first call looks at each token
        gateway.chat_models = await _load_chat_models(flags, backend)
        stack.push_async_callback(gateway.chat_models.close)
        gateway.backends = dict.fromkeys(backend.model_names, backend)
        tune_garbage_collector()
        keep_little_free_memory()
        print(f"serving {backend.model_names[0]} at {' '.join(gateway.addresses)}", flush=True)
        if flags.grpc_listen:
            await engine.announce_serving()
        if flags.shepherd is not None:
            await worker.announce_serving()
            print(f"a worker of Shepherd Model Gateway at grpc://{worker.addresses[0]}", flush=True)
        manager.ready(f"serving at {' '.join(gateway.addresses)}")
        await _until_stopped(stops, gateway, backend, manager)
        log.info("stopped")


class GatewayFailedError(Exception):
    """A task that every request needs has died: the cause. A supervisor starts the process again."""


async def _until_stopped(
    stops: Sequence[Callable[[], Awaitable[None]]], gateway: Gateway, backend: Backend, manager: ServiceManager
) -> None:
    """Wait until all servers have stopped after a signal. Raises GatewayFailedError when the backend has failed."""
    stopping: asyncio.Future[Any] = asyncio.gather(*(stop() for stop in stops))
    failing: asyncio.Future[BaseException] = asyncio.create_task(backend.failed(), name="quire-await-failure")
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            error = failing.result()
            gateway.failure = str(error)
            manager.stopping("failed, see the log")
            raise GatewayFailedError(f"no request can be computed any more: {error}") from error
        await stopping
    finally:
        stopping.cancel()
        failing.cancel()
        await asyncio.gather(stopping, failing, return_exceptions=True)


@contextlib.asynccontextmanager
async def _open_shepherd(
    flags: GatewayOptions, gateway: Gateway, address: Address, options: ServerOptions
) -> AsyncGenerator[tuple[Server, Drain], None]:
    """Within the block the pool is served as a worker of Shepherd Model Gateway. Raises CannotStartError."""
    try:
        from quire.integrations.shepherd.service import shepherd_server  # its messages come with an extra
    except (ImportError, RuntimeError) as error:
        raise CannotStartError(f"--shepherd needs the extra quire-kv[shepherd]: {error}") from error
    async with shepherd_server(gateway, address, pool=flags.pool, security=options.security) as (server, servicer):
        yield server, servicer.drain


async def _load_chat_models(flags: GatewayOptions, backend: Backend) -> ChatModels:
    """Return the model's chat templates. Raises CannotStartError for a template that can't be used."""
    try:
        return await ChatModels.load([backend], flags.chat)
    except (OSError, ValueError) as error:
        raise CannotStartError(f"the chat template: {error}") from error


async def _stop(server: HttpServer, signals: StopSignals, manager: ServiceManager, timeout_s: float) -> None:
    """Wait for a signal, and drain the HTTP server."""
    await signals.first()
    log.info("draining timeout_s=%g", timeout_s)
    manager.stopping(f"draining, for at most {timeout_s:g} s")
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


@contextlib.asynccontextmanager
async def _open_backend(
    flags: GatewayOptions, credentials: Credentials
) -> AsyncGenerator[tuple[Backend, SetWeights], None]:
    """Within the block there is a backend, and a function that sets tenants' weights. Entry waits for the services."""
    config = EngineConfig(
        pool=flags.pool,
        lease_ttl_s=flags.lease_ttl,
        max_waiting_requests=flags.max_waiting_requests,
        max_waiting_tokens=flags.max_waiting_tokens,
        max_unread_tokens=flags.max_unread_tokens,
        tenants=flags.api_keys is not None,
        speculative=flags.speculative_config,
    )
    opening = _open_pool if flags.pool else _open_router
    told = ""
    while True:
        try:
            backend, set_weights, close = await opening(flags, credentials, config)
            break
        except _TEMPORARY as error:
            if error.reason != told:
                log.warning("waiting for the services: %s", error)
            told = error.reason
            await asyncio.sleep(_RETRY_S)
        except (QuireError, OSError, ValueError) as error:
            raise CannotStartError(str(error)) from error
    try:
        yield backend, set_weights
    finally:
        await close()


Opened = tuple[Backend, SetWeights, Callable[[], Awaitable[None]]]


async def _open_pool(flags: GatewayOptions, credentials: Credentials, config: EngineConfig) -> Opened:
    """Return an engine on the one pool, a function that sets its weights, and one that closes it."""
    policy = PriorityPolicy()
    address, tokenizer = flags.cachemgr, flags.tokenizer
    engine = Engine.connect(
        address, credentials=credentials, config=config, tokenizer=tokenizer, policy=policy, tracing=_tracing()
    )
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    names = flags.served_model_name or (engine.model.model,)
    backend = EngineBackend(engine, names, tokenizer_source=tokenizer)
    cache = CacheClient(address, credentials=credentials, retry=ONCE)
    watching = asyncio.create_task(backend.watch(cache), name="quire-watch-pool")

    async def close() -> None:
        watching.cancel()
        await asyncio.wait([watching])
        await engine.close()
        await cache.close()

    return backend, policy.set_weights, close


async def _open_router(flags: GatewayOptions, credentials: Credentials, config: EngineConfig) -> Opened:
    """Return a router over all pools of the model, a function that sets its weights, and one that closes it."""
    router = Router(
        flags.cachemgr,
        model=flags.model,
        model_names=flags.served_model_name,
        config=RouterConfig(names_tenants=config.tenants),
        engine_config=config,
        credentials=credentials,
        tokenizer=flags.tokenizer,
        tracing=_tracing(),
    )
    try:
        await router.start()
    except BaseException:
        await router.close()
        raise
    return router, router.set_weights, router.close


def _tracing() -> Tracing | None:
    """Return the maker of the engines' spans; None without --otlp-endpoint."""
    found = provider()
    return None if found is None else Tracing(found)
