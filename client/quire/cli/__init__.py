"""The command line `quire`. Each command's code is imported when the command runs, so that --help answers at once.

__init__.py       the entry point, with ending.py: Ctrl-C is answered in one line from the first moment on
commands.py       the commands, with their flags and help; command_line.py: their group, and errors as messages

up.py             `quire up` (up_flags.py), with starting.py: the progress; restarts.py
launch.py         the services, with service_process.py: one of them, and health.py: it serves
demo.py           `quire demo`
generate.py       `quire generate` (request_flags.py); outages.py
chat.py           `quire chat`
stats.py          `quire stats`, from snapshot.py, drawn by render.py
top.py            `quire top`: its state in top_model.py, its screen in top_view.py
administer.py     `quire leases`, `lookup`, `explain`, `pin`, `reset`, `audit`
token.py, bench.py
signals.py        signals that end a command in order; guarded.py: a child that ends with its parent
"""

import os
import signal
import sys

from quire.cli.ending import end_process, leave_at_once


def main() -> None:
    """Runs the command line; does not return."""
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    import quire.serving.polling  # noqa: F401 - before gRPC is imported, here and in processes that are started
    from quire.cli.commands import quire as command

    try:
        command()
    except SystemExit as leave:
        end_process(leave.code)


if __name__ == "__main__":
    main()
