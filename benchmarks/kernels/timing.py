# ruff: noqa: N803
"""The time of a call on the GPU, and the memory's best rate, both by replays of a CUDA graph."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[], object]

MIN_CALLS = 16
"""In a graph, so that starting it is a small part of its time."""
SAMPLE_SECONDS = 0.03
"""The least time of replays per measurement."""
MIN_SAMPLES, MAX_SAMPLES = 7, 50


class Clock(Protocol):
    def measure(self, calls: Sequence[Call]) -> list[float]:
        """Microseconds a call: one sample for each time that all of them ran, one after the other."""


class GraphClock:
    """Captures the calls in one CUDA graph, repeated up to MIN_CALLS, and replays it."""

    def measure(self, calls: Sequence[Call]) -> list[float]:
        chosen = list(itertools.islice(itertools.cycle(calls), len(calls) * math.ceil(MIN_CALLS / len(calls))))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, allocates
                call()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for call in chosen:
                    call()
            graph.replay()
            estimate = self._replay_us(graph)
            samples = min(MAX_SAMPLES, max(MIN_SAMPLES, math.ceil(SAMPLE_SECONDS * 1e6 / estimate)))
            taken = [self._replay_us(graph) / len(chosen) for _ in range(samples)]
        torch.cuda.current_stream().wait_stream(stream)
        graph.reset()
        return taken

    @staticmethod
    def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


class DryClock:
    """Calls everything once, on a CPU: whether it runs. The times mean nothing."""

    def measure(self, calls: Sequence[Call]) -> list[float]:
        start = time.perf_counter()
        for call in calls:
            call()
        return [(time.perf_counter() - start) * 1e6 / len(calls)]


@triton.jit
def _read(
    words_ptr,  # [num_words] int32
    sums_ptr,  # [programs] int32
    num_words,
    WORDS: tl.constexpr,
):
    """Each program reads every so many words and adds them up, 16 bytes a load."""
    start = tl.program_id(0).to(tl.int64) * WORDS
    step = tl.num_programs(0).to(tl.int64) * WORDS
    total = tl.zeros([WORDS], tl.int32)
    for first in range(start, num_words, step):
        total += tl.load(words_ptr + first + tl.arange(0, WORDS))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def read_stream(words: Tensor, sums: Tensor, *, words_per_program: int = 4096) -> None:
    """Read every word once, and write one sum per program.

    words   [n]     int32, n a multiple of words_per_program
    sums    [P]     int32, one per program
    """
    _read[(sums.shape[0],)](words, sums, words.shape[0], WORDS=words_per_program, num_warps=8)


def ceilings(clock: Clock, device: torch.device, *, num_bytes: int) -> dict[str, list[float]]:
    """GB/s of a copy, both directions counted, and of reading alone: a sample per replay."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    sums = torch.empty(8 * 132, dtype=torch.int32, device=device)
    copies = clock.measure([lambda: target.copy_(source)])
    reads = clock.measure([lambda: read_stream(source, sums)])
    return {
        "copy_gb_s": [2 * source.nbytes / each / 1e3 for each in copies],
        "read_gb_s": [source.nbytes / each / 1e3 for each in reads],
    }


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)
