"""Ends a worker if a step does not end: a kernel that hangs, or a device that does not answer.

    the oldest step was checked for    what happens
    limit_s                             health NOT_SERVING, and a line in the log
    2 * limit_s                         the process ends with an error; its supervisor starts another

A step that ends in between makes the worker SERVING again. Time is counted in checks, and not read from a clock: a
process that was stopped by a signal has made no checks, so its steps are no older than before. Nothing is watched
before the worker serves, when a model may load and compile for minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from quire.worker.grant.decoding import AcceptedStep

log = logging.getLogger(__name__)

LOOKS_PER_LIMIT = 20

# By the device's type. A step on a CPU has no limit: with a large model it may take minutes.
DEFAULT_LIMIT_S = {"cpu": 0.0, "cuda": 120.0}
GROUP_LIMIT_S = 120.0
"""The limit of a worker of several ranks, on any device: a rank that hangs makes the others wait."""


class StuckStepError(Exception):
    """A step has not ended in twice its limit. The thread that waits for it can't be ended; the process can."""


class Look(Enum):
    """The finding of one look at the oldest step."""

    NOTHING_NEW = "nothing new"
    STUCK = "stuck"
    MOVES_AGAIN = "moves again"


@dataclass(frozen=True, slots=True)
class WatchdogActions:
    """Callbacks for a step that is stuck and for its late end; and a function that lists the threads' stacks."""

    on_stuck: Callable[[], Awaitable[None]]
    on_moves_again: Callable[[], Awaitable[None]]
    whereabouts: Callable[[], str]


class Watchdog:
    """Looks at the oldest step in flight again and again. `limit_s` is above 0."""

    def __init__(self, oldest: Callable[[], AcceptedStep | None], actions: WatchdogActions, *, limit_s: float) -> None:
        """`oldest` returns the step that all others in flight wait for, always the same object, or None."""
        self._oldest = oldest
        self._actions = actions
        self._limit_s = limit_s
        self._watched: AcceptedStep | None = None
        self._num_looks = 0

    async def run(self) -> None:
        """Look for ever. Raises StuckStepError."""
        while True:
            await asyncio.sleep(self._limit_s / LOOKS_PER_LIMIT)
            match self.look():
                case Look.STUCK:
                    await self._actions.on_stuck()
                case Look.MOVES_AGAIN:
                    await self._actions.on_moves_again()

    def look(self) -> Look:
        """Compare the oldest step with that of the last look. Raises StuckStepError after twice the limit."""
        step = self._oldest()
        if step is self._watched and step is not None:
            self._num_looks += 1
            return self._judge(step)
        was_stuck = self._num_looks >= LOOKS_PER_LIMIT
        self._watched, self._num_looks = step, 0
        if not was_stuck:
            return Look.NOTHING_NEW
        log.warning("the step that did not end has ended: serving again")
        return Look.MOVES_AGAIN

    def _judge(self, step: AcceptedStep) -> Look:
        if self._num_looks == LOOKS_PER_LIMIT:
            log.error("step does not end: not serving until it does %s", self._describe(step))
            return Look.STUCK
        if self._num_looks >= 2 * LOOKS_PER_LIMIT:
            raise StuckStepError(f"step does not end: the worker stops {self._describe(step)}")
        return Look.NOTHING_NEW

    def _describe(self, step: AcceptedStep) -> str:
        grant, age_s = step.grant, self._num_looks * self._limit_s / LOOKS_PER_LIMIT
        return (
            f"step={grant.step_number} tokens={sum(grant.run_token_counts)} sequences={len(grant.run_sequence_ids)} "
            f"copied_blocks={len(grant.copy_source_block_ids)} age_s={age_s:.0f} at={self._actions.whereabouts()}"
        )
