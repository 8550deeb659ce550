"""Attention as it is done without paged kernels: in every layer of every step the keys and values of all sequences that
generate are gathered into a new batch, padded to the longest, and one SDPA runs over it. Prompts run one by one.

The same interface as the worker's own attention, over the same pool, so that a model can run on either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.worker.attention import torch_attention as attention
from quire.worker.attention.torch_attention import ATTENTION_NAME, Slots, paged_attention, write_kv


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Arguments and result as of paged_attention(); causal layers without softcap and sinks only."""
    step = attention._current_step.get()
    layer_idx: Any = module.layer_idx
    spec, batch, pool = step.specs[layer_idx], step.batch, step.pool
    k_pool, v_pool = pool.k(layer_idx), pool.v(layer_idx)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    write_kv(k, v, k_pool, v_pool, slots=Slots(batch.slot_mapping[0], k_pool.shape[1]))
    scaling = given.get("scaling") or spec.scaling
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    generating = [seq for seq, count in enumerate(batch.counts_host) if count == 1]
    if generating:
        rows = batch.last_indices[generating]
        tables, seq_lens = batch.block_tables[0, generating], batch.seq_lens[generating]
        tables = tables[:, : -(-max(batch.seq_lens_host[seq] for seq in generating) // pool.block_size)]
        out[rows] = attend_padded(q[rows], gather(k_pool, tables), gather(v_pool, tables), seq_lens, scaling)
    for seq, first in prompts_of(batch.counts_host):
        rows = slice(first, first + batch.counts_host[seq])
        table, seq_len = batch.block_tables[0, seq, None], batch.seq_lens_host[seq]
        is_whole = seq_len == batch.counts_host[seq]
        keys = k[rows].transpose(0, 1) if is_whole else gather(k_pool, table)[0, :, :seq_len]
        values = v[rows].transpose(0, 1) if is_whole else gather(v_pool, table)[0, :, :seq_len]
        out[rows] = attend_prompt(q[rows], keys, values, scaling)
    return out[None], None


def prompts_of(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sequences that run several tokens, and the first of these in the batch."""
    first = 0
    for seq, count in enumerate(counts):
        if count > 1:
            yield seq, first
        first += count


def gather(blocks: Tensor, block_tables: Tensor) -> Tensor:
    """[B, S, H, D] by tables [n, M] as a new [n, H, M * S, D]."""
    return blocks[block_tables.long()].flatten(1, 2).transpose(1, 2)


def attend_padded(q: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, scaling: float) -> Tensor:
    """One token of each sequence: q [n, Hq, D], keys and values [n, H, m, D], of which seq_lens [n] count."""
    places = torch.arange(keys.shape[2], device=q.device)
    hidden = (places >= seq_lens[:, None])[:, None, None]
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    # Query heads of a kv head as its queries: enable_gqa would leave SDPA's flash path.
    grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[2])
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling).flatten(1, 2)


def attend_prompt(q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """The last n of m tokens: q [n, Hq, D], keys and values [H, m, D]; returns [n, Hq, Dv]."""
    count, seq_len = q.shape[0], keys.shape[1]
    places = torch.arange(seq_len, device=q.device)
    bias = None
    if count < seq_len:
        hidden = places > places[seq_len - count :, None]
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    grouped = q.view(count, keys.shape[0], -1, q.shape[2]).permute(2, 1, 0, 3)
    keys, values = (x.expand(grouped.shape[0], -1, -1, -1) for x in (keys, values))
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=bias, is_causal=bias is None, scale=scaling
    )
    return attended.permute(2, 1, 0, 3).flatten(1, 2)


@contextmanager
def gathering() -> Iterator[None]:
    """Within the block models that were loaded for the block pool attend over padded batches."""
    AttentionInterface.register(ATTENTION_NAME, padded_attention)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
