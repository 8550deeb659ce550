"""Leases: who may hold blocks of a pool, and until when. What a lease holds is in the pool's books."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

PAGE_KEY = "[0-9a-f]{24}"
"""The form of what orders leases in lists."""
SPARE_ENTRIES = 256
TICK_S = 0.25
"""While there are leases, the loop is looked at this often."""
UNNOTICED_S = 0.3
"""A loop that was held is noticed if looks at it are further apart. Leases are ended this long after their time."""
LET_IN_S = 1.0
"""When the loop was held, no lease ends within this time: renewals that wait are read first. Once for each renewal."""


class LeaseState(Enum):
    """OPEN → FENCING → gone. A lease never opens again."""

    OPEN = "open"
    FENCING = "fencing"


@dataclass(slots=True, eq=False)
class Lease:
    """The right to hold blocks of one pool."""

    lease_id: str
    pool: str
    ttl_s: float
    expires_at: float
    tenant: str = ""
    state: LeaseState = LeaseState.OPEN
    was_let_in: bool = False
    """It got LET_IN_S since its last renewal. A loop that is slow for long must not keep a dead client's lease."""

    def renew(self, now: float) -> None:
        self.expires_at, self.was_let_in = now + self.ttl_s, False

    def extend(self, held_s: float, now: float) -> None:
        """Add the time in which no renewal could be read, and once the time to read those that wait."""
        self.expires_at += held_s
        if not self.was_let_in and self.expires_at < now + LET_IN_S:
            self.expires_at, self.was_let_in = now + LET_IN_S, True


class HeldTime:
    """Finds the time in which this process read no renewals: its event loop was held, or the process was stopped.

    The loop calls `look` every TICK_S. A call that is late says that the loop was held since the one before it.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now

    def look(self, now: float) -> float:
        """Return for how many seconds the loop was held since the last look, 0 if not for long."""
        passed_s, self._looked_at = now - self._looked_at, now
        return passed_s - TICK_S if passed_s > UNNOTICED_S else 0.0


def page_key(lease_id: str) -> str:
    """Orders leases in lists without giving their ids away, which are capabilities; a PAGE_KEY."""
    return sha256(lease_id.encode()).hexdigest()[:24]


class LeaseOrder:
    """Leases by their page keys, so that a page of a list costs no more than its leases."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._leases: dict[str, Lease] = {}

    def add(self, lease: Lease) -> None:
        key = page_key(lease.lease_id)
        bisect.insort(self._keys, key)
        self._leases[key] = lease

    def remove(self, lease_id: str) -> None:
        key = page_key(lease_id)
        del self._keys[bisect.bisect_left(self._keys, key)]
        del self._leases[key]

    def starting(self, key: str) -> Iterator[tuple[str, Lease]]:
        """Leases from this key on, with their keys. They must not change meanwhile."""
        for index in range(bisect.bisect_left(self._keys, key), len(self._keys)):
            yield self._keys[index], self._leases[self._keys[index]]


class ExpiryQueue:
    """Which leases have run out. Renewals cost nothing here: an entry that is early is put back when it comes up.

    The end of a lease costs nothing either. Its entry stays until it comes up, or until there are twice as many entries
    as there were open leases at the last look, SPARE_ENTRIES at least; then all of them are looked through.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, str, Lease]] = []
        self._limit = SPARE_ENTRIES

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, lease: Lease) -> None:
        """Cost: O(log n), on average over many."""
        if len(self._entries) >= self._limit:
            self._entries = [entry for entry in self._entries if entry[2].state is LeaseState.OPEN]
            heapq.heapify(self._entries)
            self._limit = max(SPARE_ENTRIES, 2 * len(self._entries))
        heapq.heappush(self._entries, (lease.expires_at, lease.lease_id, lease))

    def next_expiry(self) -> float | None:
        """No lease runs out before this; None if there is none."""
        return self._entries[0][0] if self._entries else None

    def pop_expired(self, leases: dict[str, Lease], now: float) -> list[Lease]:
        """The open leases among `leases` whose time is over. Cost: O(log n) per entry that has come up."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            _, lease_id, _ = heapq.heappop(self._entries)
            lease = leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.OPEN:
                continue
            if lease.expires_at > now:
                self.add(lease)
            else:
                expired.append(lease)
        return expired
