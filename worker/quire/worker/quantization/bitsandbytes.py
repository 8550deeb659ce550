"""bitsandbytes' weights of 4 bits (nf4, fp4): each number is an entry of a table, times a scale for 64 neighbours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.quantization.quantized_linear import QuantizedLinear
from quire.worker.quantization.scheme import Fields, Scheme

NEIGHBOURS = 64
# With double quantization scales have 8 bits, and so many of them a scale of their own.
NESTED_NEIGHBOURS = 256
STATE = "weight_quant_state"


def read_bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    """Read the format `bitsandbytes`."""
    fields = Fields("bitsandbytes", config)
    fields.one_of("load_in_4bit", (True,), False)
    kind = fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    fields.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    is_nested = bool(fields.get("bnb_4bit_use_double_quant", False))
    parts = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"]
    renamed = {rf"\.weight\.{part}$": f".weight_{part}" for part in parts}
    renamed[rf"\.weight\.quant_state\.bitsandbytes__{kind}$"] = f".{STATE}"

    def make(_: str, linear: nn.Linear) -> CodebookLinear:
        return CodebookLinear(linear, f"bitsandbytes {kind}", is_nested=is_nested)

    return Scheme(f"bitsandbytes {kind}", make, fields.get("llm_int8_skip_modules"), renamed)


class CodebookLinear(QuantizedLinear):
    """N rows, K columns, S = N * K / 64 scales.

    weight              [N * K / 2, 1]  uint8: two numbers, the first one in the upper 4 bits
    weight_quant_map    [16]            float32: the table
    weight_absmax       [S]             float32; uint8 with double quantization, and then
    weight_nested_absmax        [S / 256, rounded up]   float32
    weight_nested_quant_map     [256]                   float32
    weight_quant_state  bytes of JSON, of any number: sizes, and nested_offset
    """

    def __init__(self, linear: nn.Linear, name: str, *, is_nested: bool) -> None:
        super().__init__(linear)
        self.dequantizer = name
        self._is_nested = is_nested
        if self.num_weights % NEIGHBOURS:
            raise ValueError(f"its {self.num_weights} elements are no multiple of {NEIGHBOURS}")
        num_scales = self.num_weights // NEIGHBOURS
        self.hold_packed("weight", (self.num_weights // 2, 1), torch.uint8)
        self.hold("weight_quant_map", (16,), torch.float32)
        self.hold(STATE, (0,), torch.uint8)
        if is_nested:
            self.hold_packed("weight_absmax", (num_scales,), torch.uint8)
            self.hold("weight_nested_absmax", (-(-num_scales // NESTED_NEIGHBOURS),), torch.float32)
            self.hold("weight_nested_quant_map", (256,), torch.float32)
        else:
            self.hold("weight_absmax", (num_scales,), torch.float32)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        packed = self.get_buffer("weight").flatten()
        numbers = torch.stack((packed >> 4, packed & 15), dim=-1).flatten().to(torch.int32)
        values = self.get_buffer("weight_quant_map")[numbers].view(-1, NEIGHBOURS)
        return (values * self._scales()[:, None]).to(dtype).view(self.out_features, self.in_features)

    def _scales(self) -> Tensor:
        """[S]."""
        scales = self.get_buffer("weight_absmax")
        if not self._is_nested:
            return scales
        nested = self.get_buffer("weight_nested_absmax").repeat_interleave(NESTED_NEIGHBOURS)[: scales.shape[0]]
        return self.get_buffer("weight_nested_quant_map")[scales.to(torch.int32)] * nested + self.get_buffer("offset")

    def find_fault(self) -> str | None:
        state = self._state()
        expected = {"blocksize": NEIGHBOURS, "shape": [self.out_features, self.in_features]}
        if self._is_nested:
            expected["nested_blocksize"] = NESTED_NEIGHBOURS
        for name, value in expected.items():
            if state.get(name) != value:
                return f"{STATE} has {name} {state.get(name)!r} and not {value}"
        offset = float(state.get("nested_offset", 0.0))
        self.register_buffer("offset", torch.tensor(offset, device=self.get_buffer("weight").device))
        return super().find_fault()

    def _state(self) -> dict[str, Any]:
        """The sizes as the checkpoint has them; empty if they can't be read."""
        try:
            state = json.loads(bytes(self.get_buffer(STATE).tolist()))
        except ValueError:
            return {}
        return state if isinstance(state, dict) else {}
