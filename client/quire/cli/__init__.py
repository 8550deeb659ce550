"""The entry point of `quire`. Small, so that Ctrl-C is answered in one line from the first moment on."""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130


def main() -> None:
    """Runs the command line; does not return."""
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from quire.cli.commands import quire

    try:
        quire()
    except SystemExit as leave:
        end_process(leave.code)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that the program can clean up."""
    if signal.getsignal(signal.SIGINT) is _leave:
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


def _leave(number: int, _: FrameType | None) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
