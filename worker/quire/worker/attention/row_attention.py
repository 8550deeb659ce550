"""Attention in which the arithmetic of a token depends on its position alone, in torch operations on a CPU.

Each token attends as if it were decoded: by itself, over keys in places that follow from its position. The first place
is a multiple of KEY_STEP, and the number of places is one of a few, see num_places(). So the products of a token have
the same shapes whatever its step holds, and whether it is decoded, or computed as a part of a prompt.

    tokens of one sequence with the same places     read the keys once
    other tokens with as many places                run together; each has keys of its own

Places that a token does not see are hidden by a bias of -inf. Their weights are exactly 0.

A step may be padded: tokens behind those of its sequences write nothing, and their result is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.attention.torch_attention import AttentionStep, Slots, Workspace
from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import LayerSpec, Mask
from quire.worker.memory.step_batch import StepBatch

KEY_STEP = 64
"""Places come in multiples of this: so vectors of the processor never end within the scores of a token."""

# Elements that torch computes in one thread.
PIECE = 1 << 15


def num_places(num_keys: int) -> int:
    """Return the places for so many keys: a multiple of KEY_STEP, above 512 one of four in each doubling."""
    step = KEY_STEP
    while step * 8 < num_keys:
        step *= 2
    return -(-num_keys // step) * step


@dataclass(frozen=True, slots=True)
class _Rows:
    """n tokens with `span` places each.

    tokens      [n]             int64, indexes in the step
    slots       [m * span]      the null block's for hidden places; m is 1 if they share their keys, else n
    hidden      [n, 1, 1, span] bool
    """

    tokens: Tensor
    span: int
    slots: Slots
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Token:
    index: int
    seq: int
    position: int
    begin: int
    first: int
    span: int


class RowAttentionStep(AttentionStep):
    """The attention of one step of a deterministic model."""

    takes_any_kv_dtype: ClassVar[bool] = True

    def __init__(
        self, batch: StepBatch, pool: KVPool, *, specs: Mapping[int, LayerSpec], workspace: Workspace | None = None
    ) -> None:
        """The batch may have more tokens than its sequences; slot_mapping is [G, tokens of sequences]."""
        super().__init__(batch, pool, specs=specs, workspace=workspace)
        self._num_real = sum(batch.counts_host)
        self._rows: dict[tuple[int, Mask], list[_Rows]] = {}

    @classmethod
    def describe(cls, specs: Mapping[int, LayerSpec]) -> str:
        """See AttentionStep.describe."""
        return "torch, each token by itself"

    def write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """See AttentionStep.write."""
        super().write(layer_idx, k[: self._num_real], v[: self._num_real])

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
        """See AttentionStep.attend. All keys are read from the pool."""
        spec = self.specs[layer_idx]
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], self.pool.v(layer_idx).shape[3])
        out[self._num_real :] = 0
        for rows in self._plan_rows(self.pool.group_of(layer_idx), spec.mask):
            keys, values = self._gather(layer_idx, rows.slots, q.dtype)
            queries = q.index_select(0, rows.tokens).view(len(rows.tokens), keys.shape[1], -1, q.shape[2])
            keys, values = (x.view(-1, rows.span, *x.shape[1:]) for x in (keys, values))
            result = attend_rows(
                queries, keys, values, hidden=rows.hidden, scaling=scaling, softcap=softcap, sinks=sinks
            )
            out.index_copy_(0, rows.tokens, result.reshape(len(rows.tokens), *out.shape[1:]))
        return out

    def _plan_rows(self, group: int, mask: Mask) -> list[_Rows]:
        key = (group, mask)
        if key not in self._rows:
            self._rows[key] = [self._make_rows(group, tokens) for tokens in self._cut(mask)]
        return self._rows[key]

    def _cut(self, mask: Mask) -> list[list[_Token]]:
        """Divide the step's tokens: those that share their keys, and others with as many places."""
        shared, alone = [], []
        for _, found in groupby(_tokens(self.batch, mask), key=lambda token: (token.seq, token.begin, token.span)):
            tokens = list(found)
            if len(tokens) > 1:
                shared.append(tokens)
            else:
                alone += tokens
        alone.sort(key=lambda token: token.span)
        for span, found in groupby(alone, key=lambda token: token.span):
            tokens, most = list(found), max(1, self._group_tokens // span)
            shared += [tokens[first : first + most] for first in range(0, len(tokens), most)]
        return shared

    def _make_rows(self, group: int, tokens: list[_Token]) -> _Rows:
        span, device = tokens[0].span, self.batch.slot_mapping.device
        numbers = indices([[t.index, t.seq, t.begin, t.first, t.position] for t in tokens], device).t().contiguous()
        index, seqs, begins, firsts, ends = numbers
        places = begins[:, None] + torch.arange(span, device=device)
        hidden = (places < firsts[:, None]) | (places > ends[:, None])
        unread = hidden
        if len(tokens) > 1 and tokens[0].seq == tokens[-1].seq:
            seqs, places, unread = seqs[:1], places[:1], hidden.all(0, keepdim=True)
        tables = self._block_tables[group].index_select(0, seqs)
        size = self.pool.block_size
        columns = places.div(size, rounding_mode="floor").clamp_(max=tables.shape[1] - 1)
        slots = tables.gather(1, columns).to(torch.int64) * size + places.remainder(size)
        return _Rows(index, span, Slots(slots.masked_fill_(unread, 0).flatten(), size), hidden[:, None, None])


def _tokens(batch: StepBatch, mask: Mask) -> list[_Token]:
    tokens: list[_Token] = []
    for seq, (end, count) in enumerate(zip(batch.seq_lens_host, batch.counts_host, strict=True)):
        for position in range(end - count, end):
            first = mask.first_visible(position)
            begin = first - first % KEY_STEP
            tokens.append(_Token(len(tokens), seq, position, begin, first, num_places(position + 1 - begin)))
    return tokens


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    hidden: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with one query of each of n tokens. G query heads of each of H kv heads, S places, a multiple of KEY_STEP.

        queries [n, H, G, Dk]
        keys    [m, S, H, Dk]   values [m, S, H, Dv]; m is n, or 1 if all tokens have the same
        hidden  [n, 1, 1, S]    bool
        sinks   [H * G]
        returns [n, H, G, Dv]   dtype of the queries

    A token's result has the same bits for any n, and for any other tokens.
    """
    num_rows = queries.shape[0]
    if num_rows == 1:  # a product of one matrix may be divided over threads otherwise than one of several
        queries, hidden = queries.expand(2, -1, -1, -1), hidden.expand(2, -1, -1, -1)
    many = queries.shape[0]
    k, v = (x.expand(many, -1, -1, -1).transpose(1, 2) for x in (keys, values))
    if softcap is None and sinks is None:
        bias = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device)
        bias.masked_fill_(hidden, float("-inf"))
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scaling)[:num_rows]
    scores = torch.matmul(queries.float() * scaling, keys.float().expand(many, -1, -1, -1).permute(0, 2, 3, 1))
    if softcap is not None:
        _in_pieces(scores.div_(softcap), torch.tanh_)
        scores.mul_(softcap)
    scores.masked_fill_(hidden, float("-inf"))
    _softmax_(scores, sinks)
    result = torch.matmul(scores, values.float().expand(many, -1, -1, -1).transpose(1, 2))
    return result[:num_rows].to(queries.dtype)


def _softmax_(scores: Tensor, sinks: Tensor | None) -> None:
    """Softmax over the last dimension of [n, H, G, S], in place; a sink takes its share and has no place."""
    maximum = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, scores.shape[1], scores.shape[2], 1)
        maximum = torch.maximum(maximum, sink)
    _in_pieces(scores.sub_(maximum), torch.exp_)
    total = scores.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + _exp_of_sinks(sink - maximum)
    scores.div_(total)


def _exp_of_sinks(x: Tensor) -> Tensor:
    """exp of [n, H, G, 1], in whole vectors."""
    padded = x.new_zeros(-(-x.numel() // KEY_STEP) * KEY_STEP)
    padded[: x.numel()] = x.flatten()
    _in_pieces(padded, torch.exp_)
    return padded[: x.numel()].view_as(x)


def _in_pieces(x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    """Apply an elementwise function in place, so that no element is computed outside of a whole vector.

    torch computes elements behind the last whole vector with another function, and at the borders between threads, too.
    x is contiguous, its size a multiple of KEY_STEP. Pieces of this size run in one thread.
    """
    for piece in torch.split(x.view(-1), PIECE):
        function(piece)
