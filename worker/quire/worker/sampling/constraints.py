"""The tokens that a row may choose, and biases of their logits: all changes of logits before the penalties.

    static      allowed_token_ids, and bad words of one token: a mask of the vocabulary for each row
    by length   end tokens, while the sequence is too short to end
    by tokens   bad words of several tokens: the last one is forbidden behind the others. The row's last tokens are kept
                on the device, since a step is launched before the host knows the tokens of the one before it
    bias        added to the logits of some tokens

A forbidden token has the logit -inf. Tokens forbidden for good or by length leave at least one token: else the
request is refused (sampling_ranges.leaves_token). A bad word of several tokens that would leave none is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.compute.v1.sampling_ranges import MAX_BAD_WORD_TOKENS
from quire.worker.device.transfer import send, to_device
from quire.worker.sampling.drafts import NO_DRAFT, DraftRows, Kept, newest_of

NUM_REMEMBERED = MAX_BAD_WORD_TOKENS - 1
"""Last tokens of a sequence that bad words are compared with."""

_ANY_TOKEN, _NO_TOKEN = -1, -2
_NONE: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = np.zeros(0, dtype=np.int64)
_Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Positions = Sequence[int] | _Ints
"""Positions in sequences, one for each row of a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """The tokens that one row may choose, for rows that may not choose everything.

    allowed_token_ids   the only tokens that can be chosen; empty: all
    bad_words           the last token of each can't be chosen behind the others; 1 to MAX_BAD_WORD_TOKENS tokens each
    min_seq_tokens      end_token_ids can't be chosen while the sequence has fewer tokens than this
    logit_bias          by token, added to its logit
    """

    allowed_token_ids: _Ints = field(default_factory=lambda: _NONE)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_seq_tokens: int = 0
    end_token_ids: _Ints = field(default_factory=lambda: _NONE)
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if nothing is forbidden and nothing added."""
        return not (self.allowed_token_ids.size or self.bad_words or self.delays_end or self.logit_bias)

    @property
    def single_bad_words(self) -> list[int]:
        """The bad words of one token."""
        return [word[0] for word in self.bad_words if len(word) == 1]

    @property
    def long_bad_words(self) -> list[tuple[int, ...]]:
        """The bad words of several tokens."""
        return [word for word in self.bad_words if len(word) > 1]

    @property
    def delays_end(self) -> bool:
        """True if end tokens can be forbidden."""
        return self.min_seq_tokens > 0 and self.end_token_ids.size > 0

    def forbidden(self, vocab_size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None:
        """Return the tokens that can never be chosen, [vocab_size], None if there are none."""
        mask = np.zeros(vocab_size, dtype=bool)
        if self.allowed_token_ids.size:
            mask[:] = True
            mask[self.allowed_token_ids] = False
        mask[self.single_bad_words] = True
        return mask if mask.any() else None


@dataclass(frozen=True, slots=True)
class _Masked:
    """Places in the batch of rows with a mask in the table; both [n] int64."""

    places: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class _Delayed:
    """The places with end tokens to forbid: the length from which on these are allowed, and their flat indexes."""

    places: _Ints
    min_seq_tokens: _Ints
    flat: tuple[_Ints, ...]


@dataclass(frozen=True, slots=True)
class _BadWords:
    """Rows with bad words of several tokens, n, and these words, W.

    places, rows    [n]     int64: in the batch, in the table
    places_host     [n]     the places on the host
    number_of       [W]     int64: which of the n rows each word is for
    tokens_before   [W, NUM_REMEMBERED] int64, aligned to the right; _ANY_TOKEN before a word's first token
    forbidden       [W]     int64: index of the word's last token in the logits [n, vocab_size] of these rows
    """

    places: Tensor
    rows: Tensor
    places_host: _Ints
    number_of: Tensor
    tokens_before: Tensor
    forbidden: Tensor


@dataclass(frozen=True, slots=True)
class _Biases:
    """Flat indexes [m] int64 in the logits of the batch, distinct, and the biases there [m] float32."""

    flat: Tensor
    values: Tensor


@dataclass(slots=True)
class ConstraintPlan:
    """The constraints of one batch of rows, on the device; it serves until the rows change."""

    masked: _Masked | None
    delayed: _Delayed | None
    bad_words: _BadWords | None
    biases: _Biases | None
    forbidden_ends: tuple[bytes, Tensor] | None = None
    """The delayed rows that are too short now, and the flat indexes of their end tokens."""


class ConstraintTable:
    """The state of constraints by row of the sequence table."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        """Takes its memory at once: max_num_seqs * (vocab_size + 8 * NUM_REMEMBERED) bytes."""
        self.vocab_size = vocab_size
        self.device = device
        # A tensor made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            self._forbidden = torch.zeros((max_num_seqs, vocab_size), dtype=torch.bool, device=device)
            self._last_tokens = torch.full((max_num_seqs, NUM_REMEMBERED), _NO_TOKEN, dtype=torch.int64, device=device)
        self._rows: dict[int, Constraints] = {}
        self._masked_rows: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables."""
        return self._forbidden.nbytes + self._last_tokens.nbytes

    def set(
        self, row: int, constraints: Constraints, last_token_ids: Sequence[int] | np.ndarray[tuple[int, ...], Any]
    ) -> None:
        """Set a row's tables. Cost: with a mask one transfer of vocab_size bytes."""
        mask = constraints.forbidden(self.vocab_size)
        self.clear(row)
        if mask is not None:
            send(torch.from_numpy(mask), self._forbidden[row])
            self._masked_rows.add(row)
        if constraints.long_bad_words:
            last = np.full(NUM_REMEMBERED, _NO_TOKEN, dtype=np.int64)
            given = np.asarray(last_token_ids, dtype=np.int64)[-NUM_REMEMBERED:]
            last[NUM_REMEMBERED - len(given) :] = given
            send(torch.from_numpy(last), self._last_tokens[row])
        self._rows[row] = constraints

    def clear(self, row: int) -> None:
        """Forget a row's constraints, if it has some."""
        self._rows.pop(row, None)
        self._masked_rows.discard(row)

    def fork(self, row: int, child_row: int) -> None:
        """Copy a row's constraints to child_row."""
        self.clear(child_row)
        constraints = self._rows.get(row)
        if constraints is None:
            return
        if row in self._masked_rows:
            self._forbidden[child_row] = self._forbidden[row]
            self._masked_rows.add(child_row)
        if constraints.long_bad_words:
            self._last_tokens[child_row] = self._last_tokens[row]
        self._rows[child_row] = constraints

    def plan(self, rows: Sequence[int]) -> ConstraintPlan | None:
        """Return the plan of this batch, None if no row has constraints."""
        if self._rows.keys().isdisjoint(rows):
            return None
        given = {place: self._rows[row] for place, row in enumerate(rows) if row in self._rows}
        return ConstraintPlan(
            masked=self._plan_masks(rows),
            delayed=self._plan_delayed(given),
            bad_words=self._plan_bad_words(rows, given),
            biases=self._plan_biases(given),
        )

    def _plan_masks(self, rows: Sequence[int]) -> _Masked | None:
        places = [place for place, row in enumerate(rows) if row in self._masked_rows]
        return _Masked(self._send(places), self._send([rows[place] for place in places])) if places else None

    def _plan_delayed(self, given: Mapping[int, Constraints]) -> _Delayed | None:
        delayed = {place: each for place, each in given.items() if each.delays_end}
        if not delayed:
            return None
        return _Delayed(
            places=np.array(list(delayed), dtype=np.int64),
            min_seq_tokens=np.array([each.min_seq_tokens for each in delayed.values()], dtype=np.int64),
            flat=tuple(place * self.vocab_size + each.end_token_ids for place, each in delayed.items()),
        )

    def _plan_bad_words(self, rows: Sequence[int], given: Mapping[int, Constraints]) -> _BadWords | None:
        words = {place: each.long_bad_words for place, each in given.items()}
        places = [place for place, several in words.items() if several]
        if not places:
            return None
        each = [(number, word) for number, place in enumerate(places) for word in words[place]]
        before = np.full((len(each), NUM_REMEMBERED), _ANY_TOKEN, dtype=np.int64)
        for index, (_, word) in enumerate(each):
            before[index, NUM_REMEMBERED - len(word) + 1 :] = word[:-1]
        return _BadWords(
            places=self._send(places),
            rows=self._send([rows[place] for place in places]),
            places_host=np.array(places, dtype=np.int64),
            number_of=self._send([number for number, _ in each]),
            tokens_before=self._send(before),
            forbidden=self._send([number * self.vocab_size + word[-1] for number, word in each]),
        )

    def _plan_biases(self, given: Mapping[int, Constraints]) -> _Biases | None:
        biased = {place: each.logit_bias for place, each in given.items() if each.logit_bias}
        if not biased:
            return None
        flat = [place * self.vocab_size + np.fromiter(bias, np.int64, len(bias)) for place, bias in biased.items()]
        values = [np.fromiter(bias.values(), np.float32, len(bias)) for bias in biased.values()]
        return _Biases(self._send(np.concatenate(flat)), self._send(np.concatenate(values)))

    def _send(self, values: Any) -> Tensor:
        return to_device(torch.from_numpy(np.asarray(values)), self.device)

    def apply(
        self, plan: ConstraintPlan, logits: Tensor, positions: Positions, drafts: DraftRows | None = None
    ) -> Tensor:
        """Return logits [B, vocab_size] with the constraints applied; the given ones are not changed. No sync."""
        scores = logits.clone()
        flat = scores.view(-1)
        if plan.masked is not None:
            mask = self._forbidden.index_select(0, plan.masked.rows)
            masked = scores.index_select(0, plan.masked.places).masked_fill_(mask, -math.inf)
            scores.index_copy_(0, plan.masked.places, masked)
        if plan.delayed is not None and (ends := self._forbidden_ends(plan, plan.delayed, positions)) is not None:
            flat.index_fill_(0, ends, -math.inf)
        if plan.bad_words is not None:
            last = self._last_tokens_of(plan.bad_words, drafts)
            allowed = self._without_bad_words(plan.bad_words, last, scores.index_select(0, plan.bad_words.places))
            scores.index_copy_(0, plan.bad_words.places, allowed)
        if plan.biases is not None:
            flat.index_add_(0, plan.biases.flat, plan.biases.values)
        return scores

    def _forbidden_ends(self, plan: ConstraintPlan, delayed: _Delayed, positions: Positions) -> Tensor | None:
        """Flat indexes of end tokens that a row is too short for; sent again only when other rows are."""
        too_short = np.asarray(positions, dtype=np.int64)[delayed.places] < delayed.min_seq_tokens
        if not too_short.any():
            return None
        key = too_short.tobytes()
        if plan.forbidden_ends is None or plan.forbidden_ends[0] != key:
            flat = [ids for ids, is_short in zip(delayed.flat, too_short, strict=True) if is_short]
            plan.forbidden_ends = key, self._send(np.concatenate(flat))
        return plan.forbidden_ends[1]

    def _last_tokens_of(self, words: _BadWords, drafts: DraftRows | None) -> Tensor:
        """The last tokens before each of the rows, [n, NUM_REMEMBERED]: those of the table, and drafts behind them."""
        last = self._last_tokens.index_select(0, words.rows)
        if drafts is None:
            return last
        latest, columns = drafts.latest(words.places_host, NUM_REMEMBERED)
        drafted = self._send(latest)
        return torch.where(drafted == NO_DRAFT, last.gather(1, self._send(columns)), drafted)

    def _without_bad_words(self, words: _BadWords, last: Tensor, scores: Tensor) -> Tensor:
        last = last.index_select(0, words.number_of)
        met = ((last == words.tokens_before) | (words.tokens_before == _ANY_TOKEN)).all(-1)
        added = torch.where(met, scores.new_full((), -math.inf), scores.new_zeros(()))
        left = scores.clone()
        left.view(-1).index_add_(0, words.forbidden, added)
        nothing_left = left.amax(-1, keepdim=True) == -math.inf
        return torch.where(nothing_left, scores, left)

    def remember(
        self, plan: ConstraintPlan, tokens: Tensor, drafts: DraftRows | None = None, kept: Kept | None = None
    ) -> None:
        """Take the tokens [B] that were chosen for the batch, with drafts those that are kept."""
        if (words := plan.bad_words) is None:
            return
        last = self._last_tokens_of(words, drafts)
        chosen = tokens.index_select(0, words.places)[:, None]
        newest = torch.cat((last[:, 1:], chosen), dim=1)
        if kept is not None:
            newest = newest_of(newest, kept.to_newest.index_select(0, words.places))
        self._last_tokens.index_copy_(0, words.rows, newest)
