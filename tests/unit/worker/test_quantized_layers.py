"""Layers of quantized checkpoints: the weight and the product are those of the tool that wrote the layer.

tests/framework/quantize_by_tools.py wrote the layers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from quire.worker.quantization.formats import READERS, read_scheme
from quire.worker.quantization.inputs import KEEP, InputRounding
from quire.worker.quantization.quantized_linear import QuantizedLinear
from quire.worker.quantization.quantizer import find_fault, find_quantization, use_scheme
from quire.worker.quantization.scaled_linear import ScaledFormat, ScaledLinear, Way, try_float8
from quire.worker.quantization.scheme import UnsupportedFormat

FOLDER = Path(__file__).parent / "quantized"
NAMES = sorted(path.stem for path in FOLDER.iterdir())
# The tools of these compute in float16.
HALF = {"awq", "gptq", "gptq_reordered", "gptq_8_bits"}


class Config(PretrainedConfig):
    model_type = "one_layer"
    rows = columns = 0


class OneLayer(PreTrainedModel):
    """A linear layer, and an output layer that no format quantizes."""

    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = nn.Linear(config.columns, config.rows, bias=False)
        self.lm_head = nn.Linear(config.rows, 2, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def read(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """The quantization_config, the tensors of the checkpoint, and what the tool made of them."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["quantization_config"])
    checkpoint = {key: each for key, each in tensors.items() if key.startswith("layer.")}
    return config, checkpoint, {key: each for key, each in tensors.items() if key not in checkpoint}


def load(quantization: dict[str, Any], checkpoint: dict[str, Tensor], shape: torch.Size, folder: Path) -> Any:
    """Load a checkpoint of one layer by transformers, with the layer of its format."""
    rows, columns = shape
    config = Config(rows=rows, columns=columns, quantization_config=quantization, tie_word_embeddings=False)
    config.save_pretrained(folder)
    save_file(checkpoint | {"lm_head.weight": torch.zeros(2, rows)}, folder / "model.safetensors", {"format": "pt"})
    config = Config.from_pretrained(folder)
    use_scheme(config)
    model, info = OneLayer.from_pretrained(folder, config=config, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_has_the_weight_and_the_results_of_its_tool(name: str, tmp_path: Path) -> None:
    config, checkpoint, expected = read(name)
    model = load(config, checkpoint, expected["expected_weight"].shape, tmp_path)
    assert find_fault(model) is None
    assert isinstance(model.layer, QuantizedLinear)
    assert type(model.lm_head) is nn.Linear
    weight = model.layer.dequantized(torch.float32)
    tolerance = 2e-3 if name in HALF else 1e-6
    torch.testing.assert_close(weight, expected["expected_weight"], atol=tolerance, rtol=tolerance)
    assert model.layer.dequantized(torch.bfloat16).dtype == torch.bfloat16
    if "input" in expected:
        found = model.layer(expected["input"])
        torch.testing.assert_close(found, expected["expected_output"], atol=1e-5, rtol=1e-5)
        unrounded = nn.functional.linear(expected["input"], weight)
        assert (found - unrounded).abs().max() > 1e-2, "the input was not rounded"


EIGHT_BITS = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


PER_ROW, PER_TENSOR = (1, 0), (0, 0)


def scaled(
    kind: str, inputs: InputRounding, *, shape: tuple[int, int] = (48, 64), block: tuple[int, int] = PER_ROW
) -> Any:
    """A layer [N, K] with a bias and random numbers, and scales such as those of its format."""
    generator = torch.Generator().manual_seed(3)
    layer = ScaledLinear(nn.Linear(shape[1], shape[0]), ScaledFormat(kind, EIGHT_BITS[kind], block), inputs)
    layer.requires_grad_(False).quantize(torch.randn(*shape, generator=generator))
    if block == PER_TENSOR:
        layer.register_buffer(layer.form.scale, torch.tensor([0.03]))
    if inputs.scales == "layer":
        layer.register_buffer("input_scale", torch.tensor([0.02]))
    return layer


def multiply(layer: Any, num_rows: int, dtype: torch.dtype) -> Way:
    """Compare a product with the exact one of the same numbers. Returns how it was computed."""
    input = torch.randn(2, num_rows, layer.in_features, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    layer.bias.data = layer.bias.data.to(dtype)
    exact = input.double()
    if layer.inputs.dtype is not None:
        numbers, scale = layer.inputs.quantize(input, layer)
        exact = numbers.double() * scale.double()
    expected = exact @ layer.dequantized(torch.float64).t() + layer.bias.double()
    found = layer(input)
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-2 if dtype.itemsize == 2 else 1e-6)
    return layer.find_way(input)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scales", ["token", "layer"])
@pytest.mark.parametrize("block", [PER_ROW, PER_TENSOR], ids=["rows", "tensor"])
def test_integers_are_multiplied_without_a_dequantized_weight(
    block: tuple[int, int], scales: Any, dtype: torch.dtype
) -> None:
    layer = scaled("int8", InputRounding(torch.int8, scales), block=block, shape=(7, 33))
    assert [multiply(layer, num_rows, dtype) for num_rows in (1, 20)] == [Way.INTEGERS] * 2


def test_an_integer_product_of_a_row_is_the_same_in_any_batch() -> None:
    layer, rows = scaled("int8", InputRounding(torch.int8)), torch.randn(40, 64)
    assert torch.equal(layer(rows), torch.cat([layer(row[None]) for row in rows]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_are_multiplied_with_integers_as_they_are(dtype: torch.dtype) -> None:
    layer = scaled("int8", KEEP)
    ways = [multiply(layer, num_rows, dtype) for num_rows in (1, 8, 9)]
    assert ways == [Way.FEW_ROWS, Way.FEW_ROWS, Way.DEQUANTIZED]
    assert multiply(layer, 1, torch.float32) is Way.DEQUANTIZED


def test_columns_that_torch_reads_beyond_are_dequantized() -> None:
    """torch._weight_int8pack_mm ends the process with 33 columns."""
    assert multiply(scaled("int8", KEEP, shape=(7, 33)), 1, torch.bfloat16) is Way.DEQUANTIZED


def refuse(*_: object, **__: object) -> Tensor:
    raise RuntimeError("no kernel for this GPU\nat some line")


def test_float8_is_multiplied_once_the_device_has_shown_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has the product too, if a slow one."""
    rounded = InputRounding(torch.float8_e4m3fn)
    layer = scaled("float8", rounded)
    assert multiply(layer, 3, torch.bfloat16) is Way.DEQUANTIZED
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_scaled_mm", lambda *_, **__: torch.zeros(1, 48, dtype=torch.bfloat16))
        assert try_float8([layer]) == "a product in float8, 64 to 48, is wrong"
        patched.setattr(torch, "_scaled_mm", refuse)
        assert try_float8([layer]) == "no kernel for this GPU"
    assert not layer.multiplies_float8
    assert try_float8([layer]) is None
    assert multiply(layer, 3, torch.bfloat16) is Way.FLOAT8
    assert multiply(layer, 3, torch.float16) is Way.DEQUANTIZED
    assert scaled("float8", rounded, shape=(48, 40)).way is Way.DEQUANTIZED


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_a_weight_is_quantized_to_the_nearest_numbers(kind: str) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    layer = scaled(kind, KEEP)
    step = 1 / 127 if kind == "int8" else 1 / 16
    assert ((layer.dequantized(torch.float32) - weight).abs() <= step * weight.abs().amax(1, keepdim=True)).all()
    layer.quantize(torch.zeros(48, 64))
    assert find_fault(nn.Sequential(layer)) is None
    assert not layer.dequantized(torch.float32).any()


def test_every_format_has_a_layer_of_its_tool() -> None:
    """fbgemm_fp8, which has a scale for each row as compressed-tensors, needs a GPU. mxfp4 has no layers."""
    assert {read(name)[0]["quant_method"] for name in NAMES} | {"fbgemm_fp8", "mxfp4"} == set(READERS)


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedFormat) as caught:
        read_scheme(config)
    return str(caught.value)


GROUP_CONFIG: dict[str, Any] = {"targets": ["Linear"], "format": "pack-quantized"}


def compressed(**changes: Any) -> dict[str, Any]:
    group = GROUP_CONFIG | changes
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, f"aqlm is not one of {', '.join(READERS)}"),
        ({"quant_method": "gptq", "bits": 3}, "gptq: bits is 3 and not one of 2, 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            "gptq: group_size is 0 and not a number of columns, or -1",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "gptq: dynamic is"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq: version is 'gemv' and not gemm"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "fp8: scale_fmt is 'ue8m0' and not one of float"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128] and not two sizes"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes: load_in_4bit is False"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "Int4WeightOnlyConfig",
        ),
        (compressed(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized' and not one of float-quantized"),
        (compressed(weights={"num_bits": 5, "strategy": "group"}), "weights: num_bits is 5 and not one of 2, 4, 8"),
        (
            compressed(weights={"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "group"}),
            "actorder is 'group'",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is empty"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme: num_bits is 4"),
    ],
    ids=str,
)
def test_what_no_layer_can_be_made_of_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    assert message in refused(config)


def test_layers_that_do_not_fit_the_format_are_named(tmp_path: Path) -> None:
    config, checkpoint, expected = read("gptq")
    with pytest.raises(UnsupportedFormat, match="layer: its 64 columns are no multiple of the group size 48"):
        load(config | {"group_size": 48}, checkpoint, expected["expected_weight"].shape, tmp_path)


def test_names_and_patterns_choose_the_layers_of_compressed_tensors() -> None:
    config, *_ = read("compressed_int4")
    config["ignore"] = ["lm_head", "re:.*down_proj$"]
    scheme = read_scheme(config)
    linear = nn.Linear(64, 16)
    chosen = {
        name for name in ("a.up_proj", "a.down_proj", "lm_head") if scheme.replacement(name, linear, ()) is not None
    }
    assert chosen == {"a.up_proj"}


@pytest.mark.parametrize(
    ("name", "tensor", "wrong", "message"),
    [
        ("compressed_int8", "weight_scale", torch.full((16, 1), float("nan")), "weight_scale has elements that are no"),
        ("compressed_int8", "weight", torch.zeros(16, 64), "weight is float32 and not int8"),
        ("gptq", "g_idx", torch.full((64,), 4, dtype=torch.int32), "g_idx names groups that are none of 4"),
        ("compressed_int4", "weight_shape", torch.tensor([16, 32]), r"weight_shape is \[16, 32\] and not \[16, 64\]"),
        (
            "bitsandbytes_nf4",
            "weight.quant_state.bitsandbytes__nf4",
            torch.zeros(3, dtype=torch.uint8),
            "has blocksize",
        ),
    ],
)
def test_tensors_that_cant_be_right_are_found(
    name: str, tensor: str, wrong: Tensor, message: str, tmp_path: Path
) -> None:
    config, checkpoint, expected = read(name)
    assert f"layer.{tensor}" in checkpoint
    model = load(config, checkpoint | {f"layer.{tensor}": wrong}, expected["expected_weight"].shape, tmp_path)
    fault = find_fault(model)
    assert fault is not None
    assert fault.startswith("layer.")
    assert re.search(message, fault)


def test_plain_weights_have_no_quantization() -> None:
    config = Config()
    assert find_quantization(config) is None
    assert use_scheme(config) is None
