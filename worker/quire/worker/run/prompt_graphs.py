"""Small steps with prompts, each replayed as one CUDA graph that holds the whole forward, attention too.

The grids of attention follow from shapes, and lengths are read on the device. So a graph for a number of tokens and of
sequences runs any step that has no more of both. Its tokens are put in the order of the graph:

    decodes     NUM_SLOTS tokens, of the sequences that run one token; not there in the graphs of steps without any
    prompts     the other tokens of the bucket, of up to NUM_SLOTS sequences that run several

As in a step without graphs, the decode kernels run the first part, and the prefill kernel the second. An empty slot is
a sequence without tokens, which ends at once; a padded token has slot -1 and belongs to no sequence: nothing reads or
writes a block for it. Steps of more tokens, of more sequences or of longer ones run in pieces: see pieces.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.capture import (
    CannotCapture,
    capture_each,
    capture_stream,
    first_cause,
    free_bytes,
    measured_capture,
)
from quire.worker.device.transfer import send
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.sequence_table import Int64s
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.graphs import extrapolate
from quire.worker.run.pieces import SMALLEST_BUCKET, piece_buckets, require_same_bits

log = logging.getLogger(__name__)

NUM_SLOTS = 16
"""Sequences of a step, and places for each of both kinds."""

MAX_TOKENS = 1024
"""Of the largest step: beyond, the launches of pieces are hidden behind the device's work."""

MAX_KEYS = 2048
"""Tokens of the longest sequence. Keys of a longer one would have to be split, which the graphs are not made for."""

# The rows of the tokens' inputs; slots have one for each layer group.
_TOKEN, _POSITION, _ADAPTER = range(3)
_SLOTS = slice(3, None)


@dataclass(frozen=True, slots=True)
class Shape:
    """A graph: its number of tokens, and whether it has places for decodes."""

    num_tokens: int
    has_decodes: bool

    @property
    def num_decodes(self) -> int:
        """Places for sequences of one token, one token each."""
        return NUM_SLOTS if self.has_decodes else 0

    @property
    def num_prompt_tokens(self) -> int:
        """Places for tokens of the other sequences."""
        return self.num_tokens - self.num_decodes

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + NUM_SLOTS

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each sequence that tell attention which are decodes; those of prompts are read on the device."""
        each, more = divmod(self.num_prompt_tokens, NUM_SLOTS)
        return (*[1] * self.num_decodes, *[each] * (NUM_SLOTS - 1), each + more)


@dataclass(frozen=True, slots=True)
class Placed:
    """A step in the order of a shape, columns of int64. T tokens and n sequences of the shape.

    sources     [T]         the step's token; 0 in padding
    is_padding  [T]         1 for padding, else 0
    seqs        [n]         the step's sequence; 0 in an empty slot
    lengths     [n]         0 in an empty slot
    starts      [n+1]       the first token of each slot, then the end of the last prompt
    lasts       [NUM_SLOTS] the last token of each of the step's sequences, in the step's order
    """

    sources: Int64s
    is_padding: Int64s
    seqs: Int64s
    lengths: Int64s
    starts: Int64s
    lasts: Int64s

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[int, ...]:
        """Numbers of each column; an even number, so that each begins at a multiple of 16 bytes."""
        lengths = (shape.num_tokens, shape.num_tokens, shape.num_seqs, shape.num_seqs, shape.num_seqs + 1, NUM_SLOTS)
        return tuple(length + length % 2 for length in lengths)

    def pack(self, shape: Shape) -> Int64s:
        """Return all columns one after the other."""
        columns = (self.sources, self.is_padding, self.seqs, self.lengths, self.starts, self.lasts)
        packed, begin = np.zeros(sum(self.sizes(shape)), dtype=np.int64), 0
        for column, size in zip(columns, self.sizes(shape), strict=True):
            packed[begin : begin + len(column)] = column
            begin += size
        return packed


def place(counts: Sequence[int], lengths: Sequence[int], shape: Shape) -> Placed:
    """Put a step that fits into the order of the shape; counts are the tokens that each of its sequences runs."""
    firsts = np.concatenate(([0], np.cumsum(counts)))
    decodes = [seq for seq, count in enumerate(counts) if count == 1 and shape.has_decodes]
    prompts = [seq for seq, count in enumerate(counts) if count > 1 or not shape.has_decodes]
    sources = np.zeros(shape.num_tokens, dtype=np.int64)
    is_padding = np.ones(shape.num_tokens, dtype=np.int64)
    seqs, slot_lengths = (np.zeros(shape.num_seqs, dtype=np.int64) for _ in range(2))
    starts = np.arange(shape.num_seqs + 1)
    lasts = np.zeros(NUM_SLOTS, dtype=np.int64)
    begin = shape.num_decodes
    for slot, seq in [*enumerate(decodes), *enumerate(prompts, start=shape.num_decodes)]:
        if slot >= shape.num_decodes:
            starts[slot] = begin
        tokens = np.arange(starts[slot], starts[slot] + counts[seq])
        sources[tokens] = np.arange(firsts[seq], firsts[seq + 1])
        is_padding[tokens] = 0
        seqs[slot], slot_lengths[slot], lasts[seq] = seq, lengths[seq], tokens[-1]
        begin += counts[seq] if slot >= shape.num_decodes else 0
    starts[shape.num_decodes + len(prompts) :] = begin
    return Placed(sources, is_padding, seqs, slot_lengths, starts, lasts)


class StaticPrompts:
    """Steps on fixed memory, and on a GPU a graph for each Shape.

    Sizes: T tokens and n sequences of the largest shape, G layer groups, M blocks of MAX_KEYS tokens.
        numbers         [...]           int64, a step as Placed.pack() gives it
        tokens          [3 + G, T]      int64: token, position, number of the adapter, slot in each group, garbage in
                                        padding
        block_tables    [G, n, M]       int32
        logits          [NUM_SLOTS, vocab_size] float32

    Without graphs the same forward runs on the same memory.
    """

    def __init__(self, model: PagedModel, pool: KVPool, *, max_tokens: int, memory: Any = None) -> None:
        """`memory` is a torch.cuda.graph_pool_handle() to share, or None for one of its own.

        Raises CannotCapture if the attention of a layer depends on numbers on the host, if the model keeps states, or
        if max_tokens is less than the smallest bucket.
        """
        if not model.step_kind.reads_lengths_on_device(model.attention_specs):
            raise CannotCapture("the attention of some layer cuts its work by lengths on the host")
        if model.has_recurrent_state:
            raise CannotCapture("its states depend on the lengths of prompts")
        if max_tokens < SMALLEST_BUCKET:
            raise CannotCapture(f"{max_tokens} tokens are fewer than {SMALLEST_BUCKET}")
        self.shapes = tuple(
            Shape(size, has_decodes)
            for size in piece_buckets(min(max_tokens, MAX_TOKENS))
            for has_decodes in (False, True)
        )
        self._model = model
        self._pool = pool
        self._memory = memory
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        largest, num_groups, device = self.shapes[-1], len(pool.groups), model.device
        width = -(-min(MAX_KEYS, model.max_model_len) // pool.block_size)
        self._max_length = width * pool.block_size
        with torch.inference_mode(False):  # a tensor made in inference mode could never be written outside of it
            self._numbers = torch.zeros(sum(Placed.sizes(largest)), dtype=torch.int64, device=device)
            self._tokens = torch.zeros(_SLOTS.start + num_groups, largest.num_tokens, dtype=torch.int64, device=device)
            self._padding = torch.zeros(_SLOTS.start + num_groups, 1, dtype=torch.int64, device=device)
            self._padding[_SLOTS] = -1
            self._block_tables = torch.zeros(num_groups, largest.num_seqs, width, dtype=torch.int32, device=device)
            self._logits = torch.zeros(NUM_SLOTS, model.vocab_size, dtype=torch.float32, device=device)

    def takes(self, batch: StepBatch) -> bool:
        """True if the step has some prompt and no drafts, and room for its tokens, its sequences and their lengths."""
        return self._shape_of(batch) is not None

    def _shape_of(self, batch: StepBatch) -> Shape | None:
        """The smallest shape with room for the step."""
        counts = batch.counts_host
        num_decodes = counts.count(1)
        if (
            len(counts) > NUM_SLOTS
            or num_decodes == len(counts)
            or max(batch.seq_lens_host) > self._max_length
            or batch.keeps_hidden_states
            or batch.drafts is not None
        ):
            return None
        num_prompt_tokens = batch.num_tokens - num_decodes
        return next(
            (
                shape
                for shape in self.shapes
                if shape.has_decodes is (num_decodes > 0) and shape.num_prompt_tokens >= num_prompt_tokens
            ),
            None,
        )

    def forward(self, batch: StepBatch) -> Tensor:
        """Run the model as PagedModel.forward does, for a batch that it takes. The logits are valid until the next one.

        Cost: one launch, and five that bring the step's numbers into place, one of them a transfer.
        """
        shape = self._shape_of(batch)
        if shape is None:
            raise ValueError("the step has more tokens or sequences than there is room for, or no prompt")
        with torch.inference_mode():
            self._fill(batch, shape)
            graph = self._graphs.get(shape)
            if graph is None:
                self._run(shape)
            else:
                graph.replay()
        return self._logits[: batch.num_seqs]

    def _fill(self, batch: StepBatch, shape: Shape) -> None:
        placed = place(batch.counts_host, batch.seq_lens_host, shape).pack(shape)
        send(torch.from_numpy(placed), self._numbers[: len(placed)])
        sources, _, seqs, *_ = self._columns(shape)
        adapters = torch.zeros_like(batch.positions) if batch.adapter_slots is None else batch.adapter_slots
        rows = torch.cat((batch.input_ids[None], batch.positions[None], adapters[None], batch.slot_mapping))
        self._tokens[:, : shape.num_tokens].copy_(rows.index_select(1, sources))
        width = batch.block_tables.shape[2]
        self._block_tables[:, : shape.num_seqs, :width].copy_(batch.block_tables.index_select(1, seqs))

    def _columns(self, shape: Shape) -> list[Tensor]:
        """The columns of Placed on the device."""
        sizes = Placed.sizes(shape)
        columns = torch.split_with_sizes(self._numbers[: sum(sizes)], sizes)
        num_seqs = shape.num_seqs
        lengths = (shape.num_tokens, shape.num_tokens, num_seqs, num_seqs, num_seqs + 1, NUM_SLOTS)
        return [column[:length] for column, length in zip(columns, lengths, strict=True)]

    @torch.inference_mode()
    def _run(self, shape: Shape) -> None:
        """Run a forward of what is in place. Nothing here depends on the step but the content of the memory."""
        _, is_padding, _, lengths, starts, lasts = self._columns(shape)
        inputs = torch.where(is_padding == 1, self._padding, self._tokens[:, : shape.num_tokens])
        batch = StepBatch(
            input_ids=inputs[_TOKEN],
            positions=inputs[_POSITION],
            slot_mapping=inputs[_SLOTS],
            block_tables=self._block_tables[:, : shape.num_seqs],
            seq_lens=lengths.to(torch.int32),
            cu_seqlens_q=starts.to(torch.int32),
            last_indices=lasts,
            rows=lasts,
            seq_lens_host=(),
            counts_host=shape.counts,
            rows_host=(),
            adapter_slots=inputs[_ADAPTER],
        )
        self._logits.copy_(self._model.forward_unconverted(batch, self._pool))

    def capture(self, shapes: Sequence[Shape] | None = None) -> None:
        """Capture the graph of every shape, or of those given. Needs a GPU.

        Raises CannotCapture if the model's forward waits for the device, or does anything a graph can't hold; then no
        shape is captured. Cost: two forwards per shape and two more; memory of the largest.
        """
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        capture_each(
            sorted(shapes or self.shapes, key=lambda shape: shape.num_tokens, reverse=True),
            largest=self.shapes[-1],
            prepare=self._pad,
            run=self._run,
            capture=self._capture,
            forget=self._graphs.clear,
        )

    def _capture(self, shape: Shape) -> None:
        # Not torch.cuda.graph: it collects the garbage of Python each time.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(capture_stream()):
            graph.capture_begin(pool=self._memory)
            try:
                self._run(shape)
            finally:
                graph.capture_end()
        self._graphs[shape] = graph

    def _pad(self, shape: Shape) -> None:
        empty = place((), (), shape).pack(shape)
        send(torch.from_numpy(empty), self._numbers[: len(empty)])


def capture_prompts(model: PagedModel, pool: KVPool, *, max_tokens: int, memory: Any) -> StaticPrompts | None:
    """The graphs of steps of up to max_tokens on this pool, or None, with a line in the log, if they can't be captured
    or give wrong results. They share `memory` with other graphs.

    First, graphs on a small pool are checked against the model's results.
    """
    try:
        _check_prompts(model, max_tokens)
        prompts = StaticPrompts(model, pool, max_tokens=max_tokens, memory=memory)
        captured = measured_capture(prompts.capture, model.device)
    except (CannotCapture, torch.OutOfMemoryError, MemoryError) as error:
        log.warning("small steps with prompts run without a graph of their own: %s", first_cause(error))
        return None
    log.info(
        "steps of up to %d tokens of %d sequences run as one CUDA graph each: %d sizes, %s",
        prompts.shapes[-1].num_tokens,
        NUM_SLOTS,
        len(prompts.shapes),
        captured,
    )
    return prompts


def measure_prompt_graphs(model: PagedModel, *, max_tokens: int, block_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of a GPU's memory that capture_prompts() takes besides the pool; 0 if it can't capture.

    The two largest graphs are captured on a pool without blocks, and given back; each of the others is taken to need as
    much as the second.
    """
    prompts: StaticPrompts | None = None
    after: list[int] = []
    num_shapes = 0
    with suppress(CannotCapture, torch.OutOfMemoryError, MemoryError):
        pool = model.make_pool(num_blocks=2, block_size=block_size, dtype=kv_dtype)
        prompts = StaticPrompts(model, pool, max_tokens=max_tokens)
        num_shapes = len(prompts.shapes)
        for shape in prompts.shapes[:-3:-1]:
            prompts.capture([shape])
            after.append(free_bytes(model.device))
    del prompts
    return extrapolate(free_bytes(model.device), after, num_shapes)


def _check_prompts(model: PagedModel, max_tokens: int) -> None:
    """The self-check's steps with prompts in graphs, padded. Raises CannotCapture if they disagree."""
    prompts: StaticPrompts | None = None

    def forward(batch: StepBatch, pool: KVPool) -> Tensor:
        nonlocal prompts
        if prompts is None:
            prompts = StaticPrompts(model, pool, max_tokens=max_tokens)
            prompts.capture([shape for shape in prompts.shapes if shape.num_tokens == SMALLEST_BUCKET])
        if not prompts.takes(batch):
            return model.forward(batch, pool)
        return require_same_bits(model, batch, pool, prompts.forward(batch))

    disagreement = model.find_replay_disagreement(forward)
    if disagreement is not None:
        raise CannotCapture(f"replayed, {disagreement}")
