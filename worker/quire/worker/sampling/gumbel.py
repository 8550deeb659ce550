"""Draws on a CPU: noise for each token from (seed, position, token id); the greatest sum of score and noise wins.

If E is a random number of the exponential distribution with rate 1, then -log(E) is one of Gumbel's distribution, and
the greatest of (score + noise) is a token with the probability softmax(score). A rounding of one logit moves the sum
of one token, so the winner changes only where it wins or loses by about as much.

Most tokens need no noise. GROUP tokens with consecutive ids are a group. The least of their E is exponential with rate
GROUP, and each token is equally likely to have it. The other tokens have this number and another exponential one added,
because the distribution has no memory. So the noise of all tokens is independent, and the greatest noise of a group is
known before that of its tokens. A group can hold the winner only if (its greatest score + its greatest noise) is as
much as the sum of some token. That holds for about 10 groups of a row, and for GROUP of them on average if the logits
are chosen to be the worst ones.

quire.kernels.gumbel has the same numbers to the bit: integers, and float32 operations that are exactly rounded.
docs/reference/sampling.md, Seeds, has the promise to users.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GROUP_BITS = 6
GROUP = 1 << GROUP_BITS

SLACK = np.float32(2.0**-16)
"""Added to the greatest noise of a group: a rounded logarithm may fall, by less than this, where its argument rises."""

# Rows that are drawn at once: their intermediate numbers stay in the cache of a core.
_ROWS_AT_ONCE = 16

Uint64s = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Uint32s = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

# splitmix64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

# Counters of groups; those of tokens are below.
_GROUPS = 1 << 31
_UNIT = 1 << 27
_SHARE = np.float32(1 / GROUP)
_ROOT_OF_HALF = np.int32(0x3F3504F3)
_LOG_2 = np.float32(0.6931471805599453)
# log(1 + f) = f + f * f * (-1/2 + f * P(f)) for sqrt(1/2) <= 1 + f < sqrt(2), with a relative error of 4e-8.
_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (0.08917782, -0.14350188, 0.14876983, -0.16565636, 0.19965397, -0.25001746, 0.33333859)
)  # fmt: skip


def row_keys(seeds: Uint64s, positions: Int64s) -> Uint64s:
    """Return the key of each row's noise: output `position` of the splitmix64 stream that `seed` selects."""
    return _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def token_noise(keys: Uint64s, token_ids: Int64s) -> Float32s:
    """Return the noise of tokens, of the shape that keys and token ids have together."""
    groups = token_ids >> GROUP_BITS
    bits = _hash(keys, (groups | _GROUPS).astype(np.uint32))
    return _gumbel(_exponential(bits) * _SHARE + _later(keys, token_ids, firsts=_first_tokens(bits, groups)))


def _first_tokens(bits: Uint32s, groups: Int64s) -> Int64s:
    """Return the token with the least E of each group: the lowest bits choose it."""
    return np.asarray(groups * GROUP + (bits & np.uint32(GROUP - 1)))


def _later(keys: Uint64s, token_ids: Int64s, *, firsts: Int64s) -> Float32s:
    """Return how much greater the E of tokens is than the least E of their groups, which the first tokens have."""
    later = _exponential(_hash(keys, token_ids.astype(np.uint32)))
    return np.where(token_ids == firsts, np.float32(0), later)


def draw(
    logits: Tensor, *, temperature: Tensor, seeds: Tensor, positions: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """Draw a token of each row.

    Sizes: n rows, V vocabulary. All on the CPU.
        logits              [n, V]  float32; of a row without a greatest logit any token is drawn
        temperature         [n]     float32, above 0
        seeds, positions    [n]     int64, at least 0
        thresholds          [n]     float32, the least score, (logit - greatest logit) / temperature, that may be drawn.
                                    None: all may
        returns             [n]     int64

    Cost: reads the logits once. Noise for about V / GROUP numbers a row, and for the tokens of a few groups.
    """
    num_rows, vocab_size = logits.shape
    values, divisors = logits.numpy(), temperature.numpy()[:, None]
    keys = row_keys(seeds.numpy().view(np.uint64), positions.numpy())[:, None]
    least = np.full((num_rows, 1), -np.inf, np.float32) if thresholds is None else thresholds.numpy()[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        chosen = [
            _draw_rows(values[rows], keys[rows], divisors[rows], least[rows])
            for rows in (slice(at, at + _ROWS_AT_ONCE) for at in range(0, num_rows, _ROWS_AT_ONCE))
        ]
    return torch.from_numpy(np.concatenate(chosen).clip(0, vocab_size - 1))


def _draw_rows(logits: Float32s, keys: Uint64s, temperature: Float32s, least: Float32s) -> Int64s:
    """Draw from logits [n, V]; keys, temperature and the least score are [n, 1]."""
    num_rows, vocab_size = logits.shape
    tops = np.maximum.reduceat(logits, np.arange(0, vocab_size, GROUP), axis=1)
    num_groups, greatest, rows = tops.shape[1], tops.max(1, keepdims=True), np.arange(num_rows)

    def scores_of(row: Int64s, token_ids: Int64s) -> Float32s:
        """Return scores of tokens; -inf for those that may not be drawn."""
        scores = (logits[row, np.minimum(token_ids, vocab_size - 1)] - greatest[row, 0]) / temperature[row, 0]
        return np.where((scores >= least[row, 0]) & (token_ids < vocab_size), scores, -np.inf)

    # A sum to be exceeded: of the tokens with the greatest noise of each group, and of all in the likeliest group.
    groups, likeliest = np.arange(num_groups), np.asarray(tops.argmax(1))
    tokens = _tokens_of(likeliest)
    counters = np.concatenate((np.broadcast_to(groups | _GROUPS, tops.shape), tokens), 1)
    bits = _hash(keys, counters.astype(np.uint32))
    firsts, exponential = _first_tokens(bits[:, :num_groups], groups), _exponential(bits)
    earliest = exponential[:, :num_groups] * _SHARE
    later = np.where(firsts[rows, likeliest, None] == tokens, np.float32(0), exponential[:, num_groups:])
    noise = _gumbel(np.concatenate((earliest, earliest[rows, likeliest, None] + later), 1))
    candidates = np.concatenate((firsts, tokens), 1)
    sums = scores_of(rows[:, None], candidates) + noise
    best = sums.max(1)
    chosen: Int64s = np.where(sums == best[:, None], candidates, vocab_size).min(1)

    # The other groups that may exceed it.
    scores = (tops - greatest) / temperature
    scores[scores < least] = -np.inf
    scores[rows, likeliest] = -np.inf
    row, group = np.nonzero(scores + (noise[:, :num_groups] + SLACK) >= best[:, None])
    if len(row):
        tokens = _tokens_of(group)
        later = _later(keys[row], tokens, firsts=firsts[row, group, None])
        sums = scores_of(row[:, None], tokens) + _gumbel(earliest[row, group, None] + later)
        before = best.copy()
        np.maximum.at(best, row, sums.max(1))
        chosen[best > before] = vocab_size
        # Of several tokens with the greatest sum, the first.
        np.minimum.at(chosen, row, np.where(sums == best[row, None], tokens, vocab_size).min(1))
    return chosen


def _tokens_of(groups: Int64s) -> Int64s:
    """Return the tokens of groups [n], [n, GROUP]."""
    return groups[:, None] * GROUP + np.arange(GROUP)


def _mix(x: Uint64s) -> Uint64s:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(keys: Uint64s, counters: Uint32s) -> Uint32s:
    """Return 32 random bits for each counter: a permutation of the counters that the 64 bits of a key choose."""
    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    x = counters ^ low
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB) + high
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return np.asarray(x ^ (x >> np.uint32(14)))


def _exponential(bits: Uint32s) -> Float32s:
    """Return exponential numbers, 2**-27 .. 19: -log((i + 1/2) / 2**26), i the upper 26 bits."""
    odd = ((bits >> np.uint32(5)) | np.uint32(1)).view(np.int32)
    exponents, f = _split(odd.astype(np.float32) * np.float32(1 / _UNIT))
    # Near 1 the logarithm is that of a difference, which is exact before it is rounded.
    near_1 = (odd - np.int32(_UNIT)).astype(np.float32) * np.float32(1 / _UNIT)
    return -_log(exponents, np.where(exponents == 0, near_1, f))


def _gumbel(x: Float32s) -> Float32s:
    """Return -log(x) of positive numbers."""
    return -_log(*_split(x))


def _split(x: Float32s) -> tuple[Int32s, Float32s]:
    """Return exponents e and numbers f with x = 2**e * (1 + f) and sqrt(1/2) <= 1 + f < sqrt(2), for x > 0."""
    bits = x.view(np.int32)
    exponents = (bits - _ROOT_OF_HALF) >> np.int32(23)
    return exponents, (bits - (exponents << np.int32(23))).view(np.float32) - np.float32(1)


def _log(exponents: Int32s, f: Float32s) -> Float32s:
    """Return log(2**exponents * (1 + f)). Each operation is rounded: a fused multiply-add gives other numbers."""
    p = _POLYNOMIAL[0] * f + _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        p = p * f + coefficient
    p = p * f - np.float32(0.5)
    return exponents.astype(np.float32) * _LOG_2 + (f + f * f * p)
