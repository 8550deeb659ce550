"""Leases: who may hold blocks, until when, and which of their steps are in flight."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

from quire.cachemgr.errors import CallRefused, Reason, refuse
from quire.cachemgr.plans import StepPlan
from quire.cachemgr.sequences import Sequence

MAX_STEPS_IN_FLIGHT = 64
"""Steps a lease may have planned without their outcome being known."""

REMEMBERED_PLANS = 8
"""Answers kept per lease for a repeated request_id."""


class LeaseState(Enum):
    """OPEN → FENCING → gone. A lease never opens again."""

    OPEN = "open"
    FENCING = "fencing"


@dataclass(slots=True, eq=False)
class Run:
    """What one step in flight computes of one sequence."""

    sequence: Sequence
    sampled_position: int
    """Where the token stands that it samples, if anybody receives it: behind the last position computed."""
    end: int
    """Positions before this one count as computed for the sequence when the step is; less after a trim."""
    receivers: list[Sequence]
    """Who takes over the token sampled: the sequence and forks of it. Empty if none is sampled or wanted."""


@dataclass(slots=True)
class StepInFlight:
    """A step that was planned and not reported: what it computes, and what it keeps from being handed out."""

    step_number: int
    runs: list[Run] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    """Blocks to unpin when the step has ended, in the order in which they were let go."""
    pending: list[bytes] = field(default_factory=list)
    """Prefix hashes of the blocks this step fills."""
    num_released_rows: int = 0
    """Sequences that end with this step: the worker keeps their rows until then."""
    is_doomed: bool = False
    """It was planned before the outcome of one was known that computed nothing: it will compute nothing either."""


@dataclass(slots=True, eq=False)
class Lease:
    """The right to hold blocks of one pool; owner of its sequences and of its steps' numbers."""

    lease_id: str
    pool: str
    ttl_s: float
    expires_at: float
    tenant: str = ""
    state: LeaseState = LeaseState.OPEN
    sequences: dict[int, Sequence] = field(default_factory=dict)
    next_step: int = 1
    settled_step: int = 0
    """The last step that was reported."""
    known_step: int = 0
    """Outcomes are known up to this step: reported, or doomed."""
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    pending: dict[bytes, int] = field(default_factory=dict)
    """Blocks that steps in flight are filling, by prefix hash: this lease's later steps may share them."""
    table_changes: list[tuple[Sequence, int]] = field(default_factory=list)
    """Table entries changed since the last plan, which the next grant has to tell the worker."""
    answers: OrderedDict[str, tuple[bytes, StepPlan]] = field(default_factory=OrderedDict)
    """The last plans by request_id: digest of the request, and the answer."""

    def renew(self, now: float) -> None:
        self.expires_at = now + self.ttl_s

    def start_anew(self) -> None:
        """The pool's memory is a new one: nothing of the old is left but the right itself."""
        self.sequences.clear()
        self.in_flight.clear()
        self.pending.clear()
        self.table_changes.clear()
        self.answers.clear()
        self.next_step, self.settled_step, self.known_step = 1, 0, 0

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
