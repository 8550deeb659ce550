"""The methods of cachemgr: the roles that may call each, and the size of its messages.

Roles are checked only if the server authenticates callers.
"""

from __future__ import annotations

from quire.serving.access import Role, Roles
from quire.serving.receiving import MAX_MESSAGE_BYTES, PROMPT_MESSAGE_BYTES

SERVICE = "/quire.cache.v1.CacheService/"

CLIENT: Roles = frozenset({Role.CLIENT})
WORKER: Roles = frozenset({Role.WORKER})
OPERATOR: Roles = frozenset({Role.OPERATOR})

# AttachPool answers with the key that signs a pool's grants: it is for the worker only.
ROLES: dict[str, Roles] = {
    f"{SERVICE}{method}": roles
    for methods, roles in (
        (("CreateLease", "RenewLease", "DeleteLease", "PlanStep", "PlanSteps"), CLIENT),
        # A client that is no gateway asks for its own tenant only.
        (("LookupPrefix", "ExplainPrefix", "CheckAdmission"), CLIENT | OPERATOR),
        (("PinPrefix", "UnpinPrefix", "ListPins", "ResetPrefixCache"), CLIENT | OPERATOR),
        (("GetPool", "ListPools", "WatchPools"), CLIENT | OPERATOR),
        # A client sees its own tenant's data, an operator every tenant's.
        (("GetSequence", "ListLeases", "ListSequences", "ListBlocks", "WatchBlocks"), CLIENT | OPERATOR),
        (("ListTenants",), CLIENT | OPERATOR),
        (("AttachPool",), WORKER),
        (("GetStatistics", "AuditPool"), OPERATOR),
    )
    for method in methods
}

# Bytes of a request. Methods that are not here take ids, names and numbers: SMALL_MESSAGE_BYTES.
MESSAGE_LIMITS: dict[str, int] = {
    f"{SERVICE}{method}": limit
    for methods, limit in (
        (("AttachPool",), MAX_MESSAGE_BYTES),
        (
            (
                *("PlanStep", "PlanSteps", "LookupPrefix", "ExplainPrefix", "CheckAdmission", "PinPrefix"),
                "ResetPrefixCache",
            ),
            PROMPT_MESSAGE_BYTES,
        ),
    )
    for method in methods
}
