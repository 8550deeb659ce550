"""Cosines and sines by position, as qkv_prologue() reads them. Needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def make_rope_table(inv_freq: Tensor, *, num_positions: int, attention_scaling: float = 1.0) -> Tensor:
    """The angles of every position: [num_positions, 2 * F] float32, F cosines and then F sines.

        inv_freq            [F]     any float dtype, radians per position of each pair
        attention_scaling           factor of both, 1 but for YaRN and its like

    Both arguments are what a transformers rotary embedding has under these names. Made in float64: in float32 the
    angles of late positions are off by more than bf16 resolves.
    """
    positions = torch.arange(num_positions, dtype=torch.float64, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.double())
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * attention_scaling).float()
