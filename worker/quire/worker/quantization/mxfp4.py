"""MXFP4, as gpt-oss has it: experts in e2m1, of which 32 neighbours share a power of two. Other layers are plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.worker.quantization.experts import ExpertSizes, QuantizedExperts
from quire.worker.quantization.scheme import Fields, Scheme

NAME = "mxfp4"
NEIGHBOURS = 32
# By the 4 bits of a number: sign, two of the exponent, one of the fraction.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
NOT_A_NUMBER = 255


def read_mxfp4(config: Mapping[str, Any]) -> Scheme:
    """Read the format `mxfp4`."""
    return Scheme(
        NAME,
        lambda _name, _linear: None,
        Fields(NAME, config).get("modules_to_not_convert"),
        renamed={rf"_proj_{part}$": f"_proj.{part}" for part in ("blocks", "scales")},
        experts=lambda _, sizes: MXFP4Experts(sizes),
    )


class MXFP4Experts(QuantizedExperts):
    """E experts, N rows, K columns.

    blocks  [E, N, K / 32, 16]  uint8: two numbers, the first one in the lower 4 bits
    scales  [E, N, K / 32]      uint8: exponents, plus 127
    """

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__(NAME, sizes)
        if sizes.num_columns % NEIGHBOURS:
            raise ValueError(f"its {sizes.num_columns} columns are no multiple of {NEIGHBOURS}")
        shape = (sizes.num_experts, sizes.num_rows, sizes.num_columns // NEIGHBOURS)
        self.hold_packed("blocks", (*shape, NEIGHBOURS // 2), torch.uint8)
        self.hold_packed("scales", shape, torch.uint8)

    def dequantized(self, expert: int | Tensor) -> Tensor:
        packed, exponents = (self.get_buffer(name)[expert] for name in ("blocks", "scales"))
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device)
        numbers = table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int32)]
        return torch.ldexp(numbers, (exponents.to(torch.int32) - BIAS)[..., None]).flatten(-2)

    def find_fault(self) -> str | None:
        if bool((self.get_buffer("scales") == NOT_A_NUMBER).any()):
            return "scales has elements that are no finite numbers"
        return super().find_fault()
