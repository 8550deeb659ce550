"""Deadlines that count the time in which processes could run."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import deadlines
import pytest
from deadlines import MIN_SHARE, Deadline, Threads, share_of_running, threads_of

BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ({}, {}, 1.0),
        ({(1, 1): (50, 50)}, {(1, 1): (50, 50)}, 1.0),
        ({(1, 1): (50, 50)}, {(1, 1): (60, 80)}, 0.25),
        ({(1, 1): (0, 0), (2, 2): (0, 0)}, {(1, 1): (10, 0), (2, 2): (10, 20)}, 0.5),
        ({(1, 1): (900, 0)}, {(2, 2): (10, 30)}, 0.25),
        ({}, {(1, 1): (0, 10)}, MIN_SHARE),
    ],
    ids=["no thread", "idle", "a thread", "two processes", "an ended and a new one", "never a core"],
)
def test_the_share_of_the_time_that_threads_could_run(before: Threads, after: Threads, share: float) -> None:
    assert share_of_running(before, after) == share


def test_a_deadline_counts_less_while_processes_wait_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 8.0, 8.1, 12.0, 16.5])
    readings = iter([{(1, 1): (0, 0)}, *[{(1, 1): (1, 3)}] * 3])
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(deadlines, "threads_of", lambda _: next(readings))
    deadline = Deadline(10.0, lambda: [1])
    passed = [(deadline.has_passed(), deadline.counted_s) for _ in range(4)]
    assert passed == [(False, 2.0), (False, 2.0), (False, 6.0), (True, 10.5)]


@pytest.mark.skipif(not threads_of([os.getpid()]), reason="the kernel does not count waits for a core")
def test_a_process_is_read_while_it_lives() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert sum(ran for ran, _ in threads_of([process.pid]).values()) >= 200_000_000
        process.communicate("\n")
    assert threads_of([process.pid]) == {}
