"""Steps in which every sequence runs one token, on fixed memory, so that a GPU can replay them as one CUDA graph.

A step's numbers are copied to where the captured forward reads them, padded to the next bucket of batch sizes. Nothing
of them is part of the graph: lengths, block tables, positions and slots are read on the device, and grids follow from
the bucket. A padded row is a sequence of length 0 whose token has slot -1: it reads and writes no block, and its
attention is zero.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.worker.kv_pool import KVPool
from quire.worker.model import PagedModel
from quire.worker.step_batch import StepBatch

log = logging.getLogger(__name__)

MAX_BUCKET = 256


class CannotCapture(Exception):
    """A model's decode step can't run as a CUDA graph; the message says why."""


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture, rising: 1, 2, 4, then multiples of 8, up to max_num_seqs or MAX_BUCKET."""
    largest = min(max_num_seqs, MAX_BUCKET)
    return (*(size for size in (1, 2, 4, *range(8, MAX_BUCKET, 8)) if size < largest), largest)


class StaticDecode:
    """Decode steps on fixed memory: buffers, and on a GPU a graph per bucket.

    Sizes: n sequences of a step, L the largest bucket, M blocks of the longest sequence there may be.
        token_ids, positions, slot_mapping  [3, L]  int64
        block_tables                        [L, M]  int32
        seq_lens                            [L]     int32
        logits                              [L, vocab_size] float32, of all buckets: kept for each, they would add up
    Without graphs the same forward runs on the same memory as it is: what a CPU can test.
    """

    def __init__(self, model: PagedModel, pool: KVPool, *, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        """Raises CannotCapture if the attention of a layer depends on numbers that the host knows."""
        if not model.step_kind.reads_lengths_on_device(model.attention_specs):
            raise CannotCapture("the attention of some layer cuts its work by lengths on the host")
        self._model = model
        self._pool = pool
        self.buckets = buckets(max_num_seqs)
        largest = self.buckets[-1]
        device = model.device
        self._tokens = torch.zeros(3, largest, dtype=torch.int64, device=device)
        self._padding = torch.tensor([[0], [0], [-1]], dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(largest, max_blocks_per_seq, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._cu_seqlens = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(largest, dtype=torch.int64, device=device)
        self._logits = torch.zeros(largest, model.vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def takes(self, batch: StepBatch) -> bool:
        """Whether every sequence runs one token, and there are no more of them than the largest bucket."""
        return batch.num_tokens == batch.num_seqs <= self.buckets[-1]

    def forward(self, batch: StepBatch) -> Tensor:
        """As PagedModel.forward, for a batch that it takes; logits [n, vocab_size] are valid until the next call."""
        bucket = next(size for size in self.buckets if size >= batch.num_seqs)
        self._fill(batch, bucket)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._run(bucket)
        return self._logits[: batch.num_seqs]

    def capture(self) -> None:
        """Capture every bucket, the largest first, so that the others find its memory. Needs a GPU.

        Raises CannotCapture if the model's forward waits for the device, or whatever else a graph cannot hold; then
        no bucket is captured. Cost: two forwards per bucket and one more; memory of the largest.
        """
        memory = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            self._refuse_waits(aside)
            for bucket in reversed(self.buckets):
                self._graphs[bucket] = self._capture(bucket, memory, aside)
        except Exception as error:
            self._graphs.clear()
            torch.cuda.set_stream(torch.cuda.default_stream())  # which a capture that failed may not have gone back to
            torch.cuda.synchronize()
            raise CannotCapture(_first_cause(error)) from error

    def _refuse_waits(self, aside: torch.cuda.Stream) -> None:
        """Raise CannotCapture, naming the line, if a forward waits for the device: a capture would break off there."""
        bucket = self.buckets[-1]
        self._warm_up(bucket, aside)  # what is done once only may wait
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._run(bucket)
        except RuntimeError as error:
            raise CannotCapture(f"its forward waits for the device at {_line_of(error)}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def _warm_up(self, bucket: int, aside: torch.cuda.Stream) -> None:
        """Run padding alone: rows that read and write nothing. Compiles, and lets libraries allocate what they keep.

        On one stream for all buckets: libraries keep a workspace for each stream they see.
        """
        self._tokens.copy_(self._padding.expand_as(self._tokens))
        self._seq_lens.zero_()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run(bucket)
        torch.cuda.current_stream().wait_stream(aside)

    def _capture(self, bucket: int, memory: Any, aside: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self._warm_up(bucket, aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=aside):
            self._run(bucket)
        return graph

    def _run(self, bucket: int) -> None:
        self._logits[:bucket].copy_(self._model.forward(self._batch(bucket), self._pool))

    def _fill(self, batch: StepBatch, bucket: int) -> None:
        num_seqs, width = batch.block_tables.shape
        for row, numbers in zip(self._tokens, (batch.input_ids, batch.positions, batch.slot_mapping), strict=True):
            row[:num_seqs].copy_(numbers)
        self._block_tables[:num_seqs, :width].copy_(batch.block_tables)
        self._seq_lens[:num_seqs].copy_(batch.seq_lens)
        if num_seqs < bucket:
            padded = self._tokens[:, num_seqs:bucket]
            padded.copy_(self._padding.expand_as(padded))
            self._seq_lens[num_seqs:bucket].zero_()

    def _batch(self, bucket: int) -> StepBatch:
        """The buffers as a batch. Lengths on the host are left out: who asks for them can't be captured."""
        token_ids, positions, slot_mapping = self._tokens[:, :bucket]
        return StepBatch(
            input_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=self._block_tables[:bucket],
            seq_lens=self._seq_lens[:bucket],
            cu_seqlens_q=self._cu_seqlens[: bucket + 1],
            last_indices=self._indices[:bucket],
            seq_lens_host=(),
            counts_host=(1,) * bucket,
            rows_host=(),
        )


def capture_decode(model: PagedModel, pool: KVPool, *, max_num_seqs: int) -> StaticDecode | None:
    """The model's decode steps as graphs on this pool, or None, with a line in the log, if they can't be or go wrong.

    Whether replays say what the model says is asked first, of graphs on a small pool.
    """
    try:
        _check_replays(model)
        decode = StaticDecode(
            model, pool, max_num_seqs=max_num_seqs, max_blocks_per_seq=-(-model.max_model_len // pool.block_size)
        )
        decode.capture()
    except (CannotCapture, torch.OutOfMemoryError) as error:
        log.warning("decode steps run without CUDA graphs: %s", _first_cause(error))
        return None
    log.info("decode steps run as CUDA graphs of up to %d sequences", decode.buckets[-1])
    return decode


def _first_cause(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that breaks off raises again while it is closed."""
    while not isinstance(error, CannotCapture) and isinstance(error.__context__, Exception):
        error = error.__context__
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CannotCapture) else f"{type(error).__name__}: {text}"


def _line_of(error: BaseException) -> str:
    """The innermost line of Python that raised it, "file.py:12 in forward"."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def _check_replays(model: PagedModel) -> None:
    """The self-check's sequences with their decodes replayed, padded. Raises CannotCapture if they disagree."""
    captured: StaticDecode | None = None

    def forward(batch: StepBatch, pool: KVPool) -> Tensor:
        nonlocal captured
        if batch.num_tokens > batch.num_seqs:
            return model.forward(batch, pool)
        if captured is None:
            width = -(-model.max_model_len // pool.block_size)
            captured = StaticDecode(model, pool, max_num_seqs=4, max_blocks_per_seq=width)
            captured.capture()
        return captured.forward(batch)

    disagreement = model.find_disagreement(forward)
    if disagreement is not None:
        raise CannotCapture(f"replayed, {disagreement}")
