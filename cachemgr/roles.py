"""Which roles may call which method of cachemgr. Asked only where callers have to say who they are."""

from __future__ import annotations

from quire.serving.access import Role, Roles

SERVICE = "/quire.cache.v1.CacheService/"

CLIENT: Roles = frozenset({Role.CLIENT})
WORKER: Roles = frozenset({Role.WORKER})
OPERATOR: Roles = frozenset({Role.OPERATOR})

# AttachPool hands out the key that signs a pool's grants: it is the worker's alone.
ROLES: dict[str, Roles] = {
    f"{SERVICE}{method}": roles
    for methods, roles in (
        (("CreateLease", "RenewLease", "DeleteLease", "PlanStep", "PlanSteps"), CLIENT),
        (("LookupPrefix", "ExplainPrefix", "CheckAdmission", "PinPrefix", "UnpinPrefix"), CLIENT | OPERATOR),
        (("GetPool", "ListPools"), CLIENT | OPERATOR),
        # Of these a client sees its own tenant's, an operator everybody's.
        (("GetSequence", "ListLeases", "ListSequences", "ListBlocks", "WatchBlocks"), CLIENT | OPERATOR),
        (("ListTenants", "ListPins"), CLIENT | OPERATOR),
        (("AttachPool",), WORKER),
        (("GetStatistics", "AuditPool", "ResetPrefixCache"), OPERATOR),
    )
    for method in methods
}
