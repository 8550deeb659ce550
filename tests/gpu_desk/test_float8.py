"""Products in float8 on the fake device: norms and activations write their inputs, and steps have few launches."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_desk.fake_device import FakeGPU, Seen
from gpu_desk.steps import make_executor, mixed_and_decode_steps, start
from model_zoo import save

from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.quantization.scaled_linear import ScaledLinear
from quire.worker.run.executor import Outcome
from quire.worker.sampling.parameters import SamplingParams

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("models"))


def decode_step(model: Path) -> Seen:
    """Start with weights in float8, and return what the last decode step did."""
    with FakeGPU() as gpu:
        loaded = start(model, dtype="bfloat16", quantization="fp8", cuda_graphs=False)
        assert not list(loaded.model.modes.degraded())
        layers = [layer for _, layer in quantized_linears(loaded.model._model)]
        assert all(isinstance(layer, ScaledLinear) and layer.multiplies_float8 for layer in layers)
        executor, (mixed, decodes) = make_executor(loaded), mixed_and_decode_steps(SamplingParams())
        for step in (*mixed, *decodes):
            with gpu.watch() as seen:
                assert executor.launch(step).result.outcome is Outcome.COMPUTED
            assert (seen.syncs, seen.pageable) == ([], [])
        return seen


def test_only_what_attention_gives_is_rounded_in_a_launch_of_its_own(model: Path) -> None:
    """A layer has 10 launches: 2 norms, 4 products, prologue, attention, its rounding, and the activation."""
    seen = decode_step(model)
    assert seen.operations["_scaled_mm"] == 4 * NUM_LAYERS, "QKV, O, gate and up, down"
    assert seen.kernels["add_rmsnorm_kernel"] == 2 * NUM_LAYERS + 1
    assert seen.kernels["silu_mul_float8_kernel"] == seen.kernels["float8_rows_kernel"] == NUM_LAYERS
    assert not seen.operations["abs"]
    assert seen.num_launches == 10 * NUM_LAYERS + 12


@pytest.mark.night
def test_modules_that_are_not_fused_round_the_input_of_each_product(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.float8_rows.MAX_COLUMNS", 0)
    seen = decode_step(model)
    assert seen.operations["_scaled_mm"] == seen.operations["abs"] == 7 * NUM_LAYERS
    assert seen.num_launches > 300
