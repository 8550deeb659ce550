# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The second half of decode attention: the partial results of split sequences, merged."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.decode_plan import DecodePlan, PlanLayout
from quire.kernels.launching import Launch, Layout, Variant, next_power_of_2, round_to
from quire.kernels.merge_states import merge_rows


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
    has checked. Cost: one launch of N * Hq programs, most of which end at once when few sequences are split.
    """
    combine_kernel[launch.grid](
        partial_outs, partial_lses, plan.seq_splits, plan.token_seqs, cu_seqlens_q, out, lse,
        *launch.strides, **launch.options,
    )  # fmt: skip


def prepare_combine(out: Layout, *, plan: PlanLayout, ragged: bool, has_lse: bool) -> Launch:
    """The launch of combine() for such an out."""
    num_tokens, num_heads, head_dim = out.shape
    variant = combine_variant(head_dim=head_dim, max_q_len=plan.max_q_len, ragged=ragged, has_lse=has_lse)
    return Launch(grid=(num_tokens, num_heads), strides=out.strides[:2], options=variant.options)


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
def combine_kernel(
    partial_outs_ptr,  # [W, Q, Hq, D]
    partial_lses_ptr,  # [W, Q, Hq]
    seq_splits_ptr,  # [n, 2]
    token_seqs_ptr,  # [N]
    cu_seqlens_q_ptr,  # [n+1], None if not RAGGED
    out_ptr,  # [N, Hq, D]
    lse_ptr,  # [N, Hq], None if not HAS_LSE
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_Q_LEN: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    seq = tl.load(token_seqs_ptr + token)
    owned = seq >= 0
    num_splits = tl.load(seq_splits_ptr + 2 * seq + 1, mask=owned, other=0)
    if num_splits != 1:
        first_split = tl.load(seq_splits_ptr + 2 * seq, mask=owned, other=0).to(tl.int64)
        query = 0
        if RAGGED:
            query = token - tl.load(cu_seqlens_q_ptr + seq, mask=owned, other=0)
        first_row = (first_split * MAX_Q_LEN + query) * num_heads + head
        rows_per_split = (MAX_Q_LEN * num_heads).to(tl.int64)
        row, lse = merge_rows(
            partial_outs_ptr + first_row * HEAD_DIM, partial_lses_ptr + first_row,
            num_splits, rows_per_split * HEAD_DIM, rows_per_split, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_D)
        target = out_ptr + token.to(tl.int64) * out_token_stride + head * out_head_stride + dims
        tl.store(target, round_to(row, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
        if HAS_LSE:
            tl.store(lse_ptr + token.to(tl.int64) * num_heads + head, lse)
