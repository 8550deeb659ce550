"""Attention over the block pool, in torch operations that run on any device.

transformers calls paged_attention() for every layer, through its AttentionInterface, with the step's packed tokens.
ATTENTION_NAME is not in the AttentionMaskInterface on purpose: transformers then builds no mask, and a layer's mask
comes from its LayerSpec. In each layer the keys and values of all tokens are written before any sequence attends, so
a sequence may read a block that another one of the same step fills.

How a step is cut, once per layer group and kind of mask:

    sequences with one query        in groups of similar length; a group gathers its keys into a reused workspace,
                                    padded to its longest, and runs as one call
    a prompt from its first token   reads this step's own keys, if the caller has them: no gather
    a later part of a prompt        gathers from its first query's first position, then runs in tiles of queries

Only slots of tokens within a window are read, and padding reads the null block: a NaN in an unowned slot is never
read. Grouped query heads are folded into SDPA's query or batch dimension; enable_gqa leaves the flash path for bf16
on a CPU. Softcap and sinks, which SDPA does not support, take an exact form in float32. A pool of another dtype than
the model's holds rounded keys and values; they are converted back when they are read. In float8 each head has scales.

On a GPU quire.worker.attention.triton_attention runs instead; AttentionStep is the common interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.worker.device.profiling import phase
from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool, indexable
from quire.worker.memory.layer_spec import Chunked, LayerSpec, Mask, Sliding
from quire.worker.memory.step_batch import StepBatch

ATTENTION_NAME = "quire_paged"

# A group's padded keys are at most so many times what its sequences see, and take at most so many bytes, so that they
# are still in cache when read again. To gather keys takes about twice as long as to attend to them, so padding costs
# more than the calls of another group. Processor time of one thread of an Intel Xeon at 1.5, 1.2 and 1.1, in ms, 8
# layers with 4 heads of 64: 16 sequences of 20 to 350 tokens 17.3, 14.3, 14.9; 64 of 16 to 80 22.2, 18.7, 19.5.
GROUP_PADDING_RATIO = 1.2
GROUP_BYTES = 4 << 20

# Queries of a prompt that run together: bounds a tile's scores, and the keys read in vain at the edge of a window.
TILE_QUERIES = 256
TILE_SCORES = 1 << 23


class Slots:
    """Slots [n] int64 that all layers of a step read or write: one object for all of them.

    Where a pool is no contiguous tensor, its elements are found by block and offset. The first layer that needs these
    makes them, and the others take the same.
    """

    def __init__(self, flat: Tensor, block_size: int) -> None:
        self.flat = flat
        self._block_size = block_size

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """The block of each slot, and the offset in it."""
        return self.flat.div(self._block_size, rounding_mode="floor"), self.flat.remainder(self._block_size)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """n sequences with one query each, padded to `span` keys.

    token_indices   [n]             int64, or None for all tokens of the batch in order
    slots           [n * span]      slot 0 of the null block for padding
    hidden          [n, 1, 1, span] bool, True for padding, or None without padding
    bias            [n, 1, 1, span] dtype of queries, -inf for padding and 0 elsewhere, or None
    """

    num_seqs: int
    span: int
    token_indices: Tensor | None
    slots: Slots
    hidden: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """One sequence with several queries: tokens first .. first + count - 1 of the batch, at positions start and on.

    slots are those of positions key_start .. start + count - 1; None if the part's own tokens are taken for them.
    """

    first: int
    count: int
    start: int
    key_start: int
    slots: Slots | None


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    decode_groups: tuple[_DecodeGroup, ...]
    prompt_parts: tuple[_PromptPart, ...]


@dataclass(frozen=True, slots=True)
class _Score:
    """A layer's scores: q . k * scaling, capped, then masked, then a softmax over them and the sinks [Hq]."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def fits_sdpa(self) -> bool:
        return self.softcap is None and self.sinks is None


class Workspace:
    """Memory for gathered keys and values, kept from layer to layer and from step to step.

    Fresh temporaries of this size would be mapped and unmapped by the allocator in every layer.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def gather(self, name: str, pool: Tensor, slots: Slots) -> Tensor:
        """Return the slots' contents, [n, H, D], valid until the next gather under the same name."""
        if not pool.is_contiguous():
            return indexable(pool)[slots.places].view(pool.dtype)
        flat = indexable(pool).view(-1, *pool.shape[2:])
        shape = (slots.flat.shape[0], *pool.shape[2:])
        buffer = self._buffer(name, flat, shape[0] * flat[0].numel())
        return torch.index_select(flat, 0, slots.flat, out=buffer.view(shape)).view(pool.dtype)

    def _buffer(self, name: str, like: Tensor, size: int) -> Tensor:
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < size:
            # A tensor made in inference mode could never be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class AttentionStep:
    """The attention of one step: its inputs besides queries, keys and values.

    A layer reads and writes through the block tables and slots of its group in the pool. Plans are made once per group
    and kind of mask.
    """

    min_block_size: ClassVar[int] = 1
    """The least block size of a pool for it."""
    takes_any_kv_dtype: ClassVar[bool] = True
    """True if a pool may have another dtype than the model."""

    def __init__(
        self, batch: StepBatch, pool: KVPool, *, specs: Mapping[int, LayerSpec], workspace: Workspace | None = None
    ) -> None:
        self.batch = batch
        self.pool = pool
        self.specs = specs
        self.workspace = workspace or Workspace()
        key_bytes = max(spec.num_kv_heads * spec.k_head_dim for spec in specs.values()) * pool.dtype.itemsize
        self._group_tokens = max(1, GROUP_BYTES // key_bytes)
        self._plans: dict[tuple[int, Mask, torch.dtype, bool], _AttentionPlan] = {}
        self._block_tables = batch.block_tables.unbind()
        self._written = [Slots(slots, pool.block_size) for slots in batch.slot_mapping.unbind()]

    @classmethod
    def reads_lengths_on_device(cls, specs: Mapping[int, LayerSpec]) -> bool:
        """True if all it knows of lengths is which sequences run one token, so that a step can be captured."""
        return False

    @classmethod
    def check(cls, specs: Mapping[int, LayerSpec], *, dtype: torch.dtype) -> None:
        """Raises ValueError, naming the layer or the dtype, if it can't run a model's layers."""

    @classmethod
    def describe(cls, specs: Mapping[int, LayerSpec]) -> str:
        """The kernels of the layers, for people."""
        return "torch"

    def write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Write the step's keys [T, H, Dk] and values [T, H, Dv] to the layer's slots."""
        written = self._written[self.pool.group_of(layer_idx)]
        scales = self.pool.scales(layer_idx)
        write_kv(k, v, self.pool.k(layer_idx), self.pool.v(layer_idx), slots=written, scales=scales)

    def slot_mapping(self, layer_idx: int) -> Tensor:
        """The slots that the step's keys and values take in a layer, [T] int64."""
        return self._written[self.pool.group_of(layer_idx)].flat

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
        """Attend to the layer's slots, the step's own keys and values included: they are written already.

        q           [T, Hq, Dk]     last dim contiguous
        sinks       [Hq]            one more score per head, or None
        new_kv      the step's own keys [T, H, Dk] and values [T, H, Dv], if the caller has them, which saves reading
                    them back
        out         [T, Hq, Dv]     dtype of q; made if None
        returns     out
        """
        spec, k_pool, v_pool = self.specs[layer_idx], self.pool.k(layer_idx), self.pool.v(layer_idx)
        if k_pool.dtype != q.dtype:  # a prompt's result must not depend on how much of it was cached
            new_kv = None
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[3])
        score = _Score(scaling, softcap, sinks)
        plan = self.plan(self.pool.group_of(layer_idx), spec.mask, q.dtype, reads_new=new_kv is None)
        for group in plan.decode_groups:
            keys, values = self._gather(layer_idx, group.slots, q.dtype)
            _attend_group(q, keys, values, group=group, score=score, out=out)
        for part in plan.prompt_parts:
            if part.slots is not None:
                keys, values = self._gather(layer_idx, part.slots, q.dtype)
            else:
                assert new_kv is not None
                keys, values = (x[part.first : part.first + part.count] for x in new_kv)
            _attend_prompt(q, keys, values, part=part, mask=spec.mask, score=score, out=out)
        return out

    def _gather(self, layer_idx: int, slots: Slots, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = self.workspace.gather("k", self.pool.k(layer_idx), slots)
        values = self.workspace.gather("v", self.pool.v(layer_idx), slots)
        k_scale, v_scale = _by_kind(self.pool.scales(layer_idx))
        return _as_read(keys, dtype, k_scale), _as_read(values, dtype, v_scale)

    def plan(self, group: int, mask: Mask, dtype: torch.dtype, *, reads_new: bool) -> _AttentionPlan:
        """Cut the step for a layer group under a mask, for queries of a dtype; reads_new: True to read new keys from
        the pool, too.
        """
        key = (group, mask, dtype, reads_new)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(self._block_tables[group], mask, dtype, reads_new=reads_new)
        return plan

    def _make_plan(self, block_tables: Tensor, mask: Mask, dtype: torch.dtype, *, reads_new: bool) -> _AttentionPlan:
        batch, block_size = self.batch, self.pool.block_size
        spans: dict[int, int] = {}
        parts = []
        first = 0
        for seq, (seq_len, count) in enumerate(zip(batch.seq_lens_host, batch.counts_host, strict=True)):
            if count == 1:
                spans[seq] = seq_len - mask.first_visible(seq_len - 1)
            else:
                table = block_tables[seq, None] if reads_new or seq_len > count else None
                span = (seq_len - count, seq_len)
                parts.append(_prompt_part(table, mask, span=span, first=first, block_size=block_size))
            first += count
        groups = group_by_span(spans, max_tokens=self._group_tokens)
        return _AttentionPlan(
            decode_groups=tuple(
                _decode_groups(batch, block_tables, groups, spans, block_size=block_size, bias_dtype=dtype)
            ),
            prompt_parts=tuple(parts),
        )


_current_step: ContextVar[AttentionStep] = ContextVar("quire_attention_step")


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Make `step` the one that paged_attention() uses in this context.

    It is not a keyword argument of the model: some models do not pass theirs to their layers.
    """
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


def current_step() -> AttentionStep:
    """The step that a forward in this context belongs to. Raises LookupError outside attention_step()."""
    return _current_step.get()


def running_step() -> AttentionStep | None:
    """The step that runs in this context, or None outside of attention_step()."""
    return _current_step.get(None)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls for each layer: write the step's keys and values to the pool, then
    attend.

        query       [1, Hq, T, Dk]          rope applied
        key, value  [1, H, T, Dk or Dv]     dtype of the query; Hq is a multiple of H
        s_aux       [Hq]                    attention sinks: one more score per head in the softmax, without a value
        returns     [1, T, Hq, Dv], and None for the weights

    Raises LookupError outside attention_step(), ValueError if a mask was built or dtypes differ.
    """
    step = current_step()
    layer_idx: Any = module.layer_idx
    if attention_mask is not None:
        raise ValueError(f"layer {layer_idx} got a mask: {ATTENTION_NAME} must not be registered as a mask function")
    if not query.dtype == key.dtype == value.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"layer {layer_idx} makes queries, keys and values of {dtypes}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    step.write(layer_idx, k, v)
    scaling = step.specs[layer_idx].scaling if scaling is None else scaling
    out = step.attend(layer_idx, q, scaling=scaling, softcap=softcap, sinks=s_aux, new_kv=(k, v))
    return out.unsqueeze(0), None


def _named_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """paged_attention() under a name in traces."""
    with phase(f"attention {module.layer_idx}"):
        return paged_attention(module, *args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, _named_attention)


def write_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, *, slots: Slots, scales: Tensor | None = None
) -> None:
    """Scatter one step's keys and values into the block pool, in place. Shapes as in quire.kernels.reference.write_kv.

    They are rounded to the pool's dtype; what is beyond float8's range is stored as its greatest number. scales
    [2, H] float32: of the heads' keys and values in a pool in float8, None for 1. Slots must be distinct and in the
    pool; unlike the reference's, none may be -1. No sync.
    """
    for new, pool, scale in zip((k, v), (k_pool, v_pool), _by_kind(scales), strict=True):
        stored = indexable(_as_stored(new, pool.dtype, scale))
        if pool.is_contiguous():
            indexable(pool).view(-1, *pool.shape[2:]).index_copy_(0, slots.flat, stored)
        else:
            indexable(pool)[slots.places] = stored


def _by_kind(scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The scales [H, 1] of keys and of values."""
    return (None, None) if scales is None else (scales[0, :, None], scales[1, :, None])


def _as_read(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    return x.to(dtype) if scale is None else (x.float() * scale).to(dtype)


def _as_stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    if scale is not None:
        x = x.float() / scale
    if dtype == torch.float8_e4m3fn:  # a cast of values out of range gives NaN
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def group_by_span(spans: Mapping[int, int], *, max_tokens: int) -> list[list[int]]:
    """Divide sequences into groups of similar span, of which one is padded to at most max_tokens unless it is alone."""
    groups: list[list[int]] = []
    longest = total = 0
    for seq in sorted(spans, key=lambda seq: -spans[seq]):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if groups and padded <= min(max_tokens, GROUP_PADDING_RATIO * (total + spans[seq])):
            groups[-1].append(seq)
            total += spans[seq]
        else:
            groups.append([seq])
            longest = total = spans[seq]
    return [sorted(group) for group in groups]


def _decode_groups(
    batch: StepBatch,
    block_tables: Tensor,
    groups: Sequence[Sequence[int]],
    spans: Mapping[int, int],
    *,
    block_size: int,
    bias_dtype: torch.dtype,
) -> Iterator[_DecodeGroup]:
    """Make the groups, with one transfer for all of them."""
    if not groups:
        return
    members = [seq for group in groups for seq in group]
    ends = [batch.seq_lens_host[seq] for seq in members]
    begins = [end - spans[seq] for seq, end in zip(members, ends, strict=True)]
    index = indices([members, begins, ends], batch.slot_mapping.device)
    for group, numbers in zip(groups, torch.split(index, [len(group) for group in groups], dim=1), strict=True):
        yield _decode_group(batch, block_tables, group, numbers, spans, block_size=block_size, bias_dtype=bias_dtype)


def _decode_group(
    batch: StepBatch,
    block_tables: Tensor,
    members: Sequence[int],
    numbers: Tensor,
    spans: Mapping[int, int],
    *,
    block_size: int,
    bias_dtype: torch.dtype,
) -> _DecodeGroup:
    """numbers [3, n] int64: the members, and the first key and one past the last key of each."""
    span = max(spans[seq] for seq in members)
    seqs, begin, end = numbers[0], numbers[1, :, None], numbers[2, :, None]
    positions = begin + torch.arange(span, device=numbers.device)
    padded = any(spans[seq] < span for seq in members)
    hidden = (positions >= end) if padded else None
    slots = _slots(block_tables.index_select(0, seqs), positions, block_size=block_size)
    if hidden is not None:
        slots = slots.masked_fill_(hidden, 0)
        hidden = hidden[:, None, None]
    everything = len(members) == batch.num_tokens
    return _DecodeGroup(
        num_seqs=len(members),
        span=span,
        token_indices=None if everything else batch.last_indices.index_select(0, seqs),
        slots=Slots(slots.flatten(), block_size),
        hidden=hidden,
        bias=None if hidden is None else _bias(hidden, bias_dtype),
    )


def _prompt_part(
    block_table: Tensor | None, mask: Mask, *, span: tuple[int, int], first: int, block_size: int
) -> _PromptPart:
    """The part of positions `span`, half-open; block_table [1, M] if its keys are read from the pool."""
    start, end = span
    key_start = mask.first_visible(start)
    slots = None
    if block_table is not None:
        positions = torch.arange(key_start, end, device=block_table.device)
        slots = Slots(_slots(block_table, positions[None], block_size=block_size)[0], block_size)
    return _PromptPart(first=first, count=end - start, start=start, key_start=key_start, slots=slots)


def _slots(block_tables: Tensor, positions: Tensor, *, block_size: int) -> Tensor:
    """Slots of positions [n, L] under block tables [n, M]; a position beyond a table gives a slot of its last entry."""
    index = positions.div(block_size, rounding_mode="floor").clamp_(max=block_tables.shape[1] - 1)
    return block_tables.gather(1, index).to(torch.int64) * block_size + positions.remainder(block_size)


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _attend_group(q: Tensor, keys: Tensor, values: Tensor, *, group: _DecodeGroup, score: _Score, out: Tensor) -> None:
    """q, out as in _attend_prompt; keys, values [n * span, H, D]. The G query heads of a kv head are SDPA's queries."""
    num_seqs, num_kv_heads = group.num_seqs, keys.shape[1]
    queries = q if group.token_indices is None else q.index_select(0, group.token_indices)
    queries = queries.reshape(num_seqs, num_kv_heads, -1, q.shape[2])
    keys = keys.view(num_seqs, group.span, num_kv_heads, -1)
    values = values.view(num_seqs, group.span, num_kv_heads, -1)
    if score.fits_sdpa:
        result = F.scaled_dot_product_attention(
            queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.bias, scale=score.scaling
        )
    else:
        hidden = None if group.hidden is None else group.hidden[:, :, None]
        result = _attend_exact(queries[:, :, :, None], keys, values, hidden=hidden, score=score)
    result = result.reshape(num_seqs, *out.shape[1:])
    if group.token_indices is None:
        out.copy_(result)
    else:
        out.index_copy_(0, group.token_indices, result)


def _attend_prompt(
    q: Tensor, keys: Tensor, values: Tensor, *, part: _PromptPart, mask: Mask, score: _Score, out: Tensor
) -> None:
    """Attend for one part of a prompt.

    q       [T, Hq, Dk]                 the whole batch's
    keys    [n, H, Dk]  values [.., Dv] of positions part.key_start and on
    out     [T, Hq, Dv]                 written for the part's tokens
    """
    num_kv_heads = keys.shape[1]
    end = part.start + part.count
    whole = part.start == 0 and mask.first_visible(end - 1) == 0 and score.fits_sdpa
    tile = part.count if whole else _tile_queries(q.shape[1], end - part.key_start)
    for begin in range(part.start, end, tile):
        stop = min(begin + tile, end)
        key_begin = mask.first_visible(begin)
        rows = slice(part.first + begin - part.start, part.first + stop - part.start)
        columns = slice(key_begin - part.key_start, stop - part.key_start)
        tile_q = _split_heads(q[rows], num_kv_heads)
        tile_k, tile_v = keys[columns], values[columns]
        hidden = None if whole else _hidden(mask, (begin, stop), (key_begin, stop), q.device)
        if score.fits_sdpa:
            result = _sdpa_tile(tile_q, tile_k, tile_v, hidden=hidden, scaling=score.scaling)
        else:
            result = _attend_exact(
                tile_q.permute(1, 2, 0, 3)[None], tile_k[None], tile_v[None], hidden=hidden, score=score
            )[0].permute(2, 0, 1, 3)
        _split_heads(out[rows], num_kv_heads).copy_(result)


def _split_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """[n, Hq, D] as [n, H, G, D]."""
    return x.view(x.shape[0], num_kv_heads, -1, x.shape[2])


def _tile_queries(num_query_heads: int, num_keys: int) -> int:
    return max(16, min(TILE_QUERIES, TILE_SCORES // (num_query_heads * num_keys)))


def _hidden(mask: Mask, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor:
    """Return the keys that a query must not see, [queries, keys] bool, for two half-open ranges of positions."""
    q = torch.arange(*queries, device=device)[:, None]
    k = torch.arange(*keys, device=device)
    match mask:
        case Sliding(window):
            return (k > q) | (k <= q - window)
        case Chunked(chunk):
            return (k > q) | (k < q - q % chunk)
        case _:
            return k > q


def _sdpa_tile(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None, scaling: float) -> Tensor:
    """q [n, H, G, D], k, v [m, H, D], hidden [n, m] or None for a causal square; returns [n, H, G, Dv]."""
    num_groups = q.shape[2]
    result = F.scaled_dot_product_attention(
        q.permute(2, 1, 0, 3),
        k.transpose(0, 1).expand(num_groups, -1, -1, -1),
        v.transpose(0, 1).expand(num_groups, -1, -1, -1),
        attn_mask=None if hidden is None else _bias(hidden, q.dtype),
        is_causal=hidden is None,
        scale=scaling,
    )
    return result.permute(2, 1, 0, 3)


def _attend_exact(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None, score: _Score) -> Tensor:
    """Attention with softcap and sinks, all in float32.

        q       [B, H, G, n, Dk]    G query heads of each kv head, n queries
        k, v    [B, m, H, D]
        hidden  broadcasts to [B, H, G, n, m], bool, or None
        returns [B, H, G, n, Dv]    dtype of v

    One matrix product per kv head: keys lie [m, H, D], and merging the head with the batch would copy them.
    """
    batch, num_kv_heads, num_groups, num_queries, _ = q.shape
    queries = (q.float() * score.scaling).flatten(2, 3).transpose(0, 1)
    keys, values = (x.float().permute(2, 0, 1, 3) for x in (k, v))
    scores = queries.new_empty(num_kv_heads, batch, num_groups * num_queries, k.shape[1])
    for head in range(num_kv_heads):
        torch.bmm(queries[head], keys[head].transpose(1, 2), out=scores[head])
    if score.softcap is not None:
        scores.div_(score.softcap).tanh_().mul_(score.softcap)
    heads = scores.view(num_kv_heads, batch, num_groups, num_queries, -1).transpose(0, 1)
    if hidden is not None:
        heads.masked_fill_(hidden, float("-inf"))
    _softmax_(heads, score.sinks)
    result = values.new_empty(num_kv_heads, batch, scores.shape[2], v.shape[3])
    for head in range(num_kv_heads):
        torch.bmm(scores[head], values[head], out=result[head])
    return result.view(num_kv_heads, batch, num_groups, num_queries, -1).transpose(0, 1).to(v.dtype)


def _softmax_(scores: Tensor, sinks: Tensor | None) -> None:
    """Softmax over the last dimension of [B, H, G, n, m], in place; a sink takes its share and has no column."""
    maximum = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.view(1, scores.shape[1], scores.shape[2], 1, 1)
        maximum = torch.maximum(maximum, sink)
    scores.sub_(maximum).exp_()
    total = scores.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - maximum)
    scores.div_(total)
