"""The methods of a worker: the roles that may call each, and the size of its messages.

Roles are checked only if the server authenticates callers.
"""

from __future__ import annotations

from quire.compute.v1.sampling_ranges import MAX_GRAMMAR_BYTES
from quire.serving.access import Role, Roles
from quire.serving.receiving import MAX_MESSAGE_BYTES

SERVICE = "/quire.compute.v1.WorkerService/"

CLIENT: Roles = frozenset({Role.CLIENT})
OPERATOR: Roles = frozenset({Role.OPERATOR})

ROLES: dict[str, Roles] = {
    f"{SERVICE}GetModel": CLIENT | OPERATOR,
    f"{SERVICE}CheckGrammar": CLIENT,
    f"{SERVICE}RunStep": CLIENT,
    f"{SERVICE}RunSteps": CLIENT,
    f"{SERVICE}GetStatistics": OPERATOR,
    f"{SERVICE}ChecksumBlocks": OPERATOR,
    f"{SERVICE}LoadAdapter": OPERATOR,
    f"{SERVICE}UnloadAdapter": OPERATOR,
}

# Bytes of a request. Methods that are not here take ids, names and numbers: SMALL_MESSAGE_BYTES.
MESSAGE_LIMITS: dict[str, int] = {
    f"{SERVICE}CheckGrammar": 4 * MAX_GRAMMAR_BYTES,  # one that is too long gets the message that says so
    f"{SERVICE}RunStep": MAX_MESSAGE_BYTES,
    f"{SERVICE}RunSteps": MAX_MESSAGE_BYTES,
}
