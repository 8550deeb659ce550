"""Weights of a mixture's experts, dequantized for one expert at a time.

transformers holds a projection of all experts in one tensor [E, N, K], and its experts read weights[e]. Here the module
in place of this tensor has the same index: it returns the dequantized weight of one expert, so that the model's own
code runs unchanged, and a step dequantizes the experts that its tokens use.

Inputs stay as they are, as they do in transformers' own forward of such a checkpoint on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.quantization.quantized_linear import QuantizedLinear
from quire.worker.quantization.quantized_module import QuantizedModule


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


class LinearExperts(QuantizedExperts):
    """Weights as a format has them in linear layers.

    A buffer of a layer, [n, ...] or a scalar, is here that of all layers, [E, parts * n, ...]: so do transformers' own
    conversions merge the checkpoint's tensors.
    """

    def __init__(self, make: Callable[[nn.Linear], QuantizedLinear], sizes: ExpertSizes) -> None:
        """make returns the layer in place of a linear one: of one expert, and of gate and up one of both."""
        if sizes.is_transposed:
            raise ValueError("its experts have transposed weights")
        layer = make(nn.Linear(sizes.num_columns, sizes.num_rows // sizes.num_parts, bias=False))
        super().__init__(layer.dequantizer, sizes)
        self._pattern = (layer,)  # in a tuple it is no layer of the model
        for name, buffer in layer.named_buffers():
            length, *rest = buffer.shape or (1,)
            hold = self.hold_packed if layer.is_packed(name) else self.hold
            hold(name, (sizes.num_experts, sizes.num_parts * length, *rest), buffer.dtype)

    def layers(self, expert: int | Tensor) -> Iterator[QuantizedLinear]:
        """The layers of one expert: gate and up, or down. Their buffers are views."""
        parts = {name: buffer[expert].chunk(self.sizes.num_parts) for name, buffer in self.named_buffers()}
        for number in range(self.sizes.num_parts):
            layer = copy.copy(self._pattern[0])
            layer._buffers = {name: part[number] for name, part in parts.items()}
            yield layer

    def dequantized(self, expert: int | Tensor) -> Tensor:
        return torch.cat([layer.dequantized(torch.float32) for layer in self.layers(expert)])

    def find_fault(self) -> str | None:
        every = (layer.find_fault() for expert in range(self.sizes.num_experts) for layer in self.layers(expert))
        return next((fault for fault in every if fault is not None), None)


def expert_projections(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """The projections of experts that transformers holds in one tensor: the experts' name and module, and its name."""
    for path, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() == 3:
                    yield path, module, name
