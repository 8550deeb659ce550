"""The end of expired leases. Time in which no renewal could be read does not count."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from quire.cachemgr.catalog import Catalog
from quire.cachemgr.service.attachments import Attachments

log = logging.getLogger(__name__)

TICK_S = 0.25
"""While there are leases, the loop is looked at this often."""
UNNOTICED_S = 0.3
"""The longest hold of the event loop that is not noticed. Leases end this long after their expiry."""


class HeldTime:
    """Finds the time in which this process read no renewals: its event loop was held, or the process was stopped.

    The loop calls `look` every TICK_S. A late call means that the loop was held since the one before it.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now

    def look(self, now: float) -> float:
        """Return the seconds for which the loop was held since the last look, 0 if not for long."""
        passed_s, self._looked_at = now - self._looked_at, now
        return passed_s - TICK_S if passed_s > UNNOTICED_S else 0.0


class Expiry:
    """Ends leases as their time runs out."""

    def __init__(self, catalog: Catalog, attachments: Attachments, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._attachments = attachments
        self._clock = clock
        self._changed = asyncio.Event()

    def lease_added(self) -> None:
        """A lease has been made, which may be the first one."""
        self._changed.set()

    async def run(self) -> None:
        """End leases as their time runs out; runs until cancelled. Time in which the loop was held does not count."""
        held_time = HeldTime(self._clock())
        while True:
            self._changed.clear()
            now = self._clock()
            if held_s := held_time.look(now):
                self._extend_leases(held_s, now)
            for pool in self._catalog.pools():
                for lease_id in pool.ledger.expire_leases(now - UNNOTICED_S):
                    log.info("lease expired lease=%s pool=%s", lease_id[:8], pool.ledger.pool)
                    self._attachments.fence_lease(pool, lease_id)
            times = [
                expiry for pool in self._catalog.pools() if (expiry := pool.ledger.inspector.next_expiry()) is not None
            ]
            if not times:
                await self._changed.wait()
                held_time = HeldTime(self._clock())
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S, max(0.0, min(times) + UNNOTICED_S - self._clock()))):
                    await self._changed.wait()

    def _extend_leases(self, held_s: float, now: float) -> None:
        log.warning("the event loop was held; leases are extended seconds=%.3f", held_s)
        for pool in self._catalog.pools():
            pool.ledger.extend_leases(held_s, now)
