"""One step's tensors for one kind of model, and every kernel at work on them, on any device.

On the meta device nothing is stored, and launches can be recorded (machine_code.py); on a GPU they run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.kernels.add_rmsnorm import add_rmsnorm, add_rmsnorm_float8
from quire.kernels.block_copy import BlockRuns, block_runs, copy_blocks
from quire.kernels.cache_write import write_kv
from quire.kernels.decode_plan import DecodePlan, build_decode_plan
from quire.kernels.float8_rows import float8_rows
from quire.kernels.int4_linear import Int4Weight, int4_dequantize, int4_linear
from quire.kernels.lora import LoraSlots, add_updates
from quire.kernels.merge_states import merge_states
from quire.kernels.offload import gather_blocks, scatter_blocks
from quire.kernels.paged_decode import num_decode_programs, paged_decode, workspace_size
from quire.kernels.paged_prefill import paged_prefill
from quire.kernels.qkv_prologue import qkv_prologue
from quire.kernels.reference import paged_attention
from quire.kernels.rope_table import make_rope_table
from quire.kernels.sampler import SamplerWorkspace, argmax, draw, sample
from quire.kernels.scaled_linear import ScaledWeight, scaled_dequantize, scaled_linear
from quire.kernels.silu_mul import silu_mul, silu_mul_float8
from quire.kernels.skinny_linear import SkinnyWorkspace

LAYOUTS = ("interleaved", "heads first", "tokens first")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model for kernels. Memory is [blocks, layers, 2, H, S, D] unless layout says otherwise."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    """None for the same."""
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    has_qk_norm: bool = False
    hidden: int = 4096
    intermediate: int = 14336
    vocab_size: int = 128256
    num_layers: int = 2
    layout: str = LAYOUTS[0]


class Batch:
    """A step: query_lens are the new tokens of each sequence, seq_lens all of its tokens, those included.

    Blocks of a sequence are in no order, block 0 belongs to no one, and slots of no token hold NaN.
    max_blocks is the width of the block tables, num_blocks the size of the pool, by default what these sequences need
    and 8 blocks. shifted: lengths, tables,
    slots and positions begin one element into their memory, as slices do.
    """

    def __init__(
        self,
        shape: Shape,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        device: torch.device,
        *,
        max_blocks: int | None = None,
        num_blocks: int | None = None,
        shifted: bool = False,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.device = device
        self._shifted = shifted
        self.query_lens = query_lens
        self._generator = torch.Generator().manual_seed(seed)
        counts = [math.ceil(length / shape.block_size) for length in seq_lens]
        self.num_blocks = num_blocks or 1 + sum(counts) + 8
        self.layers = self._pools(seq_lens, counts, max(max_blocks or 0, *counts, 1))
        num_tokens = sum(query_lens)
        self.q = self._random(num_tokens, shape.num_query_heads, shape.head_dim)
        width = (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = self._random(num_tokens, width)
        self.cu_seqlens_q = self._place(torch.tensor((0, *query_lens)).cumsum(0).to(torch.int32))
        self.max_q_len = max(query_lens)
        heads = torch.randn(shape.num_query_heads, generator=self._generator)
        self.sinks = heads.to(device) if shape.has_sinks else None
        self.alibi_slopes = heads.abs().to(device) if shape.has_alibi else None
        self.scaling = shape.head_dim**-0.5

    def _random(self, *size: int) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(size, dtype=self.shape.dtype, device="meta")
        return torch.randn(size, generator=self._generator).to(self.device, self.shape.dtype)

    def _place(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        return torch.cat([tensor[:1], tensor])[1:] if self._shifted else tensor

    def _pools(self, seq_lens: tuple[int, ...], counts: list[int], width: int) -> list[tuple[Tensor, Tensor]]:
        """Tables, lengths, slots, and keys and values per layer."""
        shape, size = self.shape, self.shape.block_size
        order = (torch.randperm(self.num_blocks - 1, generator=self._generator) + 1).tolist()
        tables = torch.zeros(len(counts), width, dtype=torch.int32)
        for row, count in zip(tables, counts, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        starts = [length - count for length, count in zip(seq_lens, self.query_lens, strict=True)]
        positions = [
            (row, position)
            for row, (start, length) in enumerate(zip(starts, seq_lens, strict=True))
            for position in range(start, length)
        ]
        slots = [int(tables[row, position // size]) * size + position % size for row, position in positions]
        self.block_tables = self._place(tables)
        self.seq_lens = self._place(torch.tensor(seq_lens, dtype=torch.int32))
        self.slot_mapping = self._place(torch.tensor(slots, dtype=torch.int64))
        self.positions = self._place(torch.tensor([position for _, position in positions], dtype=torch.int64))
        memory_shape = {
            "interleaved": (self.num_blocks, shape.num_layers, 2, shape.num_kv_heads, size, shape.head_dim),
            "heads first": (shape.num_layers, 2, self.num_blocks, shape.num_kv_heads, size, shape.head_dim),
            "tokens first": (shape.num_layers, 2, self.num_blocks, size, shape.num_kv_heads, shape.head_dim),
        }[shape.layout]
        dtype = shape.kv_dtype or shape.dtype
        self.memory = torch.empty(memory_shape, dtype=dtype, device=self.device).fill_(math.nan)
        layers = {
            "interleaved": lambda: self.memory.permute(1, 2, 0, 4, 3, 5),
            "heads first": lambda: self.memory.transpose(3, 4),
            "tokens first": lambda: self.memory,
        }[shape.layout]()
        pools = [(layer[0], layer[1]) for layer in layers]
        if self.device.type != "meta":
            self._fill(pools, seq_lens, tables)
        return pools

    def _fill(self, pools: list[tuple[Tensor, Tensor]], seq_lens: tuple[int, ...], tables: Tensor) -> None:
        size = self.shape.block_size
        for row, length in zip(tables.long(), seq_lens, strict=True):
            positions = torch.arange(length)
            places = (row[positions // size].to(self.device), (positions % size).to(self.device))
            for pool in (each for pair in pools for each in pair):
                values = torch.randn(length, *pool.shape[2:], generator=self._generator)
                pool[places] = values.to(self.device, pool.dtype)

    @property
    def attention(self) -> dict[str, Any]:
        """The common arguments of decode and prefill."""
        return {
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "scaling": self.scaling,
            "softcap": self.shape.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "kv_scales": self.kv_scales,
        }

    def become(self, other: Batch) -> None:
        """Hold what `other` holds, in the same memory. Both have as many sequences, tokens, blocks and blocks a row."""
        names = ("q", "qkv", "memory", "block_tables", "seq_lens", "cu_seqlens_q", "slot_mapping", "positions")
        optional = tuple(name for name in ("sinks", "alibi_slopes") if getattr(self, name) is not None)
        for name in names + optional:
            getattr(self, name).copy_(getattr(other, name))

    def exact_attention(self, *, layer: int = 0) -> Tensor:
        """[N, Hq, D] float64 on the CPU."""
        q, *pools = (each.float().cpu() for each in (self.q, *self.layers[layer]))
        arguments = {
            name: value.cpu() if isinstance(value, Tensor) else value for name, value in self.attention.items()
        }
        scales = arguments.pop("kv_scales")
        if scales is not None:
            pools = [pool * scale[:, None] for pool, scale in zip(pools, scales, strict=True)]
        return paged_attention(
            q,
            *pools,
            cu_seqlens_q=self.cu_seqlens_q.cpu(),
            window=self.shape.window,
            chunk=self.shape.chunk,
            **arguments,
        )

    def serve(self) -> None:
        """Launch every kernel of a step."""
        if self.max_q_len > 1:
            self.prefill()
        else:
            self.decode(self.plan())
        self.prologue()
        self.write()
        self.norm()
        self.activation()
        self.sample()
        self.copy([1], [2])

    def plan(self, *, fixed_split: int | None = None, out: DecodePlan | None = None) -> DecodePlan:
        shape = self.shape
        ragged = self.max_q_len > 1
        return build_decode_plan(
            self.seq_lens,
            block_tables=self.block_tables,
            block_size=shape.block_size,
            num_programs=num_decode_programs(
                num_query_heads=shape.num_query_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                kv_itemsize=(shape.kv_dtype or shape.dtype).itemsize,
                max_q_len=self.max_q_len,
                device=self.device,
            ),
            cu_seqlens_q=self.cu_seqlens_q if ragged else None,
            num_tokens=self.q.shape[0] if ragged else None,
            max_q_len=self.max_q_len,
            window=shape.window,
            chunk=shape.chunk,
            fixed_split=fixed_split,
            out=out,
        )

    def workspace(self, plan: DecodePlan) -> Tensor:
        size = workspace_size(plan, num_query_heads=self.shape.num_query_heads, head_dim=self.shape.head_dim)
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def decode(
        self, plan: DecodePlan, *, layer: int = 0, out: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        k_pool, v_pool = self.layers[layer]
        return paged_decode(
            self.q,
            k_pool,
            v_pool,
            plan=plan,
            cu_seqlens_q=self.cu_seqlens_q if self.max_q_len > 1 else None,
            out=out,
            workspace=workspace,
            **self.attention,
        )

    def prefill(
        self, *, layer: int = 0, out: Tensor | None = None, num_splits: int | None = None, **choices: bool
    ) -> Tensor:
        """Choices are fixed_tile, qk_ahead and descriptors."""
        return paged_prefill(
            self.q,
            *self.layers[layer],
            cu_seqlens_q=self.cu_seqlens_q,
            window=self.shape.window,
            chunk=self.shape.chunk,
            num_splits=num_splits,
            **choices,
            out=out,
            **self.attention,
        )

    def merge(self) -> Tensor:
        """Two results for the same queries, of which the second weighs nothing for every other head."""
        lses = torch.zeros(2, *self.q.shape[:2])
        lses[1, :, ::2] = -math.inf
        return merge_states(torch.stack([self.q, self.q.flip(0)]), lses.to(self.device))

    def write(self, *, layer: int = 0) -> None:
        """This step's keys and values, which are those of qkv without a rotation."""
        heads = self.qkv.view(self.qkv.shape[0], -1, self.shape.head_dim)[:, self.shape.num_query_heads :]
        k, v = heads.chunk(2, 1)
        write_kv(k, v, *self.layers[layer], slot_mapping=self.slot_mapping, kv_scales=self.kv_scales)

    def prologue(self, *, layer: int = 0) -> Tensor:
        return qkv_prologue(
            self.qkv,
            *self.layers[layer],
            slot_mapping=self.slot_mapping,
            positions=self.positions,
            rope_table=self.rope_table,
            q_norm_weight=self.head_weight,
            k_norm_weight=self.head_weight,
            kv_scales=self.kv_scales,
        )

    # Made when first asked for, and kept: nothing comes from the host while a graph is captured.

    @cached_property
    def kv_scales(self) -> Tensor | None:
        """Those of a pool of fp8, another one for each head."""
        if self.shape.kv_dtype != torch.float8_e4m3fn:
            return None
        return (1 + torch.arange(2 * self.shape.num_kv_heads) / 8).view(2, -1).to(self.device)

    @cached_property
    def rope_table(self) -> Tensor:
        dim = self.shape.head_dim
        inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        return make_rope_table(inv_freq, num_positions=4096).to(self.device)

    @cached_property
    def head_weight(self) -> Tensor | None:
        return self._random(self.shape.head_dim) if self.shape.has_qk_norm else None

    @cached_property
    def hidden(self) -> tuple[Tensor, Tensor, Tensor]:
        """x and the residual stream [N, hidden], and a norm's weight."""
        x, residual = (self._random(self.q.shape[0], self.shape.hidden) for _ in range(2))
        return x, residual, self._random(self.shape.hidden)

    @cached_property
    def gate_up(self) -> Tensor:
        return self._random(self.q.shape[0], 2 * self.shape.intermediate)

    @cached_property
    def logits(self) -> Tensor:
        return self._random(len(self.query_lens), self.shape.vocab_size)

    def norm(self) -> Tensor:
        x, residual, weight = self.hidden
        return add_rmsnorm(x, weight, eps=1e-6, residual=residual.clone())

    def update(self, *, max_rank: int = 16) -> None:
        """Updates of three adapters, and of none, behind the merged projection."""
        shape, x = self.shape, self.hidden[0]
        sizes = tuple(heads * shape.head_dim for heads in (shape.num_query_heads, *[shape.num_kv_heads] * 2))
        slots = LoraSlots.allocate(
            4, max_rank=max_rank, num_inputs=shape.hidden, sizes=sizes, dtype=shape.dtype, device=self.device
        )
        slots.ranks.fill_(max_rank)
        add_updates(self.qkv.clone(), x, slots, torch.arange(len(x), device=self.device) % 4)

    def int4_weight(self, *, is_reordered: bool = False) -> Int4Weight:
        """The MLP's way back with a weight of 4 bits, in groups of 128."""
        hidden, intermediate, device = self.shape.hidden, self.shape.intermediate, self.device
        return Int4Weight(
            torch.zeros(hidden, intermediate // 2, dtype=torch.uint8, device=device),
            torch.ones(intermediate // 128, hidden, device=device),
            torch.zeros(intermediate // 128, hidden, dtype=torch.uint8, device=device),
            torch.arange(intermediate, dtype=torch.int32, device=device) if is_reordered else None,
            128,
        )

    def int4_product(self, *, is_reordered: bool = False) -> Tensor:
        x, weight = self.gate_up[:, : self.shape.intermediate], self.int4_weight(is_reordered=is_reordered)
        return int4_linear(x, weight, workspace=SkinnyWorkspace.allocate(self.device))

    def int4_dequantized(self) -> Tensor:
        return int4_dequantize(self.int4_weight(), self.shape.dtype)

    def scaled_weight(self, dtype: torch.dtype = torch.float8_e4m3fn) -> ScaledWeight:
        """The MLP's way back with a weight of 8 bits, in blocks of 128 x 128."""
        hidden, intermediate, device = self.shape.hidden, self.shape.intermediate, self.device
        numbers = torch.zeros(hidden, intermediate, dtype=torch.uint8, device=device).view(dtype)
        return ScaledWeight(numbers, torch.ones(hidden // 128, intermediate // 128, device=device), (128, 128))

    def scaled_product(self, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        x = self.gate_up[:, : self.shape.intermediate]
        return scaled_linear(x, self.scaled_weight(dtype), workspace=SkinnyWorkspace.allocate(self.device))

    def scaled_dequantized(self, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        return scaled_dequantize(self.scaled_weight(dtype), self.shape.dtype)

    def activation(self) -> Tensor:
        gate, up = self.gate_up.chunk(2, -1)
        return silu_mul(gate, up)

    def write_float8(self) -> None:
        """Rows for products in float8: of a norm, of an activation, and of any other."""
        x, residual, weight = self.hidden
        add_rmsnorm_float8(x, weight, eps=1e-6, residual=residual.clone())
        silu_mul_float8(*self.gate_up.chunk(2, -1))
        float8_rows(x)

    def draw(self, *, filtered: bool = True) -> Tensor:
        """A token per sequence, drawn from what is above a threshold."""
        full = self._full
        return draw(
            self.logits,
            temperature=full(0.8, torch.float32),
            seeds=full(7, torch.int64),
            positions=full(3, torch.int64),
            thresholds=full(-2, torch.float32) if filtered else None,
        )

    def _full(self, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(self.query_lens),), value, dtype=dtype, device=self.device)

    def sample(self) -> tuple[Tensor, Tensor]:
        """A token per sequence, greedily and drawn."""
        num_seqs, vocab_size, full = len(self.query_lens), self.shape.vocab_size, self._full
        workspace = SamplerWorkspace.allocate(max_num_seqs=num_seqs, vocab_size=vocab_size, device=self.device)
        drawn = sample(
            self.logits,
            temperature=full(0.8, torch.float32),
            seeds=full(7, torch.int64),
            positions=full(3, torch.int64),
            workspace=workspace,
            top_k=full(50, torch.int64),
            top_p=full(0.9, torch.float64),
            min_p=full(0.01, torch.float64),
        )
        return argmax(self.logits, workspace=workspace), drawn

    def _blocks(self) -> BlockRuns:
        """All layers: one run of memory each where they are adjacent, else one per layer's keys and values."""
        if self.shape.layout == "interleaved":
            return block_runs([self.memory])
        return block_runs([pool for pools in self.layers for pool in pools])

    def copy(self, sources: list[int], targets: list[int]) -> None:
        blocks = self._blocks()
        ids = (torch.tensor(each, dtype=torch.int64).to(self.device) for each in (sources, targets))
        copy_blocks(blocks, sources=next(ids), targets=next(ids))

    def offload(self, block_ids: list[int]) -> Tensor:
        """Copy to memory on the same device, and back, all layers; returns the copy."""
        blocks = self._blocks()
        staging = torch.empty(len(block_ids), blocks.bytes_per_block, dtype=torch.uint8, device=self.device)
        gather_blocks(blocks, staging, block_ids=block_ids)
        scatter_blocks(blocks, staging, block_ids=block_ids)
        return staging
