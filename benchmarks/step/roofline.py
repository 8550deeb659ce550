"""A device's ceilings, measured in the same run, and the least time of a step with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from shapes import Shape

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bytes_per_s of a copy, reads and writes counted; flops_per_s of a large matrix product."""

    bytes_per_s: float
    flops_per_s: float
    copy_samples: list[float]
    product_samples: list[float]


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, num_bytes: int, size: int) -> Ceilings:
    """A copy of num_bytes, and a product of two [size, size] matrices; medians."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    copies = [2 * source.nbytes / seconds for seconds in _seconds(lambda: target.copy_(source), device)]
    products = [2 * size**3 / seconds for seconds in _seconds(lambda: torch.mm(a, b, out=out), device)]
    return Ceilings(statistics.median(copies), statistics.median(products), copies, products)


def _seconds(call: Callable[[], object], device: torch.device) -> list[float]:
    call()
    taken = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return taken


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_bound_s(
    shape: Shape, dtype: torch.dtype, ceilings: Ceilings, *, num_tokens: int, num_sampled: int, num_keys: int
) -> float:
    """Least seconds of a step: its matrix products, or reading all weights once; and reading its sequences' keys.

    num_tokens are computed, num_sampled of them go through the output layer, num_keys are visible to its sequences.
    """
    output_weights = shape.config.vocab_size * shape.config.hidden_size
    layer_weights = shape.num_matrix_weights - output_weights
    flops = 2 * (layer_weights * num_tokens + output_weights * num_sampled)
    weights_s = shape.num_matrix_weights * dtype.itemsize / ceilings.bytes_per_s
    keys_s = shape.kv_bytes_per_token(dtype) * num_keys / ceilings.bytes_per_s
    return max(weights_s, flops / ceilings.flops_per_s) + keys_s


def workload_bound_s(
    shape: Shape, dtype: torch.dtype, ceilings: Ceilings, *, prompts: Sequence[int], outputs: Sequence[int]
) -> float:
    """Least seconds for requests that all run at once: prompts by their products, then one token of each a step.

    prompts and outputs are tokens of each request. What prompts read of one another's weights and keys is left out.
    """
    prompt_s = 2 * shape.num_matrix_weights * sum(prompts) / ceilings.flops_per_s
    total = prompt_s
    for step in range(1, max(outputs)):
        lengths = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
        total += step_bound_s(
            shape, dtype, ceilings, num_tokens=len(lengths), num_sampled=len(lengths), num_keys=sum(lengths)
        )
    return total
