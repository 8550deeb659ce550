"""Steps in which every sequence runs one token, on fixed memory, so that a GPU can replay them as CUDA graphs.

The host sends a step's numbers in one copy to memory that the captured stages read, padded to the next bucket of
batch sizes. No number is part of a graph: lengths, block tables, positions and slots are read on the device, and
grids depend on the bucket. A padded row is a sequence of length 0, its token has slot -1: it reads and writes no
block, and its attention is zero.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ring_layout import LAST_SAMPLED, LENGTH, POSITION, ROW, TOKEN, RingLayout
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
from quire.worker.memory.sequence_table import Int64s, SequenceTable
from quire.worker.memory.step_batch import Runs, StepBatch, check_runs
from quire.worker.memory.step_ring import RingOutOfStep, StepRing, StepTokens
from quire.worker.model.modes import Part
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.self_check import CHECKED_SEQS
from quire.worker.run.model_thread import MAX_UNCOLLECTED
from quire.worker.run.pieces import StaticPieces, capture_pieces, piece_buckets, require_same_bits
from quire.worker.sampling.parameters import SamplingParams, TokenIds
from quire.worker.sampling.sampler import DRAW_COLUMNS, Draws, Sampler, Way

if TYPE_CHECKING:
    from quire.kernels.step_ring import StepMemory

log = logging.getLogger(__name__)

MAX_BUCKET = 256

# The rows of StaticDecode's inputs behind those of ring_layout.py: the sampler's, the adapter, and slots in each layer
# group.
_DRAWS = slice(4, 4 + len(DRAW_COLUMNS))
_ADAPTER = _DRAWS.stop
_SLOTS = slice(_ADAPTER + 1, None)

MAX_CHANGES = 1024
"""Entries of block tables that one step as a whole graph has room for. A sequence that grows needs one for each layer
group, one that ends one for each of its blocks; more than these are sent in copies of their own."""

# The share of tokens that may differ from the Sampler's in the check of the replayed sampler: rounding moves the
# borders of top-p and min-p, and the token that is drawn may lie between the old and the new.
MAX_OTHER_TOKENS = 1 / 16
NUM_CHECKED_POSITIONS = 4


class Stage(StrEnum):
    """The stages of a decode step before a token is chosen; the one that chooses is a Way."""

    PREPARE = "prepare"
    FORWARD = "forward"


class Whole(StrEnum):
    """A decode step as one graph, by the way in which its tokens are chosen."""

    GREEDY = "whole greedy"
    DRAWN = "whole drawn"


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture, rising: 1, 2, 4, then multiples of 8, up to max_num_seqs or MAX_BUCKET."""
    largest = min(max_num_seqs, MAX_BUCKET)
    return (*(size for size in (1, 2, 4, *range(8, MAX_BUCKET, 8)) if size < largest), largest)


class StaticDecode:
    """Decode steps on fixed memory: buffers, and on a GPU a graph per stage and bucket.

    Sizes: n sequences of a step, L the largest bucket, G layer groups, M blocks of the longest sequence there may be.
        inputs          [10 + G, L] int64, the host's inputs: table row, token or -1, position, length, the
                                    DRAW_COLUMNS, the number of the adapter, and the slot in each group
        token_ids       [L]         int64
        block_tables    [G, L, M]   int32
        seq_lens        [L]         int32
        temperature     [L]         float32
        logits          [L, vocab_size] of all buckets, in the dtype of the model's output layer: kept for each, they
                                        would add up
        sampled         [L]         int64

    Each stage of a step is replayed as one graph. Without graphs the same functions run on the same memory, as they
    are: what a CPU can test.
        prepare             inputs, the table -> token_ids, block_tables, seq_lens, temperature
        forward             these, and positions and slots -> logits
        greedy or drawn     logits, and the sampler's inputs -> sampled, and the table's last tokens

    With a ring, a step may also be one graph, which has the same stages and makes no copies:
        whole               a slot of the ring, the table -> all of these, and the tokens in the ring
    """

    def __init__(self, model: PagedModel, pool: KVPool, *, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        """Raises CannotCapture if the attention of a layer depends on numbers that the host knows."""
        if not model.step_kind.reads_lengths_on_device(model.attention_specs):
            raise CannotCapture("the attention of some layer cuts its work by lengths on the host")
        from quire.kernels.sampler import SamplerWorkspace

        self._model = model
        self.pool = pool
        self.buckets = buckets(max_num_seqs)
        self.samples = True
        """True if sample() may be called: not if it was found to choose other tokens than the Sampler."""
        largest, device = self.buckets[-1], model.device
        self.table = SequenceTable(
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=max_blocks_per_seq,
            device=device,
            windowed=pool.windowed,
        )
        """The sequences of prepared steps: the graphs read and write its tensors."""
        num_groups = len(pool.groups)
        self._padding = np.zeros((_SLOTS.start + num_groups, largest), dtype=np.int64)
        self._padding[ROW] = self.table.padding_row
        self._padding[_SLOTS] = -1
        with torch.inference_mode(False):  # a tensor made in inference mode could never be written outside of it
            self._inputs = torch.tensor(self._padding, device=device)
            self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
            self._block_tables = torch.zeros(num_groups, largest, max_blocks_per_seq, dtype=torch.int32, device=device)
            self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
            self._temperature = torch.zeros(largest, dtype=torch.float32, device=device)
            self._cu_seqlens = torch.arange(largest + 1, dtype=torch.int32, device=device)
            self._indices = torch.arange(largest, dtype=torch.int64, device=device)
            self._logits = torch.zeros(largest, model.vocab_size, dtype=model.dtype, device=device)
            self._sampled = torch.zeros(largest, dtype=torch.int64, device=device)
            self._workspace = SamplerWorkspace.allocate(
                max_num_seqs=largest, vocab_size=model.vocab_size, device=device
            )
        self._prepared: StepBatch | None = None
        self._whole: Runs | None = None
        self.pieces: StaticPieces | None = None
        """The graphs of steps that it does not take; None if there are none."""
        self.ring: StepRing | None = None
        """The inputs and tokens of steps that are one graph; None if none are."""
        self._graphs: dict[tuple[Stage | Way | Whole, int], torch.cuda.CUDAGraph] = {}
        self.memory: Any = None
        """The torch.cuda.graph_pool_handle() of the graphs, once there is one."""

    @property
    def logits(self) -> Tensor:
        """[L, vocab_size], of the last forward, in the dtype of the model's output layer."""
        return self._logits

    def takes(self, batch: StepBatch) -> bool:
        """True if every sequence runs one token, and there are no more of them than the largest bucket."""
        return batch.num_tokens == batch.num_seqs <= self.buckets[-1]

    def takes_counts(self, counts: Int64s) -> bool:
        """Answer takes() before the batch is made; counts are the tokens that each sequence runs."""
        return len(counts) <= self.buckets[-1] and bool((counts == 1).all())

    def prepare(
        self,
        rows: Sequence[int],
        starts: Sequence[int] | Int64s,
        token_ids: Sequence[TokenIds | None],
        *,
        draws: Draws | None,
        adapter_slots: Sequence[int] | None = None,
    ) -> StepBatch:
        """Make a batch as build_step_batch does, of one token for each row of `table`. With draws it can be sampled.

        The batch is valid until the next call of prepare() or forward(). Raises ValueError as build_step_batch does.
        Cost: one transfer and one launch, whatever the number of sequences; two more if block tables have changed.
        """
        runs = self._check(rows, starts, token_ids)
        self.table.flush()
        inputs = self._padding.copy()
        inputs[:, : len(rows)] = self._columns(runs, draws, adapter_slots)
        send(torch.from_numpy(inputs), self._inputs)
        self._replay(Stage.PREPARE, self._bucket(len(rows)))
        self._prepared = self._batch_of(runs)
        return self._prepared

    def _check(self, rows: Sequence[int], starts: Sequence[int] | Int64s, token_ids: Sequence[TokenIds | None]) -> Runs:
        return check_runs(self.table, self.pool.block_size, rows, starts, [1] * len(rows), token_ids)

    def _columns(self, runs: Runs, draws: Draws | None, adapter_slots: Sequence[int] | None) -> Int64s:
        """The inputs of a step's sequences, without padding."""
        inputs = np.zeros((len(self._padding), len(runs.rows)), dtype=np.int64)
        inputs[ROW] = runs.rows
        inputs[TOKEN] = LAST_SAMPLED
        inputs[TOKEN, list(runs.given)] = [ids[0] for ids in runs.given.values()]
        inputs[POSITION] = runs.starts
        inputs[LENGTH] = runs.ends
        inputs[_SLOTS] = self.table.slots(runs.rows, runs.starts, block_size=self.pool.block_size)
        if draws is not None:
            inputs[_DRAWS] = draws.columns
        if adapter_slots is not None:
            inputs[_ADAPTER] = adapter_slots
        return inputs

    def _batch_of(self, runs: Runs) -> StepBatch:
        """The buffers as the batch of these runs."""
        width = -(-int(runs.ends.max()) // self.pool.block_size)
        lengths, rows = tuple(runs.ends.tolist()), tuple(runs.rows.tolist())
        return self._batch(len(rows), width=width, lengths=lengths, rows=rows)

    def run_whole(
        self,
        rows: Sequence[int],
        starts: Sequence[int] | Int64s,
        token_ids: Sequence[TokenIds | None],
        draws: Draws,
        *,
        spins: bool = False,
        adapter_slots: Sequence[int] | None = None,
    ) -> StepTokens | None:
        """Prepare a batch, run the model and sample, as one graph: return the tokens to come.

        spins is that of Arrival.

        None, with nothing done, if there is no ring, or the steps launched before have all its slots. Raises ValueError
        as build_step_batch does. Cost: one launch, no copy.
        """
        if self.ring is None or not self.ring.has_room:
            return None
        runs = self._check(rows, starts, token_ids)
        self.ring.fill(self._columns(runs, draws, adapter_slots), self.table, rows)
        self._prepared = None
        self._replay(Whole[draws.way.name], self._bucket(len(rows)))
        self.table.note_sent()
        self.table.note_sampled(rows, runs.ends)
        self._whole = runs
        return self.ring.launched(len(rows), spins=spins)

    def whole_batch(self) -> StepBatch:
        """The batch that run_whole() has made last, valid until the next step. The device may not have made it yet."""
        if self._whole is None:
            raise ValueError("no step was run as one graph")
        return self._batch_of(self._whole)

    def begin_anew(self) -> None:
        """Have all launched steps forgotten: those that failed may have left the ring out of step."""
        if self.ring is not None:
            self.ring.begin_anew()

    def make_ring(self) -> None:
        """Let steps be one graph. Raises CannotCapture if the memory can't be pinned."""
        layout = RingLayout(
            num_slots=MAX_UNCOLLECTED,
            max_num_seqs=self.buckets[-1],
            num_inputs=len(self._padding),
            temperature=_DRAWS.start + list(DRAW_COLUMNS).index("temperature"),
            first_slot=_SLOTS.start,
            max_changes=MAX_CHANGES,
        )
        try:
            self.ring = StepRing(layout, self._model.device)
        except RuntimeError as error:
            raise CannotCapture(f"the memory of the ring can't be pinned: {error}") from error

    def forward(self, batch: StepBatch) -> Tensor:
        """Run the model as PagedModel.forward_unconverted does. The logits [n, vocab_size] are valid until the next
        call.

        Cost: one launch if prepare() made the batch, else a copy of each of its tensors besides.
        """
        if batch is not self._prepared:
            self._fill(batch)
        self._replay(Stage.FORWARD, self._bucket(batch.num_seqs))
        return self._logits[: batch.num_seqs]

    def sample(self, batch: StepBatch, way: Way) -> Tensor:
        """Tokens [n] int64 of the last forward's logits, valid until the next call; the table remembers them.

        The batch is the one that prepare() made last, with draws of this way. Cost: one launch.
        """
        if batch is not self._prepared:
            raise ValueError("only the batch that was prepared last can be sampled")
        self._replay(way, self._bucket(batch.num_seqs))
        self.table.note_sampled(batch.rows_host, batch.seq_lens_host)
        return self._sampled[: batch.num_seqs]

    def _bucket(self, num_seqs: int) -> int:
        return next(size for size in self.buckets if size >= num_seqs)

    def _replay(self, stage: Stage | Way | Whole, bucket: int) -> None:
        graph = self._graphs.get((stage, bucket))
        if graph is None:
            self._run(stage, bucket)
        else:
            graph.replay()

    def _run(self, stage: Stage | Way | Whole, bucket: int) -> None:
        match stage:
            case Stage.PREPARE:
                self._run_prepare(bucket)
            case Stage.FORWARD:
                self._run_forward(bucket)
            case Way():
                self._choose(stage, bucket)
                self._remember(bucket)
            case Whole():
                self._run_whole(Way[stage.name], bucket)

    def _run_prepare(self, bucket: int) -> None:
        inputs = self._inputs[:, :bucket]
        last_sampled = self.table.last_token.index_select(0, inputs[ROW])
        self._token_ids[:bucket].copy_(torch.where(inputs[TOKEN] == LAST_SAMPLED, last_sampled, inputs[TOKEN]))
        self._block_tables[:, :bucket].copy_(self.table.block_tables.index_select(1, inputs[ROW]))
        self._seq_lens[:bucket].copy_(inputs[LENGTH])
        self._temperature[:bucket].copy_(self._draws("temperature", bucket))

    def _run_forward(self, bucket: int) -> None:
        logits = self._model.forward_unconverted(self._batch(bucket), self.pool)
        if logits.dtype != self._logits.dtype:
            self._keep_logits_as(logits.dtype)
        self._logits[:bucket].copy_(logits)

    def _keep_logits_as(self, dtype: torch.dtype) -> None:
        """Take the dtype that the output layer gives, which is not always the model's. Raises CannotCapture if a graph
        has the logits of another dtype.
        """
        if self._graphs:
            raise CannotCapture(f"the model's logits are {dtype} now, and {self._logits.dtype} in its graphs")
        with torch.inference_mode(False):
            self._logits = torch.zeros(self._logits.shape, dtype=dtype, device=self._logits.device)

    def _run_whole(self, way: Way, bucket: int) -> None:
        from quire.kernels.step_ring import begin_step, end_step

        assert self.ring is not None
        memory, layout = self._memory(self.ring), self.ring.layout
        block_size = self.pool.block_size
        begin_step(self.ring.slots, memory, layout=layout, num_seqs=bucket, block_size=block_size)
        self._run_forward(bucket)
        self._choose(way, bucket)
        end_step(self.ring.words, memory, layout=layout, num_seqs=bucket)

    def _memory(self, ring: StepRing) -> StepMemory:
        from quire.kernels.step_ring import StepMemory

        return StepMemory(
            inputs=self._inputs,
            token_ids=self._token_ids,
            block_tables=self._block_tables,
            seq_lens=self._seq_lens,
            temperature=self._temperature,
            sampled=self._sampled,
            tables=self.table.block_tables,
            last_token=self.table.last_token,
            state=ring.state,
        )

    def _choose(self, way: Way, bucket: int) -> None:
        if way is Way.GREEDY:
            self._run_greedy(bucket)
        else:
            self._run_drawn(bucket)

    def _run_greedy(self, bucket: int) -> None:
        from quire.kernels.sampler import argmax

        argmax(self._logits[:bucket], workspace=self._workspace, out=self._sampled[:bucket])

    def _run_drawn(self, bucket: int) -> None:
        from quire.kernels.sampler import sample

        sample(
            self._logits[:bucket],
            temperature=self._temperature[:bucket],
            seeds=self._draws("seed", bucket),
            positions=self._inputs[LENGTH, :bucket],
            top_k=self._draws("top_k", bucket),
            top_p=self._draws("top_p", bucket),
            min_p=self._draws("min_p", bucket),
            workspace=self._workspace,
            out=self._sampled[:bucket],
        )

    def _remember(self, bucket: int) -> None:
        self.table.last_token.index_copy_(0, self._inputs[ROW, :bucket], self._sampled[:bucket])

    def _draws(self, name: str, bucket: int) -> Tensor:
        return self._inputs[_DRAWS][list(DRAW_COLUMNS).index(name), :bucket].view(DRAW_COLUMNS[name])

    def _fill(self, batch: StepBatch) -> None:
        """Take the numbers from a batch that was built elsewhere."""
        _, num_seqs, width = batch.block_tables.shape
        self._prepared = None
        send(torch.from_numpy(self._padding), self._inputs)
        self._replay(Stage.PREPARE, self._bucket(num_seqs))
        self._token_ids[:num_seqs].copy_(batch.input_ids)
        self._inputs[POSITION, :num_seqs].copy_(batch.positions)
        self._inputs[_SLOTS, :num_seqs].copy_(batch.slot_mapping)
        self._block_tables[:, :num_seqs, :width].copy_(batch.block_tables)
        self._seq_lens[:num_seqs].copy_(batch.seq_lens)
        if batch.adapter_slots is not None:
            self._inputs[_ADAPTER, :num_seqs].copy_(batch.adapter_slots)

    def _batch(
        self, num_seqs: int, *, width: int | None = None, lengths: tuple[int, ...] = (), rows: tuple[int, ...] = ()
    ) -> StepBatch:
        """The buffers as a batch. While a stage is captured it has no lengths on the host: a module that needs them
        can't be captured.
        """
        return StepBatch(
            input_ids=self._token_ids[:num_seqs],
            positions=self._inputs[POSITION, :num_seqs],
            slot_mapping=self._inputs[_SLOTS, :num_seqs],
            block_tables=self._block_tables[:, :num_seqs, :width],
            seq_lens=self._seq_lens[:num_seqs],
            cu_seqlens_q=self._cu_seqlens[: num_seqs + 1],
            last_indices=self._indices[:num_seqs],
            rows=self._inputs[ROW, :num_seqs],
            seq_lens_host=lengths,
            counts_host=(1,) * num_seqs,
            rows_host=rows,
            adapter_slots=self._inputs[_ADAPTER, :num_seqs],
        )

    def sample_logits(self, logits: Tensor, positions: Sequence[int], draws: Draws) -> Tensor:
        """Sample from given logits [n, vocab_size], for sequences that the table does not have."""
        num_seqs = len(positions)
        inputs = self._padding.copy()
        inputs[LENGTH, :num_seqs] = positions
        inputs[_DRAWS, :num_seqs] = draws.columns
        self._prepared = None
        send(torch.from_numpy(inputs), self._inputs)
        self._replay(Stage.PREPARE, self._bucket(num_seqs))
        self._logits[:num_seqs].copy_(logits)
        self._replay(draws.way, self._bucket(num_seqs))
        return self._sampled[:num_seqs]

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture prepare and forward for every bucket, or for those of `sizes`. Needs a GPU.

        Raises CannotCapture if the model's forward waits for the device, or does anything else that a graph can't
        hold; then no bucket is captured. Cost: two forwards per bucket and one more; memory of the largest.
        """
        self._capture_stages(tuple(Stage), sizes or self.buckets)

    def capture_sampling(self, sizes: Sequence[int] | None = None) -> None:
        """Capture the sampler in the same way. Raises CannotCapture; then none of it is captured."""
        self._capture_stages(tuple(Way), sizes or self.buckets)

    def capture_whole(self, sizes: Sequence[int] | None = None) -> None:
        """Capture whole steps in the same way. Raises CannotCapture; then no step is one graph.

        Their stages have to be captured before. Cost: two forwards, and one per bucket.
        """
        if self.ring is None:
            self.make_ring()
        try:
            self._capture_stages(tuple(Whole), sizes or self.buckets, is_warm=True)
        except CannotCapture:
            self.drop_whole()
            raise
        assert self.ring is not None
        self.ring.begin_anew()  # the steps of the capture took turns, too

    def drop_whole(self) -> None:
        """Forget the graphs of whole steps, and their ring."""
        self._forget(tuple(Whole))
        self.ring = None

    def _forget(self, stages: Sequence[Stage | Way | Whole]) -> None:
        for key in [key for key in self._graphs if key[0] in stages]:
            del self._graphs[key]

    def _capture_stages(
        self, stages: Sequence[Stage | Way | Whole], sizes: Sequence[int], *, is_warm: bool = False
    ) -> None:
        if self.memory is None:
            self.memory = torch.cuda.graph_pool_handle()

        def run(bucket: int) -> None:
            for stage in stages:
                self._run(stage, bucket)

        def capture(bucket: int) -> None:
            for stage in stages:
                self._graphs[stage, bucket] = self._capture(stage, bucket)

        capture_each(
            sorted(sizes, reverse=True),
            largest=self.buckets[-1],
            prepare=lambda _: send(torch.from_numpy(self._padding), self._inputs),
            run=run,
            capture=capture,
            forget=partial(self._forget, stages),
            is_warm=is_warm,
        )

    def _capture(self, stage: Stage | Way | Whole, bucket: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory, stream=capture_stream()):
            self._run(stage, bucket)
        return graph


def capture_decode(
    model: PagedModel, pool: KVPool, *, max_num_seqs: int, max_graph_tokens: int = 0, whole: bool = False
) -> StaticDecode | None:
    """The model's decode steps as graphs on this pool, or None, with a log line, if that fails or results differ.

    Of mixed steps of up to max_graph_tokens the pieces between attention become graphs, too, unless it is 0. First,
    graphs on a small pool are checked against the model's results. With `whole`, decode steps that need no more are
    one graph each, if these sample what the graphs of the stages do; the blocks of the pool must not be in use yet.
    """
    try:
        _check_replays(model)
        decode = _static_decode(model, pool, max_num_seqs=max_num_seqs)
        captured = measured_capture(decode.capture, model.device)
    except (CannotCapture, torch.OutOfMemoryError, MemoryError) as error:
        _note_without_graphs(model, first_cause(error), max_graph_tokens=max_graph_tokens)
        return None
    try:
        decode.capture_sampling()
        _check_sampling(decode)
    except (CannotCapture, torch.OutOfMemoryError) as error:
        decode.samples = False
        model.modes.note(Part.SAMPLER, "without CUDA graphs", degraded=first_cause(error))
        log.warning("decode steps run as CUDA graphs, and their tokens are sampled without: %s", first_cause(error))
    else:
        model.modes.note(Part.SAMPLER, f"CUDA graphs{' of greedy steps' if model.is_deterministic else ''}")
    model.modes.note(Part.DECODE, f"CUDA graphs of up to {decode.buckets[-1]} sequences")
    log.info("decode steps run as CUDA graphs of up to %d sequences: %s", decode.buckets[-1], captured)
    if whole:
        _capture_whole(decode)
    if not max_graph_tokens:
        model.modes.note(Part.PROMPTS, "without CUDA graphs: --max-graph-tokens 0")
    else:
        decode.pieces = capture_pieces(model, pool, max_tokens=max_graph_tokens, memory=decode.memory)
    return decode


def _note_without_graphs(model: PagedModel, reason: str, *, max_graph_tokens: int) -> None:
    """Without graphs of decode steps there are none of samplers and prompts."""
    log.warning("decode steps run without CUDA graphs: %s", reason)
    for part in (Part.DECODE, Part.SAMPLER, *((Part.PROMPTS,) if max_graph_tokens else ())):
        model.modes.note(part, "without CUDA graphs", degraded=reason)


def _capture_whole(decode: StaticDecode) -> None:
    """Let decode steps be one graph, or say in the log why they are not."""
    try:
        if not decode.samples:
            raise CannotCapture("their tokens are sampled without graphs")
        decode.capture_whole()
        _check_whole(decode)
    except (CannotCapture, RingOutOfStep, torch.OutOfMemoryError) as error:
        decode.drop_whole()
        log.warning("--step-graph one: decode steps run in parts: %s", first_cause(error))
        return
    log.info("decode steps without penalties, constraints, grammars and log-probabilities are one CUDA graph")


def measure_graphs(
    model: PagedModel,
    *,
    max_num_seqs: int,
    max_graph_tokens: int = 0,
    block_size: int,
    kv_dtype: torch.dtype,
    whole: bool = False,
) -> int:
    """Bytes of a GPU's memory that capture_decode() takes besides the pool; 0 if it can't capture.

    The two largest buckets are captured on a pool without blocks, and given back; so are the two largest buckets of
    pieces. Each of the others is taken to need as much as the second: it finds the memory of the largest, and adds its
    graphs.
    """
    free = partial(free_bytes, model.device)
    pieces: StaticPieces | None = None
    after_pieces: list[int] = []
    sizes = piece_buckets(max_graph_tokens) if max_graph_tokens else ()
    try:
        pool = model.make_pool(num_blocks=2, block_size=block_size, dtype=kv_dtype)
        decode = _static_decode(model, pool, max_num_seqs=max_num_seqs)
        after = []
        for bucket in decode.buckets[:-3:-1]:
            decode.capture([bucket])
            decode.capture_sampling([bucket])
            if whole:
                decode.capture_whole([bucket])
            after.append(free())
        num_buckets = len(decode.buckets)
    except (CannotCapture, torch.OutOfMemoryError, MemoryError):
        return 0  # capture_decode() will say why
    with suppress(CannotCapture, torch.OutOfMemoryError, MemoryError):
        for bucket in sizes[:-3:-1]:
            pieces = pieces or StaticPieces(model, pool, buckets=sizes, memory=decode.memory)
            pieces.capture([bucket])
            after_pieces.append(free())
    del decode, pieces
    return extrapolate(free(), after, num_buckets) + extrapolate(after[-1], after_pieces, len(sizes))


def extrapolate(before: int, after: Sequence[int], num_buckets: int) -> int:
    """Bytes of all buckets, by the free memory before the first one, after it, and after the second."""
    if not after:
        return 0
    return before - after[0] + sum(after[0] - second for second in after[1:]) * (num_buckets - 1)


def _static_decode(model: PagedModel, pool: KVPool, *, max_num_seqs: int) -> StaticDecode:
    width = -(-model.max_model_len // pool.block_size)
    return StaticDecode(model, pool, max_num_seqs=max_num_seqs, max_blocks_per_seq=width)


def _check_replays(model: PagedModel) -> None:
    """The self-check's sequences with their decodes replayed, padded. Raises CannotCapture if they disagree."""
    captured: StaticDecode | None = None

    def forward(batch: StepBatch, pool: KVPool) -> Tensor:
        nonlocal captured
        if batch.num_tokens > batch.num_seqs:
            return model.forward(batch, pool)
        if captured is None:
            captured = _static_decode(model, pool, max_num_seqs=CHECKED_SEQS)
            captured.capture()
        return require_same_bits(model, batch, pool, captured.forward(batch).float())

    disagreement = model.find_replay_disagreement(forward)
    if disagreement is not None:
        raise CannotCapture(f"replayed, {disagreement}")


# The first tries all that the kernels do.
_CHECKED_PARAMS = (
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=1),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(),
)


def _check_sampling(decode: StaticDecode) -> None:
    """Sample random logits in a replay and by the Sampler. Raises CannotCapture if the tokens differ."""
    logits_like = decode.logits
    num_seqs = min(len(_CHECKED_PARAMS), decode.buckets[-1])
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(max_num_seqs=num_seqs, vocab_size=logits_like.shape[1], device=logits_like.device)
    rows = range(num_seqs)
    num_different = num_checked = 0
    for params in (_CHECKED_PARAMS, [SamplingParams()] * num_seqs):
        for row in rows:
            sampler.set_params(row, params[row])
        for position in range(NUM_CHECKED_POSITIONS):
            logits = 3 * torch.randn(num_seqs, logits_like.shape[1], generator=generator).to(logits_like)
            positions = [position] * num_seqs
            draws = sampler.draws(rows)
            assert draws is not None
            tokens = decode.sample_logits(logits, positions, draws)
            num_different += int((tokens != sampler.sample(logits.float(), rows, positions).tokens).sum())
            num_checked += num_seqs
    if num_different > num_checked * MAX_OTHER_TOKENS:
        raise CannotCapture(f"replayed, the sampler chose {num_different} other tokens of {num_checked}")


NUM_WHOLE_CHECKED = 3


def _check_whole(decode: StaticDecode) -> None:
    """Run steps as one graph, and again in parts: sequences that grow over the borders of their first blocks.

    Raises CannotCapture if a token differs, or the table on the device is not that of the host; RingOutOfStep if tokens
    do not arrive.
    """
    table, pool, vocab_size = decode.table, decode.pool, decode.logits.shape[1]
    num_steps = min(pool.block_size + 2, table.max_blocks_per_seq * pool.block_size)
    num_blocks = -(-num_steps // pool.block_size)
    num_seqs = min(NUM_WHOLE_CHECKED, decode.buckets[-1], (pool.num_blocks - 1) // (num_blocks * table.num_groups))
    if not num_seqs:
        raise CannotCapture(f"a pool of {pool.num_blocks} blocks is too small to check it")
    sampler = Sampler(max_num_seqs=table.max_num_seqs, vocab_size=vocab_size, device=table.device)
    block_ids = iter(range(1, pool.num_blocks))
    rows = [table.add() for _ in range(num_seqs)]
    num_different = 0
    try:
        for position in range(num_steps):
            for row in rows if position % pool.block_size == 0 else ():
                for group in range(table.num_groups):
                    table.stage_blocks(row, position // pool.block_size, [next(block_ids)], group=group)
            for row, params in zip(rows, _CHECKED_PARAMS, strict=False):
                sampler.set_params(row, params if position % 2 else SamplingParams())
            num_different += _count_different(decode, sampler, rows, position)
        is_sent = table.is_on_device()
    finally:
        for row in rows:
            table.remove(row)
    if not is_sent:
        raise CannotCapture("as one graph, steps left other block tables on the device than those of the host")
    if num_different:
        raise CannotCapture(f"as one graph, a step chose {num_different} other tokens of {num_steps * num_seqs}")


def _count_different(decode: StaticDecode, sampler: Sampler, rows: Sequence[int], position: int) -> int:
    """Run one token of each row as one graph, then in parts; count the rows with other tokens."""
    starts = [position] * len(rows)
    token_ids = [[row + 1] if position == 0 else None for row in rows]
    draws, before = sampler.draws(rows), decode.table.last_token.clone()
    assert draws is not None
    launched = decode.run_whole(rows, starts, token_ids, draws)
    if launched is None:
        raise RingOutOfStep("a slot of the ring was not given back")
    tokens, *_ = launched.wait()
    after = decode.table.last_token.clone()
    decode.table.last_token.copy_(before)
    if position:
        decode.table.note_sampled(rows, starts)
    batch = decode.prepare(rows, starts, token_ids, draws=draws)
    decode.forward(batch)
    expected = decode.sample(batch, draws.way)
    index = torch.tensor(rows, device=expected.device)
    is_other = (tokens.to(expected.device) != expected) | (after.index_select(0, index) != expected)
    return int(is_other.sum())
