"""The time of a call on the GPU, and the memory's best rate, both by replays of a CUDA graph."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from memory_reading import NUM_PROGRAMS, read_stream

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


def ceilings(clock: Clock, device: torch.device, *, num_bytes: int) -> dict[str, list[float]]:
    """GB/s of a copy, both directions counted, and of reading alone: a sample per replay."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    sums = torch.empty(NUM_PROGRAMS, dtype=torch.int32, device=device)
    copies = clock.measure([lambda: target.copy_(source)])
    reads = clock.measure([lambda: read_stream(source, sums)])
    return {
        "copy_gb_s": [2 * source.nbytes / each / 1e3 for each in copies],
        "read_gb_s": [source.nbytes / each / 1e3 for each in reads],
    }


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)
