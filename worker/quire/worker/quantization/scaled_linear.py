"""Weights of 8 bits, each with a scale that it shares with a tensor, a row, a part of a row or a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.worker.quantization.inputs import INPUT_SCALE, KEEP, InputRounding
from quire.worker.quantization.quantized_linear import QuantizedLinear


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


class ScaledLinear(QuantizedLinear):
    """A linear layer with a weight of 8 bits times scales. N rows, K columns.

    weight  [N, K]                      the format's dtype
    scale   the format's scale_shape    float32
    """

    def __init__(self, linear: nn.Linear, form: ScaledFormat, inputs: InputRounding = KEEP) -> None:
        super().__init__(linear, inputs)
        self.form = form
        self.dequantizer = form.name
        shape = (self.out_features, self.in_features)
        self.hold_packed(form.weight, shape, form.dtype)
        self.hold(form.scale, form.scale_shape(*shape), torch.float32)
        if inputs.scales == "layer":
            self.hold(INPUT_SCALE, (1,), torch.float32)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        values = self.get_buffer(self.form.weight).to(torch.float32)
        return (values * self._expanded_scale()).to(dtype)

    def _expanded_scale(self) -> Tensor:
        """The scales in a shape that multiplies with [N, K]."""
        scale, (rows, columns) = self.get_buffer(self.form.scale), self.form.block
        if rows > 1:
            scale = scale.repeat_interleave(rows, 0)[: self.out_features]
        if columns > 1:
            scale = scale.repeat_interleave(columns, 1)[:, : self.in_features]
        return scale
