"""An adapter in memory. Its identity is its content: the name is for people, and two names may have one content."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor


class UnsupportedAdapter(ValueError):
    """The worker cannot run this adapter correctly. The message names the adapter and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"adapter {name} is not supported: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Update:
    """The update of a linear layer with K inputs and N outputs: scaling * b @ a is added to its weight.

    a  [r, K]
    b  [N, r]
    """

    a: Tensor
    b: Tensor
    scaling: float

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a, and b times the scaling, for products in this dtype."""
        return self.a.to(dtype), (self.b.float() * self.scaling).to(dtype)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The updates of linear layers, by the layer's name in the model."""

    name: str
    updates: Mapping[str, Update]

    def identity(self) -> bytes:
        """Return a SHA-256 of all layers' names, scalings and weights, 32 bytes. Cost: reads all weights."""
        digest = sha256(b"quire adapter v1")
        for layer, update in sorted(self.updates.items()):
            digest.update(_framed(layer.encode()))
            digest.update(struct.pack("<d", update.scaling))
            for tensor in (update.a, update.b):
                digest.update(_framed(f"{tuple(tensor.shape)} {tensor.dtype}".encode()))
                digest.update(_framed(tensor.contiguous().view(torch.uint8).numpy().tobytes()))
        return digest.digest()


def _framed(part: bytes) -> bytes:
    """Return a part behind its length, so that no two splits have one hash."""
    return len(part).to_bytes(8, "little") + part
