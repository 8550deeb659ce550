"""AWQ: numbers of 4 bits packed along rows, in the order in which AWQ's kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.quantization.packed_linear import PackedLinear, unpack
from quire.worker.quantization.scheme import Fields, Scheme

# Place in a word of rows 0 to 7.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(config: Mapping[str, Any]) -> Scheme:
    """Read the format `awq`."""
    fields = Fields("awq", config)
    fields.one_of("bits", (4,))
    version = fields.get("version", fields.get("format", "gemm"))
    if str(version).lower() != "gemm":
        raise fields.unsupported("version", version, "gemm")
    fields.one_of("zero_point", (True,), True)
    group_size = fields.group_size()

    def make(linear: nn.Linear) -> AWQLinear:
        return AWQLinear(linear, group_size=group_size)

    return Scheme.of_one("awq, 4 bits", make, fields.get("modules_to_not_convert"))


class AWQLinear(PackedLinear):
    """N rows, K columns, G groups.

    qweight [K, N / 8]  int32    qzeros [G, N / 8]  int32    scales [G, N]  float32
    """

    def __init__(self, linear: nn.Linear, *, group_size: int) -> None:
        super().__init__(linear, "awq, 4 bits", bits=4, group_size=group_size)
        num_words = self.words(self.out_features, "rows")
        self.hold_packed("qweight", (self.in_features, num_words), torch.int32)
        self.hold_packed("qzeros", (self.num_groups, num_words), torch.int32)
        self.hold("scales", (self.num_groups, self.out_features), torch.float32)

    def numbers(self) -> Tensor:
        return _in_order(self.get_buffer("qweight")).t()

    def group_scales(self) -> Tensor:
        return self.get_buffer("scales").t()

    def zero_points(self) -> Tensor:
        return _in_order(self.get_buffer("qzeros")).t()


def _in_order(words: Tensor) -> Tensor:
    """The numbers of words [R, W] as [R, 8 * W], by row of the weight."""
    return unpack(words, 4).view(words.shape[0], -1, 8)[..., PLACES].flatten(1)
