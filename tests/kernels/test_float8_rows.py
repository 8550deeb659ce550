"""Rows in float8: those of the kernels that write them are the separate operations', bit for bit; and a whole model."""

from __future__ import annotations

import model_zoo as zoo
import pytest
import torch
from paged_run import run
from torch import Tensor, nn

from quire.kernels.activation import ACTIVATIONS, Activation
from quire.kernels.add_rmsnorm import add_rmsnorm, add_rmsnorm_float8
from quire.kernels.float8_rows import MAX_COLUMNS, float8_rows
from quire.kernels.silu_mul import silu_mul, silu_mul_float8
from quire.worker.fusion.steps import KernelSteps
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.quantization.at_load import quantize_at_load
from quire.worker.quantization.inputs import InputRounding
from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.quantization.scaled_linear import ScaledLinear, try_float8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 16), (3, 700), (2, 1040))


def draw(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Tensor:
    """Rows beside NaN, the first of them zeros, and with a number far above the others."""
    rows = torch.randn(shape[0], shape[1] + 8, generator=torch.Generator().manual_seed(seed))
    rows[0] = 0
    rows[-1, shape[1] // 2] = 3e4
    rows[:, shape[1] :] = torch.nan
    return rows.to(device, dtype)[:, : shape[1]]


def check(found: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Compare with separate operations. The interpreter's zeros have no sign."""
    numbers, scale = InputRounding(torch.float8_e4m3fn).quantize(rows, nn.Module())
    assert found[0].dtype == torch.float8_e4m3fn
    assert torch.equal(found[1], scale.float())
    assert torch.equal(found[0].float(), numbers.float())


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_separate_operations(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rows = draw(shape, dtype, device)
    check(float8_rows(rows), rows)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_in_float8_is_the_norm_rounded_after_it(
    shape: tuple[int, int], has_residual: bool, device: torch.device
) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = draw(shape, dtype, device), torch.randn(shape[1]).to(device, dtype)
        residual = draw(shape, dtype, device, seed=1) if has_residual else None
        other = None if residual is None else residual.clone()
        found = add_rmsnorm_float8(x, weight, eps=1e-5, residual=residual)
        check(found, add_rmsnorm(x, weight, eps=1e-5, residual=other))
        assert residual is None or other is None or torch.equal(residual, other)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_in_float8_is_the_activation_rounded_after_it(
    activation: Activation, device: torch.device
) -> None:
    for shape in SHAPES:
        gate, up = (draw(shape, torch.bfloat16, device, seed=seed).clamp(-50, 50) for seed in (0, 1))
        found = silu_mul_float8(gate, up, activation=activation)
        check(found, silu_mul(gate, up, activation=activation))


def test_no_rows_and_rows_that_no_program_takes(device: torch.device) -> None:
    numbers, scales = float8_rows(torch.zeros(0, 16, device=device))
    assert (numbers.shape, scales.shape) == ((0, 16), (0, 1))
    wide = torch.zeros(1, MAX_COLUMNS + 1, device=device)
    for work in (lambda: float8_rows(wide), lambda: silu_mul_float8(wide, wide)):
        with pytest.raises(ValueError, match=r"has 32769 columns, not 1 \.\. 32768"):
            work()
    assert KernelSteps().max_float8_columns == MAX_COLUMNS


def prepare(device: torch.device, *, fused: bool) -> PagedModel:
    """A Llama in float8, which a CPU multiplies too, if slowly."""
    model = zoo.one_layer_llama(max_position_embeddings=24).to(device, torch.bfloat16)
    quantize_at_load(model, "fp8")
    layers = [layer for _, layer in quantized_linears(model) if isinstance(layer, ScaledLinear)]
    assert try_float8(layers) is None
    return prepare_model(model, max_model_len=24, fused_steps=KernelSteps() if fused else None)


def test_a_fused_model_in_float8_says_what_its_own_modules_say(device: torch.device) -> None:
    fused = prepare(device, fused=True)
    assert fused.fusion is not None
    assert fused.fusion.swapped == {"norm": (3, 3), "attention": (1, 1), "mlp": (1, 1), "layer": (1, 1)}
    own = prepare(device, fused=False)
    assert fused.fingerprint == own.fingerprint
    prompts = [[5, 3, 11, 60], [90, 2, 7]]
    _, expected = run(own, prompts, 2, block_size=16)
    _, found = run(fused, prompts, 2, block_size=16)
    assert float((found - expected).abs().max() / expected.abs().max()) < 5e-2
