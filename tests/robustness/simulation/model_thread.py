"""The model thread of a simulated worker: the same order of work, in virtual time and without threads.

Work is done at the moment at which it begins; what comes of it is known a while later, when a device would have done
it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from robustness.simulation.world import Process

from quire.worker.run.model_thread import MAX_UNCOLLECTED, ModelThread
from quire.worker.service.steps import EndedStep

Result = TypeVar("Result")

WAKE_S = 20e-6
"""The mean time until a thread begins what it was given."""
LEAST_S = 1e-6
LAUNCH_SHARE = 0.1
"""Of the time of a step: its launch takes so much of the thread."""


@dataclass(frozen=True, slots=True)
class Given:
    """A piece of work. `call` returns its result; if is_ahead, a function that waits for the result."""

    future: asyncio.Future[Any]
    call: Callable[[], Any]
    is_ahead: bool


class SimulatedModelThread(ModelThread):
    """Stands for the model thread and the collector of a process."""

    def __init__(self, process: Process, numbers: random.Random, *, mean_step_s: float) -> None:
        """`numbers` draws the time of each piece of work, mean_step_s on average."""
        self._loop = process.loop
        self._process = process
        self._numbers = numbers
        self._mean_step_s = mean_step_s
        self._num_waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._given: deque[Given] = deque()
        self._is_busy = self._is_stopped = False
        self._num_uncollected = 0
        self._device_free_at = 0.0
        self._hangs_s = 0.0

    def hang(self, seconds: float) -> None:
        """Let the next piece of work take so much longer."""
        self._hangs_s += seconds

    def submit(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """See ModelThread.submit."""
        return self._give(work, is_ahead=False)

    def submit_ahead(self, launch: Callable[[], Callable[[], Result]]) -> asyncio.Future[Result]:
        """See ModelThread.submit_ahead."""
        return self._give(launch, is_ahead=True)

    def whereabouts(self) -> str:
        """See ModelThread.whereabouts."""
        return "model:simulated"

    def stop(self) -> None:
        """See ModelThread.stop."""
        self._is_stopped = True

    def _give(self, call: Callable[[], Any], *, is_ahead: bool) -> asyncio.Future[Any]:
        future = self._expect(self._loop.create_future())
        if not self._is_stopped:
            self._given.append(Given(future, call, is_ahead))
            self._after(self._draw_s(WAKE_S), self._begin_next)
        return future

    def _begin_next(self) -> None:
        """Begin the oldest piece of work, if the thread and the device have room for it."""
        if self._is_busy or not self._given:
            return
        if self._num_uncollected >= (MAX_UNCOLLECTED if self._given[0].is_ahead else 1):
            return
        given = self._given.popleft()
        self._is_busy = True
        self._num_uncollected += 1
        step_s, self._hangs_s = self._draw_s(self._mean_step_s) + self._hangs_s, 0.0
        result = _attempt(given.call)
        if given.is_ahead:
            collect = partial(_collect, result, step_s)
            self._after(LAUNCH_SHARE * step_s, self._launched, given.future, collect, step_s)
        else:
            self._after(step_s, self._ended_alone, given.future, result)

    def _launched(self, future: asyncio.Future[Any], collect: Callable[[], Any], step_s: float) -> None:
        """The thread is free, and the device will have done the work after all that it was given before."""
        now = self._process.world.now
        self._is_busy = False
        self._device_free_at = max(self._device_free_at, now) + step_s
        self._after(self._device_free_at - now, self._collect_one, future, collect)
        self._begin_next()

    def _ended_alone(self, future: asyncio.Future[Any], result: Callable[[], Any]) -> None:
        """Work that is not launched ahead has the thread until it ends."""
        self._is_busy = False
        self._collect_one(future, result)

    def _collect_one(self, future: asyncio.Future[Any], collect: Callable[[], Any]) -> None:
        self._num_uncollected -= 1
        self._settle(future, collect)
        self._begin_next()

    def _draw_s(self, mean_s: float) -> float:
        return LEAST_S + self._numbers.expovariate(1 / mean_s)

    def _after(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        self._process.world.after(delay_s, callback, *args, process=self._process)


def _collect(launched: Callable[[], Callable[[], Any]], step_s: float) -> Any:
    """The result of launched work; of a step with the time of the simulated device."""
    result = launched()()
    if not isinstance(result, EndedStep):
        return result
    return replace(result, result=replace(result.result, forward_s=step_s))


def _attempt(call: Callable[[], Result]) -> Callable[[], Result]:
    """Call it; return a function that returns what it returned, or raises what it raised."""
    try:
        result = call()
    except Exception as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error
