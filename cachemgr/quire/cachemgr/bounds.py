"""Limits on objects that callers create: beyond them calls are refused, so that nothing grows without bound.

docs/how-to/operations.md has the sum of the limits of the process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from quire.cachemgr.errors import CallRefused, Reason, refuse

MAX_LEASES = 10_000
"""Unless the operator sets another limit."""
MAX_LEASE_ANSWERS = 4_096
"""Answers to CreateLease that are kept, for repeated calls."""
MAX_WAITING_ADMISSIONS = 1_024
"""Plans with admissions that wait for their turn."""
MAX_WATCHES = 256
MAX_ATTACHMENTS = 1_024
RECOUNT_INTERVAL_S = 0.1


class Places:
    """A limited number of concurrent uses; one more is refused."""

    def __init__(self, limit: int, what: str) -> None:
        """`what` names the uses in the refusal: "watches"."""
        self._limit = limit
        self._what = what
        self.num_taken = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Takes a place for the block. Raises CallRefused (OVERLOADED)."""
        if self.num_taken >= self._limit:
            raise overloaded(self._what, self._limit)
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1


class Drain:
    """The end of the service: no new plans and leases once it has begun."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self) -> None:
        self._has_begun = True

    def refuse_new(self) -> None:
        """Raises CallRefused (SHUTTING_DOWN)."""
        if self._has_begun:
            raise CallRefused(refuse(Reason.SHUTTING_DOWN, "cachemgr is shutting down"))


class LeaseCounts:
    """The number of leases, of each tenant and in all, those being fenced included.

    The end of a lease is not reported here. So leases are counted when they are made; when the count reaches a limit,
    the existing leases are counted again, at most every RECOUNT_INTERVAL_S: refused calls cost nothing.

    is_there       returns True if a lease still exists
    limit          of all leases
    tenant_limit   of a tenant's; None: the limit of all
    """

    def __init__(
        self, is_there: Callable[[str], bool], *, limit: int, tenant_limit: Callable[[str], int | None]
    ) -> None:
        self._is_there = is_there
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._leases: dict[str, set[str]] = {}
        self._num_leases = 0
        self._recounted_at = -math.inf

    def add(self, lease_id: str, tenant: str) -> None:
        """A lease was made."""
        self._leases.setdefault(tenant, set()).add(lease_id)
        self._num_leases += 1

    def refuse_another(self, tenant: str, now: float) -> None:
        """Raises CallRefused (TOO_MANY_LEASES) if the tenant can't have one more."""
        if self._refusal(tenant) is not None and now - self._recounted_at >= RECOUNT_INTERVAL_S:
            self._recount()
            self._recounted_at = now
        refused = self._refusal(tenant)
        if refused is not None:
            raise refused

    def _refusal(self, tenant: str) -> CallRefused | None:
        limit = self._tenant_limit(tenant)
        if limit is not None and len(self._leases.get(tenant, ())) >= limit:
            return too_many_leases(limit, limited_by="tenant")
        if self._num_leases >= self._limit:
            return too_many_leases(self._limit, limited_by="server")
        return None

    def _recount(self) -> None:
        present = {tenant: set(filter(self._is_there, leases)) for tenant, leases in self._leases.items()}
        self._leases = {tenant: leases for tenant, leases in present.items() if leases}
        self._num_leases = sum(map(len, self._leases.values()))


def too_many_leases(limit: int, *, limited_by: str) -> CallRefused:
    """There are as many leases as there may be, of the "tenant" or of the "server"."""
    message = f"there are {limit} leases, as many as the {limited_by} may have"
    return CallRefused(refuse(Reason.TOO_MANY_LEASES, message, limit=limit, limited_by=limited_by))


def overloaded(what: str, limit: int) -> CallRefused:
    """The limit of concurrent `what` is reached."""
    return CallRefused(refuse(Reason.OVERLOADED, f"there are {limit} {what} already", limit=limit))
