"""The tensors that hold every layer's keys and values, in blocks.

The pool knows bytes, not owners: which block belongs to whom is decided by cachemgr, and checked before a step comes
here. Block 0 is the null block: its slots are zero, padding reads them, nobody owns it and nothing writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.worker.probe import LayerSpec

NULL_BLOCK = 0

_MIB = 2**20
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class KVPoolStatistics:
    """num_blocks counts the null block; num_bytes is what the tensors take."""

    num_blocks: int
    block_size: int
    num_layers: int
    bytes_per_block: int
    num_bytes: int
    num_blocks_copied: int


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks to allocate, and the arithmetic behind it in a line or two."""

    num_blocks: int
    explanation: str


class KVPool:
    """Keys and values of all layers, allocated once.

    Sizes: B blocks, S block size (tokens), per layer H kv heads and head dims Dk, Dv.
        k(layer_idx)    [B, S, H, Dk]   contiguous, dtype and device of the pool
        v(layer_idx)    [B, S, H, Dv]
    """

    def __init__(
        self,
        specs: Mapping[int, LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Raises ValueError for a block count below 2 (one besides the null block) or a block size below 1."""
        _check_at_least("num_blocks", num_blocks, 2)
        _check_at_least("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.bytes_per_block = bytes_per_block(specs, block_size, dtype)
        self._num_blocks_copied = 0
        self._k = {i: self._allocate(spec.num_kv_heads, spec.k_head_dim) for i, spec in specs.items()}
        self._v = {i: self._allocate(spec.num_kv_heads, spec.v_head_dim) for i, spec in specs.items()}

    def _allocate(self, num_kv_heads: int, head_dim: int) -> Tensor:
        shape = (self.num_blocks, self.block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def k(self, layer_idx: int) -> Tensor:
        return self._k[layer_idx]

    def v(self, layer_idx: int) -> Tensor:
        return self._v[layer_idx]

    def tensors(self) -> list[Tensor]:
        """All K and V tensors, by rising layer index, K before V."""
        return [tensor for i in sorted(self._k) for tensor in (self._k[i], self._v[i])]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer.

        Sources and targets must be disjoint, so that the order of the pairs cannot matter. Raises ValueError, with
        nothing copied, if they are not, if a target comes twice, or if a block is the null block or out of range.
        Cost: two indexed operations per tensor, whatever the number of pairs.
        """
        if not pairs:
            return
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        self._check_copy(sources, targets)
        index = torch.tensor([sources, targets], dtype=torch.int64).to(self.device, non_blocking=True)
        for tensor in self.tensors():
            tensor.index_copy_(0, index[1], tensor.index_select(0, index[0]))
        self._num_blocks_copied += len(pairs)

    def _check_copy(self, sources: list[int], targets: list[int]) -> None:
        self._check_owned_ids(sources + targets)
        repeated = len(targets) - len(set(targets))
        if repeated:
            raise ValueError(f"{repeated} of {len(targets)} block copies have a target that another copy has")
        both = sorted(set(sources) & set(targets))
        if both:
            raise ValueError(f"block {both[0]} is both source and target of a block copy")

    def _check_owned_ids(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if not NULL_BLOCK < block_id < self.num_blocks:
                raise ValueError(f"block_id {block_id} is not in 1 .. {self.num_blocks - 1}")

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """Return one checksum per block, 0 .. 2**63 - 1, of its bytes in all layers: equal bytes, equal checksum.

        Reads the blocks and waits for the device: for audits and tests, not for the step. Raises ValueError for a
        block out of range; the null block is allowed.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block_id {block_id} is not in 0 .. {self.num_blocks - 1}")
        if not block_ids:
            return []
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
        total = torch.zeros(len(block_ids), dtype=torch.int64, device=self.device)
        for number, tensor in enumerate(self.tensors()):
            total = _mix(total + _byte_sum(tensor.index_select(0, index)) + number + 1)
        return [int(value) & (2**63 - 1) for value in total.tolist()]

    def statistics(self) -> KVPoolStatistics:
        return KVPoolStatistics(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_layers=len(self._k),
            bytes_per_block=self.bytes_per_block,
            num_bytes=self.num_blocks * self.bytes_per_block,
            num_blocks_copied=self._num_blocks_copied,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if the null block holds anything but zeros. Waits for the device."""
        for tensor in self.tensors():
            assert not bool(tensor[NULL_BLOCK].any()), "the null block was written"


def bytes_per_block(specs: Mapping[int, LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers, keys and values together."""
    elements_per_token = sum(spec.num_kv_heads * (spec.k_head_dim + spec.v_head_dim) for spec in specs.values())
    return elements_per_token * block_size * dtype.itemsize


def size_pool(
    *,
    bytes_per_block: int,
    free_memory_bytes: int,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    memory_share: float = 0.9,
) -> PoolSize:
    """Decide how many blocks to allocate: num_blocks, or what fits the bytes given, or a share of what is free.

    memory_share (0 < share <= 1) is the part of free_memory_bytes to take when neither of the others is given.
    Raises ValueError, naming field, value and limit, if both are given, if what is asked for exceeds what is free, or
    if fewer than 2 blocks (one besides the null block) fit.
    """
    if num_blocks is not None and kv_cache_memory_bytes is not None:
        raise ValueError(f"num_blocks={num_blocks} and kv_cache_memory_bytes={kv_cache_memory_bytes}: give one of them")
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share} is not in 0 < share <= 1")
    if num_blocks is not None:
        return _size_by_count(num_blocks, bytes_per_block, free_memory_bytes)
    if kv_cache_memory_bytes is not None:
        budget_bytes, origin = kv_cache_memory_bytes, "kv_cache_memory_bytes"
        _check_fits("kv_cache_memory_bytes", kv_cache_memory_bytes, free_memory_bytes)
    else:
        budget_bytes = int(free_memory_bytes * memory_share)
        origin = f"memory_share {memory_share:g} of {_readable(free_memory_bytes)} free"
    fitting = budget_bytes // bytes_per_block
    if fitting < 2:
        raise ValueError(
            f"{origin}: {budget_bytes} bytes hold {fitting} blocks of {bytes_per_block} bytes; at least 2 are needed"
        )
    return PoolSize(
        fitting, f"{origin}: {_readable(budget_bytes)} // {bytes_per_block} bytes per block = {fitting} blocks"
    )


def _size_by_count(num_blocks: int, bytes_per_block: int, free_memory_bytes: int) -> PoolSize:
    _check_at_least("num_blocks", num_blocks, 2)
    needed_bytes = num_blocks * bytes_per_block
    _check_fits(f"num_blocks={num_blocks} * {bytes_per_block} bytes per block", needed_bytes, free_memory_bytes)
    return PoolSize(
        num_blocks,
        f"num_blocks: {num_blocks} * {bytes_per_block} bytes per block = {_readable(needed_bytes)} "
        f"of {_readable(free_memory_bytes)} free",
    )


def _check_at_least(field: str, value: int, limit: int) -> None:
    if value < limit:
        raise ValueError(f"{field}={value} is below {limit}")


def _check_fits(what: str, needed_bytes: int, free_memory_bytes: int) -> None:
    if needed_bytes > free_memory_bytes:
        raise ValueError(f"{what}: {needed_bytes} bytes asked for, {free_memory_bytes} bytes free")


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.2f} MiB"


def _byte_sum(blocks: Tensor) -> Tensor:
    """Sum over each block's bytes, each weighted by a mix of its place: [n] int64, wrapping. `blocks` is [n, ...]."""
    data = blocks.contiguous().view(torch.uint8).flatten(1).to(torch.int64)
    weights = _mix(torch.arange(1, data.shape[1] + 1, dtype=torch.int64, device=data.device)) | 1
    return (data * weights).sum(1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit: the finalizer of splitmix64."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
