"""Scales of keys and values in a pool in float8: calibrated, from a checkpoint, refused, and what they are good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import executor_driver as driver
import model_zoo as zoo
import pytest
import quantized_zoo
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.worker.model.checkpoint import load_model
from quire.worker.model.kv_scales import (
    HEADROOM,
    KV_FLOAT8,
    LARGEST,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    calibrate_kv_scales,
    measure_kv_error,
    set_kv_scales,
)
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.model.scratch import ScratchSequences
from quire.worker.unsupported_model import UnsupportedModel

MAX_MODEL_LEN = 256
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
LAYER = "model.layers.1.self_attn"


def prepare(family: str, *, deterministic: bool = False) -> PagedModel:
    return prepare_model(zoo.build(family), max_model_len=MAX_MODEL_LEN, deterministic=deterministic)


def with_large_keys(factor: float) -> PagedModel:
    """A Llama in which one key head is larger, and the queries over it are smaller by as much; values too."""
    model = zoo.build("llama")
    for layer in model.model.layers:
        attention, head_dim = layer.self_attn, layer.self_attn.head_dim
        queries = attention.q_proj.out_features // attention.k_proj.out_features * head_dim
        for projection, rows, by in (
            (attention.k_proj, head_dim, factor),
            (attention.q_proj, queries, 1 / factor),
            (attention.v_proj, head_dim, factor),
        ):
            projection.weight.data[:rows] *= by
        attention.o_proj.weight.data[:, :queries] /= factor
    return prepare_model(model, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_calibrated_scales_are_powers_of_two_that_keep_all_numbers_in_range(family: str) -> None:
    """Layers with windows, and latents, too."""
    model = prepare(family)
    scales = calibrate_kv_scales(model)
    scratch = ScratchSequences.make(model, NUM_PROMPTS, length=PROMPT_TOKENS)
    rows = list(range(NUM_PROMPTS))
    scratch.run(rows, [0] * NUM_PROMPTS, [len(tokens) for tokens in scratch.tokens])
    assert scales.keys() == model.attention_specs.keys()
    for layer_idx, found in scales.items():
        spec, pool = model.attention_specs[layer_idx], scratch.pool
        assert found.shape == (2, spec.num_kv_heads)
        assert torch.equal(found.log2(), found.log2().round())
        blocks = scratch.block_ids[pool.group_of(layer_idx)]
        for scale, tensor in zip(found, (pool.k(layer_idx), pool.v(layer_idx)), strict=True):
            stored = tensor[blocks].abs().amax((0, 1, 3)) / scale
            assert (stored <= LARGEST / HEADROOM).all()
            assert spec.values_in_keys or (stored > LARGEST / HEADROOM / 2).all()
    assert {layer_idx: each.tolist() for layer_idx, each in calibrate_kv_scales(model).items()} == {
        layer_idx: each.tolist() for layer_idx, each in scales.items()
    }


@pytest.mark.parametrize("factor", [2.0**16, 2.0**-16])
def test_keys_beyond_the_range_of_float8_are_as_exact_as_others(factor: float) -> None:
    """A number and its scale differ from those of the ordinary model in their exponents alone."""
    model, scaled = prepare("llama"), with_large_keys(factor)
    set_kv_scales(model)
    cut_off = measure_kv_error(scaled)
    set_kv_scales(scaled)
    ordinary, found = measure_kv_error(model), measure_kv_error(scaled)
    assert found == pytest.approx(ordinary, rel=0.02)
    assert cut_off > 4 * found


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fork_has_the_tokens_of_its_parent(deterministic: bool) -> None:
    """Prompts in chunks, forks, and a preemption; a fork goes on as the prompt that it was made from."""
    model = prepare("qwen3", deterministic=deterministic)
    set_kv_scales(model)
    found, forked = driver.run_mixed(model, 8, driver=driver.ExecutorDriver(model, kv_dtype=KV_FLOAT8))
    assert forked == [found[i] for i in driver.FORKED]


def save(folder: Path, *, scheme: dict[str, Any] | None = SCHEME, **changed: Tensor | None) -> Path:
    """A checkpoint of compressed-tensors with scales; those of LAYER are changed, or left out."""
    path, _ = quantized_zoo.save("compressed_int8", folder)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (path / "config.json").write_text(json.dumps(config))
    scales = {
        f"model.layers.{layer}.self_attn.{kind}": torch.tensor([value * (1 + layer)])
        for layer in range(2)
        for kind, value in (("k_scale", 0.25), ("v_scale", 0.125))
    }
    scales |= {f"{LAYER}.{kind}": tensor for kind, tensor in changed.items()}  # type: ignore[dict-item]
    tensors = load_file(path / "model.safetensors") | {k: v for k, v in scales.items() if v is not None}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_scales_of_a_checkpoint_are_used_and_are_part_of_the_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = load_model(save(tmp_path))
    before = model.fingerprint
    set_kv_scales(model)
    assert {layer: each.tolist() for layer, each in model.kv_scales.items()} == {
        0: [[0.25] * 2, [0.125] * 2],
        1: [[0.5] * 2, [0.25] * 2],
    }
    assert "float8 keys and values: a scale for each layer, from the checkpoint" in caplog.text
    assert model.fingerprint.startswith(f"{before}:kv-")
    found = measure_kv_error(model)
    model.kv_scales = calibrate_kv_scales(model)
    assert found < 1.5 * measure_kv_error(model)
    other = load_model(save(tmp_path, k_scale=torch.tensor([0.75])))
    set_kv_scales(other)
    assert other.fingerprint != model.fingerprint


def test_pools_of_other_scales_have_other_fingerprints() -> None:
    """So that memory that a holder keeps, and blocks of another worker, are not read with them."""
    models = [prepare("llama") for _ in range(2)]
    set_kv_scales(models[0])
    models[1].kv_scales = {layer: 2 * scale for layer, scale in calibrate_kv_scales(models[1]).items()}
    assert models[0].fingerprint != models[1].fingerprint
    set_kv_scales(models[1])
    assert models[0].fingerprint == models[1].fingerprint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v_scale": None}, "its v_scale of layer 1 is not there, and other layers have one"),
        ({"k_scale": torch.tensor([0.0])}, "its k_scale of layer 1 is 0.0, not a finite number above 0"),
        ({"k_scale": torch.tensor([-1.0])}, "its k_scale of layer 1 is -1.0, not a finite number above 0"),
        ({"v_scale": torch.tensor([float("nan")])}, "its v_scale of layer 1 is nan, not a finite number above 0"),
        ({"k_scale": torch.ones(3)}, r"its k_scale of layer 1 has the shape \(3,\) and not \(1,\)"),
    ],
    ids=["missing", "zero", "negative", "NaN", "shape"],
)
def test_bad_scales_are_refused_by_name(changed: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    model = load_model(save(tmp_path, **changed))
    with pytest.raises(UnsupportedModel, match=message):
        set_kv_scales(model)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("type", "int", "kv_cache_scheme: type is 'int' and not one of float"),
        ("num_bits", 4, "kv_cache_scheme: num_bits is 4 and not one of 8"),
        ("strategy", "attn_head", "kv_cache_scheme: strategy is 'attn_head' and not one of tensor"),
        ("dynamic", True, "kv_cache_scheme: dynamic is True and not one of False"),
    ],
)
def test_another_scheme_is_refused(field: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(save(tmp_path, scheme=SCHEME | {field: value}))
