"""A pool's memory that outlives the worker: header, records and tensors, and the content that a later worker finds.

    header      of what pool it is, and the epoch that was attached last                       4 KiB
    records     one per block: the checksum of its content, as a step left it; 0: none         8 bytes a block
    evidence    with QUIRE_VERIFY=1 what run/verify.py records of each block
    tensors     keys and values, as KVPool allocates them; on a GPU they are the memory's deposit

All is in the machine's byte order: the memory does not outlive the machine. Each store of 8 bytes is there or not,
whenever the process is killed, and they come in the order of the program.

On a GPU the worker asks for the memory after it has opened the device. The kernel closes a dead process's files in the
order in which they were opened: so the device has stopped when the memory can be lent to the next worker.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.shared_memory import make_shared, open_shared
from quire.worker.device.transfer import Readback, indices
from quire.worker.holder.borrowing import Borrowed
from quire.worker.memory.kv_pool import KVPool, bytes_of_blocks

LAYOUT_VERSION = 2
HEADER_BYTES = 4_096
ALIGNMENT = 4_096
"""Of the records and of each tensor."""
SAMPLED_BLOCKS = 256
"""Compared at a start, unless all are to be."""
MIX = -7046029254386353131
"""Odd: what the sum of a tensor is multiplied with before that of the next one is added."""
SUMMED_BYTES = 16 << 20
"""Of blocks that are summed at a time on a GPU: so much memory is taken twice."""
Words = np.ndarray[Any, np.dtype[np.int64]]
EPOCH, TERM, STEPS, MARK = range(4)
"""Places in the header, 8 bytes each; the mark takes four."""


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

    def __init__(
        self,
        borrowed: Borrowed,
        *,
        mark: bytes,
        num_blocks: int,
        evidence_bytes: int = 0,
        device: torch.device | str = "cpu",
        tensor_bytes: int = 0,
        deposits: bool = False,
    ) -> None:
        """Takes the memory over. `mark` is of 32 bytes: it is equal for pools that can have each other's memory.

        tensor_bytes are those of the tensors; with deposits they lie in the memory's deposit, on the device. Memory
        with another mark is replaced by zeros. Raises HolderError, SharedMemoryError.
        """
        self._borrowed = borrowed
        self._num_blocks = num_blocks
        self._evidence_bytes = evidence_bytes
        self._device = torch.device(device)
        self._sums: BlockSums | None = None
        self._lock = threading.Lock()
        """Held while records change: on a GPU steps end on another thread than they begin."""
        self._num_written = np.zeros(num_blocks, dtype=np.int64)
        """How often the writing of each block has begun in this process."""
        self._map()
        is_complete = not deposits or borrowed.deposit is not None
        self.is_kept = bool(self._header[EPOCH]) and self._header[MARK : MARK + 4].tobytes() == mark and is_complete
        self.is_foreign = bool(self._header[EPOCH]) and not self.is_kept
        if not self.is_kept:
            if self._header[EPOCH] or self._header[MARK : MARK + 4].any():
                borrowed.replace()
                self._map()
            self._header[MARK : MARK + 4] = np.frombuffer(mark, np.int64)
        is_allocated = self.is_kept
        if deposits:
            self._rest, is_allocated = self._deposit(tensor_bytes), True
        self.held_bytes = tensor_bytes if is_allocated else 0
        """Of the device's memory, in use for the tensors already."""

    def _deposit(self, num_bytes: int) -> Tensor:
        """Return the memory's deposit, mapped; a new one if there is none."""
        if self._borrowed.deposit is not None:
            return open_shared(self._borrowed.deposit, num_bytes, self._device)
        memory, descriptor = make_shared(num_bytes, self._device)
        try:
            self._borrowed.leave(descriptor)
        finally:
            os.close(descriptor)
        return memory

    def _map(self) -> None:
        whole = torch.frombuffer(self._borrowed.buffer, dtype=torch.uint8)
        self._header = whole[:HEADER_BYTES].view(torch.int64).numpy()
        end = HEADER_BYTES + 8 * self._num_blocks
        self._records = whole[HEADER_BYTES:end].numpy().view(np.int64)
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
        self._sums = BlockSums(pool)

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
        changed = list(block_ids)
        with self._lock:
            self._records[changed] = 0
            self._num_written[changed] += 1

    def end_writing(self, block_ids: Iterable[int]) -> Callable[[], None]:
        """Sum these blocks up, which the steps so far fill. Return what records the sums once the device is done.

        No sync. A block of which the writing has begun again by then has no record.
        """
        filled = sorted(block_ids)
        if not filled:
            return lambda: None
        assert self._sums is not None, "the pool is bound"
        before = self._num_written[filled]
        readback = Readback(self._device, self._sums.of(filled))

        def record() -> None:
            (sums,) = readback.wait()
            assert sums is not None
            with self._lock:
                same = self._num_written[filled] == before
                self._records[np.array(filled)[same]] = sums.numpy()[same]

        return record

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

    def _changed(self, block_ids: Sequence[int]) -> list[int]:
        if not block_ids:
            return []
        assert self._sums is not None, "the pool is bound"
        sums = self._sums.of(block_ids).cpu().numpy()
        is_changed = sums != self._records[list(block_ids)]
        return [block_id for block_id, changed in zip(block_ids, is_changed, strict=True) if changed]


class Overwritten:
    """The records for steps that run before the worker serves: what they write is left without a record."""

    def __init__(self, kept: KeptPool) -> None:
        self.begin_writing = kept.begin_writing

    def end_writing(self, block_ids: Iterable[int]) -> Callable[[], None]:
        """See KeptPool.end_writing."""
        return lambda: None


class BlockSums:
    """The checksums of a pool's blocks: sums of words, each times the odd number of its place. Never 0."""

    def __init__(self, pool: KVPool) -> None:
        self._device = pool.device
        self._views = [words_of_blocks(tensor) for tensor in pool.block_tensors]
        """[num_blocks, n] each: together all bytes of each block."""
        sizes = {view.shape[1] for view in self._views}
        self._factors = {size: 2 * torch.arange(size, dtype=torch.int64, device=self._device) + 1 for size in sizes}
        self._at_a_time = max(1, SUMMED_BYTES // max(8 * view.shape[1] for view in self._views))

    def of(self, block_ids: Sequence[int]) -> Tensor:
        """Return [n] int64 on the device. No sync."""
        if self._device.type == "cpu":
            return torch.from_numpy(self._of_host(np.array(block_ids, np.int64)))
        total = torch.zeros(len(block_ids), dtype=torch.int64, device=self._device)
        parts = torch.split(indices(block_ids, self._device), self._at_a_time)
        for view in self._views:
            factors = self._factors[view.shape[1]]
            sums = [(view.index_select(0, part).to(torch.int64) * factors).sum(1) for part in parts]
            total = total * MIX + torch.cat(sums)
        return total.masked_fill_(total == 0, 1)

    def _of_host(self, block_ids: Words) -> Words:
        """The same in numpy, which has the sums of few blocks in a quarter of torch's time."""
        total = np.zeros_like(block_ids)
        for view in self._views:
            rows, factors = view.numpy(), self._factors[view.shape[1]].numpy()
            for first in range(0, len(block_ids), self._at_a_time):
                part = slice(first, first + self._at_a_time)
                total[part] = total[part] * MIX + np.einsum("ij,j->i", rows[block_ids[part]], factors)
        total[total == 0] = 1
        return total


def words_of_blocks(tensor: Tensor) -> Tensor:
    """Return a view of a pool's tensor, [num_blocks, n]: of words as long as its blocks' size allows, up to 8 bytes."""
    rows = bytes_of_blocks(tensor)
    dtype = next(
        each for each in (torch.int64, torch.int32, torch.int16, torch.uint8) if not rows.shape[1] % each.itemsize
    )
    return rows.view(dtype)


def mark_of(*parts: object) -> bytes:
    """Return 32 bytes that are equal for equal parts: what decides how a pool's bytes are to be read."""
    return sha256(repr((LAYOUT_VERSION, *parts)).encode()).digest()


def size_of_memory(*, num_blocks: int, evidence_bytes: int = 0) -> int:
    """Return the bytes of a memory without tensors; evidence_bytes are of a block."""
    return aligned(HEADER_BYTES + 8 * num_blocks) + aligned(num_blocks * evidence_bytes)


def size_of_tensors(*, num_blocks: int, bytes_per_block: int, num_tensors: int) -> int:
    """Return the bytes of a pool's tensors, of which there are at most so many."""
    return aligned(num_blocks * bytes_per_block) + num_tensors * ALIGNMENT


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
