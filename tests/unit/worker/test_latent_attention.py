"""MLA on its latents: the pool's content, and the cases in which it keeps keys and values after all."""

from __future__ import annotations

from typing import Any

import model_zoo as zoo
import pytest
import torch
from executor_driver import FORKED, MAX_MODEL_LEN, make_prompts, run_mixed

from quire.worker.attention import latent_attention
from quire.worker.memory.kv_pool import KVPool, bytes_per_block
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.model.probe import probe

LATENTS = ["deepseek_v2", "deepseek_v3"]


def run(model: PagedModel, name: str) -> None:
    found, forked = run_mixed(model, 8)
    own = zoo.build(name)
    expected = [zoo.generate(own, prompt, 8) for prompt in make_prompts()]
    assert (found, forked) == (expected, [expected[i] for i in FORKED])


@pytest.mark.parametrize("name", LATENTS)
def test_a_token_takes_a_latent_and_a_rope_key(name: str) -> None:
    model = prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN)
    expanded = probe(zoo.build(name))
    assert bytes_per_block(model.specs, 1, torch.float32) == 3 * (16 + 8) * 4
    assert bytes_per_block(expanded, 1, torch.float32) == 3 * 4 * (16 + 12) * 4
    assert model.fingerprint.endswith(":latent")
    run(model, name)


def test_with_a_bias_it_keeps_keys_and_values() -> None:
    def build() -> Any:
        model = zoo.build("deepseek_v3")
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.full((80,), 0.1), requires_grad=False)
        return model

    model = prepare_model(build(), max_model_len=MAX_MODEL_LEN)
    assert not any(spec.values_in_keys for spec in model.specs.values())
    assert ":" not in model.fingerprint
    found, _ = run_mixed(model, 4)
    assert found == [zoo.generate(build(), prompt, 4) for prompt in make_prompts()]


def test_what_does_not_agree_on_latents_is_run_on_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = latent_attention.paged_attention
    monkeypatch.setattr(
        latent_attention,
        "paged_attention",
        lambda module, query, *args, **kwargs: attention(module, 2 * query, *args, **kwargs),
    )
    model = prepare_model(zoo.build("deepseek_v3"), max_model_len=MAX_MODEL_LEN)
    assert not any(spec.values_in_keys for spec in model.specs.values())
    run(model, "deepseek_v3")


def test_values_in_keys_are_the_same_memory() -> None:
    specs = prepare_model(zoo.build("deepseek_v3"), max_model_len=MAX_MODEL_LEN).specs
    pool = KVPool(specs, num_blocks=4, block_size=2, dtype=torch.float32, device="cpu")
    assert [tensor.shape for tensor in pool.tensors()] == [(4, 2, 1, 24)] * 3
    assert sum(tensor.nbytes for tensor in pool.tensors()) == 4 * pool.bytes_per_block
    pool.k(1)[2] = torch.arange(24.0)
    assert torch.equal(pool.v(1)[2, 1, 0], torch.arange(16.0))
    pool.copy_blocks([(2, 3)])
    assert torch.equal(pool.v(1)[3], pool.v(1)[2])
    assert pool.checksum_blocks([2])[0] == pool.checksum_blocks([3])[0] != pool.checksum_blocks([1])[0]
