"""The host tier's memory: copied content is restored bit for bit, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from layers import UNEVEN_LAYERS

from quire.worker.memory.host_pool import HostCopies, HostPool, by_consecutive_rows, count_host_blocks, make_host_pool
from quire.worker.memory.kv_pool import KVPool


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    """Seven blocks, all but the null block random."""
    pool = KVPool(UNEVEN_LAYERS, num_blocks=7, block_size=4, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in pool.tensors():
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(dtype)
    return pool


@pytest.fixture
def pool() -> KVPool:
    return make_pool()


@pytest.fixture
def host_pool(pool: KVPool) -> HostPool:
    return make_host_pool(pool, num_blocks=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_offloaded_comes_back_in_other_blocks(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    host_pool = make_host_pool(pool, num_blocks=5)
    before = pool.checksum_blocks(range(7))
    host_pool.offload([(1, 4), (3, 0), (5, 2)])
    assert pool.checksum_blocks(range(7)) == before
    for tensor in pool.tensors():
        tensor[1:] = 0
    host_pool.restore([(0, 6), (4, 2), (2, 5)])
    after = pool.checksum_blocks(range(7))
    assert [after[6], after[2], after[5]] == [before[3], before[1], before[5]]
    assert after[1] == after[3] == after[4]
    pool.check_invariants()


def test_a_host_block_keeps_what_was_copied_last(pool: KVPool, host_pool: HostPool) -> None:
    before = pool.checksum_blocks(range(7))
    host_pool.offload([(1, 0), (2, 1)])
    host_pool.offload([(3, 0)])
    host_pool.restore([(0, 5), (1, 6)])
    assert pool.checksum_blocks([5, 6]) == [before[3], before[2]]


def test_two_blocks_are_copied_from_one_host_block(pool: KVPool, host_pool: HostPool) -> None:
    (before,) = pool.checksum_blocks([1])
    host_pool.offload([(1, 0)])
    host_pool.restore([(0, 5), (0, 6)])
    assert pool.checksum_blocks([5, 6]) == [before, before]


def test_the_copies_of_a_step_are_counted(host_pool: HostPool) -> None:
    assert host_pool.finish() == HostCopies()
    host_pool.offload([(1, 0), (2, 1)])
    host_pool.join()
    host_pool.restore([(0, 5)])
    copies = host_pool.finish()
    assert (copies.num_offloaded, copies.num_restored) == (2, 1)
    assert copies.offload_s > 0
    assert copies.restore_s > 0
    host_pool.restore([(1, 6)])
    assert host_pool.finish().num_offloaded == 0
    host_pool.offload([])
    assert host_pool.finish() == HostCopies()


@pytest.mark.parametrize(
    ("offloads", "restores", "message"),
    [
        ([(0, 1)], [], "block_id 0 is not in 1 .. 6"),
        ([(7, 1)], [], "block_id 7 is not in 1 .. 6"),
        ([(1, 5)], [], "host_block_id 5 is not in 0 .. 4"),
        ([(1, -1)], [], "host_block_id -1 is not in 0 .. 4"),
        ([(1, 2), (3, 2)], [], "2 copies are of 1 distinct host blocks"),
        ([], [(5, 1)], "host_block_id 5 is not in 0 .. 4"),
        ([], [(1, 0)], "block_id 0 is not in 1 .. 6"),
        ([], [(1, 3), (2, 3)], "2 copies have 1 distinct targets"),
    ],
)
def test_what_cant_be_copied_is_refused_and_nothing_is_touched(
    pool: KVPool,
    host_pool: HostPool,
    offloads: list[tuple[int, int]],
    restores: list[tuple[int, int]],
    message: str,
) -> None:
    host_pool.offload([(6, 1), (6, 2)])  # as two that shared it
    before = pool.checksum_blocks(range(7))
    copy, pairs = (host_pool.offload, offloads) if offloads else (host_pool.restore, restores)
    with pytest.raises(ValueError, match=message):
        copy(pairs)
    host_pool.restore([(1, 1)])
    assert pool.checksum_blocks([0, 1, *range(2, 7)]) == [before[0], before[6], *before[2:]]


def test_without_a_host_tier_nothing_can_be_copied(pool: KVPool) -> None:
    host_pool = make_host_pool(pool, num_blocks=0)
    host_pool.offload([])
    with pytest.raises(ValueError, match="host_block_id 0 is not in"):
        host_pool.offload([(1, 0)])


def test_memory_has_room_for_whole_blocks() -> None:
    def count(host_memory_bytes: int) -> int:
        return count_host_blocks(host_memory_bytes, bytes_per_block=100, free_memory_bytes=1000)

    assert [count(size) for size in (0, 100, 199, 1000)] == [0, 1, 1, 10]
    with pytest.raises(ValueError, match="99 bytes have no room for a block of 100 bytes"):
        count(99)
    with pytest.raises(ValueError, match="1001 bytes asked for, 1000 bytes free"):
        count(1001)


def test_rows_that_follow_one_another_are_copied_together() -> None:
    assert by_consecutive_rows([]) == []
    assert by_consecutive_rows([(4, 9), (2, 7), (3, 8), (7, 1), (0, 5)]) == [(0, [5]), (2, [7, 8, 9]), (7, [1])]
