"""The entry point of `quire`. Small, so that Ctrl-C is answered in one line from the first moment on."""

import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 130


def main() -> None:
    """Runs the command line; does not return."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from quire.client.commands import quire

    quire()


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again: there may be something to undo."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, _: FrameType | None) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
