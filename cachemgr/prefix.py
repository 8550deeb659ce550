"""The prefix index: which block holds the KV of which tokens.

Identity of a full block is a SHA-256 chained on its parent's, rooted in tenant, salt and model: equal hashes mean equal
tokens from position 0 on, so a hit needs no verification.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from quire.cachemgr.errors import BrokenInvariant

TOKEN_BYTES = 4
"""A token id is kept as a little-endian int32."""

NUM_SHARDS = 256
"""Dictionaries that the index is made of, by a hash's first byte. One of a million entries takes 30 ms to grow."""

DROPPED = b""
"""In place of a block's hash: it had one, by which it can't be found any more."""


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
    """From prefix hash to block and back. Holds only blocks whose content was computed.

    By block, to be read freely and written here only:

    hashes      the hash it can be found by, None if it never had one since it was handed out, or DROPPED
    findable    whether it has a hash
    """

    def __init__(self, num_blocks: int) -> None:
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.findable: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._num_forgotten = 0
        self._has_dropped = False

    def lookup(self, prefix_hash: bytes) -> int | None:
        """The block that holds this prefix's last block, or None."""
        return self._shards[prefix_hash[0]].get(prefix_hash)

    def find(self, prefix_hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix, in order."""
        shards, found = self._shards, []
        for prefix_hash in prefix_hashes:
            block_id = shards[prefix_hash[0]].get(prefix_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, prefix_hashes: Sequence[bytes], block_ids: Sequence[int]) -> list[int]:
        """Makes computed blocks findable; returns the blocks that stand for the hashes: the first ones published."""
        shards, hashes = self._shards, self.hashes
        standing = [
            shards[prefix_hash[0]].setdefault(prefix_hash, block_id)
            for prefix_hash, block_id in zip(prefix_hashes, block_ids, strict=True)
        ]
        for prefix_hash, block_id in zip(prefix_hashes, standing, strict=True):
            hashes[block_id] = prefix_hash
        self.findable[np.array(standing)] = True
        return standing

    def forget(self, block_ids: Sequence[int]) -> None:
        """These findable blocks are handed out anew: what they held can't be found any more."""
        shards, hashes = self._shards, self.hashes
        for block_id in block_ids:
            prefix_hash = hashes[block_id]
            assert prefix_hash
            del shards[prefix_hash[0]][prefix_hash]
            hashes[block_id] = None
        self.findable[block_ids] = False
        self._num_forgotten += len(block_ids)

    def drop(self, block_id: int) -> None:
        """The block can't be found any more, but stays one whose content was published."""
        self.forget([block_id])
        self.hashes[block_id] = DROPPED
        self._has_dropped = True

    def forget_dropped(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Blocks that can't be found are free: it does not matter any more what they held."""
        if self._has_dropped:
            for block_id in block_ids.tolist():
                self.hashes[block_id] = None

    def statistics(self) -> PrefixStatistics:
        num_indexed = sum(map(len, self._shards))
        return PrefixStatistics(num_published=num_indexed + self._num_forgotten, num_indexed=num_indexed)

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Every prefix hash and its block."""
        for shard in self._shards:
            yield from shard.items()

    def violations(self) -> Iterator[str]:
        """Disagreements between the two directions, one sentence each."""
        num_found = 0
        for prefix_hash, block_id in self.entries():
            num_found += 1
            if self.hashes[block_id] != prefix_hash:
                yield f"index finds block {block_id} by a hash that the block does not have"
        num_hashed = sum(map(bool, self.hashes))
        if num_hashed != int(np.count_nonzero(self.findable)):
            yield f"{num_hashed} blocks have a hash, {np.count_nonzero(self.findable)} are marked findable"
        if num_hashed != num_found:
            yield f"{num_hashed} blocks have a hash, the index finds {num_found}"

    def check_invariants(self) -> None:
        """Raises BrokenInvariant with the first violation. Cost: O(blocks)."""
        for violation in self.violations():
            raise BrokenInvariant(violation)
