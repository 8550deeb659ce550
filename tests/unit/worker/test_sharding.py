"""The division of a model over ranks, decided on its outline; and the heads that are left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from model_zoo import build
from transformers import AutoModelForCausalLM

from quire.worker.model.sharding import OwnHead, Sharding, plan_sharding
from quire.worker.unsupported_model import UnsupportedModel

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96, "pad_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION = "model.layers.*.self_attn"
HEAD_DIM = 8


def outline(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_kv_heads_are_divided_or_copied() -> None:
    model = outline(hf.LlamaConfig(**SIZE, **HEADS))
    assert plan_sharding(model, 2) == Sharding(2)
    with_copies = Sharding(4, OwnHead((ATTENTION,), num_kv_heads=2, num_query_heads=4))
    assert plan_sharding(model, 4) == with_copies
    assert str(with_copies) == "each of 2 kv heads is on 2 of 4 ranks"
    rules = with_copies.loading_arguments()["distributed_config"].tp_plan
    assert rules == {f"{ATTENTION}.k_proj": "replicate", f"{ATTENTION}.v_proj": "replicate"}


def test_projections_that_are_gathered_need_no_copies() -> None:
    assert plan_sharding(outline(hf.Phi3Config(**SIZE, **HEADS)), 4) == Sharding(4)


def test_experts_alone() -> None:
    model = outline(hf.GptOssConfig(**SIZE, **HEADS, num_local_experts=4))
    sharding = plan_sharding(model, 4)
    assert sharding == Sharding(4, by_experts=True)
    config = sharding.loading_arguments()["distributed_config"]
    assert (config.tp_size, config.ep_size) == (4, 4)
    with pytest.raises(UnsupportedModel, match="its 4 experts can't be divided over 3 ranks"):
        plan_sharding(model, 3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.CohereConfig(**SIZE, **HEADS, use_qk_norm=True), "q_norm.weight differs from head to head"),
        (hf.DeepseekV2Config(**SIZE, **HEADS), None),
    ],
)
def test_what_can_have_no_copies_is_refused(config: Any, reason: str | None) -> None:
    if reason is None:
        assert plan_sharding(outline(config), 4).own_head is None
        return
    with pytest.raises(UnsupportedModel, match=f"its 2 kv heads can't be copied to 4 ranks: {reason}"):
        plan_sharding(outline(config), 4)


def test_quantized_weights_are_not_sharded() -> None:
    config = hf.LlamaConfig(**SIZE, **HEADS, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match="its weights are quantized, and are not sharded over 2 ranks"):
        plan_sharding(outline(config), 2)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_rank_keeps_the_head_of_its_query_heads(family: str) -> None:
    """Queries of 4 ranks belong to kv heads 0, 0, 1 and 1."""
    whole = dict(build(family).named_parameters())
    for rank, head in enumerate([0, 0, 1, 1]):
        model = build(family)
        OwnHead((ATTENTION,), num_kv_heads=2, num_query_heads=4).keep(model, rank=rank, size=4)
        cut = {name: each for name, each in model.named_parameters() if each.shape != whole[name].shape}
        assert {name.split(".")[4] for name in cut} == {"k_proj", "v_proj"}
        for name, parameter in cut.items():
            assert torch.equal(parameter, whole[name][head * HEAD_DIM : (head + 1) * HEAD_DIM]), name
        attention = model.model.layers[0].self_attn
        assert attention.num_key_value_groups == 1
        assert attention.k_proj.out_features == HEAD_DIM
