"""The ring of a worker's decode steps that are one CUDA graph each: their inputs to the device, their tokens back.

    slot        free        taken: launched, not read
    becomes     taken, by launched()        free, by StepTokens.wait()

The device takes the slots in turn (kernels/quire/kernels/step_ring.py). So a step that finds its slot taken can't be
one graph; it is run in parts instead, and the ring waits at this slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ring_layout import HEADER_WORDS, TAGS, RingLayout
from quire.worker.device.transfer import Arrival, pin, send
from quire.worker.memory.sequence_table import Int64s, SequenceTable


class RingOutOfStep(Exception):
    """The device took another slot than the one that the host wrote for a step, or did not write its tokens."""


class StepRing:
    """Slots for the inputs of steps of up to L sequences, and for their tokens, in memory that a GPU reads and writes.

    slots       [num_slots, slot_words]     int64, see RingLayout
    words       [num_slots, L]              int64, tag << 32 | token
    state       [2]                         int64, on the device: its turn, and the tag of the step that runs

    One thread fills and launches, any thread reads tokens.
    """

    def __init__(self, layout: RingLayout, device: torch.device) -> None:
        """Raises RuntimeError if the memory can't be pinned."""
        self.layout = layout
        self._host_slots = np.zeros((layout.num_slots, layout.slot_words), dtype=np.int64)
        self._host_words = np.zeros((layout.num_slots, layout.max_num_seqs), dtype=np.int64)
        self.slots, self.words = torch.from_numpy(self._host_slots), torch.from_numpy(self._host_words)
        if device.type == "cuda":
            for memory in (self.slots, self.words):
                pin(self, memory)
        with torch.inference_mode(False):  # a tensor made in inference mode could never be written outside of it
            self.state = torch.zeros(2, dtype=torch.int64, device=device)
        self._turn = 0
        self.begin_anew()

    @property
    def has_room(self) -> bool:
        """True if the slot of the next turn is free."""
        return not self._taken[self._slot]

    @property
    def _slot(self) -> int:
        return self._turn % self.layout.num_slots

    def begin_anew(self) -> None:
        """Let host and device agree on the next turn, and all slots be free: nothing may be launched and not read."""
        self._turn += 1
        self._taken = [False] * self.layout.num_slots
        send(torch.tensor([self._turn, 0]), self.state)

    def fill(self, inputs: Int64s, table: SequenceTable, rows: Sequence[int]) -> None:
        """Write the next step's inputs [num_inputs, n], and what the device does not have of the table yet.

        The slot has to be free. A table with more than max_changes is flushed first.
        """
        if not self.has_room:
            raise ValueError(f"slot {self._slot} of the ring is taken")
        if table.num_staged > self.layout.max_changes:
            table.flush()
        layout, num_seqs = self.layout, inputs.shape[1]
        slot = self._host_slots[self._slot]
        columns = slot[HEADER_WORDS : layout.first_change].reshape(layout.max_num_seqs, layout.row_words)[:num_seqs]
        columns[:, : layout.num_inputs] = inputs.T
        firsts, counts, changes = _changes_by_sequence(table, rows)
        slot[layout.first_change : layout.first_change + len(changes)] = changes
        columns[:, layout.num_inputs] = firsts[:-1]
        columns[:, layout.num_inputs + 1] = counts[:-1]
        slot[:HEADER_WORDS] = self._turn, num_seqs, firsts[-1], counts[-1]

    def launched(self, num_seqs: int, *, spins: bool = False) -> StepTokens:
        """Note that the step that was filled in last is launched; return its tokens to come. spins: see Arrival."""
        tokens = StepTokens(self, self._slot, self._turn, num_seqs, spins=spins)
        self._taken[self._slot] = True
        self._turn += 1
        return tokens

    def read(self, slot: int, turn: int, num_seqs: int) -> Int64s:
        """Return the tokens of a step that has ended; its slot is free. Raises RingOutOfStep."""
        words = self._host_words[slot, :num_seqs].copy()
        self._taken[slot] = False
        if ((words >> 32) != turn % TAGS + 1).any():
            raise RingOutOfStep(f"slot {slot} of the ring does not have the tokens of turn {turn}")
        tokens: Int64s = words & 0xFFFFFFFF
        return tokens


class StepTokens:
    """The tokens of a launched step, like a Readback of them."""

    def __init__(self, ring: StepRing, slot: int, turn: int, num_seqs: int, *, spins: bool) -> None:
        """Make it when the step is launched. No copy, no sync."""
        self._ring = ring
        self._place = slot, turn, num_seqs
        self._arrival = Arrival(ring.state.device, spins=spins)

    def wait(self) -> tuple[Tensor, None, None, None, None]:
        """The tokens [n] int64, as Sampled.tensors() has them. Raises RingOutOfStep, or the device's error."""
        self._arrival.wait()
        return torch.from_numpy(self._ring.read(*self._place)), None, None, None, None


def _changes_by_sequence(table: SequenceTable, rows: Sequence[int]) -> tuple[Int64s, Int64s, Int64s]:
    """Return the first change and their number for each row, and last for all other rows together; and the changes.

    These are the entries staged in the table, in this order.
    """
    places, block_ids = table.staged()
    if not len(places):
        nothing = np.zeros(len(rows) + 1, dtype=np.int64)
        return nothing, nothing, places
    seqs = np.full(table.max_num_seqs + 1, len(rows), dtype=np.int64)
    seqs[np.asarray(rows, dtype=np.int64)] = np.arange(len(rows))
    owners = seqs[places // table.max_blocks_per_seq % (table.max_num_seqs + 1)]
    counts = np.bincount(owners, minlength=len(rows) + 1)
    order = np.argsort(owners, kind="stable")
    changes: Int64s = (places << 32 | block_ids)[order]
    return counts.cumsum() - counts, counts, changes
