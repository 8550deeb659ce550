"""GPTQ: numbers packed along columns, zero points along rows, columns in groups of any order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.quantization.packed_linear import PackedLinear, unpack
from quire.worker.quantization.scheme import Fields, Scheme

BITS = (2, 4, 8)
# Zero points are stored less one in the first version.
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def read_gptq(config: Mapping[str, Any]) -> Scheme:
    """Read the format `gptq`."""
    fields = Fields("gptq", config)
    bits = fields.one_of("bits", BITS)
    group_size = fields.group_size()
    zero_offset = ZERO_OFFSETS[fields.one_of("checkpoint_format", tuple(ZERO_OFFSETS), "gptq")]
    if fields.get("dynamic"):
        raise fields.unsupported("dynamic", config["dynamic"], "empty: all layers have the same bits")
    if fields.get("lm_head"):
        raise fields.unsupported("lm_head", True, "false")
    name = f"gptq, {bits} bits"

    def make(linear: nn.Linear) -> GPTQLinear:
        return GPTQLinear(linear, name, bits=bits, group_size=group_size, zero_offset=zero_offset)

    return Scheme.of_one(name, make, fields.get("modules_to_not_convert"))


class GPTQLinear(PackedLinear):
    """N rows, K columns, G groups, P numbers in a word.

    qweight [K / P, N]  int32    qzeros [G, N / P]  int32
    scales  [G, N]      float32  g_idx  [K]         int32, the group of each column
    """

    def __init__(self, linear: nn.Linear, name: str, *, bits: int, group_size: int, zero_offset: int) -> None:
        super().__init__(linear, name, bits=bits, group_size=group_size)
        self._zero_offset = zero_offset
        self.hold_packed("qweight", (self.words(self.in_features, "columns"), self.out_features), torch.int32)
        self.hold_packed("qzeros", (self.num_groups, self.words(self.out_features, "rows")), torch.int32)
        self.hold("scales", (self.num_groups, self.out_features), torch.float32)
        self.hold_packed("g_idx", (self.in_features,), torch.int32)

    def numbers(self) -> Tensor:
        return unpack(self.get_buffer("qweight").t(), self.bits)

    def group_scales(self) -> Tensor:
        return self.get_buffer("scales").t()

    def zero_points(self) -> Tensor:
        return unpack(self.get_buffer("qzeros"), self.bits).t() + self._zero_offset

    def groups(self) -> Tensor:
        return self.get_buffer("g_idx")

    def find_fault(self) -> str | None:
        return super().find_fault() or self.find_wrong_group("g_idx")
