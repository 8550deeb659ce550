# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The second half of decode attention: the partial results of split sequences, merged.

Only a sequence that two programs share is split, so P programs split at most P - 1 sequences, however many there are.
Each of these has its second split at the beginning of a program, where the grid finds it:

    programs    |00000|11111|22222|33333|
    splits      |aaaaa|aaaaa|aa|bbb|ccccc|      program 1 begins with the second split of a, the others with none

Other rows are written by the attention kernel, or belong to no keys; a few programs more look for those.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.decode_plan import DecodePlan, PlanLayout
from quire.kernels.launching import Launch, Layout, Variant, ceil_div, next_power_of_2, round_to
from quire.kernels.merge_states import merge_rows

# Tokens of which one program finds and clears those without keys.
CLEARED_TOKENS = 32

_CLEARED_TOKENS = tl.constexpr(CLEARED_TOKENS)


def combine(
    partial_outs: Tensor,
    partial_lses: Tensor,
    *,
    plan: DecodePlan,
    cu_seqlens_q: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    launch: Launch,
) -> None:
    """Merge the splits of each sequence into its rows of out, in the order of its keys.

    Sizes: W splits, Q queries of a sequence at most, N query tokens, Hq query heads, D head dim of values.
        partial_outs    [>= W * Q * Hq * D] float32, contiguous: the result over the keys of one split, [W, Q, Hq, D]
        partial_lses    [>= W * Q * Hq] float32, contiguous, base 2: [W, Q, Hq]
        cu_seqlens_q    [n+1]           int32, or None for one query per sequence
        out             [N, Hq, D]      rows of a sequence with one split are left alone: they are there already
        lse             [N, Hq]         float32, contiguous, or None
        launch          of prepare_combine()
    A row of a sequence without keys, or of no sequence, becomes exactly 0, its lse -inf. Called by paged_decode, which
    has checked. Cost: one launch of (max_split_sequences() + N / CLEARED_TOKENS) * Hq * Q programs.
    """
    sizes = plan.layout
    num_candidates = max_split_sequences(num_seqs=sizes.num_seqs, max_splits=sizes.max_splits)
    launch.run(
        combine_kernel,
        partial_outs, partial_lses, plan.splits, plan.program_bounds, plan.seq_splits, plan.token_seqs, cu_seqlens_q,
        out, lse, num_candidates, sizes.num_seqs, sizes.num_tokens,
    )  # fmt: skip


def prepare_combine(out: Layout, *, plan: PlanLayout, ragged: bool, has_lse: bool) -> Launch:
    """The launch of combine() for such an out."""
    num_tokens, num_heads, head_dim = out.shape
    variant = combine_variant(head_dim=head_dim, max_q_len=plan.max_q_len, ragged=ragged, has_lse=has_lse)
    num_candidates = max_split_sequences(num_seqs=plan.num_seqs, max_splits=plan.max_splits)
    grid = (num_candidates + ceil_div(num_tokens, CLEARED_TOKENS), num_heads, plan.max_q_len)
    return Launch(grid=grid, strides=out.strides[:2], options=variant.options)


def max_split_sequences(*, num_seqs: int, max_splits: int) -> int:
    """The most sequences of a plan that can have several splits: each has a split beyond one for each sequence."""
    return min(num_seqs, max_splits - num_seqs)


def combine_variant(*, head_dim: int, max_q_len: int, ragged: bool, has_lse: bool) -> Variant:
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "MAX_Q_LEN": max_q_len,
        "RAGGED": ragged,
        "HAS_LSE": has_lse,
    }
    return Variant(constants, num_warps=2, num_stages=2)


@triton.jit
def _find_split_sequence(splits_ptr, program_bounds_ptr, seq_splits_ptr, candidate, num_candidates, num_seqs):
    """The candidate's sequence and the number of its splits, above 1 if the sequence is this candidate's to merge."""
    if num_candidates == num_seqs:
        seq = candidate
        num_splits = tl.load(seq_splits_ptr + 2 * seq + 1)
    else:
        split = tl.load(program_bounds_ptr + candidate + 1)
        begins = split < tl.load(program_bounds_ptr + num_candidates + 1)
        seq = tl.load(splits_ptr + 3 * split, mask=begins, other=0)
        begins &= split == tl.load(seq_splits_ptr + 2 * seq) + 1
        num_splits = tl.load(seq_splits_ptr + 2 * seq + 1, mask=begins, other=0)
    return seq, num_splits


@triton.jit(
    do_not_specialize=["num_candidates", "num_seqs", "num_tokens"],
    do_not_specialize_on_alignment=[
        "splits_ptr", "program_bounds_ptr", "seq_splits_ptr", "token_seqs_ptr", "cu_seqlens_q_ptr",
    ],
)  # fmt: skip
def combine_kernel(
    partial_outs_ptr,  # [W, Q, Hq, D]
    partial_lses_ptr,  # [W, Q, Hq]
    splits_ptr,  # [W, 3]
    program_bounds_ptr,  # [P+1]
    seq_splits_ptr,  # [n, 2]
    token_seqs_ptr,  # [N]
    cu_seqlens_q_ptr,  # [n+1], None if not RAGGED
    out_ptr,  # [N, Hq, D]
    lse_ptr,  # [N, Hq], None if not HAS_LSE
    num_candidates,  # n, or P - 1 if that is less: then candidate c is the sequence that program c + 1 begins within
    num_seqs,
    num_tokens,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_Q_LEN: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    candidate = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2)
    num_heads = tl.num_programs(1)
    dims = tl.arange(0, BLOCK_D)
    if candidate < num_candidates:
        seq, num_splits = _find_split_sequence(
            splits_ptr, program_bounds_ptr, seq_splits_ptr, candidate, num_candidates, num_seqs
        )
        first_token = seq
        q_len = 1
        if RAGGED:
            first_token = tl.load(cu_seqlens_q_ptr + seq)
            q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
        if (num_splits > 1) & (query < q_len):
            first_split = tl.load(seq_splits_ptr + 2 * seq).to(tl.int64)
            first_row = (first_split * MAX_Q_LEN + query) * num_heads + head
            rows_per_split = (MAX_Q_LEN * num_heads).to(tl.int64)
            row, lse = merge_rows(
                partial_outs_ptr + first_row * HEAD_DIM, partial_lses_ptr + first_row,
                num_splits, rows_per_split * HEAD_DIM, rows_per_split, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            token = (first_token + query).to(tl.int64)
            target = out_ptr + token * out_token_stride + head * out_head_stride + dims
            tl.store(target, round_to(row, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
            if HAS_LSE:
                tl.store(lse_ptr + token * num_heads + head, lse)
    elif query == 0:
        tokens = (candidate - num_candidates) * _CLEARED_TOKENS + tl.arange(0, _CLEARED_TOKENS)
        seqs = tl.load(token_seqs_ptr + tokens, mask=tokens < num_tokens, other=-1)
        num_splits = tl.load(seq_splits_ptr + 2 * seqs + 1, mask=seqs >= 0, other=0)
        empty = (tokens < num_tokens) & (num_splits == 0)
        rows = tokens.to(tl.int64)
        targets = (out_ptr + rows * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
        zeros = tl.zeros([_CLEARED_TOKENS, BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(targets, zeros, mask=empty[:, None] & (dims < HEAD_DIM)[None, :])
        if HAS_LSE:
            minus_inf = tl.full([_CLEARED_TOKENS], float("-inf"), tl.float32)
            tl.store(lse_ptr + rows * num_heads + head, minus_inf, mask=empty)
