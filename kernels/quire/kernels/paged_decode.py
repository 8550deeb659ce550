# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Attention of a few queries per sequence over keys and values in blocks, split over all multiprocessors.

Decode attention reads every key and value once and computes little, so what counts is that enough bytes are on their
way to each multiprocessor at all times:

    equal work      each program takes an equal run of keys, made by decode_plan
    read once       the G query heads that share a kv head, times the queries of a sequence, are the rows of one tile
    in flight       the ids of the next tile's blocks are loaded a tile ahead and carried through the loop. With the
                    load of an id in front of the load of its keys Triton keeps one tile in flight, this way several
    no masks        on scores, but in tiles that some query sees a part of; these are in the same loop, so that their
                    keys are on the way early too

Programs that have a sequence to themselves write its result. Others write a partial one and take a ticket; the one
that takes a sequence's last ticket merges its partial results in the order of keys, not in that of tickets, and puts
the tickets back. No program waits for another, and one launch does it all. A kv head and a tile of its rows have
tickets of their own.

Keys of fp8 bring half the bytes, so what is done to each counts twice. They become float16, which takes one instruction
for two (bfloat16 takes eight), and so do queries and weights. Values are loaded as pairs: as a matrix operand a thread
needs neighbours along the keys, which are not neighbours in memory, and only 16-bit elements are transposed on loading.
At the whole bandwidth of an H200 (4.3 TB/s, 132 multiprocessors of 4 schedulers, 1.755 GHz) the loop over keys of 128
dims takes, as compiled for sm_90 and not timed, so many instructions a cycle and scheduler:

    bfloat16 keys, 64 a tile                            0.27
    the same of 64 dims, 64 and 128 a tile              0.46 and 0.28
    fp8 keys as bfloat16, 64 a tile                     1.11    more than there is
    fp8 keys as float16, 64 a tile                      0.88
    and values in pairs, 64 a tile                      0.58    the same with fp8 queries, which sm_90 unpacks too
    and 128 keys a tile                                 0.39    what is here
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.decode_plan import RECORD, RESIDENT, TILE, UNBOUNDED, DecodePlan, PlanLayout, first_visible
from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    FLOAT_DTYPES,
    LOG2_E,
    UPCAST,
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
    num_multiprocessors,
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
from quire.kernels.merge_states import PARTS_AT_ONCE, merge_rows

# By the bytes of a key in registers: keys of a tile and stages, the first choice first.
_BLOCK_N_AND_STAGES: dict[int, tuple[tuple[int, int], ...]] = {
    128: ((64, 4), (64, 3)),
    256: ((64, 3), (32, 3)),
    512: ((32, 3), (16, 3)),
    1024: ((16, 3), (16, 2)),
}
# Tried before those, by the same and by the bytes of an element in memory. A tile has instructions that do not grow
# with its keys, so that keys with few bytes need many a tile.
_LONG_TILES: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (128, 1): ((128, 4), (128, 3)),
    (256, 1): ((128, 3),),
    (128, 2): ((128, 3),),
}
# Shared memory of queries, weights and sums, beside the tiles: 4 to 9 KB as compiled.
_OTHER_SHARED_BYTES = 10 << 10

# Elements of partial results that a program loads at a time: 64 registers of 4 warps. Above 128 dims half of them, as
# more are spilled there.
_MERGED_ELEMENTS = 8192
# Of a multiprocessor.
_SM_REGISTERS = 65_536
# Tokens without keys that are cleared at a time.
CLEARED_TOKENS = 32

_TILE = tl.constexpr(TILE)
_RECORD = tl.constexpr(len(RECORD))
_SPLIT = tl.constexpr(RECORD.index("split"))
_END_SPLIT = tl.constexpr(RECORD.index("end_split"))
_CLEARED_TOKENS = tl.constexpr(CLEARED_TOKENS)
_LOG2_E = tl.constexpr(LOG2_E)


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    plan: DecodePlan,
    scaling: float,
    cu_seqlens_q: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Attention of few queries per sequence over keys and values that lie in blocks.

    Sizes: N query tokens of n sequences, Hq query heads, H kv heads, M blocks per table, B blocks, S block size.
        q               [N, Hq, Dk]             fp32/fp16/bf16, Dk contiguous; query head h reads kv head h // (Hq // H)
        k_pool, v_pool  [B, S, H, Dk], [B, S, H, Dv]    any strides, D contiguous, head dims multiples of 8 up to 256;
                                                dtype of q, or fp8 e4m3
        block_tables    [n, M]                  int32, any stride between rows; entries beyond a sequence's length are
                                                not read
        seq_lens        [n]                     int32, keys of each sequence, its new ones included
        plan            of build_decode_plan() for the same seq_lens and cu_seqlens_q: says what queries see (causal,
                        window, chunk) and how many queries a sequence has at most
        cu_seqlens_q    [n+1]                   int32, as in build_decode_plan(), or None for one query each
        softcap         makes scores softcap * tanh(score / softcap), or None
        sinks           [Hq]                    fp32/fp16/bf16, one more score per head, with no value, or None
        alibi_slopes    [Hq]                    float32, slope * (key position - query position) is added to the
                                                (capped) scores, or None
        kv_scales       [2, H]                  float32, contiguous, factors of an fp8 pool's keys and of its values;
                                                None: 1
        out             [N, Hq, Dv]             where to write, dtype of q, Dv contiguous; new by default
        lse             [N, Hq]                 where to write, float32, contiguous, or None: log2 of the sum of
                                                2 ** (score * log2(e)) over the visible keys and the sink
        workspace       [>= workspace_size()]   float32, contiguous, contents are ignored; new by default
        returns         out

    Rows of sequences without keys and of tokens of no sequence become exactly 0, their lse -inf. Slots that no query
    sees are not read. Raises ValueError if a shape, dtype, stride or device does not fit. Cost: reads visible keys and
    values from memory once; a kv head with more than 64 rows of queries and heads (16 where a key takes more than 256
    bytes) reads them again from the L2 cache. One launch, no sync, no allocation with out and workspace. Equal
    inputs give equal bits; with a plan of fixed_split also whatever else is in the batch. Calls with the same plan
    must not run at the same time: they share its tickets.
    """
    sources = (block_tables, seq_lens, cu_seqlens_q, sinks, alibi_slopes, kv_scales)
    decode = _prepare(*layouts(q, k_pool, v_pool, *sources, out, lse, workspace), plan.layout, softcap)
    if out is None:
        out = q.new_empty(*q.shape[:2], v_pool.shape[3])
    if workspace is None:
        workspace = q.new_empty(decode.workspace_size, dtype=torch.float32)
    window, chunk = plan.layout.window, plan.layout.chunk
    decode.launch.run(
        paged_decode_kernel,
        q, k_pool, v_pool, out, lse, workspace, workspace[decode.num_partials :],
        plan.programs, plan.splits, plan.token_splits, plan.tickets, *sources,
        scaling, 0.0 if softcap is None else softcap,
        UNBOUNDED if window is None else window, UNBOUNDED if chunk is None else chunk,
        plan.layout.num_tokens, plan.layout.max_head_tiles,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Decode:
    """A call of paged_decode as it was checked and chosen.

    The workspace holds partial results [W, Q, Hq, Dv], which are num_partials, and behind them their lses [W, Q, Hq],
    of W splits and at most Q queries of a sequence.
    """

    launch: Launch
    num_partials: int
    workspace_size: int


@prepared_once
def _prepare(
    q: Layout,
    k_pool: Layout,
    v_pool: Layout,
    block_tables: Layout,
    seq_lens: Layout,
    cu_seqlens_q: Layout | None,
    sinks: Layout | None,
    alibi_slopes: Layout | None,
    kv_scales: Layout | None,
    out: Layout | None,
    lse: Layout | None,
    workspace: Layout | None,
    plan: PlanLayout,
    softcap: float | None,
) -> _Decode:
    _check(q, k_pool, v_pool, block_tables=block_tables, seq_lens=seq_lens, plan=plan, cu_seqlens_q=cu_seqlens_q)
    num_heads, num_kv_heads = q.shape[1], k_pool.shape[2]
    head_dim_k, head_dim_v = q.shape[2], v_pool.shape[3]
    out = out or contiguous((*q.shape[:2], head_dim_v), q)
    size = _workspace_size(plan, num_query_heads=num_heads, head_dim=head_dim_v)
    _check_results(q, out=out, lse=lse, workspace=workspace, head_dim=head_dim_v, workspace_size=size)
    require_per_head(q, sinks=sinks, alibi_slopes=alibi_slopes)
    require_kv_scales(kv_scales, k_pool)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} is not above 0")
    variant = decode_variant(
        dtype=q.dtype,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        block_size=k_pool.shape[1],
        kv_itemsize=k_pool.dtype.itemsize,
        max_q_len=plan.max_q_len,
        ragged=cu_seqlens_q is not None,
        causal=plan.causal,
        bounded=plan.window is not None or plan.chunk is not None,
        has_softcap=softcap is not None,
        has_sinks=sinks is not None,
        has_alibi=alibi_slopes is not None,
        has_lse=lse is not None,
        stride_unit=stride_unit(q, k_pool, v_pool, out),
        limits=device_limits(q.device),
    )
    row_tiles = ceil_div(num_heads // num_kv_heads * plan.max_q_len, variant.constants["BLOCK_M"])
    if num_kv_heads * row_tiles > plan.max_head_tiles:
        raise ValueError(f"{num_kv_heads * row_tiles} head tiles, but plan was made for {plan.max_head_tiles}")
    return _Decode(
        launch=Launch(
            grid=(plan.num_programs, num_kv_heads, row_tiles),
            strides=(
                block_tables.stride(0), *q.strides[:2], *k_pool.strides[:3], *v_pool.strides[:3], *out.strides[:2],
            ),
            # Else ptxas may make room for three programs by spilling while it merges.
            options={
                **variant.options,
                **dependent_options(paged_decode_kernel, q.device),
                "maxnreg": min(255, _SM_REGISTERS // (RESIDENT * 32 * variant.num_warps)),
            },
        ),
        num_partials=plan.max_splits * plan.max_q_len * num_heads * head_dim_v,
        workspace_size=size,
    )  # fmt: skip


def num_decode_programs(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_itemsize: int,
    max_q_len: int = 1,
    device: torch.device,
) -> int:
    """Programs per kv head that fill the device once: the num_programs of build_decode_plan(). No sync.

    head_dim is the greater one of keys and values, kv_itemsize the bytes of an element of the pool.
    """
    tiles = num_head_tiles(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_itemsize=kv_itemsize,
        max_q_len=max_q_len,
    )
    return max(1, num_multiprocessors(device) * RESIDENT // tiles)


def num_head_tiles(
    *, num_query_heads: int, num_kv_heads: int, head_dim: int, kv_itemsize: int, max_q_len: int = 1
) -> int:
    """Kv heads times tiles of a kv head's rows: the max_head_tiles of build_decode_plan(). See num_decode_programs."""
    rows = num_query_heads // num_kv_heads * max_q_len
    return num_kv_heads * ceil_div(rows, _block_m(rows, _row_bytes(head_dim, kv_itemsize)))


def workspace_size(plan: DecodePlan, *, num_query_heads: int, head_dim: int) -> int:
    """Elements, float32, that paged_decode() needs for partial results; head_dim is that of the values."""
    return _workspace_size(plan.layout, num_query_heads=num_query_heads, head_dim=head_dim)


def _workspace_size(plan: PlanLayout, *, num_query_heads: int, head_dim: int) -> int:
    return plan.max_splits * plan.max_q_len * num_query_heads * (head_dim + 1)


def decode_variant(
    *,
    dtype: torch.dtype,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    block_size: int,
    kv_itemsize: int,
    max_q_len: int,
    ragged: bool,
    causal: bool,
    bounded: bool,
    has_softcap: bool,
    has_sinks: bool,
    has_alibi: bool,
    has_lse: bool,
    stride_unit: int,
    limits: DeviceLimits,
) -> Variant:
    """A specialization of paged_decode_kernel: dtype is that of q, bounded says that window or chunk hides keys."""
    heads_per_kv = num_query_heads // num_kv_heads
    head_dim = max(head_dim_k, head_dim_v)
    row_bytes = _row_bytes(head_dim, max(kv_itemsize, dtype.itemsize))
    block_m = _block_m(heads_per_kv * max_q_len, row_bytes)
    block_n, num_stages = _block_n_and_stages(
        row_bytes,
        kv_itemsize=kv_itemsize,
        shared_row_bytes=next_power_of_2(head_dim) * kv_itemsize,
        long_tiles=dtype.itemsize == 2 and block_m == 16 and not (kv_itemsize == 1 and has_alibi),
        limits=limits,
    )
    constants = {
        "HEADS_PER_KV": heads_per_kv,
        "HEAD_DIM_K": head_dim_k,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_DK": max(16, next_power_of_2(head_dim_k)),
        "BLOCK_DV": max(16 if kv_itemsize > 1 else 32, next_power_of_2(head_dim_v)),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "MERGED_ROWS": _merged_rows(heads_per_kv * max_q_len, head_dim_v),
        "MAX_Q_LEN": max_q_len,
        "RAGGED": ragged,
        "CAUSAL": causal,
        "BOUNDED": bounded,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "HAS_ALIBI": has_alibi,
        "HAS_LSE": has_lse,
        "STRIDE_UNIT": stride_unit,
    }
    return Variant(constants, num_warps=4 if row_bytes <= 512 else 8, num_stages=num_stages)


def _row_bytes(head_dim: int, kv_itemsize: int) -> int:
    """The bytes of a key or value in registers, where fp8 is widened."""
    return next_power_of_2(head_dim) * max(kv_itemsize, 2)


def _block_m(rows: int, row_bytes: int) -> int:
    """Rows of a tile: a kv head's query heads times queries, or the most that fit the registers of 4 warps."""
    return min(64 if row_bytes <= 256 else 16, max(16, next_power_of_2(rows)))


def _merged_rows(rows: int, head_dim: int) -> int:
    """Rows that are merged at a time: a power of two that divides those of a tile, which are at least 16."""
    elements = _MERGED_ELEMENTS if head_dim <= 128 else _MERGED_ELEMENTS // 2
    return min(16, next_power_of_2(rows), max(1, elements // (PARTS_AT_ONCE * next_power_of_2(head_dim))))


def _block_n_and_stages(
    row_bytes: int, *, kv_itemsize: int, shared_row_bytes: int, long_tiles: bool, limits: DeviceLimits
) -> tuple[int, int]:
    """Keys of a tile, and stages: one fewer tiles of keys and of values are on the way.

    The most that leave room for RESIDENT programs in shared memory: where that is 99 KB, tiles of half the size.
    long_tiles: those of _LONG_TILES too. With more than 16 rows of queries, or with ALiBi over fp8, they spill or take
    nearly all registers.
    """
    size = max(128, row_bytes)
    choices = (*(_LONG_TILES.get((size, kv_itemsize), ()) if long_tiles else ()), *_BLOCK_N_AND_STAGES[size])
    for block_n, num_stages in choices:
        tiles_bytes = 2 * (num_stages - 1) * block_n * shared_row_bytes
        if tiles_bytes + _OTHER_SHARED_BYTES <= limits.shared_memory_of_two:
            break
    return block_n, num_stages


def _check(
    q: Layout,
    k_pool: Layout,
    v_pool: Layout,
    *,
    block_tables: Layout,
    seq_lens: Layout,
    plan: PlanLayout,
    cu_seqlens_q: Layout | None,
) -> None:
    require_pool(k_pool, v_pool)
    require_shape("q", q, (plan.num_tokens, None, k_pool.shape[3]))
    require_at_least("q.shape[0]", q.shape[0], 1)
    require_last_contiguous("q", q)
    require_dtype("q", q, FLOAT_DTYPES if k_pool.dtype.itemsize == 1 else k_pool.dtype)
    if q.shape[1] == 0 or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the pool's {k_pool.shape[2]}")
    num_seqs = plan.num_seqs
    require_shape("seq_lens", seq_lens, (num_seqs,))
    require_shape("block_tables", block_tables, (num_seqs, None))
    if cu_seqlens_q is not None:
        require_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    elif q.shape[0] != num_seqs:
        raise ValueError(f"q has {q.shape[0]} tokens for {num_seqs} sequences, but cu_seqlens_q is None")
    for name, tensor in (("seq_lens", seq_lens), ("block_tables", block_tables), ("cu_seqlens_q", cu_seqlens_q)):
        if tensor is not None:
            require_dtype(name, tensor, torch.int32)
            require_last_contiguous(name, tensor)
    require_same_device(
        q=q, k_pool=k_pool, v_pool=v_pool, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
        plan=plan,
    )  # fmt: skip


def _check_results(
    q: Layout, *, out: Layout, lse: Layout | None, workspace: Layout | None, head_dim: int, workspace_size: int
) -> None:
    require_shape("out", out, (*q.shape[:2], head_dim))
    require_dtype("out", out, q.dtype)
    require_last_contiguous("out", out)
    if lse is not None:
        require_shape("lse", lse, q.shape[:2])
        require_dtype("lse", lse, torch.float32)
        require_contiguous("lse", lse)
    if workspace is not None:
        require_shape("workspace", workspace, (None,))
        require_dtype("workspace", workspace, torch.float32)
        require_contiguous("workspace", workspace)
        require_at_least("len(workspace)", workspace.shape[0], workspace_size)
    require_same_device(q=q, out=out, lse=lse, workspace=workspace)


@triton.jit
def _load_record(record_ptr):
    """The split that a record describes: its sequence, keys, the sequence's first split, and the number of them."""
    seq, begin, end = tl.load(record_ptr), tl.load(record_ptr + 1), tl.load(record_ptr + 2)
    return seq, begin, end, tl.load(record_ptr + 4), tl.load(record_ptr + 5)


@triton.jit
def _store_result(
    out_ptr, lse_ptr, result, lse, tokens, heads, owned, num_heads, out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    targets = out_ptr + (tokens * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
    stored = owned[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(targets, round_to(result, out_ptr.dtype.element_ty), mask=stored)
    if HAS_LSE:
        tl.store(lse_ptr + tokens * num_heads + heads, lse, mask=owned)


@triton.jit
def _merge_splits(
    out_ptr, lse_ptr, partial_outs_ptr, partial_lses_ptr, first_split, num_splits, first_token, q_len,
    kv_head, num_heads, out_token_stride, out_head_stride,
    HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MAX_Q_LEN: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Merge all splits of a sequence, in their order, into the rows of out that belong to this program's tile."""
    split_stride = MAX_Q_LEN * num_heads
    first_partial = first_split.to(tl.int64) * split_stride
    begin = tl.program_id(2) * BLOCK_M
    for first_row in range(begin, tl.minimum(begin + BLOCK_M, q_len * HEADS_PER_KV), MERGED_ROWS):
        rows = first_row + tl.arange(0, MERGED_ROWS)
        queries = rows // HEADS_PER_KV
        heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
        owned = queries < q_len
        partial_rows = queries * num_heads + heads
        result, lse = merge_rows(
            partial_outs_ptr + first_partial * HEAD_DIM, partial_lses_ptr + first_partial, partial_rows * HEAD_DIM,
            partial_rows, owned, num_splits, split_stride * HEAD_DIM, split_stride, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        _store_result(
            out_ptr, lse_ptr, result, lse, (first_token + queries).to(tl.int64), heads, owned, num_heads,
            out_token_stride, out_head_stride, HEAD_DIM, BLOCK_D, HAS_LSE,
        )  # fmt: skip


@triton.jit
def _clear_tokens(
    out_ptr, lse_ptr, token_splits_ptr, base, num_tokens, kv_head, num_heads, out_token_stride, out_head_stride,
    HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Make the rows of a kv head 0, and their lses -inf, for those of the tokens from `base` on that see no key."""
    tokens = base + tl.arange(0, _CLEARED_TOKENS)
    empty = (tokens < num_tokens) & (tl.load(token_splits_ptr + tokens, mask=tokens < num_tokens, other=1) == 0)
    if tl.max(empty.to(tl.int32), 0) > 0:
        nothing = tl.zeros([_CLEARED_TOKENS, BLOCK_D], tl.float32)
        minus_inf = tl.full([_CLEARED_TOKENS], float("-inf"), tl.float32)
        for head in range(kv_head * HEADS_PER_KV, (kv_head + 1) * HEADS_PER_KV):
            _store_result(
                out_ptr, lse_ptr, nothing, minus_inf, tokens.to(tl.int64), head, empty, num_heads,
                out_token_stride, out_head_stride, HEAD_DIM, BLOCK_D, HAS_LSE,
            )  # fmt: skip


@triton.jit
def _load_block_ids(table_ptr, first_key, last_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of the tile at first_key, a scalar if one block has it; the last block past the end."""
    one_block: tl.constexpr = BLOCK_SIZE >= BLOCK_N and BLOCK_N <= _TILE  # a split begins at any multiple of _TILE
    keys = first_key if one_block else first_key + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + tl.minimum(keys // BLOCK_SIZE, last_block))


@triton.jit
def _load_tile(
    pool_ptr, block_ids, offsets, block_stride, slot_stride, present, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The rows [BLOCK_N, BLOCK_D] at `offsets` of blocks; zeros where not present and beyond HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    # As many elements as a pool has do not fit int32.
    starts = block_ids.to(tl.int64) * block_stride + offsets * slot_stride
    mask = present[:, None]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(pool_ptr + starts[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _unpack_pairs(pairs):
    """The first and the second fp8 number of each int16, in float16."""
    if UPCAST:  # the interpreter runs no assembly
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # 3 instructions for 4 numbers: both first ones beside one another, both second ones, and two conversions.
        first, second = tl.inline_asm_elementwise(
            """{
                .reg .b32 sorted;
                .reg .b16 firsts, seconds;
                prmt.b32 sorted, $2, 0, 0x3120;
                mov.b32 {firsts, seconds}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, firsts;
                cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def _score(products, scales, softcap, slopes, distances, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Scores times log2(e) from q . k times scales [M]; distances [M, N] are key - query positions."""
    if HAS_SOFTCAP:
        # tanh in the form that neither overflows nor divides inf by inf.
        scores = softcap * _LOG2_E * (1 - 2 / (tl.exp2(products * (scales * (2 * _LOG2_E / softcap))[:, None]) + 1))
    else:
        scores = products * (scales * _LOG2_E)[:, None]
    if HAS_ALIBI:
        scores += (slopes * _LOG2_E)[:, None] * distances.to(tl.float32)
    return scores


@triton.jit(
    do_not_specialize=["table_stride", "window", "chunk", "num_tokens", "max_head_tiles"],
    do_not_specialize_on_alignment=[
        "programs_ptr", "splits_ptr", "token_splits_ptr", "tickets_ptr", "block_tables_ptr", "seq_lens_ptr",
        "cu_seqlens_q_ptr", "sinks_ptr", "alibi_slopes_ptr", "kv_scales_ptr", "lse_ptr",
        "partial_lses_ptr",
    ],
)  # fmt: skip
def paged_decode_kernel(
    q_ptr,  # [N, Hq, Dk]
    k_ptr,  # [B, S, H, Dk]
    v_ptr,  # [B, S, H, Dv]
    out_ptr,  # [N, Hq, Dv]
    lse_ptr,  # [N, Hq], None if not HAS_LSE
    partial_outs_ptr,  # [W, Q, Hq, Dv]
    partial_lses_ptr,  # [W, Q, Hq]
    programs_ptr,  # [P, 8]
    splits_ptr,  # [W, 8]
    token_splits_ptr,  # [N]
    tickets_ptr,  # [n, T]
    block_tables_ptr,  # [n, M]
    seq_lens_ptr,  # [n]
    cu_seqlens_q_ptr,  # [n+1], None if not RAGGED
    sinks_ptr,  # [Hq], None if not HAS_SINKS
    alibi_slopes_ptr,  # [Hq], None if not HAS_ALIBI
    kv_scales_ptr,  # [2, H] or None
    scale,  # of scores
    softcap,
    window,
    chunk,
    num_tokens,
    max_head_tiles,  # T
    table_stride,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
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
    MERGED_ROWS: tl.constexpr,
    MAX_Q_LEN: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_LSE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    q_token_stride, q_head_stride = in_units(q_token_stride, STRIDE_UNIT), in_units(q_head_stride, STRIDE_UNIT)
    k_block_stride, k_slot_stride = in_units(k_block_stride, STRIDE_UNIT), in_units(k_slot_stride, STRIDE_UNIT)
    v_block_stride, v_slot_stride = in_units(v_block_stride, STRIDE_UNIT), in_units(v_slot_stride, STRIDE_UNIT)
    k_head_stride, v_head_stride = in_units(k_head_stride, STRIDE_UNIT), in_units(v_head_stride, STRIDE_UNIT)
    out_token_stride, out_head_stride = in_units(out_token_stride, STRIDE_UNIT), in_units(out_head_stride, STRIDE_UNIT)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * HEADS_PER_KV
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = rows // HEADS_PER_KV
    heads = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    dims_k = tl.arange(0, BLOCK_DK)
    dims_v = tl.arange(0, BLOCK_DV)
    lanes = tl.arange(0, BLOCK_N)
    k_ptr += kv_head.to(tl.int64) * k_head_stride
    v_ptr += kv_head.to(tl.int64) * v_head_stride
    halves: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv and q_ptr.dtype.element_ty != tl.float32
    pairs: tl.constexpr = halves and STRIDE_UNIT > 1
    v_pairs_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    v_scale = 1.0
    if kv_scales_ptr is not None:
        scale *= tl.load(kv_scales_ptr + kv_head)
        v_scale = tl.load(kv_scales_ptr + tl.num_programs(1) + kv_head)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + heads)

    tickets_ptr += kv_head * tl.num_programs(2) + tl.program_id(2)
    record_ptr = programs_ptr + _RECORD * program
    seq, begin, end, first_split, num_splits = _load_record(record_ptr)
    end_split = tl.load(record_ptr + _END_SPLIT)
    for split in range(tl.load(record_ptr + _SPLIT), end_split):
        next_record_ptr = splits_ptr + _RECORD * tl.minimum(split + 1, end_split - 1)
        next_seq, next_begin, next_end, next_first_split, next_num_splits = _load_record(next_record_ptr)
        begin = in_units(begin, _TILE)
        seq_len = tl.load(seq_lens_ptr + seq)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        last_block = (end - 1) // BLOCK_SIZE
        block_ids = _load_block_ids(table_ptr, begin, last_block, BLOCK_SIZE, BLOCK_N)
        first_token = seq
        q_len = 1
        if RAGGED:
            first_token = tl.load(cu_seqlens_q_ptr + seq)
            q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
        tokens = (first_token + queries).to(tl.int64)
        owned = queries < q_len

        q = tl.load(
            q_ptr + (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims_k[None, :],
            mask=owned[:, None] & (dims_k < HEAD_DIM_K)[None, :],
            other=0.0,
        )
        scales = tl.zeros([BLOCK_M], tl.float32) + scale
        if halves:
            q, units = halves_of_rows(q)
            scales = scale * units
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight_sum = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_DV // 2 if pairs else BLOCK_DV], tl.float32)
        seconds_total = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        if HAS_SINKS:
            highest = tl.where(split == first_split, tl.load(sinks_ptr + heads).to(tl.float32) * _LOG2_E, highest)
            weight_sum = tl.where(split == first_split, 1.0, weight_sum)

        positions = seq_len - q_len + queries
        first_keys = tl.zeros_like(positions)
        last_keys = positions if CAUSAL else tl.zeros_like(positions) + seq_len - 1
        # Keys least .. end - 1 are seen by some query, keys shared_begin .. shared_end - 1 by all.
        least = 0
        shared_begin = 0
        shared_end = tl.minimum(seq_len - q_len + 1 if CAUSAL else seq_len, end)
        if BOUNDED:
            first_keys = first_visible(positions, window, chunk)
            least = first_visible(seq_len - q_len, window, chunk)
            shared_begin = first_visible(seq_len - 1, window, chunk)

        for first_key in tl.range(begin, end, BLOCK_N):
            keys = first_key + lanes
            offsets = keys % BLOCK_SIZE
            ids = block_ids
            block_ids = _load_block_ids(table_ptr, first_key + BLOCK_N, last_block, BLOCK_SIZE, BLOCK_N)
            # A slot that no query sees may hold NaN, and 0 * NaN is NaN.
            present = (keys >= least) & (keys < end)
            k = _load_tile(k_ptr, ids, offsets, k_block_stride, k_slot_stride, present, HEAD_DIM_K, BLOCK_DK)
            if pairs:
                v = _load_tile(
                    v_pairs_ptr, ids, offsets, v_block_stride // 2, v_slot_stride // 2, present,
                    HEAD_DIM_V // 2, BLOCK_DV // 2,
                )  # fmt: skip
            else:
                v = _load_tile(v_ptr, ids, offsets, v_block_stride, v_slot_stride, present, HEAD_DIM_V, BLOCK_DV)
            products = dot(q, tl.trans(k.to(q.dtype)))
            distances = keys[None, :] - positions[:, None]
            scores = _score(products, scales, softcap, slopes, distances, HAS_SOFTCAP, HAS_ALIBI)
            if (first_key < shared_begin) | (first_key + BLOCK_N > shared_end):
                visible = (keys[None, :] >= first_keys[:, None]) & (keys[None, :] <= last_keys[:, None])
                scores = tl.where(visible & (keys < end)[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(highest - shift)
            weight_sum = weight_sum * decay + tl.sum(weights, 1)
            if pairs:
                firsts, seconds = _unpack_pairs(v)
                total = total * decay[:, None] + dot(weights.to(tl.float16), firsts)
                seconds_total = seconds_total * decay[:, None] + dot(weights.to(tl.float16), seconds)
            else:
                total = total * decay[:, None] + dot(weights.to(q.dtype), v.to(q.dtype))
            highest = new_highest

        if pairs:
            total = tl.interleave(total, seconds_total)
        divisor = tl.where(weight_sum > 0, weight_sum, 1.0)
        result = total * (v_scale / divisor)[:, None]
        lse = highest + tl.log2(divisor)
        if num_splits == 1:
            _store_result(
                out_ptr, lse_ptr, result, lse, tokens, heads, owned, num_heads, out_token_stride, out_head_stride,
                HEAD_DIM_V, BLOCK_DV, HAS_LSE,
            )  # fmt: skip
        else:
            stored = owned[:, None] & (dims_v < HEAD_DIM_V)[None, :]
            partial_rows = (tl.cast(split, tl.int64) * MAX_Q_LEN + queries) * num_heads + heads
            tl.store(partial_outs_ptr + partial_rows[:, None] * HEAD_DIM_V + dims_v[None, :], result, mask=stored)
            tl.store(partial_lses_ptr + partial_rows, lse, mask=owned)
            tl.debug_barrier()  # all threads have stored their part before one of them takes the ticket
            ticket_ptr = tickets_ptr + seq * max_head_tiles
            if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == num_splits - 1:
                tl.store(ticket_ptr, 0)
                _merge_splits(
                    out_ptr, lse_ptr, partial_outs_ptr, partial_lses_ptr, first_split, num_splits, first_token, q_len,
                    kv_head, num_heads, out_token_stride, out_head_stride, HEADS_PER_KV, HEAD_DIM_V, BLOCK_DV,
                    BLOCK_M, MERGED_ROWS, MAX_Q_LEN, HAS_LSE,
                )  # fmt: skip
        seq, begin, end, first_split, num_splits = next_seq, next_begin, next_end, next_first_split, next_num_splits

    # Those with the fewest splits first: with few keys they have none.
    if tl.program_id(2) == 0:
        first_cleared = (tl.num_programs(0) - 1 - program) * _CLEARED_TOKENS
        for base in range(first_cleared, num_tokens, tl.num_programs(0) * _CLEARED_TOKENS):
            _clear_tokens(
                out_ptr, lse_ptr, token_splits_ptr, base, num_tokens, kv_head, num_heads,
                out_token_stride, out_head_stride, HEADS_PER_KV, HEAD_DIM_V, BLOCK_DV, HAS_LSE,
            )  # fmt: skip
