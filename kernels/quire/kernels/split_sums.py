# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Products of few rows with a packed weight: their tiles, and the sums that several programs share.

Where a weight has few outputs, its tiles are fewer than a GPU's multiprocessors. So several programs share the sum of a
tile, as in skinny_linear.py: each leaves its part in a workspace and takes a ticket, and the last one adds all parts in
their order. The split follows from the weight and the GPU alone. So a row's sum has one order, whatever the other rows
are.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launching import (
    FLOAT_DTYPES,
    Layout,
    ceil_div,
    contiguous,
    device_limits,
    require_dtype,
    require_last_contiguous,
    require_shape,
)
from quire.kernels.product_parts import require_vector

MAX_ROWS = 64
"""Rows up to which the weight's bytes decide the time. More take a dequantized weight."""

OUTPUTS = 64
"""Outputs of a tile."""

_ROWS = (16, 32)
"""Rows of a tile: with 64, threads run out of registers."""
_MOST_SPLIT = 16
_PROGRAMS = 2
"""Programs of a multiprocessor below which sums are split."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a product, each [rows, OUTPUTS], of which `split` programs share the sum."""

    rows: int
    num_row_tiles: int
    num_output_tiles: int
    split: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """The programs of a launch."""
        return self.num_row_tiles, self.num_output_tiles, self.split


def takes(x: Tensor | Layout) -> bool:
    """True if kernels of packed weights multiply so many rows [M, K]."""
    return 0 < x.shape[0] <= MAX_ROWS and x.dtype in FLOAT_DTYPES


def check_rows(x: Layout, num_outputs: int, bias: Layout | None, out: Layout | None) -> Layout:
    """Return the layout of the result [M, N] of x [M, K]. Raise ValueError for arguments that no product here takes.

    x, out      [M, K] and [M, N]   fp32/fp16/bf16, the same, last dimension contiguous
    bias        [N]                 fp32/fp16/bf16, contiguous
    """
    require_shape("x", x, (None, None))
    require_dtype("x", x, FLOAT_DTYPES)
    require_last_contiguous("x", x)
    if bias is not None:
        require_vector("bias", bias, num_outputs)
    out = out or contiguous((x.shape[0], num_outputs), x)
    require_shape("out", out, (x.shape[0], num_outputs))
    require_dtype("out", out, x.dtype)
    require_last_contiguous("out", out)
    return out


def plan_tiles(x: Layout, num_outputs: int, num_steps: int, workspace: tuple[Layout | None, Layout | None]) -> Tiles:
    """Return the tiles of x [M, K] times a weight; each sum has num_steps steps.

    workspace: parts and tickets, of a SkinnyWorkspace; None: no sum is shared. Raises ValueError if it is too small, or
    if there are too many rows.
    """
    num_rows = x.shape[0]
    if not takes(x):
        raise ValueError(f"x has {num_rows} rows, not 1 to {MAX_ROWS}")
    rows, split = _ROWS[num_rows > _ROWS[0]], 1
    tiles = ceil_div(num_outputs, OUTPUTS)
    parts, tickets = workspace
    if parts is not None and tickets is not None:
        split = find_split(tiles, num_steps, device_limits(x.device).num_multiprocessors)
    plan = Tiles(rows, ceil_div(num_rows, rows), tiles, split)
    if parts is not None and tickets is not None and split > 1:
        num_sums = plan.num_row_tiles * tiles
        needed = {"parts": num_sums * split * rows * OUTPUTS, "tickets": num_sums}
        for (name, want), have in zip(needed.items(), (parts.shape[0], tickets.shape[0]), strict=True):
            if have < want:
                raise ValueError(f"the workspace has {have} {name}, not {want}")
    return plan


def find_split(tiles: int, num_steps: int, num_multiprocessors: int) -> int:
    """Return the programs that share the sum of each tile: a power of two, at most one for each step of the sum."""
    split = 1
    while tiles * split < _PROGRAMS * num_multiprocessors and 2 * split <= min(num_steps, _MOST_SPLIT):
        split *= 2
    return split


@triton.jit
def add_parts(
    total,  # [ROWS, OUTPUTS] float32, the part of this program
    parts_ptr,  # [tiles, SPLIT, ROWS, OUTPUTS] float32
    tickets_ptr,  # [tiles] int32, zero before and after
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The sum of a tile, and True in the one of its programs that has it and stores it. The grid is that of Tiles."""
    is_last = True
    if SPLIT > 1:
        size: tl.constexpr = ROWS * OUTPUTS
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        elements = tl.arange(0, ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        parts = parts_ptr + place.to(tl.int64) * (SPLIT * size) + elements
        tl.store(parts + tl.program_id(2) * size, total)
        tl.debug_barrier()  # all of this part is written when its ticket is taken
        is_last = tl.atomic_add(tickets_ptr + place, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            total = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for each in tl.range(0, SPLIT, num_stages=1):
                # Past the first cache, which could hold what lay there before.
                total += tl.load(parts + each * size, cache_modifier=".cg")
            tl.store(tickets_ptr + place, 0)
    return total, is_last
