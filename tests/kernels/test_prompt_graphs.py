"""Small steps with prompts in one graph each, against the same steps as they are and in pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from mixed_steps import BLOCK_SIZE, MAX_MODEL_LEN, STEPS, make_batches, make_pool, prepare
from recorded_graphs import recorded_graphs

from quire.cache.v1 import grant_pb2
from quire.kernels import launching
from quire.worker.device.capture import CannotCapture
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.model.paged_model import PagedModel
from quire.worker.run import prompt_graphs
from quire.worker.run.executor import Executor, Outcome
from quire.worker.run.pieces import StaticPieces
from quire.worker.run.prompt_graphs import Shape, StaticPrompts
from quire.worker.run.verify import VerifyingExecutor

SMALL_DEVICE = replace(launching.DEFAULT_LIMITS, num_multiprocessors=2)
INTERPRETED = launching.INTERPRET
BUCKETS = (12, 24)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three slots and two sizes: in the interpreter each program and each capture takes its time."""
    monkeypatch.setattr(prompt_graphs, "NUM_SLOTS", 3)
    monkeypatch.setattr(prompt_graphs, "SMALLEST_BUCKET", BUCKETS[0])
    monkeypatch.setattr(prompt_graphs, "piece_buckets", lambda _: BUCKETS)
    with launching.chosen_for(SMALL_DEVICE):
        yield


@pytest.fixture(scope="module")
def qwen3(device: torch.device) -> PagedModel:
    with launching.chosen_for(SMALL_DEVICE):
        return prepare("qwen3", device)


def poison(prompts: StaticPrompts) -> None:
    """Fill the memory with values that no step may read: they are those of a larger step before."""
    prompts._logits.fill_(torch.nan)
    prompts._tokens.fill_(5)
    prompts._block_tables.fill_(1)


def compare(model: PagedModel, *, captured: bool) -> None:
    """Logits, and every byte of the pool, which is full of NaN where nothing was written; tokens as those of pieces."""
    own_pool, pool, pool_of_pieces = (make_pool(model) for _ in range(3))
    num_taken = 0
    with recorded_graphs() if captured and INTERPRETED else contextlib.nullcontext():
        prompts = StaticPrompts(model, pool, max_tokens=BUCKETS[-1])
        prompts.shapes = tuple(
            shape for shape in prompts.shapes if shape.num_tokens == BUCKETS[-1]
        )  # both have padding
        pieces = None
        if captured:
            prompts.capture()
            pieces = StaticPieces(model, pool_of_pieces, buckets=BUCKETS)
        for name, batch in zip(STEPS, make_batches(model), strict=True):
            expected = model.forward(batch, own_pool)
            in_pieces = expected if pieces is None else pieces.forward(batch)
            poison(prompts)
            assert prompts.takes(batch) is (name != "decodes")
            if not prompts.takes(batch):
                model.forward(batch, pool)
                continue
            num_taken += 1
            logits = prompts.forward(batch)
            torch.testing.assert_close(
                logits, expected, atol=2e-4, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert logits.argmax(-1).tolist() == in_pieces.argmax(-1).tolist()
    assert num_taken == len(STEPS) - 1
    for written, expected_blocks in zip(pool.tensors(), own_pool.tensors(), strict=True):
        torch.testing.assert_close(written, expected_blocks, atol=2e-4, rtol=2e-4, equal_nan=True)
    pool.check_invariants()


# Windows and sinks in two layer groups, and experts; chunks, and positions that count on from a cache.
@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_the_static_forward_computes_what_the_model_computes(family: str, device: torch.device) -> None:
    if not INTERPRETED:
        pytest.skip("its experts read sizes on the host in float32")
    compare(prepare(family, device), captured=False)


def test_a_graph_of_fused_modules_computes_what_the_model_computes(qwen3: PagedModel) -> None:
    assert qwen3.fusion is not None
    compare(qwen3, captured=True)


# -- through the executor: chunks, a prefix of another sequence, a fork -----------------------------------------------

BLOCKS = {1: [3, 1, 5], 2: [3, 6, 7], 3: [3, 2, 4]}
"""Of each sequence. The second one is forked from the first, and the third has its first block in common with both."""

# Of each step: the sequence, its first position, and its tokens.
RUNS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((1, 0, 17),),
    ((1, 17, 5),),
    ((1, 22, 1), (2, 22, 1), (3, 16, 9)),
    ((3, 25, 4), (2, 23, 1)),
    ((1, 23, 1), (2, 24, 1), (3, 29, 1)),
)
FORK_STEP = 2


def make_steps(vocab_size: int) -> list[AcceptedStep]:
    generator = np.random.default_rng(3)
    admitted: set[int] = set()
    steps = []
    for number, runs in enumerate(RUNS):
        grant = grant_pb2.StepGrant(lease_id="lease", step_number=number + 1, known_step_number=number)
        given = {}
        if number == FORK_STEP:
            grant.fork_parent_ids.append(1)
            grant.fork_child_ids.append(2)
            _write(grant, 2, 0, BLOCKS[2])
            grant.copy_source_block_ids.append(BLOCKS[1][1])
            grant.copy_target_block_ids.append(BLOCKS[2][1])
            admitted.add(2)
        for index, (seq_id, start, count) in enumerate(runs):
            if seq_id not in admitted:
                _write(grant, seq_id, 0, BLOCKS[seq_id])
                admitted.add(seq_id)
            if count > 1:
                given[index] = generator.integers(0, vocab_size, count, dtype=np.int32)
                grant.given_run_indexes.append(index)
            grant.run_sequence_ids.append(seq_id)
            grant.run_starts.append(start)
            grant.run_token_counts.append(count)
            grant.run_samples.append(True)
        steps.append(AcceptedStep(grant, given))
    return steps


def _write(grant: grant_pb2.StepGrant, seq_id: int, first_index: int, block_ids: list[int]) -> None:
    grant.write_sequence_ids.append(seq_id)
    grant.write_layer_groups.append(0)
    grant.write_first_indexes.append(first_index)
    grant.write_block_counts.append(len(block_ids))
    grant.write_block_ids.extend(block_ids)


def test_the_executor_samples_the_same_tokens_with_chunks_prefixes_and_forks(
    qwen3: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Shape] = []
    run = StaticPrompts._run

    def note(self: StaticPrompts, shape: Shape) -> None:
        taken.append(shape)
        run(self, shape)

    monkeypatch.setattr(StaticPrompts, "_run", note)
    tokens = []
    for in_graphs in (False, True):
        pool = qwen3.make_pool(num_blocks=9, block_size=BLOCK_SIZE)
        prompts = StaticPrompts(qwen3, pool, max_tokens=BUCKETS[-1]) if in_graphs else None
        kind = VerifyingExecutor if in_graphs else Executor
        executor = kind(qwen3, pool, max_num_seqs=3, prompts=prompts)
        results = [executor.execute(step) for step in make_steps(qwen3.vocab_size)]
        assert all(result.outcome is Outcome.COMPUTED for result in results)
        tokens.append([(result.sampled_ids, result.sampled_tokens) for result in results])
    assert tokens[0] == tokens[1]
    assert taken == [Shape(24, False), Shape(12, False), Shape(12, True), Shape(12, True)]


def test_sizes_that_no_graph_has_are_refused(qwen3: PagedModel) -> None:
    pool = make_pool(qwen3)
    with pytest.raises(CannotCapture, match="11 tokens are fewer than 12"):
        StaticPrompts(qwen3, pool, max_tokens=11)
    prompts = StaticPrompts(qwen3, pool, max_tokens=BUCKETS[-1])
    batches = dict(zip(STEPS, make_batches(qwen3), strict=True))
    prompt = batches["a prompt"]
    assert prompts.takes(prompt)
    assert not prompts.takes(replace(prompt, keeps_hidden_states=True))
    assert not prompts.takes(replace(prompt, seq_lens_host=(MAX_MODEL_LEN + 1,)))
    assert not prompts.takes(replace(prompt, counts_host=(5,) * 4, seq_lens_host=(5,) * 4)), "four sequences"
    with pytest.raises(ValueError, match="more tokens or sequences than there is room for, or no prompt"):
        prompts.forward(batches["decodes"])
