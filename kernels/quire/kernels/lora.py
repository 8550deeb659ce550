# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Updates of LoRA adapters: each row of a product's input gets B A x of its own adapter, or nothing.

    shrink      A x of each row, in float32: a sum for each SPLIT inputs
    expand      B times the total of these sums, added to the product's result

Adapters lie in slots of fixed memory, and each row has the number of its slot, counted from 1, or 0. A program has a
tile of rows and one slot: it ends at once if none of its rows has this slot. So nothing is sorted, no grid depends on
the step, and both launches can be captured while slots are empty. Tokens of a prompt lie side by side: nearly all of
their tiles have one slot. A slot's rank is read on the device; a layer that its adapter has no update of has rank 0.

A row's sums have one order, whatever the other rows are. So there is no other form for fixed tiles, which have 16
rows in any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.fixed_tiles import are_fixed_tiles_used
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    ceil_div,
    dot,
    layouts,
    prepared_once,
    require_contiguous,
    require_dtype,
    require_last_contiguous,
    require_same_device,
    require_shape,
    round_to,
)

SPLIT = 1024
"""Inputs that one program of shrink adds up: a decode step has few programs without such parts."""

MOST_FEW_ROWS = 128
"""Rows up to which a tile has 16 of them: more programs, and less that is computed for rows of other slots."""


@dataclass(frozen=True, slots=True)
class LoraSlots:
    """Updates of the linear layers of one product, its parts, in S slots. Sizes: P parts, R most ranks, K inputs.

    a       [S, P, R, K]    fp32/fp16/bf16
    b       [S, N, R]       the same; the outputs of all parts one after the other, with the scaling
    ranks   [S, P]          int32, of each update; 0: there is none
    ends    [P + 1]         int32, the first output of each part, then N
    sizes                   outputs of each part, on the host
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    ends: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        *,
        max_rank: int,
        num_inputs: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraSlots:
        """Make empty slots for updates of up to max_rank."""
        num_ranks = padded_rank(max_rank)
        ends = [sum(sizes[:part]) for part in range(len(sizes) + 1)]
        return cls(
            a=torch.zeros(num_slots, len(sizes), num_ranks, num_inputs, dtype=dtype, device=device),
            b=torch.zeros(num_slots, ends[-1], num_ranks, dtype=dtype, device=device),
            ranks=torch.zeros(num_slots, len(sizes), dtype=torch.int32, device=device),
            ends=torch.tensor(ends, dtype=torch.int32).to(device),
            sizes=tuple(sizes),
        )

    def part(self, part: int) -> LoraSlots:
        """Return the slots of one part alone, on the same memory."""
        first = sum(self.sizes[:part])
        size = self.sizes[part]
        ends = torch.tensor([0, size], dtype=torch.int32).to(self.ends.device)
        alone = slice(part, part + 1)
        return LoraSlots(self.a[:, alone], self.b[:, first : first + size], self.ranks[:, alone], ends, (size,))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(each.numel() * each.element_size() for each in (self.a, self.b))


def padded_rank(max_rank: int) -> int:
    """Return the ranks that a slot has memory for: 16, or a multiple of 32."""
    return 16 if max_rank <= 16 else 32 * ceil_div(max_rank, 32)


def add_updates(out: Tensor, x: Tensor, slots: LoraSlots, adapter_of_row: Tensor) -> None:
    """Add to each row of a product's result the update of its slot, in place.

    Sizes: M rows, K inputs, N outputs; S, P and R as in LoraSlots.
        out             [M, N]  dtype of x, N contiguous
        x               [M, K]  fp32/fp16/bf16, K contiguous
        adapter_of_row  [M]     int64, 1 + the slot of the row's adapter; 0: it has none

    Sums are float32; A x is rounded to the dtype of x once, and the result once. Rows without an
    adapter are neither read nor written. Raises ValueError if a shape, stride, dtype or device is another. No sync.
    Cost: two launches. Reads A and B of each slot once for each tile of rows that has it, by their ranks.
    """
    shrink, expand, shape = _prepare(
        are_fixed_tiles_used(),
        slots.sizes,
        *layouts(out, x, slots.a, slots.b, slots.ranks, slots.ends, adapter_of_row),
    )
    if not len(x):
        return
    middle = torch.empty(shape, dtype=torch.float32, device=x.device)
    num_rows, num_inputs = x.shape
    shrink.run(lora_shrink_kernel, x, slots.a, slots.ranks, adapter_of_row, middle, num_rows, num_inputs)
    expand.run(lora_expand_kernel, middle, slots.b, slots.ranks, slots.ends, adapter_of_row, out, num_rows)


@prepared_once
def _prepare(
    is_fixed: bool,
    sizes: tuple[int, ...],
    out: Layout,
    x: Layout,
    a: Layout,
    b: Layout,
    ranks: Layout,
    ends: Layout,
    adapter_of_row: Layout,
) -> tuple[Launch, Launch, tuple[int, int, int, int]]:
    """The launches of both kernels, and the shape of what is between them: [P, splits, M, R]."""
    _check(sizes, out, x, a, b, ranks, ends, adapter_of_row)
    num_slots, num_parts, num_ranks, num_inputs = a.shape
    num_rows, splits = x.shape[0], ceil_div(num_inputs, SPLIT)
    rows = 16 if is_fixed or num_rows <= MOST_FEW_ROWS else 64
    rank_tile = 16 if num_ranks == 16 else 32
    inputs = 256 // x.dtype.itemsize
    row_tiles, rank_tiles = ceil_div(num_rows, rows), num_ranks // rank_tile
    common: dict[str, int | bool | str] = {
        "NUM_RANKS": num_ranks,
        "ROWS": rows,
        "RANKS": rank_tile,
        "num_warps": 4,
    }
    shrink = Launch(
        grid=(row_tiles, num_parts * splits * rank_tiles, num_slots),
        strides=(splits, x.stride(0), a.stride(0), a.stride(1), a.stride(2), ranks.stride(0)),
        options={
            **common,
            "INPUTS": inputs,
            "SPLIT": SPLIT,
            "EVEN": num_inputs % inputs == 0,
            "num_stages": 3,
            **dependent_options(lora_shrink_kernel, x.device),
        },
    )
    outputs = 64
    tiles = ceil_div(max(sizes), outputs)
    expand = Launch(
        grid=(row_tiles, num_parts * tiles, num_slots),
        strides=(splits, tiles, b.stride(0), b.stride(1), out.stride(0), ranks.stride(0)),
        options={
            **common,
            "OUTPUTS": outputs,
            "num_stages": 1,
            **dependent_options(lora_expand_kernel, x.device),
        },
    )
    return shrink, expand, (num_parts, splits, num_rows, num_ranks)


def _check(
    sizes: tuple[int, ...],
    out: Layout,
    x: Layout,
    a: Layout,
    b: Layout,
    ranks: Layout,
    ends: Layout,
    adapter_of_row: Layout,
) -> None:
    require_shape("x", x, (None, None))
    require_dtype("x", x, FLOAT_DTYPES)
    require_shape("a", a, (None, len(sizes), None, x.shape[1]))
    num_slots, num_parts, num_ranks, _ = a.shape
    if num_ranks != padded_rank(num_ranks):
        raise ValueError(f"a has {num_ranks} ranks, neither 16 nor a multiple of 32")
    require_shape("b", b, (num_slots, sum(sizes), num_ranks))
    require_shape("ranks", ranks, (num_slots, num_parts))
    require_shape("ends", ends, (num_parts + 1,))
    require_shape("out", out, (x.shape[0], sum(sizes)))
    require_shape("adapter_of_row", adapter_of_row, (x.shape[0],))
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        require_dtype(name, tensor, x.dtype)
        require_last_contiguous(name, tensor)
    require_last_contiguous("x", x)
    for name, tensor in (("ranks", ranks), ("ends", ends)):
        require_dtype(name, tensor, torch.int32)
    require_last_contiguous("ranks", ranks)
    require_dtype("adapter_of_row", adapter_of_row, torch.int64)
    require_contiguous("adapter_of_row", adapter_of_row)
    require_same_device(out=out, x=x, a=a, b=b, ranks=ranks, ends=ends, adapter_of_row=adapter_of_row)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def lora_shrink_kernel(
    x_ptr,  # [M, K]
    a_ptr,  # [S, P, R, K]
    ranks_ptr,  # [S, P]
    adapters_ptr,  # [M]
    middle_ptr,  # [P, splits, M, R] float32
    num_rows,
    num_inputs,
    splits,
    stride_x,
    stride_slot,
    stride_part,
    stride_rank,
    stride_ranks,
    NUM_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    rank_tiles = NUM_RANKS // RANKS
    r = tl.program_id(1) % rank_tiles * RANKS + tl.arange(0, RANKS)
    split = tl.program_id(1) // rank_tiles % splits
    part = tl.program_id(1) // (rank_tiles * splits)
    slot = tl.program_id(2)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wait_for_earlier_kernels(PDL)
    is_mine = tl.load(adapters_ptr + m, mask=m < num_rows, other=0) == slot + 1
    rank = tl.load(ranks_ptr + slot * stride_ranks + part)
    has_rank = r < rank
    if tl.max(is_mine.to(tl.int32)) * tl.max(has_rank.to(tl.int32)) == 0:
        return
    k = tl.arange(0, INPUTS)[None, :]
    rows = x_ptr + m[:, None] * stride_x + k
    weights = a_ptr + slot.to(tl.int64) * stride_slot + part * stride_part + r[:, None] * stride_rank + k
    first = split * SPLIT
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, num_inputs), INPUTS):
        has_row, has_weight = is_mine[:, None], has_rank[:, None]
        if not EVEN:
            has_row &= start + k < num_inputs
            has_weight &= start + k < num_inputs
        x = tl.load(rows + start, mask=has_row, other=0.0)
        a = tl.load(weights + start, mask=has_weight, other=0.0)
        total += dot(x, tl.trans(a))
    middle = ((part * splits + split) * num_rows.to(tl.int64) + m[:, None]) * NUM_RANKS + r[None, :]
    tl.store(middle_ptr + middle, total, mask=is_mine[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["num_rows", "splits", "tiles"])
def lora_expand_kernel(
    middle_ptr,  # [P, splits, M, R] float32
    b_ptr,  # [S, N, R]
    ranks_ptr,  # [S, P]
    ends_ptr,  # [P + 1]
    adapters_ptr,  # [M]
    out_ptr,  # [M, N]
    num_rows,
    splits,
    tiles,
    stride_slot,
    stride_output,
    stride_out,
    stride_ranks,
    NUM_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(1) // tiles
    slot = tl.program_id(2)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wait_for_earlier_kernels(PDL)
    is_mine = tl.load(adapters_ptr + m, mask=m < num_rows, other=0) == slot + 1
    rank = tl.load(ranks_ptr + slot * stride_ranks + part)
    n = tl.load(ends_ptr + part) + tl.program_id(1) % tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = n < tl.load(ends_ptr + part + 1)
    if tl.max(is_mine.to(tl.int32)) * tl.max(is_output.to(tl.int32)) * rank == 0:
        return
    r = tl.arange(0, RANKS)
    weights = b_ptr + slot.to(tl.int64) * stride_slot + n[:, None].to(tl.int64) * stride_output + r[None, :]
    sums = middle_ptr + (part * splits * num_rows.to(tl.int64) + m[:, None]) * NUM_RANKS + r[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, rank, RANKS):
        has_rank = (start + r < rank)[None, :]
        shrunk = tl.zeros([ROWS, RANKS], tl.float32)
        for split in range(splits):
            at = sums + split * num_rows.to(tl.int64) * NUM_RANKS + start
            shrunk += tl.load(at, mask=is_mine[:, None] & has_rank, other=0.0)
        b = tl.load(weights + start, mask=is_output[:, None] & has_rank, other=0.0)
        total += dot(round_to(shrunk, b_ptr.dtype.element_ty), tl.trans(b))
    at = out_ptr + m[:, None] * stride_out + n[None, :]
    inside = is_mine[:, None] & is_output[None, :]
    before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, round_to(before + total, out_ptr.dtype.element_ty), mask=inside)
