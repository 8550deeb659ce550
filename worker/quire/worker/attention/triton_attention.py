"""Attention of a step in Triton's kernels; quire.worker.attention.torch_attention is the same in torch.

Sequences with one query go through the decode kernel, under a work list that all layers with the same mask share, and
the others through the prefill kernel; a step of both is two launches a layer. With fixed tiles
(quire.kernels.fixed_tiles) all go through the prefill kernel, so that a token has the same bits in both. Lengths are
read on the device: nothing here depends on numbers of the host, except which sequences have one query, so a step of
fixed sizes can be captured.

Layers of sizes that the kernels don't take run in torch, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.cache_write import write_kv
from quire.kernels.decode_plan import DecodePlan, build_decode_plan
from quire.kernels.fixed_tiles import are_fixed_tiles_used
from quire.kernels.launching import BLOCK_SIZES, MAX_HEAD_DIM
from quire.kernels.paged_decode import num_decode_programs, num_head_tiles, paged_decode
from quire.kernels.paged_prefill import paged_prefill
from quire.worker.attention.torch_attention import AttentionStep, Workspace
from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import Chunked, LayerSpec, Mask, Sliding
from quire.worker.memory.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class Part:
    """n sequences of a step, all of one query or all of several.

    tokens          which of the step's: a range, or [N] int64
    block_tables    [n, M]  int32, for each layer group
    seq_lens        [n]     int32
    cu_seqlens_q    [n+1]   int32, from 0, or None for one query each
    """

    tokens: slice | Tensor
    block_tables: tuple[Tensor, ...]
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        return x[self.tokens] if isinstance(self.tokens, slice) else x.index_select(0, self.tokens)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The arguments of a layer's decode kernel that are the same in all steps."""

    num_programs: int
    num_head_tiles: int
    window: int | None
    chunk: int | None


# Layers with kept constants: more than a model has.
MAX_LAYERS = 1024


@lru_cache(maxsize=MAX_LAYERS)
def why_torch(spec: LayerSpec) -> str | None:
    """Return the reason why the kernels can't run this layer's attention, None if they can."""
    for head_dim in (spec.k_head_dim, spec.v_head_dim):
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"head dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if spec.scaling <= 0:
        return f"scaling {spec.scaling:g} is not above 0"
    return None


class TritonAttentionStep(AttentionStep):
    """An AttentionStep for a pool with one of BLOCK_SIZES."""

    min_block_size = min(BLOCK_SIZES)

    def __init__(
        self, batch: StepBatch, pool: KVPool, *, specs: Mapping[int, LayerSpec], workspace: Workspace | None = None
    ) -> None:
        super().__init__(batch, pool, specs=specs, workspace=workspace)
        self._decodes, self._prompts = _divide(batch)
        self._decode_plans: dict[_Decoding, DecodePlan] = {}

    @classmethod
    def reads_lengths_on_device(cls, specs: Mapping[int, LayerSpec]) -> bool:
        """See AttentionStep.reads_lengths_on_device: unless a layer runs in torch."""
        return all(why_torch(spec) is None for spec in specs.values())

    @classmethod
    def describe(cls, specs: Mapping[int, LayerSpec]) -> str:
        """See AttentionStep.describe."""
        in_torch = {layer_idx: why for layer_idx, spec in specs.items() if (why := why_torch(spec)) is not None}
        exceptions = "".join(f"; layer {layer_idx} in torch: {why}" for layer_idx, why in in_torch.items())
        return f"triton in {len(specs) - len(in_torch)} of {len(specs)} layers{exceptions}"

    def write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """See AttentionStep.write. A slot of -1 skips its token."""
        if why_torch(self.specs[layer_idx]) is not None:
            super().write(layer_idx, k, v)
            return
        k_pool, v_pool = self.pool.k(layer_idx), self.pool.v(layer_idx)
        k, v = (_for_kernels(x, k_pool.dtype) for x in (k, v))
        slots, scales = self.slot_mapping(layer_idx), self.pool.scales(layer_idx)
        write_kv(k, v, k_pool, v_pool, slot_mapping=slots, kv_scales=scales)

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        new_kv: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See AttentionStep.attend. Rows of a sequence of length 0 on the device become 0. No sync."""
        spec, k_pool, v_pool = self.specs[layer_idx], self.pool.k(layer_idx), self.pool.v(layer_idx)
        if why_torch(spec) is not None:
            return super().attend(layer_idx, q, scaling=scaling, softcap=softcap, sinks=sinks, new_kv=new_kv, out=out)
        group = self.pool.group_of(layer_idx)
        queries = _for_kernels(q, k_pool.dtype)
        if sinks is not None:
            sinks = sinks.contiguous()
        wanted = out
        if out is None or out.dtype != queries.dtype:
            out = queries.new_empty(*queries.shape[:2], v_pool.shape[3])
        if self._decodes is not None:
            part = self._decodes
            result = paged_decode(
                part.take(queries), k_pool, v_pool, block_tables=part.block_tables[group], seq_lens=part.seq_lens,
                plan=self._decode_plan(spec, part), scaling=scaling, softcap=softcap, sinks=sinks,
                kv_scales=self.pool.scales(layer_idx), out=_view(out, part),
            )  # fmt: skip
            _put(result, out, part)
        if self._prompts is not None:
            part = self._prompts
            result = self._attend_prompts(
                layer_idx, part.take(queries), part, scaling=scaling, softcap=softcap, sinks=sinks,
                out=_view(out, part),
            )  # fmt: skip
            _put(result, out, part)
        if wanted is not None:
            return wanted if wanted is out else wanted.copy_(out)
        return out if out.dtype == q.dtype else out.to(q.dtype)

    def _attend_prompts(
        self,
        layer_idx: int,
        queries: Tensor,
        part: Part,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """Attend for the sequences with several queries: all tokens of `part`, in order. `out` is made if None."""
        assert part.cu_seqlens_q is not None
        window, chunk = _bounds(self.specs[layer_idx].mask)
        return paged_prefill(
            queries, self.pool.k(layer_idx), self.pool.v(layer_idx),
            block_tables=part.block_tables[self.pool.group_of(layer_idx)], seq_lens=part.seq_lens,
            cu_seqlens_q=part.cu_seqlens_q, scaling=scaling, window=window, chunk=chunk, softcap=softcap, sinks=sinks,
            kv_scales=self.pool.scales(layer_idx), out=out,
        )  # fmt: skip

    def _decode_plan(self, spec: LayerSpec, part: Part) -> DecodePlan:
        decoding = _decoding(spec, self.pool.dtype.itemsize, part.seq_lens.device)
        plan = self._decode_plans.get(decoding)
        if plan is None:
            plan = self._decode_plans[decoding] = build_decode_plan(
                part.seq_lens,
                block_tables=part.block_tables[0],  # only for slots in the plan, which are not used
                block_size=self.pool.block_size,
                num_programs=decoding.num_programs,
                max_head_tiles=decoding.num_head_tiles,
                window=decoding.window,
                chunk=decoding.chunk,
            )
        return plan


@lru_cache(maxsize=MAX_LAYERS)
def _decoding(spec: LayerSpec, kv_itemsize: int, device: torch.device) -> _Decoding:
    window, chunk = _bounds(spec.mask)
    sizes = {
        "num_query_heads": spec.num_query_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": max(spec.k_head_dim, spec.v_head_dim),
        "kv_itemsize": kv_itemsize,
    }
    return _Decoding(num_decode_programs(**sizes, device=device), num_head_tiles(**sizes), window, chunk)


def _divide(batch: StepBatch) -> tuple[Part | None, Part | None]:
    """The sequences with one query and the others; None where there are none. With fixed tiles all are others."""
    if are_fixed_tiles_used():
        return None, _part(batch, range(len(batch.counts_host)), ragged=True)
    decodes = [seq for seq, count in enumerate(batch.counts_host) if count == 1]
    prompts = [seq for seq, count in enumerate(batch.counts_host) if count > 1]
    return _part(batch, decodes, ragged=False), _part(batch, prompts, ragged=True)


def _part(batch: StepBatch, seqs: Sequence[int], *, ragged: bool) -> Part | None:
    if not seqs:
        return None
    begin, end = seqs[0], seqs[-1] + 1
    if end - begin > len(seqs):
        return _scattered_part(batch, seqs, ragged=ragged)
    firsts = [0, *accumulate(batch.counts_host)]
    cu_seqlens_q = batch.cu_seqlens_q[begin : end + 1]
    return Part(
        tokens=slice(firsts[begin], firsts[end]),
        block_tables=batch.block_tables[:, begin:end].unbind(),
        seq_lens=batch.seq_lens[begin:end],
        cu_seqlens_q=(cu_seqlens_q if begin == 0 else cu_seqlens_q - firsts[begin]) if ragged else None,
    )


def _scattered_part(batch: StepBatch, seqs: Sequence[int], *, ragged: bool) -> Part:
    """The part of sequences with others in between. Cost: one transfer, and a copy of their lengths and tables."""
    firsts = [0, *accumulate(batch.counts_host)]
    tokens = [token for seq in seqs for token in range(firsts[seq], firsts[seq + 1])]
    cu_seqlens = [0, *accumulate(batch.counts_host[seq] for seq in seqs)]
    packed = indices([*seqs, *tokens, *cu_seqlens], batch.seq_lens.device)
    device_seqs, device_tokens, device_cu_seqlens = torch.split(packed, [len(seqs), len(tokens), len(cu_seqlens)])
    return Part(
        tokens=device_tokens,
        block_tables=batch.block_tables.index_select(1, device_seqs).unbind(),
        seq_lens=batch.seq_lens.index_select(0, device_seqs),
        cu_seqlens_q=device_cu_seqlens.to(torch.int32) if ragged else None,
    )


def _bounds(mask: Mask) -> tuple[int | None, int | None]:
    """A mask as the kernels' window and chunk."""
    return mask.window if isinstance(mask, Sliding) else None, mask.chunk if isinstance(mask, Chunked) else None


def _for_kernels(x: Tensor, pool_dtype: torch.dtype) -> Tensor:
    """x in the pool's dtype, unless that is float8, which the kernels convert; the last dim contiguous."""
    if x.dtype != pool_dtype and pool_dtype.itemsize > 1:
        x = x.to(pool_dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(out: Tensor, part: Part) -> Tensor | None:
    """A view of out into which a kernel can write the part's rows itself."""
    return out[part.tokens] if isinstance(part.tokens, slice) else None


def _put(result: Tensor, out: Tensor, part: Part) -> None:
    if not isinstance(part.tokens, slice):
        out.index_copy_(0, part.tokens, result)
