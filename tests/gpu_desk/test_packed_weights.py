"""Quantized weights of 4 and 8 bits on the fake device: each lands in its kernel, in graphs and in prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantized_zoo
import torch
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_executor, mixed_and_decode_steps, start
from model_zoo import save
from samples import others_at_night

from quire.kernels.split_sums import MAX_ROWS
from quire.worker.model import preparing
from quire.worker.model.modes import Part
from quire.worker.quantization import product_trial
from quire.worker.quantization.int4_product import Int4Product
from quire.worker.quantization.quantized_linear import QuantizedLinear, dequantizing, quantized_linears
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded
from quire.worker.sampling.parameters import SamplingParams

FORMATS = {
    "awq": "int4",
    "gptq": "int4",
    "compressed_int4": "int4",
    "fp8": "scaled",
    "fbgemm_fp8": "scaled",
    "compressed_int8": "scaled",
}
"""The kernels of each format."""
NUM_LAYERS = 2
NUM_LINEARS = 7 * NUM_LAYERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def quantized(loaded: Loaded) -> list[QuantizedLinear]:
    layers = [layer for _, layer in quantized_linears(loaded.model._model)]
    assert len(layers) == NUM_LINEARS
    return layers


def degraded(loaded: Loaded) -> dict[Part, str]:
    return {mode.part: mode.degraded for mode in loaded.model.modes.degraded()}


@pytest.mark.parametrize("name", others_at_night(list(FORMATS), ["gptq", "fp8"]))
def test_steps_of_every_format_are_graphs_of_one_kernel(name: str, folder: Path) -> None:
    model, _ = quantized_zoo.save(name, folder)
    with FakeGPU() as gpu:
        loaded = start(model, dtype="bfloat16", max_graph_tokens=64)
        assert degraded(loaded) == {}
        for layer in quantized(loaded):
            assert layer.multiplies_packed
            if isinstance(layer.product, Int4Product):
                assert (layer.product.weight.order is None) == (name != "gptq")
                assert not list(layer.buffers())
        forwards = [seen for seen in gpu.captures if seen.kernels["paged_decode_kernel"]]
        assert forwards
        assert {seen.kernels[f"{FORMATS[name]}_linear_kernel"] for seen in forwards} == {NUM_LINEARS}
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(SamplingParams(), num_groups=len(loaded.pool.groups)):
            for step in steps:
                with gpu.watch() as seen:
                    assert executor.launch(step).result.outcome is Outcome.COMPUTED
                assert (seen.syncs, seen.pageable) == ([], [])
            assert seen.replays
            assert not seen.kernels[f"{FORMATS[name]}_dequantize_kernel"]


def test_a_product_has_one_launch_and_that_of_a_prompt_two(folder: Path) -> None:
    """And with columns in another order one more, which orders the input."""
    for name, num_launches in (("awq", 2), ("gptq", 3), ("fp8", 2)):
        with FakeGPU() as gpu:
            layer = quantized(start(quantized_zoo.save(name, folder)[0], dtype="bfloat16", cuda_graphs=False))[0]
            for num_rows, expected in ((1, 1), (MAX_ROWS, 1), (MAX_ROWS + 1, num_launches)):
                rows = torch.zeros(num_rows, layer.in_features, dtype=torch.bfloat16, device="cuda")
                with gpu.watch() as seen:
                    assert layer(rows).shape == (num_rows, layer.out_features)
                assert seen.num_launches == expected
                with gpu.watch() as seen, dequantizing():
                    layer(rows)
                assert not seen.kernels, "what kernels are compared with has none"


@pytest.mark.parametrize("name", others_at_night(list(FORMATS), ["fp8"]))
def test_modules_with_packed_weights_are_fused(name: str, folder: Path) -> None:
    """A layer has 12 launches: 2 norms, 7 products, prologue, attention, and the activation."""
    with FakeGPU() as gpu:
        loaded = start(quantized_zoo.save(name, folder)[0], dtype="bfloat16", cuda_graphs=False)
        executor, (mixed, decodes) = make_executor(loaded), mixed_and_decode_steps(SamplingParams())
        for step in (*mixed, *decodes):
            with gpu.watch() as seen:
                assert executor.launch(step).result.outcome is Outcome.COMPUTED
    assert seen.kernels["qkv_prologue_kernel"] == seen.kernels["silu_mul_kernel"] == NUM_LAYERS
    assert seen.num_launches == 12 * NUM_LAYERS + 12


@pytest.mark.night
@pytest.mark.parametrize(("name", "bits"), [("awq", 4), ("fp8", 8)])
def test_a_product_that_is_wrong_leaves_every_layer_as_it_was(
    name: str, bits: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = quantized_zoo.save(name, folder)
    with FakeGPU():
        monkeypatch.setattr(product_trial, "agree", lambda *_, **__: False)
        loaded = start(model, dtype="bfloat16", cuda_graphs=False)
        reason = f"each product dequantizes its weight: a product of {bits} bits, 64 to 64, is wrong"
        assert degraded(loaded) == {Part.WEIGHTS: reason}
        assert all(layer.product is None for layer in quantized(loaded))


@pytest.mark.night
def test_a_device_without_products_in_float8_multiplies_in_16_bits_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGPU():
        monkeypatch.setattr(preparing, "try_float8", lambda layers: "no such product")
        loaded = start(save("llama", folder), dtype="bfloat16", quantization="fp8", cuda_graphs=False)
        assert degraded(loaded) == {Part.WEIGHTS: "no such product"}
        assert all(layer.multiplies_packed for _, layer in quantized_linears(loaded.model._model))
