"""The header of a copy on the disk: its hash, its tenant, and the checksums.

A copy is used only if its header is whole, of this version, of a pool with the same mark, and if the content has the
checksum in it. So nothing depends on the order in which a disk has written what, or on whether it has.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MAGIC = b"quire-kv"
VERSION = 1
HEADER_BYTES = 256
MAX_TENANT_BYTES = 128
"""A copy of a tenant with a longer name is not written."""
BEING_WRITTEN = b"\xff" * HEADER_BYTES
"""In the place of a header, while the content is being written."""
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("group", "<u4"),
        ("mark", "V32"),
        ("prefix_hash", "V32"),
        ("number", "<u8"),
        ("content_checksum", "<u4"),
        ("tenant_size", "<u4"),
        ("tenant", "V128"),
        ("padding", "V28"),
        ("checksum", "<u4"),
    ]
)
FIELDS = struct.Struct("<8x4xI32x32sQII128s28xI")
"""The same without what is checked for all headers together: many times faster for one of them."""
assert HEADER.itemsize == FIELDS.size == HEADER_BYTES
CHECKED_BYTES = HEADER_BYTES - 4
"""Of a header, before its own checksum."""


class Record(NamedTuple):
    """The description of a copy.

    group       the layer group of its content
    number      rises from one written copy to the next
    """

    prefix_hash: bytes
    group: int
    tenant: str
    number: int
    content_checksum: int

    def encode(self, mark: bytes) -> bytes:
        """Return the header. `mark` is of 32 bytes: equal for pools that can have each other's copies."""
        header = np.zeros(1, HEADER)
        name = self.tenant.encode()
        values = {
            "magic": MAGIC,
            "version": VERSION,
            "group": self.group,
            "mark": np.void(mark),
            "prefix_hash": np.void(self.prefix_hash),
            "number": self.number,
            "content_checksum": self.content_checksum,
            "tenant_size": len(name),
            "tenant": np.void(name.ljust(MAX_TENANT_BYTES, b"\0")),
        }
        for name_of_field, value in values.items():
            header[name_of_field] = value
        header["checksum"] = zlib.crc32(header.tobytes()[:CHECKED_BYTES])
        return header.tobytes()


@dataclass(slots=True)
class Refused:
    """Headers that are not used, by the reason."""

    other_version: int = 0
    other_pool: int = 0
    """Of another model, dtype, layout or block size."""
    damaged: int = 0
    """Changed or cut off."""
    unreadable: list[str] = field(default_factory=list)
    """Files that can't be read or written, with the reason."""

    def add(self, other: Refused) -> None:
        self.other_version += other.other_version
        self.other_pool += other.other_pool
        self.damaged += other.damaged

    def __bool__(self) -> bool:
        return bool(self.other_version or self.other_pool or self.damaged or self.unreadable)

    def __str__(self) -> str:
        counts = f"other_version={self.other_version} other_pool={self.other_pool} damaged={self.damaged}"
        return f"{counts} unreadable={self.unreadable}"


@dataclass(frozen=True, slots=True)
class Headers:
    """The copies that headers describe, by their index, and the indexes of those that are not used."""

    records: dict[int, Record]
    unused: list[int]
    refused: Refused


def decode_headers(headers: bytes, mark: bytes) -> Headers:
    """Return what is there for a pool with this mark. Cost: some microseconds for each header that is not empty."""
    rows = np.frombuffer(headers[: len(headers) // HEADER_BYTES * HEADER_BYTES], HEADER)
    is_there = rows["magic"] == MAGIC
    is_empty = ~np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, HEADER_BYTES).any(axis=1)
    is_current = is_there & (rows["version"] == VERSION)
    is_ours = is_current & (rows["mark"] == np.void(mark))
    refused = Refused(
        other_version=int((is_there & ~is_current).sum()),
        other_pool=int((is_current & ~is_ours).sum()),
        damaged=int((~is_there & ~is_empty).sum()),
    )
    records = {}
    for index in np.flatnonzero(is_ours).tolist():
        record = decode_header(headers[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
        if record is None:
            refused.damaged += 1
        else:
            records[index] = record
    unused = [index for index in np.flatnonzero(~is_empty).tolist() if index not in records]
    return Headers(records, unused, refused)


def decode_header(header: bytes) -> Record | None:
    """Return the copy that a header of this version describes; None if the header was changed."""
    group, prefix_hash, number, content_checksum, tenant_size, tenant, checksum = FIELDS.unpack(header)
    if zlib.crc32(header[:CHECKED_BYTES]) != checksum:
        return None
    return Record(prefix_hash, group, tenant[:tenant_size].decode(errors="replace"), number, content_checksum)
