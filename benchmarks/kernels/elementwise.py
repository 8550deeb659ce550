"""The kernels besides attention: each at a few sizes of a Llama of 8 billion parameters, and the bytes it must move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from grids import DRY_HEADS, LLAMA
from ours import decode_plan
from report import summary
from timing import Call, Clock
from torch import Tensor
from workload import BF16, Cell, Heads, Tensors, uniform

from quire.kernels.add_rmsnorm import add_rmsnorm
from quire.kernels.block_copy import block_runs, copy_blocks
from quire.kernels.cache_write import write_kv
from quire.kernels.int4_linear import Int4Weight, int4_dequantize, int4_linear
from quire.kernels.lora import LoraSlots, add_updates
from quire.kernels.merge_states import merge_states
from quire.kernels.offload import gather_blocks, scatter_blocks
from quire.kernels.qkv_prologue import qkv_prologue
from quire.kernels.rope_table import make_rope_table
from quire.kernels.sampler import SamplerWorkspace, argmax, sample
from quire.kernels.scaled_linear import ScaledWeight, scaled_dequantize, scaled_linear
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import MAX_ROWS

NUM_ADAPTERS, RANK = 8, 16

OUTRUN_BYTES = 180 << 20
"""Three times the L2 cache of an H200: buffers take turns until they are as many bytes together."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call, and the bytes that it must read and write."""

    kernel: str
    size: str
    num_bytes: int
    samples_us: list[float]

    def as_json(self) -> dict[str, object]:
        about = {"kernel": self.kernel, "size": self.size, "num_bytes": self.num_bytes}
        return about | {"taken_us": summary(self.samples_us)}


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel at one size: calls over buffers that take turns."""

    kernel: str
    size: str
    num_bytes: int
    calls: Sequence[Call]

    def measure(self, clock: Clock) -> Timing:
        return Timing(self.kernel, self.size, self.num_bytes, clock.measure(self.calls))


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: Heads
    hidden: int
    intermediate: int
    tokens: tuple[int, ...]
    vocab_size: int
    num_layers: int
    num_copies: int
    num_seqs: tuple[int, ...]
    """Rows of logits."""
    decode: tuple[tuple[int, int], ...]
    """Batches and contexts."""


FULL = Sizes(
    heads=LLAMA,
    hidden=4096,
    intermediate=14336,
    tokens=(1, 32, 256, 8192),
    vocab_size=128256,
    num_layers=32,
    num_copies=64,
    num_seqs=(1, 32, 256),
    decode=((1, 8192), (8, 4096), (64, 4096), (256, 1024)),
)
DRY = Sizes(
    heads=DRY_HEADS,
    hidden=64,
    intermediate=128,
    tokens=(1, 3),
    vocab_size=300,
    num_layers=2,
    num_copies=2,
    num_seqs=(2,),
    decode=((2, 40),),
)


class Jobs:
    """Makes them, with bfloat16 on a GPU; in the interpreter float32, for bfloat16 is wrong there."""

    def __init__(self, device: torch.device, *, dry: bool) -> None:
        self._device = device
        self._sizes = DRY if dry else FULL
        self._dtype = torch.float32 if dry else BF16
        self._outrun = 0 if dry else OUTRUN_BYTES

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=torch.float32).to(self._dtype)

    def _turns(self, num_bytes: int) -> range:
        """The number of buffers that exceed the cache, at least one, at most 64."""
        return range(min(64, max(1, math.ceil(self._outrun / num_bytes))))

    def norms(self) -> Iterator[Job]:
        weight = self._random(self._sizes.hidden)
        for tokens in self._sizes.tokens:
            num_bytes = 4 * tokens * self._sizes.hidden * self._dtype.itemsize
            turns = [
                (self._random(tokens, self._sizes.hidden), self._random(tokens, self._sizes.hidden))
                for _ in self._turns(num_bytes)
            ]
            calls = [lambda x=x, r=r: add_rmsnorm(x, weight, eps=1e-6, residual=r, out=x) for x, r in turns]
            yield Job("add_rmsnorm", f"{tokens} tokens", num_bytes, calls)

    def activations(self) -> Iterator[Job]:
        for tokens in self._sizes.tokens:
            num_bytes = 3 * tokens * self._sizes.intermediate * self._dtype.itemsize
            turns = [self._random(tokens, 2 * self._sizes.intermediate).chunk(2, -1) for _ in self._turns(num_bytes)]
            outs = [torch.empty_like(gate) for gate, _ in turns]
            calls = [lambda g=g, u=u, o=o: silu_mul(g, u, out=o) for (g, u), o in zip(turns, outs, strict=True)]
            yield Job("silu_mul", f"{tokens} tokens", num_bytes, calls)

    def writes(self) -> Iterator[Job]:
        for tokens in self._sizes.tokens:
            tensors = self._batch(tokens)
            shape = (tokens, tensors.cell.heads.num_kv_heads, tensors.cell.heads.head_dim)
            k, v = self._random(*shape), self._random(*shape)
            calls = [partial(write_kv, k, v, *pools, slot_mapping=tensors.slot_mapping) for pools in tensors.pools]
            yield Job("write_kv", f"{tokens} tokens", 2 * (k.nbytes + v.nbytes), calls)

    def prologues(self) -> Iterator[Job]:
        """From the QKV projection to queries and the cache, with qk-norm."""
        heads = self._sizes.heads
        width = (heads.num_query_heads + 2 * heads.num_kv_heads) * heads.head_dim
        inv_freq = 10000.0 ** -(torch.arange(0, heads.head_dim, 2) / heads.head_dim)
        table = make_rope_table(inv_freq, num_positions=max(self._sizes.tokens)).to(self._device)
        weight = self._random(heads.head_dim)
        for tokens in self._sizes.tokens:
            tensors = self._batch(tokens)
            qkv = self._random(tokens, width)
            call = partial(
                qkv_prologue,
                slot_mapping=tensors.slot_mapping,
                positions=torch.arange(tokens, device=self._device),
                rope_table=table,
                q_norm_weight=weight,
                k_norm_weight=weight,
                out=tensors.out,
            )
            calls = [partial(call, qkv, *pools) for pools in tensors.pools]
            yield Job("qkv_prologue", f"{tokens} tokens", 2 * qkv.nbytes, calls)

    def merges(self) -> Iterator[Job]:
        """Merges of the results over a shared prefix and over the tokens after it."""
        heads = self._sizes.heads
        for tokens in self._sizes.tokens:
            parts = self._random(2, tokens, heads.num_query_heads, heads.head_dim)
            lses = torch.randn(parts.shape[:3], device=self._device)
            call = partial(merge_states, parts, lses, out=torch.empty_like(parts[0]))
            yield Job("merge_states", f"2 x {tokens} tokens", parts.nbytes // 2 * 3 + lses.nbytes, [call])

    def updates(self) -> Iterator[Job]:
        """Updates of adapters behind the QKV projection: decodes of adapters in turn, and a prompt of one."""
        heads, hidden = self._sizes.heads, self._sizes.hidden
        sizes = tuple(count * heads.head_dim for count in (heads.num_query_heads, *[heads.num_kv_heads] * 2))
        slots = LoraSlots.allocate(
            NUM_ADAPTERS, max_rank=RANK, num_inputs=hidden, sizes=sizes, dtype=self._dtype, device=self._device
        )
        slots.ranks.fill_(RANK)
        for tokens in self._sizes.tokens:
            num_adapters = 1 if tokens == max(self._sizes.tokens) else min(tokens, NUM_ADAPTERS)
            adapters = 1 + torch.arange(tokens, device=self._device) % num_adapters
            x, out = self._random(tokens, hidden), self._random(tokens, sum(sizes))
            num_bytes = x.nbytes + 2 * out.nbytes + slots.num_bytes * num_adapters // NUM_ADAPTERS
            call = partial(add_updates, out, x, slots, adapters)
            yield Job("add_updates", f"{tokens} tokens, {num_adapters} of rank {RANK}", num_bytes, [call])

    def int4_products(self) -> Iterator[Job]:
        """The MLP's way back with a weight of 4 bits."""
        num_outputs, num_inputs, group = self._sizes.hidden, self._sizes.intermediate, min(128, self._sizes.hidden)
        shape = (num_inputs // group, num_outputs)
        weight = Int4Weight(
            torch.randint(256, (num_outputs, num_inputs // 2), device=self._device).to(torch.uint8),
            torch.rand(shape, device=self._device),
            torch.full(shape, 8, dtype=torch.uint8, device=self._device),
            None,
            group,
        )
        weights = [weight.copy() for _ in self._turns(weight.num_bytes)]
        workspace = SkinnyWorkspace.allocate(self._device)
        for tokens in [each for each in self._sizes.tokens if each <= MAX_ROWS]:
            x = self._random(tokens, num_inputs)
            num_bytes = weight.num_bytes + x.nbytes + tokens * num_outputs * self._dtype.itemsize
            calls = [partial(int4_linear, x, each, workspace=workspace) for each in weights]
            yield Job("int4_linear", f"{tokens} tokens", num_bytes, calls)
        num_bytes = weight.num_bytes + num_outputs * num_inputs * self._dtype.itemsize
        yield Job("int4_dequantize", "", num_bytes, [partial(int4_dequantize, each, self._dtype) for each in weights])

    def scaled_products(self) -> Iterator[Job]:
        """The MLP's way back with a weight in float8, in blocks of 128 x 128."""
        num_outputs, num_inputs = self._sizes.hidden, self._sizes.intermediate
        numbers = torch.randn(num_outputs, num_inputs, device=self._device).to(torch.float8_e4m3fn)
        scales = torch.rand(math.ceil(num_outputs / 128), math.ceil(num_inputs / 128), device=self._device)
        num_weight_bytes = numbers.nbytes + scales.nbytes
        weights = [ScaledWeight(numbers.clone(), scales, (128, 128)) for _ in self._turns(num_weight_bytes)]
        workspace = SkinnyWorkspace.allocate(self._device)
        for tokens in [each for each in self._sizes.tokens if each <= MAX_ROWS]:
            x = self._random(tokens, num_inputs)
            num_bytes = num_weight_bytes + x.nbytes + tokens * num_outputs * self._dtype.itemsize
            calls = [partial(scaled_linear, x, each, workspace=workspace) for each in weights]
            yield Job("scaled_linear", f"{tokens} tokens", num_bytes, calls)
        num_bytes = num_weight_bytes + num_outputs * num_inputs * self._dtype.itemsize
        calls = [partial(scaled_dequantize, each, self._dtype) for each in weights]
        yield Job("scaled_dequantize", "", num_bytes, calls)

    def samples(self) -> Iterator[Job]:
        for count in self._sizes.num_seqs:
            num_bytes = count * self._sizes.vocab_size * self._dtype.itemsize
            turns = [self._random(count, self._sizes.vocab_size) for _ in self._turns(num_bytes)]
            workspace = SamplerWorkspace.allocate(
                max_num_seqs=count, vocab_size=self._sizes.vocab_size, device=self._device
            )
            greedy = [partial(argmax, logits, workspace=workspace) for logits in turns]
            yield Job("argmax", f"{count} rows", num_bytes, greedy)
            unfiltered = partial(
                sample,
                temperature=torch.full((count,), 0.8, device=self._device),
                seeds=torch.arange(count, device=self._device),
                positions=torch.arange(count, device=self._device),
                workspace=workspace,
            )
            draw = partial(
                unfiltered,
                top_k=torch.full((count,), 50, device=self._device),
                top_p=torch.full((count,), 0.9, dtype=torch.float64, device=self._device),
            )
            yield Job("sample, no filter", f"{count} rows", num_bytes, [partial(unfiltered, each) for each in turns])
            yield Job("sample, top-k and top-p", f"{count} rows", num_bytes, [partial(draw, each) for each in turns])

    def _batch(self, tokens: int) -> Tensors:
        """A prompt of so many tokens, in as many layers as outrun the cache."""
        dtypes = {"q_dtype": self._dtype, "kv_dtype": self._dtype}
        cell = Cell(f"{tokens} tokens", self._sizes.heads, (tokens,), (tokens,), **dtypes)
        return Tensors(cell, self._device, num_layers=len(self._turns(cell.pool_bytes)))

    def block_moves(self) -> Iterator[Job]:
        """Copy-on-write, and to staging and back, of blocks of all layers."""
        heads, count = self._sizes.heads, self._sizes.num_copies
        shape = (4 * count, self._sizes.num_layers, 2, heads.num_kv_heads, 16, heads.head_dim)
        blocks = block_runs([self._random(*shape)])
        order = torch.randperm(4 * count, generator=torch.Generator().manual_seed(0))
        ids = order.tolist()[:count]
        sources, targets = (part.to(self._device) for part in order.split(count)[:2])
        num_bytes = 2 * count * blocks.bytes_per_block
        name = f"{count} blocks of {blocks.bytes_per_block >> 10} KiB"
        yield Job("copy_blocks", name, num_bytes, [lambda: copy_blocks(blocks, sources=sources, targets=targets)])
        staging = torch.empty(count, blocks.bytes_per_block, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for kernel, move in (("gather_blocks", gather_blocks), ("scatter_blocks", scatter_blocks)):
            yield Job(
                kernel, f"{name}, pinned", num_bytes // 2, [lambda move=move: move(blocks, staging, block_ids=ids)]
            )

    def plans(self) -> Iterator[Job]:
        """The work that a decode step does once for all layers."""
        for num_seqs, context in self._sizes.decode:
            tensors = Tensors(uniform(self._sizes.heads, num_seqs, context), self._device, num_layers=1)
            plan = decode_plan(tensors)
            num_bytes = sum(
                each.nbytes
                for each in (
                    plan.programs,
                    plan.splits,
                    plan.token_splits,
                    plan.tickets,
                    plan.positions,
                    plan.slot_mapping,
                )
            )
            call = partial(decode_plan, tensors, out=plan)
            yield Job("build_decode_plan", tensors.cell.name, num_bytes, [call])


def jobs(device: torch.device, *, dry: bool) -> list[Job]:
    made = Jobs(device, dry=dry)
    groups = (
        made.norms,
        made.activations,
        made.writes,
        made.prologues,
        made.merges,
        made.updates,
        made.int4_products,
        made.scaled_products,
        made.samples,
        made.block_moves,
        made.plans,
    )
    return [job for group in groups for job in group()]
