"""Rounding of a linear layer's input, for formats in which activations are quantized too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

INPUT_SCALE = "input_scale"
"""The buffer of a layer that has one scale for all its inputs."""


@dataclass(frozen=True, slots=True)
class InputRounding:
    """The rounding of inputs [..., K].

    dtype   that of the 8 bits; None: inputs stay as they are
    scales  token: a scale for each row; group: for each group_size elements of a row; layer: INPUT_SCALE, of the
            checkpoint
    """

    dtype: torch.dtype | None = None
    scales: Literal["token", "group", "layer"] = "token"
    group_size: int = 0

    def round(self, input: Tensor, layer: nn.Module) -> Tensor:
        """Return the input of a layer, rounded, in its own dtype: the numbers that a product of 8 bits has."""
        if self.dtype is None:
            return input
        rows = input.view(*input.shape[:-1], -1, self.group_size) if self.scales == "group" else input
        numbers, scale = self.quantize(rows, layer)
        return (numbers.to(rows.dtype) * scale).view(input.shape)

    def quantize(self, rows: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Return a layer's input [..., K] as numbers of 8 bits, and their scale, [..., 1] or [1] of the input's dtype.

        If groups have a scale each, K is that of a group.
        """
        assert self.dtype is not None
        scale = layer.get_buffer(INPUT_SCALE) if self.scales == "layer" else self._scales(rows)
        scale = scale.to(rows.dtype)
        return round_to(rows / scale, self.dtype), scale

    def _scales(self, rows: Tensor) -> Tensor:
        """[..., 1], so that the largest element of a row is the largest number."""
        assert self.dtype is not None
        scale = rows.abs().amax(-1, keepdim=True).float() / half_range(self.dtype)
        return scale.masked_fill(scale == 0, 1)


KEEP = InputRounding()


def half_range(dtype: torch.dtype) -> float:
    """Half of the distance between the least and the largest number, which is not the largest for int8."""
    if dtype == torch.int8:
        return 127.5
    return torch.finfo(dtype).max


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest numbers that the dtype has."""
    limits: torch.iinfo | torch.finfo = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    bounded = values.clamp(limits.min, limits.max)
    return (bounded if dtype.is_floating_point else bounded.round()).to(dtype)
