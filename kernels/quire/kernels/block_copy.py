# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Copies of whole blocks within the pool (copy-on-write), in every layer at once.

A block is bytes. In one pool tensor it is one run of them, whatever the order of heads and slots inside, so a pool is
described by a table of runs: where block 0 begins, how far apart blocks are, how long a run is. A pool that is one
tensor [blocks, layers, 2, heads, slots, dim] has one run per block, one tensor per layer and K or V has many; the
kernels read the table and do both in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    ceil_div,
    require_contiguous,
    require_dtype,
    require_same_device,
    require_shape,
)

# Runs are copied in words of 8 bytes, two per load, so they begin and end at multiples of 16.
WORD_BYTES = 8
ALIGNMENT_BYTES = 16

# 16 KiB in the registers of 8 warps: four loads of 16 bytes in flight per thread.
TILE_WORDS = 2048
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The memory layout of a pool's blocks: B blocks, each of R runs, in the order of the pool's tensors.

    runs                R views [B, run_bytes] uint8, one per tensor
    table               [R, 4] int64 on the device: address of block 0, words from block to block, words per run,
                        words of the runs before it
    """

    runs: tuple[Tensor, ...]
    table: Tensor

    @property
    def num_blocks(self) -> int:
        return self.runs[0].shape[0]

    @property
    def bytes_per_block(self) -> int:
        return sum(run.shape[1] for run in self.runs)

    @property
    def longest_run_bytes(self) -> int:
        return max(run.shape[1] for run in self.runs)

    @property
    def shortest_run_bytes(self) -> int:
        return min(run.shape[1] for run in self.runs)

    @property
    def tiles_per_run(self) -> int:
        """Tiles of TILE_WORDS that the longest run needs."""
        return ceil_div(self.longest_run_bytes, TILE_WORDS * WORD_BYTES)


def block_runs(pools: Sequence[Tensor]) -> BlockRuns:
    """Describe a pool for the kernels that move whole blocks. Made once per pool; waits for the device.

        pools   tensors [B, ...] of any dtype on one device, which may be views; each block of each is one dense run of
                bytes in any order of its dimensions, as in [B, S, H, D] and [B, H, S, D]

    Raises ValueError if a tensor's block is not one run, if a run does not begin and end at multiples of 16 bytes, or
    if block count or device differ.
    """
    if not pools:
        raise ValueError("pools is empty")
    require_same_device(**{f"pools[{i}]": pool for i, pool in enumerate(pools)})
    runs = tuple(_run(f"pools[{i}]", pool, pools[0].shape[0]) for i, pool in enumerate(pools))
    rows = []
    num_words = 0
    for run in runs:
        run_words = run.shape[1] // WORD_BYTES
        rows.append([run.data_ptr(), run.stride(0) // WORD_BYTES, run_words, num_words])
        num_words += run_words
    return BlockRuns(runs, torch.tensor(rows, dtype=torch.int64).to(pools[0].device))


def _run(name: str, pool: Tensor, num_blocks: int) -> Tensor:
    """The tensor as [B, run_bytes] uint8."""
    if pool.dim() < 2 or pool.shape[0] != num_blocks or pool.numel() == 0:
        raise ValueError(f"{name} has shape {list(pool.shape)}, not [{num_blocks}, ...] with elements")
    num_elements = pool[0].numel()
    if not _is_dense(pool):
        raise ValueError(f"{name} has strides {list(pool.stride())}: a block is not one run of {num_elements} elements")
    run = pool.as_strided((num_blocks, num_elements), (pool.stride(0), 1)).view(torch.uint8)
    for what, num_bytes in (("address", run.data_ptr()), ("block stride", run.stride(0)), ("block", run.shape[1])):
        if num_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"{name}: its {what} of {num_bytes} bytes is not a multiple of {ALIGNMENT_BYTES}")
    return run


def _is_dense(pool: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(pool.stride()[1:], pool.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return pool.shape[0] == 1 or pool.stride(0) >= expected


@triton.jit
def load_run(table_ptr, run):
    """Return (pointer to the run in block 0, words from block to block, words in it, words of a block before it)."""
    row = table_ptr + run * 4
    run_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    stride = tl.multiple_of(tl.load(row + 1), 2)
    num_words = tl.multiple_of(tl.load(row + 2), 2)
    words_before = tl.multiple_of(tl.load(row + 3), 2)
    return run_ptr, stride, num_words, words_before


@triton.jit(
    do_not_specialize=["tiles_per_run", "tiles_per_block"],
    do_not_specialize_on_alignment=("sources_ptr", "targets_ptr"),
)
def block_copy_kernel(
    table_ptr,  # [R, 4]
    sources_ptr,  # [P]
    targets_ptr,  # [P]
    tiles_per_run,
    tiles_per_block,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    pair = tl.program_id(0) // tiles_per_block
    tile = tl.program_id(0) % tiles_per_block
    source = tl.load(sources_ptr + pair)
    target = tl.load(targets_ptr + pair)
    if source >= 0:
        run_ptr, stride, num_words, _ = load_run(table_ptr, tile // tiles_per_run)
        words = (tile % tiles_per_run) * TILE + tl.arange(0, TILE)
        inside = words < num_words
        values = tl.load(run_ptr + source * stride + words, mask=inside)
        tl.store(run_ptr + target * stride + words, values, mask=inside)


def plan_launch() -> tuple[dict[str, int | bool], int, int]:
    """Return (constexprs, num_warps, num_stages), the same for all pools."""
    return {"TILE": TILE_WORDS}, _NUM_WARPS, 1


def copy_blocks(blocks: BlockRuns, *, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks of a pool, in all its tensors, in place: block sources[i] to block targets[i].

    Sizes: P pairs.
        blocks              from block_runs
        sources, targets    [P]     int64, on the pool's device; a pair with a negative source is skipped
    The caller promises what only the host could check without a sync: blocks are in range, no block is both source and
    target, no target comes twice.

    Raises ValueError if a shape, dtype or device is another. No sync; goes into a graph, which may be captured with
    more pairs than a step has, the rest skipped. Equal to reference.copy_blocks on each tensor, bit for bit.
    Cost: one launch; moves 2 * P * bytes_per_block bytes.
    """
    require_shape("sources", sources, (None,))
    require_shape("targets", targets, sources.shape)
    for name, ids in (("sources", sources), ("targets", targets)):
        require_dtype(name, ids, torch.int64)
        require_contiguous(name, ids)
    require_same_device(pool=blocks.table, sources=sources, targets=targets)
    if sources.numel() == 0:
        return
    tiles_per_block = len(blocks.runs) * blocks.tiles_per_run
    constexprs, num_warps, num_stages = plan_launch()
    block_copy_kernel[(sources.numel() * tiles_per_block,)](
        blocks.table,
        sources,
        targets,
        blocks.tiles_per_run,
        tiles_per_block,
        **constexprs,
        **dependent_options(block_copy_kernel, sources.device),
        num_warps=num_warps,
        num_stages=num_stages,
    )
