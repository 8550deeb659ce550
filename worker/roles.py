"""Which roles may call which method of a worker. Asked only where callers have to say who they are."""

from __future__ import annotations

from quire.serving.access import Role, Roles

SERVICE = "/quire.compute.v1.WorkerService/"

CLIENT: Roles = frozenset({Role.CLIENT})
OPERATOR: Roles = frozenset({Role.OPERATOR})

ROLES: dict[str, Roles] = {
    f"{SERVICE}GetModel": CLIENT | OPERATOR,
    f"{SERVICE}RunStep": CLIENT,
    f"{SERVICE}RunSteps": CLIENT,
    f"{SERVICE}GetStatistics": OPERATOR,
    f"{SERVICE}ChecksumBlocks": OPERATOR,
}
