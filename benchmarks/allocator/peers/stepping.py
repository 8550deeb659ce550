"""The common parts of the drivers of whole schedulers: windows of decode steps, each when a line asks for it.

A line of standard input is a load, `{"num_running": 256, ...}`, or asks for a window of it, `{"steps": 64}`. The answer
is a line of JSON. Needs only the standard library, as workload.py does.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import BLOCK_SIZE, Prompts, settle_garbage

SAMPLED_TOKEN = 7
MAX_STEP_TOKENS = 8192
MAX_SEQUENCE_TOKENS = 32_768
VOCABULARY = 128_256


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that all decode.

    num_running     sequences
    prompt_tokens   of the shortest; one in 16 is as long, so that one in 16 begins a block in each step
    max_new_tokens  more than the windows take
    """

    num_running: int
    prompt_tokens: int
    max_new_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: none is ever evicted, and no sequence preempted."""
        longest = self.prompt_tokens + BLOCK_SIZE + self.max_new_tokens
        return (self.num_running + 1) * (longest // BLOCK_SIZE + 2)

    def prompts(self) -> list[list[int]]:
        """Fresh tokens, as many prompts of each length."""
        prompts = Prompts()
        return [prompts.tokens(self.prompt_tokens + number % BLOCK_SIZE) for number in range(self.num_running)]


class Stopwatch:
    """Wall and processor time by part, summed over the steps of a window. The time between parts does not count."""

    def __init__(self) -> None:
        self.wall_ns: Counter[str] = Counter()
        self.cpu_ns: Counter[str] = Counter()
        self._wall = self._cpu = 0

    def start(self) -> None:
        """Begins a part."""
        self._cpu, self._wall = time.process_time_ns(), time.perf_counter_ns()

    def lap(self, part: str) -> None:
        """Ends a part, and begins the next one."""
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        self.wall_ns[part] += wall - self._wall
        self.cpu_ns[part] += cpu - self._cpu
        self._cpu, self._wall = time.process_time_ns(), time.perf_counter_ns()


class Stepping(Protocol):
    """A scheduler with a load that is decoding."""

    def step(self, watch: Stopwatch) -> int:
        """One decode step, from what decides it to its tokens taken: returns how many sequences had a token."""


def run_window(scheduler: Stepping, load: Load, steps: int) -> dict[str, Any]:
    """Microseconds a step, by part. Raises RuntimeError if a step is not one of all sequences."""
    watch = Stopwatch()
    for _ in range(steps):
        num_tokens = scheduler.step(watch)
        if num_tokens != load.num_running:
            raise RuntimeError(f"a step of {load.num_running} sequences had {num_tokens} tokens")
    return {
        name: {part: taken / steps / 1000 for part, taken in counter.items()}
        for name, counter in (("wall_us", watch.wall_ns), ("cpu_us", watch.cpu_ns))
    }


def drive(make: Callable[[Load], Stepping], *, package: str) -> None:
    """Answers each line of standard input, until there are no more."""
    scheduler: Stepping | None = None
    load: Load | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "steps" not in asked:
            scheduler = None  # its memory is free before the next one takes its own
            load = Load(**asked)
            scheduler = make(load)
            settle_garbage()
            answer: dict[str, Any] = {
                "versions": {package: importlib.metadata.version(package), "python": platform.python_version()}
            }
        else:
            assert scheduler is not None
            assert load is not None
            answer = run_window(scheduler, load, asked["steps"])
        print(json.dumps(answer), flush=True)
