"""Refusals of the core.

A refusal is a value. A refused item of a plan has it in the answer; a refused call raises it inside `CallRefused`. In
both cases the state is unchanged. The table in `statuses.py` maps refusals to gRPC statuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SHOWN_NAME_LENGTH = 128
"""The most characters that an error quotes of an unknown name."""


class Reason(StrEnum):
    """Why; the names of quire.cache.v1.ErrorReason without their prefix."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    SEQUENCE_TOO_LONG = "SEQUENCE_TOO_LONG"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    POSITION_OUT_OF_RANGE = "POSITION_OUT_OF_RANGE"
    POOL_NOT_FOUND = "POOL_NOT_FOUND"
    LEASE_NOT_FOUND = "LEASE_NOT_FOUND"
    SEQUENCE_NOT_FOUND = "SEQUENCE_NOT_FOUND"
    PREFIX_NOT_CACHED = "PREFIX_NOT_CACHED"
    SEQUENCE_EXISTS = "SEQUENCE_EXISTS"
    EPOCH_CHANGED = "EPOCH_CHANGED"
    CURSOR_EXPIRED = "CURSOR_EXPIRED"
    NOTHING_TO_COMPUTE = "NOTHING_TO_COMPUTE"
    POOL_ALREADY_ATTACHED = "POOL_ALREADY_ATTACHED"
    TERM_SUPERSEDED = "TERM_SUPERSEDED"
    SEQUENCE_OFFLOADED = "SEQUENCE_OFFLOADED"
    SEQUENCE_BUSY = "SEQUENCE_BUSY"
    OUT_OF_BLOCKS = "OUT_OF_BLOCKS"
    OUT_OF_HOST_BLOCKS = "OUT_OF_HOST_BLOCKS"
    TOO_MANY_SEQUENCES = "TOO_MANY_SEQUENCES"
    TOO_MANY_STEPS = "TOO_MANY_STEPS"
    TOKEN_BUDGET_SPENT = "TOKEN_BUDGET_SPENT"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    PIN_BUDGET_SPENT = "PIN_BUDGET_SPENT"
    TOO_MANY_LEASES = "TOO_MANY_LEASES"
    OVERLOADED = "OVERLOADED"
    POOL_DETACHED = "POOL_DETACHED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    CREDENTIALS_MISSING = "CREDENTIALS_MISSING"
    TOKEN_REJECTED = "TOKEN_REJECTED"
    ROLE_MISSING = "ROLE_MISSING"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal: the reason, a sentence, and every number of the sentence by name."""

    reason: Reason
    message: str
    metadata: dict[str, str] = field(default_factory=dict)


class CallRefused(Exception):
    """A whole call was refused and changed nothing."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BrokenInvariant(Exception):
    """The books are wrong. Nothing may be granted any more: a wrong owner leaks one user's text to another."""


def refuse(reason: Reason, message: str, **metadata: object) -> Refusal:
    """Makes a refusal; the metadata's values become strings."""
    return Refusal(reason, message, {name: str(value) for name, value in metadata.items()})


def invalid(name: str, value: object, limit: str) -> Refusal:
    """A field that is out of range: names the field, its value and the limit."""
    return refuse(Reason.INVALID_ARGUMENT, f"{name} is {value}; must be {limit}", field=name, value=value, limit=limit)


def pool_not_found(name: str, *, num_pools: int) -> CallRefused:
    """No pool of this name; or no name, and not exactly one pool."""
    name = name[:SHOWN_NAME_LENGTH]
    if name or not num_pools:
        message = f"no pool {name!r} has been attached" if name else "no pool has been attached"
    else:
        message = f"{num_pools} pools are attached; name one"
    return CallRefused(refuse(Reason.POOL_NOT_FOUND, message, pool=name))


def lease_not_found(lease_id: str) -> CallRefused:
    """No such lease, any more or ever. Shows only the beginning of the id, which is a capability."""
    message = f"no lease {lease_id[:8]}…: it ended, expired, or belongs to an earlier cachemgr"
    return CallRefused(refuse(Reason.LEASE_NOT_FOUND, message, lease_id=lease_id[:8]))


def sequence_not_found(seq_id: int) -> Refusal:
    """The lease holds no such sequence."""
    return refuse(Reason.SEQUENCE_NOT_FOUND, f"the lease holds no sequence {seq_id}", sequence_id=seq_id)
