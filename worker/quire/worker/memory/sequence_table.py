"""Per-sequence state that lives on the device: block tables and last sampled tokens, one row per sequence.

A sequence has a block table for each layer group of the pool. In all of them entry i is the block of positions
i * S .. (i + 1) * S - 1, of S = block size. A row holds a run of entries in each group:

    entries     0 .. begin - 1      begin .. end - 1    end ..
    content     the null block      blocks              the null block
    why         behind the window   held                not reached yet

begin is above 0 in windowed groups only: blocks were passed, or the first ones that were written begin there.

A host copy of the block tables is the truth; what changes in it is staged and sent to the device once per step, by
flush(). Last sampled tokens exist on the device only: the next step reads them there, and the host knows no more than
the position each one will take.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import indices, to_device
from quire.worker.memory.kv_pool import NULL_BLOCK

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NO_TOKEN = -(2**63)
"""The position of a last token where there is none: no run starts there."""


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


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The content of n rows: blocks in the entries begins .. ends - 1 of each group, [G, n] each, and a last token.

    last_token_positions    [n]     the positions that their last sampled tokens take; NO_TOKEN where none was sampled
    """

    begins: Int64s
    ends: Int64s
    last_token_positions: Int64s


class SequenceTable:
    """Rows 0 .. max_num_seqs - 1, each free or one sequence's. Sizes: G groups, R = max_num_seqs + 1.

        block_tables    [G, R, max_blocks_per_seq]  int32, NULL_BLOCK where a row holds no block
        last_token      [R]                         int64, read only where last_token_position is not None

    The device has one more row, padding_row, for the padding of a batch. It never holds a block, and its last token is
    not used. Methods raise KeyError for a row that is not in use, ValueError for a group that there is not.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        device: torch.device | str,
        windowed: Sequence[bool] = (False,),
    ) -> None:
        """windowed says of each group if blocks may be passed in it."""
        self.max_num_seqs = max_num_seqs
        self.max_blocks_per_seq = max_blocks_per_seq
        self.num_groups = len(windowed)
        self.device = torch.device(device)
        self.padding_row = max_num_seqs
        shape = (self.num_groups, max_num_seqs + 1, max_blocks_per_seq)
        self.block_tables = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=self.device)
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self._windowed = tuple(windowed)
        self._host_tables = np.full(shape, NULL_BLOCK, dtype=np.int32)
        self._begins = np.zeros(shape[:2], dtype=np.int64)
        self._ends = np.zeros(shape[:2], dtype=np.int64)
        self._rows: set[int] = set()
        self._last_token_position = np.full(max_num_seqs, NO_TOKEN, dtype=np.int64)
        self._free_rows = list(range(max_num_seqs))
        self._staged: set[int] = set()
        self._num_flushes = 0

    def add(self) -> int:
        """Take the lowest free row; it holds no blocks. Raises SequenceTableFull."""
        if not self._free_rows:
            raise SequenceTableFull(f"all {self.max_num_seqs} rows are in use")
        row = heapq.heappop(self._free_rows)
        self._rows.add(row)
        return row

    def remove(self, row: int) -> None:
        """Give the row back. Its entries become the null block, so that no later sequence can read through them."""
        self._check_row(row)
        for group in range(self.num_groups):
            self._clear(row, group, int(self._ends[group, row]))
        self._begins[:, row] = self._ends[:, row] = 0
        self._rows.remove(row)
        self._last_token_position[row] = NO_TOKEN
        heapq.heappush(self._free_rows, row)

    def fork(self, row: int) -> int:
        """Take a new row with the last token of `row`; it holds no blocks. Raises SequenceTableFull."""
        position = self.last_token_position(row)
        child = self.add()
        if position is not None:
            self._last_token_position[child] = position
            self.last_token[child] = self.last_token[row]
        return child

    def stage_blocks(self, row: int, first_index: int, block_ids: Sequence[int], *, group: int = 0) -> None:
        """Set entries first_index, first_index + 1, ... of a row's block table; flush() sends them to the device.

        Entries may be new or replace old ones, and must leave no hole. The first ones of a windowed group may begin
        anywhere. Raises ValueError for a hole, an entry that was passed, a table longer than max_blocks_per_seq, or
        the null block.
        """
        self._check_row(row)
        self._check_group(group)
        begin, held_end = int(self._begins[group, row]), int(self._ends[group, row])
        end = first_index + len(block_ids)
        if self._windowed[group] and not held_end:
            begin = held_end = first_index
        if not 0 <= begin <= first_index <= held_end:
            held = f"entries {begin} .. {held_end - 1}" if begin else f"the {held_end} blocks"
            raise ValueError(f"first_index={first_index} leaves a hole after {held} of row {row}")
        if end > self.max_blocks_per_seq:
            raise ValueError(f"row {row} would hold {end} blocks; max_blocks_per_seq is {self.max_blocks_per_seq}")
        if len(block_ids) and min(block_ids) <= NULL_BLOCK:
            raise ValueError(f"row {row}: block ids must be above the null block {NULL_BLOCK}")
        self._host_tables[group, row, first_index:end] = block_ids
        self._begins[group, row], self._ends[group, row] = begin, max(held_end, end)
        self._stage(row, group, first_index, end)

    def pass_blocks(self, row: int, num_blocks: int, *, group: int) -> None:
        """Make the first num_blocks entries of a row the null block: no later token sees these positions.

        Raises ValueError if the group has no window, if no more entries are passed than before, or if the row has
        fewer.
        """
        self._check_row(row)
        self._check_group(group)
        begin, end = int(self._begins[group, row]), int(self._ends[group, row])
        if not self._windowed[group]:
            raise ValueError(f"row {row}: layer group {group} has no window to pass blocks behind")
        if not begin < num_blocks <= end:
            raise ValueError(f"row {row}: num_blocks={num_blocks} to pass is not in {begin + 1} .. {end}")
        self._clear(row, group, num_blocks)
        self._begins[group, row] = num_blocks

    def _clear(self, row: int, group: int, end: int) -> None:
        """Make the held entries before `end` the null block."""
        begin = int(self._begins[group, row])
        self._host_tables[group, row, begin:end] = NULL_BLOCK
        self._stage(row, group, begin, end)

    def _stage(self, row: int, group: int, begin: int, end: int) -> None:
        offset = (group * (self.max_num_seqs + 1) + row) * self.max_blocks_per_seq
        self._staged.update(range(offset + begin, offset + end))

    def _check_row(self, row: int) -> None:
        if row not in self._rows:
            raise KeyError(row)

    def check_rows(self, rows: Iterable[int]) -> None:
        """Raise KeyError for a row that is not in use."""
        if not self._rows.issuperset(rows):
            raise KeyError(min(set(rows) - self._rows))

    def _check_group(self, group: int) -> None:
        if not 0 <= group < self.num_groups:
            raise ValueError(f"layer group {group} is not in 0 .. {self.num_groups - 1}")

    @property
    def num_staged(self) -> int:
        """Entries that the device does not have."""
        return len(self._staged)

    def staged(self) -> tuple[Int64s, Int64s]:
        """The entries that the device does not have: their places in block_tables, flat, and the block ids."""
        places = np.fromiter(self._staged, dtype=np.int64, count=len(self._staged))
        return places, self._host_tables.reshape(-1)[places].astype(np.int64)

    def note_sent(self) -> None:
        """Note that the device has, or will have before the next work, all that was staged."""
        if self._staged:
            self._staged.clear()
            self._num_flushes += 1

    def flush(self) -> None:
        """Send staged entries to the device, all at once. Cost: one transfer of 12 bytes per entry, no sync."""
        if not self._staged:
            return
        places, block_ids = self.staged()
        self.block_tables.view(-1).index_copy_(
            0,
            to_device(torch.from_numpy(places), self.device),
            to_device(torch.from_numpy(block_ids.astype(np.int32)), self.device),
        )
        self.note_sent()

    def is_on_device(self) -> bool:
        """True if the device has all block tables as the host does. Waits for the device."""
        return torch.equal(self.block_tables, to_device(torch.from_numpy(self._host_tables), self.device))

    def store_sampled(
        self, rows: Sequence[int], tokens: Tensor, positions: Sequence[int] | Int64s, *, index: Tensor | None = None
    ) -> None:
        """Remember each row's newest token, which will take `positions[i]` in its sequence.

        tokens  [len(rows)]     int64, on the table's device; not read by the host
        index   [len(rows)]     int64, the rows there; None: they are sent
        """
        self.note_sampled(rows, positions)
        self.last_token.index_copy_(0, indices(rows, self.device) if index is None else index, tokens)

    def note_sampled(self, rows: Sequence[int], positions: Sequence[int] | Int64s) -> None:
        """Note what position each row's newest token takes, if the caller writes the token to last_token."""
        self.check_rows(rows)
        self._last_token_position[np.asarray(rows, dtype=np.int64)] = positions

    def slots(self, rows: Sequence[int] | Int64s, positions: Int64s, *, block_size: int) -> Int64s:
        """The slot of each position in its row, [G, len(rows)], as the host has it. The rows must hold its block."""
        block_ids = self._host_tables[:, rows, positions // block_size].astype(np.int64)
        return block_ids * block_size + positions % block_size

    def block_ids(self, row: int, *, group: int = 0) -> list[int]:
        """The row's entries in order, staged ones included; those before the blocks that it holds are the null block.

        Cost: O(blocks), on the host.
        """
        self._check_row(row)
        block_ids: list[int] = self._host_tables[group, row, : self._ends[group, row]].tolist()
        return block_ids

    def num_blocks(self, row: int, *, group: int = 0) -> int:
        """Entries of the row that block_ids() returns."""
        self._check_row(row)
        return int(self._ends[group, row])

    def num_passed(self, row: int, *, group: int) -> int:
        """Entries of the row before the blocks that it holds."""
        self._check_row(row)
        return int(self._begins[group, row])

    def held(self, rows: Int64s) -> HeldRows:
        """Return the content of rows in use, as the host has it."""
        return HeldRows(self._begins[:, rows], self._ends[:, rows], self._last_token_position[rows])

    def last_token_position(self, row: int) -> int | None:
        """The position the row's last sampled token takes, or None if no token was sampled for it."""
        self._check_row(row)
        position = int(self._last_token_position[row])
        return None if position == NO_TOKEN else position

    def digest(self) -> int:
        """Return a number, 0 .. 2**63 - 1, that tables with equal rows and blocks share. Cost: reads all entries."""
        numbers = (np.asarray(sorted(self._rows), dtype=np.int64), self._begins, self._ends, self._host_tables)
        content = b"".join(each.tobytes() for each in numbers)
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1

    def statistics(self) -> SequenceTableStatistics:
        return SequenceTableStatistics(
            max_num_seqs=self.max_num_seqs,
            max_blocks_per_seq=self.max_blocks_per_seq,
            num_seqs=len(self._rows),
            num_blocks=int((self._ends - self._begins).sum()),
            num_staged=len(self._staged),
            num_flushes=self._num_flushes,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if a row is lost, holds a hole, or differs on the device. Waits for the device."""
        rows = sorted([*self._free_rows, *self._rows])
        assert rows == list(range(self.max_num_seqs)), "a row is lost, or both free and in use"
        index = np.arange(self.max_blocks_per_seq)
        held = (index >= self._begins[..., None]) & (index < self._ends[..., None])
        assert np.array_equal(self._host_tables != NULL_BLOCK, held), "an entry beyond a row's blocks, or a hole"
        free = [self.padding_row, *self._free_rows]
        assert not self._ends[:, free].any(), "a free row holds blocks"
        assert not self._begins[:, free].any(), "a free row has passed blocks"
        full = [not windowed for windowed in self._windowed]
        assert not self._begins[full].any(), "blocks were passed in a group without a window"
        assert (self._last_token_position[self._free_rows] == NO_TOKEN).all(), "a free row has a last token"
        device_tables = self.block_tables.cpu().numpy().reshape(-1)
        stale = set(np.flatnonzero(device_tables != self._host_tables.reshape(-1)).tolist())
        assert stale <= self._staged, "the device differs where nothing is staged"
