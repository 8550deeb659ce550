"""The cost of the control plane for the engine: tokens per second through two processes over those in one, and the
engine's own work per step. Part of `quire bench control-plane`.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines import Running, Setup, generate, one_process, two_processes, until
from models import llama_56m, tiny_llama
from report import spread, table
from rich.table import Table

RATIO_TO_REACH = 0.98
WORK_TO_REACH_MS = 0.5
PROMPT_TOKENS, NEW_TOKENS = 16, 400


@dataclass(frozen=True, slots=True)
class Sizes:
    """ratio: equal prompts of 64 tokens. work: sequences that run, those that wait, and steps in a window."""

    batch: int = 16
    new_tokens: int = 64
    rounds: int = 7
    running: int = 256
    waiting: int = 10_000
    steps: int = 40
    windows: int = 6


QUICK = Sizes(batch=2, new_tokens=4, rounds=1, running=8, waiting=32, steps=3, windows=2)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One workload through both, in turns: tokens per second of each round, and ms per step through two processes."""

    two_processes: list[float]
    one_process: list[float]
    step_ms: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.two_processes) / statistics.median(self.one_process)


@dataclass(frozen=True, slots=True)
class Work:
    """Per decode step, ms, of each window of steps; services in processes of their own.

    engine     the scheduler, building messages, delivering tokens: as the engine counts them
    process    processor time of the engine's whole process: gRPC and everything else included
    plan       from asking cachemgr for a step to its answer, which comes while the step before runs
    """

    num_running: int
    num_waiting: int
    engine_ms: list[float]
    process_ms: list[float]
    plan_ms: list[float]
    step_ms: list[float]


def measure(sizes: Sizes, on_part: Callable[[str], None]) -> tuple[Ratio, list[Work]]:
    """Measures everything; `on_part` is called with the name of each part."""
    return asyncio.run(_measure(sizes, on_part))


async def _measure(sizes: Sizes, on_part: Callable[[str], None]) -> tuple[Ratio, list[Work]]:
    with tempfile.TemporaryDirectory() as name:
        large, tiny = Path(name, "large"), Path(name, "tiny")
        (tiny_llama if sizes == QUICK else llama_56m)(large)
        tiny_llama(tiny)
        on_part("tokens per second, two processes and one")
        ratio = await measure_ratio(large, sizes)
        works = []
        for num_waiting in (0, sizes.waiting):
            on_part(f"the engine's work, {sizes.running} sequences, {num_waiting:,} waiting")
            works.append(await measure_work(tiny, sizes, num_waiting))
        return ratio, works


async def measure_ratio(model: Path, sizes: Sizes) -> Ratio:
    """The first round does not count; the order changes from round to round."""
    setup = Setup(model, num_blocks=512, max_running_sequences=sizes.batch)
    speeds: dict[str, list[float]] = {"two": [], "one": []}
    step_ms = []
    async with AsyncExitStack() as stack:
        ways = [
            ("two", await stack.enter_async_context(two_processes(setup))),
            ("one", await stack.enter_async_context(one_process(setup))),
        ]
        for number in range(sizes.rounds + 1):
            for name, running in ways if number % 2 else ways[::-1]:
                speed, taken_ms = await one_round(running, sizes, number)
                if number:
                    speeds[name].append(round(speed, 2))
                    step_ms += [round(taken_ms, 3)] if name == "two" else []
    return Ratio(speeds["two"], speeds["one"], step_ms)


async def one_round(running: Running, sizes: Sizes, number: int) -> tuple[float, float]:
    """Tokens per second, and ms per step."""
    prompts = draw_prompts(sizes.batch, 64, seed=number)
    await running.forget()
    steps, start = running.engine.statistics().computed_steps, time.perf_counter()
    await generate(running.engine, prompts, [sizes.new_tokens] * sizes.batch)
    seconds = time.perf_counter() - start
    num_steps = running.engine.statistics().computed_steps - steps
    return sizes.batch * sizes.new_tokens / seconds, seconds / num_steps * 1e3


async def measure_work(model: Path, sizes: Sizes, num_waiting: int) -> Work:
    """Windows of steps in which `running` sequences decode, none begins and none ends."""
    num_tokens = PROMPT_TOKENS + NEW_TOKENS
    num_blocks = sizes.running * -(-num_tokens // 16) + 17
    setup = Setup(model, num_blocks, max_num_seqs=sizes.running, max_running_sequences=sizes.running, threads=1)
    prompts = draw_prompts(sizes.running + num_waiting, PROMPT_TOKENS, seed=0)
    async with two_processes(setup) as running:
        engine = running.engine
        work = asyncio.ensure_future(generate(engine, prompts, [NEW_TOKENS] * len(prompts)))
        try:
            # All are decoding: as many tokens as two steps of all of them give.
            await until(lambda: engine.statistics().scheduler.sampled_tokens > 3 * sizes.running)
            gc.collect()
            gc.freeze()
            columns = [await one_window(running, sizes.steps) for _ in range(sizes.windows)]
        finally:
            gc.unfreeze()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    return Work(sizes.running, num_waiting, *map(list, zip(*columns, strict=True)))


async def one_window(running: Running, num_steps: int) -> tuple[float, float, float, float]:
    """Per step, ms: the engine's work, processor time of this process, waiting for plans, everything."""
    engine = running.engine
    before, cpu, start = engine.statistics(), time.process_time(), time.perf_counter()
    await until(lambda: engine.statistics().computed_steps >= before.computed_steps + num_steps)
    after, used, taken = engine.statistics(), time.process_time() - cpu, time.perf_counter() - start
    if after.scheduler.num_running != before.scheduler.num_running:
        raise RuntimeError("sequences ended while steps were measured")
    own = after.schedule_s + after.deliver_s - before.schedule_s - before.deliver_s
    count = after.computed_steps - before.computed_steps
    return tuple(round(s / count * 1e3, 4) for s in (own, used, after.plan_s - before.plan_s, taken))


def draw_prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    """Prompts of tokens that both models have."""
    prompts: list[list[int]] = np.random.default_rng(seed).integers(3, 512, (count, length)).tolist()
    return prompts


def tables(ratio: Ratio, works: list[Work]) -> list[Table]:
    first = table(
        "the engine through two processes and in one: tokens per second",
        *("ms per step", "two processes", "one process", "two / one", "to reach"),
        words=0,
    )
    first.add_row(
        *(spread(ratio.step_ms, ".1f"), spread(ratio.two_processes), spread(ratio.one_process)),
        *(f"{ratio.ratio:.3f}", f"{RATIO_TO_REACH}, where a step takes 5 ms or more"),
    )
    second = table(
        "the engine's work per decode step: ms",
        *("sequences", "waiting", "engine", "to reach", "its process, CPU time", "plan, answered meanwhile", "step"),
        words=0,
    )
    for work in works:
        second.add_row(
            *(str(work.num_running), f"{work.num_waiting:,}", spread(work.engine_ms, ".2f"), f"{WORK_TO_REACH_MS}"),
            *(spread(samples, ".2f") for samples in (work.process_ms, work.plan_ms, work.step_ms)),
        )
    return [first, second]


def as_json(sizes: Sizes, ratio: Ratio, works: list[Work]) -> dict[str, Any]:
    return {
        "sizes": asdict(sizes),
        "two_processes_over_one": asdict(ratio) | {"ratio": ratio.ratio},
        "work_per_step": [asdict(work) for work in works],
    }
