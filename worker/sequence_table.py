"""Per-sequence state that lives on the device: block tables and last sampled tokens, one row per sequence.

A host copy of the block tables is the truth; what changes in it is staged and sent to the device once per step, by
flush(). Last sampled tokens exist on the device only: the next step reads them there, and the host knows no more than
the position each one will take.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from quire.worker.kv_pool import NULL_BLOCK
from quire.worker.transfer import indices, to_device

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class SequenceTableFull(RuntimeError):
    """Every row is taken."""


@dataclass(frozen=True, slots=True)
class SequenceTableStatistics:
    """num_staged counts block table entries that the device does not have yet."""

    max_num_seqs: int
    max_blocks_per_seq: int
    num_seqs: int
    num_blocks: int
    num_staged: int
    num_flushes: int


class SequenceTable:
    """Rows 0 .. max_num_seqs - 1, each free or one sequence's.

        block_tables    [max_num_seqs + 1, max_blocks_per_seq]  int32, NULL_BLOCK where a row holds no block
        last_token      [max_num_seqs + 1]                      int64, read only where last_token_position is not None

    The device has one more row, padding_row, for the padding of a batch. It never holds a block, and its last token is
    not used. Methods raise KeyError for a row that is not in use.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device | str) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_blocks_per_seq = max_blocks_per_seq
        self.device = torch.device(device)
        self.padding_row = max_num_seqs
        shape = (max_num_seqs + 1, max_blocks_per_seq)
        self.block_tables = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=self.device)
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self._host_tables = np.full(shape, NULL_BLOCK, dtype=np.int32)
        self._num_blocks: dict[int, int] = {}
        self._last_token_position: dict[int, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._staged: set[int] = set()
        self._num_flushes = 0

    def add(self) -> int:
        """Take the lowest free row; it holds no blocks. Raises SequenceTableFull."""
        if not self._free_rows:
            raise SequenceTableFull(f"all {self.max_num_seqs} rows are in use")
        row = heapq.heappop(self._free_rows)
        self._num_blocks[row] = 0
        return row

    def remove(self, row: int) -> None:
        """Give the row back. Its entries become the null block, so that no later sequence can read through them."""
        self.trim_blocks(row, 0)
        del self._num_blocks[row]
        self._last_token_position.pop(row, None)
        heapq.heappush(self._free_rows, row)

    def fork(self, row: int) -> int:
        """Take a new row with the blocks and the last token of `row`. Raises SequenceTableFull."""
        block_ids = self.block_ids(row)
        child = self.add()
        self.stage_blocks(child, 0, block_ids)
        if (position := self.last_token_position(row)) is not None:
            self._last_token_position[child] = position
            self.last_token[child] = self.last_token[row]
        return child

    def stage_blocks(self, row: int, first_index: int, block_ids: Sequence[int]) -> None:
        """Set entries first_index, first_index + 1, ... of a row's block table; flush() sends them to the device.

        Entries may be new or replace old ones, and must leave no hole. Raises ValueError for a hole, a table longer
        than max_blocks_per_seq, or the null block.
        """
        num_blocks = self._num_blocks[row]
        end = first_index + len(block_ids)
        if not 0 <= first_index <= num_blocks:
            raise ValueError(f"first_index={first_index} leaves a hole after the {num_blocks} blocks of row {row}")
        if end > self.max_blocks_per_seq:
            raise ValueError(f"row {row} would hold {end} blocks; max_blocks_per_seq is {self.max_blocks_per_seq}")
        if any(block_id <= NULL_BLOCK for block_id in block_ids):
            raise ValueError(f"row {row}: block ids must be above the null block {NULL_BLOCK}")
        self._host_tables[row, first_index:end] = block_ids
        self._num_blocks[row] = max(num_blocks, end)
        self._stage(row, first_index, end)

    def trim_blocks(self, row: int, num_blocks: int) -> None:
        """Keep the first num_blocks blocks of a row, and its last token. Raises ValueError if it has fewer."""
        held = self._num_blocks[row]
        if not 0 <= num_blocks <= held:
            raise ValueError(f"num_blocks={num_blocks} is not in 0 .. {held}, the blocks of row {row}")
        self._host_tables[row, num_blocks:held] = NULL_BLOCK
        self._num_blocks[row] = num_blocks
        self._stage(row, num_blocks, held)

    def _stage(self, row: int, begin: int, end: int) -> None:
        offset = row * self.max_blocks_per_seq
        self._staged.update(range(offset + begin, offset + end))

    def flush(self) -> None:
        """Send staged entries to the device, all at once. Cost: one transfer of 12 bytes per entry, no sync."""
        if not self._staged:
            return
        index = np.fromiter(self._staged, dtype=np.int64, count=len(self._staged))
        values = self._host_tables.reshape(-1)[index]
        self.block_tables.view(-1).index_copy_(
            0,
            to_device(torch.from_numpy(index), self.device),
            to_device(torch.from_numpy(values), self.device),
        )
        self._staged.clear()
        self._num_flushes += 1

    def store_sampled(self, rows: Sequence[int], tokens: Tensor, positions: Sequence[int]) -> None:
        """Remember each row's newest token, which will take `positions[i]` in its sequence.

        tokens  [len(rows)]     int64, on the table's device; not read by the host
        """
        self.note_sampled(rows, positions)
        index = indices(list(rows), self.device)
        self.last_token.index_copy_(0, index, tokens)

    def note_sampled(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Note what position each row's newest token takes, if the caller writes the token to last_token."""
        for row, position in zip(rows, positions, strict=True):
            if row not in self._num_blocks:
                raise KeyError(row)
            self._last_token_position[row] = position

    def slots(self, rows: Sequence[int], positions: Int64s, *, block_size: int) -> Int64s:
        """The slot of one position of each row, [len(rows)], as the host has it. The rows must reach that far."""
        block_ids = self._host_tables[rows, positions // block_size].astype(np.int64)
        return block_ids * block_size + positions % block_size

    def block_ids(self, row: int) -> list[int]:
        """The row's blocks in order, staged ones included. Cost: O(blocks), on the host."""
        block_ids: list[int] = self._host_tables[row, : self._num_blocks[row]].tolist()
        return block_ids

    def num_blocks(self, row: int) -> int:
        return self._num_blocks[row]

    def last_token_position(self, row: int) -> int | None:
        """The position the row's last sampled token takes, or None if no token was sampled for it."""
        if row not in self._num_blocks:
            raise KeyError(row)
        return self._last_token_position.get(row)

    def digest(self) -> int:
        """Return a number, 0 .. 2**63 - 1, that tables with equal rows and blocks share. Cost: reads all entries."""
        held = [number for row in sorted(self._num_blocks.items()) for number in row]
        content = np.asarray(held, dtype=np.int64).tobytes() + self._host_tables.tobytes()
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1

    def statistics(self) -> SequenceTableStatistics:
        return SequenceTableStatistics(
            max_num_seqs=self.max_num_seqs,
            max_blocks_per_seq=self.max_blocks_per_seq,
            num_seqs=len(self._num_blocks),
            num_blocks=sum(self._num_blocks.values()),
            num_staged=len(self._staged),
            num_flushes=self._num_flushes,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if a row is lost, holds a hole, or differs on the device. Waits for the device."""
        rows = sorted([*self._free_rows, *self._num_blocks])
        assert rows == list(range(self.max_num_seqs)), "a row is lost, or both free and in use"
        held = np.zeros(self._host_tables.shape, dtype=bool)
        for row, num_blocks in self._num_blocks.items():
            held[row, :num_blocks] = True
        assert np.array_equal(self._host_tables != NULL_BLOCK, held), "an entry beyond a row's blocks, or a hole"
        assert self._last_token_position.keys() <= self._num_blocks.keys(), "a free row has a last token"
        device_tables = self.block_tables.cpu().numpy().reshape(-1)
        stale = set(np.flatnonzero(device_tables != self._host_tables.reshape(-1)).tolist())
        assert stale <= self._staged, "the device differs where nothing is staged"
