"""Mixed steps on the fake device, with everything but their attention in graphs."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from gpu_desk.fake_device import FakeGPU, Seen
from gpu_desk.steps import PROMPTS, make_executor, mixed_and_decode_steps, start, verifying_step
from model_zoo import save

from quire.worker.run import pieces
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded
from quire.worker.sampling.parameters import SamplingParams

NUM_LAYERS = 3
LAST_MIXED_TOKENS = len(PROMPTS) - 1 + PROMPTS[-1]
NOT_MIXED = 1
"""The step with a prompt of one token is a decode step."""
# Launches of a mixed step's layer: decode and prefill; with graphs also a replay, without them 8 more.
LAUNCHES_OF_LAYER = (10, 3)
OTHER_LAUNCHES = 31


def run_mixed(gpu: FakeGPU, loaded: Loaded) -> list[Seen]:
    """Launch the mixed steps; return what each did."""
    executor, found = make_executor(loaded), []
    for step in mixed_and_decode_steps(SamplingParams(), num_groups=len(loaded.pool.groups))[0]:
        with gpu.watch() as seen:
            assert executor.launch(step).result.outcome is Outcome.COMPUTED
        found.append(seen)
    return found


def test_a_mixed_step_launches_attention_and_a_replay_a_layer(tmp_path: Path) -> None:
    launches, copies = [], []
    for max_graph_tokens in (0, 512):
        with FakeGPU() as gpu:
            loaded = start(save("qwen3", tmp_path), dtype="bfloat16", max_graph_tokens=max_graph_tokens)
            assert loaded.decode is not None
            assert (loaded.decode.pieces is not None) is (max_graph_tokens > 0)
            last = run_mixed(gpu, loaded)[-1]
            assert (last.syncs, last.pageable) == ([], [])
            launches.append(last.num_launches)
            copies.append((last.to_device, last.to_host))
    assert last.replays == NUM_LAYERS + 1
    assert last.operations["linear"] == 1, "the output layer, of the rows that are sampled"
    assert set(last.kernels) == {"decode_plan_kernel", "paged_decode_kernel", "paged_prefill_kernel"}
    assert copies[0] == copies[1]
    assert launches[1] <= OTHER_LAUNCHES + NUM_LAYERS * LAUNCHES_OF_LAYER[1]
    assert launches[0] - launches[1] >= NUM_LAYERS * (LAUNCHES_OF_LAYER[0] - LAUNCHES_OF_LAYER[1]) - 3


def test_a_step_with_drafts_launches_attention_and_a_replay_a_layer(tmp_path: Path) -> None:
    """As docs/reference/model-execution.md#drafts says."""
    with FakeGPU() as gpu:
        loaded = start(save("qwen3", tmp_path), dtype="bfloat16")
        executor, launches = make_executor(loaded), []
        for _ in range(2):
            for step in mixed_and_decode_steps(SamplingParams())[0]:
                executor.launch(step)
            with gpu.watch() as seen:
                assert executor.launch(verifying_step(4)).result.outcome is Outcome.COMPUTED
            assert (seen.syncs, seen.pageable) == ([], [])
            launches.append(seen.num_launches)
            executor.begin_epoch()
            if loaded.decode is not None and loaded.decode.pieces is not None:
                assert (seen.replays, seen.kernels) == (NUM_LAYERS + 1, {"paged_prefill_kernel": NUM_LAYERS})
                loaded.decode.pieces = None
    assert [count - NUM_LAYERS * each for count, each in zip(launches, (2, 9), strict=True)] == [52, 50]


def test_a_step_runs_in_the_smallest_bucket_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    fill = pieces.StaticPieces._fill

    def note(self: pieces.StaticPieces, batch: object, bucket: int) -> None:
        chosen.append(bucket)
        fill(self, batch, bucket)  # type: ignore[arg-type]

    monkeypatch.setattr(pieces, "piece_buckets", lambda _: (8, 9, 32))
    monkeypatch.setattr("quire.worker.run.graphs.piece_buckets", lambda _: (8, 9, 32))
    monkeypatch.setattr(pieces.StaticPieces, "_fill", note)
    with FakeGPU() as gpu:
        loaded = start(save("llama", tmp_path), max_graph_tokens=32)
        chosen.clear()  # of the check at start
        found = run_mixed(gpu, loaded)
    assert [PROMPTS[0], 2 + PROMPTS[2], LAST_MIXED_TOKENS] == [20, 9, 36]
    assert chosen == [32, 9]
    assert found[-1].replays == 0, "36 tokens are more than the largest bucket"
    assert found[-1].kernels["add_rmsnorm_kernel"] > 0


def test_no_step_has_more_tokens_than_a_bucket_is_made_for(tmp_path: Path) -> None:
    with FakeGPU():
        loaded = start(save("llama", tmp_path), max_step_tokens=200, max_graph_tokens=512)
        assert loaded.decode is not None
        assert loaded.decode.pieces is not None
        assert loaded.decode.pieces.buckets == (64, 128, 192, 200)


def test_by_default_the_model_and_the_memory_of_its_graphs_limit_the_steps_that_are_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tiny model is captured up to --max-step-tokens, unless its graphs take more than 1/32 of 80 GiB."""
    model = save("llama", tmp_path)
    sizes = {"memory_share": 0.9, "num_blocks": None, "max_step_tokens": 2048, "max_num_seqs": 2}
    pool_bytes = {}
    for graph_bytes, limit in ((0, 2048), (40 << 20, 1024)):
        caplog.clear()
        with FakeGPU(graph_bytes=graph_bytes) as gpu, caplog.at_level(logging.INFO):
            loaded = start(model, **sizes, max_graph_tokens=None)
            pool_bytes[limit] = loaded.pool.num_blocks * loaded.pool.bytes_per_block
            num_graphs = gpu.num_graphs
        assert loaded.decode is not None
        assert loaded.decode.pieces is not None
        assert loaded.decode.pieces.buckets == pieces.piece_buckets(limit)
        taken = num_graphs * graph_bytes
        assert any(
            line.startswith(f"CUDA graphs of mixed steps: up to {limit} tokens, by ") for line in caplog.messages
        )
        num_sizes, mib = len(loaded.decode.pieces.buckets), num_sizes_bytes(loaded, graph_bytes) >> 20
        expected = rf"mixed steps of up to {limit} tokens .*: {num_sizes} sizes, captured in \d+\.\d s, {mib:,} MiB"
        assert any(re.fullmatch(expected, line) for line in caplog.messages)
    assert "too much memory" in caplog.text
    assert abs(pool_bytes[2048] - pool_bytes[1024] - taken) <= loaded.pool.bytes_per_block


def num_sizes_bytes(loaded: Loaded, graph_bytes: int) -> int:
    """Bytes of the pieces' graphs."""
    assert loaded.decode is not None
    assert loaded.decode.pieces is not None
    return len(loaded.decode.pieces.buckets) * (NUM_LAYERS + 1) * graph_bytes


def test_pieces_that_say_something_else_are_not_used_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = pieces.StaticPieces.forward

    def wrong(self: pieces.StaticPieces, batch: object) -> torch.Tensor:
        return head(self, batch)[:, :-1]  # type: ignore[arg-type]

    monkeypatch.setattr(pieces.StaticPieces, "forward", wrong)
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        loaded = start(save("llama", tmp_path))
        assert loaded.decode is not None
        assert loaded.decode.pieces is None
        assert all(seen.replays == 0 for seen in run_mixed(gpu, loaded)[2:])
    assert [line for line in caplog.messages if line.startswith("mixed steps run without CUDA graphs: replayed, ")]


def test_a_model_whose_output_layer_does_not_run_by_itself_is_captured_for_decodes_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.model.paged_model.base_of", lambda model: None)
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        loaded = start(save("llama", tmp_path))
        assert loaded.decode is not None
        assert loaded.decode.pieces is None
        run_mixed(gpu, loaded)
    assert "mixed steps run without CUDA graphs: " in caplog.text


def test_a_forward_that_waits_with_many_tokens_is_captured_for_decodes_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def wait_and_forward(self: LlamaModel, *args: object, **kwargs: torch.Tensor) -> object:
        if torch.cuda.is_available() and kwargs["input_ids"].shape[1] > 40:
            self.embed_tokens.weight.sum().item()
        return forward(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaModel, "forward", wait_and_forward)
    with FakeGPU(), caplog.at_level(logging.WARNING):
        loaded = start(save("llama", tmp_path), dtype="bfloat16")
        assert loaded.decode is not None
        assert loaded.decode.pieces is None
    assert "mixed steps run without CUDA graphs: its forward waits for the device at " in caplog.text


def test_a_capture_that_fails_in_a_piece_leaves_nothing_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third piece of each capture fails, as one does when there is no memory left."""
    begin = pieces._Captured._begin

    def fail_in_the_third(self: pieces._Captured) -> None:
        if len(self.pieces) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        begin(self)

    monkeypatch.setattr(pieces._Captured, "_begin", fail_in_the_third)
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        loaded = start(save("llama", tmp_path))
        assert loaded.decode is not None
        assert loaded.decode.pieces is None
        run_mixed(gpu, loaded)
    assert "mixed steps run without CUDA graphs: OutOfMemoryError: CUDA out of memory" in caplog.text
