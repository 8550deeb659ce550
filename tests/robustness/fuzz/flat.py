"""True if a process keeps its size: memory, file descriptors and threads, looked at again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import linear_regression, median

import psutil

WARM_UP_SHARE = 0.3
"""Messages of the warm-up: lazy allocations, tables that grow to their bounds, the allocator's arenas."""
MEMORY_BYTES, MEMORY_BYTES_A_MESSAGE = 8 << 20, 8
"""The allowed growth of a process after that: noise, and far less than the smallest leak."""
MAX_MORE_FILES, MAX_MORE_THREADS = 16, 8


@dataclass(frozen=True, slots=True)
class Sample:
    """A process after so many messages. Only its private memory counts: shared pages change with files."""

    num_sent: int
    memory_bytes: int
    num_files: int
    num_threads: int


@dataclass
class Gauge:
    """One process."""

    name: str
    process: psutil.Process
    samples: list[Sample] = field(default_factory=list)

    def look(self, num_sent: int) -> None:
        with self.process.oneshot():
            memory = self.process.memory_info()
            files, threads = self.process.num_fds(), self.process.num_threads()
        self.samples.append(Sample(num_sent, memory.rss - memory.shared, files, threads))

    @property
    def warm(self) -> list[Sample]:
        """Samples after the warm-up."""
        begin = WARM_UP_SHARE * self.samples[-1].num_sent
        return [sample for sample in self.samples if sample.num_sent >= begin]

    @property
    def growth_bytes(self) -> float:
        """By the line through the samples, from the warm-up's end to the last one."""
        warm = self.warm
        if len(warm) < 3:
            return 0.0
        slope, _ = linear_regression([each.num_sent for each in warm], [each.memory_bytes for each in warm])
        return slope * (warm[-1].num_sent - warm[0].num_sent)

    def problems(self) -> list[str]:
        """The values that have grown."""
        warm, first, last = self.warm, self.samples[0], self.samples[-1]
        allowed = MEMORY_BYTES + MEMORY_BYTES_A_MESSAGE * (last.num_sent - warm[0].num_sent)
        found = []
        if self.growth_bytes > allowed:
            found.append(f"memory grew by {self.growth_bytes / 2**20:.1f} MiB, of {allowed / 2**20:.1f} allowed")
        if median(each.num_files for each in warm) > first.num_files + MAX_MORE_FILES:
            found.append(f"{first.num_files} file descriptors at first, {last.num_files} in the end")
        if median(each.num_threads for each in warm) > first.num_threads + MAX_MORE_THREADS:
            found.append(f"{first.num_threads} threads at first, {last.num_threads} in the end")
        return [f"{self.name}: {problem}" for problem in found]
