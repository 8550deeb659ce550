"""The layout of the ring that step_ring.py reads: for the host, which writes it. The file imports no Triton.

    slot    header      [HEADER_WORDS]              its turn, its sequences, the first loose change, the number of these
            rows        [max_num_seqs, row_words]   the columns of each sequence: num_inputs of the step's, then the
                                                    first and the number of its changes
            changes     [max_changes]               place << 32 | block id, of a place in the block tables of all rows

The changes of a sequence lie side by side, and so do the loose ones, which are of rows that are not in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_WORDS = 4

# The columns of a sequence, and the rows of a step's inputs; behind them come the sampler's.
ROW, TOKEN, POSITION, LENGTH = range(4)
LAST_SAMPLED = -1
"""The id in place of a token's that stands for the token sampled last for its row."""

# Tags of steps are 1 .. TAGS, in turn.
TAGS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The sizes of a ring, in words of 8 bytes.

    temperature is the column of the temperature, a float64. first_slot is the column of the first layer group's slot;
    those of the other groups follow, and end the inputs.
    """

    num_slots: int
    max_num_seqs: int
    num_inputs: int
    temperature: int
    first_slot: int
    max_changes: int

    @property
    def row_words(self) -> int:
        """A power of two, so that a program has a row in one piece."""
        return 1 << (self.num_inputs + 1).bit_length()

    @property
    def first_change(self) -> int:
        """The word of a slot at which its changes begin."""
        return HEADER_WORDS + self.max_num_seqs * self.row_words

    @property
    def slot_words(self) -> int:
        return self.first_change + self.max_changes
