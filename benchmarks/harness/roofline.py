"""A device's ceilings, measured in the same run, and the least time of a step with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from shapes import Shape
from torch import Tensor

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates of a device: medians of their samples.

    bytes_per_s     of reading memory. Steps read: bounds are made with it. A copy is slower on a GPU
    flops_per_s     of a large matrix product
    copy_samples    bytes/s of a copy, reads and writes counted: to compare with other figures
    """

    bytes_per_s: float
    flops_per_s: float
    read_samples: list[float] = field(default_factory=list)
    product_samples: list[float] = field(default_factory=list)
    copy_samples: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, float]:
        """Return the figures for JSON."""
        return {
            "gb_per_s": round(self.bytes_per_s / 1e9, 2),
            "copied_gb_per_s": round(statistics.median(self.copy_samples) / 1e9, 2),
            "tflop_per_s": round(self.flops_per_s / 1e12, 3),
        }


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, num_bytes: int, size: int) -> Ceilings:
    """Read and copy num_bytes, and multiply two [size, size] matrices."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    reads = [source.nbytes / seconds for seconds in _seconds(_reading(source), device)]
    copies = [2 * source.nbytes / seconds for seconds in _seconds(lambda: target.copy_(source), device)]
    products = [2 * size**3 / seconds for seconds in _seconds(lambda: torch.mm(a, b, out=out), device)]
    return Ceilings(statistics.median(reads), statistics.median(products), reads, products, copies)


def _reading(source: Tensor) -> Callable[[], object]:
    """Return a call that reads all of a tensor and writes next to nothing."""
    if source.device.type != "cuda":
        return lambda: source.sum()
    from memory_reading import NUM_PROGRAMS, read_stream  # imports Triton, which a CPU does not need

    words, sums = source.view(torch.int32), torch.empty(NUM_PROGRAMS, dtype=torch.int32, device=source.device)
    return lambda: read_stream(words, sums)


def _seconds(call: Callable[[], object], device: torch.device) -> list[float]:
    call()
    return [_timed(call, device) for _ in range(ROUNDS)]


def _timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: on a GPU the GPU's own, without the launch and the wait."""
    synchronize(device)
    if device.type == "cuda":
        started, ended = (_event() for _ in range(2))
        started.record()
        call()
        ended.record()
        synchronize(device)
        return float(started.elapsed_time(ended)) / 1000
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_scores(cached: int, new: int) -> int:
    """Return the pairs of a query and a key that causal attention multiplies, of a sequence in one layer and head."""
    return new * cached + new * (new + 1) // 2


def step_bound_s(
    shape: Shape,
    dtype: torch.dtype,
    ceilings: Ceilings,
    *,
    num_tokens: int,
    num_sampled: int,
    num_keys: int,
    num_scores: int,
) -> float:
    """Least seconds of a step: its products, or reading all weights once; and its attention, or reading its keys.

    num_tokens are computed, num_sampled of them go through the output layer, num_keys are visible to its sequences,
    num_scores of all sequences are those of num_scores().
    """
    output_weights = shape.config.vocab_size * shape.config.hidden_size
    layer_weights = shape.num_matrix_weights - output_weights
    flops = 2 * (layer_weights * num_tokens + output_weights * num_sampled)
    weights_s = shape.num_matrix_weights * dtype.itemsize / ceilings.bytes_per_s
    keys_s = shape.kv_bytes_per_token(dtype) * num_keys / ceilings.bytes_per_s
    attention_s = shape.attention_flops_per_score * num_scores / ceilings.flops_per_s
    return max(weights_s, flops / ceilings.flops_per_s) + max(keys_s, attention_s)


def workload_bound_s(
    shape: Shape, dtype: torch.dtype, ceilings: Ceilings, *, prompts: Sequence[int], outputs: Sequence[int]
) -> float:
    """Least seconds for requests that all run at once: prompts by their products and attention, then one token of each
    a step.

    prompts and outputs are tokens of each request. What prompts read of one another's weights and keys is left out.
    """
    flops = 2 * shape.num_matrix_weights * sum(prompts)
    flops += shape.attention_flops_per_score * sum(num_scores(0, prompt) for prompt in prompts)
    total = flops / ceilings.flops_per_s
    for step in range(1, max(outputs)):
        lengths = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
        total += step_bound_s(
            shape,
            dtype,
            ceilings,
            num_tokens=len(lengths),
            num_sampled=len(lengths),
            num_keys=sum(lengths),
            num_scores=sum(lengths),
        )
    return total
