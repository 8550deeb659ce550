"""Masks of the tokens that grammars allow: one row of bits for each sequence of a step that follows a grammar.

Threads make them while the forward runs. They need the tokens before them, which a GPU may still be sampling: so they
wait for these, and the model thread launches the forward meanwhile. Sequences without a grammar need no mask. A step
without any sequence that follows a grammar needs none of this.

A sequence with drafts has a row for each token that it samples. The first is made as in a step without drafts; a copy
of the matcher takes the drafts for the others, until it refuses one or DRAFTS_TIME_S are over. The rows that are not
made are void: their tokens are not kept, so fewer drafts are accepted, and the step waits no longer for them.

A step does not wait long for a mask. A sequence with a mask that is late gets an end token that means nothing, and so
it does in the steps behind, which were launched before the client knew. masks_aside.py goes on with the mask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import Readback, indices, to_device
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.sampling.drafts import VOID
from quire.worker.sampling.following import Bits, Following
from quire.worker.sampling.masks_aside import PATIENCE_S
from quire.worker.sampling.threads import Threads, Work

DRAFTS_TIME_S = PATIENCE_S / 2
"""Time of a processor in which a thread begins the masks behind a sequence's drafts."""
MAX_THREADS = 8
"""The most threads that make the masks of one step."""


@dataclass(frozen=True, slots=True)
class MaskedRun:
    """One sequence of a step; token_ids is None for the token that was sampled last. Drafts are behind them."""

    row: int
    start: int
    count: int
    token_ids: Sequence[int] | np.ndarray[Any, Any] | None
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_masks(self) -> int:
        """Tokens that the sequence samples in the step."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that are allowed in a step.

    rows        [n]     the sequences that follow a grammar and get a token, with drafts once for each token
    bits        [n, W]  uint8, of W >= vocab_size / 8 bytes: bit i of byte j is token 8 j + i
    failures    by row, why a grammar can't be followed: only end tokens are allowed there
    late        rows without a mask in time: only end tokens are allowed there, and the sampled one means nothing
    voids       indexes in `rows` of masks behind drafts that are not made, or must not count: their tokens are not kept
    """

    rows: tuple[int, ...] = ()
    bits: Bits = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    failures: Mapping[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    voids: tuple[int, ...] = ()

    def apply(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Write -inf into logits [len(rows), vocab_size] float32, in place, for tokens that are not allowed."""
        if not self.rows:
            return
        places = indices(self._places(rows), logits.device)
        bits = to_device(torch.from_numpy(self.bits), logits.device)
        most = _most_of_bytes(logits.device).index_select(0, bits.flatten().int()).view(len(self.rows), -1)
        logits.index_copy_(0, places, torch.minimum(logits.index_select(0, places), most[:, : logits.shape[1]]))

    def void(self, tokens: Tensor, rows: Sequence[int]) -> None:
        """Write VOID into the sampled tokens [len(rows)], in place, where a token must not be kept."""
        if self.voids:
            places = self._places(rows)
            tokens.index_fill_(0, indices([places[index] for index in self.voids], tokens.device), VOID)

    def _places(self, rows: Sequence[int]) -> list[int]:
        """The places of the masks among the rows of a batch. Those of a sequence with drafts are adjacent there."""
        places: list[int] = []
        for index, row in enumerate(self.rows):
            goes_on = index > 0 and self.rows[index - 1] == row
            places.append(places[-1] + 1 if goes_on else rows.index(row))
        return places


@lru_cache(maxsize=16)
def _most_of_bytes(device: torch.device) -> Tensor:
    """Return the most that the logits of 8 tokens may be, for each byte of a mask: inf or -inf, [256, 8] float32.

    On a CPU a table and a minimum take a quarter of the time of masked_fill.
    """
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return to_device(torch.from_numpy(np.where(allowed, np.float32(np.inf), np.float32(-np.inf))), device)


NO_MASKS = Masks()


class SampledTokens:
    """Tokens that steps before have sampled for some rows, on their way to the host."""

    def __init__(self, rows: Sequence[int], readback: Readback) -> None:
        self._rows = rows
        self._readback = readback

    def wait(self) -> list[int]:
        """Return them when the device has sampled them; from any thread."""
        (tokens,) = self._readback.wait()
        return [] if tokens is None else [int(token) for token in tokens.tolist()]

    def token(self, row: int) -> int:
        return self.wait()[self._rows.index(row)]


@dataclass(slots=True)
class RunMasks:
    """The masks of one run: bits [num_masks, W], of which a thread has made the first num_made so far."""

    bits: Bits
    num_made: int = 0


@dataclass(frozen=True, slots=True)
class MasksInWork:
    """Masks of a step that threads are making: with the runs, their masks and the work of threads by row.

    bits    [n, W], those of all runs, one after the other
    late    rows that the threads do not begin with
    """

    sampled: SampledTokens
    bits: Bits
    masks: Mapping[int, RunMasks]
    runs: Mapping[int, MaskedRun]
    work: Mapping[int, Work]
    late: frozenset[int]


class GrammarRows:
    """The grammars of the sequence table's rows. Used on the model thread; other threads compute the masks."""

    def __init__(
        self,
        table: SequenceTable,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """patience_s is the time that a step waits for a mask that a thread is at."""
        self._table = table
        self._patience_s = patience_s
        self._following: dict[int, Following] = {}
        self._void_from: dict[int, int] = {}  # position of the first sampled token of a row that means nothing
        self._num_bytes = -(-vocab_size // 32) * 4
        self._end_bits = np.zeros(self._num_bytes, dtype=np.uint8)
        for token_id in end_token_ids:
            self._end_bits[token_id // 8] |= 1 << token_id % 8
        self._threads = Threads(max(1, min(MAX_THREADS, os.cpu_count() or 1)), "masks")

    def set(self, row: int, following: Following | None) -> None:
        """Let a row follow a grammar, or none."""
        self._following.pop(row, None)
        self._void_from.pop(row, None)
        if following is not None:
            self._following[row] = following

    def fork(self, row: int, child_row: int) -> None:
        """Let child_row follow the grammar of row, if it has one, from any token on."""
        following = self._following.get(row)
        self.set(child_row, None if following is None else following.fork())
        if row in self._void_from:
            self._void_from[child_row] = self._void_from[row]

    def follows(self, rows: Sequence[int]) -> bool:
        """True if one of the rows follows a grammar."""
        return bool(self._following) and any(row in self._following for row in rows)

    def begin(self, runs: Sequence[MaskedRun]) -> MasksInWork:
        """Begin to make the masks of a step, before its forward; finish() has to be called in this step.

        Cost: a copy of the sampled tokens that they depend on, queued behind the steps that sample them; no sync.
        """
        runs = [run for run in runs if run.row in self._following]
        device = self._table.device
        sampled_rows = [run.row for run in runs if run.token_ids is None]
        last_tokens = self._table.last_token.index_select(0, indices(sampled_rows, device)) if sampled_rows else None
        sampled = SampledTokens(sampled_rows, Readback(device, last_tokens))
        late = frozenset(run.row for run in runs if self._is_late(run))
        bits = np.zeros((sum(run.num_masks for run in runs), self._num_bytes), dtype=np.uint8)
        ends = accumulate(run.num_masks for run in runs)
        masks = {run.row: RunMasks(bits[end - run.num_masks : end]) for run, end in zip(runs, ends, strict=True)}
        work = {
            run.row: self._threads.submit(
                partial(_follow, self._following[run.row], run, sampled, masks[run.row], self._end_bits)
            )
            for run in runs
            if run.row not in late
        }
        return MasksInWork(sampled, bits, masks, {run.row: run for run in runs}, work, late)

    def _is_late(self, run: MaskedRun) -> bool:
        """True if a run has a token before it that means nothing, or needs a mask that no step waits for."""
        void_from, following = self._void_from.get(run.row), self._following[run.row]
        if void_from is not None:
            if run.start > void_from or (run.start == void_from and run.token_ids is None):
                return True
            del self._void_from[run.row]  # the client has taken the token back
        end = run.start + run.count
        if not run.samples or not following.is_costly or following.has_ready(end):
            return False
        self._void_from[run.row] = end
        return True

    def finish(self, in_work: MasksInWork) -> Masks:
        """Return the masks. A row is late if a thread is at its first mask for more than patience_s."""
        in_work.sampled.wait()
        cut = self._wait(in_work)
        for row, work in in_work.work.items():
            if row not in cut:
                work.result()  # raises errors that are not the grammar's
        late = in_work.late.union(row for row, num_made in cut.items() if not num_made)
        bits = in_work.bits.copy() if cut else in_work.bits  # a thread that is late may still write there
        rows: list[int] = []
        voids: list[int] = []
        failures: dict[int, str] = {}
        for row, masks in in_work.masks.items():
            first, num_masks = len(rows), len(masks.bits)
            rows += [row] * num_masks
            following, num_kept, run = self._following[row], cut.get(row, masks.num_made), in_work.runs[row]
            if run.drafts and row not in late:  # the next step has to know the accepted ones, and forgets the others
                following.run(run.start + run.count, run.drafts)
            if num_masks and row not in late and following.error:
                failures[row] = following.error
            if num_masks and (row in late or following.error or following.has_ended):
                bits[first] = self._end_bits
            voids += range(first + max(1, num_kept), first + num_masks)
        return Masks(tuple(rows), bits, failures, late.intersection(rows), tuple(voids))

    def _wait(self, in_work: MasksInWork) -> dict[int, int]:
        """Wait for the masks of rows. Return how many are made of each row that is not waited for.

        A row without any is put aside.
        """
        cut: dict[int, int] = {}
        begun_at = time.monotonic()
        while True:
            left = {row: each for row, each in in_work.work.items() if row not in cut}
            missing = wait(left.values(), timeout=self._patience_s).not_done
            if not missing:
                return cut
            late = [row for row, each in left.items() if each in missing and self._is_stuck(each, begun_at)]
            if late:
                self._threads.leave()
                # Others of the same grammar, with masks that are not begun, would take as long.
                slow = {self._following[row].compiled for row in late}
                late += [row for row, each in left.items() if self._following[row].compiled in slow and each.cancel()]
                cut |= {row: in_work.masks[row].num_made for row in late}
                for row in late:
                    if not cut[row]:
                        self._put_aside(in_work, row)

    def _is_stuck(self, work: Work, begun_at: float) -> bool:
        return work.has_taken(self._patience_s, since=begun_at)

    def _put_aside(self, in_work: MasksInWork, row: int) -> None:
        """Leave a row's thread to its mask. The row goes on with another matcher, at the beginning of the text."""
        following, run, work = self._following[row], in_work.runs[row], in_work.work[row]
        token_ids = [in_work.sampled.token(row)] if run.token_ids is None else run.token_ids
        tokens = following.tokens_with(run.start, [int(token) for token in token_ids])
        compiled, begins_at = following.compiled, following.begins_at
        self._void_from[row] = run.start + run.count
        self._following[row] = Following.begin(compiled, begins_at=begins_at, tokens=tokens)
        self._following[row].is_costly = True
        are_known = begins_at + len(tokens) == run.start + run.count
        if compiled.aside is not None and not work.cancelled() and run.samples and are_known:
            compiled.aside.adopt(following, in_work.masks[row].bits[0], work, tokens=tokens)


def _follow(following: Following, run: MaskedRun, sampled: SampledTokens, masks: RunMasks, end_bits: Bits) -> None:
    """Record a run, and make the masks of the tokens that it samples, if it does."""
    token_ids = [sampled.token(run.row)] if run.token_ids is None else [int(token) for token in run.token_ids]
    following.run(run.start, token_ids)
    if not run.samples:
        return
    position, begun_at = run.start + run.count, time.thread_time()
    _write(following, position, masks.bits[0])
    ahead = following.fork() if run.drafts else following
    masks.num_made = 1  # from here on the step may go on without the others, and `following` is its own again
    if ahead.error:
        return
    for count in range(1, len(masks.bits)):
        if ahead.is_costly or time.thread_time() - begun_at >= DRAFTS_TIME_S:
            return
        ahead.run(position + count - 1, run.drafts[count - 1 : count])
        _write(ahead, position + count, masks.bits[count])
        if ahead.error:
            return
        if ahead.has_ended:
            masks.bits[count] = end_bits
        masks.num_made += 1


def _write(following: Following, position: int, bits: Bits) -> None:
    """Write the tokens that are allowed at a position into bits, after those before it."""
    if following.advance(position):
        following.write_mask(position, bits)
    else:
        bits.fill(255)
