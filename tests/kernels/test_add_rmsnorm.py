"""Residual addition and RMSNorm against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.kernels import reference_elementwise as reference
from quire.kernels.add_rmsnorm import MAX_HIDDEN_SIZE, add_rmsnorm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def strided(values: Tensor, *, width: int) -> Tensor:
    """The values as a view of rows of `width` elements, with NaN in the remainder."""
    wide = values.new_full((values.shape[0], width), math.nan)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def inputs(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * scale
    residual = torch.randn(shape, generator=generator) * 3 * scale
    weight = torch.rand(shape[1], generator=generator) + 0.5
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, dtype)


def eager(total: Tensor, weight: Tensor, weight_offset: float) -> Tensor:
    """The formula as transformers has it."""
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return normed.to(total.dtype) * (weight + weight_offset)


def assert_close(out: Tensor, total: Tensor, weight: Tensor, exact: Tensor, weight_offset: float = 0.0) -> None:
    allowed = 2 * (eager(total, weight, weight_offset).double() - exact).abs().max() + 1e-6
    assert (out.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 64), (33, 128), (3, 1000), (2, 1024), (2, 3072)], ids=str)
def test_norm_of_sum(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = inputs(shape, dtype, device)
    x, residual = strided(x, width=shape[1] + 16), strided(residual, width=shape[1] + 32)
    exact, total = reference.add_rmsnorm(x, weight, eps=EPS, residual=residual)
    surroundings = x.new_full((shape[0] + 2, shape[1] + 3), math.nan)
    out = surroundings[1:-1, 1:-2]
    returned = add_rmsnorm(x, weight, eps=EPS, residual=residual, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(residual, total)
    assert_close(out, total, weight, exact)
    out.fill_(math.nan)
    assert surroundings.isnan().all(), "something beside the rows was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_alone(dtype: torch.dtype, device: torch.device) -> None:
    x, _, weight = inputs((9, 96), dtype, device)
    exact, before = reference.add_rmsnorm(x, weight, eps=EPS)
    out = add_rmsnorm(x, weight, eps=EPS)
    assert_close(out, x, weight, exact)
    assert torch.equal(x, before)
    assert torch.equal(add_rmsnorm(x, weight, eps=EPS, out=x), out)


def test_weight_as_difference_from_one(device: torch.device) -> None:
    x, residual, weight = inputs((4, 64), torch.bfloat16, device)
    exact, total = reference.add_rmsnorm(x, weight, eps=EPS, residual=residual, weight_offset=1)
    out = add_rmsnorm(x, weight, eps=EPS, residual=residual, weight_offset=1)
    assert_close(out, total, weight, exact, weight_offset=1)


def test_weight_of_another_dtype(device: torch.device) -> None:
    x, _, weight = inputs((4, 64), torch.bfloat16, device)
    exact, _ = reference.add_rmsnorm(x, weight.float(), eps=EPS)
    assert_close(add_rmsnorm(x, weight.float(), eps=EPS), x, weight, exact)


def test_eps_counts_where_values_are_small(device: torch.device) -> None:
    x, residual, weight = inputs((2, 64), torch.float32, device, scale=1e-3)
    exact, total = reference.add_rmsnorm(x, weight, eps=EPS, residual=residual)
    assert_close(add_rmsnorm(x, weight, eps=EPS, residual=residual), total, weight, exact)
    zeros = torch.zeros_like(x)
    assert not add_rmsnorm(zeros, weight, eps=EPS).any()


@pytest.mark.sample
def test_norm_is_of_the_rounded_sum(device: torch.device) -> None:
    x, residual, weight = inputs((16, 64), torch.bfloat16, device)
    out = add_rmsnorm(x, weight, eps=EPS, residual=residual)
    assert torch.equal(out, add_rmsnorm(residual, weight, eps=EPS))


def test_no_rows(device: torch.device) -> None:
    x, residual, weight = inputs((0, 64), torch.float32, device)
    assert add_rmsnorm(x, weight, eps=EPS, residual=residual).shape == (0, 64)


def test_rows_beyond_2_31_elements(device: torch.device) -> None:
    stride = 2**30 + 64
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 64), (stride, 1))
    values, _, weight = inputs((3, 64), torch.bfloat16, device)
    x.copy_(values)
    exact, _ = reference.add_rmsnorm(values, weight, eps=EPS)
    assert_close(add_rmsnorm(x, weight, eps=EPS), values, weight, exact)
    assert_close(add_rmsnorm(values, weight, eps=EPS, out=x), values, weight, exact)


def test_refusals(device: torch.device) -> None:
    x, residual, weight = inputs((4, 64), torch.float32, device)
    with pytest.raises(ValueError, match=r"weight has shape \[64\], not \[32\]"):
        add_rmsnorm(x[:, :32], weight, eps=EPS)
    with pytest.raises(ValueError, match=r"residual has shape \[3, 64\], not \[4, 64\]"):
        add_rmsnorm(x, weight, eps=EPS, residual=residual[:3])
    with pytest.raises(ValueError, match=r"residual is torch.float16, not torch.float32"):
        add_rmsnorm(x, weight, eps=EPS, residual=residual.half())
    with pytest.raises(ValueError, match=r"x is torch.float64"):
        add_rmsnorm(x.double(), weight, eps=EPS)
    with pytest.raises(ValueError, match="x has stride 4 in its last dimension, not 1"):
        add_rmsnorm(x.T.contiguous().T, weight, eps=EPS)
    with pytest.raises(ValueError, match="out has stride 4"):
        add_rmsnorm(x, weight, eps=EPS, out=x.T.contiguous().T)
    with pytest.raises(ValueError, match="weight has strides"):
        add_rmsnorm(x, weight.repeat(2)[::2], eps=EPS)
    wide = x.new_zeros(1, MAX_HIDDEN_SIZE + 1)
    with pytest.raises(ValueError, match=r"32769 columns, not 1 .. 32768"):
        add_rmsnorm(wide, wide[0], eps=EPS)
