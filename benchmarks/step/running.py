"""Running steps as the worker's model thread does: some are launched before the one in front of them is collected."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from quire.worker.grant.decoding import AcceptedStep
from quire.worker.run.executor import Outcome, StepResult
from quire.worker.run.model_thread import MAX_UNCOLLECTED


class Launched(Protocol):
    """A step that the device has all work of."""

    def collect(self) -> StepResult:
        """Wait for the step's end."""


class Launches(Protocol):
    """An Executor, or a part of it."""

    runs_ahead: bool
    """True if it pays to launch a step before earlier ones are collected."""

    def launch(self, step: AcceptedStep) -> Launched:
        """Give the device all work of a step."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A step's result, and the seconds since the one before it was collected; of the first one since its launch."""

    result: StepResult
    seconds: float


def steps_in_flight(executor: Launches) -> int:
    """Return how many steps the worker launches before it waits for the first of them."""
    return MAX_UNCOLLECTED if executor.runs_ahead else 1


def run_steps(
    executor: Launches,
    steps: Iterable[AcceptedStep],
    *,
    in_flight: int,
    seconds: float = float("inf"),
    synchronize: Callable[[], None] = lambda: None,
) -> list[Ended]:
    """Run the steps, with so many launched before the first of them is collected; 1: each by itself.

    No step is launched after so many seconds. `synchronize` waits for the device; it is called before a step that is
    by itself. Raises RuntimeError if a step is not computed.
    """
    launched: deque[Launched] = deque()
    ended: list[Ended] = []
    began = last = time.perf_counter()

    def collect() -> None:
        nonlocal last
        result = computed(launched.popleft().collect())
        now = time.perf_counter()
        ended.append(Ended(result, now - last))
        last = now

    for step in steps:
        if len(launched) == in_flight:
            collect()
        if time.perf_counter() - began > seconds:
            break
        if in_flight == 1:
            synchronize()
            last = time.perf_counter()
        launched.append(executor.launch(step))
    while launched:
        collect()
    return ended


def computed(result: StepResult) -> StepResult:
    """Return the result. Raises RuntimeError if the step was not computed."""
    if result.outcome is not Outcome.COMPUTED:
        raise RuntimeError(f"step {result.step_number} ended {result.outcome.value}")
    return result
