"""Served steps on a GPU: decodes replayed as graphs, steps launched ahead, no compilation once warm, whole services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import model_zoo as zoo
import numpy as np
import pytest
import torch
from compilations import compilations
from gpu_desk.steps import mixed_and_decode_steps

from quire.cache.v1 import grant_pb2
from quire.cli.launch import LocalServices
from quire.client import Completion, Engine, SamplingParams
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import NULL_BLOCK, KVPool
from quire.worker.memory.pool_size import share_of_device, size_pool
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import Executor, StepResult
from quire.worker.run.graphs import StaticDecode, capture_decode, measure_graphs
from quire.worker.run.model_thread import MAX_UNCOLLECTED
from quire.worker.run.peak_step import peak_memory_bytes, run_largest_step
from quire.worker.run.pieces import StaticPieces
from quire.worker.run.prompt_graphs import NUM_SLOTS, StaticPrompts, capture_prompts
from quire.worker.sampling.parameters import SamplingParams as WorkerParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
NUM_BLOCKS = 600
MAX_NUM_SEQS = 40
MAX_GRAPH_TOKENS = 512
NUM_NEW = 24

TOLERANCE = 5e-2
"""The tolerance for bfloat16 logits, relative to the largest: a product of another batch size rounds otherwise."""


@pytest.fixture(scope="module")
def model(device: torch.device) -> PagedModel:
    """A Llama of four layers in bfloat16."""
    llama = zoo.four_layer_llama(max_position_embeddings=MAX_MODEL_LEN).to(device)
    return prepare_model(llama, max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)


def make_pool(model: PagedModel, dtype: torch.dtype | None = None) -> KVPool:
    return model.make_pool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)


def capture(model: PagedModel, pool: KVPool) -> StaticDecode:
    decode = capture_decode(model, pool, max_num_seqs=MAX_NUM_SEQS, max_graph_tokens=MAX_GRAPH_TOKENS)
    assert decode is not None, "the log says why"
    assert decode.samples, "the log says why"
    assert decode.pieces is not None, "the log says why"
    return decode


class Sequences:
    """Sequences of given lengths over blocks in no order, and batches of them."""

    def __init__(self, model: PagedModel, lengths: list[int]) -> None:
        self.model = model
        self.lengths = list(lengths)
        self.generator = torch.Generator().manual_seed(len(lengths))
        width = MAX_MODEL_LEN // BLOCK_SIZE
        self.table = SequenceTable(max_num_seqs=MAX_NUM_SEQS, max_blocks_per_seq=width, device=model.device)
        block_ids = (torch.randperm(NUM_BLOCKS - 1, generator=self.generator) + 1).tolist()
        for length in lengths:
            self.table.stage_blocks(self.table.add(), 0, [block_ids.pop() for _ in range(length // BLOCK_SIZE + 1)])

    def batch(self, rows: list[int], starts: list[int], counts: list[int]) -> StepBatch:
        tokens = [torch.randint(0, 1000, (count,), generator=self.generator).tolist() for count in counts]
        return build_step_batch(
            self.table, block_size=BLOCK_SIZE, rows=rows, starts=starts, counts=counts, token_ids=tokens
        )

    def fill(self, pool: KVPool) -> None:
        """Compute every sequence up to its last token."""
        for row, length in enumerate(self.lengths):
            if length > 1:
                self.model.forward(self.batch([row], [0], [length - 1]), pool)

    def decode(self, rows: list[int]) -> StepBatch:
        return self.batch(rows, [self.lengths[row] - 1 for row in rows], [1] * len(rows))


@pytest.mark.parametrize(
    "params", [WorkerParams(), WorkerParams(temperature=0.8, top_k=50, top_p=0.9, seed=1)], ids=["greedy", "drawn"]
)
def test_steps_as_one_graph_sample_what_steps_in_parts_do(model: PagedModel, params: WorkerParams) -> None:
    """With as many in flight as may be, from the ring that the device reads over the bus."""
    tokens = []
    for whole in (False, True):
        pool = make_pool(model)
        decode = capture_decode(model, pool, max_num_seqs=MAX_NUM_SEQS, whole=whole)
        assert decode is not None, "the log says why"
        assert (decode.ring is not None) is whole, "the log says why"
        executor = Executor(model, pool, max_num_seqs=MAX_NUM_SEQS, decode=decode, spins=whole)
        mixed, decodes = mixed_and_decode_steps(params)
        for step in mixed:
            executor.execute(step)
        tokens.append([])
        for first in range(0, len(decodes), MAX_UNCOLLECTED):
            launched = [executor.launch(step) for step in decodes[first : first + MAX_UNCOLLECTED]]
            tokens[-1] += [each.collect().sampled_tokens for each in launched]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_replayed_decodes_equal_the_ordinary_step(model: PagedModel, kv_dtype: torch.dtype) -> None:
    """Replays of batches, lengths and blocks other than those captured, full buckets and padded ones."""
    pool = make_pool(model, kv_dtype)
    decode = capture(model, pool)
    lengths = [1, 16, 17, 300, 511, 64, 900, *range(2, 30)]
    sequences = Sequences(model, lengths)
    sequences.fill(pool)
    for rows in ([6], [3, 1, 2], list(range(8)), list(range(34, -1, -1)), [4, 0, 9, 11, 6]):
        batch = sequences.decode(rows)
        expected = model.forward(batch, pool)
        written = [tensor.clone() for tensor in pool.tensors()]
        logits = decode.forward(batch)
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE
        assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.8
        for tensor, before in zip(pool.tensors(), written, strict=True):
            difference = (tensor.float() - before.float()).abs().flatten(1).amax(1)
            changed = set(difference.nonzero().flatten().tolist())
            assert changed <= {sequences.table.block_ids(row)[(lengths[row] - 1) // BLOCK_SIZE] for row in rows}
            assert not tensor[NULL_BLOCK].float().any()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("way", ["pieces", "one graph"])
def test_mixed_steps_in_graphs_equal_the_ordinary_step(model: PagedModel, kv_dtype: torch.dtype, way: str) -> None:
    """Prompts at their beginning and behind a prefix, among decodes; full buckets and padded ones, large and small."""
    pool = make_pool(model, kv_dtype)
    decode = capture(model, pool)
    graphs: StaticPieces | StaticPrompts | None = decode.pieces
    if way == "one graph":
        graphs = capture_prompts(model, pool, max_tokens=MAX_GRAPH_TOKENS + NUM_SLOTS, memory=decode.memory)
    assert graphs is not None, "the log says why"
    sequences = Sequences(model, [700, 1, 17, 300, 511, 64, 900])
    sequences.fill(pool)
    for rows, starts, counts in (
        ([0], [0], [500]),
        ([3, 0], [299, 16], [1, 63]),
        ([1, 0, 2], [0, 100, 16], [1, 20, 1]),
        ([6, 4, 3, 0], [300, 510, 299, 640], [450, 1, 1, 60]),
        ([2, 5], [5, 0], [4, 3]),
    ):
        batch = sequences.batch(rows, starts, counts)
        own_pool = make_pool(model, kv_dtype)
        for tensor, written in zip(own_pool.tensors(), pool.tensors(), strict=True):
            tensor.copy_(written)
        expected = model.forward(batch, own_pool)
        assert graphs.takes(batch)
        logits = graphs.forward(batch)
        assert (logits - expected).abs().max() / expected.abs().max() < TOLERANCE
        for tensor, written in zip(pool.tensors(), own_pool.tensors(), strict=True):
            difference = (tensor.float() - written.float()).abs().max()
            assert difference <= TOLERANCE * written.float().abs().max()
            assert not tensor[NULL_BLOCK].float().any()


def test_nothing_compiles_once_graphs_and_a_few_prompts_have_run(model: PagedModel) -> None:
    pool = make_pool(model)
    decode = capture(model, pool)
    sequences = Sequences(model, [900] * 8)
    for count in (2, 40, 512, 899):
        model.forward(sequences.batch([0], [0], [count]), pool)
    model.forward(sequences.batch([0, 1], [0, 0], [40, 1]), pool)
    generator = torch.Generator().manual_seed(0)
    with compilations() as names:
        for _ in range(30):
            rows = torch.randperm(8, generator=generator)[
                : int(torch.randint(1, 9, (1,), generator=generator))
            ].tolist()
            starts = torch.randint(0, 400, (len(rows),), generator=generator).tolist()
            counts = torch.randint(1, 500, (len(rows),), generator=generator).tolist()
            model.forward(sequences.batch(rows, starts, counts), pool)
            decode.forward(sequences.batch(rows, starts, [1] * len(rows)))
    assert names == []


def test_steps_launched_ahead_say_what_steps_one_by_one_say(model: PagedModel) -> None:
    def run(*, is_ahead: bool) -> list[StepResult]:
        pool = make_pool(model)
        executor = Executor(model, pool, max_num_seqs=MAX_NUM_SEQS, decode=capture(model, pool))
        assert executor.runs_ahead
        if not is_ahead:
            return [executor.execute(step) for step in decode_steps()]
        launched = [executor.launch(step) for step in decode_steps()]
        return [step.collect() for step in launched]

    one_by_one, ahead = run(is_ahead=False), run(is_ahead=True)
    assert [result.sampled_tokens for result in ahead] == [result.sampled_tokens for result in one_by_one]
    assert all(len(result.sampled_tokens) == 3 and result.forward_s > 0 for result in ahead)


def decode_steps() -> list[AcceptedStep]:
    """Three prompts, then 20 decodes of each that go on from tokens on the device."""
    counts = [30, 5, 100]
    runs: dict[str, Any] = {"lease_id": "lease", "run_sequence_ids": [1, 2, 3], "run_samples": [True] * 3}
    first = grant_pb2.StepGrant(
        step_number=1,
        write_sequence_ids=[1, 2, 3],
        write_first_indexes=[0] * 3,
        write_block_counts=[8] * 3,
        write_block_ids=list(range(1, 25)),
        run_starts=[0] * 3,
        run_token_counts=counts,
        **runs,
    )
    given = {index: np.arange(count, dtype=np.int32) * 7 % 1000 for index, count in enumerate(counts)}
    return [
        AcceptedStep(first, given),
        *(
            AcceptedStep(
                grant_pb2.StepGrant(
                    step_number=2 + number,
                    run_starts=[count + number for count in counts],
                    run_token_counts=[1] * 3,
                    **runs,
                )
            )
            for number in range(20)
        ),
    ]


def test_the_largest_step_fits_beside_the_pool(model: PagedModel, device: torch.device) -> None:
    largest: dict[str, Any] = {
        "max_step_tokens": 4096,
        "max_num_seqs": MAX_NUM_SEQS,
        "block_size": BLOCK_SIZE,
        "kv_dtype": model.dtype,
    }
    step_bytes = peak_memory_bytes(device, lambda: run_largest_step(model, **largest))
    assert step_bytes > 4096 * 512 * 2
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    budget = share_of_device(0.9, total_bytes=total_bytes, used_bytes=total_bytes - free_bytes, step_bytes=step_bytes)
    bytes_per_block = make_pool(model).bytes_per_block
    size = size_pool(bytes_per_block=bytes_per_block, free_memory_bytes=free_bytes - step_bytes, default=budget)
    taken = torch.empty(size.num_blocks * bytes_per_block, dtype=torch.uint8, device=device)
    assert peak_memory_bytes(device, lambda: run_largest_step(model, **largest)) <= step_bytes * 1.1
    del taken


def test_graphs_take_the_memory_that_was_measured(model: PagedModel, device: torch.device) -> None:
    measured = measure_graphs(
        model,
        max_num_seqs=MAX_NUM_SEQS,
        max_graph_tokens=MAX_GRAPH_TOKENS,
        block_size=BLOCK_SIZE,
        kv_dtype=model.dtype,
    )
    pool = make_pool(model)
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    decode = capture(model, pool)
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info(device)
    assert 0 < before - after <= measured * 1.1 + (32 << 20)
    assert len(decode.buckets) > 2


async def generate(address: str, prompts: list[list[int]]) -> list[Completion]:
    """Twice: the second time finds prefixes in the cache."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
    async with Engine.connect(address) as engine:
        return await engine.complete(prompts, params) + await engine.complete(prompts, params)


@pytest.mark.parametrize(
    "flags", [(), ("--no-cuda-graphs",), ("--attention", "torch"), ("--products", "own")], ids=" ".join
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_through_both_services_equal_generate(
    family: str, flags: tuple[str, ...], tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_VERIFY", "0")  # which waits for each step
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(2, zoo.VOCAB_SIZE, (33,), generator=generator).tolist()
    prompts = [
        shared + torch.randint(2, zoo.VOCAB_SIZE, (count,), generator=generator).tolist() for count in (3, 7, 20, 1, 11)
    ]
    own = zoo.build(family).to(device)
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=device)
        output = own.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_NEW, do_sample=False)
        expected.append(tuple(output[0, len(prompt) :].tolist()))
    worker_args = ("--device", "cuda", "--dtype", "float32", "--block-size", str(BLOCK_SIZE), *flags)
    saved = zoo.save(family, tmp_path / family)
    with LocalServices.start(model=saved, num_blocks=64, extra_worker_args=worker_args) as services:
        completions = asyncio.run(generate(services.cachemgr_address, prompts))
    assert [completion.samples[0].token_ids for completion in completions] == expected * 2
