"""Weights of 2, 4 or 8 bits, several in a word of 32 bits, in groups with a scale and a zero point."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.worker.quantization.quantized_linear import PackedProduct, QuantizedLinear

WORD_BITS = 32


class PackedLinear(QuantizedLinear):
    """A linear layer with a weight of small integers. N rows, K columns, G groups of columns.

    weight[n, k] = scale[n, g] * (number[n, k] - zero[n, g]), with g the group of column k
    """

    def __init__(self, linear: nn.Linear, name: str, *, bits: int, group_size: int) -> None:
        """group_size: columns of a group; -1: all of them.

        Raises ValueError if the sizes of the layer can't be divided so.
        """
        super().__init__(linear)
        self.dequantizer = name
        self.bits = bits
        self.group_size = self.in_features if group_size == -1 else group_size
        if self.in_features % self.group_size:
            raise ValueError(f"its {self.in_features} columns are no multiple of the group size {self.group_size}")
        self.num_groups = self.in_features // self.group_size

    @property
    def per_word(self) -> int:
        """The numbers in a word."""
        return WORD_BITS // self.bits

    def words(self, length: int, name: str) -> int:
        """The words that hold so many numbers. Raises ValueError if the last one would not be full."""
        if length % self.per_word:
            raise ValueError(f"its {length} {name} do not fill words of {self.per_word} numbers")
        return length // self.per_word

    def numbers(self) -> Tensor:
        """Return [N, K], as they are stored."""
        raise NotImplementedError

    def group_scales(self) -> Tensor:
        """Return [N, G], float32."""
        raise NotImplementedError

    def zero_points(self) -> Tensor | int:
        """Return [N, G], or one number for all groups."""
        raise NotImplementedError

    def groups(self) -> Tensor | None:
        """Return the group of each column, [K]; None if groups are of neighbours."""
        return None

    def use_kernel(self, product: PackedProduct) -> None:
        """Multiply by a product with the same weight from here on, and free the checkpoint's tensors."""
        super().use_kernel(product)
        self._buffers.clear()

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if self.product is not None:
            return self.product.dequantized(dtype)
        numbers, scales, zeros, groups = self.numbers(), self.group_scales(), self.zero_points(), self.groups()
        if groups is not None:
            zeros = zeros[:, groups] if isinstance(zeros, Tensor) else zeros
            return ((numbers - zeros).to(torch.float32) * scales[:, groups]).to(dtype)
        grouped = numbers.reshape(-1, self.num_groups, self.group_size)
        centered = grouped - (zeros[..., None] if isinstance(zeros, Tensor) else zeros)
        return (centered.to(torch.float32) * scales[..., None]).to(dtype).flatten(1)

    def find_wrong_group(self, name: str) -> str | None:
        """Return the reason why a tensor of groups is wrong, None if it is not."""
        groups = self.get_buffer(name)
        if int(groups.min()) < 0 or int(groups.max()) >= self.num_groups:
            return f"{name} names groups that are none of {self.num_groups}"
        return None


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of words [..., W] as [..., W * 32 / bits] int32, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
