"""Small steps with prompts on the fake device: each is one replay, and the log says what was captured."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from gpu_desk.fake_device import FakeGPU, Seen
from gpu_desk.steps import BLOCK_SIZE, PROMPTS, make_executor, mixed_and_decode_steps, start
from model_zoo import save

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.run import prompt_graphs
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded
from quire.worker.sampling.parameters import SamplingParams

MAX_LEN = 1024
# Launches of a prompt's step besides the replay: they bring its numbers into place, or sample.
MOST_LAUNCHES = 30


def prompts_of(*counts: int) -> AcceptedStep:
    """A step of new prompts with so many tokens."""
    num_blocks = MAX_LEN // BLOCK_SIZE
    grant = grant_pb2.StepGrant(lease_id="lease", step_number=1)
    for index, count in enumerate(counts):
        grant.write_sequence_ids.append(index + 1)
        grant.write_layer_groups.append(0)
        grant.write_first_indexes.append(0)
        grant.write_block_counts.append(num_blocks)
        grant.write_block_ids.extend(range(1 + index * num_blocks, 1 + (index + 1) * num_blocks))
        grant.run_sequence_ids.append(index + 1)
        grant.run_starts.append(0)
        grant.run_token_counts.append(count)
        grant.run_samples.append(True)
    return AcceptedStep(grant, {index: np.arange(count, dtype=np.int32) for index, count in enumerate(counts)})


def load(folder: Path, **settings: object) -> Loaded:
    model = save("qwen3", folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
    sizes = {"max_model_len": MAX_LEN, "max_step_tokens": MAX_LEN, "num_blocks": 1 + 8 * MAX_LEN // BLOCK_SIZE}
    return start(model, dtype="bfloat16", **{"max_whole_graph_tokens": MAX_LEN, **sizes, **settings})


def run(gpu: FakeGPU, loaded: Loaded, *steps: AcceptedStep) -> list[Seen]:
    """Launch the steps on a new executor; return what each did."""
    executor, found = make_executor(loaded), []
    for step in steps:
        with gpu.watch() as seen:
            assert executor.launch(step).result.outcome is Outcome.COMPUTED
        assert (seen.syncs, seen.pageable) == ([], [])
        found.append(seen)
    executor.fence_lease("lease")
    return found


def test_a_prompt_of_512_tokens_is_one_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeGPU() as gpu, caplog.at_level(logging.INFO):
        loaded = load(tmp_path)
        (one,) = run(gpu, loaded, prompts_of(512))
        (several,) = run(gpu, loaded, prompts_of(100, 200, 212))
        (too_many,) = run(gpu, loaded, prompts_of(600, 600))
        mixed, _ = mixed_and_decode_steps(SamplingParams())
        with_decodes = run(gpu, loaded, *mixed)
    assert (one.replays, one.kernels) == (1, {})
    assert "linear" not in one.operations, "the output layer is in the graph"
    assert one.num_launches <= MOST_LAUNCHES
    assert (several.replays, several.num_launches) == (1, one.num_launches)
    assert too_many.replays == 0, "1,200 tokens are more than a step with pieces has here"
    assert PROMPTS[1] == 1
    assert [seen.replays for seen in with_decodes] == [1, 3, 1, 1], "the second step has decodes alone"
    assert [
        line for line in caplog.messages if line.startswith("steps of up to 1024 tokens of 16 sequences run as one")
    ]
    assert loaded.prompts is not None
    assert len(loaded.prompts.shapes) == 24


def test_longer_sequences_more_of_them_and_scored_ones_run_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "NUM_SLOTS", 2)
    monkeypatch.setattr(prompt_graphs, "MAX_KEYS", 64)
    with FakeGPU() as gpu:
        loaded = load(tmp_path, max_whole_graph_tokens=128)
        assert loaded.decode is not None
        assert loaded.decode.pieces is not None
        num_pieces = len(loaded.model.specs) + 1
        steps = (prompts_of(60), prompts_of(65), prompts_of(20, 20, 20))
        assert [run(gpu, loaded, step)[0].replays for step in steps] == [1, num_pieces, num_pieces]


def test_by_default_there_are_none(tmp_path: Path) -> None:
    with FakeGPU():
        assert load(tmp_path, max_whole_graph_tokens=0).prompts is None


def test_graphs_that_say_something_else_are_not_used_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = prompt_graphs.StaticPrompts.forward
    monkeypatch.setattr(prompt_graphs.StaticPrompts, "forward", lambda self, batch: forward(self, batch)[:, :-1])
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, max_whole_graph_tokens=64)
        assert loaded.prompts is None
        (seen,) = run(gpu, loaded, prompts_of(512))
    assert seen.replays == len(loaded.model.specs) + 1
    assert "small steps with prompts run without a graph of their own: replayed, " in caplog.text


def test_the_memory_of_the_graphs_is_not_given_to_the_pool(tmp_path: Path) -> None:
    sizes = {}
    for tokens in (0, 128):
        with FakeGPU(graph_bytes=1 << 27) as gpu:
            loaded = load(
                tmp_path, max_whole_graph_tokens=tokens, max_graph_tokens=64, memory_share=0.9, num_blocks=None
            )
            sizes[tokens] = loaded.pool.num_blocks * loaded.pool.bytes_per_block
            num_graphs = gpu.num_graphs
    assert loaded.prompts is not None
    assert len(loaded.prompts.shapes) == 4
    assert num_graphs > 8
    assert abs(sizes[0] - sizes[128] - 4 * (1 << 27)) <= loaded.pool.bytes_per_block
