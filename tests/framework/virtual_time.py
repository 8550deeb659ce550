"""An event loop in virtual time: when every task waits, its clock jumps to the next timer. Nothing sleeps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

MAX_TURNS = 100_000
"""Turns of the loop in which no time passes: more of them are a task that never waits."""


class _Selector(selectors.SelectSelector):
    """Waits for no file: the time that it would wait passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._num_turns = 0
        """Since time passed."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        self._num_turns = 0 if timeout > 0.0 else self._num_turns + 1
        if self._num_turns > MAX_TURNS:
            self._num_turns = 0  # tasks are cancelled in further turns
            raise RuntimeError(f"no time has passed in {MAX_TURNS} turns of the loop: a task never waits")
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time begins with 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run a test to its end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)
