"""The steps between the QKV projection and attention, in float64: the definition of correct for its kernels.

Used by tests only. One pair of one head of one token at a time, and angles from positions, not from a table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def qkv_prologue(
    qkv: Tensor,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    inv_freq: Tensor | None,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normalised and rotated, and values as they are.

    Sizes: N tokens, Hq query heads, H kv heads, D head dim, F pairs of dims that are rotated.
        qkv             [N, (Hq + 2 * H) * D]   all query heads, all key heads, all value heads
        positions       [N]
        inv_freq        [F]                     radians per position of each pair, or None to rotate nothing
        interleaved     pair i is dims 2i and 2i + 1, else dims i and i + F
        q_norm_weight, k_norm_weight    [D]     RMS norm of each head before the rotation, or None
        returns         [N, Hq, D], [N, H, D], [N, H, D], float64
    """
    heads = qkv.double().view(qkv.shape[0], num_query_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.tensor_split([num_query_heads, num_query_heads + num_kv_heads], dim=1)
    q, k = (
        torch.stack([torch.stack([_rms_norm(head, weight, eps) for head in token]) for token in x])
        for x, weight in ((q, q_norm_weight), (k, k_norm_weight))
    )
    if inv_freq is not None:
        for x in (q, k):
            for token, position in enumerate(positions.tolist()):
                for head in x[token]:
                    _rotate(head, position, inv_freq, attention_scaling, interleaved=interleaved)
    return q, k, v


def _rms_norm(head: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return head.clone()
    return head / math.sqrt(float((head * head).mean()) + eps) * weight.double()


def _rotate(head: Tensor, position: int, inv_freq: Tensor, attention_scaling: float, *, interleaved: bool) -> None:
    num_pairs = inv_freq.shape[0]
    for pair, frequency in enumerate(inv_freq.tolist()):
        dims = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + num_pairs)
        x, y = (float(head[dim]) for dim in dims)
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        head[dims[0]] = (x * cos - y * sin) * attention_scaling
        head[dims[1]] = (y * cos + x * sin) * attention_scaling


def to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """The values that an fp8 pool holds of x: x / scale in float8_e4m3fn, finite values beyond its range saturated."""
    return (x.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
