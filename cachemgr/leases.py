"""Leases: who may hold blocks of a pool, and until when. What a lease holds is in the pool's books."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from quire.cachemgr._core import StepPlan
from quire.cachemgr.errors import CallRefused, Reason, refuse

REMEMBERED_PLANS = 8
"""Answers kept per lease for a repeated request_id."""


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
    answers: OrderedDict[str, tuple[bytes, StepPlan]] = field(default_factory=OrderedDict)
    """The last plans by request_id: digest of the request, and the answer."""

    def renew(self, now: float) -> None:
        self.expires_at = now + self.ttl_s

    def start_anew(self) -> None:
        """The pool's memory is a new one: nothing of the old is left but the right itself."""
        self.answers.clear()

    def recall(self, request_id: str, digest: bytes) -> StepPlan | None:
        """The answer given to this request_id, or None. Raises CallRefused if the request was another one."""
        if not request_id or request_id not in self.answers:
            return None
        known_digest, answer = self.answers[request_id]
        if known_digest != digest:
            message = f"request_id {request_id!r} was used for another plan"
            raise CallRefused(refuse(Reason.REQUEST_ID_REUSED, message, request_id=request_id))
        return answer

    def remember(self, request_id: str, digest: bytes, answer: StepPlan) -> None:
        """Keeps the answer for a repetition; forgets the oldest beyond REMEMBERED_PLANS."""
        if request_id:
            self.answers[request_id] = (digest, answer)
            if len(self.answers) > REMEMBERED_PLANS:
                self.answers.popitem(last=False)


class ExpiryQueue:
    """Which leases have run out. Renewals cost nothing here: an entry that is early is put back when it comes up."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, str]] = []

    def add(self, lease: Lease) -> None:
        heapq.heappush(self._entries, (lease.expires_at, lease.lease_id))

    def next_expiry(self) -> float | None:
        """No lease runs out before this; None if there is none."""
        return self._entries[0][0] if self._entries else None

    def pop_expired(self, leases: dict[str, Lease], now: float) -> list[Lease]:
        """The open leases among `leases` whose time is over. Cost: O(log n) per entry that has come up."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            _, lease_id = heapq.heappop(self._entries)
            lease = leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.OPEN:
                continue
            if lease.expires_at > now:
                self.add(lease)
            else:
                expired.append(lease)
        return expired
