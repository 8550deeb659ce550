"""silu(gate) * up, and with GELU, against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.kernels import reference_elementwise as reference
from quire.kernels.activation import ACTIVATIONS, Activation
from quire.kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def packed(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """gate and up as one projection leaves them, side by side."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape[0], 2 * shape[1], generator=generator) * 4
    gate, up = values.to(device, dtype).chunk(2, -1)
    return gate, up


EAGER = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def assert_close(out: Tensor, gate: Tensor, up: Tensor, activation: Activation = "silu") -> None:
    exact = reference.silu_mul(gate, up, activation=activation)
    eager = EAGER[activation](gate) * up
    assert (out.double() - exact).abs().max() <= 2 * (eager.double() - exact).abs().max() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (2, 1023), (2, 1024), (2, 1025), (1, 3000)], ids=str)
def test_against_float64(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate, up = packed(shape, dtype, device)
    surroundings = gate.new_full((shape[0] + 2, shape[1] + 3), math.nan)
    out = surroundings[1:-1, 1:-2]
    returned = silu_mul(gate, up, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert_close(out, gate, up)
    out.fill_(math.nan)
    assert surroundings.isnan().all(), "something beside the rows was written"


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Activation, dtype: torch.dtype, device: torch.device) -> None:
    gate, up = packed((2, 700), dtype, device)
    assert_close(silu_mul(gate, up, activation=activation), gate, up, activation)


@pytest.mark.sample
def test_in_place(device: torch.device) -> None:
    gate, up = packed((3, 48), torch.float32, device)
    out = silu_mul(gate, up)
    assert torch.equal(silu_mul(gate, up, out=gate), out)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_saturate(activation: Activation, device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]], device=device)
    assert silu_mul(gate, torch.full_like(gate, 2), activation=activation).tolist() == [[0, 0, 0, 400, 2e4]]


def test_no_rows_and_no_columns(device: torch.device) -> None:
    for shape in ((0, 32), (2, 0)):
        gate = torch.empty(shape, device=device)
        assert silu_mul(gate, gate).shape == shape


def test_rows_beyond_2_31_elements(device: torch.device) -> None:
    stride = 2**30 + 64
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    far = memory.as_strided((3, 64), (stride, 1))
    gate, up = packed((3, 64), torch.bfloat16, device)
    far.copy_(gate)
    assert_close(silu_mul(far, up), gate, up)
    far.copy_(up)
    assert_close(silu_mul(gate, far), gate, up)
    assert_close(silu_mul(gate, up, out=far), gate, up)


def test_refusals(device: torch.device) -> None:
    gate, up = packed((4, 32), torch.float32, device)
    with pytest.raises(ValueError, match=r"up has shape \[4, 31\], not \[4, 32\]"):
        silu_mul(gate, up[:, :31])
    with pytest.raises(ValueError, match=r"up is torch.float16, not torch.float32"):
        silu_mul(gate, up.half())
    with pytest.raises(ValueError, match="activation=relu is not one of silu, gelu, gelu_tanh"):
        silu_mul(gate, up, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gate is torch.int32"):
        silu_mul(gate.int(), up)
    with pytest.raises(ValueError, match="gate has stride 4 in its last dimension"):
        silu_mul(gate.T.contiguous().T, up)
    with pytest.raises(ValueError, match="out has stride 4 in its last dimension"):
        silu_mul(gate, up, out=up.T.contiguous().T)
