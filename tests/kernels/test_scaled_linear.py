"""Products with weights of 8 bits and scales: against float64 for every block, and in layers of each format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import quantized_zoo
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quire.kernels import reference_elementwise as reference
from quire.kernels.scaled_linear import ScaledWeight, find_column_tile, scaled_dequantize, scaled_linear
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import MAX_ROWS
from quire.worker.quantization import scaled_product
from quire.worker.quantization.quantized_linear import dequantizing, quantized_linears
from quire.worker.quantization.quantizer import use_scheme
from quire.worker.quantization.scaled_linear import ScaledLinear
from quire.worker.quantization.scaled_product import try_scaled

FLOAT8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, device: torch.device) -> ScaledWeight:
    """A weight with numbers of every size that the dtype has, the subnormal ones too."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if dtype == FLOAT8:
        bits[(bits & 127) == 127] = 0  # these are no numbers
    numbers = bits.view(dtype)
    num_blocks = [-(-size // (each or size)) for size, each in zip(shape, block, strict=True)]
    scales = (0.5 + torch.rand(num_blocks, generator=generator)) / numbers.float().abs().amax() / shape[1] ** 0.5
    return ScaledWeight(numbers.to(device), scales.to(device), block)


def check(
    device: torch.device,
    *,
    dtype: torch.dtype,
    num_rows: int,
    shape: tuple[int, int],
    block: tuple[int, int],
    numbers: torch.dtype = FLOAT8,
    has_bias: bool = False,
) -> None:
    weight = draw(shape, block, numbers, device)
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_rows, num_inputs + 8, generator=generator).to(device, dtype)[:, :num_inputs]
    bias = torch.randn(num_outputs, generator=generator).to(device, dtype) if has_bias else None
    expected = reference.scaled_linear(x.cpu(), weight.numbers.float().cpu(), weight.scales.cpu(), block)
    if bias is not None:
        expected += bias.cpu().double()
    out = torch.full((num_rows, num_outputs + 5), torch.nan, dtype=dtype, device=device)
    workspace = SkinnyWorkspace.allocate(device)
    found = scaled_linear(x, weight, bias=bias, workspace=workspace, out=out[:, :num_outputs])
    assert not workspace.tickets.any()
    assert out[:, num_outputs:].isnan().all(), "nothing is written behind the last output"
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    whole = x.double() @ scaled_dequantize(weight, torch.float32).double().t()
    expected -= 0 if bias is None else bias.cpu().double()
    torch.testing.assert_close(whole.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sample
@pytest.mark.parametrize("numbers", [FLOAT8, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_that_of_the_weight_that_is_stood_for(
    device: torch.device, dtype: torch.dtype, numbers: torch.dtype
) -> None:
    check(device, dtype=dtype, num_rows=3, shape=(40, 256), block=(16, 64), numbers=numbers, has_bias=True)


@pytest.mark.parametrize(
    "block",
    [(0, 0), (1, 0), (128, 128), (64, 32), (1, 96), (16, 512), (0, 32)],
    ids=lambda block: f"{block[0]}x{block[1]}",
)
def test_blocks_of_every_size_and_those_that_end_beyond_the_weight(
    device: torch.device, block: tuple[int, int]
) -> None:
    check(device, dtype=torch.bfloat16, num_rows=1, shape=(136, 288), block=block)


@pytest.mark.parametrize("num_inputs", [1, 31, 250])
def test_columns_that_fill_no_tile(device: torch.device, num_inputs: int) -> None:
    check(device, dtype=torch.float32, num_rows=2, shape=(17, num_inputs), block=(1, 0), has_bias=True)


@pytest.mark.parametrize("num_rows", [16, 17, MAX_ROWS])
def test_every_number_of_rows(device: torch.device, num_rows: int) -> None:
    check(device, dtype=torch.float32, num_rows=num_rows, shape=(33, 64), block=(32, 32))


@pytest.mark.parametrize("num_inputs", [64, 160, 256])
def test_programs_share_a_sum_where_outputs_are_few(device: torch.device, num_inputs: int) -> None:
    """Of 5 tiles, 4 programs have 2, 2, 1 and none."""
    check(device, dtype=torch.float32, num_rows=2, shape=(70, num_inputs), block=(64, 32), has_bias=True)


def test_a_row_has_the_same_bits_among_any_others(device: torch.device) -> None:
    weight, workspace = draw((48, 128), (16, 32), FLOAT8, device), SkinnyWorkspace.allocate(device)
    x = torch.randn(MAX_ROWS, 128, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    together = scaled_linear(x, weight, workspace=workspace)
    assert torch.equal(scaled_linear(x[5:6], weight, workspace=workspace)[0], together[5])


def test_a_tile_of_columns_has_one_scale_for_each_row() -> None:
    blocks = ((0, 0), (1, 0), (128, 128), (128, 192), (1, 96), (1, 48), (1, 300))
    assert [find_column_tile(300, each) for each in blocks] == [128, 128, 128, 64, 32, None, 128]


def load(name: str, folder: Path, device: torch.device) -> dict[str, ScaledLinear]:
    """Return the layers of a checkpoint, by name."""
    path, _ = quantized_zoo.save(name, folder)
    config = AutoConfig.from_pretrained(path)
    use_scheme(config)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).to(device)
    layers = dict(quantized_linears(model.requires_grad_(False)))
    return {name: layer for name, layer in layers.items() if isinstance(layer, ScaledLinear)}


def random_input(device: torch.device) -> Tensor:
    return torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(4)).to(device)


@pytest.mark.parametrize("name", ["fp8", "fbgemm_fp8", "compressed_int8"])
def test_layers_of_every_format_multiply_as_before(device: torch.device, name: str, tmp_path: Path) -> None:
    layers = load(name, tmp_path, device)
    assert try_scaled(list(layers.values()), torch.float32) is None
    x = random_input(device)
    for layer in layers.values():
        assert layer.multiplies_packed
        with dequantizing():
            expected = layer(x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert layer.product is not None
        assert torch.equal(layer.product.dequantized(torch.bfloat16), layer.dequantized(torch.bfloat16))


def test_a_product_that_is_wrong_leaves_every_layer_as_it_was(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, weight = list(load("fp8", tmp_path, device).values()), scaled_product._weight
    of_next_block = lambda layer: replace(weight(layer), scales=weight(layer).scales.roll(1, 1))  # noqa: E731
    monkeypatch.setattr(scaled_product, "_weight", of_next_block)
    assert try_scaled(layers, torch.float32) == "a product of 8 bits, 64 to 64, is wrong"
    assert not any(layer.multiplies_packed for layer in layers)


def test_what_the_kernel_can_not_take_is_refused(device: torch.device) -> None:
    weight = draw((16, 96), (1, 48), FLOAT8, device)
    with pytest.raises(ValueError, match="blocks of 48 columns are no multiple of 32"):
        scaled_linear(torch.zeros(1, 96, device=device), weight)
    with pytest.raises(ValueError, match="scales"):
        scaled_dequantize(replace(weight, block=(1, 32)), torch.float32)
    weight = draw((16, 64), (1, 32), FLOAT8, device)
    with pytest.raises(ValueError, match=f"x has {MAX_ROWS + 1} rows, not 1 to {MAX_ROWS}"):
        scaled_linear(torch.zeros(MAX_ROWS + 1, 64, device=device), weight)
    small = SkinnyWorkspace(torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="the workspace has 1 parts, not 2048"):
        scaled_linear(torch.zeros(1, 64, device=device), weight, workspace=small)
    with pytest.raises(ValueError, match="numbers"):
        scaled_linear(torch.zeros(1, 64, device=device), replace(weight, numbers=weight.numbers.to(torch.float16)))
