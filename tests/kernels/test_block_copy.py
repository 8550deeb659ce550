"""Copies of whole blocks in every layer, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.block_copy import TILE_WORDS, WORD_BYTES, block_runs, copy_blocks

NUM_BLOCKS = 8


def one_tensor(device: torch.device) -> list[Tensor]:
    """The whole pool, [blocks, layers, 2, heads, slots, dim]."""
    return [torch.empty(NUM_BLOCKS, 2, 2, 2, 16, 8, dtype=torch.bfloat16, device=device)]


def views_of_one_tensor(device: torch.device) -> list[Tensor]:
    """[B, S, H, D] views of it, one per layer and K or V."""
    (pool,) = one_tensor(device)
    return [pool[:, layer, kind].transpose(1, 2) for layer in range(2) for kind in range(2)]


def tensor_per_layer(device: torch.device) -> list[Tensor]:
    """[B, S, H, D] tensors, of which layers and K and V differ in heads and head dim."""
    shapes = [(2, 8), (2, 16), (1, 4), (1, 64)]
    return [torch.empty(NUM_BLOCKS, 16, *shape, dtype=torch.float32, device=device) for shape in shapes]


def bytes_of_fp8(device: torch.device) -> list[Tensor]:
    return [torch.empty(NUM_BLOCKS, 2, 16, 32, device=device).to(torch.float8_e4m3fn) for _ in range(3)]


def more_than_one_tile(device: torch.device) -> list[Tensor]:
    """Runs of two tiles and 16 bytes, and of one tile."""
    tile = TILE_WORDS * WORD_BYTES // 4
    return [torch.empty(NUM_BLOCKS, size, dtype=torch.float32, device=device) for size in (2 * tile + 4, tile)]


LAYOUTS = [one_tensor, views_of_one_tensor, tensor_per_layer, bytes_of_fp8, more_than_one_tile]


def fill(pools: list[Tensor]) -> None:
    """Random bytes, which hold NaNs of every kind."""
    generator = torch.Generator().manual_seed(0)
    for pool in pools:
        values = torch.randint(0, 256, (pool.numel() * pool.element_size(),), generator=generator, dtype=torch.uint8)
        pool.copy_(values.view(pool.dtype).view(pool.shape))


def bits(pool: Tensor) -> Tensor:
    return pool.contiguous().view(torch.uint8)


def ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_copies_bit_for_bit(layout: Callable[[torch.device], list[Tensor]], device: torch.device) -> None:
    pools = layout(device)
    fill(pools)
    expected = [pool.clone() for pool in pools]
    sources, targets = ids([6, 1, 6], device), ids([3, 7, 2], device)
    for pool in expected:
        reference.copy_blocks(pool, sources=sources, targets=targets)
    copy_blocks(block_runs(pools), sources=sources, targets=targets)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(bits(pool), bits(wanted))


@pytest.mark.sample
def test_pairs_with_a_negative_source_are_skipped(device: torch.device) -> None:
    pools = tensor_per_layer(device)
    fill(pools)
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        reference.copy_blocks(pool, sources=ids([5], device), targets=ids([1], device))
    copy_blocks(block_runs(pools), sources=ids([-1, 5, -1], device), targets=ids([0, 1, 4], device))
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(bits(pool), bits(wanted))


def test_no_pairs(device: torch.device) -> None:
    pools = one_tensor(device)
    fill(pools)
    before = pools[0].clone()
    copy_blocks(block_runs(pools), sources=ids([], device), targets=ids([], device))
    assert torch.equal(bits(pools[0]), bits(before))


def test_what_lies_between_blocks_is_not_touched(device: torch.device) -> None:
    memory = torch.full((NUM_BLOCKS, 24), math.nan, device=device)
    pool = memory[:, 4:20]
    pool.copy_(torch.arange(NUM_BLOCKS, device=device)[:, None].expand(-1, 16))
    copy_blocks(block_runs([pool]), sources=ids([2], device), targets=ids([5], device))
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4, 2, 6, 7]
    assert memory[:, :4].isnan().all()
    assert memory[:, 20:].isnan().all()


def test_description(device: torch.device) -> None:
    pools = tensor_per_layer(device)
    blocks = block_runs(pools)
    assert blocks.num_blocks == NUM_BLOCKS
    assert [run.shape[1] for run in blocks.runs] == [16 * n * 4 for n in (16, 32, 4, 64)]
    assert blocks.bytes_per_block == 16 * 116 * 4
    assert (blocks.shortest_run_bytes, blocks.longest_run_bytes) == (256, 4096)
    assert blocks.tiles_per_run == 1
    assert block_runs(more_than_one_tile(device)).tiles_per_run == 3
    for run, pool in zip(blocks.runs, pools, strict=True):
        assert run.data_ptr() == pool.data_ptr()


@pytest.mark.parametrize("beyond", ["source", "target"])
def test_offsets_beyond_2_31_words(beyond: str, tmp_path: Path, device: torch.device) -> None:
    stride = 2**34 + 64  # 2**31 + 8 words
    if device.type == "cuda":
        memory = torch.empty(stride + 64, dtype=torch.uint8, device=device)
    else:
        # A sparse file: only what is touched takes room.
        memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=stride + 64, dtype=torch.uint8)
    pool = memory.as_strided((2, 64), (stride, 1))
    pool[0] = 1
    pool[1] = 2
    source, target = (1, 0) if beyond == "source" else (0, 1)
    copy_blocks(block_runs([pool]), sources=ids([source], device), targets=ids([target], device))
    assert pool.unique().tolist() == [source + 1]


def test_refused_pools(device: torch.device) -> None:
    pool = torch.empty(4, 16, 2, 8, device=device)
    with pytest.raises(ValueError, match="pools is empty"):
        block_runs([])
    with pytest.raises(ValueError, match=r"pools\[1\] has shape \[3, 16, 2, 8\], not \[4, ...\]"):
        block_runs([pool, pool[:3]])
    with pytest.raises(ValueError, match=r"pools\[0\] has shape \[4, 0\]"):
        block_runs([torch.empty(4, 0, device=device)])
    with pytest.raises(ValueError, match=r"pools\[0\] has strides .*: a block is not one run of 128 elements"):
        block_runs([pool[..., :4]])
    with pytest.raises(ValueError, match="a block is not one run of 64 elements"):
        block_runs([torch.empty(64, device=device).expand(4, 64)])
    with pytest.raises(ValueError, match=r"its block of 24 bytes is not a multiple of 16"):
        block_runs([torch.empty(4, 8, device=device)[:, :6]])
    with pytest.raises(ValueError, match=r"its block stride of 24 bytes is not a multiple of 16"):
        block_runs([torch.empty(4, 6, device=device)[:, :4]])
    with pytest.raises(ValueError, match=r"its address of \d+ bytes is not a multiple of 16"):
        block_runs([torch.empty(4, 8, device=device)[:, 1:5]])


def test_refused_ids(device: torch.device) -> None:
    blocks = block_runs(one_tensor(device))
    one, two = ids([1], device), ids([1, 2], device)
    with pytest.raises(ValueError, match=r"targets has shape \[2\], not \[1\]"):
        copy_blocks(blocks, sources=one, targets=two)
    with pytest.raises(ValueError, match=r"sources is torch.int32, not torch.int64"):
        copy_blocks(blocks, sources=one.int(), targets=one)
    with pytest.raises(ValueError, match="targets has strides"):
        copy_blocks(blocks, sources=two, targets=ids([1, 0, 2, 0], device)[::2])
