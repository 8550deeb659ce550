"""Models with quantized weights through the worker's executor: tokens, what is logged, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import executor_driver as driver
import model_zoo as zoo
import pytest
import quantized_zoo
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quire.worker.__main__ import main
from quire.worker.flags import QUANTIZATION_NAMES
from quire.worker.fusion.steps import TorchSteps
from quire.worker.model.checkpoint import load_model
from quire.worker.model.modes import Part
from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.unsupported_model import UnsupportedModel

NEW_TOKENS = 8
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module", params=list(quantized_zoo.FORMATS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return quantized_zoo.save(request.param, tmp_path_factory.mktemp("checkpoints"))


def test_tokens_are_those_of_the_plain_model(checkpoint: tuple[Path, Any]) -> None:
    """Prompts in chunks, forks and a preemption; transformers' generate() on the weights that are stood for."""
    folder, plain = checkpoint
    model = load_model(folder, max_model_len=driver.MAX_MODEL_LEN)
    assert sum(1 for _ in quantized_linears(model._model)) == 14
    assert model.modes.describe_degraded() == ""
    assert model.num_layer_parameters == sum(
        each.numel() for name, each in plain.named_parameters() if "embed" not in name and "lm_head" not in name
    )
    prompts = driver.make_prompts()
    found, forked = driver.run_mixed(model, NEW_TOKENS)
    expected = [zoo.generate(plain, prompt, NEW_TOKENS) for prompt in prompts]
    assert found == expected
    assert forked == [expected[i] for i in driver.FORKED]
    assert len({token for tokens in found for token in tokens[-NEW_TOKENS:]}) > 10


def test_a_model_with_rounded_inputs_passes_the_self_check_and_gives_its_own_tokens(tmp_path: Path) -> None:
    """Its own attention is transformers', and its linear layers are those that the tools' layers are compared with."""
    folder, _ = quantized_zoo.save("compressed_int8_inputs", tmp_path)
    model = load_model(folder, max_model_len=driver.MAX_MODEL_LEN)
    assert all(linear.inputs.dtype == torch.int8 for _, linear in quantized_linears(model._model))
    found, _ = driver.run_mixed(model, NEW_TOKENS)
    model._model.set_attn_implementation("eager")
    for tokens, prompt in zip(found, driver.make_prompts(), strict=True):
        assert tokens[: len(prompt) + 1] == zoo.generate(model._model, prompt, 1)


@pytest.mark.parametrize("kind", QUANTIZATION_NAMES)
def test_a_plain_model_is_quantized_at_load(kind: str, tmp_path: Path) -> None:
    model = load_model(zoo.save("llama", tmp_path), max_model_len=driver.MAX_MODEL_LEN, quantization=kind)
    assert {mode.part: mode.how for mode in model.modes.all()}[Part.WEIGHTS] == f"quantized, {kind} at load"
    assert type(model._model.lm_head) is torch.nn.Linear
    plain = load_model(zoo.save("llama", tmp_path), max_model_len=driver.MAX_MODEL_LEN)
    assert model.num_layer_parameters == plain.num_layer_parameters
    assert model.fingerprint != plain.fingerprint
    found, _ = driver.run_mixed(model, NEW_TOKENS)
    model._model.set_attn_implementation("eager")
    for tokens, prompt in zip(found, driver.make_prompts(), strict=True):
        assert tokens[: len(prompt) + 1] == zoo.generate(model._model, prompt, 1)


def test_weights_that_are_quantized_or_not_in_linear_layers_are_not_quantized_at_load(tmp_path: Path) -> None:
    folder, _ = quantized_zoo.save("gptq", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"quantized \(gptq, 4 bits\): --quantization is for plain weights"):
        load_model(folder, quantization="int8")
    with pytest.raises(UnsupportedModel, match=r"--quantization fp8: only 0% of its weights are in linear layers"):
        load_model(zoo.save("gpt2", tmp_path), quantization="fp8")
    with pytest.raises(UnsupportedModel, match=r"--quantization int8: only \d+% of its weights are in linear layers"):
        load_model(zoo.save("mixtral", tmp_path), quantization="int8")


def test_ranks_exclude_quantization(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path), "--quantization", "int8", "--tensor-parallel-size", "2"]
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 2
    assert "--quantization excludes --tensor-parallel-size 2" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_runs_in_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, _ = quantized_zoo.save("gptq", tmp_path)
    model = load_model(folder, max_model_len=driver.MAX_MODEL_LEN, dtype=dtype)
    assert model.dtype == dtype
    assert model.modes.describe_degraded() == ""


def test_norms_are_fused_around_quantized_layers(tmp_path: Path) -> None:
    folder, plain = quantized_zoo.save("awq", tmp_path)
    model = load_model(folder, max_model_len=driver.MAX_MODEL_LEN, fused_steps=TorchSteps())
    assert "2 LlamaAttention: its weights are quantized; 2 LlamaMLP: its weights are quantized" in str(model.fusion)
    prompt = driver.make_prompts()[1]
    assert driver.run_mixed(model, 4)[0][1] == zoo.generate(plain, prompt, 4)


def test_weights_say_how_they_are_held(tmp_path: Path) -> None:
    folder, _ = quantized_zoo.save("gptq", tmp_path)
    modes = {mode.part: mode.how for mode in load_model(folder).modes.all()}
    assert modes[Part.WEIGHTS] == "quantized, gptq, 4 bits"
    assert Part.WEIGHTS not in {mode.part for mode in load_model(zoo.save("llama", tmp_path)).modes.all()}


def test_the_fingerprint_is_of_the_packed_weights_and_their_format(tmp_path: Path) -> None:
    folder, plain = quantized_zoo.save("compressed_int8", tmp_path)
    before = load_model(folder).fingerprint
    assert before == load_model(folder).fingerprint
    plain.save_pretrained(tmp_path / "plain")
    change(folder, f"{LAYER}.weight_scale", lambda scale: scale * 2)
    assert len({before, load_model(folder).fingerprint, load_model(tmp_path / "plain").fingerprint}) == 3


def change(folder: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Write a checkpoint with one tensor changed, or without it."""
    tensors = load_file(folder / "model.safetensors")
    changed = how(tensors.pop(name))
    kept = {} if changed is None else {name: changed.contiguous()}
    save_file(tensors | kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("tensor", "how", "message"),
    [
        ("weight_scale", lambda scale: None, f"lacks 1 of its weights, the first is {LAYER}.weight_scale"),
        ("weight_scale", lambda scale: scale[:-1], f"{LAYER}.weight_scale has the shape (63, 1) and not (64, 1)"),
        ("weight_scale", lambda scale: scale * float("nan"), f"{LAYER}.weight_scale has elements that are no finite"),
        ("weight_scale", lambda scale: scale * float("inf"), f"{LAYER}.weight_scale has elements that are no finite"),
        ("weight", lambda weight: weight.float(), f"{LAYER}.weight is float32 and not int8"),
        ("weight", lambda weight: weight[:, :-1], f"{LAYER}.weight has the shape (64, 63) and not (64, 64)"),
    ],
    ids=["missing scale", "scale's shape", "NaN scale", "infinite scale", "plain weight", "weight's shape"],
)
def test_a_bad_checkpoint_is_refused_with_the_tensors_name(
    tensor: str, how: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    folder, _ = quantized_zoo.save("compressed_int8", tmp_path)
    change(folder, f"{LAYER}.{tensor}", how)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(folder)
    assert message in str(caught.value)


def test_experts_are_not_loaded_without_their_scales(tmp_path: Path) -> None:
    """transformers merges the experts' float8 numbers into plain weights, and passes over the scales."""
    folder, _ = quantized_zoo.save("fp8", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    scale = {"model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(4, 4)}
    save_file(tensors | scale, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"experts\.0\.up_proj\.weight_scale_inv is the scale of no quantized"):
        load_model(folder)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder, _ = quantized_zoo.save("gptq", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match="its weights do not load: SafetensorError"):
        load_model(folder)


def test_another_format_is_refused_by_name_before_weights_are_read(tmp_path: Path) -> None:
    folder, _ = quantized_zoo.save("gptq", tmp_path)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="its weights are quantized; gptq: bits is 3 and not one of 2, 4, 8"):
        load_model(folder)
