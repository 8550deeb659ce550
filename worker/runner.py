"""The model thread: runs what it is given in order, so that the gRPC loop never waits for the device."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class ModelThread:
    """One thread, one queue. Results come back on the event loop, in the order in which the work was given."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Pieces of work given and not ended."""
        return self._num_waiting

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Runs `work` after everything submitted before; call on the event loop.

        The future's callbacks run in order too. Cancelling it does not cancel the work.
        """
        future: asyncio.Future[Result] = self._loop.create_future()
        self._num_waiting += 1
        self._idle.clear()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                settle = functools.partial(future.set_exception, error)
            else:
                settle = functools.partial(future.set_result, result)
            self._loop.call_soon_threadsafe(self._ended, future, settle)

        self._queue.put(run)
        return future

    async def idle(self) -> None:
        """Returns when nothing is waiting or running."""
        await self._idle.wait()

    def stop(self) -> None:
        """Ends the thread after the work given so far; does not wait for it."""
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
