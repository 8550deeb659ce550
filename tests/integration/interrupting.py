"""Ctrl-C from inside, for programs that tests start: at any moment, without waiting for chance."""

import signal
import sys
from types import FrameType
from typing import Any


def interrupt_at(moment: int) -> None:
    """Raise SIGINT once, at so many calls, lines and returns from now on, of functions called from here on."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal moment
        moment -= 1
        if moment == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
