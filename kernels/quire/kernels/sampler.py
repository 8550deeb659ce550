# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Sampling from logits to tokens: argmax, and seeded sampling with top-k, top-p and min-p. Nothing is sorted.

The meaning is that of quire.worker.sampling.sampler: from the same logits a seed draws the same token on a CPU and
here. The token with the greatest sum of score and noise is drawn, and the noise has the same bits (gumbel.py). The
token can differ only where rounding moves the border of top-p or min-p.

A token's gap is (greatest logit - its logit) / temperature, its score -gap, its weight exp(-gap). Gaps are not
negative, so their bits as an integer, the keys, are in the same order. Every filter keeps the tokens with a gap of at
most some threshold: the greatest gap before which there are fewer than k tokens (top-k), or less than a share p of the
weight (top-p).

    argmax      survey, pick
    draw        survey, draw: the thresholds are given
    sample      survey      reads the logits: each chunk's and each group's greatest, and how many of a chunk's tokens
                            lie in each cell, which is CELL wide in units of the gap
                bracket     a program a row: how many cells from the greatest logit hold all that the filters keep
                collect     reads the logits of rows with filters: each chunk's weight, and the candidates, the gaps of
                            the tokens of these cells, in a list; and the least gap of the others, which proves that
                            none is missing
                choose      a program a row: the threshold on the list, and the draw, from the groups' greatest and the
                            logits of a few groups

A row with candidates that do not fit into the list, or can't be told apart from the others, goes through the same
search on its logits instead of the list: slower, and equally exact. All sums of weights are in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.gumbel import GROUP, UNFUSED, count_groups, noisy_argmax, row_key
from quire.kernels.launching import (
    FLOAT_DTYPES,
    ceil_div,
    next_power_of_2,
    require_at_least,
    require_contiguous,
    require_dtype,
    require_last_contiguous,
    require_same_device,
    require_shape,
)

# Tokens per program of survey and collect, 16 a thread.
CHUNK = 4096
_NUM_WARPS = 8
# Tokens or candidates that a pass of choose takes at a time.
PIECE = 512

# A gap of NUM_CELLS * CELL = 32 is a weight of 1e-14: a list reaches no further.
NUM_CELLS = 64
_CELL = 0.5

# Candidates of a row, at most. Nuclei of thousands of tokens are rare, and 4 bytes a candidate add up.
CAPACITY = 8192

_GROUP = tl.constexpr(GROUP)
_CELLS = tl.constexpr(NUM_CELLS)
_CELL_WIDTH = tl.constexpr(_CELL)
# Weights at the two ends of a cell, and at most that of a token beyond the last.
_CELL_SHARE = tl.constexpr(math.exp(_CELL))
_LEAST_WEIGHT = tl.constexpr(math.exp(-_CELL * (NUM_CELLS - 2)))
# Differences of two cells are an int32.
_FARTHEST_CELL = tl.constexpr(2.0**29)
# exp(-105) is 0 in float32: what lies beyond has no weight, and no filter needs to know it.
_WEIGHTLESS = tl.constexpr(105.0)
# Parts of a range that a pass of choose tells apart: with 8, and with 4 warps, it has too few registers on some GPU.
_WAYS = tl.constexpr(4)
_LAST_COUNT = tl.constexpr(2**31 - 1)

# Read one number at a time, so a slice of a longer tensor is as good, and compiles nothing new.
_PER_ROW = (
    "temperature_ptr",
    "seeds_ptr",
    "positions_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "min_p_ptr",
    "greatest_ptr",
    "likeliest_ptr",
    "tops_ptr",
    "cells_ptr",
    "lowest_ptr",
    "num_candidates_ptr",
    "offsets_ptr",
    "weights_ptr",
    "next_gaps_ptr",
    "list_gaps_ptr",
    "thresholds_ptr",
    "tokens_ptr",
)


@dataclass(frozen=True, slots=True)
class SamplerWorkspace:
    """Scratch memory of the sampler, for up to max_num_seqs rows of vocab_size logits: C = ceil(vocab_size / CHUNK).

    Serves one stream at a time. G = ceil(vocab_size / GROUP), L = capacity candidates a row.

    greatest        [max_num_seqs, C]               float32, of each chunk
    likeliest       [max_num_seqs, C]               int32, the token that has it
    tops            [max_num_seqs, G]               float32, the greatest of each group
    cells           [max_num_seqs, C, NUM_CELLS]    int32, tokens in each cell below the chunk's greatest; the last
                                                    holds all from there on
    lowest          [max_num_seqs]                  int32, the lowest cell of the row's candidates
    num_candidates  [max_num_seqs]                  int32, 0 if they do not fit, -1 without filters
    offsets         [max_num_seqs, C]               int32, where the candidates of a chunk begin in the list
    weights         [max_num_seqs, C]               float64, of all tokens
    next_gaps       [max_num_seqs, C]               float32, the least gap of a token that is no candidate
    list_gaps       [max_num_seqs, L]               float32, in token order
    thresholds      [max_num_seqs]                  float32, the greatest gap kept; inf if none is filtered out
    """

    vocab_size: int
    greatest: Tensor
    likeliest: Tensor
    tops: Tensor
    cells: Tensor
    lowest: Tensor
    num_candidates: Tensor
    offsets: Tensor
    weights: Tensor
    next_gaps: Tensor
    list_gaps: Tensor
    thresholds: Tensor

    @classmethod
    def allocate(
        cls, *, max_num_seqs: int, vocab_size: int, device: torch.device | str, capacity: int = CAPACITY
    ) -> SamplerWorkspace:
        """Raises ValueError for a size below 1. Takes about 540 bytes per row and chunk, 4 per row and candidate."""
        require_at_least("max_num_seqs", max_num_seqs, 1)
        require_at_least("vocab_size", vocab_size, 1)
        require_at_least("capacity", capacity, 1)
        shape = (max_num_seqs, ceil_div(vocab_size, CHUNK))

        def empty(dtype: torch.dtype, *sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        return cls(
            vocab_size=vocab_size,
            greatest=empty(torch.float32, *shape),
            likeliest=empty(torch.int32, *shape),
            tops=empty(torch.float32, max_num_seqs, ceil_div(vocab_size, GROUP)),
            cells=empty(torch.int32, *shape, NUM_CELLS),
            lowest=empty(torch.int32, max_num_seqs),
            num_candidates=empty(torch.int32, max_num_seqs),
            offsets=empty(torch.int32, *shape),
            weights=empty(torch.float64, *shape),
            next_gaps=empty(torch.float32, *shape),
            list_gaps=empty(torch.float32, max_num_seqs, capacity),
            thresholds=empty(torch.float32, max_num_seqs),
        )

    @property
    def max_num_seqs(self) -> int:
        return self.greatest.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.greatest.shape[1]

    @property
    def capacity(self) -> int:
        return self.list_gaps.shape[1]


@triton.jit
def _load_logits(logits_ptr, tokens, stride_row, row, vocab_size):
    """The row's logits of some tokens, float32; -inf behind the vocabulary."""
    pointers = logits_ptr + row.to(tl.int64) * stride_row + tokens
    return tl.load(pointers, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _load_row(ptr, row, num_chunks, other, CHUNKS: tl.constexpr):
    """A row of [B, C], one number per chunk, as [CHUNKS]."""
    chunks = tl.arange(0, CHUNKS)
    return tl.load(ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=other)


@triton.jit
def _cell(logits, temperature):
    """Cells of logits, int32, rising: the same wherever it is computed, as nothing in it is approximate."""
    places = tl.floor(logits * tl.div_rn(1.0, temperature * _CELL_WIDTH))
    return tl.minimum(tl.maximum(places, -_FARTHEST_CELL), _FARTHEST_CELL).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def survey_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B], None without COUNTS
    greatest_ptr,  # [B, C]
    likeliest_ptr,  # [B, C]
    tops_ptr,  # [B, G], None without TOPS
    cells_ptr,  # [B, C, CELLS], None without COUNTS
    vocab_size,
    num_chunks,
    num_groups,
    stride_row,
    TOPS: tl.constexpr,
    COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    place = row * num_chunks + chunk
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = _load_logits(logits_ptr, tokens, stride_row, row, vocab_size)
    greatest, index = tl.max(logits, 0, return_indices=True)
    tl.store(greatest_ptr + place, greatest)
    # Logits that are no numbers have no greatest: any token then, but one of the vocabulary.
    tl.store(likeliest_ptr + place, tl.minimum(chunk * CHUNK + index, vocab_size - 1))
    if TOPS:
        tops = tl.max(tl.reshape(logits, (CHUNK // _GROUP, _GROUP)), 1)
        groups = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
        tl.store(tops_ptr + row.to(tl.int64) * num_groups + groups, tops, mask=groups < num_groups)
    if COUNTS:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            below = _cell(greatest, temperature) - _cell(logits, temperature)
            below = tl.where(tokens < vocab_size, tl.minimum(tl.maximum(below, 0), _CELLS - 1), _CELLS - 1)
            counts = tl.histogram(below, _CELLS)
            tl.store(cells_ptr + place * _CELLS + tl.arange(0, _CELLS), counts)


@triton.jit
def _likeliest(greatest_ptr, likeliest_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    chunk = tl.argmax(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
    return tl.load(likeliest_ptr + row * num_chunks + chunk).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def pick_kernel(
    greatest_ptr,  # [B, C]
    likeliest_ptr,  # [B, C]
    tokens_ptr,  # [B]
    num_chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0)
    tl.store(tokens_ptr + row, _likeliest(greatest_ptr, likeliest_ptr, row, num_chunks, CHUNKS))


@triton.jit
def _load_filters(
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    row,
    vocab_size,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    """The row's filters, int64, float64, float32: k, 0 if it is off; p, 1 if off; the gap of min-p, inf if off."""
    k = tl.zeros([], tl.int64)
    if HAS_TOP_K:
        k = tl.load(top_k_ptr + row)
        k = tl.where(k < vocab_size, k, 0)
    p = tl.full([], 1.0, tl.float64)
    if HAS_TOP_P:
        p = tl.load(top_p_ptr + row)
    widest = tl.full([], float("inf"), tl.float32)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            widest = tl.abs(tl.log(min_p)).to(tl.float32)
    return k, p, widest


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def bracket_kernel(
    temperature_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    greatest_ptr,  # [B, C]
    cells_ptr,  # [B, C, CELLS]
    lowest_ptr,  # [B]
    num_candidates_ptr,  # [B]
    offsets_ptr,  # [B, C]
    vocab_size,
    num_chunks,
    capacity,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    k, p, widest = _load_filters(top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P)
    if temperature > 0.0:
        chunks = tl.arange(0, CHUNKS)
        cells = tl.arange(0, _CELLS)
        chunk_greatest = _load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS)
        highest = _cell(tl.max(chunk_greatest, 0), temperature)
        # A chunk counts its cells from its own greatest.
        in_chunk = cells[None, :] - tl.maximum(highest - _cell(chunk_greatest, temperature), 0)[:, None]
        pointers = cells_ptr + row.to(tl.int64) * num_chunks * _CELLS + chunks[:, None] * _CELLS + in_chunk
        counts = tl.load(pointers, mask=(chunks < num_chunks)[:, None] & (in_chunk >= 0), other=0)
        # The last cell of a chunk has no end.
        counts = tl.where(cells[None, :] < _CELLS - 1, counts, 0)
        in_row = tl.sum(counts, 0)
        so_far = tl.cumsum(in_row, 0)

        last = tl.full([], _CELLS - 2, tl.int32)
        if k > 0:
            last = tl.minimum(last, tl.sum((so_far < k).to(tl.int32), 0))
        elif p < 1.0:
            # A token of cell i has a gap between those of i - 1 and i + 1. The last cell that may be kept leaves less
            # than 1 - p of all weight behind it.
            weights = in_row.to(tl.float32) * tl.exp(cells.to(tl.float32) * -_CELL_WIDTH)
            beyond = (vocab_size - tl.sum(in_row, 0)).to(tl.float32) * _LEAST_WEIGHT
            behind = (tl.sum(weights, 0) - tl.cumsum(weights, 0)) * _CELL_SHARE + beyond
            left = (1.0 - p).to(tl.float32) * tl.sum(weights, 0) / _CELL_SHARE
            last = tl.minimum(last, tl.sum((behind > left).to(tl.int32), 0))
        if (k == 0) | (p >= 1.0):
            last = tl.minimum(last.to(tl.float32), widest * (1.0 / _CELL_WIDTH) + 1.0).to(tl.int32)
        last = tl.minimum(last, tl.sum((so_far <= capacity).to(tl.int32), 0) - 1)
        is_filtered = (k > 0) | (p < 1.0) | (widest < float("inf"))
        last = tl.where(is_filtered, last, -1)

        in_list = tl.sum(tl.where(cells[None, :] <= last, counts, 0), 1)
        tl.store(offsets_ptr + row * num_chunks + chunks, tl.cumsum(in_list, 0) - in_list, mask=chunks < num_chunks)
        tl.store(num_candidates_ptr + row, tl.where(is_filtered, tl.sum(in_list, 0), -1))
        tl.store(lowest_ptr + row, highest - last)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def collect_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    greatest_ptr,  # [B, C]
    lowest_ptr,  # [B]
    num_candidates_ptr,  # [B]
    offsets_ptr,  # [B, C]
    weights_ptr,  # [B, C]
    next_gaps_ptr,  # [B, C]
    list_gaps_ptr,  # [B, L]
    vocab_size,
    num_chunks,
    capacity,
    stride_row,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    place = row * num_chunks + chunk
    temperature = tl.load(temperature_ptr + row)
    # Of a greedy row the number is not written.
    num_candidates = tl.where(temperature > 0.0, tl.load(num_candidates_ptr + row), -1)
    if num_candidates >= 0:
        greatest = tl.max(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = tokens < vocab_size
        logits = _load_logits(logits_ptr, tokens, stride_row, row, vocab_size)
        gaps = tl.div_rn(greatest - logits, temperature)
        tl.store(weights_ptr + place, tl.sum(tl.where(inside, tl.exp(-gaps), 0.0).to(tl.float64), 0))
        if num_candidates > 0:
            is_candidate = inside & (_cell(logits, temperature) >= tl.load(lowest_ptr + row))
            tl.store(next_gaps_ptr + place, tl.min(tl.where(inside & ~is_candidate, gaps, float("inf")), 0))
            number = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            begin = row.to(tl.int64) * capacity + tl.load(offsets_ptr + place)
            tl.store(list_gaps_ptr + begin + number, gaps, mask=is_candidate)


@triton.jit
def _load_gaps(
    base,
    size,
    on_list,
    greatest,
    temperature,
    logits_ptr,
    list_gaps_ptr,
    stride_row,
    row,
    capacity,
    PIECE: tl.constexpr,
):
    """The gaps [PIECE] of entries from base on: candidates, or all tokens if not on_list; inf where there is none."""
    entries = base + tl.arange(0, PIECE)
    if on_list:
        pointers = list_gaps_ptr + row.to(tl.int64) * capacity + entries
        gaps = tl.load(pointers, mask=entries < size, other=float("inf"))
    else:
        gaps = tl.div_rn(greatest - _load_logits(logits_ptr, entries, stride_row, row, size), temperature)
    return tl.where(entries < size, gaps, float("inf"))


@triton.jit
def _sum_up_to(
    threshold,
    size,
    on_list,
    greatest,
    temperature,
    logits_ptr,
    list_gaps_ptr,
    stride_row,
    row,
    capacity,
    PIECE: tl.constexpr,
):
    """The weight, float64, and the number, int32, of entries with a gap of at most the threshold."""
    weights = tl.zeros([PIECE], tl.float64)
    counts = tl.zeros([PIECE], tl.int32)
    for base in range(0, size, PIECE):
        gaps = _load_gaps(
            base, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr, stride_row, row, capacity, PIECE
        )
        kept = gaps <= threshold
        weights += tl.where(kept, tl.exp(-gaps), 0.0).to(tl.float64)
        counts += kept.to(tl.int32)
    return tl.sum(weights, 0), tl.sum(counts, 0)


@triton.jit
def _last_before(
    limit,
    highest,
    size,
    on_list,
    greatest,
    temperature,
    logits_ptr,
    list_gaps_ptr,
    stride_row,
    row,
    capacity,
    WEIGHTED: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The greatest gap, of those that are there and at most `highest`, before which the weight, or without WEIGHTED the
    number, of the others is less than the limit. That of all of them is not.

    The bracket low .. high - 1 of keys holds the answer. A pass divides it by WAYS and leaves out its ends that hold no
    key; at the end one key is left.
    """
    low = tl.zeros([], tl.int32)
    high = highest.to(tl.int32, bitcast=True) + 1
    way = tl.arange(0, _WAYS)
    searching = high > low
    while searching:
        step = (high - low + _WAYS - 1) // _WAYS
        begins = tl.minimum(low + way * step, high)
        sums = tl.zeros([PIECE, _WAYS], tl.float64 if WEIGHTED else tl.int32)
        least = tl.full([PIECE], 2**31 - 1, tl.int32)
        most = tl.full([PIECE], -1, tl.int32)
        for base in range(0, size, PIECE):
            gaps = _load_gaps(
                base, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr, stride_row, row, capacity, PIECE
            )
            keys = gaps.to(tl.int32, bitcast=True)
            if WEIGHTED:
                amounts = tl.exp(-gaps).to(tl.float64)
            else:
                amounts = tl.full([PIECE], 1, tl.int32)
            sums += tl.where(keys[:, None] < begins[None, :], amounts[:, None], 0)
            within = (keys >= low) & (keys < high)
            least = tl.minimum(least, tl.where(within, keys, 2**31 - 1))
            most = tl.maximum(most, tl.where(within, keys, -1))
        first_key = tl.min(least, 0)
        last_key = tl.max(most, 0)
        found = tl.maximum(tl.sum((tl.sum(sums, 0) < limit).to(tl.int32), 0) - 1, 0)
        high = tl.minimum(tl.minimum(low + (found + 1) * step, high), last_key + 1)
        low = tl.maximum(low + found * step, first_key)
        searching = first_key < last_key
        if not searching:
            low = last_key
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _threshold(
    k,
    p,
    widest,
    total,
    next_gap,
    size,
    on_list,
    greatest,
    temperature,
    logits_ptr,
    list_gaps_ptr,
    stride_row,
    row,
    capacity,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Return the greatest gap that the filters keep, inf if they keep all, and True if that is proved for all tokens.

    total is the weight of all tokens, next_gap the least gap that is not among the entries, inf if there is none.
    """
    threshold = tl.full([], float("inf"), tl.float32)
    highest = tl.full([], _WEIGHTLESS, tl.float32)
    is_proved = total == total
    weight, count = _sum_up_to(
        highest, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr, stride_row, row, capacity, PIECE
    )
    if HAS_TOP_K:
        if count >= tl.where(k > 0, k, _LAST_COUNT):
            threshold = _last_before(
                k, highest, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr, stride_row, row, capacity,
                False, PIECE,
            )  # fmt: skip
            highest = threshold
            weight, count = _sum_up_to(
                highest, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr, stride_row, row, capacity,
                PIECE,
            )  # fmt: skip
            # Tokens tied with the k-th are all kept, but only as many as make k count here.
            total = weight - (count - k).to(tl.float64) * tl.exp(-threshold).to(tl.float64)
        if (k > 0) & (p < 1.0):
            # The total that top-p needs is that of all k tokens.
            is_proved = (threshold < next_gap) | (next_gap == float("inf"))
    if HAS_TOP_P:  # noqa: SIM102
        if (p < 1.0) & (weight >= p * total):
            threshold = _last_before(
                p * total, highest, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr, stride_row, row,
                capacity, True, PIECE,
            )  # fmt: skip
    threshold = tl.minimum(threshold, widest)
    return threshold, is_proved & ((threshold < next_gap) | (next_gap == float("inf")))


@triton.jit
def _filtered_up_to(
    size,
    greatest,
    temperature,
    k,
    p,
    widest,
    logits_ptr,
    weights_ptr,
    next_gaps_ptr,
    list_gaps_ptr,
    stride_row,
    row,
    vocab_size,
    num_chunks,
    capacity,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Return the greatest gap that the filters of a row keep: by its list of `size` candidates, or without by all."""
    threshold = tl.full([], float("inf"), tl.float32)
    total = tl.sum(_load_row(weights_ptr, row, num_chunks, 0.0, CHUNKS), 0)
    on_list = size > 0
    next_gap = tl.full([], float("inf"), tl.float32)
    if on_list:
        next_gap = tl.min(_load_row(next_gaps_ptr, row, num_chunks, float("inf"), CHUNKS), 0)
    if not on_list:
        size = vocab_size
    searching = size > 0
    while searching:
        threshold, is_proved = _threshold(
            k, p, widest, total, next_gap, size, on_list, greatest, temperature, logits_ptr, list_gaps_ptr,
            stride_row, row, capacity, HAS_TOP_K, HAS_TOP_P, PIECE,
        )  # fmt: skip
        searching = on_list & ~is_proved
        if searching:
            on_list = size < 0
            size = vocab_size
            next_gap = tl.full([], float("inf"), tl.float32)
    return threshold


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=_PER_ROW)
def choose_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    greatest_ptr,  # [B, C]
    likeliest_ptr,  # [B, C]
    tops_ptr,  # [B, G]
    num_candidates_ptr,  # [B]
    weights_ptr,  # [B, C]
    next_gaps_ptr,  # [B, C]
    list_gaps_ptr,  # [B, L]
    thresholds_ptr,  # [B]
    tokens_ptr,  # [B]
    vocab_size,
    num_chunks,
    capacity,
    num_groups,
    stride_row,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    token = _likeliest(greatest_ptr, likeliest_ptr, row, num_chunks, CHUNKS)
    if temperature > 0.0:
        greatest = tl.max(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
        threshold = tl.full([], float("inf"), tl.float32)
        size = tl.load(num_candidates_ptr + row)
        if size >= 0:
            k, p, widest = _load_filters(
                top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P
            )
            threshold = _filtered_up_to(
                size, greatest, temperature, k, p, widest, logits_ptr, weights_ptr, next_gaps_ptr, list_gaps_ptr,
                stride_row, row, vocab_size, num_chunks, capacity, HAS_TOP_K, HAS_TOP_P, CHUNKS, PIECE,
            )  # fmt: skip
        tl.store(thresholds_ptr + row, threshold)
        key = row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        token = noisy_argmax(
            logits_ptr, tops_ptr, greatest, token, temperature, threshold, key, stride_row, row, vocab_size, num_groups,
            GROUPS,
        )  # fmt: skip
    tl.store(tokens_ptr + row, token)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def draw_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    thresholds_ptr,  # [B], None without FILTERED: the least scores
    greatest_ptr,  # [B, C]
    likeliest_ptr,  # [B, C]
    tops_ptr,  # [B, G]
    tokens_ptr,  # [B]
    vocab_size,
    num_chunks,
    num_groups,
    stride_row,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    token = _likeliest(greatest_ptr, likeliest_ptr, row, num_chunks, CHUNKS)
    if temperature > 0.0:
        greatest = tl.max(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
        threshold = tl.full([], float("inf"), tl.float32)
        if FILTERED:
            threshold = -tl.load(thresholds_ptr + row)
        key = row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        token = noisy_argmax(
            logits_ptr, tops_ptr, greatest, token, temperature, threshold, key, stride_row, row, vocab_size, num_groups,
            GROUPS,
        )  # fmt: skip
    tl.store(tokens_ptr + row, token)


def plan_launch(vocab_size: int) -> tuple[dict[str, int], int, int]:
    """Return (CHUNK and CHUNKS, num_warps, num_stages) of all kernels here."""
    return {"CHUNK": CHUNK, "CHUNKS": next_power_of_2(ceil_div(vocab_size, CHUNK))}, _NUM_WARPS, 1


def argmax(logits: Tensor, *, workspace: SamplerWorkspace, out: Tensor | None = None) -> Tensor:
    """The greatest logit of each row; of several, the first.

    Sizes: B rows, V vocabulary.
        logits          [B, V]  fp32/fp16/bf16, V contiguous; a row with NaN gets any token of the vocabulary
        out, returns    [B]     int64, contiguous. None allocates

    Raises ValueError if a shape, dtype or device is another, or the workspace is for fewer rows or another V. No sync.
    Cost: two launches; reads the logits once.
    """
    tokens = _tokens(logits, workspace, out)
    if logits.shape[0] == 0:
        return tokens
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    _launch_survey(logits, workspace.greatest, workspace.likeliest, None, None, None)
    pick_kernel[(logits.shape[0],)](
        workspace.greatest,
        workspace.likeliest,
        tokens,
        workspace.num_chunks,
        CHUNKS=constexprs["CHUNKS"],
        **dependent_options(pick_kernel, logits.device),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return tokens


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    workspace: SamplerWorkspace,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw a token per row, each row with its own parameters (quire.worker.sampling.parameters.SamplingParams).

    Sizes: B rows, V vocabulary. Everything but the logits is contiguous, and on their device.
        logits          [B, V]  fp32/fp16/bf16, V contiguous; finite or -inf, not all -inf; penalties already applied
        temperature     [B]     float32, >= 0; 0 takes the greatest logit
        seeds           [B]     int64, 0 .. 2**63 - 1
        positions       [B]     int64, >= 0: where the new tokens will stand in their sequences
        top_k           [B]     int64, 0 keeps all; ties with the k-th are kept. None: no row has one
        top_p           [B]     float64, 0 < p <= 1; of the tokens that top_k keeps. None: no row has one
        min_p           [B]     float64, 0 <= p <= 1. None: no row has one
        out, returns    [B]     int64. None allocates

    Tokens do not depend on the dtype of the logits, only on their values. Raises ValueError if a shape, dtype or device
    is another, or the workspace is for fewer rows or another V. No sync.
    Cost: 4 launches, whatever the parameters are, and 2 without top_k, top_p and min_p. Reads the logits once, and a
    second time in rows with a filter; a row with more candidates than the workspace's capacity 8 to 40 times more, in
    one program. Besides these the logits of about 10 groups of GROUP tokens, of GROUP groups on average in the worst
    case.
    """
    _check_parameters(
        logits, temperature=temperature, seeds=seeds, positions=positions, top_k=top_k, top_p=top_p, min_p=min_p
    )
    tokens = _tokens(logits, workspace, out)
    num_rows = logits.shape[0]
    if num_rows == 0:
        return tokens
    if top_k is None and top_p is None and min_p is None:
        surveyed = workspace.greatest, workspace.likeliest, workspace.tops
        _launch_draw(logits, temperature, seeds, positions, None, *surveyed, tokens)
        return tokens
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    filters = {"HAS_TOP_K": top_k is not None, "HAS_TOP_P": top_p is not None, "HAS_MIN_P": min_p is not None}
    grid = (workspace.num_chunks, num_rows)
    sizes = (workspace.vocab_size, workspace.num_chunks, workspace.capacity)
    num_groups, groups = count_groups(workspace.vocab_size)
    # Where a kernel reads no top_k, top_p or min_p, it is given temperature for it.
    given = [temperature if column is None else column for column in (top_k, top_p, min_p)]
    _launch_survey(logits, workspace.greatest, workspace.likeliest, workspace.tops, workspace.cells, temperature)
    bracket_kernel[(num_rows,)](
        temperature, *given, workspace.greatest, workspace.cells, workspace.lowest, workspace.num_candidates,
        workspace.offsets, *sizes, CHUNKS=constexprs["CHUNKS"], **filters,
        **dependent_options(bracket_kernel, logits.device), **options,
    )  # fmt: skip
    collect_kernel[grid](
        logits, temperature, workspace.greatest, workspace.lowest, workspace.num_candidates, workspace.offsets,
        workspace.weights, workspace.next_gaps, workspace.list_gaps, *sizes, logits.stride(0),
        **constexprs, **dependent_options(collect_kernel, logits.device), **options,
    )  # fmt: skip
    choose_kernel[(num_rows,)](
        logits, temperature, seeds, positions, *given, workspace.greatest, workspace.likeliest, workspace.tops,
        workspace.num_candidates, workspace.weights, workspace.next_gaps, workspace.list_gaps, workspace.thresholds,
        tokens, *sizes, num_groups, logits.stride(0), CHUNKS=constexprs["CHUNKS"], GROUPS=groups, PIECE=PIECE,
        **filters, **dependent_options(choose_kernel, logits.device), **options, **UNFUSED,
    )  # fmt: skip
    return tokens


def draw(
    logits: Tensor, *, temperature: Tensor, seeds: Tensor, positions: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """Draw a token per row from what given thresholds keep.

    Sizes: B rows, V vocabulary. Everything but the logits is contiguous, and on their device.
        logits              [B, V]  fp32/fp16/bf16, V contiguous; finite or -inf, not all -inf
        temperature         [B]     float32, >= 0; 0 takes the greatest logit
        seeds, positions    [B]     int64, >= 0
        thresholds          [B]     float32, the least score, (logit - greatest logit) / temperature, that may be drawn.
                                    None: all may
        returns             [B]     int64

    Raises ValueError if a shape, dtype or device is another. No sync. Cost: 2 launches; reads the logits once, and
    those of a few groups again; about 80 bytes of memory for each 1,000 logits.
    """
    _check_parameters(logits, temperature=temperature, seeds=seeds, positions=positions, thresholds=thresholds)
    num_rows, vocab_size = logits.shape
    tokens = _new_tokens(logits, vocab_size, None)
    if num_rows:
        by_chunk = (num_rows, ceil_div(vocab_size, CHUNK))
        surveyed = (
            torch.empty(by_chunk, dtype=torch.float32, device=logits.device),
            torch.empty(by_chunk, dtype=torch.int32, device=logits.device),
            torch.empty((num_rows, ceil_div(vocab_size, GROUP)), dtype=torch.float32, device=logits.device),
        )
        _launch_draw(logits, temperature, seeds, positions, thresholds, *surveyed, tokens)
    return tokens


def _launch_draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None,
    greatest: Tensor,
    likeliest: Tensor,
    tops: Tensor,
    tokens: Tensor,
) -> None:
    vocab_size = logits.shape[1]
    constexprs, num_warps, num_stages = plan_launch(vocab_size)
    num_groups, groups = count_groups(vocab_size)
    _launch_survey(logits, greatest, likeliest, tops, None, None)
    draw_kernel[(logits.shape[0],)](
        logits, temperature, seeds, positions, thresholds, greatest, likeliest, tops, tokens, vocab_size,
        greatest.shape[1], num_groups, logits.stride(0), FILTERED=thresholds is not None, CHUNKS=constexprs["CHUNKS"],
        GROUPS=groups, **dependent_options(draw_kernel, logits.device), num_warps=num_warps, num_stages=num_stages,
        **UNFUSED,
    )  # fmt: skip


def _tokens(logits: Tensor, workspace: SamplerWorkspace, out: Tensor | None) -> Tensor:
    tokens = _new_tokens(logits, workspace.vocab_size, out)
    if logits.shape[0] > workspace.max_num_seqs:
        raise ValueError(f"logits has {logits.shape[0]} rows, the workspace is for {workspace.max_num_seqs}")
    require_same_device(logits=logits, workspace=workspace.greatest)
    return tokens


def _new_tokens(logits: Tensor, vocab_size: int, out: Tensor | None) -> Tensor:
    require_shape("logits", logits, (None, vocab_size))
    require_dtype("logits", logits, FLOAT_DTYPES)
    require_last_contiguous("logits", logits)
    num_rows = logits.shape[0]
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    require_shape("out", tokens, (num_rows,))
    require_dtype("out", tokens, torch.int64)
    require_contiguous("out", tokens)
    require_same_device(logits=logits, out=tokens)
    return tokens


_PARAMETER_DTYPES = {
    "temperature": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
    "thresholds": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float64,
}


def _check_parameters(logits: Tensor, **parameters: Tensor | None) -> None:
    for name, parameter in parameters.items():
        if parameter is not None:
            require_shape(name, parameter, logits.shape[:1])
            require_dtype(name, parameter, _PARAMETER_DTYPES[name])
            require_contiguous(name, parameter)
    require_same_device(logits=logits, **parameters)


def _launch_survey(
    logits: Tensor,
    greatest: Tensor,
    likeliest: Tensor,
    tops: Tensor | None,
    cells: Tensor | None,
    temperature: Tensor | None,
) -> None:
    """Without tops the greatest logits of groups are not found, and without cells nothing is counted."""
    vocab_size = logits.shape[1]
    constexprs, num_warps, num_stages = plan_launch(vocab_size)
    survey_kernel[(greatest.shape[1], logits.shape[0])](
        logits,
        temperature,
        greatest,
        likeliest,
        tops,
        cells,
        vocab_size,
        greatest.shape[1],
        count_groups(vocab_size)[0],
        logits.stride(0),
        TOPS=tops is not None,
        COUNTS=cells is not None,
        CHUNK=constexprs["CHUNK"],
        **dependent_options(survey_kernel, logits.device),
        num_warps=num_warps,
        num_stages=num_stages,
    )
