"""Mixtures with quantized experts: tokens, memory, what is logged, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import executor_driver as driver
import model_zoo as zoo
import pytest
import quantized_zoo
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.worker.model.checkpoint import load_model
from quire.worker.model.modes import Part
from quire.worker.quantization.experts import ExpertSizes, LinearExperts, QuantizedExperts
from quire.worker.quantization.quantized_module import quantized_modules
from quire.worker.quantization.scaled_linear import ScaledFormat, ScaledLinear
from quire.worker.unsupported_model import UnsupportedModel

NEW_TOKENS = 8


def save(name: str, directory: Path) -> tuple[Path, Path]:
    return quantized_zoo.save_mxfp4(directory) if name == "mxfp4" else quantized_zoo.save_experts(name, directory)


@pytest.mark.parametrize("name", [*quantized_zoo.EXPERTS, "mxfp4"])
def test_tokens_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, forks and a preemption; transformers' generate() on the weights that are stood for."""
    folder, plain = save(name, tmp_path)
    model = load_model(folder, max_model_len=driver.MAX_MODEL_LEN)
    expected_model = load_model(plain, max_model_len=driver.MAX_MODEL_LEN)
    assert model.num_layer_parameters == expected_model.num_layer_parameters
    modes = {mode.part: mode for mode in model.modes.all()}
    assert modes[Part.EXPERTS].how == "eager"
    assert modes[Part.WEIGHTS].how.startswith("quantized, ")
    assert not model.modes.degraded()
    own = hf.AutoModelForCausalLM.from_pretrained(plain).eval()
    expected = [zoo.generate(own, prompt, NEW_TOKENS) for prompt in driver.make_prompts()]
    found, forked = driver.run_mixed(model, NEW_TOKENS)
    assert found == expected
    assert forked == [expected[i] for i in driver.FORKED]
    experts = [each for _, each in quantized_modules(model._model) if isinstance(each, QuantizedExperts)]
    held = sum(buffer.nbytes for each in experts for buffer in each.buffers())
    assert held < 0.4 * 4 * sum(each.num_weights for each in experts)


def test_logits_are_those_of_transformers_own_forward_of_the_checkpoint(tmp_path: Path) -> None:
    """It dequantizes MXFP4 when it loads it on a CPU, and so it does float8."""
    for name in ("mxfp4", "qwen3_moe fp8"):
        folder, _ = save(name, tmp_path / name.replace(" ", "-"))
        own = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ours = load_model(folder, dtype=torch.float32)._model
        ours.set_attn_implementation("eager")
        tokens = torch.arange(1, 30)[None]
        torch.testing.assert_close(ours(tokens).logits, own(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.night
def test_a_deterministic_model_has_quantized_experts(tmp_path: Path) -> None:
    folder, plain = save("mxfp4", tmp_path)
    model = load_model(folder, max_model_len=driver.MAX_MODEL_LEN, deterministic=True)
    expected = load_model(plain, max_model_len=driver.MAX_MODEL_LEN, deterministic=True)
    assert driver.run_mixed(model, NEW_TOKENS) == driver.run_mixed(expected, NEW_TOKENS)


@pytest.mark.parametrize("block", [(16, 16), (1, 0), (0, 0)])
def test_gate_and_up_have_scales_of_their_own(block: tuple[int, int]) -> None:
    """Also where a block has rows of gate alone: gate has 24 rows here, so its second block has 8."""
    form = ScaledFormat("test", torch.int8, block)
    sizes = ExpertSizes(3, 2, 48, 40, is_transposed=False, dtype=torch.float32)
    experts = LinearExperts(lambda linear: ScaledLinear(linear, form), sizes)
    generator = torch.Generator().manual_seed(1)
    layers = [ScaledLinear(nn.Linear(40, 24), form) for _ in range(2)]
    weight = torch.randint(-127, 128, (3, 48, 40), generator=generator, dtype=torch.int8)
    scale = torch.rand(experts.get_buffer(form.scale).shape, generator=generator)
    experts.register_buffer(form.weight, weight)
    experts.register_buffer(form.scale, scale)
    for number, layer in enumerate(layers):
        layer.register_buffer(form.weight, weight[1].chunk(2)[number])
        layer.register_buffer(form.scale, scale[1].chunk(2)[number])
    assert torch.equal(experts[1], torch.cat([layer.dequantized(torch.float32) for layer in layers]))


EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("name", "tensor", "how", "message"),
    [
        ("qwen3_moe fp8", "2.up_proj.weight_scale_inv", lambda x: None, r"experts\.gate_up_proj\.weight_scale_inv"),
        ("qwen3_moe fp8", "2.down_proj.weight_scale_inv", lambda x: x * float("nan"), "down_proj.weight_scale_inv has"),
        ("qwen3_moe fp8", "2.down_proj.weight", lambda x: x[:, :-1], r"experts\.down_proj"),
        ("qwen3_moe float8", "1.gate_proj.weight", lambda x: x.float(), r"gate_up_proj\.weight"),
        ("qwen3_moe gptq", "2.up_proj.g_idx", lambda x: x + 1, "gate_up_proj.g_idx names groups that are none of"),
        (
            "deepseek_v3 int4",
            "0.down_proj.weight_shape",
            lambda x: x + 1,
            r"down_proj\.weight_shape is \[33, 17\] and not",
        ),
        ("mxfp4", "gate_up_proj_scales", lambda x: None, r"lacks 1 of its weights, .*gate_up_proj\.scales"),
        ("mxfp4", "gate_up_proj_scales", lambda x: x | 255, r"gate_up_proj\.scales has elements that are no finite"),
        ("mxfp4", "down_proj_blocks", lambda x: x[..., :8], r"down_proj\.blocks has the shape \(4, 64, 1, 8\) and not"),
        ("mxfp4", "down_proj_blocks", lambda x: x.float(), r"down_proj\.blocks is float32 and not uint8"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_the_tensors_name(
    name: str, tensor: str, how: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    folder, _ = save(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    changed = how(tensors.pop(f"{EXPERT}.{tensor}"))
    kept = {} if changed is None else {f"{EXPERT}.{tensor}": changed.contiguous()}
    save_file(tensors | kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder)
