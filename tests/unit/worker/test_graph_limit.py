"""The largest step that is worth CUDA graphs: by the size of the model, and by the memory of its graphs."""

from __future__ import annotations

import model_zoo as zoo
import pytest

from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.graph_limit import GraphLimit, limit_by_memory, limit_by_model

GIB = 2**30

# Layers, and parameters of a layer: hidden size times those of attention, and three times the intermediate size.
LLAMA_1B = (16, 2048 * (2 * 2048 + 2 * 512 + 3 * 8192))
LLAMA_8B = (32, 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336))
QWEN3_06B = (28, 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072))
QWEN3_17B = (28, 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144))
QWEN3_4B = (36, 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728))
QWEN3_32B = (64, 5120 * (2 * 8192 + 2 * 1024 + 3 * 25600))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (QWEN3_06B, 8192),
        (LLAMA_1B, 8192),
        (QWEN3_17B, 8192),
        (QWEN3_4B, 2392),
        (LLAMA_8B, 1107),
        (QWEN3_32B, 512),
    ],
)
def test_the_larger_the_model_the_fewer_tokens(model: tuple[int, int], expected: int) -> None:
    num_layers, per_layer = model
    limit = limit_by_model(num_layers=num_layers, num_parameters=num_layers * per_layer, max_step_tokens=8192)
    assert limit.num_tokens == expected
    assert f"{num_layers} layers of " in limit.reason


def test_no_limit_is_above_the_tokens_of_a_step() -> None:
    for num_layers, per_layer in (QWEN3_06B, LLAMA_8B, QWEN3_32B):
        limit = limit_by_model(num_layers=num_layers, num_parameters=num_layers * per_layer, max_step_tokens=256)
        assert limit.num_tokens == 256


def test_a_limit_is_halved_until_its_graphs_fit_their_share_of_the_memory() -> None:
    measured: list[int] = []

    def measure(num_tokens: int) -> int:
        measured.append(num_tokens)
        return num_tokens << 17  # 1 GiB for 8,192 tokens

    by_model = GraphLimit(8192, "by model")
    assert limit_by_memory(by_model, measure, total_bytes=80 * GIB) == GraphLimit(8192, "by model", GIB)
    assert measured == [8192]
    limit = limit_by_memory(by_model, measure, total_bytes=12 * GIB)
    assert (limit.num_tokens, limit.num_bytes) == (2048, GIB // 4)
    assert "too much memory" in limit.reason
    measured.clear()
    assert limit_by_memory(by_model, measure, total_bytes=1).num_tokens == 512
    assert measured == [8192, 4096, 2048, 1024, 512]


def prepare(family: str, *, fused: bool) -> PagedModel:
    from quire.worker.fusion.steps import TorchSteps

    return prepare_model(zoo.build(family), max_model_len=32, fused_steps=TorchSteps() if fused else None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_parameters_of_a_layer_are_counted_once_fused_or_not(family: str) -> None:
    model = zoo.build(family)
    expected = sum(parameter.numel() for parameter in model.model.layers.parameters())
    expected += sum(parameter.numel() for parameter in model.model.norm.parameters())
    for fused in (False, True):
        prepared = prepare(family, fused=fused)
        assert (prepared.fusion is not None) is fused
        assert prepared.num_layer_parameters == expected
        assert prepared.num_layers == model.config.num_hidden_layers
