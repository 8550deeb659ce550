"""A process that has imported what the services need, and forks them: a worker is there in a second, not in six.

The children are the real processes from their `main` on. Speaks JSON lines with the one that started it:

    {"start": id, "kind", "arguments", "log"}   ->  {"started": id, "pid"}
    {"signal": number, "pid"}                       without effect on a child that has ended
                                                <-  {"ended": pid, "status"}     negative: by this signal

When its input ends, or it dies, so do all of its children.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

# isort: split
from faults import client
from model_zoo import save

import quire.client.engine
import quire.worker.process  # noqa: F401
from quire.cachemgr.__main__ import main as cachemgr_main
from quire.worker.__main__ import main as worker_main

PR_SET_PDEATHSIG = 1
MAINS: dict[str, Callable[[list[str]], Any]] = {
    "cachemgr": lambda arguments: cachemgr_main(arguments, prog_name="quire cachemgr"),
    "worker": lambda arguments: worker_main(arguments, prog_name="quire worker"),
    "client": client.main,
}


class Nursery:
    """The children that live."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._libc = ctypes.CDLL(None)

    def start(self, kind: str, arguments: list[str], log: str) -> int:
        """Forks one; returns its pid."""
        parent = os.getpid()
        if pid := os.fork():
            self._pids.add(pid)
            return pid
        try:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            become(log)
            MAINS[kind](arguments)
            os._exit(0)
        except SystemExit as ended:
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    def send(self, pid: int, number: int) -> None:
        if pid in self._pids:
            os.kill(pid, number)

    def reap(self) -> list[dict[str, int]]:
        """Who has ended since."""
        ended = []
        for pid in list(self._pids):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._pids.discard(pid)
                ended.append({"ended": pid, "status": os.waitstatus_to_exitcode(status)})
        return ended

    def close(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def become(log: str) -> None:
    """A process of its own: output to its log, no input, signals as usual."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.closerange(3, 64)


def main() -> None:
    """The first argument is a folder: the model that workers load is made there before anything is answered."""
    make_model(Path(sys.argv[1]))
    nursery = Nursery()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    say({"ready": True})
    pending = b""
    try:
        while True:
            ready, _, _ = select.select([0, wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
                for event in nursery.reap():
                    say(event)
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    obey(nursery, json.loads(line))
    finally:
        nursery.close()


def make_model(folder: Path) -> None:
    """In a child: it starts threads, and who has threads must not fork."""
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    save("llama", folder)
    os._exit(0)


def obey(nursery: Nursery, order: dict[str, Any]) -> None:
    if "start" in order:
        pid = nursery.start(order["kind"], order["arguments"], order["log"])
        say({"started": order["start"], "pid": pid})
    else:
        nursery.send(order["pid"], order["signal"])


def say(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    main()
