"""One process in which many run: each simulated process has its own event loop, and all have one virtual clock.

    World       the clock, the processes, and events of its own: deliveries, faults
    Process     a name, a loop, and what the kernel would do when it is killed

A seed chooses which process runs next, and how long each callback takes. Within a process callbacks run in their order,
as asyncio promises; between processes every order is possible. Time passes only here: an idle world goes to its next
timer at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import math
import random
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

MAX_CALLBACKS = 2_000_000
"""Of one world: more of them are a process that never becomes idle."""
CALLBACKS_BETWEEN_LOOKS = 16
"""The end of a schedule is looked for this often."""
CALLBACKS_BETWEEN_CHECKS = 256
"""The things that processes hold are counted this often."""


class WorldFailed(Exception):
    """Something that must never happen has happened. Its text names it."""


class SimulatedTask(asyncio.Task[Any]):
    """A task with a hash of its own: in sets of tasks the order of all runs is the same."""

    def __init__(self, *args: Any, number: int, **options: Any) -> None:
        self._number = number  # before anything asks for its hash
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedHandle(events.Handle):
    """A callback that will run: asyncio's, made without its questions about debugging."""

    def __init__(self, callback: Callable[..., object], args: Any, loop: Any, context: Any) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled = False
        self._repr = self._source_traceback = None


class ProcessLoop(asyncio.BaseEventLoop):
    """asyncio's loop without a selector: the world runs its callbacks and its timers."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__()
        self._world = world
        self._process = process
        self._num_tasks = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def _make_task(self, _: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> SimulatedTask:
        self._num_tasks += 1
        return SimulatedTask(work, loop=self, number=self._num_tasks, **options)

    def time(self) -> float:
        return self._world.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> events.Handle:  # type: ignore[override]
        handle = SimulatedHandle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> events.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Threads are not simulated: the work is done at once, and its result comes a little later."""
        future = self.create_future()
        try:
            settle = (future.set_result, func(*args))
        except Exception as error:
            settle = (future.set_exception, error)
        self._world.after(self._world.random.uniform(0.0, 0.002), _unless_done, future, *settle, process=self._process)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._process.on_unhandled(context)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass  # it is dropped when its time comes

    def get_debug(self) -> bool:
        return False


class Process:
    """A simulated process of one start: a restart is another one."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.paused_until = 0.0
        self.slowness = 1.0
        """Callbacks take so many times longer."""
        self.clock_offset_s = 0.0
        """Of its machine's wall clock."""
        self.around: contextlib.AbstractContextManager[None] | None = None
        """Entered for each callback: a disk that is full for this process alone."""
        self.at_end: list[Callable[[], None]] = []
        """The kernel's work when the process has ended: it closes files and connections."""
        self.loop = ProcessLoop(world, self)
        self.ready: Any = self.loop._ready  # type: ignore[attr-defined]
        """Callbacks in their order."""
        self.timers: Any = self.loop._scheduled  # type: ignore[attr-defined]
        """A heap."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task of the process. May be called from outside of it."""
        return self.loop.create_task(work)

    def end(self) -> None:
        """Nothing of the process runs from here on; as by SIGKILL. Doing it twice is fine."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.world.bury(self)
        for close in self.at_end:
            close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Its loop is the running one: for calls of its code from outside of it."""
        before = events._get_running_loop()
        events._set_running_loop(self.loop)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def on_unhandled(self, context: dict[str, Any]) -> None:
        """An exception that nobody took, in a living process, is a finding."""
        if self.is_alive:
            error = context.get("exception")
            self.world.fail(f"{self.name}: {context['message']}: {error!r}", error)

    def whereabouts(self) -> list[str]:
        """The lines at which its tasks wait, the innermost last."""
        lines = []
        for task in sorted(asyncio.all_tasks(self.loop), key=hash):
            frames, awaited = [], task.get_coro()
            while awaited is not None:
                frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
                if frame is not None:
                    frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
            lines.append(f"{self.name}: {' > '.join(frames)}")
        return lines

    @property
    def has_work(self) -> bool:
        return bool(self.ready)


class World:
    """The virtual time of one schedule. `random` orders events; who needs numbers of its own has another Random."""

    def __init__(self, seed: int, *, callback_s: float = 5e-6) -> None:
        """callback_s is the mean time that a callback takes."""
        self.now = 1000.0
        self.random = random.Random(seed)
        self.processes: list[Process] = []
        self.running: Process | None = None
        self.num_callbacks = 0
        self.failure: WorldFailed | None = None
        self.is_deceived = False
        """A worker has lied: answers may be wrong, or errors."""
        self.has_lost_copies = False
        """A disk has failed: what was written there may not be read again."""
        self.stop_at: int | None = None
        """The number of the callback before which `on_stop` is called: a fault begins there."""
        self.on_stop: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None
        """Called behind every so many callbacks; changes nothing, and may fail the world."""
        self.tells = False
        """True if somebody reads the story: only then lines are made for it."""
        self.tell: Callable[[str], None] = lambda line: None
        self._callback_s = callback_s
        self._events: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._buried: list[Any] = []  # not freed before the world: nothing of the dead runs meanwhile

    def start(self, name: str) -> Process:
        """A new process."""
        process = Process(self, name)
        self.processes.append(process)
        return process

    def after(self, delay_s: float, callback: Callable[..., None], *args: Any, process: Process | None = None) -> None:
        """Call back after a time: as an event of the world, or in a process, unless it has ended by then."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_events, process, callback, args))

    def fail(self, what: str, error: BaseException | None = None) -> None:
        """Note the first thing that must never happen; the world stops behind the present callback."""
        if self.failure is None:
            self.failure = WorldFailed(what)
            self.failure.__cause__ = error
            self.tell(f"FAILED {what}")

    def bury(self, process: Process) -> None:
        """Forget a process that has ended."""
        self.processes.remove(process)
        self._buried.append((process, list(process.ready), list(process.timers)))
        process.ready.clear()
        process.timers.clear()

    def run_until(
        self, done: Callable[[], bool], *, limit_s: float = math.inf, ends_at: Callable[[], float] | None = None
    ) -> bool:
        """Let time pass until `done`. Returns False if a limit of virtual time comes first. Raises WorldFailed.

        limit_s    from now on
        ends_at    the time at which it ends, which may move meanwhile; then `done` is asked now and then
        """
        before, last = events._get_running_loop(), self.now + limit_s
        events._set_running_loop(None)
        num_between = CALLBACKS_BETWEEN_LOOKS if ends_at is not None else 1
        try:
            while not done():
                if self.now > (last if ends_at is None else ends_at()):
                    return False
                for _ in range(num_between):
                    if not self._step(last):
                        break
                    if self.failure is not None:
                        raise self.failure
                if not self._has_future():
                    return done()
            return True
        finally:
            events._set_running_loop(before)

    def _has_future(self) -> bool:
        return bool(self._events) or any(process.ready or process.timers for process in self.processes)

    def _step(self, last: float) -> bool:
        """Run one callback, or let time pass until the next. Returns False if there is nothing to wait for."""
        now = self.now
        while self._events and self._events[0][0] <= now:
            _, _, process, callback, args = heapq.heappop(self._events)
            if process is None:
                callback(*args)
            elif process.is_alive:
                process.loop.call_soon(callback, *args)
        ready = []
        for process in self.processes:
            if process.paused_until > now:
                continue
            timers = process.timers
            while timers and (timers[0]._when <= now or timers[0]._cancelled):
                timer = heapq.heappop(timers)
                timer._scheduled = False
                if not timer._cancelled:
                    process.ready.append(timer)
            if process.ready:
                ready.append(process)
        if ready:
            self._run_one(ready[0] if len(ready) == 1 else ready[int(self.random.random() * len(ready))])
            return True
        following = self._next_time()
        if following is None:
            return False
        self.now = max(now, min(following, last + 1e-9))
        return True

    def _run_one(self, process: Process) -> None:
        self.num_callbacks += 1
        if self.num_callbacks > MAX_CALLBACKS:
            self.fail(f"{MAX_CALLBACKS} callbacks and no end; {process.name} runs")
        if self.stop_at is not None and self.num_callbacks >= self.stop_at:
            self.on_stop()
            if not process.has_work or process.paused_until > self.now:
                return
        handle = process.ready.popleft()
        if handle._cancelled:
            return
        self.running = process
        events._set_running_loop(process.loop)
        if process.around is None:
            handle._run()
        else:
            with process.around:
                handle._run()
        self.running = None
        self.now += self._callback_s * process.slowness * (0.5 + self.random.random())
        if self.num_callbacks % CALLBACKS_BETWEEN_CHECKS == 0:
            self.check()

    def _next_time(self) -> float | None:
        """The time of the next timer or event; None if there is none."""
        times = [self._events[0][0]] if self._events else []
        for process in self.processes:
            if process.ready:
                times.append(process.paused_until)
            elif process.timers:
                times.append(max(process.timers[0]._when, process.paused_until))
        return min(times, default=None)


def _unless_done(future: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)
