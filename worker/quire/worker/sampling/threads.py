"""Threads for work that may take long or never end: nothing can end a thread, so it is left to itself.

Work that was set aside goes on, beside other work, at the lowest priority of the system. It counts as stuck when it has
taken STUCK_S of a processor's time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count

STUCK_S = 1.0
"""The time limit of one piece of work, in seconds of a processor."""
MAX_STUCK = 2
"""Threads that may be at work that was given up; while they are so many, no other grammar is compiled."""
LOWEST_PRIORITY = 19
"""Of Linux: such a thread gets a few per cent of a processor that others want."""

_numbers = count()


class Work(Future[None]):
    """The work of a thread, and the time that it takes. Work of less cost is done first."""

    def __init__(self, call: Callable[[], object], *, cost: float = 0.0) -> None:
        super().__init__()
        self._call = call
        self._order = (cost, next(_numbers))
        self._clock = threading.Lock()
        self._begun_at: float | None = None
        self._begun_cpu_s = 0.0
        self._cpu_s: float | None = None
        self._thread = 0
        self._native_thread = 0

    def __lt__(self, other: Work) -> bool:
        return self._order < other._order

    def has_taken(self, seconds: float, *, since: float = 0.0) -> bool:
        """True if a thread has been at it for so long, and since that time of time.monotonic()."""
        return self._begun_at is not None and time.monotonic() - max(self._begun_at, since) >= seconds

    def cpu_s(self) -> float:
        """Return the seconds of a processor that it has taken; where the system does not tell, those since it began."""
        with self._clock:  # its thread can't end meanwhile
            if self._cpu_s is not None:
                return self._cpu_s
            if self._begun_at is None:
                return 0.0
            if not hasattr(time, "pthread_getcpuclockid"):
                return time.monotonic() - self._begun_at
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread)) - self._begun_cpu_s

    def lower_priority(self) -> None:
        """Give the thread that is at it the lowest priority; do no other work on it afterwards."""
        with self._clock:
            if self._begun_at is not None and self._cpu_s is None:
                _lower_priority(self._native_thread)

    def run(self) -> None:
        """Do it, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        with self._clock:
            self._thread, self._native_thread = threading.get_ident(), threading.get_native_id()
            self._begun_cpu_s, self._begun_at = time.thread_time(), time.monotonic()
        error: BaseException | None = None
        try:
            self._call()
        except BaseException as raised:
            error = raised
        with self._clock:
            self._cpu_s = time.thread_time() - self._begun_cpu_s
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)


def _lower_priority(native_thread: int) -> None:
    if sys.platform == "linux":  # elsewhere the number is not of a thread
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, native_thread, LOWEST_PRIORITY)


_given_up: set[Work] = set()
_left: set[Work] = set()


def num_stuck() -> int:
    """Return the number of threads of this process that are at work that was given up or is stuck."""
    for works in (_given_up, _left):
        works.difference_update([work for work in list(works) if work.done()])
    return len(_given_up | {work for work in _left if work.cpu_s() >= STUCK_S})


class Threads:
    """Threads for work that may never end. They don't keep the process from ending."""

    def __init__(self, num_threads: int, name: str, *, is_aside: bool = False) -> None:
        """is_aside: they have the lowest priority, and do the work of the least cost first."""
        self._num_threads = num_threads
        self._name = name
        self._is_aside = is_aside
        self._queue: _Queue | None = None
        self._open: set[Work] = set()

    def submit(self, call: Callable[[], object], *, cost: float = 0.0) -> Work:
        """Run `call` on the next free thread; the future gets its exception, or None."""
        work = Work(call, cost=cost)
        self._open.add(work)
        work.add_done_callback(lambda _: self._open.discard(work))
        self._put(work)
        return work

    def _put(self, work: Work) -> None:
        if self._queue is None:
            self._queue = queue.PriorityQueue() if self._is_aside else queue.SimpleQueue()
            arguments = (self._queue, self._is_aside)
            for _ in range(self._num_threads):
                threading.Thread(target=_work_off, args=arguments, name=self._name, daemon=True).start()
        self._queue.put(work)

    def leave(self) -> None:
        """Leave the running threads to their work: new ones do the queued work and later submissions."""
        left, self._queue = self._queue, None
        if left is None:
            return
        waiting: list[Work] = []
        with contextlib.suppress(queue.Empty):
            while (work := left.get_nowait()) is not _END:
                waiting.append(work)
        for _ in range(self._num_threads):
            left.put(_END)
        _left.update(work for work in list(self._open) if work.running())
        for work in waiting:
            self._put(work)

    def give_up(self) -> None:
        """Leave the running threads, which count as stuck until their work ends."""
        _given_up.update(work for work in list(self._open) if work.running())
        self.leave()


_Queue = queue.SimpleQueue[Work] | queue.PriorityQueue[Work]
_END = Work(lambda: None, cost=float("inf"))


def _work_off(work: _Queue, is_aside: bool) -> None:
    if is_aside:
        _lower_priority(threading.get_native_id())
    while (each := work.get()) is not _END:
        each.run()
