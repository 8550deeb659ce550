"""A pool's memory that outlives the worker: header, records and tensors, and the content that a later worker finds.

    header      of what pool it is, and the epoch that was attached last                       4 KiB
    records     one per block: the checksum of its content, as a step left it; 0: none         8 bytes a block
    evidence    with QUIRE_VERIFY=1 what run/verify.py records of each block
    tensors     keys and values, as KVPool allocates them

All is in the machine's byte order: the memory does not outlive the machine. Each store of 8 bytes is there or not,
whenever the process is killed, and they come in the order of the program.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from quire.worker.holder.borrowing import Borrowed
from quire.worker.memory.kv_pool import BlockBytes, KVPool, bytes_of_blocks

LAYOUT_VERSION = 1
HEADER_BYTES = 4_096
ALIGNMENT = 4_096
"""Of the records and of each tensor."""
SAMPLED_BLOCKS = 256
"""Compared at a start, unless all are to be."""
EPOCH, TERM, STEPS, MARK = range(4)
"""Places in the header, 8 bytes each; the mark takes four."""
HAS_RECORD = np.uint64(1 << 32)


@dataclass(frozen=True, slots=True)
class KeptContent:
    """The content that an earlier worker has left in the memory; see KeptMemory in attach.proto."""

    epoch: int
    attached_term: int
    num_accepted_steps: int
    whole_blocks: bytes


class KeptPool:
    """The header and the records of one memory, and room for a pool's tensors.

    Its owner tells it of each attachment, of each accepted step, and of the blocks that steps write. The header is for
    one thread, the records are for another.
    """

    def __init__(self, borrowed: Borrowed, *, mark: bytes, num_blocks: int, evidence_bytes: int = 0) -> None:
        """Takes the memory over. `mark` is of 32 bytes: it is equal for pools that can have each other's memory.

        Memory with another mark is replaced by zeros. Raises HolderError.
        """
        self._borrowed = borrowed
        self._num_blocks = num_blocks
        self._evidence_bytes = evidence_bytes
        self._views: list[BlockBytes] = []
        self._map()
        self.is_kept = bool(self._header[EPOCH]) and self._header[MARK : MARK + 4].tobytes() == mark
        self.is_foreign = bool(self._header[EPOCH]) and not self.is_kept
        if not self.is_kept:
            if self._header[EPOCH] or self._header[MARK : MARK + 4].any():
                borrowed.replace()
                self._map()
            self._header[MARK : MARK + 4] = np.frombuffer(mark, np.int64)

    def _map(self) -> None:
        whole = torch.frombuffer(self._borrowed.buffer, dtype=torch.uint8)
        self._header = whole[:HEADER_BYTES].view(torch.int64).numpy()
        end = HEADER_BYTES + 8 * self._num_blocks
        self._records = whole[HEADER_BYTES:end].numpy().view(np.uint64)
        start, num_bytes = aligned(end), self._num_blocks * self._evidence_bytes
        self.evidence = whole[start : start + num_bytes].view(self._num_blocks, self._evidence_bytes).numpy()
        """[num_blocks, evidence_bytes]"""
        self._rest = whole[start + aligned(num_bytes) :]

    @property
    def memory_id(self) -> str:
        return self._borrowed.memory_id

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor: zeros in new memory. The same calls give the same places."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensor, self._rest = self._rest[:num_bytes], self._rest[aligned(num_bytes) :]
        return tensor.view(dtype).view(shape)

    def bind(self, pool: KVPool) -> None:
        """The pool's tensors were allocated here."""
        self._views = bytes_of_blocks(pool)

    # -- the header

    def attached(self, epoch: int, term: int) -> None:
        """A cachemgr rules an epoch from here on, and its steps may follow."""
        if self._header[EPOCH] == epoch:
            self._header[TERM] = term
            return
        self._header[EPOCH] = 0  # a worker that is killed here has left nothing
        self._header[TERM], self._header[STEPS] = term, 0
        self._header[EPOCH] = epoch

    def epoch_ended(self) -> None:
        """The worker gives the epoch up: a later worker must not go on with it."""
        self._header[EPOCH] = 0

    def accepted(self) -> None:
        """A step of the epoch may run from here on."""
        self._header[STEPS] += 1

    # -- the records

    def begin_writing(self, block_ids: Iterable[int]) -> None:
        """The content of these blocks changes from here on."""
        self._records[list(block_ids)] = 0

    def end_writing(self, block_ids: Iterable[int]) -> None:
        """These blocks are filled: record their checksums."""
        for block_id in block_ids:
            self._records[block_id] = checksum(self._views, block_id)

    def find_content(self, *, verify_all: bool) -> tuple[KeptContent, list[int]]:
        """Return what an earlier worker has left, and the blocks with bytes that were changed since.

        Compares SAMPLED_BLOCKS blocks with their records; all of them if one of these differs, or if all are to be.
        """
        recorded = np.flatnonzero(self._records).tolist()
        sampled = recorded if verify_all else random.sample(recorded, min(SAMPLED_BLOCKS, len(recorded)))
        changed = self._changed(sampled)
        if changed and len(sampled) < len(recorded):
            changed = self._changed(recorded)
        self._records[changed] = 0
        bits = np.packbits(self._records != 0, bitorder="little").tobytes()
        epoch, term, steps = (int(self._header[place]) for place in (EPOCH, TERM, STEPS))
        return KeptContent(epoch, term, steps, bits), changed

    def _changed(self, block_ids: Iterable[int]) -> list[int]:
        return [block_id for block_id in block_ids if self._records[block_id] != checksum(self._views, block_id)]


def checksum(views: Iterable[BlockBytes], block_id: int) -> np.uint64:
    """Return the record of a block: the CRC-32 of its bytes in all tensors, which are [num_blocks, n] each."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view[block_id], crc)
    return np.uint64(crc) | HAS_RECORD


def mark_of(*parts: object) -> bytes:
    """Return 32 bytes that are equal for equal parts: what decides how a pool's bytes are to be read."""
    return sha256(repr((LAYOUT_VERSION, *parts)).encode()).digest()


def size_of_memory(*, num_blocks: int, bytes_per_block: int, num_tensors: int, evidence_bytes: int = 0) -> int:
    """Return the bytes of a memory with room for a pool of at most so many tensors; evidence_bytes are of a block."""
    ahead = aligned(HEADER_BYTES + 8 * num_blocks) + aligned(num_blocks * evidence_bytes)
    return ahead + aligned(num_blocks * bytes_per_block) + num_tensors * ALIGNMENT


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
