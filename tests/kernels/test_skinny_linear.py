"""Products of few rows against float64, with norm, gate and residual; the same bits each time; tickets left at zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from quire.kernels import reference_elementwise as reference
from quire.kernels.activation import ACTIVATIONS, Activation
from quire.kernels.add_rmsnorm import add_rmsnorm
from quire.kernels.launching import DEFAULT_LIMITS, INTERPRET, ceil_div
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import SkinnyWorkspace, skinny_linear, takes
from quire.kernels.skinny_tiling import FORMS, MAX_ROWS, SPLITS, Form, Tiling, candidates, default_tiling, padded_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# Rows, outputs and inputs: around the edges of tiles, sizes of small models, and odd ones.
GEMV_SIZES = [(1, 5, 40), (2, 64, 1024), (3, 33, 264), (8, 12, 1032)]
DOT_SIZES = [(1, 33, 40), (16, 64, 1024), (17, 40, 520), (100, 70, 264), (128, 64, 1032)]
SIZES = [("gemv", *size) for size in GEMV_SIZES] + [("dot", *size) for size in DOT_SIZES]


class Product:
    """Random arguments of a product; between the rows of x and of the residual there is NaN."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        gated: bool = False,
        has_bias: bool = False,
        has_norm: bool = False,
        has_residual: bool = False,
        activation: Activation | None = None,
    ) -> None:
        num_rows, num_outputs, num_inputs = sizes
        self._generator = torch.Generator().manual_seed(0)
        self.gated = gated
        self.activation: Activation | None = activation
        self.x = _beside_nan(self._random(num_rows, num_inputs), dtype, device)
        weight_rows = num_outputs * (2 if gated else 1)
        self.weight = (self._random(weight_rows, num_inputs) * num_inputs**-0.5).to(device, dtype)
        self.bias = self._random(weight_rows).to(device, dtype) if has_bias else None
        self.norm_weight = (self._random(num_inputs).abs() + 0.5).to(device, dtype) if has_norm else None
        self.residual = _beside_nan(self._random(num_rows, num_outputs), dtype, device) if has_residual else None
        self.workspace = SkinnyWorkspace.allocate(device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def run(self, form: Form, *, tiling: Tiling | None = None, out: Tensor | None = None) -> Tensor:
        result = skinny_linear(
            self.x,
            self.weight,
            form=form,
            bias=self.bias,
            norm_weight=self.norm_weight,
            eps=EPS,
            residual=self.residual,
            gated=self.gated,
            activation=self.activation,
            tiling=tiling,
            workspace=self.workspace,
            out=out,
        )
        assert not self.workspace.tickets.any(), "a ticket was left"
        return result

    def separate(self, *, exact: bool) -> Tensor:
        """The same in single operations: all in float64, but rounded where they round; or in the dtype, by torch."""
        dtype = torch.float64 if exact else self.x.dtype
        x, weight = self.x.contiguous(), self.weight.contiguous()  # torch's products with AMX read the NaN beside rows
        if self.norm_weight is not None:
            x = add_rmsnorm(x, self.norm_weight, eps=EPS)
        y = x.to(dtype) @ weight.to(dtype).T
        y = (y if self.bias is None else y + self.bias.to(dtype)).to(self.x.dtype)
        if self.gated:
            gate, up = y.chunk(2, -1)
            activated = reference.silu_mul if exact else silu_mul
            return activated(gate, up, activation=self.activation or "silu")
        if self.activation is not None:
            y = reference.activate(y, self.activation)
            return y if exact else y.to(self.x.dtype)
        return y.to(dtype) if self.residual is None else y.to(dtype) + self.residual.to(dtype)

    def assert_close(self, out: Tensor) -> None:
        """One more rounding of the parts than single operations have, which add in another order."""
        exact = self.separate(exact=True)
        allowed = 2 * (self.separate(exact=False).double() - exact).abs().max()
        allowed += 2 * torch.finfo(self.x.dtype).eps * exact.abs().max()
        assert (out.double() - exact).abs().max() <= allowed


def _beside_nan(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    wide = torch.full((values.shape[0], values.shape[1] + 16), math.nan, dtype=dtype, device=device)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def split_otherwise(tiling: Tiling, split: int) -> Tiling:
    return tiling._replace(split=split, block_inputs=32)


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "num_rows", "num_outputs", "num_inputs"), SIZES)
def test_against_float64(
    form: Form, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    product = Product(
        (num_rows, num_outputs, num_inputs), dtype, device, has_bias=True, has_norm=form == "gemv", has_residual=True
    )
    surroundings = product.x.new_full((num_rows + 2, num_outputs + 3), math.nan)
    out = surroundings[1:-1, 1:-2]
    assert product.run(form, out=out).data_ptr() == out.data_ptr()
    product.assert_close(out)
    out.fill_(math.nan)
    assert surroundings.isnan().all(), "something beside the rows was written"


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "num_rows"), [("gemv", 1), ("gemv", 5), ("dot", 6), ("dot", 40)])
def test_gate_and_up_with_the_activation(form: Form, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    for has_bias in (False, True):
        product = Product((num_rows, 12, 264), dtype, device, gated=True, has_bias=has_bias, has_norm=form == "gemv")
        product.assert_close(product.run(form))


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("form", "split"), [("gemv", 1), ("dot", 1), ("dot", 4)])
def test_every_activation_with_and_without_a_gate(
    form: Form, split: int, activation: Activation, gated: bool, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        product = Product((5, 12, 264), dtype, device, gated=gated, activation=activation, has_bias=True)
        tiling = None if form == "gemv" else Tiling("dot", 16, 32, 4, 2, split)
        product.assert_close(product.run(form, tiling=tiling))


@pytest.mark.usefixtures("small_device")
@pytest.mark.sample
@pytest.mark.parametrize("form", FORMS)
def test_every_option_in_bfloat16(form: Form, device: torch.device) -> None:
    for has_bias, has_norm, has_residual in product((False, True), repeat=3):
        if has_norm and form == "dot":
            continue
        sizes = (2, 20, 136)
        options = {"has_bias": has_bias, "has_norm": has_norm, "has_residual": has_residual}
        each = Product(sizes, torch.bfloat16, device, **options)
        each.assert_close(each.run(form))


def test_the_norm_is_rounded_as_add_rmsnorm_rounds(device: torch.device) -> None:
    """With the identity as weight the product is the norm itself."""
    each = Product((4, 64, 64), torch.bfloat16, device, has_norm=True)
    each.weight = torch.eye(64, dtype=torch.bfloat16, device=device)
    assert each.norm_weight is not None
    assert torch.equal(each.run("gemv"), add_rmsnorm(each.x, each.norm_weight, eps=EPS))


def test_a_norm_of_another_dtype_and_of_small_values(device: torch.device) -> None:
    each = Product((2, 16, 64), torch.bfloat16, device, has_norm=True)
    each.x *= 1e-3
    assert each.norm_weight is not None
    each.norm_weight = each.norm_weight.float()
    each.assert_close(each.run("gemv"))


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("gated", [False, True])
def test_the_residual_may_be_the_result(gated: bool, device: torch.device) -> None:
    each = Product((3, 40, 520), torch.float32, device, gated=gated, has_residual=not gated)
    expected = {form: each.run(form) for form in FORMS}
    for form in FORMS:
        own = Product((3, 40, 520), torch.float32, device, gated=gated, has_residual=not gated)
        out = own.residual
        assert torch.equal(own.run(form, out=out), expected[form])


@contextmanager
def programs_in_another_order(order: dict[int, int]) -> Iterator[None]:
    """Let the interpreter run part order[i] of a sum where it would run part i."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    own = builder.set_grid_idx

    def moved(x: int, y: int, z: int) -> None:
        own(x, order.get(y, y), z)

    with mock.patch.object(builder, "set_grid_idx", moved):
        yield


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_split_sum_has_the_same_bits_whoever_is_last(dtype: torch.dtype, device: torch.device) -> None:
    each = Product((5, 40, 520), dtype, device, has_bias=True, has_residual=True)
    guess = default_tiling(
        "dot", num_rows=5, num_outputs=40, num_inputs=520, itemsize=dtype.itemsize, limits=DEFAULT_LIMITS
    )
    tiling = split_otherwise(guess, 4)
    expected = each.run("dot", tiling=tiling)
    each.assert_close(expected)
    assert torch.equal(each.run("dot", tiling=tiling), expected)
    if INTERPRET:
        for order in ({2: 3, 3: 2}, {0: 3, 1: 0, 2: 2, 3: 1}, {0: 3, 1: 2, 2: 1, 3: 0}):
            with programs_in_another_order(order):
                assert torch.equal(each.run("dot", tiling=tiling), expected)


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_right_also_with_parts_that_are_empty(split: int, device: torch.device) -> None:
    """264 inputs are 9 steps of 32: with 16 parts most have one and some have none."""
    for gated in (False, True):
        each = Product((3, 40, 264), torch.float32, device, gated=gated)
        guess = default_tiling("dot", num_rows=3, num_outputs=40, num_inputs=264, itemsize=4, limits=DEFAULT_LIMITS)
        each.workspace.parts.fill_(math.nan)
        each.assert_close(each.run("dot", tiling=split_otherwise(guess, split)))


def test_every_candidate_is_right(device: torch.device) -> None:
    for num_rows, gated in product((2, 20), (False, True)):
        each = Product((num_rows, 24, 256), torch.float32, device, gated=gated)
        sizes = {"num_rows": num_rows, "num_outputs": 24, "num_inputs": 256, "itemsize": 4}
        for tiling in candidates(**sizes, gated=gated, limits=DEFAULT_LIMITS):
            each.assert_close(each.run(tiling.form, tiling=tiling))


def test_a_tiling_is_that_of_the_next_power_of_two_of_rows() -> None:
    """So steps of 1, 2, 4, … tokens compile everything: those of the warm-up."""
    for form, gated, num_inputs in product(FORMS, (False, True), (1024, 14336)):
        sizes = {"num_outputs": 4096, "num_inputs": num_inputs, "itemsize": 2, "gated": gated, "limits": DEFAULT_LIMITS}
        for num_rows in range(1, MAX_ROWS[form] + 1):
            power = 1 << (num_rows - 1).bit_length()
            assert default_tiling(form, num_rows=num_rows, **sizes) == default_tiling(form, num_rows=power, **sizes)
            assert padded_rows(form, num_rows) == padded_rows(form, power)


def test_the_workspace_holds_every_sum_that_is_split_by_default() -> None:
    """For models of 0.6 to 70 billion parameters, and any rows."""
    workspace = SkinnyWorkspace.allocate(torch.device("meta"))
    for num_rows, num_outputs, num_inputs, gated in product(
        (1, 9, 16, 32, 64, 128), (256, 1024, 4096, 8192, 28672), (1024, 4096, 28672), (False, True)
    ):
        sizes = {"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs, "itemsize": 2}
        for tiling in candidates(**sizes, gated=gated, limits=DEFAULT_LIMITS):
            if tiling.split > 1:
                tiles = ceil_div(num_outputs, tiling.block_outputs)
                rows = max(16, 1 << (num_rows - 1).bit_length())
                needed = tiles * tiling.split * rows * tiling.block_outputs * (1 + gated)
                assert needed <= workspace.parts.shape[0]
                assert tiles <= workspace.tickets.shape[0]


def test_rows_beyond_2_31_elements(device: torch.device) -> None:
    stride = 2**30 + 64
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    far = memory.as_strided((3, 64), (stride, 1))
    for form in FORMS:
        each = Product((3, 16, 64), torch.bfloat16, device)
        near = each.run(form)
        far.copy_(each.x)
        each.x = far
        assert torch.equal(each.run(form), near)


def test_what_a_form_takes(device: torch.device) -> None:
    def rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(count, width, dtype=dtype, device=device)

    for form in FORMS:
        assert takes(rows(MAX_ROWS[form], 24), rows(5, 24), form=form)
        assert not takes(rows(MAX_ROWS[form] + 1, 24), rows(5, 24), form=form)
        assert not takes(rows(0, 24), rows(5, 24), form=form)
        assert not takes(rows(1, 12), rows(5, 12), form=form), "24 bytes"
        assert takes(rows(1, 12, torch.float32), rows(5, 12, torch.float32), form=form)
        assert not takes(rows(1, 24), rows(5, 24, torch.float16), form=form)
        assert not takes(rows(2, 28)[:, :24], rows(5, 24), form=form), "rows 56 bytes apart"
        assert not takes(rows(1, 24), rows(24, 24).T, form=form)
        assert not takes(rows(1, 24, torch.float64), rows(5, 24, torch.float64), form=form)


def test_refusals(device: torch.device) -> None:
    each = Product((4, 16, 64), torch.float32, device, has_bias=True, has_norm=True, has_residual=True)
    x, weight, bias, norm, residual = each.x, each.weight, each.bias, each.norm_weight, each.residual
    assert bias is not None
    assert residual is not None
    with pytest.raises(ValueError, match=r"weight has shape \[16, 64\], not \[any, 32\]"):
        skinny_linear(x[:, :32], weight, form="gemv")
    with pytest.raises(ValueError, match=r"weight is torch.float16, not torch.float32"):
        skinny_linear(x, weight.half(), form="gemv")
    with pytest.raises(ValueError, match="form=gemm is not one of gemv, dot"):
        skinny_linear(x, weight, form="gemm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has 9 rows, not 1 .. 8 as form gemv takes"):
        skinny_linear(x.new_zeros(9, 64), weight, form="gemv")
    with pytest.raises(ValueError, match=r"x has 0 rows, not 1 .. 128 as form dot takes"):
        skinny_linear(x.new_zeros(0, 64), weight, form="dot")
    with pytest.raises(ValueError, match=r"weight \[16, 63\]: rows have to be multiples of 16 bytes"):
        skinny_linear(x[:, :63], weight[:, :63].contiguous(), form="gemv")
    with pytest.raises(ValueError, match="norm_weight is taken by form gemv alone"):
        skinny_linear(x, weight, form="dot", norm_weight=norm)
    with pytest.raises(ValueError, match="residual is not taken together with gated"):
        skinny_linear(x, weight, form="dot", gated=True, residual=residual[:, :8])
    with pytest.raises(ValueError, match="weight has 15 rows, which are not as many gates as ups"):
        skinny_linear(x, weight[:15], form="gemv", gated=True)
    with pytest.raises(ValueError, match=r"bias has shape \[15\], not \[16\]"):
        skinny_linear(x, weight, form="gemv", bias=bias[:15])
    with pytest.raises(ValueError, match=r"out has shape \[4, 15\], not \[4, 16\]"):
        skinny_linear(x, weight, form="gemv", out=residual[:, :15])
    guess = default_tiling("dot", num_rows=4, num_outputs=16, num_inputs=64, itemsize=4, limits=DEFAULT_LIMITS)
    with pytest.raises(ValueError, match="the tiling is of form dot, not gemv"):
        skinny_linear(x, weight, form="gemv", tiling=guess)
    with pytest.raises(ValueError, match="split=3 is not one of 1, 2, 4, 8, 16"):
        skinny_linear(x, weight, form="dot", tiling=guess._replace(split=3))
    with pytest.raises(ValueError, match="a sum in 2 parts needs a workspace"):
        skinny_linear(x, weight, form="dot", tiling=guess._replace(split=2))
    small = SkinnyWorkspace(x.new_zeros(7), torch.zeros(9, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="the workspace has 7 parts, not 1024"):
        skinny_linear(x, weight, form="dot", tiling=guess._replace(split=2), workspace=small)
