"""Runs a Python module as a process that does not outlive the one that started it. A script, not to be imported.

    python -P guarded.py FD MODULE_OR_FILE [ARGUMENT...]

FD is the reading end of a pipe; only the starting process holds the other end. When that process ends in any way, the
pipe ends, and a thread here sends this process SIGTERM and, if it still runs 5 s later, SIGKILL. The kernel's own
way, PR_SET_PDEATHSIG, watches the thread that started the process and not the process, and only Linux has it.
"""

import os
import runpy
import signal
import sys
import threading

_GRACE_S = 5.0


def _die_with_parent(pipe_fd: int) -> None:
    while os.read(pipe_fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Reads the command line and becomes the module."""
    pipe_fd, target = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(pipe_fd, False)
    threading.Thread(target=_die_with_parent, args=(pipe_fd,), name="die-with-parent", daemon=True).start()
    sys.argv[:] = sys.argv[2:]
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
