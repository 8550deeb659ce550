"""A linear layer with a weight that is not one tensor of floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.quantization.inputs import KEEP, InputRounding


class QuantizedLinear(nn.Module):
    """A linear layer that dequantizes its weight for each product; same arguments and results as nn.Linear.

    input [..., K], any float dtype; returns [..., N] of that dtype. The weight's tensors are buffers with the names
    that the checkpoint has, on the meta device until transformers loads them. Cost beside the product: reads the
    packed weight, and writes and reads N * K elements of the input's dtype.
    """

    dequantizer: str
    """The format of the weight, for people."""

    def __init__(self, linear: nn.Linear, inputs: InputRounding = KEEP) -> None:
        """`linear` is the layer that this one replaces: it has the sizes, and the bias."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.inputs = inputs
        self._packed_dtypes: dict[str, torch.dtype] = {}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, [N, K]."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.inputs.round(input, self), self.dequantized(input.dtype), self.bias)

    @property
    def num_weights(self) -> int:
        """The elements of the weight, however many bytes they take."""
        return self.in_features * self.out_features

    def find_fault(self) -> str | None:
        """Return the reason why the loaded tensors can't be right, with the buffer's name; None if nothing is found."""
        for name, expected in self._packed_dtypes.items():
            found = self.get_buffer(name).dtype
            if found != expected:
                return f"{name} is {_name(found)} and not {_name(expected)}"
        for name, tensor in self.named_buffers():
            if tensor.is_floating_point() and not is_finite(tensor):
                return f"{name} has elements that are no finite numbers"
        return None

    def hold(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make an empty buffer, on the device of the model that is made."""
        self.register_buffer(name, torch.empty(shape, dtype=dtype))

    def hold_packed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make an empty buffer that transformers loads as the file has it: the file must have this dtype."""
        self._packed_dtypes[name] = dtype
        self.hold(name, shape, dtype)

    def extra_repr(self) -> str:
        return f"{self.dequantizer}, in_features={self.in_features}, out_features={self.out_features}"


def quantized_linears(model: Any) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantized layers of a model, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))


def count_layer_weights(model: Any) -> tuple[int, int]:
    """Return the numbers of a model's quantized weights and of its others, without embedding and output layer."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    left_out = {parameter for module in ends if module is not None for parameter in module.parameters()}
    num_quantized = sum(linear.num_weights for _, linear in quantized_linears(model))
    return num_quantized, sum(each.numel() for each in model.parameters() if each not in left_out)


def is_finite(tensor: Tensor) -> bool:
    """True if all elements are finite. float8, which has no comparison, is converted."""
    if tensor.itemsize == 1:
        tensor = tensor.to(torch.float16)
    return bool(torch.isfinite(tensor).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
