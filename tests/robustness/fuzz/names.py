"""The names that messages may use, and their objects.

Ids of leases and signed grants are other ones in every run. So messages are made with stand-ins of the same lengths,
which are replaced when they are sent: message k of seed s is the same bytes in every run.

    default   the worker's pool. The canary lives there; it is never to change
    fuzzing   a pool without tensors, where messages that happen to be valid may take effect
    fuzz-*    names under which messages may register pools of their own
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from robustness.fuzz.surface import Method

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr.service.messages import MAX_BLOCKS

CANARY_POOL, OWN_POOL = "default", "fuzzing"  # of one length
ATTACHED_POOLS = ("fuzz-a", "fuzz-b", "fuzz-c")
OWN_EPOCH = 7
CANARY_EPOCH = int.from_bytes(b"\x5a" * 8, "big")
"""Stands for the epoch of the worker's pool, which is random; nine bytes on the wire, as any below 2^63 can be."""
TOKENS = (3, 1, 4, 1, 5)
"""The prompt of all valid plans."""
VOCABULARY = 100

CANARY_LEASE = "canary".ljust(32, "-")
OWN_LEASES = tuple(f"own-{number}".ljust(32, "-") for number in range(3))
GONE_LEASE = "gone".ljust(32, "-")
LEASES = (*OWN_LEASES, CANARY_LEASE, GONE_LEASE)

NEXT, RAN, FENCED = b"N", b"R", b"F"
"""Grants: of a step that may run, of one that ran, of a lease that has ended; each stands for a whole one."""
SIGNATURE_BYTES = 32

# By method: what may change the pool that it names, or end the lease.
POOL_CHANGERS = {"CreateLease", "PinPrefix", "UnpinPrefix", "ResetPrefixCache"}
LEASE_ENDERS = {"DeleteLease"}
MAX_OWN_BLOCKS = 64
"""The geometry of a pool that a message registers: its books are real."""


def signature(grant: bytes) -> bytes:
    """The stand-in for a grant's signature."""
    return grant.lower() * SIGNATURE_BYTES


SHORT = [bytes([value]) for value in range(0x80)]


def varint(value: int) -> bytes:
    """As protobuf has it: negative numbers are 64 bits wide."""
    if 0 <= value < 0x80:
        return SHORT[value]
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def padded_varint(value: int, size: int) -> bytes:
    """In exactly so many bytes, which decoders accept."""
    encoded = bytearray(varint(value))
    while len(encoded) < size:
        encoded[-1] |= 0x80
        encoded.append(0)
    return bytes(encoded)


@dataclass
class Bindings:
    """The present values of the stand-ins."""

    leases: dict[str, str] = field(default_factory=dict)
    canary_epoch: int = CANARY_EPOCH
    grant_bytes: int = 100
    grants: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    """Grant and signature."""

    def bind(self, data: bytes) -> bytes:
        """The bytes to send; as many."""
        if b"----" in data:
            for name, lease_id in self.leases.items():
                data = data.replace(name.encode(), lease_id.encode())
        placeholder = varint(CANARY_EPOCH)
        if placeholder in data:
            data = data.replace(placeholder, padded_varint(self.canary_epoch, len(placeholder)))
        for kind, (grant, signed) in self.grants.items():
            if kind * 16 in data:
                data = data.replace(kind * self.grant_bytes, grant)
            if signature(kind) in data:
                data = data.replace(signature(kind), signed)
        return data


def confine(method: Method, data: bytes) -> bytes:
    """The message, changed so that it can't affect the canary unless a server has a defect.

    A method that changes the object that it names gets other names. A plan of the canary's lease gets an item that
    has to be refused; which one depends on the message alone. Bytes that are no message stay unchanged.
    """
    if method.name in POOL_CHANGERS:
        return data.replace(CANARY_POOL.encode(), OWN_POOL.encode())
    if method.name in LEASE_ENDERS:
        return data.replace(CANARY_LEASE.encode(), OWN_LEASES[0].encode())
    if method.name not in CONFINED:
        return data
    try:
        message = method.request_class.FromString(data)
    except DecodeError:
        return data
    return CONFINED[method.name](message, data)


def _confine_plan(message: cache_service_pb2.PlanStepRequest, data: bytes) -> bytes:
    return _spoiled(message, data) if message.lease_id == CANARY_LEASE else data


def _confine_plans(message: cache_service_pb2.PlanStepsRequest, data: bytes) -> bytes:
    if message.plan.lease_id != CANARY_LEASE:
        return data
    return cache_service_pb2.PlanStepsRequest(
        plan=cache_service_pb2.PlanStepRequest.FromString(_spoiled(message.plan, data))
    ).SerializeToString()


def _spoiled(plan: cache_service_pb2.PlanStepRequest, data: bytes) -> bytes:
    match random.Random(data).randrange(7):
        case 0:
            plan.epoch ^= 1
            plan.epoch = plan.epoch if plan.epoch != CANARY_EPOCH else 1
        case 1:
            plan.request_id = "r" * 65
        case 2:
            plan.trim_sequence_ids.extend([1] * (1 + max(0, len(plan.trim_token_counts) - len(plan.trim_sequence_ids))))
        case 3:
            plan.admission_token_budget = -1
        case 4:
            plan.admission_reserve_block_count = -(2**31)
        case 5:
            plan.forks.add(parent_sequence_id=1)
        case 6:
            missing = max(0, len(plan.extends.sequence_ids) - len(plan.extends.token_counts))
            plan.extends.token_counts.extend([1] * (1 + missing))
    return plan.SerializeToString()


def _confine_attachment(message: attach_pb2.AttachPoolRequest, data: bytes) -> bytes:
    """A registered pool is a small one that only this test uses, or is refused for its epoch."""
    if message.WhichOneof("message") != "register_pool":
        return data
    registration = message.register_pool
    is_another = registration.pool in (CANARY_POOL, OWN_POOL)
    if is_another and registration.epoch not in (OWN_EPOCH, CANARY_EPOCH, 0):
        return data
    if registration.pool in ATTACHED_POOLS and registration.geometry.block_count <= MAX_OWN_BLOCKS:
        return data
    if registration.pool in (CANARY_POOL, OWN_POOL) or is_pool_name(registration.pool):
        registration.pool = ATTACHED_POOLS[len(data) % len(ATTACHED_POOLS)]
    if MAX_OWN_BLOCKS < registration.geometry.block_count <= MAX_BLOCKS:
        registration.geometry.block_count = MAX_OWN_BLOCKS
    return message.SerializeToString()


def is_pool_name(name: str) -> bool:
    return (
        bool(name) and len(name) <= 128 and all(char.isascii() and (char.isalnum() or char in "._-") for char in name)
    )


CONFINED: Mapping[str, Callable[[Any, bytes], bytes]] = {
    "PlanStep": _confine_plan,
    "PlanSteps": _confine_plans,
    "AttachPool": _confine_attachment,
}
