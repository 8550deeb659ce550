"""The model thread: runs submitted work in order, so that the gRPC loop never waits for the device.

A device runs launched work by itself. Such work uses two threads: the model thread launches it and takes the next work,
and the collector waits for its end. So a GPU gets its next step before it has finished the current one, even if the
host is slow. Other work begins when all launched work has ended.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

Result = TypeVar("Result")

# Pieces of work that are launched and not collected: one that the device runs, and the next ones. An engine plans as
# many while steps are short.
MAX_UNCOLLECTED = 4


class ModelThread:
    """One thread, one queue. Results come back on the event loop, in the order in which the work was given."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._uncollected: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(MAX_UNCOLLECTED)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "model"), (self._collect, "collector"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Pieces of work given and not ended."""
        return self._num_waiting

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Runs `work` after everything submitted before; call on the event loop.

        The future's callbacks run in order too. Cancelling it does not cancel the work.
        """
        future = self._expect(self._loop.create_future())

        def run() -> None:
            with self._nothing_uncollected():
                self._settle(future, work)

        self._queue.put(run)
        return future

    def submit_ahead(self, launch: Callable[[], Callable[[], Result]]) -> asyncio.Future[Result]:
        """Submit work in two halves: `launch`, on the model thread, returns a function that waits for the
        result.

        That runs on the collector, while the model thread launches the next submission, at most MAX_UNCOLLECTED.
        """
        future = self._expect(self._loop.create_future())

        def run() -> None:
            self._room.acquire()
            try:
                collect = launch()
            except Exception as error:
                collect = functools.partial(_raise, error)
            self._uncollected.put(functools.partial(self._settle, future, collect))

        self._queue.put(run)
        return future

    def _settle(self, future: asyncio.Future[Result], work: Callable[[], Result]) -> None:
        try:
            result = work()
        except Exception as error:
            settle = functools.partial(future.set_exception, error)
        else:
            settle = functools.partial(future.set_result, result)
        self._loop.call_soon_threadsafe(self._ended, future, settle)

    @contextmanager
    def _nothing_uncollected(self) -> Iterator[None]:
        """Waits for all that was launched; on the model thread, so nothing is launched meanwhile."""
        for _ in range(MAX_UNCOLLECTED):
            self._room.acquire()
        try:
            yield
        finally:
            self._room.release(MAX_UNCOLLECTED)

    def _expect(self, future: asyncio.Future[Result]) -> asyncio.Future[Result]:
        self._num_waiting += 1
        self._idle.clear()
        return future

    def whereabouts(self) -> str:
        """Return the worker's line that each thread is at, "model:executor.py:120,collector:transfer.py:52"."""
        frames = sys._current_frames()
        return ",".join(f"{thread.name}:{_own_line(frames.get(thread.ident or 0))}" for thread in self._threads)

    async def idle(self) -> None:
        """Returns when nothing is waiting or running."""
        await self._idle.wait()

    def stop(self) -> None:
        """Ends the threads after the work given so far; does not wait for it."""
        self._queue.put(None)

    def _ended(self, future: asyncio.Future[Result], settle: Callable[[], None]) -> None:
        self._num_waiting -= 1
        if not self._num_waiting:
            self._idle.set()
        if not future.cancelled():
            settle()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
        self._uncollected.put(None)

    def _collect(self) -> None:
        while (collect := self._uncollected.get()) is not None:
            collect()
            self._room.release()


def _raise(error: Exception) -> NoReturn:
    raise error


def _own_line(frame: FrameType | None) -> str:
    """Return the innermost line in a file of the worker."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if Path(__file__).parents[1] in path.parents:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
