"""Weights stored column by column: the same elements and products, and everything else is left as it was."""

from __future__ import annotations

import model_zoo as zoo
import pytest
import torch
from paged_run import MAX_LEN
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.worker.model.preparing import prepare_model
from quire.worker.model.transposed_linear import transpose_linears


class Router(nn.Linear):
    """A class of its own may read its weight."""


def is_by_columns(weight: Tensor) -> bool:
    return weight.t().is_contiguous()


@pytest.mark.parametrize("num_rows", [1, 2, 4, 16, 300])
def test_a_layer_keeps_its_elements_and_its_products(num_rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 48).requires_grad_(False)
    weight, rows = layer.weight.clone(), torch.randn(num_rows, 96)
    expected = layer(rows)
    assert transpose_linears(nn.Sequential(layer)) == 1
    assert is_by_columns(layer.weight)
    assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(layer(rows), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(8, 4).bfloat16(), nn.Linear(8, 4, device="meta"), Router(8, 4), Conv1D(4, 8)],
    ids=["bfloat16", "another device", "a subclass", "conv1d"],
)
def test_what_is_not_known_to_gain_is_left(layer: nn.Module) -> None:
    stride = layer.weight.stride()
    assert transpose_linears(nn.Sequential(layer)) == 0
    assert layer.weight.stride() == stride


def test_an_embedding_keeps_its_rows_and_linear_layers_share_a_weight() -> None:
    embedding, head, first, second = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(8, 4)
    head.weight, second.weight = embedding.weight, first.weight
    transpose_linears(nn.ModuleList([embedding, head, first, second]))
    assert embedding.weight.is_contiguous()
    assert torch.equal(head.weight, embedding.weight)
    assert is_by_columns(head.weight)
    assert second.weight is first.weight
    assert is_by_columns(first.weight)


def test_a_deterministic_model_keeps_its_layers() -> None:
    model = zoo.build("llama")
    prepare_model(model, max_model_len=MAX_LEN, deterministic=True)
    assert all(each.weight.is_contiguous() for each in model.modules() if type(each) is nn.Linear)
