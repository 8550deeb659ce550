"""Sampling: from logits to tokens, for a batch in which every row has parameters of its own.

First tokens that a grammar does not allow are masked. Order and meaning of the rest are those of transformers' logits
processors: constraints (constraints.py), repetition penalty over prompt and output, presence and frequency penalty over
output, temperature, top-k, top-p, min-p. Top-k, top-p and min-p all keep the tokens with a logit of at least some
threshold of the row; the greatest of the thresholds counts, and no row is sorted further than it must be.

A row's token is the one with the greatest sum of logit / temperature and noise, among those that are kept. The noise
of a token is random by (seed, position, token id) (gumbel.py). So a token depends on the row's own logits, the seed and
the position, and on nothing else. The logits themselves depend on the shape of the batch by rounding: on other rows,
chunks of prompts, preemptions. That changes a draw only where two sums are nearly equal (docs/reference/sampling.md,
Seeds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import indices, send, to_device
from quire.worker.sampling import gumbel
from quire.worker.sampling.constraints import ConstraintPlan, ConstraintTable, Positions
from quire.worker.sampling.drafts import DraftRows, Int64s, Kept, newest_of
from quire.worker.sampling.grammar_masks import NO_MASKS, Masks
from quire.worker.sampling.parameters import SamplingParams, TokenIds
from quire.worker.sampling.row_parameters import (
    NO_LOGPROBS,
    Columns,
    IsRow,
    RowParameters,
    has_penalties,
    is_drawn_by_kernels,
    is_greedy,
)

# On a CPU a sort costs far more than a selection: top-p looks at so many of the likeliest tokens first, and sorts all
# only if their probabilities do not add up to top_p.
TOP_P_CANDIDATES = (256, 4096)

_IN_PROMPT, _IN_OUTPUT = 1, 2
# A token is counted up to this many times: a frequency penalty of 2 has taken 65,534 from its logit then.
_MAX_COUNT = 2**15 - 1
_LEAST_LOGIT = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row of a batch of B, on the device. With drafts a sequence has several rows: see drafts.py.

    tokens          [B]     int64
    chosen_logprobs [B]     float32, natural log under the model's raw logits; None if no row asked for any
    top_ids         [B, K]  int64, K the most that a row asked for; None if K is 0
    top_logprobs    [B, K]  float32, falling
    counts          [n]     int64, how many of its tokens each of n sequences keeps, the first ones; None without drafts

    A row that asked for none has NaN and -1 there; one that asked for fewer than K takes its first few.
    """

    tokens: Tensor
    chosen_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    counts: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.tokens, self.chosen_logprobs, self.top_ids, self.top_logprobs, self.counts

    def take(self, index: Tensor) -> Sampled:
        """Return some rows alone, [n] int64."""
        tokens, *others = (None if each is None else each.index_select(0, index) for each in self.tensors()[:-1])
        assert tokens is not None
        return Sampled(tokens, *others)

    @staticmethod
    def join(parts: Sequence[Sampled]) -> Sampled:
        """Return the rows of several, one behind the other."""
        tokens = torch.cat([part.tokens for part in parts])
        if all(part.chosen_logprobs is None for part in parts):
            return Sampled(tokens)
        width = max(0 if part.top_ids is None else part.top_ids.shape[1] for part in parts)
        chosen = tokens.new_full(tokens.shape, math.nan, dtype=torch.float32)
        ids, values = tokens.new_full((len(tokens), width), -1), chosen.new_full((len(tokens), width), math.nan)
        first = 0
        for part in parts:
            of_part = slice(first, first := first + len(part.tokens))
            if part.chosen_logprobs is not None:
                chosen[of_part] = part.chosen_logprobs
            if part.top_ids is not None and part.top_logprobs is not None:
                ids[of_part, : part.top_ids.shape[1]] = part.top_ids
                values[of_part, : part.top_logprobs.shape[1]] = part.top_logprobs
        return Sampled(tokens, chosen, ids if width else None, values if width else None)


class Way(StrEnum):
    """The kernels' way to choose the tokens of a batch."""

    GREEDY = "greedy"
    DRAWN = "drawn"


# The kernels' inputs to draw a row's token: 8 bytes each.
DRAW_COLUMNS = {
    "seed": torch.int64,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "temperature": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Draws:
    """A batch for the kernels' choice of tokens: the way, and the DRAW_COLUMNS of its rows as they lie in memory."""

    way: Way
    columns: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    """[5, n]"""


@dataclass(frozen=True, slots=True)
class SamplerStatistics:
    """num_penalty_bytes is the size of the records of seen, counted and forbidden tokens."""

    num_rows: int
    num_penalty_bytes: int


@dataclass(frozen=True, slots=True)
class _Subset:
    """Some rows of a batch: their places [n], and the same as an index [n] int64, or None if they are all, in order."""

    places: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    index: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)

    def put(self, x: Tensor, values: Tensor) -> Tensor:
        """Return x with values in these rows; x may be written to."""
        return values if self.index is None else x.index_copy_(0, self.index, values)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """rows [n] int64 of the sequence table; repetition, presence and frequency [n, 1], None if no row has one."""

    subset: _Subset
    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor | None


@dataclass(frozen=True, slots=True)
class _TopK:
    """Keep the k greatest; k [n, 1] int64, at most max_k."""

    subset: _Subset
    k: Tensor
    max_k: int


@dataclass(frozen=True, slots=True)
class _TopP:
    """Keep a share p of all probability; p [n, 1] float64."""

    subset: _Subset
    p: Tensor


@dataclass(frozen=True, slots=True)
class _TopKThenP:
    """Keep a share p of the probability of the k greatest."""

    subset: _Subset
    k: Tensor
    max_k: int
    p: Tensor


@dataclass(frozen=True, slots=True)
class _InKernels:
    """Filters that the kernels apply as they draw: top_k int64, top_p and min_p float64, each [n]."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class _Draw:
    """Rows that are not greedy. seeds are [n], columns [n, 1]; the filters' subsets are of these rows, and disjoint.

    With in_kernels there are neither a log_min_p nor filters.
    """

    subset: _Subset
    seeds: Tensor
    temperature: Tensor
    log_min_p: Tensor | None
    filters: tuple[_TopK | _TopP | _TopKThenP, ...]
    in_kernels: _InKernels | None = None


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """num_top is the largest number of any row."""

    subset: _Subset
    num_top: int


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """One batch's tensors on the device; valid until the rows or their parameters change."""

    constraints: ConstraintPlan | None
    penalties: _Penalties | None
    draw: _Draw | None
    logprobs: _Logprobs | None

    @property
    def is_argmax(self) -> bool:
        return self.draw is None and self.logprobs is None


class Sampler:
    """Sampling parameters and penalty state per row of the sequence table."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        row_by_row: bool = False,
        in_kernels: bool | None = None,
    ) -> None:
        """row_by_row: a row's token and log-probabilities do not depend on the other rows of a batch, bit for bit.

        in_kernels: then the kernels apply the filters of all rows, since they treat each row by itself, and torch's
        running sums of a GPU have no fixed order. None: on a GPU.
        """
        self._is_row_by_row = row_by_row
        is_gpu = torch.device(device).type == "cuda"
        self._filters_in_kernels = row_by_row and (is_gpu if in_kernels is None else in_kernels)
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._params = RowParameters(max_num_seqs)
        # A tensor made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            self._seen = torch.zeros((max_num_seqs, vocab_size), dtype=torch.uint8, device=self.device)
            """[max_num_seqs, vocab_size]: _IN_PROMPT and _IN_OUTPUT, added. Made at start, when there is memory."""
            self._counts = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int16, device=self.device)
            """[max_num_seqs, vocab_size]: times in the output, of rows with a frequency penalty."""
        self._constraints = ConstraintTable(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=self.device)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._planned: tuple[tuple[int, ...], _SamplingPlan] | None = None
        self._planned_draws: tuple[tuple[int, ...], Draws | None] | None = None

    def set_params(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_token_ids: TokenIds = (),
        output_token_ids: TokenIds = (),
        last_token_ids: TokenIds = (),
    ) -> None:
        """Set the sampling of a row from now on, and clear its state.

        The token ids are what its sequence holds already; the last ones matter only to bad words, the others only to
        penalties. Raises ValueError for parameters out of range, constraints that leave no token, a row beyond
        max_num_seqs or a token id beyond the vocabulary.
        Cost: with penalties one transfer of vocab_size bytes, and as much for each of a frequency penalty, twice, and
        for tokens that are forbidden.
        """
        params.validate()
        self._check_row(row)
        flags = self._flags(prompt_token_ids, output_token_ids) if params.has_penalties else None
        self.clear(row)  # so that the old ones don't stay if the transfer fails
        if params.constraints is not None:
            self._constraints.set(row, params.constraints, last_token_ids)
        if flags is not None:
            send(flags, self._seen[row])
        if params.frequency_penalty:
            send(self._counted(output_token_ids), self._counts[row])
        self._params.set(row, params)

    def clear(self, row: int) -> None:
        """Forget the row's parameters. A row without any is left as it is."""
        self._params.clear(row)
        self._constraints.clear(row)
        self._forget_plans()

    def fork(self, row: int, child_row: int, *, seed: int | None = None) -> None:
        """Copy a row's parameters and penalty state to child_row, with another seed if one is given."""
        self._check_row(child_row)
        params = self._params.get(row)
        if params is None:
            self.clear(child_row)
            return
        if seed is not None:
            params = replace(params, seed=seed)
            params.validate()
        if params.has_penalties:
            self._seen[child_row] = self._seen[row]
        if params.frequency_penalty:
            self._counts[child_row] = self._counts[row]
        self._constraints.fork(row, child_row)
        self._params.set(child_row, params)
        self._forget_plans()

    def params(self, row: int) -> SamplingParams | None:
        return self._params.get(row)

    def draws(self, rows: Sequence[int]) -> Draws | None:
        """The kernels' choice of a token of each row, or None if one has penalties, constraints or log-probabilities.

        Row by row it is None if one is drawn, too: the kernels add in an order that depends on the dtype of the logits,
        and logits with penalties have another one.
        Raises KeyError for a row without parameters.
        """
        key = tuple(rows)
        if self._planned_draws is None or self._planned_draws[0] != key:
            draws = _make_draws(self._params.of(rows))
            if self._is_row_by_row and draws is not None and draws.way is Way.DRAWN:
                draws = None
            self._planned_draws = (key, draws)
        return self._planned_draws[1]

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Positions,
        masks: Masks = NO_MASKS,
        drafts: DraftRows | None = None,
    ) -> Sampled:
        """Choose a token per row, of those that the masks allow; rows with penalties or bad words remember it.

            logits      [B, vocab_size]     float32, on the sampler's device; changed only in rows with a mask
            rows        B rows of the sequence table, distinct
            positions   B positions that the new tokens will take in their sequences

        With drafts a row of the table is there once for each row of its sequence. It remembers the tokens that are kept
        alone. The token of a row without a mask in time is VOID.

        Raises KeyError for a row without parameters, ValueError if sizes differ or a row comes twice. No sync on a GPU.
        Cost: O(B * vocab_size), and a sort of the rows with top_p and no top_k; on a CPU only where TOP_P_CANDIDATES
        do not reach top_p.
        """
        num_distinct = len(rows) if drafts is None else len(drafts.counts)
        has_sizes = logits.shape == (len(rows), self.vocab_size) and len(positions) == len(rows)
        if not has_sizes or len(set(rows)) != num_distinct:
            raise ValueError(
                f"logits {list(logits.shape)}, {len(rows)} rows of which {len(set(rows))} distinct, "
                f"{len(positions)} positions; the vocabulary has {self.vocab_size} tokens"
            )
        plan = self._plan(tuple(rows))
        # Log-probabilities are of the logits without masks. Else a copy of the whole batch would only cost time.
        scores = logits if plan.logprobs is None or not masks.rows else logits.clone()
        masks.apply(scores, rows)
        if plan.constraints is not None:
            scores = self._constraints.apply(plan.constraints, scores, positions, drafts)
        if plan.penalties is not None:
            scores = self._penalize(scores, plan.penalties, drafts)
        if self._is_row_by_row and not plan.is_argmax:
            sampled = self._choose_row_by_row(plan, logits, scores, rows, positions)
        else:
            sampled = _choose(plan, logits, scores, positions)
        tokens = sampled.tokens
        masks.void(tokens, rows)
        kept = None if drafts is None else drafts.keep(tokens)
        if plan.penalties is not None:  # last: a step that fails adds no token
            self._remember(tokens, plan.penalties, kept)
        if plan.constraints is not None:
            self._constraints.remember(plan.constraints, tokens, drafts, kept)
        return sampled

    def _choose_row_by_row(
        self, plan: _SamplingPlan, logits: Tensor, scores: Tensor, rows: Sequence[int], positions: Positions
    ) -> Sampled:
        """Choose with bits that do not depend on other rows of the batch, nor on drafts of the same sequence.

        The exponential of an element has other bits behind the last whole vector of the processor than within one, and
        where the last vector of a batch ends depends on its rows. A GPU divides a sum by the number of rows. Masks,
        biases, penalties and the place of the greatest score do not depend on that.
        """
        if self._filters_in_kernels:
            tokens = _choose_tokens(plan.draw, scores, positions)
        else:
            drawn = ((at, _plan_draw(params, self.device, in_kernels=False)) for at, params in self._alone(rows))
            tokens = torch.cat([_choose_tokens(draw, scores[at], positions[at]) for at, draw in drawn])
        if plan.logprobs is None:
            return Sampled(tokens)
        asked = ((at, _plan_logprobs(params, self.device)) for at, params in self._alone(rows))
        return Sampled.join([_with_logprobs(logits[at], tokens[at], logprobs) for at, logprobs in asked])

    def _alone(self, rows: Sequence[int]) -> Iterator[tuple[slice, Columns]]:
        """The place of each row in the batch, and its parameters."""
        return ((slice(place, place + 1), self._params.of((row,))) for place, row in enumerate(rows))

    def _penalize(self, logits: Tensor, penalties: _Penalties, drafts: DraftRows | None) -> Tensor:
        seen = self._seen.index_select(0, penalties.rows)
        before = None if drafts is None else self._before(drafts, penalties.subset.places)
        if before is not None:
            flat = seen.view(-1)
            flat.index_copy_(0, before, flat.index_select(0, before) | _IN_OUTPUT)
        given = penalties.subset.take(logits)
        repeated = torch.where(given > 0, given / penalties.repetition, given * penalties.repetition)
        scores = torch.where(seen > 0, repeated, given) - (seen >= _IN_OUTPUT) * penalties.presence
        if penalties.frequency is not None:
            counts = self._counts.index_select(0, penalties.rows)
            if before is not None:
                counts = counts.int()  # room for those of the drafts
                counts.view(-1).index_add_(0, before, torch.ones_like(before, dtype=counts.dtype))
                counts.clamp_(max=_MAX_COUNT)
            scores -= counts * penalties.frequency
        # The product overflows with a large penalty. Only a token that was forbidden before may have the logit -inf.
        scores.clamp_(min=_LEAST_LOGIT, max=-_LEAST_LOGIT).masked_fill_(given == -math.inf, -math.inf)
        return scores if penalties.subset.index is None else penalties.subset.put(logits.clone(), scores)

    def _before(self, drafts: DraftRows, places: Int64s) -> Tensor:
        """The drafts before these rows, as flat indexes of [len(places), vocab_size]."""
        index, tokens = drafts.before(places)
        return indices(index * self.vocab_size + tokens, self.device)

    def _remember(self, tokens: Tensor, penalties: _Penalties, kept: Kept | None) -> None:
        seen = self._seen.view(-1)
        index = penalties.rows * self.vocab_size + penalties.subset.take(tokens)
        added: Tensor | int = 1
        if kept is not None:
            is_kept = penalties.subset.take(kept.is_kept)
            newest = newest_of(index, penalties.subset.take(kept.to_newest))
            index = torch.where(is_kept, index, newest)
            added = ((index == index[:, None]) & is_kept).sum(-1)
        seen.index_copy_(0, index, seen.index_select(0, index) | _IN_OUTPUT)
        if penalties.frequency is not None:
            counts = self._counts.view(-1)
            counted = counts.index_select(0, index).int() + added
            counts.index_copy_(0, index, counted.clamp_(max=_MAX_COUNT).to(counts.dtype))

    def _flags(self, prompt_token_ids: TokenIds, output_token_ids: TokenIds) -> Tensor:
        flags = np.zeros(self.vocab_size, dtype=np.uint8)
        for token_ids, flag in ((prompt_token_ids, _IN_PROMPT), (output_token_ids, _IN_OUTPUT)):
            ids = np.asarray(token_ids, dtype=np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                raise ValueError(f"a token id is not in 0 .. {self.vocab_size - 1}")
            flags[ids] |= flag
        return torch.from_numpy(flags)

    def _counted(self, output_token_ids: TokenIds) -> Tensor:
        counts = np.bincount(np.asarray(output_token_ids, dtype=np.int64), minlength=self.vocab_size)
        return torch.from_numpy(counts.clip(max=_MAX_COUNT).astype(np.int16))

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_num_seqs:
            raise ValueError(f"row={row} is not in 0 .. {self.max_num_seqs - 1}")

    def _plan(self, rows: tuple[int, ...]) -> _SamplingPlan:
        if self._planned is None or self._planned[0] != rows:
            params = self._params.of(rows)
            constraints, in_kernels = self._constraints.plan(rows), self._filters_in_kernels
            self._planned = (rows, _make_plan(rows, params, constraints, self.device, in_kernels=in_kernels))
        return self._planned[1]

    def statistics(self) -> SamplerStatistics:
        num_bytes = self._seen.nbytes + self._counts.nbytes + self._constraints.num_bytes
        return SamplerStatistics(len(self._params), num_bytes)

    def check_invariants(self) -> None:
        """Raises AssertionError if what is kept of a row's parameters differs from them."""
        self._params.check_invariants()


def _make_plan(
    rows: Sequence[int],
    params: Columns,
    constraints: ConstraintPlan | None,
    device: torch.device,
    *,
    in_kernels: bool = False,
) -> _SamplingPlan:
    return _SamplingPlan(
        constraints=constraints,
        penalties=_plan_penalties(rows, params, device),
        draw=_plan_draw(params, device, in_kernels=in_kernels),
        logprobs=_plan_logprobs(params, device),
    )


def _make_draws(params: Columns) -> Draws | None:
    if not is_drawn_by_kernels(params).all():
        return None
    columns = np.stack([params[name].view(np.int64) for name in DRAW_COLUMNS])
    return Draws(Way.GREEDY if is_greedy(params).all() else Way.DRAWN, columns)


def _plan_penalties(rows: Sequence[int], params: Columns, device: torch.device) -> _Penalties | None:
    subset = _subset(has_penalties(params), device)
    if subset is None:
        return None
    penalised = params[subset.places]
    frequencies = penalised["frequency_penalty"]
    return _Penalties(
        subset=subset,
        rows=indices(np.asarray(rows)[subset.places], device),
        repetition=_column(penalised["repetition_penalty"], torch.float32, device),
        presence=_column(penalised["presence_penalty"], torch.float32, device),
        frequency=_column(frequencies, torch.float32, device) if frequencies.any() else None,
    )


def _plan_draw(params: Columns, device: torch.device, *, in_kernels: bool) -> _Draw | None:
    subset = _subset(~is_greedy(params), device)
    if subset is None:
        return None
    drawn = params[subset.places]
    min_p = drawn["min_p"]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(min_p)
    has_min_p = bool(min_p.any()) and not in_kernels
    return _Draw(
        subset=subset,
        seeds=indices(drawn["seed"], device),
        temperature=_column(drawn["temperature"], torch.float32, device),
        log_min_p=_column(log_min_p, torch.float32, device) if has_min_p else None,
        filters=() if in_kernels else tuple(_plan_filters(drawn, device)),
        in_kernels=_plan_kernels(drawn, device) if in_kernels else None,
    )


def _plan_kernels(params: Columns, device: torch.device) -> _InKernels:
    columns = (_column(params[name], DRAW_COLUMNS[name], device)[:, 0] for name in ("top_k", "top_p", "min_p"))
    return _InKernels(*columns)


def _plan_filters(params: Columns, device: torch.device) -> Iterator[_TopK | _TopP | _TopKThenP]:
    def k_of(subset: _Subset) -> tuple[Tensor, int]:
        k = params["top_k"][subset.places]
        return _column(k, torch.int64, device), int(k.max())

    def p_of(subset: _Subset) -> Tensor:
        return _column(params["top_p"][subset.places], torch.float64, device)

    has_k, has_p = params["top_k"] > 0, params["top_p"] < 1
    if subset := _subset(has_k & ~has_p, device):
        yield _TopK(subset, *k_of(subset))
    if subset := _subset(has_p & ~has_k, device):
        yield _TopP(subset, p_of(subset))
    if subset := _subset(has_k & has_p, device):
        yield _TopKThenP(subset, *k_of(subset), p_of(subset))


def _plan_logprobs(params: Columns, device: torch.device) -> _Logprobs | None:
    num_logprobs = params["num_logprobs"]
    subset = _subset(num_logprobs != NO_LOGPROBS, device)
    return None if subset is None else _Logprobs(subset, int(num_logprobs.max()))


def _subset(belongs: IsRow, device: torch.device) -> _Subset | None:
    places = np.flatnonzero(belongs)
    if not len(places):
        return None
    return _Subset(places, None if len(places) == len(belongs) else indices(places, device))


def _column(values: np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype)[:, None], device)


def _choose(plan: _SamplingPlan, logits: Tensor, scores: Tensor, positions: Positions) -> Sampled:
    """Choose a token per row by its scores [B, V], with log-probabilities of its logits [B, V]."""
    return _with_logprobs(logits, _choose_tokens(plan.draw, scores, positions), plan.logprobs)


def _choose_tokens(draw: _Draw | None, scores: Tensor, positions: Positions) -> Tensor:
    """Choose a token per row by its scores [B, V]: [B] int64."""
    if draw is None:
        return scores.argmax(-1)
    drawn = _draw(draw, scores, positions)
    return drawn if draw.subset.index is None else draw.subset.put(scores.argmax(-1), drawn)


def _draw(draw: _Draw, logits: Tensor, positions: Positions) -> Tensor:
    """Sample the rows of `draw` from logits [B, V]: [n] int64."""
    logits = draw.subset.take(logits)
    noise: dict[str, Tensor] = {
        "temperature": draw.temperature[:, 0],
        "seeds": draw.seeds,
        "positions": indices(np.asarray(positions)[draw.subset.places], logits.device),
    }
    if draw.in_kernels is not None:
        return _draw_in_kernels(draw.in_kernels, logits, noise)
    threshold = _threshold(draw, logits)
    return _noisy_argmax(logits.device)(logits, **noise, thresholds=None if threshold is None else threshold[:, 0])


def _draw_in_kernels(filters: _InKernels, logits: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    """Draw from logits [n, V], filtered. Cost: 4 launches."""
    from quire.kernels.sampler import SamplerWorkspace, sample

    num_rows, vocab_size = logits.shape
    workspace = SamplerWorkspace.allocate(max_num_seqs=num_rows, vocab_size=vocab_size, device=logits.device)
    return sample(logits, **noise, top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p, workspace=workspace)


def _noisy_argmax(device: torch.device) -> Callable[..., Tensor]:
    """Return the draw for a device. Both have the same noise, to the bit."""
    if device.type == "cpu":
        return gumbel.draw
    from quire.kernels.sampler import draw

    return draw


def _threshold(draw: _Draw, logits: Tensor) -> Tensor | None:
    """The least score that a row's filters keep, [n, 1], or None without filters. A row's greatest score is 0."""
    threshold = draw.log_min_p
    if not draw.filters:
        return threshold
    scores = (logits - logits.amax(-1, keepdim=True)).div_(draw.temperature)
    if threshold is None:
        threshold = scores.new_full((scores.shape[0], 1), -math.inf)
    for part in draw.filters:
        least = torch.maximum(part.subset.take(threshold), _least_kept(part, part.subset.take(scores)))
        threshold = part.subset.put(threshold.clone(), least)
    return threshold


def _least_kept(part: _TopK | _TopP | _TopKThenP, scores: Tensor) -> Tensor:
    match part:
        case _TopK(_, k, max_k):
            return _falling(scores, max_k).gather(1, k.clamp(max=scores.shape[1]) - 1)
        case _TopP(_, p):
            return _least_of_share(scores, p)
        case _TopKThenP(_, k, max_k, p):
            falling = _falling(scores, max_k)
            weights = falling.exp().double()
            weights.masked_fill_(torch.arange(falling.shape[1], device=scores.device) >= k, 0)
            return _gathered(falling, weights, p * weights.sum(-1, keepdim=True))


def _falling(scores: Tensor, width: int) -> Tensor:
    """The greatest `width` scores of each row, in falling order."""
    if width >= scores.shape[1]:
        return scores.sort(-1, descending=True).values
    return scores.topk(width, -1).values


def _least_of_share(scores: Tensor, p: Tensor) -> Tensor:
    share = p * scores.exp().sum(-1, keepdim=True, dtype=torch.float64)
    for width in TOP_P_CANDIDATES if scores.device.type == "cpu" else ():
        falling = _falling(scores, width)
        weights = falling.exp().double()
        if bool((weights.sum(-1, keepdim=True) >= share).all()):
            return _gathered(falling, weights, share)
    falling = _falling(scores, scores.shape[1])
    return _gathered(falling, falling.exp().double(), share)


def _gathered(falling: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """The score in each row at which the weights of the scores up to it reach `share`, [n, 1]; at least the first."""
    before = weights.cumsum(-1) - weights
    num_kept = (before < share).sum(-1, keepdim=True).clamp_(min=1)
    return falling.gather(1, num_kept - 1)


def _with_logprobs(logits: Tensor, tokens: Tensor, plan: _Logprobs | None) -> Sampled:
    if plan is None:
        return Sampled(tokens)
    taken = plan.subset.take(logits)
    normalizer = taken.logsumexp(-1, keepdim=True)
    chosen = taken.gather(1, plan.subset.take(tokens)[:, None]) - normalizer
    batch = logits.shape[0]
    chosen_logprobs = plan.subset.put(logits.new_full((batch,), math.nan), chosen[:, 0])
    if plan.num_top == 0:
        return Sampled(tokens, chosen_logprobs)
    top = taken.topk(min(plan.num_top, logits.shape[1]), -1)
    ids = tokens.new_full((batch, top.indices.shape[1]), -1)
    values = logits.new_full((batch, top.indices.shape[1]), math.nan)
    return Sampled(
        tokens,
        chosen_logprobs,
        top_ids=plan.subset.put(ids, top.indices),
        top_logprobs=plan.subset.put(values, top.values - normalizer),
    )
