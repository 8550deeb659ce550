"""The tokens of one step as the device takes them: ragged, packed, each with its position and its slot.

The host knows every length; token ids that were sampled on the device never leave it. All integers of a step cross in
one transfer:

    part        length      content
    token_ids   T           0 where the token is on the device
    positions   T
    slots       G * T       in each layer group
    rows        B           the table row of each sequence
    last        B           the last token of each sequence in the packed batch
    sampled_at  S           which tokens are the last sampled ones of their rows
    sampled_row S
    seq_lens    B           int32, tokens in the pool after this step
    cu_seqlens  B + 1       int32, first token of each sequence in the packed batch, then T

Each part begins at a multiple of 16 bytes, for which kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import to_device
from quire.worker.memory.sequence_table import SequenceTable

_Ints = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]
_ON_DEVICE: _Ints = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of one forward. Sizes: T tokens, B sequences, G layer groups, M the most blocks one of them needs.

        input_ids       [T]     int64
        positions       [T]     int64, absolute
        slot_mapping    [G, T]  int64, slot = block_id * block_size + offset, distinct
        block_tables    [G, B, M]   int32, the null block where a row holds none
        seq_lens        [B]     int32, tokens in the pool after this step
        cu_seqlens_q    [B+1]   int32
        last_indices    [B]     int64, index of each sequence's last token in this batch

    seq_lens_host and counts_host (B each; counts are tokens run in this step) are the same numbers without a sync;
    rows_host are the sequences' rows of the table.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    last_indices: Tensor
    seq_lens_host: tuple[int, ...]
    counts_host: tuple[int, ...]
    rows_host: tuple[int, ...]
    keeps_hidden_states: bool = False
    """The batch needs the model's own forward, because hidden states are read."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.counts_host)


def build_step_batch(
    table: SequenceTable,
    *,
    block_size: int,
    rows: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    token_ids: Sequence[Sequence[int] | _Ints | None],
) -> StepBatch:
    """Pack one step: sequence i runs counts[i] tokens from position starts[i]; None stands for its last sampled token.

    Flushes the table first. Raises ValueError, before anything is sent, if the lists differ in length, a row occurs
    twice, a count is not positive or not the number of tokens, a sequence does not hold the blocks of all its tokens in
    some group, or None is given for a row with its last sampled token at another position than starts[i].
    Cost: O(T) on the host, one transfer, no sync.
    """
    check_runs(table, block_size, rows, starts, counts, token_ids)
    table.flush()
    seq_lens = tuple(start + count for start, count in zip(starts, counts, strict=True))
    cu_seqlens = [0, *accumulate(counts)]
    sampled = [i for i, ids in enumerate(token_ids) if ids is None]
    positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, seq_lens, strict=True)])
    slots = table.slots(np.repeat(rows, counts), positions, block_size=block_size)
    parts = _to_device(
        [
            np.concatenate([_ON_DEVICE if ids is None else ids for ids in token_ids]),
            positions,
            slots.reshape(-1),
            rows,
            [end - 1 for end in cu_seqlens[1:]],
            [cu_seqlens[i] for i in sampled],
            [rows[i] for i in sampled],
            _int32s(seq_lens),
            _int32s(cu_seqlens),
        ],
        table.device,
    )
    input_ids, device_positions, device_slots, device_rows, last_indices, sampled_at, sampled_rows, *lengths = parts
    if sampled:
        input_ids.index_copy_(0, sampled_at, table.last_token.index_select(0, sampled_rows))
    max_blocks = max(-(-seq_len // block_size) for seq_len in seq_lens)
    return StepBatch(
        input_ids=input_ids,
        positions=device_positions,
        slot_mapping=device_slots.view(slots.shape),
        block_tables=table.block_tables[:, :, :max_blocks].index_select(1, device_rows),
        seq_lens=lengths[0].view(torch.int32)[: len(rows)],
        cu_seqlens_q=lengths[1].view(torch.int32)[: len(cu_seqlens)],
        last_indices=last_indices,
        seq_lens_host=seq_lens,
        counts_host=tuple(counts),
        rows_host=tuple(rows),
    )


def check_runs(
    table: SequenceTable,
    block_size: int,
    rows: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    token_ids: Sequence[Sequence[int] | _Ints | None],
) -> None:
    """Raise ValueError if build_step_batch would refuse these arguments."""
    if not rows or not len(rows) == len(starts) == len(counts) == len(token_ids):
        lengths = [len(rows), len(starts), len(counts), len(token_ids)]
        raise ValueError(f"rows, starts, counts and token_ids have {lengths} items; equal and at least 1 are needed")
    if len(set(rows)) != len(rows):
        raise ValueError("a row occurs twice in one step")
    for row, start, count, ids in zip(rows, starts, counts, token_ids, strict=True):
        num_ids = 1 if ids is None else len(ids)
        if start < 0 or count < 1 or count != num_ids:
            raise ValueError(f"row {row}: start={start}, count={count} with {num_ids} tokens")
        if ids is None and table.last_token_position(row) != start:
            expected = table.last_token_position(row)
            raise ValueError(f"row {row}: start={start}, but its last sampled token takes position {expected}")
    _check_blocks(table, block_size, rows, starts, counts)


def _check_blocks(
    table: SequenceTable, block_size: int, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> None:
    """Raise ValueError if a token's slot would be in a block that its row does not hold."""
    first = np.asarray(starts)
    end = first + np.asarray(counts)
    begins, ends = table.held(rows)
    is_outside = (ends * block_size < end) | (begins * block_size > first)
    if not is_outside.any():
        return
    for group, i in np.argwhere(is_outside):
        where = f"row {rows[i]}: its blocks of layer group {group}"
        held = f"positions {begins[group, i] * block_size} .. {ends[group, i] * block_size - 1}"
        raise ValueError(f"{where} hold {held}, and the tokens take {first[i]} .. {end[i] - 1}")


def _to_device(parts: Sequence[Sequence[int] | _Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Send integer lists as one int64 buffer; return a view of each on the device, at a multiple of 16 bytes."""
    sizes = [size for part in parts for size in (len(part), len(part) % 2)]
    packed, start = np.zeros(sum(sizes), dtype=np.int64), 0
    for part in parts:
        packed[start : start + len(part)] = part
        start += len(part) + len(part) % 2
    return torch.split_with_sizes(to_device(torch.from_numpy(packed), device), sizes)[::2]


def _int32s(values: Sequence[int]) -> _Ints:
    """The values as int32, two of them in an int64."""
    return np.array([*values, *[0] * (len(values) % 2)], dtype=np.int32).view(np.int64)
