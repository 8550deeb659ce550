"""The gate: which steps may run. A grant passes if its signature, epoch, lease and step number are right.

The gate holds the worker's side of the ownership protocol and no tensors. What passes has its number used up and runs.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.cache.v1 import grant_pb2
from quire.worker.grant.errors import Reason, Refused, invalid

SHOWN_LEASE_ID_LENGTH = 8
MAX_UNSIGNED_BYTES = 1 << 20
"""The size limit of a grant without a valid signature; it is decoded only to find if it is of another epoch."""


@dataclass(frozen=True, slots=True)
class GateStatistics:
    epoch: int
    term: int
    num_open_leases: int


class Gate:
    """Leases that are open in the present epoch, each with the number of its next step."""

    def __init__(self, pool: str, epoch: int) -> None:
        self.pool = pool
        self._epoch = epoch
        self._highest_term = 0
        self._attached_term = 0
        self._signing_key: bytes | None = None
        self._next_step: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def highest_term(self) -> int:
        """The highest term obeyed, 0 if none."""
        return self._highest_term

    @property
    def attached_term(self) -> int:
        """The term under which the present epoch was attached, 0 if it never was."""
        return self._attached_term

    @property
    def next_steps(self) -> Mapping[str, int]:
        """The number of the next step of each open lease."""
        return self._next_step

    def begin_epoch(self, epoch: int) -> None:
        """Refuse all grants of earlier epochs from now on."""
        self._epoch = epoch
        self._attached_term = 0
        self._signing_key = None
        self._next_step.clear()

    def attach(self, term: int, signing_key: bytes, open_lease_ids: Iterable[str]) -> list[str]:
        """A cachemgr rules from here on; returns the leases that are not open any more. Refuses a lower term."""
        self.obey(term)
        self._attached_term = term
        self._signing_key = signing_key
        lease_ids = set(open_lease_ids)
        ended = [lease_id for lease_id in self._next_step if lease_id not in lease_ids]
        for lease_id in ended:
            self.fence_lease(lease_id)
        for lease_id in lease_ids:
            self.open_lease(lease_id)
        return ended

    def obey(self, term: int) -> None:
        """Raises ValueError if a newer cachemgr was obeyed before."""
        if term < self._highest_term:
            raise ValueError(f"term {term} is below {self._highest_term}, which was obeyed before")
        self._highest_term = term

    def open_lease(self, lease_id: str) -> None:
        """Accepts the lease's steps, from step 1 on. No effect on a lease that is open."""
        self._next_step.setdefault(lease_id, 1)

    def fence_lease(self, lease_id: str) -> None:
        """Refuses the lease's steps. No effect on a lease that is not open."""
        self._next_step.pop(lease_id, None)

    def check_unread(self, signed: grant_pb2.SignedGrant, *, max_bytes: int) -> None:
        """Refuse a grant by its size and, if it is large, by its signature. Raises Refused and changes nothing.

        `max_bytes` is the size that no grant for this pool exceeds; one of an earlier epoch may have been larger.
        """
        size = len(signed.grant)
        if size <= MAX_UNSIGNED_BYTES:
            return
        if size > max_bytes:
            raise invalid("grant.grant", f"{size} bytes", f"at most {max(max_bytes, MAX_UNSIGNED_BYTES)} bytes")
        self._check_signature(signed)

    def _check_signature(self, signed: grant_pb2.SignedGrant) -> None:
        if self._signing_key is None:
            message = f"no cachemgr rules pool {self.pool!r} right now"
            raise Refused(Reason.POOL_DETACHED, message, pool=self.pool)
        if not hmac.compare_digest(hmac.digest(self._signing_key, signed.grant, "sha256"), signed.signature):
            raise Refused(Reason.BAD_SIGNATURE, "cachemgr has not signed this grant")

    def check(self, signed: grant_pb2.SignedGrant, grant: grant_pb2.StepGrant) -> None:
        """Refuse a step that may not run now. Raises Refused and changes nothing."""
        if grant.epoch != self._epoch or grant.pool != self.pool:
            message = f"the grant is for epoch {grant.epoch} of pool {grant.pool!r}; this is {self._epoch}"
            raise Refused(Reason.EPOCH_CHANGED, message, value=grant.epoch, epoch=self._epoch)
        self._check_signature(signed)
        next_step = self._next_step.get(grant.lease_id)
        if next_step is None:
            shown = grant.lease_id[:SHOWN_LEASE_ID_LENGTH]
            raise Refused(Reason.LEASE_FENCED, f"lease {shown}… has ended", lease_id_prefix=shown)
        if grant.step_number != next_step:
            message = f"the grant is for step {grant.step_number}; the lease's next step is {next_step}"
            raise Refused(Reason.STEP_OUT_OF_ORDER, message, value=grant.step_number, limit=next_step)

    def use(self, grant: grant_pb2.StepGrant) -> None:
        """Uses up the number of a checked step: it counts as run, whatever its outcome."""
        self._next_step[grant.lease_id] = grant.step_number + 1

    def statistics(self) -> GateStatistics:
        return GateStatistics(self._epoch, self._highest_term, len(self._next_step))
