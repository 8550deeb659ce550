"""The modes of a worker on a fake GPU: none degraded from a healthy start, and a reason from each path that is left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_config, start
from model_zoo import save

from quire.worker.device.capture import CannotCapture
from quire.worker.fusion.steps import KernelSteps
from quire.worker.memory import kv_pool
from quire.worker.model.modes import Part
from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.quantization.scaled_linear import ScaledLinear
from quire.worker.run import graphs, pieces
from quire.worker.run.loading import Loaded, load_warm

GRAPHS = {Part.DECODE, Part.SAMPLER, Part.PROMPTS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("models"))


def reasons(loaded: Loaded) -> dict[Part, str]:
    return {mode.part: mode.degraded for mode in loaded.model.modes.degraded()}


def cannot_capture(*_: object, **__: object) -> None:
    raise CannotCapture("replayed, its logits differ")


def test_a_healthy_start_names_every_part_and_none_is_degraded(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeGPU(), caplog.at_level(logging.WARNING):
        loaded = load_warm(make_config(model, dtype="bfloat16"))
    assert reasons(loaded) == {}
    absent = {Part.WEIGHTS, Part.EXPERTS, Part.CACHE, Part.ARITHMETIC, Part.DISK}
    assert {mode.part for mode in loaded.model.modes.all()} == {*Part} - absent
    assert "DEGRADED" not in caplog.text


def test_graphs_that_fail_their_check_are_degraded_with_a_line_in_the_log(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "_check_replays", cannot_capture)
    with FakeGPU(), caplog.at_level(logging.WARNING):
        loaded = load_warm(make_config(model, dtype="bfloat16"))
    assert reasons(loaded) == dict.fromkeys(GRAPHS, "replayed, its logits differ")
    (line,) = [message for message in caplog.messages if message.startswith("DEGRADED")]
    assert "decode: without CUDA graphs (degraded: replayed, its logits differ)" in line


def test_each_check_that_fails_degrades_its_own_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, check, part in (
        (graphs, "_check_sampling", Part.SAMPLER),
        (pieces, "_check_pieces", Part.PROMPTS),
    ):
        with monkeypatch.context() as patched, FakeGPU():
            patched.setattr(module, check, cannot_capture)
            assert reasons(start(model, dtype="bfloat16")) == {part: "replayed, its logits differ"}


def test_fused_modules_that_break_off_are_degraded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(KernelSteps, "apply_gate", fail)
    with FakeGPU():
        assert reasons(start(model, dtype="bfloat16")) == {
            Part.MODULES: "its trial failed with RuntimeError: no kernel image is available"
        }


def test_a_block_size_without_kernels_is_degraded(model: Path) -> None:
    with FakeGPU():
        found = reasons(start(model, dtype="bfloat16", block_size=48))
    assert found[Part.MODULES] == "--block-size 48 is not one of 16, 32, 64, 128"
    assert found.keys() == {Part.MODULES, Part.ATTENTION, *GRAPHS}


def test_blocks_that_the_kernel_of_copies_does_not_take_are_degraded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "_block_runs", lambda tensors: None)
    with FakeGPU():
        assert reasons(start(model, dtype="bfloat16")) == {Part.COPIES: "the kernel does not take blocks of such sizes"}


def test_what_flags_turn_off_is_not_degraded(model: Path) -> None:
    with FakeGPU():
        loaded = start(model, dtype="bfloat16", cuda_graphs=False, fuse=False, attention="torch")
    assert reasons(loaded) == {}
    assert "decode: without CUDA graphs: --no-cuda-graphs" in map(str, loaded.model.modes.all())
    with FakeGPU():
        loaded = start(model, dtype="bfloat16", max_graph_tokens=0)
    assert reasons(loaded) == {}
    assert "prompts: without CUDA graphs: --max-graph-tokens 0" in map(str, loaded.model.modes.all())


def test_a_cpu_has_no_graphs_and_is_not_degraded(model: Path) -> None:
    loaded = start(model, device="cpu")
    assert reasons(loaded) == {}
    assert "decode: without CUDA graphs: a CPU has none" in map(str, loaded.model.modes.all())


def test_weights_in_float8_are_multiplied_in_graphs(model: Path) -> None:
    with FakeGPU():
        loaded = start(model, dtype="bfloat16", quantization="fp8")
    assert reasons(loaded) == {}
    layers = [layer for _, layer in quantized_linears(loaded.model._model)]
    assert all(isinstance(layer, ScaledLinear) and layer.multiplies_float8 for layer in layers)
