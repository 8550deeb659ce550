"""Whole fused models on the kernels: the results of the model's own modules, and the choice of kernels."""

from __future__ import annotations

from pathlib import Path

import model_zoo as zoo
import pytest
import quantized_zoo
import torch
from paged_run import run
from samples import others_at_night
from transformers import AutoConfig, AutoModelForCausalLM

from quire.kernels.launching import BLOCK_SIZES
from quire.worker.fusion.products import OwnEverywhere, OwnProducts
from quire.worker.fusion.steps import KERNEL_BLOCK_SIZES, KernelSteps, TorchSteps, choose_steps
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.quantization.int4_product import try_int4
from quire.worker.quantization.packed_linear import PackedLinear
from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.quantization.quantizer import use_scheme
from quire.worker.quantization.scaled_linear import ScaledLinear
from quire.worker.quantization.scaled_product import try_scaled

PROMPTS = [[5, 3, 11, 60], [90, 2, 7, 7, 40]]
NUM_LAYERS, MAX_MODEL_LEN, NEW_TOKENS = 2, 24, 2
ALL = (NUM_LAYERS, NUM_LAYERS)

# The interpreter says so where a GPU goes on with an infinity, and so with a zero.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def prepare(name: str, device: torch.device, dtype: torch.dtype, *, fused: bool, own: bool = False) -> PagedModel:
    """With fewer layers than the zoo's: a program takes the interpreter some milliseconds. own: products, too."""
    model = zoo.build(name).to(dtype).to(device)
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    steps = KernelSteps(OwnProducts(OwnEverywhere()) if own else None)
    return prepare_model(model, max_model_len=MAX_MODEL_LEN, fused_steps=steps if fused else None)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_fused_model_says_what_its_own_modules_say(name: str, device: torch.device) -> None:
    fused = prepare(name, device, torch.float32, fused=True)
    assert fused.fusion is not None
    assert fused.fusion.steps == "kernels"
    assert fused.fusion.swapped["attention"] == fused.fusion.swapped["layer"] == ALL
    tokens, expected = run(prepare(name, device, torch.float32, fused=False), PROMPTS, NEW_TOKENS, block_size=16)
    greedy, actual = run(fused, PROMPTS, NEW_TOKENS, block_size=16)
    assert greedy == tokens
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4


def test_a_fused_model_in_bfloat16(device: torch.device) -> None:
    """Its self-check is the comparison."""
    fused = prepare("qwen2", device, torch.bfloat16, fused=True)
    assert fused.fusion is not None
    assert fused.fusion.swapped == {"norm": (5, 5), "attention": ALL, "mlp": ALL, "layer": ALL}
    _, logits = run(fused, PROMPTS, 2, block_size=16)
    assert bool(logits.isfinite().all())


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize(
    ("name", "fused"),
    others_at_night(
        [("qwen2", "layer"), ("olmo2", "layer"), ("mixtral", "layer"), ("gemma3", "layer"), ("phi", "mlp")],
        [("mixtral", "layer"), ("gemma3", "layer"), ("phi", "mlp")],
    ),
)
def test_own_products_say_what_the_modules_of_a_model_say(name: str, fused: str, device: torch.device) -> None:
    """Biases, norms behind a half, an MLP that is not fused, GELU with and without a gate; in whatever form a product
    has there.
    """
    own = prepare(name, device, torch.float32, fused=True, own=True)
    assert own.fusion is not None
    assert own.fusion.steps == "kernels, own products"
    assert own.fusion.swapped[fused] == ALL
    assert own.fusion.swapped["mlp"] == (ALL if name != "mixtral" else (0, NUM_LAYERS))
    tokens, expected = run(prepare(name, device, torch.float32, fused=False), PROMPTS, NEW_TOKENS, block_size=16)
    greedy, actual = run(own, PROMPTS, NEW_TOKENS, block_size=16)
    assert greedy == tokens
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4


def prepare_quantized(name: str, folder: Path, device: torch.device, *, fused: bool) -> PagedModel:
    """Layers that multiply by their packed weights in kernels, as on a GPU."""
    path, _ = quantized_zoo.save(name, folder)
    config = AutoConfig.from_pretrained(path)
    use_scheme(config)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).to(device)
    layers = [layer for _, layer in quantized_linears(model.requires_grad_(False))]
    assert try_int4([each for each in layers if isinstance(each, PackedLinear)], torch.float32) is None
    assert try_scaled([each for each in layers if isinstance(each, ScaledLinear)], torch.float32) is None
    return prepare_model(model, max_model_len=MAX_MODEL_LEN, fused_steps=KernelSteps() if fused else None)


@pytest.mark.parametrize("name", others_at_night(["awq", "gptq", "fp8", "compressed_int8_inputs"], ["gptq", "fp8"]))
def test_a_fused_model_with_packed_weights_says_what_its_own_modules_say(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    fused = prepare_quantized(name, tmp_path, device, fused=True)
    assert fused.fusion is not None
    assert fused.fusion.swapped == {"norm": (5, 5), "attention": ALL, "mlp": ALL, "layer": ALL}
    own = prepare_quantized(name, tmp_path, device, fused=False)
    tokens, expected = run(own, PROMPTS, NEW_TOKENS, block_size=16)
    greedy, actual = run(fused, PROMPTS, NEW_TOKENS, block_size=16)
    assert greedy == tokens
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4


def test_heads_that_kernels_do_not_take_run_as_they_are(device: torch.device) -> None:
    """Head dim 12 is no multiple of 8: the rest is fused."""
    fused = prepare("odd_heads", device, torch.float32, fused=True)
    assert fused.fusion is not None
    assert fused.fusion.swapped["attention"] == (0, NUM_LAYERS)
    assert fused.fusion.swapped["mlp"] == fused.fusion.swapped["layer"] == ALL
    (reason,) = {reason for _, reason in fused.fusion.unmatched}
    assert reason == "its trial failed with ValueError: k_pool has head dim 12, not a multiple of 8 in 8 .. 256"


def test_kernels_run_where_triton_does(device: torch.device) -> None:
    assert KERNEL_BLOCK_SIZES == BLOCK_SIZES
    assert isinstance(choose_steps(device, block_size=16, wanted=None), KernelSteps)
    assert isinstance(choose_steps(device, block_size=16, wanted=True), KernelSteps)
    assert choose_steps(device, block_size=16, wanted=False) is None
    assert choose_steps(device, block_size=8, wanted=None) is None
    assert isinstance(choose_steps(device, block_size=8, wanted=True), TorchSteps)


def test_who_decides_whose_products_run(device: torch.device) -> None:
    """There is no table for the interpreter."""
    names = {}
    for products in ("auto", "own", "library"):
        steps = choose_steps(device, block_size=16, wanted=None, products=products)  # type: ignore[arg-type]
        assert steps is not None
        names[products] = steps.name
    assert names["own"] == "kernels, own products"
    assert names["library"] == "kernels"
    if device.type == "cpu":
        assert names["auto"] == "kernels"
