"""A module with weights that are not tensors of floats: its buffers, and the check of them once they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class QuantizedModule(nn.Module):
    """Buffers with the names that the checkpoint has, on the meta device until transformers loads them."""

    dequantizer: str
    """The format of the weight, for people."""

    def __init__(self) -> None:
        super().__init__()
        self._packed_dtypes: dict[str, torch.dtype] = {}

    @property
    def multiplies_packed(self) -> bool:
        """True if products on a GPU don't dequantize the weight for each step of few tokens."""
        return False

    @property
    def num_weights(self) -> int:
        """The elements of the weight, however many bytes they take."""
        raise NotImplementedError

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

    def is_packed(self, name: str) -> bool:
        """True for a buffer of hold_packed()."""
        return name in self._packed_dtypes


def quantized_modules(model: Any) -> Iterator[tuple[str, QuantizedModule]]:
    """The quantized layers and experts of a model, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedModule))


def count_layer_weights(model: Any) -> tuple[int, int]:
    """Return the numbers of a model's quantized weights and of its others, without embedding and output layer."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    left_out = {parameter for module in ends if module is not None for parameter in module.parameters()}
    num_quantized = sum(module.num_weights for _, module in quantized_modules(model))
    return num_quantized, sum(each.numel() for each in model.parameters() if each not in left_out)


def is_finite(tensor: Tensor) -> bool:
    """True if all elements are finite. float8, which has no comparison, is converted."""
    if tensor.itemsize == 1:
        tensor = tensor.to(torch.float16)
    return bool(torch.isfinite(tensor).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
