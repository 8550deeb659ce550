"""CacheService: its parts, and the calls that each of them answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import grpc

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.cachemgr.bounds import MAX_LEASES, Drain
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import Reason
from quire.cachemgr.service.attachments import Attachments
from quire.cachemgr.service.expiry import Expiry
from quire.cachemgr.service.inspection import Inspection
from quire.cachemgr.service.leasing import Leasing
from quire.cachemgr.service.planning import Planning
from quire.cachemgr.service.pools import VisiblePools
from quire.cachemgr.service.retention import Keeping

_DESCRIPTOR = cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"]
SERVICE = _DESCRIPTOR.full_name
METHODS = [method.name for method in _DESCRIPTOR.methods]


@dataclass(frozen=True, slots=True)
class ServicerStatistics:
    """The sizes of queues and kept objects outside of the books; each is bounded."""

    num_waiting_admissions: int
    num_watches: int
    refused_plans: dict[Reason, int]
    """On streams, as a whole, since the start."""


class CacheServicer:
    """The core behind gRPC. Runs on one event loop, which makes every core call atomic.

    max_leases      of all tenants together, those being fenced included
    max_leases_of   of one tenant; None: the limit of all
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_leases: int = MAX_LEASES,
        max_leases_of: Callable[[str], int | None] = lambda tenant: None,
    ) -> None:
        self._pools = VisiblePools(catalog, clock)
        self._drain = Drain()
        self._attachments = Attachments(catalog, clock)
        self._expiry = Expiry(catalog, self._attachments, clock)
        self._leasing = Leasing(
            *(catalog, self._pools, self._attachments, self._expiry, self._drain, clock),
            max_leases=max_leases,
            max_leases_of=max_leases_of,
        )
        self._planning = Planning(self._pools, self._drain, clock)
        self._inspection = Inspection(catalog, self._pools, self._attachments, clock)
        parts = (self._leasing, self._planning, self._attachments, self._inspection, Keeping(self._pools, clock))
        for method in METHODS:
            (part,) = (part for part in parts if hasattr(part, method))
            setattr(self, method, getattr(part, method))
        self.plan_step = self._planning.plan_step
        self.expire_leases = self._expiry.run

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        methods = cast(cache_service_pb2_grpc.CacheServiceServicer, self)  # all of METHODS, set in __init__
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(methods, server)
        for part in (self._planning, self._attachments):
            server.add_registered_method_handlers(SERVICE, part.handlers())  # in place of the generated ones

    def statistics(self) -> ServicerStatistics:
        return ServicerStatistics(
            num_waiting_admissions=self._planning.num_waiting_admissions,
            num_watches=self._inspection.num_watches,
            refused_plans=self._planning.refused_plans,
        )

    def advance(self) -> None:
        """Ends expired pins and advice, for readers of the books outside of calls."""
        self._pools.pools("")

    async def drain(self) -> None:
        """No new plans and leases from here on. Those that were answered need nothing more of this process."""
        self._drain.begin()
