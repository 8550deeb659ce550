"""The measured work: shapes of attention, batches of lengths, and the tensors for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LAYOUTS = ("interleaved", "heads first", "tokens first")
"""Order of the memory behind a layer's pool: [blocks, layers, 2, H, S, D], [layers, 2, blocks, H, S, D] and
[layers, 2, blocks, S, H, D]. The first is what Quire recommends: a block of all layers is one piece."""

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", BF16: "bf16", FP8: "fp8"}


@dataclass(frozen=True, slots=True)
class Heads:
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_query_heads}/{self.num_kv_heads}/{self.head_dim}"


@dataclass(frozen=True)
class Cell:
    """One batch for attention. query_lens are the new tokens of each sequence, seq_lens all of its tokens."""

    name: str
    heads: Heads
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int = 16
    q_dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    layout: str = LAYOUTS[0]

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    @property
    def kv_bytes(self) -> int:
        """Keys and values that have to be read once."""
        return 2 * sum(self.seq_lens) * self.heads.num_kv_heads * self.heads.head_dim * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        """The operations of the two matrix products, a multiplication and an addition each, over the visible keys."""
        pairs = sum(
            count * (length - count) + count * (count + 1) // 2
            for count, length in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * pairs * self.heads.num_query_heads * self.heads.head_dim

    @property
    def num_blocks(self) -> int:
        """The blocks of all sequences and the null block."""
        return 1 + sum(math.ceil(length / self.block_size) for length in self.seq_lens)

    @property
    def pool_bytes(self) -> int:
        """The bytes of one layer."""
        return self.kv_bytes // sum(self.seq_lens) * self.num_blocks * self.block_size

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name,
            "heads": str(self.heads),
            "block_size": self.block_size,
            "q_dtype": DTYPE_NAMES[self.q_dtype],
            "kv_dtype": DTYPE_NAMES[self.kv_dtype],
            "layout": self.layout,
            "num_seqs": len(self.seq_lens),
            "num_query_tokens": sum(self.query_lens),
            "num_keys": sum(self.seq_lens),
            "kv_bytes": self.kv_bytes,
            "flops": self.flops,
        }


class Tensors:
    """A cell's tensors: one batch, and as many layers of keys and values as it takes to keep them out of the cache.

    q, out          [N, Hq, D]          q_dtype
    pools           per layer [B, S, H, D] for keys and for values, views of the cell's layout
    block_tables    [n, M]              int32, blocks shuffled, block 0 behind a sequence's end
    seq_lens        [n]                 int32
    cu_seqlens_q    [n+1]               int32
    """

    def __init__(self, cell: Cell, device: torch.device, *, num_layers: int, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        heads = cell.heads
        self.cell = cell
        self.device = device
        self.scaling = heads.head_dim**-0.5
        shape = (sum(cell.query_lens), heads.num_query_heads, heads.head_dim)
        self.q = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(cell.q_dtype)
        self.out = torch.empty_like(self.q)
        self.seq_lens = torch.tensor(cell.seq_lens, dtype=torch.int32, device=device)
        bounds = torch.tensor((0, *cell.query_lens)).cumsum(0)
        self.cu_seqlens_q = bounds.to(device, torch.int32)
        self.block_tables = _block_tables(cell, seed).to(device)
        self.pools = list(_pools(cell, device, num_layers, generator))

    @cached_property
    def slot_mapping(self) -> Tensor:
        """[N] int64, where the new tokens go."""
        size = self.cell.block_size
        tables = self.block_tables.cpu().tolist()
        slots = [
            tables[seq][position // size] * size + position % size
            for seq, (count, length) in enumerate(zip(self.cell.query_lens, self.cell.seq_lens, strict=True))
            for position in range(length - count, length)
        ]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)


def _block_tables(cell: Cell, seed: int) -> Tensor:
    counts = [math.ceil(length / cell.block_size) for length in cell.seq_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).to(torch.int32) + 1
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, ids in zip(tables, order.split(counts), strict=True):
        row[: len(ids)] = ids
    return tables


def _pools(
    cell: Cell, device: torch.device, num_layers: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    blocks, size, heads = cell.num_blocks, cell.block_size, cell.heads
    if cell.layout == "interleaved":
        memory = _random((blocks, num_layers, 2, heads.num_kv_heads, size, heads.head_dim), cell, device, generator)
        layers = memory.permute(1, 2, 0, 4, 3, 5)
    elif cell.layout == "heads first":
        memory = _random((num_layers, 2, blocks, heads.num_kv_heads, size, heads.head_dim), cell, device, generator)
        layers = memory.transpose(3, 4)
    else:
        layers = _random((num_layers, 2, blocks, size, heads.num_kv_heads, heads.head_dim), cell, device, generator)
    for layer in layers:
        yield layer[0], layer[1]


def _random(shape: tuple[int, ...], cell: Cell, device: torch.device, generator: torch.Generator) -> Tensor:
    if cell.kv_dtype.itemsize > 1:
        return torch.empty(shape, dtype=cell.kv_dtype, device=device).normal_(generator=generator)
    memory = torch.empty(shape, dtype=cell.kv_dtype, device=device)
    flat, piece = memory.view(-1), 1 << 28  # there is no normal_ for fp8, and not the memory to convert all at once
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece]
        part.copy_(torch.randn(part.shape, generator=generator, device=device, dtype=torch.float16))
    return memory


def uniform(
    heads: Heads,
    num_seqs: int,
    context: int,
    *,
    jitter: float = 0.25,
    block_size: int = 16,
    kv_dtype: torch.dtype = BF16,
) -> Cell:
    """A decode of num_seqs sequences of `context` tokens in the mean, each by up to `jitter` longer or shorter."""
    generator = torch.Generator().manual_seed(num_seqs * 1_000_003 + context)
    spread = (torch.rand(num_seqs // 2, generator=generator) * 2 - 1) * jitter * context
    middle = [context] * (num_seqs % 2)
    offsets = [round(float(each)) for each in spread]
    lens = [context + each for each in offsets] + [context - each for each in offsets] + middle
    name = f"{num_seqs}x{context // 1024}k" if context >= 1024 else f"{num_seqs}x{context}"
    return Cell(name, heads, (1,) * num_seqs, tuple(lens), block_size=block_size, kv_dtype=kv_dtype)
