# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The work list of a step's decode attention, built on the device from the lengths alone.

The keys that a sequence's queries see, in tiles of TILE tokens, are laid end to end for all sequences. Each program of
the attention kernel takes an equal run of that row of tiles, so that long and short sequences load all of them alike;
where a run crosses from one sequence to the next, or ends inside one, the keys are split:

    tiles       |aaaaaaaaaaaa|bbb|ccccc|        20 tiles, 4 programs
    programs    |00000|11111|22222|33333|       5 tiles each
    splits      |aaaaa|aaaaa|aa|bbb|ccccc|      program 2 has two of them

A program with many short sequences takes longer than one with as many tiles of one sequence: each begins anew with its
queries and first keys, and ends with a result. `sequence_cost` adds tiles without keys in front of each sequence, so
that such a program has fewer of them.

All that a program needs before it can ask for its first keys' blocks is one record of 32 bytes, so that two loads that
wait for each other are in front of these keys: the record, and the block table.

Lengths never reach the host, and one launch serves all layers with the same mask. The equal runs are those of HPC-Ops'
and of stream-K schedules, found here without sorting or locks: where a sequence's tiles begin in the row says which
splits it has, so each sequence writes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    BLOCK_SIZES,
    ceil_div,
    require_at_least,
    require_dtype,
    require_in,
    require_last_contiguous,
    require_same_device,
    require_shape,
)

# A multiple of the tiles of the attention kernel, so that a plan serves layers of any head dim; where its tile has 128
# keys, the last tile of a split may be half empty.
TILE = 64

# Programs that run on a multiprocessor at a time. Two of any variant of 16-bit or fp8 keys fit. On an H200, with 64
# bytes or more per key and head, they have at least 48 KB on the way, where 29 KB cover the latency of its memory.
RESIDENT = 2

# Keys: a program with fewer is not worth starting; and while there are fewer programs than multiprocessors.
MIN_SPLIT = 128
MIN_SPREAD = 64

# Keys that a sequence counts beside its own. 0 until it is measured.
SEQUENCE_COST = 0

# The columns of a record of 32 bytes. The split that it describes: its sequence, the first key, one past the last key,
# and its number. All of the sequence's: the number of the first, and how many. And one past a program's last split.
RECORD = ("seq", "begin", "end", "split", "first_split", "num_splits", "end_split", "unused")

# Head tiles of a plan by default: kv heads times tiles of a kv head's rows, of any model's decode steps.
MAX_HEAD_TILES = 128

# A window or chunk that hides nothing, and that an int32 position can be reduced by.
UNBOUNDED = 2**30

_TILE = tl.constexpr(TILE)
_LANES = tl.constexpr(128)
_RESIDENT = tl.constexpr(RESIDENT)
_RECORD = tl.constexpr(len(RECORD))
_SPLIT = tl.constexpr(RECORD.index("split"))
_END_SPLIT = tl.constexpr(RECORD.index("end_split"))
_INT64 = ("positions", "slot_mapping")


class PlanLayout(NamedTuple):
    """A plan without its memory: its sizes, and the inputs that it was built for. See DecodePlan."""

    num_seqs: int
    num_tokens: int
    num_programs: int
    max_splits: int
    max_q_len: int
    max_head_tiles: int
    window: int | None
    chunk: int | None
    causal: bool
    device: torch.device


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The keys that each program attends to, and the slots of the step's tokens.

    Sizes: n sequences, N query tokens, P programs per kv head, W the most splits there can be, T max_head_tiles.
        programs        [P, 8]      int32, a RECORD of each program's first split; split == end_split if it has none,
                                    and then the other columns hold anything
        splits          [W, 8]      int32, a RECORD of each split in the order of sequences and keys, without end_split
        token_splits    [N]         int32, the number of splits of each token's sequence, 0 for a pad
        tickets         [n, T]      int32, 0 but while attention runs: the splits of a sequence that are done, by head
                                    tile. Attention leaves zeros for the next layer
        positions       [N]         int64, 0 for a pad
        slot_mapping    [N]         int64, -1 for a pad
    The layout has these sizes, and max_q_len, window, chunk and causal as they were given. A first key is a multiple
    of TILE, so up to TILE - 1 keys before the first visible one belong to a split. Splits of no program hold anything.
    """

    programs: Tensor
    splits: Tensor
    token_splits: Tensor
    tickets: Tensor
    positions: Tensor
    slot_mapping: Tensor
    layout: PlanLayout

    @property
    def num_programs(self) -> int:
        return self.layout.num_programs

    @property
    def max_splits(self) -> int:
        return self.layout.max_splits


def build_decode_plan(
    seq_lens: Tensor,
    *,
    block_tables: Tensor,
    block_size: int,
    num_programs: int,
    cu_seqlens_q: Tensor | None = None,
    num_tokens: int | None = None,
    max_q_len: int = 1,
    max_head_tiles: int = MAX_HEAD_TILES,
    window: int | None = None,
    chunk: int | None = None,
    causal: bool = True,
    min_split: int = MIN_SPLIT,
    min_spread: int = MIN_SPREAD,
    sequence_cost: int | None = None,
    fixed_split: int | None = None,
    out: DecodePlan | None = None,
) -> DecodePlan:
    """Divide the visible keys of n sequences over programs, and list the position of each query token.

    Sizes: n sequences, N query tokens, M blocks per table.
        seq_lens        [n]     int32, keys of each sequence, its new ones included; 0 for a sequence that is a pad
        block_tables    [n, M]  int32, any stride between rows; entries beyond a sequence's length are not read
        cu_seqlens_q    [n+1]   int32; sequence i has queries cu[i] .. cu[i+1] - 1, its last tokens; tokens from cu[n]
                                on are pads. None for one query each
        num_tokens      N, needed with cu_seqlens_q; num_programs P, from paged_decode.num_decode_programs()
        max_head_tiles  T, the most kv heads times tiles of rows of a layer that uses the plan; from
                        paged_decode.num_head_tiles() where they may be more
        window, chunk, causal   which keys a query sees, as in paged_attention of the reference; without causal a
                                query sees all keys of its sequence
        min_split       keys, a program with fewer is not worth starting; rounded up to TILE
        min_spread      the same while the programs are fewer than P / RESIDENT, so that some multiprocessors have none
        sequence_cost   keys that a sequence counts beside its own, rounded up to TILE, where a program's run is longer
                        than that; SEQUENCE_COST by default, and nothing with fixed_split
        fixed_split     keys, rounded up to TILE: every sequence is split at multiples of it from its first visible
                        tile, so that its result does not depend on the rest of the batch; None for equal runs
        out             a plan to write again, made by a call with the same arguments but for the tensors' contents:
                        for a captured graph

    There are at most n + P - 1 splits, with fixed_split at most n * ceil(M * block_size / fixed_split). Raises
    ValueError if a shape, dtype, device or number does not fit. Cost: one launch of n programs, each of which reads
    all lengths twice; no sync, no allocation with `out`.
    """
    num_seqs = seq_lens.shape[0]
    if cu_seqlens_q is None:
        num_tokens = num_seqs
    elif num_tokens is None:
        raise ValueError("num_tokens is None: it must be given with cu_seqlens_q")
    _check_tensors(seq_lens, block_tables, cu_seqlens_q)
    _check_visibility(window=window, chunk=chunk, causal=causal)
    require_in("block_size", block_size, BLOCK_SIZES)
    for name, value in {
        "num_programs": num_programs,
        "min_split": min_split,
        "min_spread": min_spread,
        "max_q_len": max_q_len,
        "max_head_tiles": max_head_tiles,
    }.items():
        require_at_least(name, value, 1)
    sequence_cost = SEQUENCE_COST if sequence_cost is None else sequence_cost
    require_at_least("num_tokens", num_tokens, 0)
    require_at_least("sequence_cost", sequence_cost, 0)
    max_splits = num_seqs + num_programs - 1
    run = ceil_div(min_split, TILE)
    if fixed_split is not None:
        require_at_least("fixed_split", fixed_split, 1)
        run = ceil_div(fixed_split, TILE)
        max_splits = num_seqs * ceil_div(block_tables.shape[1] * block_size, run * TILE)
    layout = PlanLayout(
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        num_programs=num_programs,
        max_splits=max_splits,
        max_q_len=max_q_len,
        max_head_tiles=max_head_tiles,
        window=window,
        chunk=chunk,
        causal=causal,
        device=seq_lens.device,
    )
    plan = _empty_plan(layout) if out is None else _reusable(out, layout)
    decode_plan_kernel[(num_seqs,)](
        seq_lens, cu_seqlens_q, block_tables,
        plan.programs, plan.splits, plan.token_splits, plan.tickets, plan.positions, plan.slot_mapping,
        num_seqs, num_tokens, num_programs, max_head_tiles, run, ceil_div(min_spread, TILE),
        ceil_div(sequence_cost, TILE), block_tables.stride(0),
        UNBOUNDED if window is None else window, UNBOUNDED if chunk is None else chunk,
        BLOCK_SIZE=block_size, FIXED=fixed_split is not None, RAGGED=cu_seqlens_q is not None,
        **dependent_options(decode_plan_kernel, seq_lens.device), num_warps=4,
    )  # fmt: skip
    return plan


def _shapes(layout: PlanLayout) -> dict[str, tuple[int, ...]]:
    return {
        "programs": (layout.num_programs, len(RECORD)),
        "splits": (layout.max_splits, len(RECORD)),
        "token_splits": (layout.num_tokens,),
        "tickets": (layout.num_seqs, layout.max_head_tiles),
        "positions": (layout.num_tokens,),
        "slot_mapping": (layout.num_tokens,),
    }


def _empty_plan(layout: PlanLayout) -> DecodePlan:
    tensors = {
        name: torch.empty(shape, dtype=torch.int64 if name in _INT64 else torch.int32, device=layout.device)
        for name, shape in _shapes(layout).items()
    }
    return DecodePlan(**tensors, layout=layout)


def _reusable(plan: DecodePlan, layout: PlanLayout) -> DecodePlan:
    for name, shape in _shapes(layout).items():
        require_shape(f"out.{name}", getattr(plan, name), shape)
    for name, made_for, value in zip(PlanLayout._fields, plan.layout, layout, strict=True):
        if made_for != value:
            raise ValueError(f"{name}={value}, but out was made for {made_for}")
    return plan


def _check_tensors(seq_lens: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor | None) -> None:
    require_shape("seq_lens", seq_lens, (None,))
    require_at_least("len(seq_lens)", seq_lens.shape[0], 1)
    require_shape("block_tables", block_tables, (seq_lens.shape[0], None))
    if cu_seqlens_q is not None:
        require_shape("cu_seqlens_q", cu_seqlens_q, (seq_lens.shape[0] + 1,))
    named = {"seq_lens": seq_lens, "block_tables": block_tables, "cu_seqlens_q": cu_seqlens_q}
    for name, tensor in named.items():
        if tensor is not None:
            require_dtype(name, tensor, torch.int32)
            require_last_contiguous(name, tensor)
    require_same_device(**named)


def _check_visibility(*, window: int | None, chunk: int | None, causal: bool) -> None:
    for name, value in (("window", window), ("chunk", chunk)):
        if value is None:
            continue
        require_at_least(name, value, 1)
        if not causal:
            raise ValueError(f"causal=False with {name}={value}: this needs queries with positions")


@triton.jit
def first_visible(position, window, chunk):
    """The first key that a query at `position`, int32 of any shape, sees."""
    return tl.maximum(0, tl.maximum(position - window + 1, position // chunk * chunk))


@triton.jit
def _count_queries(cu_seqlens_q_ptr, seqs, mask, RAGGED: tl.constexpr):
    counts = tl.where(mask, 1, 0)
    if RAGGED:
        begin = tl.load(cu_seqlens_q_ptr + seqs, mask=mask, other=0)
        counts = tl.load(cu_seqlens_q_ptr + seqs + 1, mask=mask, other=0) - begin
    return counts


@triton.jit
def _tiles(seq_lens_ptr, cu_seqlens_q_ptr, seqs, num_seqs, window, chunk, RAGGED: tl.constexpr):
    """The first tile and the number of tiles that each of the sequences sees."""
    mask = seqs < num_seqs
    seq_len = tl.load(seq_lens_ptr + seqs, mask=mask, other=0)
    first_query = seq_len - _count_queries(cu_seqlens_q_ptr, seqs, mask, RAGGED)
    first_tile = first_visible(first_query, window, chunk) // _TILE
    return first_tile, tl.cdiv(seq_len, _TILE) - first_tile


@triton.jit
def _first_and_count(begin, tiles, run):
    """Return the run of the row in which the tiles begin, and the number of runs that they reach over."""
    first = begin // run
    return first, tl.where(tiles > 0, tl.cdiv(begin + tiles, run) - first, 0)


@triton.jit
def _share_begin(program, total_splits, num_programs):
    """The first of a program's equal share of the splits."""
    return (program.to(tl.int64) * total_splits // num_programs).to(tl.int32)


@triton.jit
def _store_records(rows_ptr, seq, first_key, end_key, split, first_split, num_splits, mask):
    """Store all columns of records but the last two, in the order of RECORD."""
    tl.store(rows_ptr, tl.zeros_like(split) + seq, mask=mask)
    tl.store(rows_ptr + 1, first_key, mask=mask)
    tl.store(rows_ptr + 2, end_key, mask=mask)
    tl.store(rows_ptr + 3, split, mask=mask)
    tl.store(rows_ptr + 4, tl.zeros_like(split) + first_split, mask=mask)
    tl.store(rows_ptr + 5, tl.zeros_like(split) + num_splits, mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "num_programs", "max_head_tiles", "run", "spread", "extra", "table_stride", "window",
        "chunk",
    ],
    do_not_specialize_on_alignment=[
        "seq_lens_ptr", "cu_seqlens_q_ptr", "block_tables_ptr", "programs_ptr", "splits_ptr", "token_splits_ptr",
        "tickets_ptr", "positions_ptr", "slot_mapping_ptr",
    ],
)  # fmt: skip
def decode_plan_kernel(
    seq_lens_ptr,  # [n]
    cu_seqlens_q_ptr,  # [n+1], None if not RAGGED
    block_tables_ptr,  # [n, M]
    programs_ptr,  # [P, 8]
    splits_ptr,  # [W, 8]
    token_splits_ptr,  # [N]
    tickets_ptr,  # [n, T]
    positions_ptr,  # [N]
    slot_mapping_ptr,  # [N]
    num_seqs,
    num_tokens,
    num_programs,
    max_head_tiles,  # T
    run,  # tiles: the least of a program, or those of a split if FIXED
    spread,  # the same while the programs are fewer than multiprocessors
    extra,  # tiles without keys in front of each sequence
    table_stride,
    window,
    chunk,
    BLOCK_SIZE: tl.constexpr,
    FIXED: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    seq = tl.program_id(0)
    lanes = tl.arange(0, _LANES)

    total_tiles = 0
    num_seen = 0
    for base in range(0, num_seqs, _LANES):
        _, tiles = _tiles(seq_lens_ptr, cu_seqlens_q_ptr, base + lanes, num_seqs, window, chunk, RAGGED)
        total_tiles += tl.sum(tiles)
        num_seen += tl.sum((tiles > 0).to(tl.int32))
    if not FIXED:
        once = tl.maximum(num_programs // _RESIDENT, 1)
        run = tl.minimum(run, tl.maximum(spread, tl.cdiv(total_tiles, once)))
        run = tl.maximum(run, tl.cdiv(total_tiles, num_programs))
        # No run is without keys.
        extra = tl.where(extra < run, extra, 0)
        total_tiles += num_seen * extra
        run = tl.maximum(run, tl.cdiv(total_tiles, num_programs))

    begin = 0
    first_split = 0
    total_splits = 0
    tiles_before = 0
    for base in range(0, num_seqs, _LANES):
        _, tiles = _tiles(seq_lens_ptr, cu_seqlens_q_ptr, base + lanes, num_seqs, window, chunk, RAGGED)
        counted = tiles if FIXED else tiles + tl.where(tiles > 0, extra, 0)
        # With fixed splits the tiles of every sequence begin a run.
        begins = tl.zeros_like(tiles) if FIXED else tiles_before + tl.cumsum(counted) - tiles
        _, counts = _first_and_count(begins, tiles, run)
        begin += tl.sum(tl.where(base + lanes == seq, begins, 0))
        first_split += tl.sum(tl.where(base + lanes < seq, counts, 0))
        total_splits += tl.sum(counts)
        tiles_before += tl.sum(counted)

    first_tile, num_tiles = _tiles(seq_lens_ptr, cu_seqlens_q_ptr, seq, num_seqs, window, chunk, RAGGED)
    first_run, num_splits = _first_and_count(begin, num_tiles, run)
    seq_len = tl.load(seq_lens_ptr + seq)
    for base in range(0, num_splits, _LANES):
        split = base + lanes
        mine = split < num_splits
        run_begin = (first_run + split) * run
        first_key = (tl.maximum(run_begin, begin) - begin + first_tile) * _TILE
        end_key = tl.minimum((run_begin + run - begin + first_tile) * _TILE, seq_len)
        number = first_split + split
        if FIXED:
            # The last program with a share of the splits that does not begin behind this one.
            program = (((number.to(tl.int64) + 1) * num_programs - 1) // total_splits).to(tl.int32)
            begins = mine & (_share_begin(program, total_splits, num_programs) == number)
        else:
            program = first_run + split
            begins = mine & (run_begin >= begin - extra)
            tl.store(programs_ptr + _RECORD * (program - 1) + _END_SPLIT, number, mask=begins & (program > 0))
        _store_records(splits_ptr + _RECORD * number, seq, first_key, end_key, number, first_split, num_splits, mine)
        _store_records(
            programs_ptr + _RECORD * program, seq, first_key, end_key, number, first_split, num_splits, begins
        )

    if seq == 0:
        num_runs = 0 if FIXED else tl.cdiv(total_tiles, run)
        for base in range(0, num_programs, _LANES):
            program = base + lanes
            exists = program < num_programs
            end_split = tl.zeros_like(program) + total_splits
            ends = exists & (program >= num_runs - 1)
            idle = exists & (program >= num_runs)
            if FIXED:
                end_split = _share_begin(program + 1, total_splits, num_programs)
                idle = exists & (_share_begin(program, total_splits, num_programs) == end_split)
            tl.store(programs_ptr + _RECORD * program + _SPLIT, end_split, mask=idle)
            tl.store(programs_ptr + _RECORD * program + _END_SPLIT, end_split, mask=ends)
    for base in range(0, max_head_tiles, _LANES):
        head_tile = base + lanes
        tl.store(
            tickets_ptr + seq * max_head_tiles + head_tile, tl.zeros_like(head_tile), mask=head_tile < max_head_tiles
        )

    q_len = _count_queries(cu_seqlens_q_ptr, seq, seq < num_seqs, RAGGED)
    first_token = seq
    if RAGGED:
        first_token = tl.load(cu_seqlens_q_ptr + seq)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    for base in range(0, q_len, _LANES):
        query = base + lanes
        mine = query < q_len
        position = seq_len - q_len + query
        real = mine & (position >= 0)
        block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        slot = tl.where(real, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(token_splits_ptr + first_token + query, tl.zeros_like(query) + num_splits, mask=mine)
        tl.store(positions_ptr + first_token + query, tl.maximum(position, 0).to(tl.int64), mask=mine)
        tl.store(slot_mapping_ptr + first_token + query, slot, mask=mine)
    if seq == num_seqs - 1:
        for base in range(first_token + q_len, num_tokens, _LANES):
            token = base + lanes
            mine = token < num_tokens
            tl.store(token_splits_ptr + token, tl.zeros([_LANES], tl.int32), mask=mine)
            tl.store(positions_ptr + token, tl.zeros([_LANES], tl.int64), mask=mine)
            tl.store(slot_mapping_ptr + token, tl.full([_LANES], -1, tl.int64), mask=mine)
