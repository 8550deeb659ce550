"""Packed weights: the same products, and the same models; everything else is left as it was."""

from __future__ import annotations

from typing import Any

import model_zoo as zoo
import pytest
import torch
from paged_run import MAX_LEN, run
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.worker.model import preparing
from quire.worker.model.packed_linear import PackedLinear, Packing, pack_linears
from quire.worker.model.preparing import prepare_model

CAN_PACK = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""True if this processor has products of bfloat16."""
BLOCK_SIZE = 4


def num_packed(model: Any) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("shape", [(1,), (16,), (2, 3), (2048,)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "without bias", "conv1d"])
def test_a_packed_layer_says_what_the_layer_said(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = Conv1D(48, 96) if kind == "conv1d" else nn.Linear(96, 48, bias=kind == "linear")
    parent = nn.Sequential(layer).to(torch.bfloat16)
    rows = torch.randn(*shape, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = parent(rows)
        assert pack_linears(parent) == Packing(int(CAN_PACK))
        found = parent(rows)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)


class Router(nn.Linear):
    """A class of its own may read its weight."""


@pytest.mark.parametrize("shape", [(1,), (5,), (16,), (2, 3), (100,)], ids=str)
def test_a_large_float32_layer_is_packed_too(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    large, small = nn.Linear(512, 1024), nn.Linear(512, 1023, bias=False)
    rows = torch.randn(*shape, 512)
    for layer, count in ((large, 1), (small, 0)):
        parent = nn.Sequential(layer)
        with torch.inference_mode():
            expected = parent(rows)
            assert pack_linears(parent) == Packing(count)
            torch.testing.assert_close(parent(rows), expected, atol=1e-5, rtol=1e-5)


def test_float32_stays_as_it_is_in_a_deterministic_model() -> None:
    assert zoo.build("llama").lm_head.weight.dtype == torch.float32
    config = zoo.build("llama").config
    config.vocab_size = 1 << 16

    def packed(*, deterministic: bool) -> int:
        model = type(zoo.build("llama"))(config).eval()
        prepare_model(model, max_model_len=MAX_LEN, deterministic=deterministic)
        return num_packed(model)

    assert (packed(deterministic=False), packed(deterministic=True)) == (1, 0)


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), Router(8, 8).to(torch.bfloat16)], ids=["a small one", "a subclass"])
def test_what_is_not_known_to_gain_is_left(layer: nn.Module) -> None:
    parent = nn.Sequential(layer)
    assert pack_linears(parent).num_packed == 0
    assert parent[0] is layer


def test_a_product_that_is_not_right_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: rows.new_zeros(*rows.shape[:-1], self.out_features))
    parent = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(1024, 1024))
    assert pack_linears(parent) == Packing(0, num_different=1 + CAN_PACK)
    assert all(type(layer) is nn.Linear for layer in parent)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "phi3", "qwen3_moe", "opt", "gpt_neox"])
def test_a_packed_model_says_what_the_model_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the logits of forced tokens: greedy ones may part where two are as good as equal in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(4, 60, (count,), generator=generator).tolist() for count in (19, 24, 16)]

    def logits() -> tuple[int, str, torch.Tensor]:
        own = zoo.build(name).to(torch.bfloat16)
        model = prepare_model(own, max_model_len=MAX_LEN)
        prompts = [tokens[:-8] for tokens in sequences]
        return num_packed(own), model.fingerprint, run(model, prompts, 8, block_size=BLOCK_SIZE, forced=sequences)[1]

    count, fingerprint, found = logits()
    monkeypatch.setattr(preparing, "pack_linears", lambda model: Packing(0))
    none, plain_fingerprint, expected = logits()
    assert (count > 0, none) == (CAN_PACK, 0)
    assert fingerprint == plain_fingerprint
    assert (found - expected).abs().max() <= 5e-2 * expected.abs().max()
