# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Noise of each token by (seed, position, token id), and the token with the greatest sum of score and noise.

The numbers are those of quire.worker.sampling.gumbel, which explains them, to the bit: integers, and float32 operations
that are exactly rounded. So a kernel that uses them is launched with UNFUSED: a multiplication and an addition that are
made one are rounded once, and give other numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.launching import ceil_div, next_power_of_2

GROUP = 64
UNFUSED = {"enable_fp_fusion": False}

_GROUP = tl.constexpr(GROUP)
_SHARE = tl.constexpr(1 / GROUP)
_SLACK = tl.constexpr(2.0**-16)
_NO_TOKEN = tl.constexpr(2**31 - 1)

# splitmix64
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)

_GROUPS = tl.constexpr(1 << 31)
_UNIT = tl.constexpr(1 << 27)
_PER_UNIT = tl.constexpr(2.0**-27)
_ROOT_OF_HALF = tl.constexpr(0x3F3504F3)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FACTOR_1
    x = (x ^ (x >> 27)) * _FACTOR_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """Return the key of a row's noise, uint64."""
    return _mix(_mix(seed.to(tl.uint64)) + (position.to(tl.uint64) + 1) * _GOLDEN)


@triton.jit
def _hash(key, counters):
    """Return 32 random bits for each counter, uint32."""
    x = counters ^ key.to(tl.uint32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB + (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _split(x):
    """Return exponents e, int32, and numbers f with x = 2**e * (1 + f) and sqrt(1/2) <= 1 + f < sqrt(2), for x > 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponents = (bits - _ROOT_OF_HALF) >> 23
    return exponents, (bits - (exponents << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log(exponents, f):
    """Return log(2**exponents * (1 + f))."""
    p = f * 0.08917782 + -0.14350188
    p = p * f + 0.14876983
    p = p * f + -0.16565636
    p = p * f + 0.19965397
    p = p * f + -0.25001746
    p = p * f + 0.33333859
    p = p * f - 0.5
    return exponents.to(tl.float32) * 0.6931471805599453 + (f + f * f * p)


@triton.jit
def _exponential(bits):
    """Return exponential numbers: -log((i + 1/2) / 2**26), i the upper 26 bits."""
    odd = ((bits >> 5) | 1).to(tl.int32)
    exponents, f = _split(odd.to(tl.float32) * _PER_UNIT)
    near_1 = (odd - _UNIT).to(tl.float32) * _PER_UNIT
    return -_log(exponents, tl.where(exponents == 0, near_1, f))


@triton.jit
def _gumbel(x):
    exponents, f = _split(x)
    return -_log(exponents, f)


@triton.jit
def token_noise(key, tokens):
    """Return the noise of tokens, int32, as float32."""
    bits = _hash(key, (tokens // _GROUP).to(tl.uint32) | _GROUPS)
    later = _exponential(_hash(key, tokens.to(tl.uint32)))
    is_first = ((bits ^ tokens.to(tl.uint32)) & (_GROUP - 1)) == 0
    return _gumbel(_exponential(bits) * _SHARE + tl.where(is_first, 0.0, later))


@triton.jit
def group_noise(key, groups):
    """Return the greatest noise of the tokens of groups, int32."""
    return _gumbel(_exponential(_hash(key, groups.to(tl.uint32) | _GROUPS)) * _SHARE)


@triton.jit
def noisy_argmax(
    logits_ptr,
    tops_ptr,
    greatest,
    otherwise,
    temperature,
    threshold,
    key,
    stride_row,
    row,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
):
    """Return the token of a row with the greatest sum of score and noise, of those with a gap of at most the threshold.

    A token's gap is (greatest - its logit) / temperature, its score -gap. tops_ptr is [B, num_groups], the greatest
    logit of each group. `otherwise` is returned if there is none. The groups are visited by falling bound of their
    sums.
    """
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    tops = tl.load(tops_ptr + row.to(tl.int64) * num_groups + groups, mask=is_group, other=float("-inf"))
    least_gaps = tl.div_rn(greatest - tops, temperature)
    bounds = group_noise(key, groups) + _SLACK - least_gaps
    bounds = tl.where(is_group & (least_gaps <= threshold), bounds, float("-inf"))
    best = tl.full([], float("-inf"), tl.float32)
    token = otherwise.to(tl.int32)
    bound = tl.max(bounds, 0)
    while (bound >= best) & (bound > float("-inf")):
        group = tl.argmax(bounds, 0)
        tokens = group * _GROUP + tl.arange(0, _GROUP)
        is_token = tokens < vocab_size
        pointers = logits_ptr + row.to(tl.int64) * stride_row + tokens
        logits = tl.load(pointers, mask=is_token, other=float("-inf")).to(tl.float32)
        gaps = tl.div_rn(greatest - logits, temperature)
        sums = tl.where(is_token & (gaps <= threshold), token_noise(key, tokens) - gaps, float("-inf"))
        found = tl.max(sums, 0)
        first = tl.min(tl.where(sums == found, tokens, _NO_TOKEN), 0)
        is_first = (found > best) | ((found == best) & (found > float("-inf")) & (first < token))
        token = tl.where(is_first, first, token)
        best = tl.maximum(best, found)
        bounds = tl.where(groups == group, float("-inf"), bounds)
        bound = tl.max(bounds, 0)
    return token.to(tl.int64)


def count_groups(vocab_size: int) -> tuple[int, int]:
    """Return the number of groups, and GROUPS."""
    num_groups = ceil_div(vocab_size, GROUP)
    return num_groups, next_power_of_2(num_groups)
