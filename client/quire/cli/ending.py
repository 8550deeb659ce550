"""The end of `quire`: on Ctrl-C, or when its command has ended. It imports nothing slow."""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that the program can clean up."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_process(code: str | int | None) -> NoReturn:
    """Ends the process without an orderly exit, which gRPC, once interrupted, can block for ever.

    Call it when all cleanup is done, while the exception that ends the command still keeps gRPC's objects from being
    destroyed.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has ended, or it was closed
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def leave_at_once(number: int, _: FrameType | None) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(EXIT_INTERRUPTED)
