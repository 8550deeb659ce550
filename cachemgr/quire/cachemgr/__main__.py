"""The cachemgr process: flags, wiring, start to exit."""

from __future__ import annotations

import quire.serving.polling  # noqa: F401 - before gRPC is imported

# isort: split
import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
from prometheus_client.metrics_core import Metric

from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.flags import OWN_FLAGS
from quire.cachemgr.metrics import metric_families
from quire.cachemgr.service.roles import MESSAGE_LIMITS, ROLES
from quire.cachemgr.service.servicer import CacheServicer
from quire.cachemgr.service.statuses import DOMAIN
from quire.cachemgr.shares import Shares, watch_shares
from quire.cachemgr.state import StateDirectory, StateUnusable
from quire.serving.flags import add_flags, command_settings
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions, server_options
from quire.serving.runtime import keep_little_free_memory, tune_garbage_collector
from quire.serving.runtime_folder import default_listen
from quire.serving.server import CannotStartError, Server, StopSignals, run

log = logging.getLogger("quire.cachemgr")

SERVICE_NAME = "quire.cache.v1.CacheService"
SHARES_INTERVAL_S = 1.0


class CachemgrCommand(ServerCommand):
    files = (
        (default_listen("cachemgr").removeprefix("unix:"), "The default --listen address."),
        ("DIR of --state-dir", "The state for a restart. Best on a tmpfs, with 190 bytes a block and 64 MiB."),
        (
            "--token-file, --tenants, --tls-*",
            "Read again when they change. While a file can't be read, its last content is used.",
        ),
    )


async def serve(
    options: ServerOptions,
    signals: StopSignals,
    *,
    policy: str,
    max_leases: int,
    tenants: Path | None,
    keep_tokens: bool,
    state_dir: Path | None,
    verify: bool,
) -> None:
    """Serves CacheService until a signal. Raises CannotStartError."""
    try:
        state = None if state_dir is None else StateDirectory(state_dir)
    except StateUnusable as error:
        raise CannotStartError(str(error)) from error
    shares: Callable[[], Shares] = Shares if tenants is None else watch_shares(tenants).current
    security = options.secure(roles=ROLES, domain=DOMAIN)
    # A later start is a higher term. If the clock was set back, `Catalog.register` finds a higher one.
    term = time.time_ns()
    if state is None:
        catalog = Catalog(term, policy=policy, verify=verify, keep_tokens=keep_tokens)
    else:
        catalog = Catalog(term, policy=policy, verify=verify, keep_tokens=keep_tokens, begin_state=state.begin)
        state.restore(catalog, now=time.monotonic())
    catalog.set_shares(shares().resolve)
    servicer = CacheServicer(
        catalog, max_leases=max_leases, max_leases_of=lambda tenant: shares().of(tenant).max_leases
    )
    async with contextlib.AsyncExitStack() as stack:
        server = Server(
            service_names=[SERVICE_NAME],
            domain=DOMAIN,
            fatal=(BrokenInvariant,),
            security=security,
            message_limits=MESSAGE_LIMITS,
        )
        await stack.enter_async_context(server)
        if options.metrics_listen is not None:
            read = partial(read_metrics, catalog, servicer, server)
            stack.enter_context(MetricsPage(options.metrics_listen, read, security=security))
        servicer.add_to(server.grpc)
        await server.start(options.listen)
        server.run_alongside(servicer.expire_leases())
        server.run_alongside(follow_shares(shares, catalog))
        tune_garbage_collector()
        keep_little_free_memory()
        await server.announce_serving()
        addresses = ",".join(map(str, server.addresses))
        log.info("serving term=%d addresses=%s eviction_policy=%s", catalog.term, addresses, policy)
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=options.drain_timeout_s)


def check_files(options: ServerOptions, tenants: Path | None) -> None:
    """Raises ValueError if a flag's file can't be used, or an address can't be served with these flags."""
    options.secure(roles=ROLES, domain=DOMAIN)
    if tenants is not None:
        watch_shares(tenants)


async def follow_shares(shares: Callable[[], Shares], catalog: Catalog) -> None:
    """Sets the pools' shares when the shares file changes; runs until cancelled."""
    told = shares()
    while True:
        await asyncio.sleep(SHARES_INTERVAL_S)
        current = shares()
        if current != told:
            log.info("tenants' shares have changed")
            catalog.set_shares(current.resolve)
            told = current


def read_metrics(catalog: Catalog, servicer: CacheServicer, server: Server) -> Iterator[Metric]:
    """The page's metrics, as they are now."""
    servicer.advance()
    return metric_families(catalog, servicer.statistics(), server.statistics())


@click.command(name="cachemgr", cls=CachemgrCommand, context_settings=command_settings("QUIRE_CACHEMGR"))
@server_options(default_listen=default_listen("cachemgr"))
@add_flags(OWN_FLAGS)
def main(
    server: ServerOptions,
    eviction_policy: str,
    max_leases: int,
    tenants: Path | None,
    keep_tokens: bool,
    state_dir: Path | None,
) -> None:
    """Serve the block manager, which assigns KV blocks to sequences.

    Workers attach their pools to it; clients create leases and plan steps. With --state-dir a restart continues from
    the state at the end of the process, unless the machine was rebooted. Set QUIRE_VERIFY=1 to check all invariants
    after every change (slow).

    \b
    Example:
      quire cachemgr --listen unix:/run/quire/cachemgr.sock --listen 127.0.0.1:7070
    """
    configure_logging(server.log_level, server.log_format)
    if server.only_check:
        server.end_check(lambda: check_files(server, tenants))
    verify = os.environ.get("QUIRE_VERIFY") == "1"
    settings = partial(
        serve,
        policy=eviction_policy,
        max_leases=max_leases,
        tenants=tenants,
        keep_tokens=keep_tokens,
        state_dir=state_dir,
        verify=verify,
    )
    sys.exit(run(lambda signals: settings(server, signals)))


if __name__ == "__main__":
    main(prog_name="quire cachemgr")
