"""Weights of a mixture's experts, dequantized for one expert at a time.

transformers holds a projection of all experts in one tensor [E, N, K], and its experts read weights[e]. Here the module
in place of this tensor has the same index: it returns the dequantized weight of one expert, so that the model's own
code runs unchanged, and a step dequantizes the experts that its tokens use.

Inputs stay as they are, as they do in transformers' own forward of such a checkpoint on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.quantization.quantized_module import QuantizedModule
from quire.worker.quantization.scaled_linear import ScaledFormat, expand_scale


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A projection of E experts, of N rows and K columns. A checkpoint has it in `num_parts` layers of N / num_parts
    rows, gate and up, or in one.

    is_transposed   the model reads [K, N]
    dtype           in which it reads it
    """

    num_experts: int
    num_parts: int
    num_rows: int
    num_columns: int
    is_transposed: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, experts: nn.Module, name: str) -> ExpertSizes:
        """Return the sizes of a parameter [E, N, K] or [E, K, N] of transformers' experts."""
        parameter, is_transposed = experts.get_parameter(name), bool(getattr(experts, "is_transposed", False))
        num_experts, rows, columns = parameter.shape
        if is_transposed:
            rows, columns = columns, rows
        return cls(num_experts, 2 if name.startswith("gate_up") else 1, rows, columns, is_transposed, parameter.dtype)


class QuantizedExperts(QuantizedModule):
    """One projection of all experts; [e] is the weight of one, as the model reads it."""

    def __init__(self, name: str, sizes: ExpertSizes) -> None:
        super().__init__()
        self.dequantizer = name
        self.sizes = sizes

    @property
    def num_weights(self) -> int:
        """See QuantizedModule.num_weights."""
        return self.sizes.num_experts * self.sizes.num_rows * self.sizes.num_columns

    def dequantized(self, expert: int | Tensor) -> Tensor:
        """Return the weight of one expert, [N, K] float32."""
        raise NotImplementedError

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        weight = self.dequantized(expert).to(self.sizes.dtype)
        return weight.t() if self.sizes.is_transposed else weight


class ScaledExperts(QuantizedExperts):
    """Weights of 8 bits times scales.

    weight  [E, N, K]                                       the format's dtype
    scale   [E, parts of the format's scale_shape, ...]     float32
    """

    def __init__(self, form: ScaledFormat, sizes: ExpertSizes) -> None:
        super().__init__(form.name, sizes)
        if sizes.is_transposed:
            raise ValueError("its experts have transposed weights")
        if form.is_scalar and not form.block[0]:
            raise ValueError("its experts have one scale for each tensor")
        self.form = form
        self._part = (sizes.num_rows // sizes.num_parts, sizes.num_columns)
        num_scales, *rest = form.scale_shape(*self._part)
        self.hold_packed(form.weight, (sizes.num_experts, sizes.num_rows, sizes.num_columns), form.dtype)
        self.hold(form.scale, (sizes.num_experts, sizes.num_parts * num_scales, *rest), torch.float32)

    def dequantized(self, expert: int | Tensor) -> Tensor:
        scales = self.get_buffer(self.form.scale)[expert].chunk(self.sizes.num_parts)
        parts = self.get_buffer(self.form.weight)[expert].to(torch.float32).chunk(self.sizes.num_parts)
        return torch.cat(
            [part * expand_scale(scale, self.form.block, self._part) for part, scale in zip(parts, scales, strict=True)]
        )


def expert_projections(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """The projections of experts that transformers holds in one tensor: the experts' name and module, and its name."""
    for path, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() == 3:
                    yield path, module, name
