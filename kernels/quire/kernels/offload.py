# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Copies of blocks from the pool and back: gathered into contiguous staging memory, scattered from it.

Staging is usually pinned host memory. Two ways lead there. A kernel on a few multiprocessors writes and reads it
directly: one launch whatever the number of runs, and decoding keeps the other multiprocessors. Or the copy engines do,
one copy per run: they take no multiprocessor, but each copy costs a call, so runs must be long or few. vLLM measured
the kernel ahead below 28 KiB a run from 16 runs on, and 12 multiprocessors within 5 % of the bus (swap_blocks_triton).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.block_copy import ALIGNMENT_BYTES, TILE_WORDS, WORD_BYTES, BlockRuns, load_run
from quire.kernels.launching import (
    require_contiguous,
    require_dtype,
    require_shape,
)

MAX_PROGRAMS = 12

# The copy engines are chosen for runs at least so long, or for fewer runs than this.
COPY_ENGINE_RUN_BYTES = 28 * 1024
COPY_ENGINE_RUNS = 16

_NUM_WARPS = 8


@triton.jit(
    do_not_specialize=["words_per_block", "tiles_per_run", "tiles_per_block", "num_tiles"],
    do_not_specialize_on_alignment=("block_ids_ptr",),
)
def offload_kernel(
    table_ptr,  # [R, 4]
    staging_ptr,  # [P, words_per_block]
    block_ids_ptr,  # [P]
    words_per_block,
    tiles_per_run,
    tiles_per_block,
    num_tiles,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
):
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        place = index // tiles_per_block
        tile = index % tiles_per_block
        block_id = tl.load(block_ids_ptr + place)
        run_ptr, stride, num_words, words_before = load_run(table_ptr, tile // tiles_per_run)
        words = (tile % tiles_per_run) * TILE + tl.arange(0, TILE)
        inside = words < num_words
        in_pool = run_ptr + block_id * stride + words
        row = tl.multiple_of(place.to(tl.int64) * words_per_block, 2)
        in_staging = staging_ptr + row + words_before + words
        if GATHER:
            tl.store(in_staging, tl.load(in_pool, mask=inside), mask=inside)
        else:
            tl.store(in_pool, tl.load(in_staging, mask=inside), mask=inside)


def plan_launch(*, gather: bool) -> tuple[dict[str, int | bool], int, int]:
    """Return (constexprs, num_warps, num_stages), the same for all pools."""
    return {"GATHER": gather, "TILE": TILE_WORDS}, _NUM_WARPS, 1


def uses_copy_engines(*, shortest_run_bytes: int, num_runs: int) -> bool:
    """True if num_runs copies of at least so many bytes are left to the copy engines, and not done by the kernel."""
    return shortest_run_bytes >= COPY_ENGINE_RUN_BYTES or num_runs < COPY_ENGINE_RUNS


def gather_blocks(blocks: BlockRuns, staging: Tensor, *, block_ids: Sequence[int]) -> None:
    """Copy blocks of a pool, all its tensors, to staging: row i becomes the bytes of block block_ids[i].

    Sizes: P blocks.
        blocks      from block_runs
        staging     [P, bytes_per_block]    uint8, contiguous: pinned host memory, or on the pool's device. Within a row
                                            the pool's tensors follow one another
        block_ids   P numbers on the host, 0 .. B-1

    Asynchronous on the current stream, which for offload is one of its own: neither blocks nor staging may be
    written before it has passed. Raises ValueError if a shape, dtype or device is another or a block out of range, with
    nothing copied. Equal to reference_elementwise.gather_blocks bit for bit.
    Cost: one launch of at most MAX_PROGRAMS programs, or one copy per run where uses_copy_engines says so.
    """
    _check(blocks, staging, block_ids)
    _move(blocks, staging, block_ids, gather=True)


def scatter_blocks(blocks: BlockRuns, staging: Tensor, *, block_ids: Sequence[int]) -> None:
    """Copy staging to blocks of a pool: the bytes of block block_ids[i] become row i. The way back of gather_blocks.

    Arguments, errors and cost are those of gather_blocks; besides, raises ValueError if a block comes twice.
    """
    _check(blocks, staging, block_ids)
    if len(set(block_ids)) != len(block_ids):
        raise ValueError(f"block_ids has {len(block_ids)} blocks, of which {len(set(block_ids))} distinct")
    _move(blocks, staging, block_ids, gather=False)


def _check(blocks: BlockRuns, staging: Tensor, block_ids: Sequence[int]) -> None:
    require_shape("staging", staging, (len(block_ids), blocks.bytes_per_block))
    require_dtype("staging", staging, torch.uint8)
    require_contiguous("staging", staging)
    if staging.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"staging begins at {staging.data_ptr()}, not a multiple of {ALIGNMENT_BYTES}")
    device = blocks.table.device
    # Empty memory is never pinned.
    if staging.numel() and staging.device != device and not staging.is_pinned():
        raise ValueError(f"staging is on {staging.device} and not pinned, the pool on {device}")
    for block_id in block_ids:
        if not 0 <= block_id < blocks.num_blocks:
            raise ValueError(f"block_id {block_id} is not in 0 .. {blocks.num_blocks - 1}")


def _move(blocks: BlockRuns, staging: Tensor, block_ids: Sequence[int], *, gather: bool) -> None:
    num_runs = len(block_ids) * len(blocks.runs)
    if num_runs == 0:
        return
    if uses_copy_engines(shortest_run_bytes=blocks.shortest_run_bytes, num_runs=num_runs):
        _copy_runs(blocks, staging, block_ids, gather=gather)
    else:
        _launch(blocks, staging, block_ids, gather=gather)


def _copy_runs(blocks: BlockRuns, staging: Tensor, block_ids: Sequence[int], *, gather: bool) -> None:
    parts = torch.split(staging, [run.shape[1] for run in blocks.runs], dim=1)
    for place, block_id in enumerate(block_ids):
        for run, part in zip(blocks.runs, parts, strict=True):
            target, source = (part[place], run[block_id]) if gather else (run[block_id], part[place])
            target.copy_(source, non_blocking=True)


def _launch(blocks: BlockRuns, staging: Tensor, block_ids: Sequence[int], *, gather: bool) -> None:
    device = blocks.table.device
    ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    tiles_per_block = len(blocks.runs) * blocks.tiles_per_run
    num_tiles = len(block_ids) * tiles_per_block
    constexprs, num_warps, num_stages = plan_launch(gather=gather)
    offload_kernel[(min(MAX_PROGRAMS, num_tiles),)](
        blocks.table,
        staging.view(torch.int64),
        ids,
        blocks.bytes_per_block // WORD_BYTES,
        blocks.tiles_per_run,
        tiles_per_block,
        num_tiles,
        **constexprs,
        num_warps=num_warps,
        num_stages=num_stages,
    )
