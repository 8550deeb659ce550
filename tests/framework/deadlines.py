"""The longest wait of a test for what must happen.

Only a failure waits so long, so that it is generous: a machine with many other processes is slower by a factor.
A test that waits for what must not happen has a short time of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

DEADLINE_S = 120.0
INTERVAL_S = 0.25
"""The least time between two readings."""
MIN_SHARE = 0.05
"""The least part of the time that counts. So a hang of processes that are never idle is found, too."""

Threads = dict[tuple[int, int], tuple[int, int]]
"""By process and thread: nanoseconds that it ran, and that it waited for a core."""


class Deadline:
    """The end of a wait for processes: it counts the time in which they could run.

    Between two readings the threads of the processes ran for some time, and waited for a core for some. Only the share
    that they ran counts. If they did neither, all of the time counts: nothing but themselves holds them up. Where the
    kernel does not tell (/proc/PID/task/TID/schedstat), all of the time counts, too.
    """

    def __init__(self, timeout_s: float, pids: Callable[[], Iterable[int]]) -> None:
        self._timeout_s = timeout_s
        self._pids = pids
        self._threads = threads_of(pids())
        self._read_at = self._begun_at = time.monotonic()
        self.counted_s = 0.0

    def has_passed(self) -> bool:
        now = time.monotonic()
        if now - self._read_at >= INTERVAL_S:
            threads = threads_of(self._pids())
            self.counted_s += (now - self._read_at) * share_of_running(self._threads, threads)
            self._threads, self._read_at = threads, now
        return self.counted_s >= self._timeout_s

    def __str__(self) -> str:
        waited_s = time.monotonic() - self._begun_at
        return f"{self._timeout_s:g} s in which the processes could run, {waited_s:.0f} s in all"


def share_of_running(before: Threads, after: Threads) -> float:
    """Return the part of the time that the threads did not wait for a core, from MIN_SHARE to 1."""
    pairs = [(before.get(thread, (0, 0)), times) for thread, times in after.items()]
    ran, waited = (sum(then[part] - first[part] for first, then in pairs) for part in (0, 1))
    return max(MIN_SHARE, ran / (ran + waited)) if ran + waited else 1.0


def threads_of(pids: Iterable[int]) -> Threads:
    """Read the threads of those processes that have not ended."""
    return {(pid, int(task.name)): times for pid in pids for task in tasks_of(pid) if (times := times_of(task))}


def tasks_of(pid: int) -> list[Path]:
    try:
        return [*Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def times_of(task: Path) -> tuple[int, int] | None:
    try:
        ran, waited, _ = map(int, (task / "schedstat").read_text().split())
    except (OSError, ValueError):
        return None
    return ran, waited
