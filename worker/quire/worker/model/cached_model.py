"""Running a model that keeps its own attention: the block pool as a transformers cache.

For models in which some layers do not call the registered attention function. They get a Cache, as from generate(),
and its layers write keys and values to the pool by slot and return those of the sequences. The model makes its masks
itself, so its batches are rectangular and padded on the left:

    part                                    batch
    several tokens of one sequence          [1, count], no padding
    one token of each of some sequences     [n, 1], keys padded on the left with the null block to the longest

A layer's state per sequence is in StateSlots. A step works on a copy, which replaces the kept state only when the
whole forward has succeeded. The last token of a run of several is a part of its own, so that the state before it is
known, too. Some models reset their state whenever they get several tokens: for these each token after the first chunk
of a prompt is a part of its own.

A part may read a block that another part of its step fills. Only whole blocks are shared, so the reader starts at a
multiple of the block size, and after the other one. Such runs wait for all that start before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from quire.worker.attention.torch_attention import Slots, Workspace, write_kv
from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.state_slots import StateKey, StateSlots
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.cache_layout import CacheLayout
from quire.worker.model.hidden_states import HiddenStates, kept_hidden_states
from quire.worker.model.paged_model import PagedModel

# Sequences that decode together are padded to at most so many keys, unless one alone has more.
GROUP_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """One rectangular forward: `count` tokens of each sequence, from positions starts[i], in the batch from firsts[i].

    seqs are places in the batch. is_last: these are the last ones of their runs, with the step's logits.
    """

    seqs: tuple[int, ...]
    firsts: tuple[int, ...]
    starts: tuple[int, ...]
    count: int
    is_last: bool

    @property
    def ends(self) -> tuple[int, ...]:
        """The position behind the last one of each sequence."""
        return tuple(start + self.count for start in self.starts)


@dataclass(frozen=True, slots=True)
class _Run:
    seq: int
    first: int
    start: int
    count: int

    def part(self, *, is_last: bool = True) -> Part:
        return Part((self.seq,), (self.first,), (self.start,), self.count, is_last)

    def cut(self, begin: int, end: int) -> _Run:
        return _Run(self.seq, self.first + begin, self.start + begin, end - begin)

    def continued_by_one(self) -> list[_Run]:
        return [self] if self.start == 0 else [self.cut(i, i + 1) for i in range(self.count)]

    def may_read_others(self, block_size: int) -> bool:
        return self.start > 0 and self.start % block_size == 0


def cut_step(batch: StepBatch, layout: CacheLayout, *, block_size: int) -> list[Part]:
    """Divide a step into forwards, in an order in which nothing is read before it is written.

    With states, each sequence's last token comes behind everything else, and blocks are not shared.
    """
    firsts = accumulate(batch.counts_host, initial=0)
    sizes = zip(firsts, batch.seq_lens_host, batch.counts_host, strict=False)
    runs = [_Run(seq, first, end - count, count) for seq, (first, end, count) in enumerate(sizes)]
    if layout.states:
        heads = [run.cut(0, run.count - 1) for run in runs if run.count > 1]
        tails = [run.cut(run.count - 1, run.count) for run in runs]
        if layout.continues_by_one:
            heads = [piece for head in heads for piece in head.continued_by_one()]
        return [head.part(is_last=False) for head in heads] + _in_order(tails)
    free = [run for run in runs if run.count > 1 and not run.may_read_others(block_size)]
    return [run.part() for run in free] + _in_order([run for run in runs if run not in free])


def packed_order(parts: Sequence[Part]) -> list[int]:
    """Indexes in the step of the tokens of all parts, in the order in which their forwards have them."""
    return [first + offset for part in parts for first in part.firsts for offset in range(part.count)]


def _in_order(runs: list[_Run]) -> list[Part]:
    """Parts by rising start; runs of one token that follow one another make one part, as far as padding allows.

    Within a part the sequences are in the order of the batch.
    """
    groups: list[list[_Run]] = []
    for run in sorted(runs, key=lambda run: run.start):
        joins = groups and run.count == groups[-1][-1].count == 1
        if joins and (len(groups[-1]) + 1) * (run.start + 1) <= GROUP_TOKENS:
            groups[-1].append(run)
        else:
            groups.append([run])
    for group in groups:
        group.sort(key=lambda run: run.seq)
    return [
        Part(
            tuple(run.seq for run in group),
            tuple(run.first for run in group),
            tuple(run.start for run in group),
            group[0].count,
            is_last=True,
        )
        for group in groups
    ]


@dataclass(frozen=True, slots=True)
class Access:
    """The reads and writes of the layers in one part's forward. n sequences, Q tokens of each, L keys with padding.

    written     [n * Q]     slots of the tokens; the last ones may have none, then nothing of them is written
    read        [n * L]     slots of the keys, those of the null block for padding; None if the tokens themselves are
                            all there is
    mask        [n, L]      int64, 0 for padding, or None without padding
    """

    pool: KVPool
    workspace: Workspace
    num_seqs: int
    num_keys: int
    num_past: int
    written: Slots
    read: Slots | None
    mask: Tensor | None

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key, value [n, H, Q, D] and return all keys and values, [n, H, L, D]."""
        k_pool, v_pool = self.pool.k(layer_idx), self.pool.v(layer_idx)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        num_written = len(self.written.flat)
        write_kv(k[:num_written], v[:num_written], k_pool, v_pool, slots=self.written)
        if self.read is None:
            return key, value
        keys = self.workspace.gather("k", k_pool, self.read)
        values = self.workspace.gather("v", v_pool, self.read)
        k, v = (x.view(self.num_seqs, self.num_keys, *x.shape[1:]).transpose(1, 2) for x in (keys, values))
        return k, v


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A part's numbers on the device, [n] int64 each."""

    seqs: Tensor
    firsts: Tensor
    ends: Tensor


def _send(parts: Sequence[Part], device: torch.device) -> list[_Numbers]:
    """The numbers of all parts of a step, in one transfer."""
    rows = [row for part in parts for row in (part.seqs, part.firsts, part.ends)]
    sent = torch.split(indices([number for row in rows for number in row], device), [len(row) for row in rows])
    return [_Numbers(*sent[3 * i : 3 * i + 3]) for i in range(len(parts))]


def _access(
    part: Part, numbers: _Numbers, tokens: Tensor, batch: StepBatch, pool: KVPool, workspace: Workspace
) -> Access:
    num_keys = max(part.ends)
    is_padded = min(part.ends) < num_keys
    read, hidden = None, None
    if part.starts != (0,):
        positions = torch.arange(-num_keys, 0, device=tokens.device) + numbers.ends[:, None]
        hidden = positions < 0
        positions = positions.clamp_(min=0)
        tables = batch.block_tables[0].index_select(0, numbers.seqs)
        blocks = tables.gather(1, positions.div(pool.block_size, rounding_mode="floor")).to(torch.int64)
        read = (blocks * pool.block_size + positions.remainder(pool.block_size)).masked_fill_(hidden, 0).flatten()
    return Access(
        pool=pool,
        workspace=workspace,
        num_seqs=len(part.seqs),
        num_keys=num_keys,
        num_past=num_keys - part.count,
        written=Slots(batch.slot_mapping[0].index_select(0, tokens), pool.block_size),
        read=None if read is None else Slots(read, pool.block_size),
        mask=(~hidden).to(torch.int64) if hidden is not None and is_padded else None,
    )


class _PagedKeys:
    """The part of a cache layer from which transformers reads keys, values and lengths."""

    is_sliding = False
    access: Access
    layer_idx: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.access.update(self.layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.access.num_past + query_length, 0

    def get_seq_length(self) -> int:
        return self.access.num_past

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to allocate."""


class _KeyLayer(_PagedKeys, CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values in the pool."""


class _KeyAndStateLayer(_PagedKeys, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, no-untyped-call, override]
    """Keys and values in the pool, and states."""


class PagedCache(Cache):
    """The model's cache for one part of one step."""

    def __init__(self, layout: CacheLayout, access: Access, states: Mapping[StateKey, Tensor]) -> None:
        """states are [n, *shape] each; the model changes them in place."""
        layers = [self._make_layer(layout, layer_idx) for layer_idx in range(layout.num_layers)]
        super().__init__(layers=layers)
        for layer in layers:
            layer.access = access
        for key, state in states.items():
            _lend(layers[key.layer_idx], key, state)

    @staticmethod
    def _make_layer(layout: CacheLayout, layer_idx: int) -> Any:
        num_states = 1 + max((key.state_idx for key in layout.states if key.layer_idx == layer_idx), default=-1)
        layer: Any
        if not num_states:
            layer = _KeyLayer()  # type: ignore[no-untyped-call]
        elif layer_idx in layout.layers:
            layer = _KeyAndStateLayer(number_of_states=num_states)
        else:
            layer = LinearAttentionLayer(number_of_states=num_states)
        layer.layer_idx = layer_idx
        return layer


def _lend(layer: Any, key: StateKey, state: Tensor) -> None:
    """Make a state the layer's, as if it had computed it; a sequence begins with a state of zeros."""
    if key.kind == "conv":
        layer.conv_states[key.state_idx] = state
        layer.is_conv_states_initialized[key.state_idx] = True
        layer.conv_kernel_size[key.state_idx] = state.shape[-1]
    else:
        layer.recurrent_states[key.state_idx] = state
        layer.is_recurrent_states_initialized[key.state_idx] = True
    layer.has_previous_state[key.state_idx] = True
    layer.dtype, layer.device = state.dtype, state.device


def run_cached(
    model: Any, batch: StepBatch, pool: KVPool, *, layout: CacheLayout, states: StateSlots, workspace: Workspace
) -> Tensor:
    """Run a step of a model with its own attention; return logits [L, vocab_size] float32 of its logit_indices.

    Raises StateNotKept; then, and if the model fails, `states` are as before. Cost: a forward for every run of several
    tokens and at least one for all others; in each the layers copy the keys and values of its sequences.
    """
    starts = [end - count for end, count in zip(batch.seq_lens_host, batch.counts_host, strict=True)]
    after = states.load(batch.rows_host, starts)
    before: dict[StateKey, Tensor] = {}
    logits: Tensor | None = None
    parts = cut_step(batch, layout, block_size=pool.block_size)
    for part, numbers in zip(parts, _send(parts, batch.input_ids.device), strict=True):
        if part.is_last and not before:
            before = {key: state.clone() for key, state in after.items()}
        is_all = part.seqs == tuple(range(batch.num_seqs))
        own = after if is_all else {key: state.index_select(0, numbers.seqs) for key, state in after.items()}
        result = _run_part(model, part, numbers, batch, pool, layout=layout, states=own, workspace=workspace)
        if is_all:
            logits = result if part.is_last else logits
            continue
        for key, state in own.items():
            after[key].index_copy_(0, numbers.seqs, state)
        if part.is_last:
            logits = result.new_empty(len(batch.logit_indices), result.shape[-1]) if logits is None else logits
            logits.index_copy_(0, _logit_rows(part, numbers, batch), result)
    states.store(batch.rows_host, batch.seq_lens_host, before=before, after=after)
    assert logits is not None
    return logits


def _run_part(
    model: Any,
    part: Part,
    numbers: _Numbers,
    batch: StepBatch,
    pool: KVPool,
    *,
    layout: CacheLayout,
    states: Mapping[StateKey, Tensor],
    workspace: Workspace,
) -> Tensor:
    """Logits [n, vocab_size] float32 of each sequence's last token in the part; of a run with drafts, of all its tokens
    that get logits.
    """
    offsets = torch.arange(part.count, device=batch.input_ids.device)
    tokens = (numbers.firsts[:, None] + offsets).flatten()
    access = _access(part, numbers, tokens, batch, pool, workspace)
    shape = (len(part.seqs), part.count)
    arguments: dict[str, Any] = {layout.argument: PagedCache(layout, access, states)}
    if layout.takes_positions:
        arguments["position_ids"] = batch.positions.index_select(0, tokens).view(shape)
    if layout.takes_logits_to_keep:
        arguments["logits_to_keep"] = _num_kept(part, batch)
    if layout.layers and access.mask is not None:
        arguments["attention_mask"] = access.mask
    output = model(input_ids=batch.input_ids.index_select(0, tokens).view(shape), use_cache=True, **arguments)
    num_kept, num_logits = _num_kept(part, batch), _num_logits(part, batch)
    logits: Tensor = output.logits[:, -num_kept:][:, :num_logits].flatten(0, 1).float()
    return logits


def _num_kept(part: Part, batch: StepBatch) -> int:
    """Return how many tokens at the end of each of the part's sequences the output layer runs on."""
    return 1 if batch.drafts is None else 1 + int(batch.drafts.given[part.seqs[0]])


def _num_logits(part: Part, batch: StepBatch) -> int:
    """Return how many of these, the first ones, have logits in the step."""
    return 1 if batch.drafts is None else int(batch.drafts.num_logits[part.seqs[0]])


def _logit_rows(part: Part, numbers: _Numbers, batch: StepBatch) -> Tensor:
    """The rows of the step's logits that the part makes. A sequence with drafts is a part of its own."""
    if batch.drafts is None:
        return numbers.seqs
    return indices(batch.drafts.logit_rows(part.seqs), numbers.seqs.device)


class CachedModel(PagedModel):
    """A model that runs with its own attention, over a cache that is the pool."""

    takes_any_kv_dtype = False
    takes_adapters = False

    def __init__(self, model: Any, *, layout: CacheLayout, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self.state_specs = layout.states
        self._layout = layout
        super().__init__(model, specs=layout.layers, max_model_len=max_model_len, eos_token_ids=eos_token_ids)

    def describe_attention(self) -> str:
        """See PagedModel.describe_attention."""
        return "the model's own, over the pool as its cache"

    def keeping_hidden_states(self, batch: StepBatch, pool: KVPool) -> AbstractContextManager[HiddenStates]:
        """See PagedModel.keeping_hidden_states."""
        return kept_hidden_states(
            self._model, order=packed_order(cut_step(batch, self._layout, block_size=pool.block_size))
        )

    def forward_unconverted(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """See PagedModel.forward and run_cached(). Needs states allocated for the batch's rows, if there are any.

        The logits are float32 already.
        """
        with torch.inference_mode():
            return run_cached(
                self._model, batch, pool, layout=self._layout, states=self.states, workspace=self._workspace
            )
