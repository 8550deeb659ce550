"""The cachemgr process: flags, wiring, start to exit."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time

import click

from quire.cache.v1 import cache_service_pb2_grpc
from quire.cachemgr._core import POLICIES
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.ledger import DEFAULT_POLICY
from quire.cachemgr.metrics import metric_families
from quire.cachemgr.roles import ROLES
from quire.cachemgr.servicer import CacheServicer
from quire.cachemgr.statuses import DOMAIN
from quire.serving.logs import configure_logging
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions, command_settings, option, server_options
from quire.serving.runtime import tune_garbage_collector
from quire.serving.server import Server, StopSignals, run

log = logging.getLogger("quire.cachemgr")

SERVICE_NAME = "quire.cache.v1.CacheService"
DEFAULT_LISTEN = "unix:/run/quire/cachemgr.sock"


async def serve(options: ServerOptions, signals: StopSignals, *, policy: str, verify: bool) -> None:
    """Serves CacheService until a signal."""
    security = options.secure(roles=ROLES, domain=DOMAIN)
    # A later start is a higher term; the wall clock needs no state to be kept between starts.
    catalog = Catalog(term=time.time_ns(), policy=policy, verify=verify)
    servicer = CacheServicer(catalog)
    async with contextlib.AsyncExitStack() as stack:
        server = Server(service_names=[SERVICE_NAME], domain=DOMAIN, fatal=(BrokenInvariant,), security=security)
        await stack.enter_async_context(server)
        if options.metrics_listen is not None:
            stack.enter_context(
                MetricsPage(options.metrics_listen, lambda: metric_families(catalog), security=security)
            )
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server.grpc)
        await server.start(options.listen)
        server.run_alongside(servicer.expire_leases())
        tune_garbage_collector()
        await server.announce_serving()
        addresses = ",".join(map(str, server.addresses))
        log.info("serving term=%d addresses=%s eviction_policy=%s", catalog.term, addresses, policy)
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=options.drain_timeout_s)


@click.command(name="cachemgr", context_settings=command_settings("QUIRE_CACHEMGR"))
@server_options(default_listen=DEFAULT_LISTEN)
@option(
    "--eviction-policy",
    type=click.Choice(POLICIES),
    default=DEFAULT_POLICY,
    help="Which cached blocks are given up first: those least worth keeping by what was learned of their kind, or the "
    "least recently used.",
)
def main(server: ServerOptions, eviction_policy: str) -> None:
    """Serve the block manager: who owns which KV block.

    Workers attach their pools to it, clients take leases and plan steps. It keeps no state: after a restart it makes
    every worker begin a new epoch. Set QUIRE_VERIFY=1 to check all invariants after every change (slow).

    \b
    Example:
      quire cachemgr --listen unix:/run/quire/cachemgr.sock --listen 127.0.0.1:7070
    """
    configure_logging(server.log_level)
    verify = os.environ.get("QUIRE_VERIFY") == "1"
    sys.exit(run(lambda signals: serve(server, signals, policy=eviction_policy, verify=verify)))


if __name__ == "__main__":
    main()
