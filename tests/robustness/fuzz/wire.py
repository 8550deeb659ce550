"""Hostile messages of any type, written as bytes, so that they may be what protobuf's own classes refuse to write.

`Writer.message(descriptor)` draws one: most fields like those of a real request, some not. `Writer.mutate(descriptor,
data)` changes one that is there. Both are functions of the generator of random numbers alone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from robustness.fuzz import names
from robustness.fuzz.names import padded_varint, varint

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = range(6)
MAX_DEPTH = 6
MAX_VALUES = 200
"""Fields of one message, those within it counted, too; then the lists that follow are empty."""

INTEGERS = (0, 1, -1, 2, 63, 64, 65, 127, 128, 255, 256, 1000, 65536, 2**31 - 1, -(2**31), 2**31, 2**32, 2**53)
INTEGERS_64 = (*INTEGERS, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-45, 1e-38, 1e-7, 1e30, 3.4e38, float("inf"), -float("inf"), float("nan"))
NANOS = (0, 1, -1, 500_000_000, 999_999_999, 1_000_000_000, -(2**31), 2**31 - 1)
TEXTS = ("", "\0", "\n", "'", '"', "a b", "../..", "%s%n{}", "ä", "²", "٣", "\u202e", "\U0010ffff", "none", "9" * 40)
NO_TEXTS = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"default\xff", b"\xf4\x90\x80\x80", b"\x80")
LENGTHS = (64, 65, 127, 128, 129)
LONG = (1_000, 8_200, 70_000)
HEX = "0123456789abcdef"

Choose = Callable[[random.Random], Any]


def hexadecimal(digits: int) -> Choose:
    return lambda rng: "".join(rng.choices(HEX, k=digits))


def one_of(*values: Any) -> Choose:
    return lambda rng: rng.choice(values)


_POOL = one_of(*[names.OWN_POOL] * 8, names.CANARY_POOL, names.CANARY_POOL, "", *names.ATTACHED_POOLS, "none")
_LEASE = one_of(*names.OWN_LEASES, *names.LEASES, "")
_SEQUENCE = one_of(*range(8))
_COUNT = one_of(0, 1, 1, 1, 2, 3, 4, 5, 8, 16)
_EPOCH = one_of(names.OWN_EPOCH, names.OWN_EPOCH, names.OWN_EPOCH, names.CANARY_EPOCH, 0, 1)
_TOKEN = one_of(*names.TOKENS, 0, names.VOCABULARY - 1)

# What a field of this name, or with a name that ends like this, has in a request that makes sense. A field that is not
# here gets what its type can hold.
LIKELY: Mapping[str, Choose] = {
    "pool": _POOL,
    "lease_id": _LEASE,
    "lease_ids": _LEASE,
    "request_id": one_of("", "", "", "again", "r" * 64),
    "epoch": _EPOCH,
    "term": one_of(0, 0, names.OWN_EPOCH, 2**62),
    "sequence_id": _SEQUENCE,
    "sequence_ids": _SEQUENCE,
    "token_ids": _TOKEN,
    "block_id": one_of(0, 1, 2, 30),
    "block_ids": one_of(0, 1, 2, 30),
    "count": _COUNT,
    "counts": _COUNT,
    "tokens": one_of(16, 64, 100),
    "budget": one_of(0, 0, 8, 64),
    "size": one_of(0, 1, 10, names.VOCABULARY),
    "bytes": one_of(1, 1024),
    "priority": one_of(*range(1, 10)),
    "step_number": one_of(0, 1, 2, 3),
    "report_number": one_of(0, 1, 2, 3),
    "outcome": one_of(1, 1, 2, 3),
    "state": one_of(0, 0, 1, 2, 3, 4),
    "tenant": one_of("", "", "none"),
    "salt": one_of(b"", b"", b"salt", b"s" * 64),
    "adapter": one_of(b"", b"", bytes(32), b"a"),
    "seconds": one_of(1, 2, 60, 3600),
    "nanos": one_of(0, 0, 500_000_000),
    "pin_id": hexadecimal(32),
    "cursor": hexadecimal(32),
    "page_token": one_of("", "", "1", "7", "0" * 24, "0" * 24 + ".0000000001", "n00", "a" * 32, "default"),
    "worker_address": one_of("nowhere:1"),
    "temperature": one_of(0.0, 0.7, 1.0),
    "top_p": one_of(0.9, 1.0),
    "min_p": one_of(0.0, 0.1),
    "penalty": one_of(1.0, 1.5),
}


@cache
def likely(field: FieldDescriptor) -> Choose | None:
    """By the longest end of the field's name that is known."""
    parts = field.name.split("_")
    ends = ("_".join(parts[first:]) for first in range(len(parts)))
    return next((LIKELY[end] for end in ends if end in LIKELY), None)


class Writer:
    """Draws messages. `wildness`, 0 to 1, is how much of one is unlikely in a real request."""

    def __init__(self, rng: random.Random, wildness: float) -> None:
        self._rng = rng
        self._wildness = wildness
        self._num_values = 0

    def message(self, descriptor: Descriptor, depth: int = 0) -> bytes:
        """One of this type."""
        rng = self._rng
        length = rng.choice((0, 1, 1, 2, 3))  # of its lists: those that belong together are equally long
        skipped = {rng.choice(oneof.fields).name: oneof for oneof in descriptor.oneofs}
        parts = []
        for field in descriptor.fields:
            oneof = field.containing_oneof
            if oneof is not None and len(oneof.fields) > 1 and field.name not in skipped and not self._is_wild():
                continue
            if self._num_values < MAX_VALUES and rng.random() < (0.85 if depth == 0 else 0.7):
                parts.append(self.field(field, length, depth))
        if self._is_wild():
            parts.append(self._noise(descriptor))
            rng.shuffle(parts)
        return b"".join(parts)

    def field(self, field: FieldDescriptor, length: int, depth: int = 0) -> bytes:
        """A field with its tag; a list has `length` entries, or not."""
        rng = self._rng
        if not field.is_repeated:
            return self._single(field, depth)
        if self._is_wild():
            length = rng.choice((0, 0, 1, 1, 2, 5, 17)) if rng.random() < 0.97 else 150
        length = min(length, MAX_VALUES - self._num_values)
        if field.message_type is not None or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            return b"".join(self._single(field, depth) for _ in range(length))
        values = b"".join(self._value(field, depth) for _ in range(length))
        if self._is_wild() and rng.random() < 0.3:  # not packed, which is as good
            return b"".join(self._single(field, depth) for _ in range(length))
        return tag(field.number, BYTES) + varint(len(values)) + values if length else b""

    def _single(self, field: FieldDescriptor, depth: int) -> bytes:
        value = self._value(field, depth)
        kind = WIRE_TYPES.get(field.type, VARINT)
        if self._is_wild() and self._rng.random() < 0.1:
            kind = self._rng.randrange(8)
        return tag(field.number, kind) + (varint(len(value)) + value if kind == BYTES else value)

    def _value(self, field: FieldDescriptor, depth: int) -> bytes:
        """Without tag and length."""
        rng = self._rng
        self._num_values += 1
        if field.message_type is not None:
            if depth >= MAX_DEPTH:
                return b""
            stub = self._grant() if field.message_type.name == "SignedGrant" and not self._is_wild() else None
            return self.message(field.message_type, depth + 1) if stub is None else stub
        choose = None if self._is_wild() else likely(field)
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            value = self._text() if choose is None else choose(rng)
            return value.encode() if isinstance(value, str) else value
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            value = choose(rng) if choose is not None else rng.choice(FLOATS)
            return struct.pack("<f" if field.type == FieldDescriptor.TYPE_FLOAT else "<d", value)
        if choose is not None:
            return varint(choose(rng))
        if field.type == FieldDescriptor.TYPE_BOOL and not self._is_wild():
            return varint(rng.randrange(2))
        if field.type == FieldDescriptor.TYPE_INT32:
            return varint(rng.choice(NANOS if field.name == "nanos" else INTEGERS))
        return padded_varint(rng.choice(INTEGERS_64), rng.choice((1, 1, 1, 10, 11)))

    def _grant(self) -> bytes:
        """A SignedGrant."""
        kind = self._rng.choice((names.NEXT, names.NEXT, names.NEXT, names.RAN, names.FENCED))
        return signed_grant(kind, GRANT_BYTES[0])

    def _text(self) -> str | bytes:
        rng = self._rng
        if rng.random() < 0.4:
            return rng.choice(NO_TEXTS)
        if rng.random() < 0.6:
            return rng.choice(TEXTS)
        return rng.choice(("x", "'", "\n", "ä", "\0")) * rng.choice(LONG if rng.random() < 0.1 else LENGTHS)

    def _noise(self, descriptor: Descriptor) -> bytes:
        """An unknown field of the message, or a repeated one."""
        rng = self._rng
        match rng.randrange(6):
            case 0:
                return tag(rng.choice((99, 15_000, 2**29 - 1, 0)), VARINT) + varint(rng.choice(INTEGERS_64))
            case 1:
                text = rng.randbytes(rng.choice((0, 3, 200)))
                return tag(rng.randrange(1, 100), BYTES) + varint(len(text)) + text
            case 2:
                depth = rng.choice((1, 50, 99, 101, 5_000))
                return tag(77, GROUP) * depth + tag(77, END_GROUP) * (depth - rng.randrange(2))
            case 3:
                return tag(rng.randrange(1, 20), BYTES) + varint(rng.choice((2**31 - 1, 2**32, 2**63)))  # of nothing
            case 4:
                return tag(rng.randrange(1, 60), rng.randrange(8)) + rng.randbytes(rng.randrange(12))
            case _:
                fields = descriptor.fields
                return self._single(rng.choice(fields), MAX_DEPTH - 1) if fields else b"\x08"

    def mutate(self, descriptor: Descriptor, data: bytes) -> bytes:
        """A message of this type with one to four changes, in its fields or in its bytes."""
        for _ in range(self._rng.choice((1, 1, 1, 2, 2, 4))):
            data = self._change_fields(descriptor, data) if self._rng.random() < 0.7 else self._change_bytes(data)
        return data

    def _change_fields(self, descriptor: Descriptor, data: bytes) -> bytes:
        """One field changed, added, repeated, or removed, at some depth. The lengths of the messages around it fit."""
        rng = self._rng
        fields = split(data)
        if not fields or rng.random() < 0.1:
            if not descriptor.fields:
                return data + self._noise(descriptor)
            return data + self.field(rng.choice(descriptor.fields), rng.randrange(3), 1)
        at = rng.randrange(len(fields))
        number, kind, payload = fields[at]
        known = descriptor.fields_by_number.get(number)
        if known is not None and known.message_type is not None and kind == BYTES and rng.random() < 0.8:
            fields[at] = number, kind, self._change_fields(known.message_type, payload)
            return join(fields)
        match rng.randrange(6):
            case 0:
                del fields[at]
            case 1:
                fields.insert(rng.randrange(len(fields) + 1), fields[at])
            case 2:
                fields[at] = number, kind, self._change_bytes(payload)
            case 3:
                rng.shuffle(fields)
            case _ if known is not None:
                return join(fields[:at]) + self.field(known, rng.randrange(4), 1) + join(fields[at + 1 :])
            case _:
                fields[at] = rng.randrange(1, 60), kind, payload
        return join(fields)

    def _change_bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                return data[:at]
            case 1:
                return data[:at] + rng.randbytes(rng.choice((1, 1, 2, 8))) + data[at:]
            case 2:
                return data[:at] + data[at + rng.choice((1, 1, 2, 8)) :]
            case 3:
                end = at + rng.choice((1, 2, 8, 40))
                return data[:end] + data[at:]
            case 4 if data:
                at %= len(data)
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case _:
                return data[:at] + bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))]) + data[at + 1 :]

    def _is_wild(self) -> bool:
        return self._rng.random() < self._wildness


GRANT_BYTES = [100]
WIRE_TYPES = {
    FieldDescriptor.TYPE_STRING: BYTES,
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_MESSAGE: BYTES,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
}


@cache
def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def signed_grant(kind: bytes, size: int) -> bytes:
    """A SignedGrant of stand-ins."""
    grant, signed = kind * size, names.signature(kind)
    return tag(1, BYTES) + varint(size) + grant + tag(2, BYTES) + varint(len(signed)) + signed


def split(data: bytes) -> list[tuple[int, int, bytes]]:
    """Numbers, wire types and payloads of the fields at the top, as far as they can be read."""
    fields, at = [], 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        size = {FIXED64: 8, FIXED32: 4}.get(kind, 0)
        if kind == BYTES:
            size, at = read_varint(data, at)
        elif kind == VARINT:
            size = read_varint(data, at)[1] - at
        payload = data[at : at + size]
        fields.append((number, kind, payload))
        at += size
    return fields


def join(fields: list[tuple[int, int, bytes]]) -> bytes:
    """Back again."""
    return b"".join(
        tag(number, kind) + (varint(len(payload)) + payload if kind == BYTES else payload)
        for number, kind, payload in fields
    )


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and its end; a truncated one counts with its bytes."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            break
    return value, at
