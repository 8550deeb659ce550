"""The definition of correct for the small kernels: norms, activations, block moves and the sampler.

As in reference.py: float64, one thing at a time, used by tests only. What is only moved is exact, in the pool's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1


def add_rmsnorm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the norm in float64 and the residual stream after the addition, in the dtype of x.

    Sizes: N rows, C columns.
        x, residual     [N, C]  of one dtype; None for residual adds nothing
        weight          [C]
        returns         [N, C] float64, [N, C] dtype of x
    """
    total = x.clone() if residual is None else (x.double() + residual.double()).to(x.dtype)
    norms = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for row, values in enumerate(total.double()):
        root_mean_square = math.sqrt(float(values.square().mean()) + eps)
        norms[row] = values / root_mean_square * (weight.double() + weight_offset)
    return norms, total


def silu_mul(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """Return the activation of gate times up in float64; gate and up are of one shape."""
    return activate(gate, activation) * up.double()


def activate(x: Tensor, activation: str) -> Tensor:
    """Return silu, gelu or gelu_tanh of x in float64."""
    x = x.double()
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def add_updates(out: Tensor, x: Tensor, updates: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
    """Return a product's result [M, N] with each row's update in float64: b [N, r] of a [r, K] of x [M, K], or None."""
    total = out.double()
    for row, update in enumerate(updates):
        if update is not None:
            a, b = update
            total[row] += b.double() @ (a.double() @ x[row].double())
    return total


def int4_linear(x: Tensor, numbers: Tensor, scales: Tensor, zeros: Tensor, groups: Sequence[int]) -> Tensor:
    """Return x [M, K] times a weight of integers, in float64.

    numbers [N, K], scales and zeros [N, G], groups [K]: column k is scales[:, groups[k]] * (numbers[:, k] - zeros).
    """
    total = torch.zeros(len(x), len(numbers), dtype=torch.float64, device=x.device)
    for column, group in enumerate(groups):
        weights = scales[:, group].double() * (numbers[:, column].double() - zeros[:, group].double())
        total += x[:, column, None].double() * weights
    return total


def scaled_linear(x: Tensor, numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return x [M, K] times a weight of numbers [N, K] that share the scales of blocks, in float64.

    Number [n, k] has scale [n // rows of a block, k // columns of a block]; 0 rows or columns: all of them.
    """
    rows, columns = (each or size for each, size in zip(block, numbers.shape, strict=True))
    total = torch.zeros(len(x), len(numbers), dtype=torch.float64, device=x.device)
    for column in range(numbers.shape[1]):
        of_rows = scales[torch.arange(len(numbers), device=x.device) // rows, column // columns]
        total += x[:, column, None].double() * (of_rows.double() * numbers[:, column].double())
    return total


def block_bytes(pools: Sequence[Tensor], block_id: int) -> Tensor:
    """Return one block's bytes of all tensors [B, ...], in the order in which they lie in memory: [n] uint8.

    A block of each tensor is one run of memory.
    """
    return torch.cat([_in_memory_order(pool[block_id]).contiguous().view(-1).view(torch.uint8) for pool in pools])


def gather_blocks(pools: Sequence[Tensor], *, block_ids: Sequence[int]) -> Tensor:
    """Return the bytes of P blocks, [P, bytes_per_block] uint8."""
    return torch.stack([block_bytes(pools, block_id) for block_id in block_ids])


def scatter_blocks(pools: Sequence[Tensor], staging: Tensor, *, block_ids: Sequence[int]) -> None:
    """Write row i of staging [P, bytes_per_block] uint8 to block block_ids[i] of the tensors, in place."""
    for row, block_id in zip(staging, block_ids, strict=True):
        begin = 0
        for pool in pools:
            block = _in_memory_order(pool[block_id])
            num_bytes = block.numel() * block.element_size()
            block.copy_(row[begin : begin + num_bytes].clone().view(pool.dtype).view(block.shape))
            begin += num_bytes


def _in_memory_order(block: Tensor) -> Tensor:
    strides = block.stride()
    return block.permute(sorted(range(block.dim()), key=lambda dim: -strides[dim]))


def noise(seed: int, position: int, token: int) -> float:
    """Return the noise of a token: -log(E), E a number of the exponential distribution with rate 1.

    64 tokens are a group. The least E of a group is exponential with rate 64, its token one of 64 that are equally
    likely. The E of every other token is this and an exponential number with rate 1.
    """
    key = _mix((_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK_64)
    bits = _hash(key, 2**31 + token // 64)
    later = 0.0 if bits % 64 == token % 64 else _exponential(_hash(key, token))
    return -math.log(_exponential(bits) / 64 + later)


def _exponential(bits: int) -> float:
    return -math.log((bits // 64 + 0.5) / 2**26)


def _hash(key: int, counter: int) -> int:
    x = counter ^ (key & _MASK_32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB + (key >> 32)) & _MASK_32
    x = (x ^ (x >> 11)) * 0xAC4C1B51 & _MASK_32
    x = (x ^ (x >> 15)) * 0x31848BAB & _MASK_32
    return x ^ (x >> 14)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK_64
    return x ^ (x >> 31)


def kept_tokens(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> list[int]:
    """The tokens, rising, of one row of logits [V] that the filters keep.

    A token is kept if its gap, (greatest - logit) / temperature in float32, is at most the least of three: that of the
    k-th token by falling logit; that of the last of those k tokens (or of all) before which their weights exp(-gap) add
    up to less than the share top_p of their sum; -log(min_p).
    """
    gaps = ((logits.float().max() - logits.float()) / temperature).tolist()
    rising = sorted(gaps)
    if top_k:
        rising = rising[:top_k]
    weights = [math.exp(-gap) for gap in rising]
    share = top_p * math.fsum(weights)
    limits = [rising[-1]]
    if top_p < 1:
        limits.append(max(gap for i, gap in enumerate(rising) if math.fsum(weights[:i]) < share))
    if min_p:
        limits.append(float(torch.tensor(-math.log(min_p), dtype=torch.float32)))
    return [token for token, gap in enumerate(gaps) if gap <= min(limits)]


def sample(
    logits: Tensor,
    *,
    temperature: float,
    seed: int,
    position: int,
    top_k: int = 0,
    top_p: float = 1,
    min_p: float = 0,
) -> int:
    """Draw one token from one row of logits [V]: of those kept the one with the greatest sum of noise and -gap."""
    if temperature == 0:
        return int(logits.argmax())
    kept = kept_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    gaps = ((logits.float().max() - logits.float()) / temperature).tolist()
    return max(kept, key=lambda token: noise(seed, position, token) - gaps[token])
