"""The tensors that hold every layer's keys and values, in blocks.

The pool has bytes, not owners: cachemgr decides the holders of blocks, and a step is checked before it comes here.
Block 0 is the null block: its slots are zero, padding reads them, no sequence owns it and nothing writes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.worker.device.transfer import indices
from quire.worker.memory.layer_groups import LayerGroups, one_group, specs_of_places
from quire.worker.memory.layer_spec import KeptPerToken

if TYPE_CHECKING:
    from quire.kernels.block_copy import BlockRuns

NULL_BLOCK = 0

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Returns a tensor of this shape on the pool's device: zeros, or what an earlier pool has left."""


@dataclass(frozen=True, slots=True)
class KVPoolStatistics:
    """num_blocks counts the null block; num_bytes is the size of the tensors. num_layers are those of the model."""

    num_blocks: int
    block_size: int
    num_layers: int
    bytes_per_block: int
    num_bytes: int
    num_blocks_copied: int


class KVPool:
    """Keys and values of all layers, allocated once.

    Sizes: B blocks, S block size (tokens), L places for layers in a block, per layer H kv heads and head dims Dk, Dv.
        k(layer_idx)    [B, S, H, Dk]   D contiguous, dtype and device of the pool
        v(layer_idx)    [B, S, H, Dv]   a view of k(layer_idx) where values are in keys
    In one tensor these are views of [B, L, 2, H, S, D]: a block is one run of bytes, which is moved at once, and so are
    a head's keys of a block. Otherwise each is a contiguous tensor of its own. A block belongs to one of `groups` at a
    time: layers of several groups that have the same place have the same tensors, and other blocks.
    """

    def __init__(
        self,
        specs: Mapping[int, KeptPerToken],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: Mapping[int, Tensor] | None = None,
        groups: LayerGroups | None = None,
        in_one_tensor: bool | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """scales, by layer, are of a pool in float8: see quire.worker.memory.kv_scales. None: 1.

        groups are those of group_layers() for the specs; None: one for all layers. allocate None: new memory.

        in_one_tensor None: on a GPU, if all layers have one geometry.

        Raises ValueError for a block count below 2 (one besides the null block), a block size below 1, or layers that
        differ if they are to lie in one tensor.
        """
        _check_at_least("num_blocks", num_blocks, 2)
        _check_at_least("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.groups = one_group(specs) if groups is None else groups
        self._group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self._place_of = {layer: place for group in self.groups for place, layer in enumerate(group.layers)}
        places = specs_of_places(specs, self.groups)
        self.bytes_per_block = bytes_per_block(places, block_size, dtype)
        self._allocate_tensor = self._zeros if allocate is None else allocate
        self._num_blocks_copied = 0
        self._scales = dict(scales or {})
        if in_one_tensor is None:
            in_one_tensor = self.device.type == "cuda" and _have_one_geometry(places)
        self.block_tensors = self._allocate_one(places) if in_one_tensor else self._allocate_each(places)
        """[B, ...] each: what has to be moved to move a block."""
        self._runs = _block_runs(self.block_tensors) if kernels_run_on(self.device) and places else None

    @property
    def copies_by_kernel(self) -> bool:
        """True if one launch copies blocks; else torch copies them tensor by tensor."""
        return self._runs is not None

    def _allocate_one(self, places: Mapping[int, KeptPerToken]) -> list[Tensor]:
        if not _have_one_geometry(places):
            raise ValueError("the layers differ in kv heads or head dims: they do not fit one tensor")
        spec = next(iter(places.values()))
        shape = (self.num_blocks, len(places), 2, spec.num_kv_heads, self.block_size, spec.k_head_dim)
        whole = self._allocate_tensor(shape, self.dtype)
        self._k = {place: whole[:, place, 0].transpose(1, 2) for place in places}
        self._v = {place: whole[:, place, 1].transpose(1, 2) for place in places}
        self._has_values = dict.fromkeys(places, True)
        return [whole]

    def _allocate_each(self, places: Mapping[int, KeptPerToken]) -> list[Tensor]:
        self._k = {i: self._allocate(spec.num_kv_heads, spec.k_head_dim) for i, spec in places.items()}
        self._v = {
            i: self._k[i][..., : spec.v_head_dim]
            if spec.values_in_keys
            else self._allocate(spec.num_kv_heads, spec.v_head_dim)
            for i, spec in places.items()
        }
        self._has_values = {i: not spec.values_in_keys for i, spec in places.items()}
        return self.tensors()

    def _allocate(self, num_kv_heads: int, head_dim: int) -> Tensor:
        shape = (self.num_blocks, self.block_size, num_kv_heads, head_dim)
        return self._allocate_tensor(shape, self.dtype)

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def k(self, layer_idx: int) -> Tensor:
        return self._k[self._place_of[layer_idx]]

    def v(self, layer_idx: int) -> Tensor:
        return self._v[self._place_of[layer_idx]]

    def scales(self, layer_idx: int) -> Tensor | None:
        """Return the scales of a layer's keys and values, [2, H] float32; None if they are stored as they are."""
        return self._scales.get(layer_idx)

    def group_of(self, layer_idx: int) -> int:
        """The group of a layer: the number of the block table that its attention reads."""
        return self._group_of[layer_idx]

    @property
    def windowed(self) -> list[bool]:
        """One flag a group: True if blocks behind a window are given up, so that their entries in tables are null."""
        return [group.is_windowed for group in self.groups]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, by rising place in a block, K before V."""
        by_layer = ((self._k[i], self._v[i]) if self._has_values[i] else (self._k[i],) for i in sorted(self._k))
        return [tensor for tensors in by_layer for tensor in tensors]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer.

        Sources and targets must be disjoint, so that the order of the pairs cannot matter. Raises ValueError, with
        nothing copied, if they are not, if a target comes twice, or if a block is the null block or out of range.
        Cost: one launch where kernels run, else two indexed operations per tensor, whatever the number of pairs.
        """
        if not pairs:
            return
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        self._check_copy(sources, targets)
        index = indices([sources, targets], self.device)
        if self._runs is not None:
            from quire.kernels.block_copy import copy_blocks

            copy_blocks(self._runs, sources=index[0], targets=index[1])
        else:
            for tensor in map(indexable, self.block_tensors):
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
            total = _mix(total + _byte_sum(indexable(tensor).index_select(0, index)) + number + 1)
        return [int(value) & (2**63 - 1) for value in total.tolist()]

    def statistics(self) -> KVPoolStatistics:
        return KVPoolStatistics(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_layers=len(self._group_of),
            bytes_per_block=self.bytes_per_block,
            num_bytes=self.num_blocks * self.bytes_per_block,
            num_blocks_copied=self._num_blocks_copied,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if the null block holds anything but zeros. Waits for the device."""
        for tensor in self.tensors():
            assert not bool(indexable(tensor[NULL_BLOCK]).any()), "the null block was written"


def kernels_run_on(device: torch.device) -> bool:
    """True if quire.kernels run there: on a GPU, or anywhere in Triton's interpreter if the environment says so."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def bytes_of_blocks(tensor: Tensor) -> Tensor:
    """Return a view of a pool's tensor [B, ...], one of `block_tensors`: the bytes of each block, [B, n] uint8."""
    return tensor.view(torch.uint8).view(len(tensor), -1)


def indexable(tensor: Tensor) -> Tensor:
    """The tensor, or a view of float8 as uint8: torch does not index it on every device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _have_one_geometry(specs: Mapping[int, KeptPerToken]) -> bool:
    geometries = {(spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim) for spec in specs.values()}
    return len(geometries) == 1 and all(k_head_dim == v_head_dim for _, k_head_dim, v_head_dim in geometries)


def _block_runs(tensors: Sequence[Tensor]) -> BlockRuns | None:
    """Return the tensors' blocks for the kernel that copies them, None if it does not take blocks of such sizes."""
    from quire.kernels.block_copy import block_runs

    try:
        return block_runs(tensors)
    except ValueError:
        return None


def bytes_per_block(specs: Mapping[int, KeptPerToken], block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all its layers, keys and values together."""
    elements_per_token = sum(
        spec.num_kv_heads * (spec.k_head_dim + (0 if spec.values_in_keys else spec.v_head_dim))
        for spec in specs.values()
    )
    return elements_per_token * block_size * dtype.itemsize


def _check_at_least(field: str, value: int, limit: int) -> None:
    if value < limit:
        raise ValueError(f"{field}={value} is below {limit}")


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
