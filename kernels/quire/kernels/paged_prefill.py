# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Attention of prompts: ragged queries over keys and values in blocks, both earlier and new ones.

A program takes one tile of rows of one kv head. Rows are the query tokens of a sequence times the G query heads that
read this kv head, token by token, so that any G fills a tile. Tiles never span sequences: sequence i has the tiles
from cu_seqlens_q[i] * G // BLOCK_M + i on, which a program inverts by a binary search. That bounds the number of tiles
by the shapes alone, so neither the grid nor a captured graph depends on lengths. What lies behind the last sequence is
a sequence without keys: its rows become zero.

    keys of a tile      begin .. full_begin     masked: some rows are past them (window, chunk)
                        full_begin .. full_end  seen by every row, no mask
                        full_end .. end         masked: the diagonal

The block ids of the next tile of keys are loaded one iteration ahead and carried: a load of keys that waits for another
load of the same iteration is one that Triton does not pipeline. Tiles with the most keys come first. Where there are
fewer tiles than multiprocessors, as with the rest of a prompt behind a long prefix, keys are split, and merge_states()
makes one result of the parts.

Over keys and values of fp8, queries of bfloat16 and weights become float16, as in decode. From fp8 to float16 is one
instruction for two numbers. To bfloat16 it is one more for each, on the unit that takes exponentials too: 64 beside 34
of these in a tile, which is as much time as its matrix products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.decode_plan import UNBOUNDED, first_visible
from quire.kernels.dependent_launch import LEAST_CAPABILITY, dependent_options, wait_for_earlier_kernels
from quire.kernels.fixed_tiles import are_fixed_tiles_used
from quire.kernels.launching import (
    FLOAT_DTYPES,
    LOG2_E,
    DeviceLimits,
    Launch,
    Layout,
    Variant,
    ceil_div,
    contiguous,
    device_limits,
    dot,
    halves_of_rows,
    in_units,
    layouts,
    next_power_of_2,
    prepared_once,
    require_at_least,
    require_contiguous,
    require_dtype,
    require_kv_scales,
    require_last_contiguous,
    require_per_head,
    require_pool,
    require_same_device,
    require_shape,
    round_to,
    stride_unit,
)
from quire.kernels.merge_states import merge_states

# A split of fewer keys costs more to merge than it saves.
MIN_SPLIT = 512
MAX_SPLITS = 32

# The choices that callers leave open, until a GPU has timed them.
QK_AHEAD = False
DESCRIPTORS = False

# Keys of the largest tile, and so the least block size of which a descriptor copies every tile.
MAX_TILE = 64

# A tensor descriptor takes addresses and strides that are multiples of this.
_BOX_ALIGNMENT = 16

_LOG2_E = tl.constexpr(LOG2_E)


def paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
    num_splits: int | None = None,
    fixed_tile: bool | None = None,
    qk_ahead: bool | None = None,
    descriptors: bool | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged queries over keys and values that lie in blocks, the queries' own included.

    Sizes: N query tokens of n sequences, Hq query heads, H kv heads, M blocks per table, B blocks, S block size.
        q               [N, Hq, Dk]             fp32/fp16/bf16, Dk contiguous; query head h reads kv head h // (Hq // H)
        k_pool, v_pool  [B, S, H, Dk], [B, S, H, Dv]    any strides, D contiguous, head dims multiples of 8 up to 256;
                                                dtype of q, or fp8 e4m3
        block_tables    [n, M]                  int32, any stride between rows; n and M at least 1. Entries beyond a
                                                sequence's length are not read
        seq_lens        [n]                     int32, keys of each sequence, its new ones included; 0 for a pad, else
                                                at least its number of queries
        cu_seqlens_q    [n+1]                   int32, rising, from 0; sequence i has queries cu[i] .. cu[i+1] - 1, its
                                                last tokens. Tokens from cu[n] on are pads
        scaling         above 0, of scores
        window, chunk   a query at position p sees keys at positions <= p, of those the last `window`, and those with
                        position // chunk == p // chunk; None hides nothing
        softcap         makes scores softcap * tanh(score / softcap), or None
        sinks           [Hq]                    fp32/fp16/bf16, one more score per head, with no value, or None
        alibi_slopes    [Hq]                    float32, slope * (key position - query position) is added to the
                                                (capped) scores, or None
        kv_scales       [2, H]                  float32, contiguous, factors of an fp8 pool's keys and of its values;
                                                None: 1
        num_splits      in how many parts the keys of a tile are taken; by default as many as keep the GPU busy, from
                        shapes alone. 1 makes a sequence's result independent of the rest of the batch, but for
                        rounding where the choice of tile differs
        fixed_tile      one tile whatever the batch is, and one part of keys: a query's result has the same bits alone,
                        in any batch, and with any of the queries before it in the same call. By default as
                        use_fixed_tiles() says; not together with num_splits above 1
        qk_ahead        begins the products of the next tile's keys before this one's weights are computed: the same
                        bits. None for QK_AHEAD, but not over fp8 and with head dims above 128, where it gains nothing
        descriptors     copies tiles that every query sees by tensor descriptors (TMA), one box of a block at a time:
                        the same bits. Needs a GPU from Hopper on, blocks of at least a tile of keys (64 always
                        suffices), and the pool at an address and with strides of multiples of 16 bytes. None for
                        DESCRIPTORS where that is so
        out             [N, Hq, Dv]             where to write, dtype of q, Dv contiguous; new by default
        lse             [N, Hq]                 where to write, float32, contiguous, or None: log2 of the sum of
                                                2 ** (score * log2(e)) over the visible keys and the sink
        returns         out

    Rows of pads become exactly 0, their lse -inf. Slots that no query sees are not read. Raises ValueError if a shape,
    dtype, stride, device or number does not fit. Cost: 2 * (Dk + Dv) flops per query head and visible key; reads the
    visible keys and values once per tile of rows, so mostly from L2. One launch, two and a float32 workspace if keys
    are split; no sync. Equal inputs give equal bits.
    """
    if qk_ahead is None:
        qk_ahead = QK_AHEAD and k_pool.dtype.itemsize > 1 and max(k_pool.shape[3], v_pool.shape[3]) <= 128
    if descriptors is None:
        descriptors = DESCRIPTORS and _are_boxes(k_pool, v_pool)
    sources = (block_tables, seq_lens, cu_seqlens_q, sinks, alibi_slopes, kv_scales)
    is_fixed = are_fixed_tiles_used() if fixed_tile is None else fixed_tile
    numbers = (scaling, window, chunk, softcap, num_splits, is_fixed, qk_ahead, descriptors)
    launch = _prepare(*layouts(q, k_pool, v_pool, *sources, out, lse), *numbers)
    if descriptors:
        _require_aligned(k_pool=k_pool, v_pool=v_pool)
        triton.set_allocator(_new_scratch)
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = q.new_empty(num_tokens, num_heads, v_pool.shape[3])
    if num_tokens == 0:
        return out
    outs, lses, num_splits = out, lse, launch.grid[2]
    if num_splits > 1:
        outs = q.new_empty(num_splits, *out.shape, dtype=torch.float32)
        lses = q.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    score_scale = scaling * LOG2_E
    launch.run(
        paged_prefill_kernel,
        q, k_pool, v_pool, outs, lses, *sources,
        score_scale if softcap is None else 2 * score_scale / softcap,
        0.0 if softcap is None else softcap * LOG2_E,
        UNBOUNDED if window is None else window, UNBOUNDED if chunk is None else chunk,
        num_tokens, block_tables.shape[0], k_pool.shape[0],
    )  # fmt: skip
    if num_splits > 1:
        assert lses is not None
        merge_states(outs, lses, out=out, lse=lse)
    return out


@prepared_once
def _prepare(
    q: Layout,
    k_pool: Layout,
    v_pool: Layout,
    block_tables: Layout,
    seq_lens: Layout,
    cu_seqlens_q: Layout,
    sinks: Layout | None,
    alibi_slopes: Layout | None,
    kv_scales: Layout | None,
    out: Layout | None,
    lse: Layout | None,
    scaling: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    num_splits: int | None,
    is_fixed: bool,
    qk_ahead: bool,
    descriptors: bool,
) -> Launch:
    """The launch of paged_prefill_kernel; its grid is [tiles, kv heads, splits]."""
    _check(q, k_pool, v_pool, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    _check_numbers(scaling=scaling, window=window, chunk=chunk, softcap=softcap, num_splits=num_splits)
    if is_fixed and num_splits not in (None, 1):
        raise ValueError(f"num_splits={num_splits} is not 1, with a fixed tile")
    require_per_head(q, sinks=sinks, alibi_slopes=alibi_slopes)
    require_kv_scales(kv_scales, k_pool)
    num_tokens, num_heads, head_dim_k = q.shape
    num_seqs, max_blocks = block_tables.shape
    block_size, num_kv_heads, head_dim_v = v_pool.shape[1:]
    out = out or contiguous((num_tokens, num_heads, head_dim_v), q)
    _check_results(q, out=out, lse=lse, head_dim=head_dim_v)
    num_rows = num_tokens * (num_heads // num_kv_heads)
    limits = device_limits(q.device)
    block_m = choose_block_m(
        0 if is_fixed else num_rows,
        num_seqs=num_seqs,
        dtype=q.dtype,
        head_dim=max(head_dim_k, head_dim_v),
        kv_itemsize=k_pool.dtype.itemsize,
        limits=limits,
    )
    num_tiles = num_rows // block_m + num_seqs + 1
    if is_fixed:
        num_splits = 1
    elif num_splits is None:
        num_splits = choose_num_splits(
            busy_tiles(num_rows, num_seqs=num_seqs, block_m=block_m) * num_kv_heads,
            max_keys=max_blocks * block_size,
            multiprocessors=limits.num_multiprocessors,
        )
    variant = prefill_variant(
        dtype=q.dtype,
        kv_itemsize=k_pool.dtype.itemsize,
        block_m=block_m,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        block_size=block_size,
        bounded=window is not None or chunk is not None,
        has_softcap=softcap is not None,
        has_sinks=sinks is not None,
        has_alibi=alibi_slopes is not None,
        has_lse=lse is not None or num_splits > 1,
        is_fixed=is_fixed,
        qk_ahead=qk_ahead,
        descriptors=descriptors,
        stride_unit=stride_unit(q, k_pool, v_pool, out),
        limits=limits,
    )
    if descriptors:
        _check_descriptors(k_pool, v_pool, block_n=variant.constants["BLOCK_N"], limits=limits)
    out_strides = (0, *out.strides[:2])
    if num_splits > 1:
        out_strides = contiguous((num_splits, *out.shape), out).strides[:3]
    return Launch(
        grid=(num_tiles, num_kv_heads, num_splits),
        strides=(block_tables.stride(0), *q.strides[:2], *k_pool.strides[:3], *v_pool.strides[:3], *out_strides),
        options={**variant.options, **dependent_options(paged_prefill_kernel, q.device)},
    )


def choose_block_m(
    num_rows: int, *, num_seqs: int, dtype: torch.dtype, head_dim: int, kv_itemsize: int, limits: DeviceLimits
) -> int:
    """Rows of a tile, a row being one query head of one token; dtype is that of q.

    128 where the mean sequence of the step fills it, else 64: two such programs share a multiprocessor. More than 64
    rows of wide heads spill if keys are fp8, or where the registers hold all operands, as do more than 16 of float32,
    which has no tensor cores of its full precision.
    """
    if dtype == torch.float32:
        return 16
    if head_dim > 128 and (kv_itemsize == 1 or not limits.has_warpgroups):
        return 64
    return 128 if num_rows >= 128 * num_seqs else 64


def busy_tiles(num_rows: int, *, num_seqs: int, block_m: int) -> int:
    """The tiles of a step that have rows, if its sequences are equally long: lengths are on the device.

    The grid has room for any lengths, and up to num_seqs + 1 tiles more, which end at once.
    """
    return num_seqs * ceil_div(ceil_div(num_rows, num_seqs), block_m)


def choose_num_splits(num_programs: int, *, max_keys: int, multiprocessors: int) -> int:
    """Parts to take keys in: 1 if the busy programs fill the GPU, and none of fewer than MIN_SPLIT keys."""
    return max(1, min(multiprocessors // max(1, num_programs), max_keys // MIN_SPLIT, MAX_SPLITS))


def prefill_variant(
    *,
    dtype: torch.dtype,
    kv_itemsize: int,
    block_m: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    block_size: int,
    bounded: bool,
    has_softcap: bool,
    has_sinks: bool,
    has_alibi: bool,
    has_lse: bool,
    qk_ahead: bool,
    descriptors: bool,
    is_fixed: bool = False,
    stride_unit: int,
    limits: DeviceLimits,
) -> Variant:
    """The compiled variant of paged_prefill_kernel.

    dtype is that of q, kv_itemsize the bytes of an element of keys; bounded is True if window or chunk hides keys.
    """
    block_dk, block_dv = (max(16, next_power_of_2(head_dim)) for head_dim in (head_dim_k, head_dim_v))
    # Where the registers hold all operands, wide heads of float16 spill.
    halves = kv_itemsize == 1 and dtype == torch.bfloat16 and (max(block_dk, block_dv) <= 128 or limits.has_warpgroups)
    block_n, num_warps, num_stages = _tile(dtype, block_m=block_m, block_d=max(block_dk, block_dv), limits=limits)
    constants = {
        "HEADS_PER_KV": num_query_heads // num_kv_heads,
        "HEAD_DIM_K": head_dim_k,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_DK": block_dk,
        "BLOCK_DV": block_dv,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BOUNDED": bounded,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "HAS_ALIBI": has_alibi,
        "HAS_LSE": has_lse,
        "FIXED": is_fixed,
        "QK_AHEAD": qk_ahead,
        "DESCRIPTORS": descriptors,
        "HALVES": halves,
        "STRIDE_UNIT": stride_unit,
    }
    return Variant(constants, num_warps=num_warps, num_stages=num_stages)


def _tile(dtype: torch.dtype, *, block_m: int, block_d: int, limits: DeviceLimits) -> tuple[int, int, int]:
    """Keys in a tile, warps, and stages: the largest without a spill, and two tiles in flight where they fit.

    As compiled, not timed. Where the registers hold all operands, 64 keys of more than 64 dims spill.
    """
    if dtype == torch.float32 or block_d > 128:
        # 136 KB of float32 or of 16 bits, 64 rows of 16 bits 100 KB: of 99 KB, one tile in flight fits.
        return 32, 8, 2 if block_d > 128 and limits.shared_memory_bytes < 160 << 10 else 3
    narrow = block_d > 64 and not limits.has_warpgroups
    return 32 if narrow else MAX_TILE, 8 if block_m == 128 else 4, 3


def _check(
    q: Layout, k_pool: Layout, v_pool: Layout, *, block_tables: Layout, seq_lens: Layout, cu_seqlens_q: Layout
) -> None:
    require_pool(k_pool, v_pool)
    require_shape("q", q, (None, None, k_pool.shape[3]))
    require_last_contiguous("q", q)
    require_dtype("q", q, FLOAT_DTYPES if k_pool.dtype.itemsize == 1 else k_pool.dtype)
    if q.shape[1] == 0 or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the pool's {k_pool.shape[2]}")
    require_shape("block_tables", block_tables, (None, None))
    num_seqs, max_blocks = block_tables.shape
    require_at_least("block_tables.shape[0]", num_seqs, 1)
    require_at_least("block_tables.shape[1]", max_blocks, 1)
    require_shape("seq_lens", seq_lens, (num_seqs,))
    require_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    for name, tensor in (("seq_lens", seq_lens), ("block_tables", block_tables), ("cu_seqlens_q", cu_seqlens_q)):
        require_dtype(name, tensor, torch.int32)
        require_last_contiguous(name, tensor)
    require_same_device(
        q=q, k_pool=k_pool, v_pool=v_pool, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q
    )


def _check_numbers(
    *, scaling: float, window: int | None, chunk: int | None, softcap: float | None, num_splits: int | None
) -> None:
    for name, number in (("scaling", scaling), ("softcap", softcap)):
        if number is not None and not number > 0:
            raise ValueError(f"{name}={number} is not above 0")
    for name, count in (("window", window), ("chunk", chunk), ("num_splits", num_splits)):
        if count is not None:
            require_at_least(name, count, 1)


def _check_descriptors(k_pool: Layout, v_pool: Layout, *, block_n: int, limits: DeviceLimits) -> None:
    """Raises ValueError where a tile of keys is no box that a tensor descriptor can copy."""
    if limits.capability < LEAST_CAPABILITY:
        raise ValueError(f"descriptors=True needs a GPU of capability {LEAST_CAPABILITY}, not {limits.capability}")
    require_at_least("block size with descriptors=True", k_pool.shape[1], block_n)
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if any(stride * pool.dtype.itemsize % _BOX_ALIGNMENT for stride in pool.strides[:3]):
            raise ValueError(
                f"{name} has strides {list(pool.strides)}, not multiples of {_BOX_ALIGNMENT} bytes: descriptors=True"
            )


def _are_boxes(k_pool: Tensor, v_pool: Tensor) -> bool:
    """True if a tensor descriptor can copy any tile of the pools."""
    try:
        _check_descriptors(*layouts(k_pool, v_pool), block_n=MAX_TILE, limits=device_limits(k_pool.device))
        _require_aligned(k_pool=k_pool, v_pool=v_pool)
    except ValueError:
        return False
    return True


def _require_aligned(**pools: Tensor) -> None:
    for name, pool in pools.items():
        if pool.data_ptr() % _BOX_ALIGNMENT:
            raise ValueError(f"{name} begins at no multiple of {_BOX_ALIGNMENT} bytes: descriptors=True")


def _new_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """The memory in which a launch's programs write their descriptors, for Triton: 256 bytes a program.

    The memory is used on the current stream alone, so torch may give it to a later launch as soon as this one has
    begun. torch aligns to 512 bytes.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _check_results(q: Layout, *, out: Layout, lse: Layout | None, head_dim: int) -> None:
    require_shape("out", out, (*q.shape[:2], head_dim))
    require_dtype("out", out, q.dtype)
    require_last_contiguous("out", out)
    if lse is not None:
        require_shape("lse", lse, q.shape[:2])
        require_dtype("lse", lse, torch.float32)
        require_contiguous("lse", lse)
    require_same_device(q=q, out=out, lse=lse)


@triton.jit
def _load_block_ids(table_ptr, first_key, last_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of the tile at first_key, a scalar if one block has it; the last block past the end."""
    index = first_key // BLOCK_SIZE
    if BLOCK_SIZE < BLOCK_N:
        index += tl.arange(0, BLOCK_N) // BLOCK_SIZE
    return tl.load(table_ptr + tl.minimum(index, last_block))


@triton.jit
def _load_tile(
    pool_ptr, block_ids, offsets, block_stride, slot_stride, mask,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The rows [BLOCK_N, BLOCK_D] at `offsets` of blocks; zeros beyond HEAD_DIM and where MASKED and not mask."""
    dims = tl.arange(0, BLOCK_D)
    rows = block_ids.to(tl.int64) * block_stride + offsets.to(tl.int64) * slot_stride
    pointers = pool_ptr + rows[:, None] + dims[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _load_box(blocks, block_id, start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows [BLOCK_N, BLOCK_D] from slot `start` of one block on, by a descriptor of all blocks of a kv head."""
    return blocks.load([block_id, start % BLOCK_SIZE, 0]).reshape(BLOCK_N, BLOCK_D)


@triton.jit
def _offsets(start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots within their blocks of the tile at `start`."""
    offsets = tl.arange(0, BLOCK_N) % BLOCK_SIZE
    if BLOCK_SIZE >= BLOCK_N:
        offsets += start % BLOCK_SIZE
    return offsets


@triton.jit
def _per_row(scale):
    """A factor of all scores as it is, one for each row as a column."""
    if isinstance(scale, tl.tensor) and len(scale.shape) == 1:
        scale = scale[:, None]
    return scale


@triton.jit
def _attend(
    q, highest, total, acc, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, begin, end, last_block, first_key, positions,
    slopes, score_scale, cap, window, chunk, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    QK_AHEAD: tl.constexpr, WHOLE_BOXES: tl.constexpr,
):  # fmt: skip
    """Take keys begin .. end - 1 into the running softmax, begin a multiple of BLOCK_N.

    With QK_AHEAD the products of the next tile's keys are begun before this tile's weights are computed, so that the
    matrix units work meanwhile; those behind the last tile are dropped. No bit differs. With WHOLE_BOXES tiles are
    copied by the descriptors k_blocks and v_blocks, slots without a key too: not for tiles that are MASKED.
    score_scale is a number, or one for each row. highest [BLOCK_M] is in base 2, total [BLOCK_M] and acc
    [BLOCK_M, BLOCK_DV] are sums of 2 ** (score - highest).
    """
    lanes = tl.arange(0, BLOCK_N)
    next_ids = _load_block_ids(table_ptr, begin, last_block, BLOCK_SIZE, BLOCK_N)
    if QK_AHEAD:
        offsets = _offsets(begin, BLOCK_SIZE, BLOCK_N)
        seen = (begin + lanes >= first_key) & (begin + lanes < end)
        k = _load_tile(k_ptr, next_ids, offsets, k_block_stride, k_slot_stride, seen, HEAD_DIM_K, BLOCK_DK, True)
        next_scores = dot(q, tl.trans(k.to(q.dtype)))
        ahead_ids = _load_block_ids(table_ptr, begin + BLOCK_N, last_block, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        block_ids = next_ids
        next_ids = _load_block_ids(table_ptr, start + BLOCK_N, last_block, BLOCK_SIZE, BLOCK_N)
        offsets = _offsets(start, BLOCK_SIZE, BLOCK_N)
        keys = start + lanes
        seen = (keys >= first_key) & (keys < end)
        if WHOLE_BOXES:
            # Behind products that are begun ahead, the wait for these values would be a wait for the products too.
            v = _load_box(v_blocks, block_ids, start, BLOCK_SIZE, BLOCK_N, BLOCK_DV)
        if QK_AHEAD:
            scores = next_scores
            # Keys have ids of their own: with one carried through two iterations Triton keeps no tile in flight.
            key_ids = ahead_ids
            ahead_ids = _load_block_ids(table_ptr, start + 2 * BLOCK_N, last_block, BLOCK_SIZE, BLOCK_N)
            next_offsets = _offsets(start + BLOCK_N, BLOCK_SIZE, BLOCK_N)
            next_seen = (keys + BLOCK_N >= first_key) & (keys + BLOCK_N < end)
            if WHOLE_BOXES:
                k = _load_box(k_blocks, key_ids, start + BLOCK_N, BLOCK_SIZE, BLOCK_N, BLOCK_DK)
            else:
                k = _load_tile(
                    k_ptr, key_ids, next_offsets, k_block_stride, k_slot_stride, next_seen, HEAD_DIM_K, BLOCK_DK, MASKED
                )  # fmt: skip
            next_scores = dot(q, tl.trans(k.to(q.dtype)))
        else:
            if WHOLE_BOXES:
                k = _load_box(k_blocks, block_ids, start, BLOCK_SIZE, BLOCK_N, BLOCK_DK)
            else:
                k = _load_tile(
                    k_ptr, block_ids, offsets, k_block_stride, k_slot_stride, seen, HEAD_DIM_K, BLOCK_DK, MASKED
                )  # fmt: skip
            scores = dot(q, tl.trans(k.to(q.dtype)))
        if not WHOLE_BOXES:
            v = _load_tile(v_ptr, block_ids, offsets, v_block_stride, v_slot_stride, seen, HEAD_DIM_V, BLOCK_DV, MASKED)
        scale = score_scale
        if HAS_SOFTCAP:
            # tanh in the form that neither overflows nor divides inf by inf.
            scores = cap - 2 * cap / (tl.exp2(scores * _per_row(scale)) + 1)
            scale = 1.0
        if HAS_ALIBI:
            scores = scores * _per_row(scale) + slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
            scale = 1.0
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if BOUNDED:
                visible &= keys[None, :] >= first_visible(positions, window, chunk)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        # The scale is positive, so it can wait for the exponent, where it is half of a multiply-add.
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        shift = new_highest
        if MASKED:
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * _per_row(scale) - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + dot(weights.to(q.dtype), v.to(q.dtype))
        highest = new_highest
    return highest, total, acc


@triton.jit
def _find_sequence(cu_seqlens_q_ptr, num_seqs, tile, HEADS_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence with the last first tile up to `tile`; num_seqs for the pads behind all of them."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        beyond = tl.load(cu_seqlens_q_ptr + middle) * HEADS_PER_KV // BLOCK_M + middle > tile
        low = tl.where(beyond, low, middle)
        high = tl.where(beyond, middle - 1, high)
    return low


@triton.jit(
    do_not_specialize=["window", "chunk", "num_tokens", "num_seqs", "num_blocks", "table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "kv_scales_ptr"],
)
def paged_prefill_kernel(
    q_ptr,  # [N, Hq, Dk]
    k_pool_ptr,  # [B, S, H, Dk]
    v_pool_ptr,  # [B, S, H, Dv]
    outs_ptr,  # [splits, N, Hq, Dv]
    lses_ptr,  # [splits, N, Hq], None if not HAS_LSE
    block_tables_ptr,  # [n, M]
    seq_lens_ptr,  # [n]
    cu_seqlens_q_ptr,  # [n+1]
    sinks_ptr,  # [Hq], None if not HAS_SINKS
    alibi_slopes_ptr,  # [Hq], None if not HAS_ALIBI
    kv_scales_ptr,  # [2, H] or None
    score_scale,  # scaling * log2(e), with a softcap * 2 / softcap
    cap,  # softcap * log2(e)
    window,
    chunk,
    num_tokens,
    num_seqs,
    num_blocks,
    table_stride,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    out_split_stride,
    out_token_stride,
    out_head_stride,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FIXED: tl.constexpr,
    QK_AHEAD: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    HALVES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    q_token_stride, q_head_stride = in_units(q_token_stride, STRIDE_UNIT), in_units(q_head_stride, STRIDE_UNIT)
    k_block_stride, k_slot_stride = in_units(k_block_stride, STRIDE_UNIT), in_units(k_slot_stride, STRIDE_UNIT)
    v_block_stride, v_slot_stride = in_units(v_block_stride, STRIDE_UNIT), in_units(v_slot_stride, STRIDE_UNIT)
    k_head_stride, v_head_stride = in_units(k_head_stride, STRIDE_UNIT), in_units(v_head_stride, STRIDE_UNIT)
    out_split_stride = in_units(out_split_stride, STRIDE_UNIT)
    out_token_stride, out_head_stride = in_units(out_token_stride, STRIDE_UNIT), in_units(out_head_stride, STRIDE_UNIT)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seq = _find_sequence(cu_seqlens_q_ptr, num_seqs, tile, HEADS_PER_KV, BLOCK_M)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    end_token = tl.load(cu_seqlens_q_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
    first_row = (tile - first_token * HEADS_PER_KV // BLOCK_M - seq) * BLOCK_M
    num_rows = (end_token - first_token) * HEADS_PER_KV
    if first_row >= num_rows:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    tokens = (first_token + rows // HEADS_PER_KV).to(tl.int64)
    heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    start = seq_len - (end_token - first_token)
    positions = start + rows // HEADS_PER_KV
    first_position = tl.maximum(start + first_row // HEADS_PER_KV, 0)
    last_position = start + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // HEADS_PER_KV

    # The keys that some row sees, of them this split's share, and of these the ones that every row sees.
    end = tl.maximum(last_position + 1, 0)
    last_block = tl.maximum(last_position, 0) // BLOCK_SIZE
    first_key = 0
    if BOUNDED:
        first_key = first_visible(first_position, window, chunk)
    begin = first_key // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, end)
    full_begin = begin
    if BOUNDED:
        full_begin = tl.cdiv(first_visible(last_position, window, chunk), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end), full_begin)
    if FIXED:
        # Which keys every row sees depends on the other rows of the tile. One loop takes all, so that one code does.
        full_begin = begin
        full_end = begin

    dims = tl.arange(0, BLOCK_DK)
    q = tl.load(
        q_ptr + (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :],
        mask=row_mask[:, None] & (dims < HEAD_DIM_K)[None, :],
        other=0.0,
    )
    scale = score_scale
    if kv_scales_ptr is not None:
        scale *= tl.load(kv_scales_ptr + kv_head)
    if HALVES:
        q, units = halves_of_rows(q)
        scale *= units
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    slopes = total
    if HAS_SINKS:
        counts_sink = (split == 0) & (last_position >= 0)
        highest = tl.where(counts_sink, tl.load(sinks_ptr + heads).to(tl.float32) * _LOG2_E, highest)
        total += tl.where(counts_sink, 1.0, 0.0)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + heads) * _LOG2_E

    k_ptr = k_pool_ptr + kv_head * k_head_stride
    v_ptr = v_pool_ptr + kv_head * v_head_stride
    k_blocks, v_blocks = k_ptr, v_ptr
    if DESCRIPTORS:
        k_blocks = tl.make_tensor_descriptor(
            k_ptr, [num_blocks, BLOCK_SIZE, HEAD_DIM_K], [k_block_stride, k_slot_stride, 1], [1, BLOCK_N, BLOCK_DK]
        )
        v_blocks = tl.make_tensor_descriptor(
            v_ptr, [num_blocks, BLOCK_SIZE, HEAD_DIM_V], [v_block_stride, v_slot_stride, 1], [1, BLOCK_N, BLOCK_DV]
        )
    table_ptr = block_tables_ptr + tl.minimum(seq, num_seqs - 1).to(tl.int64) * table_stride
    if BOUNDED:
        highest, total, acc = _attend(
            q, highest, total, acc, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, begin, full_begin, last_block,
            first_key, positions, slopes, scale, cap, window, chunk,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            HEAD_DIM_K, HEAD_DIM_V, BLOCK_DK, BLOCK_DV, BLOCK_SIZE, BLOCK_N, True, BOUNDED, HAS_SOFTCAP, HAS_ALIBI,
            QK_AHEAD, False,
        )  # fmt: skip
    highest, total, acc = _attend(
        q, highest, total, acc, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, full_begin, full_end, last_block,
        first_key, positions, slopes, scale, cap, window, chunk,
        k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        HEAD_DIM_K, HEAD_DIM_V, BLOCK_DK, BLOCK_DV, BLOCK_SIZE, BLOCK_N, False, BOUNDED, HAS_SOFTCAP, HAS_ALIBI,
        QK_AHEAD, DESCRIPTORS,
    )  # fmt: skip
    highest, total, acc = _attend(
        q, highest, total, acc, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, full_end, end, last_block,
        first_key, positions, slopes, scale, cap, window, chunk,
        k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        HEAD_DIM_K, HEAD_DIM_V, BLOCK_DK, BLOCK_DV, BLOCK_SIZE, BLOCK_N, True, BOUNDED, HAS_SOFTCAP, HAS_ALIBI,
        QK_AHEAD, False,
    )  # fmt: skip

    total = tl.where(total == 0, 1.0, total)
    v_scale = 1.0
    if kv_scales_ptr is not None:
        v_scale = tl.load(kv_scales_ptr + tl.num_programs(1) + kv_head)
    dims = tl.arange(0, BLOCK_DV)
    out_rows = split.to(tl.int64) * out_split_stride + tokens * out_token_stride + heads * out_head_stride
    tl.store(
        outs_ptr + out_rows[:, None] + dims[None, :],
        round_to(acc * (v_scale / total)[:, None], outs_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (dims < HEAD_DIM_V)[None, :],
    )
    if HAS_LSE:
        lse_rows = (split.to(tl.int64) * num_tokens + tokens) * (tl.num_programs(1) * HEADS_PER_KV) + heads
        tl.store(lses_ptr + lse_rows, highest + tl.log2(total), mask=row_mask)
