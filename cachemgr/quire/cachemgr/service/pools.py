"""The pools as a caller may see them, in their present state.

A caller that is no operator sees its own tenant's data only. Answers do not disclose that other tenants exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from typing import Literal, Protocol

from quire.cachemgr._core import Lease, SequenceView
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.errors import CallRefused, Reason, Refusal, lease_not_found
from quire.cachemgr.service import messages
from quire.cachemgr.service.roles import SERVICE
from quire.cachemgr.service.statuses import DOMAIN
from quire.serving import access
from quire.serving.access import Role, caller


class HasTenant(Protocol):
    """A message with `optional string tenant`."""

    tenant: str

    def HasField(self, field_name: Literal["tenant"]) -> bool: ...  # noqa: N802


class VisiblePools:
    """The access of every part of the service to the pools."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._clock = clock

    def pool(self, name: str) -> AttachedPool:
        """The pool of this name, without one the only pool. Raises CallRefused (POOL_NOT_FOUND)."""
        return self._as_it_is_now(self._catalog.pool(name))

    def pools(self, name: str) -> list[AttachedPool]:
        """The pool of this name, all pools without one. Raises CallRefused (POOL_NOT_FOUND)."""
        return [self.pool(name)] if name else [self._as_it_is_now(pool) for pool in self._catalog.pools()]

    def _as_it_is_now(self, pool: AttachedPool) -> AttachedPool:
        """The pool without expired pins and advice.

        Calls that read them get a pool through here, except WatchBlocks, which waits for their ends.
        """
        pool.ledger.advance(self._clock())
        return pool

    def is_own(self, lease_id: str) -> bool:
        """True if it is a lease of the caller's tenant."""
        return self._catalog.tenant_of(lease_id) == caller().name

    def own_pool(self, lease_id: str) -> AttachedPool:
        """The pool that a lease of the caller's tenant is for. Raises CallRefused (LEASE_NOT_FOUND)."""
        if not self.is_own(lease_id):
            raise lease_not_found(lease_id)
        return self.pool_of(lease_id)

    def visible_pool(self, lease_id: str) -> AttachedPool:
        """The pool of a lease: of any lease if the caller sees all. Raises CallRefused (LEASE_NOT_FOUND)."""
        return self.pool_of(lease_id) if sees_all() else self.own_pool(lease_id)

    def pool_of(self, lease_id: str) -> AttachedPool:
        return self._as_it_is_now(self._catalog.pool_of(lease_id))

    def lease_id_of(self, given: str) -> str:
        """The id of the only visible lease that begins with the given text; else the given text.

        For reading only: the beginning of an id, unlike the id, gives no right to use the lease. Cost: O(leases).
        """
        if len(given) != messages.SHOWN_LEASE_ID_LENGTH:
            return given
        leases = (lease for pool in self._catalog.pools() for lease in pool.ledger.inspector.leases())
        found = [lease.lease_id for lease in leases if lease.lease_id.startswith(given) and self._is_shown(lease)]
        return found[0] if len(found) == 1 else given

    def sequence(self, lease_id: str, seq_id: int) -> SequenceView | None:
        """A sequence: of any lease if the caller sees all, of its own leases, or of its own tenant in others' leases.

        Raises CallRefused (LEASE_NOT_FOUND).
        """
        ledger = self.pool_of(lease_id).ledger
        lease = ledger.inspector.lease(lease_id)
        if not self._is_shown(lease):
            raise lease_not_found(lease_id)
        sequence = ledger.inspector.sequence(lease_id, seq_id)
        is_own = sequence is None or sequence.tenant == caller().name
        return sequence if is_own or is_visible(lease) else None

    def _is_shown(self, lease: Lease) -> bool:
        """True if a list of sequences shows the caller a sequence of the lease."""
        if is_visible(lease):
            return True
        ledger = self._catalog.pool_of(lease.lease_id).ledger
        return bool(ledger.inspector.sequences_from(lease.lease_id, 0, 1, tenant=caller().name))

    def shown_adapters(self) -> Set[str] | None:
        """The names of the adapters that the caller sees: those that its tenant may use. None: all."""
        names_others = caller().roles & {Role.OPERATOR, Role.GATEWAY}
        return None if names_others else self._catalog.adapters_of(caller().name)

    def wall_clock_offset_s(self) -> float:
        """The seconds by which the wall clock is ahead of the clock."""
        return time.time() - self._clock()


def sees_all() -> bool:
    """True if the caller may see other tenants' data."""
    return Role.OPERATOR in caller().roles


def tenant_asked_for(method: str, message: HasTenant) -> str:
    """The tenant that a message names, else the caller's.

    Raises CallRefused (ROLE_MISSING) if it is another one and the caller is neither operator nor gateway.
    """
    tenant = message.tenant if message.HasField("tenant") else caller().name
    if tenant != caller().name:
        require_role(method, Role.OPERATOR, Role.GATEWAY)
    return tenant


def tenant_asked_about(method: str, message: HasTenant) -> str | None:
    """Return the tenant as tenant_asked_for does. An operator that names none gets None: every tenant."""
    return None if sees_all() and not message.HasField("tenant") else tenant_asked_for(method, message)


def is_visible(lease: Lease) -> bool:
    """True if the caller may see this lease."""
    return sees_all() or lease.tenant == caller().name


def require_role(method: str, *roles: Role) -> None:
    """Refuses a caller without one of the roles, for a part of a method that only these may use.

    Raises CallRefused (ROLE_MISSING).
    """
    if not caller().roles & set(roles):
        status = access.role_missing(f"{SERVICE}{method}", frozenset(roles), caller().name, DOMAIN)
        raise CallRefused(Refusal(Reason[status.reason], status.message, dict(status.metadata)))
