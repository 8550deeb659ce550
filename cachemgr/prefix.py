"""The prefix index: which block holds the KV of which tokens.

Identity of a full block is a SHA-256 chained on its parent's, rooted in tenant, salt and model: equal hashes mean equal
tokens from position 0 on, so a hit needs no verification.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from quire.cachemgr.errors import BrokenInvariant

TOKEN_BYTES = 4
"""A token id is kept as a little-endian int32."""


def root_hash(*, tenant: str, salt: bytes, model_fingerprint: str) -> bytes:
    """The parent of a sequence's first block, 32 bytes. Each part is hashed with its length: no two splits collide."""
    root = sha256(b"quire prefix v1")
    for part in (tenant.encode(), salt, model_fingerprint.encode()):
        root.update(len(part).to_bytes(8, "little"))
        root.update(part)
    return root.digest()


def chain_hashes(parent: bytes, tokens: bytes | bytearray, *, block_bytes: int) -> list[bytes]:
    """Prefix hashes of the full blocks of `tokens`, each chained on the one before, the first on `parent`.

    `block_bytes` is the length of a full block's tokens; a partial tail is ignored. Cost: one SHA-256 per block.
    """
    hashes = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = sha256(parent + tokens[start : start + block_bytes]).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """What the index did since it was made, and holds."""

    num_published: int
    num_indexed: int


class PrefixIndex:
    """From prefix hash to block and back. Holds only blocks whose content was computed."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._num_published = 0

    def lookup(self, prefix_hash: bytes) -> int | None:
        """The block that holds this prefix's last block, or None."""
        return self._block_of.get(prefix_hash)

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash the block can be found by, or None."""
        return self._hash_of[block_id]

    def publish(self, prefix_hash: bytes, block_id: int) -> int:
        """Makes a computed block findable; returns the block that stands for the hash: the first one published."""
        standing = self._block_of.setdefault(prefix_hash, block_id)
        if standing == block_id and self._hash_of[block_id] is None:
            self._hash_of[block_id] = prefix_hash
            self._num_published += 1
        return standing

    def forget(self, block_id: int) -> None:
        """The block can't be found any more. No effect on one that could not."""
        prefix_hash = self._hash_of[block_id]
        if prefix_hash is not None:
            del self._block_of[prefix_hash]
            self._hash_of[block_id] = None

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics(num_published=self._num_published, num_indexed=len(self._block_of))

    def violations(self) -> Iterator[str]:
        """Disagreements between the two directions, one sentence each."""
        for prefix_hash, block_id in self._block_of.items():
            if self._hash_of[block_id] != prefix_hash:
                yield f"index finds block {block_id} by a hash that the block does not have"
        hashed = sum(prefix_hash is not None for prefix_hash in self._hash_of)
        if hashed != len(self._block_of):
            yield f"{hashed} blocks have a hash, the index finds {len(self._block_of)}"

    def check_invariants(self) -> None:
        """Raises BrokenInvariant with the first violation. Cost: O(blocks)."""
        for violation in self.violations():
            raise BrokenInvariant(violation)
