"""Masks of the tokens that grammars allow: one row of bits for each sequence of a step that follows a grammar.

Threads make them while the forward runs. They need the tokens before them, which a GPU may still be sampling: so they
wait for these, and the model thread launches the forward meanwhile. Sequences without a grammar need no mask. A step
without any sequence that follows a grammar needs none of this.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import Readback, indices, to_device
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.sampling.grammar_trial import describe
from quire.worker.sampling.grammars import Following, Threads, Work

log = logging.getLogger(__name__)

MAX_THREADS = 8
"""The most threads that make the masks of one step."""
MASK_TIMEOUT_S = 1.0
"""The time limit of one mask, once the tokens before it are known. llguidance's own limits don't bound its time."""

_Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class MaskedRun:
    """One sequence of a step; token_ids is None for the token that was sampled last."""

    row: int
    start: int
    count: int
    token_ids: Sequence[int] | np.ndarray[Any, Any] | None
    samples: bool


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that are allowed in a step.

    rows        [n]     the sequences that follow a grammar and get a token
    bits        [n, W]  uint8, of W >= vocab_size / 8 bytes: bit i of byte j is token 8 j + i
    failures    by row, why a grammar can't be followed: only end tokens are allowed there
    """

    rows: tuple[int, ...] = ()
    bits: _Bits = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    failures: Mapping[int, str] = field(default_factory=dict)

    def apply(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Write -inf into logits [len(rows), vocab_size] float32, in place, for tokens that are not allowed."""
        if not self.rows:
            return
        places = indices([rows.index(row) for row in self.rows], logits.device)
        bits = to_device(torch.from_numpy(self.bits), logits.device)
        most = _most_of_bytes(logits.device).index_select(0, bits.flatten().int()).view(len(self.rows), -1)
        logits.index_copy_(0, places, torch.minimum(logits.index_select(0, places), most[:, : logits.shape[1]]))


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


@dataclass(frozen=True, slots=True)
class MasksInWork:
    """Masks of a step that threads are making: as in Masks, and the work of each row's thread."""

    sampled: SampledTokens
    bits: _Bits
    rows: tuple[int, ...]
    work: Mapping[int, Work]


class GrammarRows:
    """The grammars of the sequence table's rows. Used on the model thread; other threads compute the masks."""

    def __init__(
        self,
        table: SequenceTable,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        timeout_s: float = MASK_TIMEOUT_S,
    ) -> None:
        self._table = table
        self._timeout_s = timeout_s
        self._following: dict[int, Following] = {}
        self._num_bytes = -(-vocab_size // 32) * 4
        self._end_bits = np.zeros(self._num_bytes, dtype=np.uint8)
        for token_id in end_token_ids:
            self._end_bits[token_id // 8] |= 1 << token_id % 8
        self._threads = Threads(max(1, min(MAX_THREADS, os.cpu_count() or 1)), "masks")

    def set(self, row: int, following: Following | None) -> None:
        """Let a row follow a grammar, or none."""
        self._following.pop(row, None)
        if following is not None:
            self._following[row] = following

    def fork(self, row: int, child_row: int) -> None:
        """Let child_row follow the grammar of row, if it has one, from any token on."""
        following = self._following.get(row)
        self.set(child_row, None if following is None else following.fork())

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
        bits = np.zeros((sum(run.samples for run in runs), self._num_bytes), dtype=np.uint8)
        places = count()
        work = {
            run.row: self._threads.submit(
                partial(_follow, self._following[run.row], run, sampled, bits[next(places)] if run.samples else None)
            )
            for run in runs
        }
        return MasksInWork(sampled, bits, tuple(run.row for run in runs if run.samples), work)

    def finish(self, in_work: MasksInWork) -> Masks:
        """Return the masks, when they are made. A row fails if its mask takes more than timeout_s."""
        in_work.sampled.wait()
        given_up = self._wait(in_work.work)
        bits = in_work.bits.copy() if given_up else in_work.bits  # a thread that is late may still write there
        failures = {}
        for place, row in enumerate(in_work.rows):
            following = self._following[row]
            if following.error or following.has_ended:
                bits[place] = self._end_bits
            if following.error:
                failures[row] = following.error
        for row, work in in_work.work.items():
            if row not in given_up:
                work.result()  # raises errors that are not the grammar's
        return Masks(in_work.rows, bits, failures)

    def _wait(self, work: Mapping[int, Work]) -> list[int]:
        """Wait for the masks of rows. Return the rows that are given up."""
        given_up: list[int] = []
        begun_at = time.monotonic()
        while True:
            left = {row: each for row, each in work.items() if row not in given_up}
            late = wait(left.values(), timeout=self._timeout_s).not_done
            if not late:
                return given_up
            late_rows = [row for row, each in left.items() if each in late]
            stuck = [row for row in late_rows if work[row].has_taken(self._timeout_s, since=begun_at)]
            if stuck:
                self._give_up(stuck)
                # Others of the same grammar, with masks that are not begun, would take as long.
                slow = [row for row in late_rows if self._following[row].compiled.is_slow and work[row].cancel()]
                self._fail(slow)
                given_up += stuck + slow

    def _give_up(self, rows: Sequence[int]) -> None:
        """Leave rows, and the threads that are at them, to themselves: nothing can end a thread."""
        self._threads.give_up()
        self._fail(rows)

    def _fail(self, rows: Sequence[int]) -> None:
        for row in rows:
            compiled = self._following[row].compiled
            compiled.is_slow = True
            error = f"a token takes more than {self._timeout_s:g} s to check"
            log.warning("a grammar is given up: %s", error)
            self._following[row] = Following(compiled, compiled.matcher, 0, error=error)


def _follow(following: Following, run: MaskedRun, sampled: SampledTokens, bits: _Bits | None) -> None:
    """Record a run, and write the allowed next tokens into bits, if it samples."""
    token_ids = [sampled.token(run.row)] if run.token_ids is None else [int(token) for token in run.token_ids]
    following.run(run.start, token_ids)
    if bits is None:
        return
    if not following.advance(run.start + run.count):
        bits.fill(255)
    elif not following.error and not following.has_ended:
        following.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if following.matcher.is_error():
            following.error = describe(following.matcher.get_error())
        elif not bits.any():
            following.error = "no token can continue the text"
