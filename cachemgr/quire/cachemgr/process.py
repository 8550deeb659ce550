"""A cachemgr from its settings to its end: wiring, start, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prometheus_client.metrics_core import Metric

from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.metrics import metric_families
from quire.cachemgr.service.roles import MESSAGE_LIMITS, ROLES
from quire.cachemgr.service.servicer import CacheServicer
from quire.cachemgr.service.statuses import DOMAIN
from quire.cachemgr.shares import Percentage, Shares, watch_shares
from quire.cachemgr.state import StateDirectory, StateUnusable
from quire.serving.metrics import MetricsPage
from quire.serving.options import ServerOptions
from quire.serving.runtime import keep_little_free_memory, tune_garbage_collector
from quire.serving.server import CannotStartError, Server, StopSignals

log = logging.getLogger("quire.cachemgr")

SERVICE_NAME = "quire.cache.v1.CacheService"
SHARES_INTERVAL_S = 1.0


async def serve(
    options: ServerOptions,
    signals: StopSignals,
    *,
    policy: str,
    max_leases: int,
    tenants: Path | None,
    keep_share: float,
    keep_tokens: bool,
    state_dir: Path | None,
    verify: bool,
) -> None:
    """Serves CacheService until a signal. Raises CannotStartError."""
    try:
        state = None if state_dir is None else StateDirectory(state_dir)
    except StateUnusable as error:
        raise CannotStartError(str(error)) from error
    keep_limit = Percentage(100 * keep_share)
    shares: Callable[[], Shares] = partial(Shares, keep_limit=keep_limit)
    if tenants is not None:
        shares = watch_shares(tenants, keep_limit=keep_limit).current
    security = options.secure(roles=ROLES, domain=DOMAIN)
    # A later start is a higher term. If the clock was set back, `Catalog.register` finds a higher one.
    term = time.time_ns()
    if state is None:
        catalog = Catalog(term, policy=policy, verify=verify, keep_tokens=keep_tokens)
    else:
        catalog = Catalog(term, policy=policy, verify=verify, keep_tokens=keep_tokens, begin_state=state.begin)
        state.restore(catalog, now=time.monotonic())
    catalog.set_shares(shares().resolve, shares().adapter_rights)
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


async def follow_shares(shares: Callable[[], Shares], catalog: Catalog) -> None:
    """Sets the pools' shares when the shares file changes; runs until cancelled."""
    told = shares()
    while True:
        await asyncio.sleep(SHARES_INTERVAL_S)
        current = shares()
        if current != told:
            log.info("tenants' shares have changed")
            catalog.set_shares(current.resolve, current.adapter_rights)
            told = current


def read_metrics(catalog: Catalog, servicer: CacheServicer, server: Server) -> Iterator[Metric]:
    """The page's metrics, as they are now."""
    servicer.advance()
    return metric_families(catalog, servicer.statistics(), server.statistics())
