# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Sampling from logits to tokens: argmax, and seeded sampling with top-k, top-p and min-p. Nothing is sorted.

The meaning is that of quire.worker.sampling.sampler: from the same logits a seed draws the same token on a CPU and
here, but for rounding at a border between two tokens. A row is drawn by inverting its cumulative distribution, in token
order, at one uniform number that is a hash of (seed, position), and depends on nothing else. (Gumbel noise would need
a number per token, and give other tokens than the CPU does.)

A token's gap is (greatest logit - its logit) / temperature. Gaps are not negative, so their bits as an integer, the
token's key, are in the same order. Every filter keeps the tokens with a key of at most some threshold: the greatest key
before which there are fewer than k tokens (top-k), or less than a share p of the weight (top-p). It is found digit by
digit, 3 bits a pass: the programs of a row's chunks add up what lies before each of the 7 keys at which the next digit
could begin, and the next launch reads from their sums which it was.

    argmax      chunk_max, pick
    sample      chunk_max; top-k: search x NUM_PASSES, settle; top-p: search x NUM_PASSES, settle; draw
                (a settle comes before the searches of top-p, and before draw, in any case)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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

# Tokens per program, 16 a thread.
CHUNK = 4096
_NUM_WARPS = 8

# Keys have 31 bits, 11 digits of 3 bits have 33.
_DIGIT_BITS = 3
NUM_DIGITS = 1 << _DIGIT_BITS
NUM_PASSES = 11

NO_FILTER, TOP_K, TOP_P = 0, 1, 2

_NO_FILTER = tl.constexpr(NO_FILTER)
_TOP_K = tl.constexpr(TOP_K)
_TOP_P = tl.constexpr(TOP_P)
_BITS = tl.constexpr(_DIGIT_BITS)
_DIGITS = tl.constexpr(NUM_DIGITS)
_LAST_PASS = tl.constexpr(NUM_PASSES - 1)
_LAST_KEY = tl.constexpr(2**31 - 1)

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
    "threshold_ptr",
    "weights_ptr",
    "counts_ptr",
    "prefix_ptr",
    "sums_ptr",
    "new_threshold_ptr",
    "new_weights_ptr",
    "new_prefix_ptr",
    "new_sums_ptr",
    "tokens_ptr",
)

# splitmix64
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplerWorkspace:
    """Scratch memory of the sampler, for up to max_num_seqs rows of vocab_size logits: C = ceil(vocab_size / CHUNK).

    Serves one stream at a time.

    greatest    [max_num_seqs, C]                   float32, of each chunk
    likeliest   [max_num_seqs, C]                   int32, the token that has it
    sums        [2, max_num_seqs, C, NUM_DIGITS]    float32, what lies before each digit, of this pass and the last
    prefixes    [2, max_num_seqs]                   int64, digits found, before this pass and the last
    thresholds  [2, max_num_seqs]                   int32, after top-k and in the end
    weights     [2, max_num_seqs, C]                float64, of the tokens that these keep
    counts      [max_num_seqs, C]                   int32, how many top-k keeps
    """

    vocab_size: int
    greatest: Tensor
    likeliest: Tensor
    sums: Tensor
    prefixes: Tensor
    thresholds: Tensor
    weights: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, *, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> SamplerWorkspace:
        """Raises ValueError for a size below 1. Takes about 90 bytes per row and chunk."""
        require_at_least("max_num_seqs", max_num_seqs, 1)
        require_at_least("vocab_size", vocab_size, 1)
        shape = (max_num_seqs, ceil_div(vocab_size, CHUNK))
        return cls(
            vocab_size=vocab_size,
            greatest=torch.empty(shape, dtype=torch.float32, device=device),
            likeliest=torch.empty(shape, dtype=torch.int32, device=device),
            sums=torch.empty((2, *shape, NUM_DIGITS), dtype=torch.float32, device=device),
            prefixes=torch.empty((2, max_num_seqs), dtype=torch.int64, device=device),
            thresholds=torch.empty((2, max_num_seqs), dtype=torch.int32, device=device),
            weights=torch.empty((2, *shape), dtype=torch.float64, device=device),
            counts=torch.empty(shape, dtype=torch.int32, device=device),
        )

    @property
    def max_num_seqs(self) -> int:
        return self.greatest.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.greatest.shape[1]


@triton.jit
def _load_chunk(logits_ptr, chunk, stride_row, row, vocab_size, CHUNK: tl.constexpr):
    """The row's logits of one chunk, [CHUNK] float32; -inf behind the vocabulary."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    pointers = logits_ptr + row.to(tl.int64) * stride_row + tokens
    return tl.load(pointers, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _load_row(ptr, row, num_chunks, other, CHUNKS: tl.constexpr):
    """A row of [B, C], one number per chunk, as [CHUNKS]."""
    chunks = tl.arange(0, CHUNKS)
    return tl.load(ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=other)


@triton.jit
def _keys_and_weights(logits, greatest, temperature):
    """The bits of (greatest - logits) / temperature, which are not negative, and exp of minus that."""
    gaps = tl.div_rn(greatest - logits, temperature)
    return gaps.to(tl.int32, bitcast=True), tl.exp(-gaps)


@triton.jit
def _limit(
    top_k_ptr,
    top_p_ptr,
    threshold_ptr,
    weights_ptr,
    counts_ptr,
    row,
    num_chunks,
    FILTER: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The limit of the sum of tokens before a kept one: k, or p times the weight that top-k left; or inf, if off."""
    if HAS_TOP_K:
        k = tl.load(top_k_ptr + row)
    if FILTER == _TOP_K:
        limit = tl.where(k > 0, k.to(tl.float64), float("inf"))
    else:
        p = tl.load(top_p_ptr + row)
        total = tl.sum(_load_row(weights_ptr, row, num_chunks, 0.0, CHUNKS), 0)
        if HAS_TOP_K:
            # Tokens tied with the k-th are all kept, but only as many as make k count here.
            surplus = tl.sum(_load_row(counts_ptr, row, num_chunks, 0, CHUNKS), 0) - k
            if (k > 0) & (surplus > 0):
                gap = tl.load(threshold_ptr + row).to(tl.float32, bitcast=True)
                total -= surplus.to(tl.float64) * tl.exp(-gap).to(tl.float64)
        limit = tl.where(p < 1.0, p * total, float("inf"))
    return limit


@triton.jit
def _next_prefix(prefix, pass_number, limit, sums_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """The prefix with the digit that pass `pass_number` found: the last one before which there is less than limit."""
    chunks = tl.arange(0, CHUNKS)[:, None]
    digits = tl.arange(0, _DIGITS)[None, :]
    pointers = sums_ptr + row * num_chunks * _DIGITS + chunks * _DIGITS + digits
    before = tl.sum(tl.load(pointers, mask=(chunks < num_chunks) & (digits > 0), other=0.0).to(tl.float64), 0)
    digit = tl.sum((before < limit).to(tl.int64), 0) - 1
    return prefix + (digit << (_BITS * (_LAST_PASS - pass_number)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FACTOR_1
    x = (x ^ (x >> 27)) * _FACTOR_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return 0 <= u < 1, float64, equal to quire.worker.sampling.sampler.uniform."""
    counter = position.to(tl.uint64) + 1
    bits = _mix(_mix(seed.to(tl.uint64)) + counter * _GOLDEN) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def chunk_max_kernel(
    logits_ptr,  # [B, V]
    greatest_ptr,  # [B, C]
    likeliest_ptr,  # [B, C]
    vocab_size,
    num_chunks,
    stride_row,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    logits = _load_chunk(logits_ptr, chunk, stride_row, row, vocab_size, CHUNK)
    greatest, place = tl.max(logits, 0, return_indices=True)
    tl.store(greatest_ptr + row * num_chunks + chunk, greatest)
    # Logits that are no numbers have no greatest: any token then, but one of the vocabulary.
    tl.store(likeliest_ptr + row * num_chunks + chunk, tl.minimum(chunk * CHUNK + place, vocab_size - 1))


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
):
    row = tl.program_id(0)
    tl.store(tokens_ptr + row, _likeliest(greatest_ptr, likeliest_ptr, row, num_chunks, CHUNKS))


@triton.jit(do_not_specialize=["pass_number"], do_not_specialize_on_alignment=_PER_ROW)
def search_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    greatest_ptr,  # [B, C]
    threshold_ptr,  # [B], of top-k
    weights_ptr,  # [B, C]
    counts_ptr,  # [B, C]
    prefix_ptr,  # [B], before the last pass
    sums_ptr,  # [B, C, DIGITS], of the last pass
    new_prefix_ptr,  # [B], before this pass
    new_sums_ptr,  # [B, C, DIGITS], of this pass
    vocab_size,
    num_chunks,
    stride_row,
    pass_number,
    FILTER: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    limit = _limit(
        top_k_ptr, top_p_ptr, threshold_ptr, weights_ptr, counts_ptr, row, num_chunks, FILTER, HAS_TOP_K, CHUNKS
    )
    if (temperature > 0.0) & (limit < float("inf")):
        prefix = tl.zeros([], tl.int64)
        if pass_number > 0:
            prefix = tl.load(prefix_ptr + row)
            prefix = _next_prefix(prefix, pass_number - 1, limit, sums_ptr, row, num_chunks, CHUNKS)
        if chunk == 0:
            tl.store(new_prefix_ptr + row, prefix)
        greatest = tl.max(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
        logits = _load_chunk(logits_ptr, chunk, stride_row, row, vocab_size, CHUNK)
        keys, weights = _keys_and_weights(logits, greatest, temperature)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        if FILTER == _TOP_K:
            weights = tl.where(tokens < vocab_size, 1.0, 0.0)
        for digit in tl.static_range(1, _DIGITS):
            begin = prefix + (tl.full([], digit, tl.int64) << (_BITS * (_LAST_PASS - pass_number)))
            begin = tl.minimum(begin, _LAST_KEY).to(tl.int32)
            before = tl.sum(tl.where(keys < begin, weights, 0.0), 0)
            tl.store(new_sums_ptr + (row * num_chunks + chunk) * _DIGITS + digit, before)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def settle_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    greatest_ptr,  # [B, C]
    threshold_ptr,  # [B], of top-k
    weights_ptr,  # [B, C]
    counts_ptr,  # [B, C]
    prefix_ptr,  # [B], before the last pass
    sums_ptr,  # [B, C, DIGITS], of the last pass
    new_threshold_ptr,  # [B]
    new_weights_ptr,  # [B, C]
    vocab_size,
    num_chunks,
    stride_row,
    FILTER: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        threshold = tl.full([], _LAST_KEY, tl.int32)
        if FILTER != _NO_FILTER:
            limit = _limit(
                top_k_ptr, top_p_ptr, threshold_ptr, weights_ptr, counts_ptr, row, num_chunks, FILTER, HAS_TOP_K, CHUNKS
            )
            if limit < float("inf"):
                prefix = tl.load(prefix_ptr + row)
                prefix = _next_prefix(prefix, _LAST_PASS, limit, sums_ptr, row, num_chunks, CHUNKS)
                threshold = tl.minimum(prefix, _LAST_KEY).to(tl.int32)
        if FILTER == _TOP_P:
            threshold = tl.minimum(threshold, tl.load(threshold_ptr + row))
        if HAS_MIN_P:
            min_p = tl.load(min_p_ptr + row)
            if min_p > 0.0:
                gap = tl.abs(tl.log(min_p)).to(tl.float32)
                threshold = tl.minimum(threshold, gap.to(tl.int32, bitcast=True))
        if chunk == 0:
            tl.store(new_threshold_ptr + row, threshold)
        greatest = tl.max(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
        logits = _load_chunk(logits_ptr, chunk, stride_row, row, vocab_size, CHUNK)
        keys, weights = _keys_and_weights(logits, greatest, temperature)
        kept = (keys <= threshold) & (chunk * CHUNK + tl.arange(0, CHUNK) < vocab_size)
        place = row * num_chunks + chunk
        tl.store(new_weights_ptr + place, tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), 0))
        if FILTER == _TOP_K:
            tl.store(counts_ptr + place, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def _first_beyond(cumulative, weights, target, SIZE: tl.constexpr):
    """The first place with weight where the cumulative weight exceeds target; after rounding, the last with any."""
    places = tl.arange(0, SIZE)
    first = tl.min(tl.where((cumulative > target) & (weights > 0.0), places, SIZE), 0)
    last = tl.max(tl.where(weights > 0.0, places, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def draw_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    greatest_ptr,  # [B, C]
    likeliest_ptr,  # [B, C]
    threshold_ptr,  # [B], the last
    weights_ptr,  # [B, C]
    tokens_ptr,  # [B]
    vocab_size,
    num_chunks,
    stride_row,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        chunk_weights = _load_row(weights_ptr, row, num_chunks, 0.0, CHUNKS)
        u = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        target = u * tl.sum(chunk_weights, 0)
        chunk = _first_beyond(tl.cumsum(chunk_weights, 0), chunk_weights, target, CHUNKS)
        before = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, chunk_weights, 0.0), 0)
        greatest = tl.max(_load_row(greatest_ptr, row, num_chunks, float("-inf"), CHUNKS), 0)
        logits = _load_chunk(logits_ptr, chunk, stride_row, row, vocab_size, CHUNK)
        keys, weights = _keys_and_weights(logits, greatest, temperature)
        weights = tl.where(keys <= tl.load(threshold_ptr + row), weights, 0.0).to(tl.float64)
        place = _first_beyond(before + tl.cumsum(weights, 0), weights, target, CHUNK)
        tl.store(tokens_ptr + row, (chunk * CHUNK + place).to(tl.int64))
    else:
        tl.store(tokens_ptr + row, _likeliest(greatest_ptr, likeliest_ptr, row, num_chunks, CHUNKS))


def plan_launch(vocab_size: int) -> tuple[dict[str, int | bool], int, int]:
    """Return (constexprs, num_warps, num_stages) of all kernels here; FILTER and HAS_... come on top."""
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
    _launch_chunk_max(logits, workspace)
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    pick_kernel[(logits.shape[0],)](
        workspace.greatest,
        workspace.likeliest,
        tokens,
        workspace.num_chunks,
        CHUNKS=constexprs["CHUNKS"],
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

    Raises ValueError if a shape, dtype or device is another, or the workspace is for fewer rows or another V. No sync.
    Which launches are made depends on which of top_k, top_p and min_p are given, not on what they hold.
    Cost: reads the logits twice and once more a chunk of each row, in 3 launches; top_k reads them NUM_PASSES times
    more, top_p NUM_PASSES + 1 times, a launch each.
    """
    _check_parameters(
        logits, temperature=temperature, seeds=seeds, positions=positions, top_k=top_k, top_p=top_p, min_p=min_p
    )
    tokens = _tokens(logits, workspace, out)
    if logits.shape[0] == 0:
        return tokens
    _launch_chunk_max(logits, workspace)
    _find_thresholds(logits, workspace, temperature, top_k, top_p, min_p)
    slot = int(top_p is not None)
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    draw_kernel[(logits.shape[0],)](
        logits,
        temperature,
        seeds,
        positions,
        workspace.greatest,
        workspace.likeliest,
        workspace.thresholds[slot],
        workspace.weights[slot],
        tokens,
        workspace.vocab_size,
        workspace.num_chunks,
        logits.stride(0),
        **constexprs,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return tokens


def _tokens(logits: Tensor, workspace: SamplerWorkspace, out: Tensor | None) -> Tensor:
    require_shape("logits", logits, (None, workspace.vocab_size))
    require_dtype("logits", logits, FLOAT_DTYPES)
    require_last_contiguous("logits", logits)
    num_rows = logits.shape[0]
    if num_rows > workspace.max_num_seqs:
        raise ValueError(f"logits has {num_rows} rows, the workspace is for {workspace.max_num_seqs}")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    require_shape("out", tokens, (num_rows,))
    require_dtype("out", tokens, torch.int64)
    require_contiguous("out", tokens)
    require_same_device(logits=logits, workspace=workspace.greatest, out=tokens)
    return tokens


_PARAMETER_DTYPES = {
    "temperature": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
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


def _launch_chunk_max(logits: Tensor, workspace: SamplerWorkspace) -> None:
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    chunk_max_kernel[(workspace.num_chunks, logits.shape[0])](
        logits,
        workspace.greatest,
        workspace.likeliest,
        workspace.vocab_size,
        workspace.num_chunks,
        logits.stride(0),
        CHUNK=constexprs["CHUNK"],
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _find_thresholds(
    logits: Tensor,
    workspace: SamplerWorkspace,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    """Leave thresholds and weights for draw: in the first place of the workspace, or the second with top_p.

    Where a kernel reads no top_k, top_p or min_p, it is given temperature for it.
    """
    first = NO_FILTER
    if top_k is not None:
        first = TOP_K
        _launch_search(logits, workspace, temperature, top_k, None, kind=TOP_K)
    # The sum for top-p is taken before min-p.
    before_top_p = min_p if top_p is None else None
    _launch_settle(logits, workspace, temperature, top_k, None, before_top_p, kind=first)
    if top_p is not None:
        _launch_search(logits, workspace, temperature, top_k, top_p, kind=TOP_P)
        _launch_settle(logits, workspace, temperature, top_k, top_p, min_p, kind=TOP_P)


def _launch_search(
    logits: Tensor,
    workspace: SamplerWorkspace,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    *,
    kind: int,
) -> None:
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    for pass_number in range(NUM_PASSES):
        old, new = (pass_number - 1) % 2, pass_number % 2
        search_kernel[(workspace.num_chunks, logits.shape[0])](
            logits,
            temperature,
            temperature if top_k is None else top_k,
            temperature if top_p is None else top_p,
            workspace.greatest,
            workspace.thresholds[0],
            workspace.weights[0],
            workspace.counts,
            workspace.prefixes[old],
            workspace.sums[old],
            workspace.prefixes[new],
            workspace.sums[new],
            workspace.vocab_size,
            workspace.num_chunks,
            logits.stride(0),
            pass_number,
            FILTER=kind,
            HAS_TOP_K=top_k is not None,
            **constexprs,
            num_warps=num_warps,
            num_stages=num_stages,
        )


def _launch_settle(
    logits: Tensor,
    workspace: SamplerWorkspace,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *,
    kind: int,
) -> None:
    constexprs, num_warps, num_stages = plan_launch(workspace.vocab_size)
    last = (NUM_PASSES - 1) % 2
    slot = int(kind == TOP_P)
    settle_kernel[(workspace.num_chunks, logits.shape[0])](
        logits,
        temperature,
        temperature if top_k is None else top_k,
        temperature if top_p is None else top_p,
        temperature if min_p is None else min_p,
        workspace.greatest,
        workspace.thresholds[0],
        workspace.weights[0],
        workspace.counts,
        workspace.prefixes[last],
        workspace.sums[last],
        workspace.thresholds[slot],
        workspace.weights[slot],
        workspace.vocab_size,
        workspace.num_chunks,
        logits.stride(0),
        FILTER=kind,
        HAS_TOP_K=top_k is not None,
        HAS_MIN_P=min_p is not None,
        **constexprs,
        num_warps=num_warps,
        num_stages=num_stages,
    )
