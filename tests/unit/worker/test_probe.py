"""The probe: the attention parameters that it reads from a model, its classes of masks, and its refusals."""

from __future__ import annotations

from typing import Any

import model_zoo as zoo
import pytest
import torch
from transformers import masking_utils

from quire.worker.memory.layer_spec import Causal, Chunked, LayerSpec, Mask, Sliding
from quire.worker.model.probe import classify_mask, probe
from quire.worker.unsupported_model import OffTheInterface, UnsupportedModel

SLIDING, CHUNKED = Sliding(zoo.WINDOW), Chunked(zoo.WINDOW)
MASKS: dict[str, list[Mask]] = {
    "mistral": [SLIDING] * 3,
    "gemma2": [SLIDING, Causal(), SLIDING],
    "gemma3": [SLIDING, Causal(), SLIDING],
    "phi3": [SLIDING] * 3,
    "gpt_oss": [SLIDING, Causal(), SLIDING],
    "llama4": [CHUNKED, CHUNKED, Causal()],
    "llama4_temperature": [CHUNKED, CHUNKED, Causal()],
}


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_masks_of_every_family(name: str) -> None:
    specs = probe(zoo.build(name))
    assert [spec.mask for spec in specs.values()] == MASKS.get(name, [Causal()] * 3)
    assert [spec.layer_idx for spec in specs.values()] == list(specs) == [0, 1, 2]


def test_geometry_scaling_softcap_and_sinks() -> None:
    llama = LayerSpec(
        layer_idx=0,
        num_query_heads=4,
        num_kv_heads=2,
        k_head_dim=8,
        v_head_dim=8,
        mask=Causal(),
        scaling=8**-0.5,
        softcap=None,
        has_sinks=False,
    )
    assert probe(zoo.build("llama"))[0] == llama
    assert probe(zoo.build("gpt2"))[0].num_kv_heads == 4
    assert probe(zoo.build("qwen3"))[0].k_head_dim == 16
    assert probe(zoo.build("opt"))[0].scaling == 1.0
    deepseek = probe(zoo.build("deepseek_v3"))[2]
    assert (deepseek.k_head_dim, deepseek.v_head_dim) == (16, 12)
    gemma = probe(zoo.build("gemma2"))[1]
    assert (gemma.softcap, gemma.scaling, gemma.has_sinks) == (2.0, 0.5, False)
    gpt_oss = probe(zoo.build("gpt_oss"))[1]
    assert (gpt_oss.softcap, gpt_oss.has_sinks) == (None, True)


def test_the_model_is_left_as_it_was() -> None:
    model = zoo.build("llama")
    before = model.config._attn_implementation
    probe(model)
    assert model.config._attn_implementation == before
    refused = zoo.build("bloom")
    before = refused.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        probe(refused)
    assert refused.config._attn_implementation == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bloom", "BloomForCausalLM is not supported: none of its 3 layers calls attention through"),
        ("falcon", "FalconForCausalLM is not supported: none of its 3 layers"),
        ("gptj", "GPTJForCausalLM is not supported: none of its 3 layers"),
        ("mpt", "MptForCausalLM is not supported: none of its 3 layers"),
        ("mamba2", "Mamba2ForCausalLM is not supported: none of its 3 layers"),
        ("qwen3_next", r"Qwen3NextForCausalLM is not supported: 2 of its 3 layers \(first: 0\) made no attention call"),
    ],
)
def test_models_off_the_interface_are_refused(name: str, message: str) -> None:
    with pytest.raises(OffTheInterface, match=message):
        probe(zoo.build(name))


def test_a_mask_of_another_kind_is_refused_for_good() -> None:
    """Not OffTheInterface: a model that looks ahead must not be tried with its own attention."""
    with pytest.raises(
        UnsupportedModel, match="BertLMHeadModel is not supported: layer 0 asks for an unknown mask"
    ) as e:
        probe(zoo.build("bert"))
    assert not isinstance(e.value, OffTheInterface)


def test_a_window_that_contradicts_the_mask_is_refused() -> None:
    model = zoo.build("gemma2")
    model.model.layers[2].self_attn.sliding_window = 5
    with pytest.raises(UnsupportedModel, match=r"layer 2 .* the mask Sliding\(window=8\) and for sliding_window=5"):
        probe(model)


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = zoo.build("llama")
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(UnsupportedModel, match=r"1 of its 3 layers \(first: 2\) made no attention call"):
        probe(model)
    model = zoo.build("llama")
    attention = model.model.layers[2].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (forward(*args, **kwargs), forward(*args, **kwargs))[1]
    with pytest.raises(UnsupportedModel, match="4 attention calls in one forward of 3 layers"):
        probe(model)


def test_attention_without_a_mask_is_refused() -> None:
    model = zoo.build("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": None})
    with pytest.raises(UnsupportedModel, match="layer 0 asks for no mask"):
        probe(model)
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": torch.zeros(1, 1, 1, 1)})
    with pytest.raises(UnsupportedModel, match="layer 0 asks for a mask of its own making"):
        probe(model)


class TestClassifyMask:
    @pytest.mark.parametrize("size", [1, 2, 8, 1023, 4096, 5000])
    def test_sizes_of_windows_and_chunks(self, size: int) -> None:
        no_padding = torch.zeros(1, dtype=torch.int64)
        sliding = masking_utils.sliding_window_causal_mask_function(size)
        chunked = masking_utils.chunked_causal_mask_function(size, no_padding)
        assert classify_mask(sliding, positions=10240) == Sliding(size)
        if size > 1:  # a chunk of one and a window of one are the same mask
            assert classify_mask(chunked, positions=10240) == Chunked(size)

    def test_causal(self) -> None:
        causal: Any = masking_utils.causal_mask_function
        assert classify_mask(causal) == Causal()

    def test_a_window_as_wide_as_the_grid_is_causal(self) -> None:
        sliding = masking_utils.sliding_window_causal_mask_function(64)
        assert classify_mask(sliding, positions=64) == Causal()
        assert classify_mask(sliding, positions=65) == Sliding(64)

    @pytest.mark.parametrize(
        "function",
        [
            lambda b, h, q, kv: kv >= 0,
            lambda b, h, q, kv: kv < q,
            lambda b, h, q, kv: (kv <= q) & ((kv > q - 8) | (kv < 4)),
            lambda b, h, q, kv: (kv <= q) & (kv % 2 == 0),
            lambda b, h, q, kv: (kv <= q + 1) & (kv > q - 8),
            lambda b, h, q, kv: (kv <= q) & ((q - kv) % 3 == 0),
            lambda b, h, q, kv: kv < 0,
            lambda b, h, q, kv: (kv <= q) & ((kv + 3) // 8 == (q + 3) // 8),
        ],
        ids=["all", "strict", "with anchors", "even keys", "looks ahead", "dilated", "nothing", "shifted chunks"],
    )
    def test_other_masks_are_told_apart(self, function: Any) -> None:
        assert classify_mask(function, positions=4096) is None
