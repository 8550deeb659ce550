"""Whole workloads through the engine in one process, and through transformers' continuous batching."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import continuous_batching
import torch
from engines import Setup, generate, one_process
from modes import check_modes
from roofline import Ceilings, workload_bound_s
from shapes import BLOCK_SIZE, Shape
from transformers import AutoModelForCausalLM
from worker_flags import DEFAULTS, WorkerFlags

MAX_STEP_TOKENS = 8192

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """Requests that all arrive at once."""

    name: str
    shape: Shape
    prompts: Tokens
    num_new: list[int]

    @property
    def num_blocks(self) -> int:
        """The blocks of a pool in which all of them fit."""
        tokens = (len(prompt) + new for prompt, new in zip(self.prompts, self.num_new, strict=True))
        return 2 + sum(count // BLOCK_SIZE + 2 for count in tokens)

    @property
    def longest(self) -> int:
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.num_new, strict=True))


@dataclass(frozen=True, slots=True)
class Served:
    """One row: generated tokens per second, prompts included, and the device's limit."""

    work: str
    row: str
    seconds: float
    num_generated: int
    bound_tokens_per_s: float
    mode: dict[str, str]
    num_compiled: int = 0
    """Kernels compiled while it was measured."""
    must: float | None = None
    """Tokens a second, or a part of the bound if it is at most 1."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_generated / self.seconds

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


def equal_lengths(shape: Shape, *, num_requests: int = 256, prompt: int = 1024, output: int = 1024) -> Work:
    generator = random.Random(0)
    highest = min(10_000, shape.config.vocab_size - 1)
    prompts = [[generator.randint(0, highest) for _ in range(prompt)] for _ in range(num_requests)]
    return Work(f"{shape.name}: {num_requests} x ({prompt} + {output})", shape, prompts, [output] * num_requests)


def mixed_lengths(shape: Shape, *, num_requests: int = 256, limits: tuple[int, int] = (100, 1024)) -> Work:
    """The lengths of nano-vllm's benchmark: 133,966 new tokens at the default sizes."""
    generator = random.Random(0)
    highest = min(10_000, shape.config.vocab_size - 1)
    prompts = [[generator.randint(0, highest) for _ in range(generator.randint(*limits))] for _ in range(num_requests)]
    num_new = [generator.randint(*limits) for _ in range(num_requests)]
    name = f"{shape.name}: {num_requests} x ({limits[0]}..{limits[1]} + {limits[0]}..{limits[1]})"
    return Work(name, shape, prompts, num_new)


# The targets on an H200, by model: tokens a second, or a part of the bound if it is at most 1.
TO_REACH = {"Qwen3-0.6B": 26_000.0, "Qwen3-8B": 0.85}
ROWS = ("Quire, in one process", "transformers, continuous batching")


def rows_on(device: torch.device) -> tuple[str, ...]:
    """Return the rows on a device. On a GPU transformers' took most of a run's time, and was 33 times as slow."""
    return ROWS[:1] if device.type == "cuda" else ROWS


def serve(
    work: Work,
    row: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    allow_degraded: bool,
    num_compiled: Callable[[], int],
    flags: WorkerFlags = DEFAULTS,
) -> Served:
    """One of ROWS, after a short run that does not count. Raises DegradedError."""
    bound_s = workload_bound_s(
        work.shape, dtype, ceilings, prompts=[len(prompt) for prompt in work.prompts], outputs=work.num_new
    )
    total, mode = sum(work.num_new), {}
    compiled = 0
    if row == ROWS[0]:
        seconds, mode, compiled = asyncio.run(
            _quire(
                *(work, flags),
                dtype=dtype,
                device=device,
                allow_degraded=allow_degraded,
                num_compiled=num_compiled,
            )
        )
    else:
        seconds = _continuous_batching(work, dtype=dtype, device=device)
    must = TO_REACH.get(work.shape.name) if row == ROWS[0] else None
    return Served(work.name, row, round(seconds, 4), total, total / bound_s, mode, compiled, must)


async def _quire(
    work: Work,
    flags: WorkerFlags,
    *,
    dtype: torch.dtype,
    device: torch.device,
    allow_degraded: bool,
    num_compiled: Callable[[], int],
) -> tuple[float, dict[str, str], int]:
    """Return the seconds, how the model's steps ran, and the kernels that were compiled meanwhile."""
    model = work.shape.load(dtype=dtype, device=device, max_model_len=work.longest + 1, flags=flags)
    setup = Setup(
        model=Path(),  # not read: it is in memory already
        num_blocks=work.num_blocks,
        block_size=BLOCK_SIZE,
        device=str(device),
        max_step_tokens=MAX_STEP_TOKENS,
        max_num_seqs=len(work.prompts),
        max_running_sequences=len(work.prompts),
    )
    async with one_process(setup, model=model, flags=flags) as running:
        mode = check_modes(model, allow_degraded=allow_degraded)
        await generate(running.engine, work.prompts, [min(new, 4) for new in work.num_new])
        await running.forget()
        start, compiled = time.perf_counter(), num_compiled()
        await generate(running.engine, work.prompts, work.num_new)
        return time.perf_counter() - start, mode, num_compiled() - compiled


def _continuous_batching(work: Work, *, dtype: torch.dtype, device: torch.device) -> float:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(work.shape.config, dtype=dtype, attn_implementation="sdpa")
    model = model.eval().requires_grad_(False)
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": work.num_blocks, "max_batch_tokens": MAX_STEP_TOKENS}

    def run(num_new: list[int]) -> float:
        start = time.perf_counter()
        continuous_batching.generate(model, work.prompts, num_new, **sizes)
        return time.perf_counter() - start

    run([min(new, 4) for new in work.num_new])
    return run(work.num_new)
