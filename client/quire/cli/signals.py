"""Signals: they end a command in order, after it restored the terminal and freed its resources, or wait for a block."""

import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
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
        signal.signal(number, exit_on_signal)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def run_until_signal(main: Coroutine[Any, Any, Answer]) -> Answer:
    """asyncio.run, where SIGTERM and SIGHUP cancel as Ctrl-C does: SystemExit out of a task would not pass quietly.

    Raises SystemExit with 128 + the signal's number. One that is ignored (nohup) stays ignored.
    """
    import asyncio  # not every command has a loop

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


@contextlib.contextmanager
def signals_held(on_signal: Callable[[], None] | None = None) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM are only noted, and `on_signal` is called; they are delivered at its end.

    In other threads than the main one it does nothing: Python runs signal handlers in the main thread.
    """
    if not in_main_thread():
        yield
        return
    noted: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)
        if on_signal is not None:
            on_signal()

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in previous.items():
        if handler is not None:  # one that C code installed can't be put back
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None and signal.getsignal(number) is note:
                signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Within the block the first SIGINT raises KeyboardInterrupt, and later ones do nothing.

    It does nothing in other threads than the main one, and where SIGINT has another handler than Python's own.
    """
    if not in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: None)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_on_signal(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
