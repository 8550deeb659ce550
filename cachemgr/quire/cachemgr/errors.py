"""Refusals of the core.

A refusal is a value. A refused item of a plan has it in the answer; a refused call raises it inside `CallRefused`. In
both cases the state is unchanged. `statuses.py` makes gRPC statuses of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.v1.reasons import Reason as Reason

SHOWN_NAME_LENGTH = 128
"""The most characters that an error quotes of an unknown name."""


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
