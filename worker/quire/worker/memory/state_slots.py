"""State that a model keeps per sequence and not per token: of convolutions, state spaces, linear attention.

A row of the sequence table has two slots: the state behind its last token that was computed, and the one before that
token. A fork computes its parent's last token again, so it begins with the second slot. Older states are not kept. So a
sequence with such a state can continue only from these two positions, or from its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quire.worker.device.transfer import indices


class StateKey(NamedTuple):
    """One state of one layer: kind is "conv" or "recurrent", state_idx counts those of a kind."""

    layer_idx: int
    kind: str
    state_idx: int


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one sequence, without the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StateNotKept(RuntimeError):
    """A sequence is to continue from a position without a kept state."""


@dataclass(frozen=True, slots=True)
class StateSlotsStatistics:
    """num_bytes is the size of the tensors, num_kept the number of rows with a state."""

    max_num_seqs: int
    num_kept: int
    num_bytes: int


class StateSlots:
    """States of all rows. Sizes: R rows; per state the shape of its spec.

        before, after   [R, *shape]     the states before and behind the last computed token

    A row's content is invalid until store() has filled it. Without specs there is nothing to keep: load() returns
    nothing, for any positions.
    """

    def __init__(self, specs: Mapping[StateKey, StateSpec], *, max_num_seqs: int, device: torch.device | str) -> None:
        self.max_num_seqs = max_num_seqs
        self._device = torch.device(device)
        self._slots = {
            key: torch.zeros(2, max_num_seqs, *spec.shape, dtype=spec.dtype, device=device)
            for key, spec in specs.items()
        }
        self._ends: dict[int, int] = {}
        """Position behind the last computed token, of rows that have one."""

    def load(self, rows: Sequence[int], starts: Sequence[int]) -> dict[StateKey, Tensor]:
        """Copies of the states from which the rows go on at these positions, [len(rows), *shape]; zero at position 0.

        Raises StateNotKept if a row has none for its position.
        """
        if not self._slots:
            return {}
        index = [self._slot(row, start) for row, start in zip(rows, starts, strict=True)]
        fresh = [i for i, start in enumerate(starts) if start == 0]
        both = indices([*index, *fresh], self._device)
        taken, begun = both[: len(index)], both[len(index) :]
        loaded = {key: slots.flatten(0, 1).index_select(0, taken) for key, slots in self._slots.items()}
        for state in loaded.values() if fresh else ():
            state.index_fill_(0, begun, 0)
        return loaded

    def _slot(self, row: int, start: int) -> int:
        end = self._ends.get(row, 0)
        if start and start not in (end - 1, end):
            raise StateNotKept(f"row {row} is to continue at position {start}, but the kept state is that of {end}")
        return row + (start == end) * self.max_num_seqs

    def store(
        self,
        rows: Sequence[int],
        ends: Sequence[int],
        *,
        before: Mapping[StateKey, Tensor],
        after: Mapping[StateKey, Tensor],
    ) -> None:
        """Keep the rows' states, [len(rows), *shape], before and behind the token at position ends[i] - 1."""
        if not self._slots:
            return
        index = indices(list(rows), self._device)
        for key, slots in self._slots.items():
            slots[0].index_copy_(0, index, before[key])
            slots[1].index_copy_(0, index, after[key])
        self._ends.update(zip(rows, ends, strict=True))

    def fork(self, row: int, child: int) -> None:
        """Give `child` what `row` has."""
        for slots in self._slots.values():
            slots[:, child] = slots[:, row]
        if row in self._ends:
            self._ends[child] = self._ends[row]

    def clear(self, row: int) -> None:
        """Forget a row's states."""
        if self._ends.pop(row, None) is not None:
            for slots in self._slots.values():
                slots[:, row].zero_()

    def tensors(self) -> list[Tensor]:
        """Return all state tensors, [2, R, *shape]: before, then after."""
        return list(self._slots.values())

    def statistics(self) -> StateSlotsStatistics:
        return StateSlotsStatistics(
            max_num_seqs=self.max_num_seqs,
            num_kept=len(self._ends),
            num_bytes=sum(slots.nbytes for slots in self._slots.values()),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError for a row out of range, or not zero while it holds nothing. Waits for the device."""
        assert all(0 <= row < self.max_num_seqs and end > 0 for row, end in self._ends.items()), "a row out of range"
        empty = [row for row in range(self.max_num_seqs) if row not in self._ends]
        for key, slots in self._slots.items():
            assert not bool(slots[:, empty].any()), f"{key} of a row that holds nothing is not zero"
