"""Blocks gathered into staging memory and scattered back, bit for bit, by the kernel and by the copy engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels import reference_elementwise as reference
from quire.kernels.block_copy import TILE_WORDS, WORD_BYTES, BlockRuns, block_runs
from quire.kernels.offload import (
    COPY_ENGINE_RUN_BYTES,
    COPY_ENGINE_RUNS,
    MAX_PROGRAMS,
    gather_blocks,
    scatter_blocks,
    uses_copy_engines,
)

NUM_BLOCKS = 24
BLOCK_IDS = [5, 23, 1, 0, 17, 4, 2, 3, 22, 9, 8, 7, 6, 10, 21, 11]


def tensor_per_layer(device: torch.device) -> list[Tensor]:
    """[B, S, H, D] tensors, of which layers and K and V differ in heads and head dim."""
    return [torch.empty(NUM_BLOCKS, 16, *shape, device=device) for shape in [(2, 4), (1, 4), (2, 8)]]


def views_of_one_tensor(device: torch.device) -> list[Tensor]:
    pool = torch.empty(NUM_BLOCKS, 2, 2, 2, 16, 8, dtype=torch.bfloat16, device=device)
    return [pool[:, layer, kind].transpose(1, 2) for layer in range(2) for kind in range(2)]


def short_of_a_copy_engine(device: torch.device) -> list[Tensor]:
    """One tensor with runs of a tile and a part of one."""
    return [torch.empty(NUM_BLOCKS, TILE_WORDS * WORD_BYTES // 4 + 12, device=device)]


def for_copy_engines(device: torch.device) -> list[Tensor]:
    return [
        torch.empty(NUM_BLOCKS, COPY_ENGINE_RUN_BYTES + extra, dtype=torch.uint8, device=device) for extra in (0, 16)
    ]


LAYOUTS = [tensor_per_layer, views_of_one_tensor, short_of_a_copy_engine, for_copy_engines]
Layout = Callable[[torch.device], list[Tensor]]


def filled(layout: Layout, device: torch.device) -> tuple[list[Tensor], BlockRuns]:
    """A pool of random bytes, which hold NaNs of every kind."""
    pools = layout(device)
    generator = torch.Generator().manual_seed(0)
    for pool in pools:
        values = torch.randint(0, 256, (pool.numel() * pool.element_size(),), generator=generator, dtype=torch.uint8)
        pool.copy_(values.view(pool.dtype).view(pool.shape))
    return pools, block_runs(pools)


def staging_for(blocks: BlockRuns, num_blocks: int) -> Tensor:
    """Host memory, pinned where there is a device it is not on."""
    staging = torch.full((num_blocks, blocks.bytes_per_block), 0xA5, dtype=torch.uint8)
    return staging.pin_memory() if blocks.table.device.type == "cuda" else staging


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.sample
def test_layouts_take_both_ways(device: torch.device) -> None:
    def ways(layout: Layout) -> bool:
        blocks = block_runs(layout(device))
        num_runs = len(BLOCK_IDS) * len(blocks.runs)
        return uses_copy_engines(shortest_run_bytes=blocks.shortest_run_bytes, num_runs=num_runs)

    assert [ways(layout) for layout in LAYOUTS] == [False, False, False, True]


def test_choice_of_the_way() -> None:
    assert uses_copy_engines(shortest_run_bytes=COPY_ENGINE_RUN_BYTES, num_runs=1000)
    assert not uses_copy_engines(shortest_run_bytes=COPY_ENGINE_RUN_BYTES - 1, num_runs=1000)
    assert not uses_copy_engines(shortest_run_bytes=16, num_runs=COPY_ENGINE_RUNS)
    assert uses_copy_engines(shortest_run_bytes=16, num_runs=COPY_ENGINE_RUNS - 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_gather(layout: Layout, device: torch.device) -> None:
    pools, blocks = filled(layout, device)
    before = [pool.clone() for pool in pools]
    staging = staging_for(blocks, len(BLOCK_IDS))
    gather_blocks(blocks, staging, block_ids=BLOCK_IDS)
    wait(device)
    assert torch.equal(staging, reference.gather_blocks(pools, block_ids=BLOCK_IDS).cpu())
    for pool, unchanged in zip(pools, before, strict=True):
        assert torch.equal(pool.contiguous().view(torch.uint8), unchanged.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_scatter(layout: Layout, device: torch.device) -> None:
    pools, blocks = filled(layout, device)
    expected = [pool.clone(memory_format=torch.preserve_format) for pool in pools]
    staging = staging_for(blocks, len(BLOCK_IDS))
    staging.copy_(torch.randint(0, 256, staging.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))
    reference.scatter_blocks(expected, staging.to(device), block_ids=BLOCK_IDS)
    scatter_blocks(blocks, staging, block_ids=BLOCK_IDS)
    wait(device)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("num_blocks", [1, 16], ids=["copy-engines", "kernel"])
def test_there_and_back_into_other_blocks(num_blocks: int, device: torch.device) -> None:
    pools, blocks = filled(short_of_a_copy_engine, device)
    expected = pools[0].clone()
    sources, targets = BLOCK_IDS[:num_blocks], BLOCK_IDS[::-1][:num_blocks]
    expected[targets] = expected[sources]
    staging = staging_for(blocks, num_blocks)
    gather_blocks(blocks, staging, block_ids=sources)
    scatter_blocks(blocks, staging, block_ids=targets)
    wait(device)
    assert torch.equal(pools[0].view(torch.uint8), expected.view(torch.uint8))


def test_a_block_may_be_gathered_twice(device: torch.device) -> None:
    pools, blocks = filled(tensor_per_layer, device)
    staging = staging_for(blocks, 2 * MAX_PROGRAMS)
    gather_blocks(blocks, staging, block_ids=[3] * 2 * MAX_PROGRAMS)
    wait(device)
    assert torch.equal(staging.unique(dim=0), reference.gather_blocks(pools, block_ids=[3]).cpu())


def test_nothing_to_move(device: torch.device) -> None:
    _, blocks = filled(tensor_per_layer, device)
    gather_blocks(blocks, staging_for(blocks, 0), block_ids=[])
    scatter_blocks(blocks, staging_for(blocks, 0), block_ids=[])


def test_refusals_move_nothing(device: torch.device) -> None:
    pools, blocks = filled(tensor_per_layer, device)
    before = reference.gather_blocks(pools, block_ids=range(NUM_BLOCKS))
    staging = staging_for(blocks, 2)
    with pytest.raises(ValueError, match=r"staging has shape \[2, \d+\], not \[3, \d+\]"):
        scatter_blocks(blocks, staging, block_ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"staging is torch.int8, not torch.uint8"):
        scatter_blocks(blocks, staging.view(torch.int8), block_ids=[1, 2])
    with pytest.raises(ValueError, match="staging has strides"):
        scatter_blocks(blocks, staging.T.contiguous().T, block_ids=[1, 2])
    odd = torch.empty(staging.numel() + 8, dtype=torch.uint8)[8:].view(staging.shape)
    with pytest.raises(ValueError, match="not a multiple of 16"):
        scatter_blocks(blocks, odd, block_ids=[1, 2])
    for block_id in (-1, NUM_BLOCKS):
        with pytest.raises(ValueError, match=f"block_id {block_id} is not in 0 .. 23"):
            scatter_blocks(blocks, staging, block_ids=[1, block_id])
        with pytest.raises(ValueError, match=f"block_id {block_id} is not in 0 .. 23"):
            gather_blocks(blocks, staging, block_ids=[1, block_id])
    with pytest.raises(ValueError, match="block_ids has 2 blocks, of which 1 distinct"):
        scatter_blocks(blocks, staging, block_ids=[1, 1])
    assert torch.equal(reference.gather_blocks(pools, block_ids=range(NUM_BLOCKS)), before)
    assert (staging == 0xA5).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="all memory is the device's where there is no GPU")
def test_unpinned_host_memory_is_refused(device: torch.device) -> None:
    _, blocks = filled(tensor_per_layer, device)
    staging = torch.empty(1, blocks.bytes_per_block, dtype=torch.uint8)
    with pytest.raises(ValueError, match="staging is on cpu and not pinned"):
        gather_blocks(blocks, staging, block_ids=[1])
