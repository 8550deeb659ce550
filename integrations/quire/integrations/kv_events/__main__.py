"""The process of `quire events`: flags, wiring, start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import chain
from typing import Any, NoReturn

import click
import zmq
import zmq.asyncio
from prometheus_client.metrics_core import Metric

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE
from quire.client.credentials import Credentials
from quire.client.errors import NotFound, OutOfRoom, QuireError, Unavailable
from quire.integrations.kv_events.copies import CopyReplica, Medium
from quire.integrations.kv_events.follower import POLL_INTERVAL_S, PoolFollower
from quire.integrations.kv_events.metrics import families
from quire.integrations.kv_events.publisher import LINGER_MS, PoolPublisher
from quire.integrations.kv_events.replica import Change
from quire.serving.addresses import MAX_PORT, Address, AddressError, TcpAddress, is_local
from quire.serving.dialing import DialOptions
from quire.serving.flags import DIAL_FLAGS, LISTEN_ADDRESS, Flag, add_flags, cachemgr_option, command_settings, option
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions, dial_options, server_options
from quire.serving.security import Security
from quire.serving.server import CannotStartError, StopSignals, run
from quire.serving.systemd import ServiceManager

log = logging.getLogger("quire.kv_events")

DOMAIN = "kv-events.quire.dev"
DEFAULT_LISTEN = "127.0.0.1:5557"
COPIES: dict[str, Medium] = {"host": pb.MEDIUM_HOST, "disk": pb.MEDIUM_DISK}
TESTED_CONSUMER = "ai-dynamo-runtime 1.6.1"
_PACKAGES = ("pyzmq", "msgspec")
# The parts of server_options that a ZMQ socket does not have.
_WITHOUT = (
    *("--health-listen", "--otlp-endpoint", "--drain-timeout"),
    *("--tls-cert", "--tls-key", "--tls-client-ca", "--token-listen", "--token-file"),
)
OWN_FLAGS: list[Flag] = [
    cachemgr_option(),
    option(
        "--pool",
        multiple=True,
        metavar="NAME",
        show_default="all pools, as they appear",
        help="A pool to publish. May be given several times: the first one is served on the ports as given, the next "
        "one on each port plus 1, and so on.",
    ),
    option(
        "--replay-listen",
        type=LISTEN_ADDRESS,
        multiple=True,
        metavar="HOST:PORT",
        help="Address at which consumers ask for batches that they missed. Off if not given.",
    ),
    option(
        "--copies",
        type=click.Choice(list(COPIES)),
        multiple=True,
        show_default="none",
        help="Also publish the copies of evicted blocks in this place, with the medium CPU or STORAGE. May be given "
        "twice.",
    ),
    option("--topic", default="", metavar="TEXT", show_default="empty", help="The first frame of each batch."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """The values of the process's own flags; see OWN_FLAGS."""

    cachemgr: str
    pool: tuple[str, ...]
    replay_listen: tuple[TcpAddress, ...]
    copies: tuple[str, ...]
    topic: str


class PublishedPool:
    """One pool: its copy, kept up to date, and the sockets that publish its changes."""

    def __init__(
        self,
        cache: CacheClient,
        context: zmq.asyncio.Context,
        pool: str,
        *,
        listen: Sequence[TcpAddress],
        replay_listen: Sequence[TcpAddress],
        topic: str,
        copies: Iterable[Medium],
    ) -> None:
        """Bind the sockets. Raises AddressError."""
        self._copies = CopyReplica(copies)
        self._follower = PoolFollower(cache, pool, self._publish, copies=self._copies)
        self.publisher = PoolPublisher(
            context,
            listen,
            replay_addresses=replay_listen,
            topic=topic,
            everything=lambda: chain(self._follower.replica.chains(), self._copies.all()),
        )

    def statistics(self) -> Any:
        """Return the counts of the publisher, and those of the copy."""
        return self.publisher.statistics(), self._follower.replica.statistics()

    async def run(self) -> NoReturn:
        """Publish until it is cancelled. Raises an ExceptionGroup with the QuireError of PoolFollower.run."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.publisher.serve())
                await self._follower.run()
        finally:
            self.publisher.close()

    def _publish(self, changes: list[Change]) -> None:
        self.publisher.publish([*changes, *self._copies.end_moment()])


class Publishers:
    """The pools that are published. Each has its place for good: its ports are those of the flags plus this place."""

    def __init__(self, cache: CacheClient, listen: Sequence[TcpAddress], options: EventOptions) -> None:
        self._cache = cache
        self._context = zmq.asyncio.Context()
        self._listen = listen
        self._options = options
        self._places: dict[str, int] = {}
        self._pools: dict[str, PublishedPool] = {}

    def families(self) -> Iterable[Metric]:
        """Return the metrics of all pools."""
        return families({name: pool.statistics() for name, pool in self._pools.items()})

    async def run(self) -> NoReturn:
        """Publish the pools of the flags, or all that appear, until it is cancelled.

        Raises QuireError that no retry cures, and AddressError if a port of a pool of the flags can't be used.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in dict.fromkeys(self._options.pool):
                    self._add(name, tasks)
                while True:
                    for name in await self._new_pools():
                        self._try_to_add(name, tasks)
                    await asyncio.sleep(POLL_INTERVAL_S)
        except* (QuireError, AddressError) as errors:
            raise _first_of(errors) from None
        raise AssertionError("it ends by an exception alone")

    def close(self) -> None:
        """Close all sockets. Sent messages have time to arrive."""
        self._context.destroy(linger=LINGER_MS)

    async def _new_pools(self) -> list[str]:
        """Return the pools that have no publisher yet; none while cachemgr is away."""
        if self._options.pool:
            return []
        try:
            names = {pool.name for pool in await self._cache.list_pools()}
        except (NotFound, OutOfRoom, Unavailable):
            return []
        return sorted(names - set(self._pools))

    def _try_to_add(self, name: str, tasks: asyncio.TaskGroup) -> None:
        """Begin to publish a pool. Tried again later if its port can't be used: others are published meanwhile."""
        is_new = name not in self._places
        try:
            self._add(name, tasks)
        except AddressError as error:
            if is_new:
                log.error("pool not published: %s pool=%s", error, name)

    def _add(self, name: str, tasks: asyncio.TaskGroup) -> None:
        place = self._places.setdefault(name, len(self._places))
        pool = PublishedPool(
            self._cache,
            self._context,
            name,
            listen=[_moved(each, place) for each in self._listen],
            replay_listen=[_moved(each, place) for each in self._options.replay_listen],
            topic=self._options.topic,
            copies=[COPIES[each] for each in self._options.copies],
        )
        self._pools[name] = pool
        tasks.create_task(pool.run(), name=f"quire-events-{name}")
        at = " ".join(f"tcp://{each}" for each in pool.publisher.addresses)
        replays = "".join(f", replays at tcp://{each}" for each in pool.publisher.replay_addresses)
        print(f"publishing pool {name} at {at}{replays}", flush=True)


def _first_of(error: BaseException) -> BaseException:
    """Return the first exception of a group, of a group in it too."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _moved(address: TcpAddress, place: int) -> TcpAddress:
    """Return the address for a pool's place; port 0 stays 0. Raises AddressError."""
    port = address.port + place if address.port else 0
    if port > MAX_PORT:
        raise AddressError(f"{address} plus {place} for a pool: a port is at most {MAX_PORT}")
    return TcpAddress(address.host, port)


async def serve(
    server: ServerOptions, signals: StopSignals, *, options: EventOptions, credentials: Credentials
) -> None:
    """Publish until a signal. Raises CannotStartError, AddressError."""
    listen, security = secure(server, options)
    manager = ServiceManager(os.environ)
    versions = " ".join(f"{name}={metadata.version(name)}" for name in _PACKAGES)
    log.info("events in vLLM's format, tested with %s %s", TESTED_CONSUMER, versions)
    async with contextlib.AsyncExitStack() as stack:
        if manager.has_watchdog:
            stack.callback(asyncio.create_task(manager.feed_watchdog()).cancel)
        cache = CacheClient(options.cachemgr, credentials=credentials, retry=ONCE)
        stack.push_async_callback(cache.close)
        publishers = Publishers(cache, listen, options)
        stack.callback(publishers.close)
        if server.metrics_listen is not None:
            stack.enter_context(MetricsPage(server.metrics_listen, publishers.families, security=security))
        running, stopped = asyncio.create_task(publishers.run()), asyncio.create_task(signals.first())
        manager.ready("publishing")
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        manager.stopping("clearing the blocks of all consumers")
        for task in (running, stopped):
            task.cancel()
        results = await asyncio.gather(running, return_exceptions=True)
        if isinstance(error := results[0], QuireError):
            raise CannotStartError(str(error)) from error
        if isinstance(error, Exception):
            raise error
        log.info("stopped")


def secure(server: ServerOptions, options: EventOptions) -> tuple[list[TcpAddress], Security]:
    """Return the addresses of the first pool, and the security of the metrics.

    Raises AddressError for a unix socket, or for plain text where others can reach it: batches have tokens of prompts.
    """
    listen = [_checked("--listen", each, server) for each in server.listen]
    for each in options.replay_listen:
        _checked("--replay-listen", each, server)
    if server.metrics_listen is not None:
        _checked("--metrics-listen", server.metrics_listen, server)
    return listen, Security(server.security, roles={}, domain=DOMAIN)


def _checked(flag: str, address: Address, server: ServerOptions) -> TcpAddress:
    if not isinstance(address, TcpAddress):
        raise AddressError(f"{flag} {address}: events are published on host:port, not on a unix socket")
    if not is_local(address) and not server.security.allow_plaintext:
        raise AddressError(
            f"{flag} {address}: not loopback, and there is no TLS here: others could read the tokens of prompts on the "
            "network. Give --allow-plaintext where the network is private"
        )
    return address


@click.command(name="events", cls=ServerCommand, context_settings=command_settings("QUIRE_EVENTS"))
@server_options(default_listen=DEFAULT_LISTEN, without=_WITHOUT)
@dial_options("cachemgr")
@add_flags(OWN_FLAGS)
def main(server: ServerOptions, cachemgr_dial: DialOptions, **own: Any) -> None:
    """Publish KV events as vLLM's engines do, over ZMQ, for routers that keep an index of the prefix caches.

    Each pool has a publisher on a port of its own. Needs the roles operator and content where cachemgr authenticates
    callers. Waits for cachemgr if it is not there yet. ZMQ has no TLS here: see docs/how-to/kv-events.md.

    \b
    Examples:
      quire events --cachemgr unix:/run/quire/cachemgr.sock --listen 127.0.0.1:5557 --replay-listen 127.0.0.1:6557
      quire events --pool llama-a --pool llama-b
    """
    configure_logging(server.log_level, server.log_format)
    options = EventOptions(**own)
    credentials = Credentials(**{name: getattr(cachemgr_dial, name) for name in DIAL_FLAGS})
    if server.only_check:
        server.end_check(lambda: secure(server, options))
    settings = partial(serve, options=options, credentials=credentials)
    sys.exit(run(lambda signals: settings(server, signals)))


if __name__ == "__main__":
    main(prog_name="quire events")
