"""Steps in which some sequences run several tokens, with everything but their attention replayed as CUDA graphs.

The model's forward runs once while it is captured. Where a layer calls attention, one graph ends and the next one
begins, so nothing here depends on the architecture of the model:

    piece 0         the embedding, and the first layer up to its attention: also its keys and values to the pool
    attention 0     as in a step without graphs, of the sequences that the step has
    piece 1         the rest of the first layer, and the second one up to its attention
    ...
    piece L         the rest of the last layer, and the norm after it
    head            as in a step without graphs: logits of each sequence's last token

A piece depends on the number of tokens alone, which is padded to the next bucket. A padded token has slot -1, so its
key and its value are not written; its attention is zero, and no sequence reads a row of it. Queries, the results of
attention and the last hidden states lie in buffers that all pieces and all buckets share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.device.capture import (
    CannotCapture,
    capture_each,
    capture_stream,
    first_cause,
    measured_capture,
)
from quire.worker.device.profiling import phase
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.modes import Part
from quire.worker.model.paged_model import PagedModel

log = logging.getLogger(__name__)

SMALLEST_BUCKET = 64

# The rows of the inputs; slots have one for each layer group.
_TOKEN, _POSITION, _ADAPTER = range(3)
_SLOTS = slice(3, None)


def piece_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, rising: multiples of 64 up to 512, then at most a quarter more than the one before,
    up to max_tokens.
    """
    sizes, size = [], SMALLEST_BUCKET
    while size < max_tokens:
        sizes.append(size)
        power_of_2 = 1 << (size.bit_length() - 1)
        size += max(SMALLEST_BUCKET, power_of_2 // 4)
    return (*sizes, max_tokens)


@dataclass(frozen=True, slots=True)
class _Attention:
    """A layer's attention between two pieces. N tokens of the bucket.

    queries     [N, Hq, Dk]     written by the piece before
    out         [N, Hq, Dv]     read by the piece behind
    """

    layer_idx: int
    queries: Tensor
    out: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None

    def run(self, step: AttentionStep) -> None:
        """Attend for the tokens that the step has."""
        num_tokens = step.batch.num_tokens
        with phase(f"attention {self.layer_idx}"):
            step.attend(
                self.layer_idx,
                self.queries[:num_tokens],
                scaling=self.scaling,
                softcap=self.softcap,
                sinks=self.sinks,
                out=self.out[:num_tokens],
            )


class _Buffers:
    """Memory between pieces, by name and shape of a row. Each has as many rows as its first use needs."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def take(self, name: str, num_rows: int, row_shape: Sequence[int], like: Tensor) -> Tensor:
        """The first rows of a buffer, zero when it is new. The largest bucket has to be the first."""
        key = (name, tuple(row_shape), like.dtype)
        if key not in self._buffers:
            with torch.inference_mode(False):  # a tensor made in inference mode could never be written outside of it
                self._buffers[key] = torch.zeros(num_rows, *row_shape, dtype=like.dtype, device=like.device)
        return self._buffers[key][:num_rows]

    def clear(self, name: str, rows: slice) -> None:
        """Write zeros to these rows of all buffers of a name."""
        for (each, _, _), buffer in self._buffers.items():
            if each == name:
                buffer[rows].zero_()


class _CutStep(AttentionStep):
    """Attention of a forward that is cut: the queries are copied to a buffer, and the cut fills another one."""

    def __init__(self, step: AttentionStep, buffers: _Buffers, cut: Callable[[_Attention], None]) -> None:
        self.batch, self.pool, self.specs = step.batch, step.pool, step.specs
        self._step = step
        self._buffers = buffers
        self._cut = cut

    def write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """See AttentionStep.write."""
        self._step.write(layer_idx, k, v)

    def slot_mapping(self, layer_idx: int) -> Tensor:
        """See AttentionStep.slot_mapping."""
        return self._step.slot_mapping(layer_idx)

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
        """See AttentionStep.attend. The result is valid until the next call."""
        num_tokens, num_heads, _ = q.shape
        queries = self._buffers.take("queries", num_tokens, q.shape[1:], q)
        queries.copy_(q)
        result = self._buffers.take("attention", num_tokens, (num_heads, self.specs[layer_idx].v_head_dim), q)
        self._cut(_Attention(layer_idx, queries, result, scaling, softcap, sinks))
        return result


class _Captured:
    """The graphs of one forward, each with the attention behind it; behind the last one there is none."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.pieces: list[tuple[torch.cuda.CUDAGraph, _Attention | None]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the block, as one piece or as several if it calls cut()."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(capture_stream()):
            self._begin()
            try:
                yield
            finally:
                self._end(None)

    def cut(self, attention: _Attention) -> None:
        """End a piece, and begin the one behind this attention."""
        self._end(attention)
        self._begin()

    def replay(self, step: AttentionStep) -> None:
        """Run the pieces, and the attention of this step between them."""
        for graph, attention in self.pieces:
            graph.replay()
            if attention is not None:
                attention.run(step)

    def _begin(self) -> None:
        # Not torch.cuda.graph: it waits for the device and empties the allocator's cache each time.
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory)

    def _end(self, attention: _Attention | None) -> None:
        self._graph.capture_end()
        self.pieces.append((self._graph, attention))


class StaticPieces:
    """Steps of up to so many tokens on fixed memory, and on a GPU their pieces as graphs, for each bucket.

    Sizes: L tokens of the largest bucket, G layer groups.
        inputs      [3 + G, L]  int64: token, position, number of the adapter, slot in each group

    Without graphs the same forward runs on the same memory, padded, with its attention in between.
    """

    def __init__(self, model: PagedModel, pool: KVPool, *, buckets: Sequence[int], memory: Any = None) -> None:
        """`memory` is a torch.cuda.graph_pool_handle() to share, or None for one of its own.

        Raises CannotCapture if the attention of a layer depends on numbers on the host, or if there is nothing
        to tell a model's output layer from the rest.
        """
        if not model.step_kind.reads_lengths_on_device(model.attention_specs):
            raise CannotCapture("the attention of some layer cuts its work by lengths on the host")
        if not model.has_head:
            raise CannotCapture("its output layer can't be run by itself")
        self.buckets = tuple(buckets)
        self._model = model
        self._pool = pool
        self._memory = memory
        self._buffers = _Buffers()
        self._captured: dict[int, _Captured] = {}
        self._output_kind: Any = None
        with torch.inference_mode(False):
            shape = (_SLOTS.start + len(pool.groups), self.buckets[-1])
            self._padding = torch.zeros(shape, dtype=torch.int64, device=model.device)
            self._padding[_SLOTS] = -1
            self._inputs = self._padding.clone()
            self._unread = torch.zeros(self.buckets[-1], dtype=torch.int32, device=model.device)

    def takes(self, batch: StepBatch) -> bool:
        """True if it has no more tokens than the largest bucket."""
        return batch.num_tokens <= self.buckets[-1]

    def forward(self, batch: StepBatch) -> Tensor:
        """Run the model as PagedModel.forward does, for a batch that it takes.

        Cost: a launch per piece, the launches of attention and of the head, and one for the inputs; two more if there
        is padding.
        """
        bucket = next(size for size in self.buckets if size >= batch.num_tokens)
        step = self._model.attention_step(batch, self._pool)
        with torch.inference_mode():
            self._fill(batch, bucket)
            captured = self._captured.get(bucket)
            if captured is None:
                self._run(bucket, lambda attention: attention.run(step))
            else:
                captured.replay(step)
        hidden_states = self._hidden_states[: batch.num_tokens]
        return self._model.forward_head(batch, self._output_kind(last_hidden_state=hidden_states[None]))

    def _fill(self, batch: StepBatch, bucket: int) -> None:
        num_tokens = batch.num_tokens
        adapters = self._padding[_ADAPTER, :num_tokens] if batch.adapter_slots is None else batch.adapter_slots
        inputs = (batch.input_ids[None], batch.positions[None], adapters[None], batch.slot_mapping)
        torch.cat(inputs, out=self._inputs[:, :num_tokens])
        if num_tokens < bucket:
            padding = slice(num_tokens, bucket)
            self._inputs[:, padding].copy_(self._padding[:, padding])
            self._buffers.clear("attention", padding)

    def _run(self, bucket: int, cut: Callable[[_Attention], None]) -> None:
        """Run a forward of the inputs, up to the last hidden states."""
        batch = self._batch(bucket)
        step = _CutStep(self._model.attention_step(batch, self._pool), self._buffers, cut)
        output = self._model.forward_base(batch, step)
        hidden_states = output.last_hidden_state[0]
        self._output_kind = type(output)
        self._hidden_states = self._buffers.take(
            "hidden states", self.buckets[-1], hidden_states.shape[1:], hidden_states
        )
        self._hidden_states[:bucket].copy_(hidden_states)

    def _batch(self, bucket: int) -> StepBatch:
        """The inputs as a batch, without block tables and lengths: a module that reads them can't be captured."""
        return StepBatch(
            input_ids=self._inputs[_TOKEN, :bucket],
            positions=self._inputs[_POSITION, :bucket],
            slot_mapping=self._inputs[_SLOTS, :bucket],
            block_tables=self._unread[None, :bucket, None].expand(len(self._pool.groups), -1, -1),
            seq_lens=self._unread[:bucket],
            cu_seqlens_q=self._unread[:bucket],
            last_indices=self._unread[:bucket],
            rows=self._unread[:bucket],
            seq_lens_host=(),
            counts_host=(1,) * bucket,
            rows_host=(),
            adapter_slots=self._inputs[_ADAPTER, :bucket],
        )

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture the pieces of every bucket, or of those of `sizes`. Needs a GPU.

        Raises CannotCapture if the model's forward waits for the device, or does anything a graph can't hold; then no
        bucket is captured. Cost: two forwards per bucket and two more; memory of the largest.
        """
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        capture_each(
            sorted(sizes or self.buckets, reverse=True),
            largest=self.buckets[-1],
            prepare=lambda _: self._inputs.copy_(self._padding),
            run=lambda bucket: self._run(bucket, _skip),
            capture=self._capture,
            forget=self._captured.clear,
        )

    def _capture(self, bucket: int) -> None:
        captured = _Captured(self._memory)
        with captured.capture():
            self._run(bucket, captured.cut)
        self._captured[bucket] = captured


def _skip(_: _Attention) -> None:
    """Leave the attention out: its result is the buffer's content."""


def capture_pieces(model: PagedModel, pool: KVPool, *, max_tokens: int, memory: Any) -> StaticPieces | None:
    """The pieces of steps of up to max_tokens on this pool, or None, with a line in the log, if they can't be
    captured or give wrong results. They share `memory` with other graphs.

    First, graphs on a small pool are checked against the model's results.
    """
    try:
        _check_pieces(model, max_tokens)
        pieces = StaticPieces(model, pool, buckets=piece_buckets(max_tokens), memory=memory)
        captured = measured_capture(pieces.capture, model.device)
    except (CannotCapture, torch.OutOfMemoryError, MemoryError) as error:
        log.warning("mixed steps run without CUDA graphs: %s", first_cause(error))
        model.modes.note(Part.PROMPTS, "without CUDA graphs", degraded=first_cause(error))
        return None
    model.modes.note(Part.PROMPTS, f"CUDA graphs of up to {max_tokens} tokens, but for their attention")
    log.info(
        "mixed steps of up to %d tokens run as CUDA graphs between their attention: %d sizes, %s",
        max_tokens,
        len(pieces.buckets),
        captured,
    )
    return pieces


def require_same_bits(model: PagedModel, batch: StepBatch, pool: KVPool, logits: Tensor) -> Tensor:
    """Return the logits of a replay. Raises CannotCapture if the model is deterministic and has other bits without."""
    if model.is_deterministic and not torch.equal(logits, model.forward(batch, pool)):
        raise CannotCapture("replayed, its logits have other bits")
    return logits


def _check_pieces(model: PagedModel, max_tokens: int) -> None:
    """The self-check's steps in pieces, padded. Raises CannotCapture if they disagree."""
    pieces: StaticPieces | None = None

    def forward(batch: StepBatch, pool: KVPool) -> Tensor:
        nonlocal pieces
        if batch.num_tokens > max_tokens:
            return model.forward(batch, pool)
        if pieces is None:
            pieces = StaticPieces(model, pool, buckets=piece_buckets(max_tokens))
            pieces.capture()
        return require_same_bits(model, batch, pool, pieces.forward(batch))

    try:
        disagreement = model.find_replay_disagreement(forward)
    except (CannotCapture, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of an output layer that does not run by itself
        raise CannotCapture(first_cause(error)) from error
    if disagreement is not None:
        raise CannotCapture(f"replayed, {disagreement}")
