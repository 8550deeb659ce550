"""The KV pool: geometry, copies, checksums and how its size is found."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from layers import UNEVEN_LAYERS, causal_layer

from quire.kernels import reference
from quire.worker.memory.kv_pool import KVPool, KVPoolStatistics, bytes_per_block
from quire.worker.memory.layer_groups import LayerGroup
from quire.worker.memory.layer_spec import Causal, Sliding
from quire.worker.memory.pool_size import share_of_device, size_pool

BLOCK_SIZE = 4


def make_pool(*, num_blocks: int = 7, dtype: torch.dtype = torch.float32) -> KVPool:
    """A pool with random numbers in all blocks but the null block."""
    pool = KVPool(UNEVEN_LAYERS, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in pool.tensors():
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(dtype)
    return pool


def test_geometry_and_bytes() -> None:
    pool = KVPool(UNEVEN_LAYERS, num_blocks=5, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device="cpu")
    assert pool.k(0).shape == pool.v(0).shape == (5, 4, 2, 8)
    assert pool.k(3).shape == (5, 4, 1, 6)
    assert pool.v(3).shape == (5, 4, 1, 4)
    assert all(tensor.dtype == torch.bfloat16 and not tensor.any() for tensor in pool.tensors())
    assert bytes_per_block(UNEVEN_LAYERS, BLOCK_SIZE, torch.bfloat16) == 4 * (2 * 16 + 10) * 2
    assert pool.statistics() == KVPoolStatistics(
        num_blocks=5,
        block_size=4,
        num_layers=2,
        bytes_per_block=336,
        num_bytes=sum(tensor.nbytes for tensor in pool.tensors()),
        num_blocks_copied=0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_blocks_in_every_layer_bit_for_bit(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    pairs = [(1, 4), (2, 6), (1, 3)]
    expected = [tensor.clone() for tensor in pool.tensors()]
    for tensor in expected:
        sources, targets = torch.tensor(pairs).T
        reference.copy_blocks(tensor, sources=sources, targets=targets)
    pool.copy_blocks(pairs)
    assert all(torch.equal(a, b) for a, b in zip(pool.tensors(), expected, strict=True))
    assert pool.statistics().num_blocks_copied == 3
    pool.copy_blocks([])
    assert pool.statistics().num_blocks_copied == 3


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 2), (2, 3)], "block 2 is both source and target"),
        ([(1, 1)], "block 1 is both source and target"),
        ([(1, 3), (2, 3)], "1 of 2 block copies have a target that another copy has"),
        ([(0, 3)], r"block_id 0 is not in 1 \.\. 6"),
        ([(3, 0)], r"block_id 0 is not in 1 \.\. 6"),
        ([(1, 7)], r"block_id 7 is not in 1 \.\. 6"),
        ([(-1, 2)], r"block_id -1 is not in 1 \.\. 6"),
    ],
)
def test_a_refused_copy_changes_nothing(pairs: list[tuple[int, int]], message: str) -> None:
    pool = make_pool()
    before = [tensor.clone() for tensor in pool.tensors()]
    with pytest.raises(ValueError, match=message):
        pool.copy_blocks(pairs)
    assert all(torch.equal(a, b) for a, b in zip(pool.tensors(), before, strict=True))
    assert pool.statistics().num_blocks_copied == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_tell_contents_apart(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    before = pool.checksum_blocks(range(7))
    assert len(set(before)) == 7
    assert all(0 <= checksum < 2**63 for checksum in before)
    pool.copy_blocks([(2, 5)])
    after = pool.checksum_blocks([5, 2, 1])
    assert after == [before[2], before[2], before[1]]
    assert pool.checksum_blocks([]) == []


def test_every_byte_of_every_layer_counts_and_so_does_its_place() -> None:
    pool = make_pool()
    seen = {pool.checksum_blocks([2])[0]}
    for tensor in pool.tensors():
        block = tensor[2].view(torch.uint8).view(-1)
        for place in range(0, len(block), 5):
            block[place] ^= 1
            seen.add(pool.checksum_blocks([2])[0])
            block[place] ^= 1
    num_changes = sum(len(range(0, tensor[2].nbytes, 5)) for tensor in pool.tensors())
    assert len(seen) == 1 + num_changes
    swapped = pool.k(0)[2].clone()
    pool.k(0)[2] = swapped.flip(0)
    assert pool.checksum_blocks([2])[0] not in seen


def test_checksums_are_the_same_in_every_release() -> None:
    pool = KVPool(UNEVEN_LAYERS, num_blocks=3, block_size=BLOCK_SIZE, dtype=torch.float32, device="cpu")
    pool.k(0)[1, 0, 0, 0] = 1.0
    assert pool.checksum_blocks([0, 1]) == KNOWN_CHECKSUMS


KNOWN_CHECKSUMS = [9052480875368779950, 7954876450735217099]


def test_checksums_refuse_blocks_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"block_id 7 is not in 0 \.\. 6"):
        make_pool().checksum_blocks([1, 7])


def test_a_written_null_block_is_a_broken_invariant() -> None:
    pool = make_pool()
    pool.check_invariants()
    pool.v(3)[0, 1] = 0.5
    with pytest.raises(AssertionError, match="null block"):
        pool.check_invariants()


@pytest.mark.parametrize(("field", "value"), [("num_blocks", 1), ("block_size", 0)])
def test_a_pool_too_small_is_refused(field: str, value: int) -> None:
    sizes = {"num_blocks": 2, "block_size": 1} | {field: value}
    with pytest.raises(ValueError, match=f"{field}={value} is below"):
        KVPool(UNEVEN_LAYERS, dtype=torch.float32, device="cpu", **sizes)


class TestSize:
    def test_a_share_of_what_is_free(self) -> None:
        size = size_pool(bytes_per_block=1000, free_memory_bytes=1 << 30, memory_share=0.5)
        assert size.num_blocks == (1 << 29) // 1000
        assert size.explanation == (
            "--memory-share 0.5 of 1.00 GiB free: 512.00 MiB // 1000 bytes per block = 536870 blocks"
        )

    def test_bytes_given(self) -> None:
        size = size_pool(bytes_per_block=1 << 20, free_memory_bytes=8 << 30, kv_cache_memory_bytes=2 << 30)
        assert size.num_blocks == 2048
        assert size.explanation == "--kv-cache-memory: 2.00 GiB // 1048576 bytes per block = 2048 blocks"

    def test_blocks_given(self) -> None:
        size = size_pool(bytes_per_block=1 << 20, free_memory_bytes=8 << 30, num_blocks=1024)
        assert size.num_blocks == 1024
        assert size.explanation == ("--num-blocks 1024 * 1048576 bytes per block = 1.00 GiB of 8.00 GiB free")

    def test_exactly_what_is_free_fits(self) -> None:
        assert size_pool(bytes_per_block=100, free_memory_bytes=200, num_blocks=2).num_blocks == 2
        assert size_pool(bytes_per_block=100, free_memory_bytes=200, kv_cache_memory_bytes=200).num_blocks == 2
        assert size_pool(bytes_per_block=100, free_memory_bytes=299, memory_share=1.0).num_blocks == 2

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"memory_share": 0.0}, r"--memory-share 0\.0 is not in 0 < share <= 1"),
            ({"memory_share": 1.1}, r"--memory-share 1\.1"),
            ({"num_blocks": 1}, "--num-blocks=1 is below 2"),
            ({"num_blocks": 11}, r"--num-blocks 11 \* 100 bytes per block: 1100 bytes asked for, 1000 bytes free"),
            ({"kv_cache_memory_bytes": 1001}, "--kv-cache-memory: 1001 bytes asked for, 1000 bytes free"),
            ({"kv_cache_memory_bytes": 199}, "199 bytes hold 1 blocks of 100 bytes; at least 2"),
            ({"memory_share": 0.1}, "--memory-share 0.1 of 0.00 MiB free: 100 bytes hold 1 blocks"),
        ],
    )
    def test_what_cannot_be_is_refused(self, arguments: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            size_pool(bytes_per_block=100, free_memory_bytes=1000, **arguments)  # type: ignore[arg-type]


class TestOneTensor:
    """Layers of one geometry in one tensor, [blocks, layers, 2, H, S, D]."""

    UNIFORM: ClassVar = {i: causal_layer(i, num_kv_heads=2, k_head_dim=8, v_head_dim=8) for i in (0, 3)}

    def pools(self, dtype: torch.dtype = torch.float32) -> tuple[KVPool, KVPool]:
        """The same content in one tensor, and in one each."""
        one, each = (
            KVPool(
                self.UNIFORM,
                num_blocks=7,
                block_size=BLOCK_SIZE,
                dtype=dtype,
                device="cpu",
                in_one_tensor=in_one_tensor,
            )
            for in_one_tensor in (True, False)
        )
        generator = torch.Generator().manual_seed(0)
        for tensors in zip(one.tensors(), each.tensors(), strict=True):
            content = torch.randn(tensors[0][1:].shape, generator=generator).to(dtype)
            for tensor in tensors:
                tensor[1:] = content
        return one, each

    def test_a_block_is_one_run_of_bytes_and_a_heads_keys_in_it_too(self) -> None:
        one, each = self.pools()
        keys = one.k(3)
        assert keys.shape == each.k(3).shape
        assert keys.stride() == (2 * 2 * 2 * 4 * 8, 8, 4 * 8, 1)
        assert keys.data_ptr() - one.k(0).data_ptr() == 2 * one.bytes_per_block // 4
        assert one.statistics() == each.statistics()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
    def test_copies_and_checksums_are_those_of_single_tensors(self, dtype: torch.dtype) -> None:
        one, each = self.pools(dtype)
        blocks = list(range(7))
        assert one.checksum_blocks(blocks) == each.checksum_blocks(blocks)
        assert len(set(one.checksum_blocks(blocks))) == 7
        for pool in (one, each):
            pool.copy_blocks([(1, 4), (2, 6)])
            pool.check_invariants()
            assert pool.checksum_blocks([4, 6]) == pool.checksum_blocks([1, 2])
        assert one.checksum_blocks(blocks) == each.checksum_blocks(blocks)

    def test_a_written_null_block_is_noticed_in_float8(self) -> None:
        one, _ = self.pools(torch.float8_e4m3fn)
        one.v(3)[0, 2, 1, 5] = 1.0
        with pytest.raises(AssertionError, match="null block"):
            one.check_invariants()

    def test_layers_that_differ_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match="the layers differ"):
            KVPool(UNEVEN_LAYERS, num_blocks=3, block_size=4, dtype=torch.float32, device="cpu", in_one_tensor=True)


class TestLayerGroups:
    """Five layers in three groups of up to two: a block has two places."""

    LAYERS: ClassVar = {i: causal_layer(i, num_kv_heads=2, k_head_dim=8, v_head_dim=8) for i in range(5)}
    GROUPS = (LayerGroup(Causal(), (1, 3)), LayerGroup(Sliding(8), (0, 2)), LayerGroup(Sliding(8), (4,)))

    def pool(self, *, in_one_tensor: bool) -> KVPool:
        sizes = {"num_blocks": 7, "block_size": BLOCK_SIZE}
        options = {"device": "cpu", "in_one_tensor": in_one_tensor}
        return KVPool(self.LAYERS, groups=self.GROUPS, dtype=torch.float32, **sizes, **options)  # type: ignore[arg-type]

    @pytest.mark.parametrize("in_one_tensor", [True, False])
    def test_a_block_has_the_places_of_one_group(self, in_one_tensor: bool) -> None:
        pool = self.pool(in_one_tensor=in_one_tensor)
        per_layer = bytes_per_block({0: self.LAYERS[0]}, BLOCK_SIZE, torch.float32)
        assert pool.bytes_per_block == 2 * per_layer
        assert (pool.statistics().num_layers, pool.statistics().num_bytes) == (5, 7 * 2 * per_layer)
        assert [pool.group_of(layer) for layer in range(5)] == [1, 0, 1, 0, 2]
        assert pool.windowed == [False, True, True]
        assert pool.k(0).data_ptr() == pool.k(1).data_ptr() == pool.k(4).data_ptr()
        assert pool.v(2).data_ptr() == pool.v(3).data_ptr() != pool.v(0).data_ptr()
        assert sum(tensor.nbytes for tensor in pool.block_tensors) == pool.statistics().num_bytes

    def test_a_copy_moves_all_places_of_a_block(self) -> None:
        pool = self.pool(in_one_tensor=False)
        pool.k(4)[2], pool.v(3)[2] = 1.0, 2.0
        pool.copy_blocks([(2, 5)])
        assert pool.checksum_blocks([2]) == pool.checksum_blocks([5]) != pool.checksum_blocks([3])
        assert bool((pool.k(1)[5] == 1).all())
        assert bool((pool.v(2)[5] == 2).all())


class TestShareOfDevice:
    GIB = 1 << 30

    def test_leaves_what_is_in_use_and_what_a_step_takes(self) -> None:
        budget = share_of_device(
            0.9,
            total_bytes=140 * self.GIB,
            used_bytes=17 * self.GIB,
            step_bytes=3 * self.GIB,
            graph_bytes=2 * self.GIB,
        )
        assert budget.num_bytes == 104 * self.GIB
        assert budget.origin == (
            "--memory-share 0.9 of 140.00 GiB, less 17.00 GiB in use, 2.00 GiB for CUDA graphs "
            "and 3.00 GiB for the largest step"
        )
        size = size_pool(bytes_per_block=1 << 21, free_memory_bytes=120 * self.GIB, default=budget)
        assert size.num_blocks == 104 * 512
        assert size.explanation.endswith("largest step: 104.00 GiB // 2097152 bytes per block = 53248 blocks")

    def test_nothing_left_is_said(self) -> None:
        budget = share_of_device(0.5, total_bytes=1000, used_bytes=600, step_bytes=100)
        assert budget.num_bytes == -200
        with pytest.raises(ValueError, match="the largest step: -200 bytes hold 0 blocks of 10 bytes; at least 2"):
            size_pool(bytes_per_block=10, free_memory_bytes=300, default=budget)

    def test_what_is_asked_for_comes_first(self) -> None:
        budget = share_of_device(0.5, total_bytes=1000, used_bytes=600, step_bytes=100)
        assert size_pool(bytes_per_block=10, free_memory_bytes=300, num_blocks=30, default=budget).num_blocks == 30
        with pytest.raises(ValueError, match="310 bytes asked for, 300 bytes free"):
            size_pool(bytes_per_block=10, free_memory_bytes=300, num_blocks=31, default=budget)

    def test_refuses_a_share_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="--memory-share 2 is not in"):
            share_of_device(2, total_bytes=1, used_bytes=0, step_bytes=0)
