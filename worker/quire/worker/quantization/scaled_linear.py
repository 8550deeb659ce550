"""Weights of 8 bits, each with a scale that it shares with a tensor, a row, a part of a row or a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from quire.worker.device.rounding import agree
from quire.worker.quantization.inputs import INPUT_SCALE, KEEP, InputRounding, half_range, round_to
from quire.worker.quantization.products import (
    FEW_ROWS_MULTIPLE,
    FLOAT8_MULTIPLE,
    MAX_FEW_ROWS,
    MAX_INTEGER_COLUMNS,
    few_rows_product,
    float8_product,
    integer_product,
)
from quire.worker.quantization.quantized_linear import QuantizedLinear

# Greatest difference of a product in float8 from that of a dequantized weight, of the largest result.
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    """The tensors of a weight [N, K].

    dtype       of the 8 bits: int8 or float8_e4m3fn
    block       rows and columns that share a scale; 0: all of them. (0, 0) is a scale for the tensor, (1, 0) one for
                each row
    weight, scale   the names of the tensors in the checkpoint
    is_scalar   True if the one scale of a tensor has no dimension
    """

    name: str
    dtype: torch.dtype
    block: tuple[int, int] = (1, 0)
    weight: str = "weight"
    scale: str = "weight_scale"
    is_scalar: bool = False

    def scale_shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Return the shape of the scales, as checkpoints have them."""
        rows, columns = self.block
        if not rows:
            return () if self.is_scalar else (1,)
        return (-(-num_rows // rows), -(-num_columns // columns) if columns else 1)


class Way(Enum):
    """How a product is computed: in 8 bits, or with a weight that is dequantized for it."""

    INTEGERS = "integers"
    FEW_ROWS = "few rows"
    FLOAT8 = "float8"
    DEQUANTIZED = "dequantized"


class ScaledLinear(QuantizedLinear):
    """A linear layer with a weight of 8 bits times scales. N rows, K columns.

    weight  [N, K]                      the format's dtype
    scale   the format's scale_shape    float32
    """

    multiplies_float8 = False
    """True once a product in float8 was tried on the layer's device."""

    def __init__(self, linear: nn.Linear, form: ScaledFormat, inputs: InputRounding = KEEP) -> None:
        super().__init__(linear, inputs)
        self.form = form
        self.way = self._way_of_format()
        self.dequantizer = form.name
        shape = (self.out_features, self.in_features)
        self.hold_packed(form.weight, shape, form.dtype)
        self.hold(form.scale, form.scale_shape(*shape), torch.float32)
        if inputs.scales == "layer":
            self.hold(INPUT_SCALE, (1,), torch.float32)

    @property
    def multiplies_packed(self) -> bool:
        return self.multiplies_float8 or super().multiplies_packed

    def quantize(self, weight: Tensor) -> None:
        """Take the numbers nearest to a weight [N, K], on its device. The format has a scale for each row."""
        rows = weight.float()
        scale = rows.abs().amax(1, keepdim=True) / half_range(self.form.dtype)
        numbers = round_to(rows / scale.masked_fill(scale == 0, 1), self.form.dtype)
        self.register_buffer(self.form.weight, numbers)
        self.register_buffer(self.form.scale, scale)

    def forward(self, input: Tensor) -> Tensor:
        way = self.find_way(input)
        if way is Way.DEQUANTIZED:
            return super().forward(input)
        weight, weight_scale = self.get_buffer(self.form.weight), self.get_buffer(self.form.scale)
        rows = input.reshape(-1, self.in_features)
        if way is Way.FEW_ROWS:
            result = few_rows_product(rows, weight, weight_scale)
        else:
            multiply = integer_product if way is Way.INTEGERS else float8_product
            result = multiply(*self.inputs.quantize(rows, self), weight, weight_scale)
        result = result.view(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias

    def find_way(self, input: Tensor) -> Way:
        """Return how the product with an input [..., K] is computed."""
        if self.way is Way.INTEGERS:
            is_fit = input.device.type == "cpu"
        elif self.way is Way.FEW_ROWS:
            num_rows = input.numel() // self.in_features
            is_fit = input.device.type == "cpu" and input.itemsize == 2 and num_rows <= MAX_FEW_ROWS
        else:
            is_fit = self.multiplies_float8 and input.dtype == torch.bfloat16
        return self.way if is_fit and input.numel() else Way.DEQUANTIZED

    def _way_of_format(self) -> Way:
        dtypes, scales, block = (self.form.dtype, self.inputs.dtype), self.inputs.scales, self.form.block
        if dtypes == (torch.int8, torch.int8):
            is_fit = scales != "group" and block in ((1, 0), (0, 0)) and self.in_features <= MAX_INTEGER_COLUMNS
            return Way.INTEGERS if is_fit else Way.DEQUANTIZED
        if dtypes == (torch.int8, None):
            is_fit = block == (1, 0) and not self.in_features % FEW_ROWS_MULTIPLE
            return Way.FEW_ROWS if is_fit else Way.DEQUANTIZED
        is_float8 = dtypes == (torch.float8_e4m3fn, torch.float8_e4m3fn) and (scales, block) == ("token", (1, 0))
        is_fit = not self.in_features % FLOAT8_MULTIPLE and not self.out_features % FLOAT8_MULTIPLE
        return Way.FLOAT8 if is_float8 and is_fit else Way.DEQUANTIZED

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        values = self.get_buffer(self.form.weight).to(torch.float32)
        scale = self.get_buffer(self.form.scale)
        return (values * expand_scale(scale, self.form.block, (self.out_features, self.in_features))).to(dtype)


def expand_scale(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Return scales of a ScaledFormat's block in a shape that multiplies with a weight of shape [N, K]."""
    rows, columns = block
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[: shape[0]]
    if columns > 1:
        scale = scale.repeat_interleave(columns, 1)[:, : shape[1]]
    return scale


def try_float8(layers: Sequence[ScaledLinear]) -> str | None:
    """Let layers multiply in float8 if their device can. Returns the reason if it can't, None if all is well.

    One product of each size is compared with that of the dequantized weight.
    """
    sizes = {(layer.in_features, layer.out_features): layer for layer in layers}
    for layer in sizes.values():
        device = layer.get_buffer(layer.form.weight).device
        row = torch.linspace(-1, 1, layer.in_features, device=device).to(torch.bfloat16)[None]
        numbers, scale = layer.inputs.quantize(row, layer)
        try:
            weight, weight_scale = layer.get_buffer(layer.form.weight), layer.get_buffer(layer.form.scale)
            found = float8_product(numbers, scale, weight, weight_scale)
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]
        expected = torch.nn.functional.linear(layer.inputs.round(row, layer), layer.dequantized(row.dtype))
        if not agree(found, expected, tolerance=TOLERANCE):
            return f"a product in float8, {layer.in_features} to {layer.out_features}, is wrong"
    for layer in layers:
        layer.multiplies_float8 = True
    return None
