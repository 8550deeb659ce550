"""Signals that end a command in order: it restores the terminal and frees its resources first."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@contextlib.contextmanager
def ending_on(*numbers: int) -> Iterator[None]:
    """Within the block these signals end the program in order, except one that is ignored or handled already (nohup).

    SIGHUP is sent when the terminal is closed.
    """
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def run_until_signal(main: Coroutine[Any, Any, Answer]) -> Answer:
    """asyncio.run, where SIGTERM and SIGHUP cancel as Ctrl-C does: SystemExit out of a task would not pass quietly.

    Raises SystemExit with 128 + the signal's number. One that is ignored (nohup) stays ignored.
    """
    received: list[int] = []

    async def cancelled_by_signal() -> Answer:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)

        def cancel(number: int, _: FrameType | None) -> None:
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        numbers = (signal.SIGTERM, signal.SIGHUP)
        found = {number: signal.getsignal(number) for number in numbers}
        previous = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
        for number in previous:
            signal.signal(number, cancel)
        try:
            return await task
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    try:
        return asyncio.run(cancelled_by_signal())
    except asyncio.CancelledError:
        raise SystemExit(128 + received[0]) from None


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
