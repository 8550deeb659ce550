"""Drafts in one sample: a sequence has several rows of logits, and the drafts that are right are accepted.

A sequence with d drafts has 1 + d rows, one behind the other; one without has one row:

    row         0                   1           ...     d
    behind      the last token      draft 0             draft d - 1
    samples     token 0             token 1             token d
    expects     draft 0             draft 1             -

A row samples as it would in a step of its own. The token of row 0 is kept. That of another row is kept if the token of
the row before it is kept, and is the draft there. So the tokens are those that steps without drafts would give, one by
one; the first one that differs from its draft takes the draft's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import indices

DraftIds = Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NO_DRAFT = -2
"""The draft of a sequence's last row. No row has this token."""
VOID = -1
"""The token of a row that is not kept, whatever was sampled before it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens of a sample that are kept: L rows, B sequences, all on the device.

    counts      [B]     int64, 1 more than the accepted drafts
    is_kept     [L]     bool
    to_newest   [L]     int64, rows from each one to the last row of its sequence that is kept
    """

    counts: Tensor
    is_kept: Tensor
    to_newest: Tensor


def newest_of(values: Tensor, to_newest: Tensor) -> Tensor:
    """Return for each of some rows, [n], the value of its sequence's newest kept row: values [n, ...], in which all
    rows of these sequences are, and their to_newest [n].
    """
    return values.index_select(0, torch.arange(len(values), device=values.device) + to_newest)


class DraftRows:
    """The rows of a batch of B sequences with their drafts: L rows, of which row i is for the token of some sequence.

    counts      [B]     rows of each sequence
    offsets     [L]     drafts before the row in its sequence
    """

    def __init__(self, drafts: Sequence[DraftIds], device: torch.device) -> None:
        """`drafts` are those of each sequence. Cost: O(L), one transfer, no sync."""
        self.counts: Int64s = np.array([1 + len(each) for each in drafts], dtype=np.int64)
        firsts: Int64s = self.counts.cumsum() - self.counts
        first_of_row = firsts.repeat(self.counts)
        self.offsets: Int64s = np.arange(self.counts.sum()) - first_of_row
        self._expected = np.full(len(self.offsets), NO_DRAFT, dtype=np.int64)
        for first, each in zip(firsts.tolist(), drafts, strict=True):
            self._expected[first : first + len(each)] = each
        sequence_of_row = np.arange(len(drafts)).repeat(self.counts)
        self._firsts = indices(firsts, device)
        self._on_device = indices(np.stack((self._expected, first_of_row, sequence_of_row)), device)

    def repeat(self, values: Sequence[int] | Int64s) -> Int64s:
        """Return one value of each sequence, [B], for each row, [L]."""
        return np.asarray(values, dtype=np.int64).repeat(self.counts)

    def before(self, places: Int64s) -> tuple[Int64s, Int64s]:
        """The drafts before the rows at these places: for each of them its index in `places`, and the draft."""
        index: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        tokens = [index[0]]
        for back in range(1, int(self.offsets[places].max(initial=0)) + 1):
            reached = np.flatnonzero(self.offsets[places] >= back)
            index.append(reached)
            tokens.append(self._expected[places[reached] - back])
        return np.concatenate(index), np.concatenate(tokens)

    def latest(self, places: Int64s, width: int) -> tuple[Int64s, Int64s]:
        """The last `width` drafts before the rows at these places, aligned to the right: [n, width], NO_DRAFT where
        there are fewer; and where tokens before the drafts, of as many columns, come to lie: their columns, [n, width].
        """
        tokens = np.full((len(places), width), NO_DRAFT, dtype=np.int64)
        offsets = self.offsets[places]
        for back in range(1, min(width, int(offsets.max(initial=0))) + 1):
            reached = np.flatnonzero(offsets >= back)
            tokens[reached, width - back] = self._expected[places[reached] - back]
        return tokens, np.minimum(np.arange(width) + offsets[:, None], width - 1)

    def keep(self, tokens: Tensor) -> Kept:
        """Say which of the sampled tokens [L] are kept; VOID ones are not, nor any behind them. No sync."""
        expected, first, sequence = self._on_device.unbind()
        missed = (tokens != expected).long()
        before = missed.cumsum(0) - missed
        is_kept = (before == before.index_select(0, first)) & (tokens != VOID)
        counts = torch.zeros(len(self.counts), dtype=torch.int64, device=tokens.device)
        counts.index_add_(0, sequence, is_kept.long())
        newest = first + counts.index_select(0, sequence) - 1
        return Kept(counts, is_kept, newest - torch.arange(len(tokens), device=tokens.device))

    def newest(self, tokens: Tensor, kept: Kept) -> Tensor:
        """The last token of each sequence that is kept, [B]."""
        return tokens.index_select(0, self._firsts + kept.counts - 1)
