"""Quantized weights of 4 bits on the fake device: every format lands in one kernel, in graphs and in prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantized_zoo
import torch
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_executor, mixed_and_decode_steps, start
from samples import others_at_night

from quire.kernels import int4_linear
from quire.worker.model.modes import Part
from quire.worker.quantization import int4_product
from quire.worker.quantization.int4_product import Int4Product
from quire.worker.quantization.packed_linear import PackedLinear
from quire.worker.quantization.quantized_linear import dequantizing, quantized_linears
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded
from quire.worker.sampling.parameters import SamplingParams

FORMATS = ("awq", "gptq", "compressed_int4")
NUM_LINEARS = 7 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def packed(loaded: Loaded) -> list[PackedLinear]:
    layers = [layer for _, layer in quantized_linears(loaded.model._model) if isinstance(layer, PackedLinear)]
    assert len(layers) == NUM_LINEARS
    return layers


def degraded(loaded: Loaded) -> dict[Part, str]:
    return {mode.part: mode.degraded for mode in loaded.model.modes.degraded()}


@pytest.mark.parametrize("name", others_at_night(FORMATS, ["gptq"]))
def test_steps_of_every_format_are_graphs_of_one_kernel(name: str, folder: Path) -> None:
    model, _ = quantized_zoo.save(name, folder)
    with FakeGPU() as gpu:
        loaded = start(model, dtype="bfloat16", max_graph_tokens=64)
        assert degraded(loaded) == {}
        products = [layer.product for layer in packed(loaded) if isinstance(layer.product, Int4Product)]
        assert {product.weight.order is None for product in products} == {name != "gptq"}
        assert not any(list(layer.buffers()) for layer in packed(loaded))
        forwards = [seen for seen in gpu.captures if seen.kernels["paged_decode_kernel"]]
        assert forwards
        assert {seen.kernels["int4_linear_kernel"] for seen in forwards} == {NUM_LINEARS}
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(SamplingParams(), num_groups=len(loaded.pool.groups)):
            for step in steps:
                with gpu.watch() as seen:
                    assert executor.launch(step).result.outcome is Outcome.COMPUTED
                assert (seen.syncs, seen.pageable) == ([], [])
            assert seen.replays
            assert not seen.kernels["int4_dequantize_kernel"]


def test_a_product_has_one_launch_and_that_of_a_prompt_two(folder: Path) -> None:
    """And with columns in another order one more, which orders the input."""
    for name, num_launches in (("awq", 2), ("gptq", 3)):
        with FakeGPU() as gpu:
            layer = packed(start(quantized_zoo.save(name, folder)[0], dtype="bfloat16", cuda_graphs=False))[0]
            for num_rows, expected in ((1, 1), (int4_linear.MAX_ROWS, 1), (int4_linear.MAX_ROWS + 1, num_launches)):
                rows = torch.zeros(num_rows, layer.in_features, dtype=torch.bfloat16, device="cuda")
                with gpu.watch() as seen:
                    assert layer(rows).shape == (num_rows, layer.out_features)
                assert seen.num_launches == expected
                with gpu.watch() as seen, dequantizing():
                    layer(rows)
                assert not seen.kernels, "what kernels are compared with has none"


@pytest.mark.night
def test_a_product_that_is_wrong_leaves_every_layer_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = quantized_zoo.save("awq", folder)
    with FakeGPU():
        monkeypatch.setattr(int4_product, "agree", lambda *_, **__: False)
        loaded = start(model, dtype="bfloat16", cuda_graphs=False)
        reason = "each product dequantizes its weight: a product of 4 bits, 64 to 64, is wrong"
        assert degraded(loaded) == {Part.WEIGHTS: reason}
        assert all(layer.product is None for layer in packed(loaded))
