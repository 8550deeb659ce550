"""The threads of simulated processes. The code in them is the real one: it runs while the world waits for it.

One of all threads runs at a time, and hands back where it waits: for a lock, an event, a queue, or for time to pass.
An event of the world lets it go on, in its process: one that is paused or has ended runs no thread. So the order of all
runs is the seed's. `Threads` stands for the module `threading`, for the processes of one world.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from robustness.simulation.world import Process, World

Item = TypeVar("Item")

WAKE_S = 20e-6
"""The mean time until a thread that has been woken goes on."""


class ThreadEnded(BaseException):
    """Raised in a thread after the end of its process: nothing of it runs any more."""


class Threads:
    """The threads of a world's processes, and what they wait for."""

    def __init__(self, world: World, numbers: random.Random) -> None:
        """`numbers` draws the time until a thread goes on."""
        self.world = world
        self.current: SimulatedThread | None = None
        """The one that runs; None: the world does, or a loop."""
        self._numbers = numbers
        self._of: dict[Process, list[SimulatedThread]] = {}

    @property
    def process(self) -> Process:
        """The process of which something runs."""
        process = self.world.running if self.current is None else self.current.process
        assert process is not None, "nothing of a process runs"
        return process

    # -- as the module has them

    def Thread(self, *, target: Callable[..., object], args: tuple[Any, ...] = (), **_: Any) -> SimulatedThread:  # noqa: N802
        process = self.process
        if process not in self._of:
            self._of[process] = []
            process.at_end.append(lambda: self._end(process))
        thread = SimulatedThread(self, process, target, args)
        self._of[process].append(thread)
        return thread

    def Lock(self) -> SimulatedLock:  # noqa: N802
        return SimulatedLock(self)

    def Event(self) -> SimulatedEvent:  # noqa: N802
        return SimulatedEvent(self)

    def SimpleQueue(self) -> SimulatedQueue[Any]:  # noqa: N802
        """That of the module `queue`."""
        return SimulatedQueue(self)

    # -- for what waits

    def sleep(self, mean_s: float) -> None:
        """Let time pass, in a thread; a loop has none. Raises ThreadEnded."""
        if self.current is not None:
            self.current.pause(self.draw_s(mean_s))

    def draw_s(self, mean_s: float) -> float:
        return self._numbers.expovariate(1 / mean_s)

    def waiting(self, what: str) -> SimulatedThread:
        """Return the thread that is to wait. A loop must not: then the world fails, and the process ends."""
        if self.current is None:
            self.world.fail(f"{self.process.name}: the event loop waits for a thread: {what}")
            raise ThreadEnded
        return self.current

    def _end(self, process: Process) -> None:
        for thread in self._of.pop(process):
            thread.end()


class SimulatedThread:
    """A thread of a process."""

    def __init__(
        self, threads: Threads, process: Process, target: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.process = process
        self.has_ended = False
        """Its process has."""
        self._threads = threads
        self._work = lambda: target(*args)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_started = self._is_over = False
        self._num_pauses = 0
        self._goes_on, self._hands_back = threading.Semaphore(0), threading.Semaphore(0)

    def start(self) -> None:
        self._thread.start()
        self._is_started = True
        self.wake()

    def join(self, timeout: float) -> None:
        """Wait for its end: as far as it runs without waiting for anything but time."""
        for _ in range(round(1000 * timeout)):
            self._go_on()

    def pause(self, seconds: float | None = None) -> None:
        """Hand back, in the thread itself, for some time or until it is woken. Raises ThreadEnded."""
        if self.has_ended:
            raise ThreadEnded
        self._num_pauses += 1
        if seconds is not None:
            self._later(seconds)
        self._hands_back.release()
        self._goes_on.acquire()
        if self.has_ended:
            raise ThreadEnded

    def wake(self) -> None:
        """Let it go on soon."""
        self._later(self._threads.draw_s(WAKE_S))

    def end(self) -> None:
        """Its process has ended: what it has begun is left as it is."""
        self.has_ended = True
        if self._is_started and self._threads.current is not self:
            self._go_on()

    def _later(self, seconds: float) -> None:
        self._threads.world.after(seconds, self._resume, self._num_pauses, process=self.process)

    def _resume(self, pause: int) -> None:
        if pause == self._num_pauses:
            self._go_on()

    def _go_on(self) -> None:
        """Let it run until it hands back, or ends."""
        if self._is_over:
            return
        before, self._threads.current = self._threads.current, self
        self._num_pauses += 1  # nothing else that would have woken it from this pause does
        self._goes_on.release()
        self._hands_back.acquire()
        self._threads.current = before

    def _run(self) -> None:
        self._goes_on.acquire()
        try:
            if not self.has_ended:
                self._work()
        except ThreadEnded:
            pass
        except BaseException as error:
            self._threads.world.fail(f"{self.process.name}: a thread ends by {error!r}", error)
        finally:
            self._is_over = True
            self._hands_back.release()


class SimulatedLock:
    """One that a loop never waits for: a thread that holds it waits for nothing."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_held = False
        self._waiting: deque[SimulatedThread] = deque()

    def __enter__(self) -> None:
        self._threads.sleep(WAKE_S)
        while self._is_held:
            thread = self._threads.waiting("a lock")
            self._waiting.append(thread)
            thread.pause()
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.popleft().wake()


class SimulatedEvent:
    """One that any may set, and threads wait for."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_set = False
        self._waiting: list[SimulatedThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            self._waiting.pop().wake()

    def wait(self, timeout: float | None = None) -> bool:
        while not self._is_set:
            thread = self._threads.waiting("an event")
            self._waiting.append(thread)
            thread.pause(timeout)
            if thread in self._waiting:
                self._waiting.remove(thread)
            if timeout is not None:
                break
        return self._is_set


class SimulatedQueue(Generic[Item]):
    """One that a single thread reads."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._items: deque[Item] = deque()
        self._reader: SimulatedThread | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._reader.wake()
            self._reader = None

    def get(self) -> Item:
        while not self._items:
            self._reader = self._threads.waiting("a queue")
            self._reader.pause()
        return self._items.popleft()
