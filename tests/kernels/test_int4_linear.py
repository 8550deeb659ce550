"""Products with weights of 4 bits: against float64 on every kind of groups, and a row's bits among any other rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_zoo
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quire.kernels import reference_elementwise as reference
from quire.kernels.int4_linear import Int4Weight, int4_dequantize, int4_linear
from quire.kernels.skinny_linear import SkinnyWorkspace
from quire.kernels.split_sums import MAX_ROWS, find_split
from quire.worker.quantization import int4_product
from quire.worker.quantization.int4_product import try_int4
from quire.worker.quantization.packed_linear import PackedLinear
from quire.worker.quantization.quantized_linear import dequantizing, quantized_linears
from quire.worker.quantization.quantizer import use_scheme

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(num_outputs: int, num_groups: int, group_size: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers [N, K], scales [N, G] and zero points [N, G], as large as they can be."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (num_outputs, num_groups * group_size), generator=generator)
    scales = (0.5 + torch.rand(num_outputs, num_groups, generator=generator)) * (num_groups * group_size) ** -0.5 / 8
    return numbers, scales, torch.randint(0, 17, (num_outputs, num_groups), generator=generator)


def check(
    device: torch.device,
    *,
    dtype: torch.dtype,
    num_rows: int,
    num_outputs: int,
    groups: tuple[int, int],
    is_shuffled: bool = False,
    has_bias: bool = False,
) -> None:
    num_groups, group_size = groups
    numbers, scales, zeros = draw(num_outputs, num_groups, group_size)
    group_of_column = torch.arange(num_groups).repeat_interleave(group_size)
    if is_shuffled:
        group_of_column = group_of_column[
            torch.randperm(len(group_of_column), generator=torch.Generator().manual_seed(1))
        ]
    weight = Int4Weight.pack(
        *(each.to(device) for each in (numbers, scales, zeros)),
        group_of_column=group_of_column.to(device) if is_shuffled else None,
    )
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(num_rows, numbers.shape[1] + 8, generator=generator).to(device, dtype)
    x = rows[:, : numbers.shape[1]]
    bias = torch.randn(num_outputs, generator=generator).to(device, dtype) if has_bias else None
    expected = reference.int4_linear(x.cpu(), numbers, scales, zeros, group_of_column.tolist())
    if bias is not None:
        expected += bias.cpu().double()
    out = torch.full((num_rows, num_outputs + 5), torch.nan, dtype=dtype, device=device)
    workspace = SkinnyWorkspace.allocate(device)
    found = int4_linear(x, weight, bias=bias, workspace=workspace, out=out[:, :num_outputs])
    assert not workspace.tickets.any()
    assert out[:, num_outputs:].isnan().all(), "nothing is written behind the last output"
    torch.testing.assert_close(found.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    rounded = weight.dequantized(dtype)
    ordered = rounded if weight.order is None else rounded[:, weight.order]
    assert torch.equal(int4_dequantize(weight, dtype), ordered)
    whole = x.double() @ weight.dequantized(torch.float64).t()
    torch.testing.assert_close(
        whole.cpu() + (0 if bias is None else bias.cpu().double()), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_weight_that_is_stood_for(device: torch.device, dtype: torch.dtype) -> None:
    check(device, dtype=dtype, num_rows=3, num_outputs=40, groups=(3, 64), has_bias=True)


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("groups", [(3, 32), (2, 128), (1, 256), (1, 96)], ids=str)
def test_groups_of_every_size_and_columns_in_any_order(
    device: torch.device, groups: tuple[int, int], is_shuffled: bool
) -> None:
    """A group of 256 is two of the kernel's, and one of 96 is three."""
    check(device, dtype=torch.bfloat16, num_rows=1, num_outputs=17, groups=groups, is_shuffled=is_shuffled)


@pytest.mark.parametrize("num_rows", [16, 17, MAX_ROWS])
def test_every_number_of_rows(device: torch.device, num_rows: int) -> None:
    check(device, dtype=torch.float32, num_rows=num_rows, num_outputs=33, groups=(2, 32))


def test_a_row_has_the_same_bits_among_any_others(device: torch.device) -> None:
    numbers, scales, zeros = (each.to(device) for each in draw(48, 4, 32))
    weight, workspace = Int4Weight.pack(numbers, scales, zeros), SkinnyWorkspace.allocate(device)
    x = torch.randn(MAX_ROWS, 128, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    together = int4_linear(x, weight, workspace=workspace)
    assert torch.equal(int4_linear(x[5:6], weight, workspace=workspace)[0], together[5])


@pytest.mark.parametrize("num_groups", [2, 5, 8])
def test_programs_share_a_sum_where_outputs_are_few(device: torch.device, num_groups: int) -> None:
    """Of 5 groups, 4 programs have 2, 2, 1 and none."""
    check(device, dtype=torch.float32, num_rows=2, num_outputs=70, groups=(num_groups, 32), has_bias=True)


def test_splits_fill_a_gpu_and_no_more() -> None:
    """Of an H200, and of Llama 3 8B: keys or values, queries, gate and up together."""
    assert [find_split(tiles, 32, 132) for tiles in (16, 64, 448)] == [16, 8, 1]
    assert find_split(1, 3, 132) == 2
    assert find_split(16, 32, 20) == 4


def load(name: str, folder: Path, device: torch.device) -> tuple[dict[str, PackedLinear], Any]:
    """Return the layers of a checkpoint, by name, and the plain model that it stands for."""
    path, plain = quantized_zoo.save(name, folder)
    config = AutoConfig.from_pretrained(path)
    use_scheme(config)
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    layers = dict(quantized_linears(model.to(device).requires_grad_(False)))
    return {name: layer for name, layer in layers.items() if isinstance(layer, PackedLinear)}, plain


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed_int4"])
def test_layers_of_every_format_are_packed_anew_and_multiply_as_before(
    device: torch.device, name: str, tmp_path: Path
) -> None:
    layers, plain = load(name, tmp_path, device)
    assert try_int4(list(layers.values()), torch.float32) is None
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(4)).to(device)
    for path, layer in layers.items():
        assert layer.multiplies_packed
        expected = torch.nn.functional.linear(x.cpu(), plain.get_submodule(path).weight)
        torch.testing.assert_close(layer(x).cpu(), expected, rtol=1e-4, atol=1e-4)
        with dequantizing():
            torch.testing.assert_close(layer(x).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_packed_to_another_one_is_found_at_start(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trial of its size; or, in a layer that none tries, by its bits."""
    pack = int4_product._pack
    of_next_zero = lambda weight: replace(weight, zeros=weight.zeros + 1)  # noqa: E731
    of_next_group = lambda weight: replace(weight, scales=weight.scales.roll(1, 0))  # noqa: E731
    layers = list(load("gptq", tmp_path, device)[0].values())
    for break_weight in (of_next_zero, of_next_group):
        monkeypatch.setattr(int4_product, "_pack", lambda layer, broken=break_weight: broken(pack(layer)))
        assert try_int4(layers, torch.float32) == "a product of 4 bits, 64 to 64, is wrong"
        assert not any(layer.multiplies_packed for layer in layers)
    untried = layers[0]
    monkeypatch.setattr(
        int4_product, "_pack", lambda layer: of_next_group(pack(layer)) if layer is untried else pack(layer)
    )
    assert try_int4(layers, torch.float32) == "a weight of 4 bits, 64 to 64, was packed to another one"
    assert not any(layer.multiplies_packed for layer in layers)


def test_one_zero_point_for_all_is_that_of_each_group(device: torch.device) -> None:
    numbers, scales, _ = (each.to(device) for each in draw(16, 2, 32))
    found, expected = (Int4Weight.pack(numbers, scales, zeros) for zeros in (8, torch.full_like(scales, 8)))
    assert torch.equal(found.zeros, expected.zeros)


def test_what_the_kernel_can_not_take_is_refused(device: torch.device) -> None:
    numbers, scales, zeros = (each.to(device) for each in draw(16, 2, 48))
    with pytest.raises(ValueError, match="2 groups of 96 columns: no equal groups of a multiple of 32"):
        Int4Weight.pack(numbers, scales, zeros)
    numbers, scales, zeros = (each.to(device) for each in draw(16, 2, 32))
    with pytest.raises(ValueError, match="no equal groups"):
        Int4Weight.pack(numbers, scales, zeros, group_of_column=torch.arange(64, device=device) // 33)
    weight = Int4Weight.pack(numbers, scales, zeros)
    with pytest.raises(ValueError, match=f"x has {MAX_ROWS + 1} rows, not 1 to {MAX_ROWS}"):
        int4_linear(torch.zeros(MAX_ROWS + 1, 64, device=device), weight)
    small = SkinnyWorkspace(torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="the workspace has 1 parts, not 2048"):
        int4_linear(torch.zeros(1, 64, device=device), weight, workspace=small)
    with pytest.raises(ValueError, match="packed"):
        int4_linear(torch.zeros(1, 96, device=device), weight)
