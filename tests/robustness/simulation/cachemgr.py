"""A simulated process of cachemgr: its service, catalog, books and state, as `quire cachemgr` composes them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from robustness.simulation.admissions import Admissions, ObservedPlans, kept_blocks
from robustness.simulation.network import Network
from robustness.simulation.server import SimulatedServer
from robustness.simulation.world import Process

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.service.roles import MESSAGE_LIMITS
from quire.cachemgr.service.servicer import SERVICE, CacheServicer
from quire.cachemgr.service.statuses import DOMAIN
from quire.cachemgr.shares import Share, Shares
from quire.cachemgr.state import StateDirectory
from quire.serving.interceptor import HandlerGuard

NAME = "cachemgr"
ADDRESS = "unix:/sim/cachemgr"


class SimulatedCachemgr:
    """One start of cachemgr, in a process of its own."""

    def __init__(
        self,
        process: Process,
        network: Network,
        *,
        policy: str,
        shares: dict[str, Share],
        state_folder: Path | None,
        admissions: Admissions,
    ) -> None:
        """shares are the tenants'. Without a state folder a restart begins new epochs.

        Raises StateUnusable. Call it in the process.
        """
        self.process = process
        self._state = None if state_folder is None else StateDirectory(state_folder)
        if self._state is not None:
            process.at_end.append(self._state.close)
        term = time.time_ns()
        begin: dict[str, Any] = {} if self._state is None else {"begin_state": self._state.begin}
        self.catalog = Catalog(term, policy=policy, verify=True, **begin)
        if self._state is not None:
            self._state.restore(self.catalog, now=time.monotonic())
        self.catalog.set_shares(Shares(tenants=shares).resolve)
        admissions.restore([pool.ledger for pool in self.catalog.pools()], now=time.monotonic())
        self.servicer = CacheServicer(self.catalog, clock=time.monotonic)
        self.guard = HandlerGuard(
            domain=DOMAIN,
            fatal=(BrokenInvariant,),
            on_fatal=lambda error: process.world.fail(f"{NAME}: {error}", error),
            message_limits=MESSAGE_LIMITS,
        )
        self.server = SimulatedServer(network, process, ADDRESS, self.guard)
        self.servicer.add_to(self.server)  # type: ignore[arg-type]
        self._observe_plans(admissions)
        process.spawn(self.server.start())
        process.spawn(self.servicer.expire_leases())

    def _observe_plans(self, admissions: Admissions) -> None:
        planning = self.servicer._planning
        plans = ObservedPlans(admissions, planning._plan)
        planning._plan = plans.plan  # type: ignore[method-assign]
        decoders = {"PlanStep": plans.alone, "PlanSteps": plans.on_stream}
        handlers: dict[str, Any] = planning.handlers()
        for method, decode in decoders.items():
            handlers[method] = handlers[method]._replace(request_deserializer=decode)
        self.server.add_registered_method_handlers(SERVICE, handlers)

    async def terminate(self) -> None:
        """SIGTERM: no new plans and leases, streams end with their reason, then the process."""
        await self.servicer.drain()
        self.guard.end_streams()
        await self.server.stop(0.5)
        self.process.end()

    def left(self, *, num_pools: int, with_leases: bool = True) -> list[str]:
        """List what is left; when nobody uses the pools any more, that should be nothing, but for leases that live."""
        found = []
        pools = self.catalog.pools()
        if len([pool for pool in pools if pool.is_attached]) < num_pools:
            found.append("a pool is not attached")
        for pool in pools:
            inspector = pool.ledger.inspector
            if (leases := inspector.leases()) and with_leases:
                found.append(f"{len(leases)} leases")
            counts = cache_service_pb2.BlockCounts.FromString(inspector.counts())
            usable = pool.ledger.geometry.num_blocks - 1
            if counts.free_count + counts.cached_count != usable:
                found.append(f"{counts.active_count} active and {counts.retired_count} retired of {usable} blocks")
            if num_rows := pool.ledger.probe.num_rows():
                found.append(f"{num_rows} rows")
            found += inspector.audit_counts()
            if pool.ledger.num_erasing:
                found.append("content that is to be erased")
            if pool.ledger.geometry.num_disk_blocks and pool.ledger.disk_orders(0) is not None:
                found.append("orders about the disk")
        calls, service = self.guard.statistics(), self.servicer.statistics()
        if with_leases and calls.num_open != num_pools + service.num_watches:
            found.append(f"{calls.num_open} open calls")
        if service.num_waiting_admissions:
            found.append(f"{service.num_waiting_admissions} admissions that wait")
        return found

    def violations(self) -> list[str]:
        """List the violations in the books of all pools: those that AuditPool finds, and others."""
        found = []
        for pool in self.catalog.pools():
            inspector = pool.ledger.inspector
            found += [*pool.ledger.probe.violations(), *inspector.audit_counts(), *inspector.audit_promises()]
            found += inspector.audit(0, pool.ledger.geometry.num_blocks)
        return found

    def num_kept(self) -> int:
        """Return the blocks that breakpoints keep now, in all pools."""
        with self.process.entered():
            self.servicer.advance()
        return sum(len(kept_blocks(pool.ledger)) for pool in self.catalog.pools())
