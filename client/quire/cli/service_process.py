"""One service as a child process: start, wait until it serves, end, the end of its log.

exceptions      LaunchError
                  ServiceExitedError     the process ended before it was serving
                  ServiceTimeoutError    it lives, but did not say SERVING in time
"""

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from quire.cli.signals import signals_held

STOP_TIMEOUT_S = 10.0
_GUARDED = Path(__file__).with_name("guarded.py")
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 30
_POLL_S = 0.05
_EXIT_POLL_S = 0.01
WORKER_START_TIMEOUT_S = 600.0  # a model may have to be downloaded


class LaunchError(Exception):
    """A service could not be started."""


class ServiceExitedError(LaunchError):
    """The process ended before it was serving; the message has the end of its log."""


class ServiceTimeoutError(LaunchError):
    """The process lives but its health did not become SERVING in time; the message has the end of its log."""


class ServiceProcess:
    """One service: a command, its address, and its process if it runs.

    name         for messages ("cachemgr")
    target       module or .py file to run with this interpreter
    address      the address of its health check ("unix:/run/q/worker.sock")
    environment  variables of its environment beside ours
    log_path     file that gets its stdout and stderr; None: they go to ours
    """

    def __init__(
        self,
        name: str,
        *,
        target: str,
        arguments: Sequence[str],
        address: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        log_path: Path | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.log_path = log_path
        self._target = target
        self._arguments = tuple(arguments)
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_running = False
        self._has_served = False
        self._log_begin = 0
        self._on_exit: Callable[[], None] | None = None
        self._watch: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None before the first start. After an exit it is the last process's."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the last process, negative for a signal; None while it runs or before the first start."""
        return None if self._process is None else self._process.returncode

    @property
    def is_running(self) -> bool:
        """True if the process exists."""
        return self._is_running

    @property
    def is_serving(self) -> bool:
        """True if the process exists, and has been seen to serve."""
        return self._has_served and self._is_running

    def start(self) -> None:
        """Starts the process; does not wait for it. Raises LaunchError if it runs already."""
        if self.is_running:
            raise LaunchError(f"{self.name} runs already (pid {self.pid})")
        with signals_held():
            self._spawn()

    def wait_serving(self, timeout_s: float) -> None:
        """Waits until its health is SERVING. Raises ServiceExitedError or ServiceTimeoutError."""
        wait_all_serving({self: timeout_s})

    def watch_start(self, timeout_s: float, outcomes: queue.SimpleQueue[BaseException | None]) -> None:
        """Watches its health on another thread, and puts None once it is SERVING, or what wait_serving would raise."""
        # On a thread of its own: a KeyboardInterrupt out of the midst of a call leaves gRPC's locks taken for ever.
        # It ends by itself when the process does, and is waited for then: gRPC is not to be left in the midst of
        # something when the interpreter ends.

        def watch() -> None:
            try:
                self._watch_health(timeout_s)
            except BaseException as error:
                outcomes.put(error)
            else:
                self._has_served = True
                outcomes.put(None)

        self._watch = threading.Thread(target=watch, name=f"health-{self.name}", daemon=True)
        self._watch.start()

    def _watch_health(self, timeout_s: float) -> None:
        from quire.cli.health import await_serving  # gRPC, while the process starts

        answered = await_serving(self.address, timeout_s, self._called_on_exit)
        if answered is not None:
            self._raise_not_serving(timeout_s, answered)

    def wait_exited(self, timeout_s: float | None = None) -> bool:
        """Waits until the process has ended. Returns False if the time ran out."""
        # By looking again and again: an interrupt in the midst of threading.Event.wait can leave its lock taken.
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._is_running:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(_EXIT_POLL_S, left_s))
        return True

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Ends it with SIGTERM, after `timeout_s` with SIGKILL; returns its exit status. Nothing to do: fine."""
        if self.is_running and self._process is not None:
            self._process.terminate()
            if not self.wait_exited(timeout_s):
                self.kill()
        self._await_watch()
        return self.returncode

    def kill(self) -> int | None:
        """Ends it with SIGKILL and waits; returns its exit status. Nothing to do: fine."""
        if self.is_running and self._process is not None:
            self._process.kill()
            self.wait_exited()
        return self.returncode

    def _await_watch(self) -> None:
        if self._watch is not None and self._watch.is_alive():
            self._watch.join(STOP_TIMEOUT_S)

    def restart(self, timeout_s: float = WORKER_START_TIMEOUT_S) -> None:
        """Ends it if it runs, starts it with the same command and waits until it serves. Raises LaunchError."""
        self.terminate()
        self.start()
        self.wait_serving(timeout_s)

    def log_tail(self) -> str:
        """The last lines of the log since the last start, empty if it has none of its own."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_begin, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _spawn(self) -> None:
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-P", str(_GUARDED), str(read_fd), self._target, *self._arguments]
        try:
            with contextlib.ExitStack() as stack:
                output = None if self.log_path is None else stack.enter_context(self.log_path.open("ab"))
                self._log_begin = 0 if output is None else output.tell()
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **self._environment},
                    pass_fds=(read_fd,),
                    start_new_session=True,  # Ctrl-C in the terminal is ours to handle
                )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        self._process = process
        self._has_served = False
        self._is_running = True
        threading.Thread(target=self._reap, args=(process, write_fd), name=f"reap-{self.name}", daemon=True).start()

    def _reap(self, process: subprocess.Popen[bytes], write_fd: int) -> None:
        process.wait()
        os.close(write_fd)
        self._is_running = False
        callback = self._on_exit
        if callback is not None:
            callback()

    @contextlib.contextmanager
    def _called_on_exit(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls back if the process ends, or has ended; perhaps twice, perhaps a moment after the block.

        Both sides write, then read, so no lock is needed. One could stay locked if Ctrl-C came at the wrong moment.
        """
        self._on_exit = callback
        try:
            if not self._is_running:
                callback()
            yield
        finally:
            self._on_exit = None

    def _raise_not_serving(self, timeout_s: float, answered: str = "") -> NoReturn:
        """Raise ServiceExitedError or ServiceTimeoutError. `answered`: its health; "": the time is over."""
        if self.wait_exited(STOP_TIMEOUT_S if answered else 0.0):
            raise ServiceExitedError(f"{self.name} {_describe_exit(self.returncode)} at start{self._tail_text()}")
        what = answered or f"was not serving within {timeout_s:g} s"
        raise ServiceTimeoutError(f"{self.name} (pid {self.pid}) {what}{self._tail_text()}")

    def describe_exit(self) -> str:
        """Return how the last process ended, with the last lines of its log."""
        return f"{self.name} {_describe_exit(self.returncode)}{self._tail_text()}"

    def _tail_text(self) -> str:
        tail = self.log_tail()
        return f"; the end of its log:\n{tail}" if tail else ""


def wait_all_serving(timeouts_s: Mapping[ServiceProcess, float]) -> None:
    """Waits until the health of each of these services is SERVING, for at most its time.

    Raises the ServiceExitedError or ServiceTimeoutError of the first that fails, without waiting for the others.
    """
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for service, timeout_s in timeouts_s.items():
        service.watch_start(timeout_s, outcomes)
    for _ in timeouts_s:
        if (error := outcomes.get()) is not None:
            raise error


class GatewayProcess(ServiceProcess):
    """The gateway, with its health check over HTTP on its unix socket."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.urls: tuple[str, ...] = ()
        """The URLs at which it serves HTTP over TCP, once it serves."""

    def _watch_health(self, timeout_s: float) -> None:
        from quire.cli.health import ask_ready

        deadline, path = time.monotonic() + timeout_s, self.address.removeprefix("unix:")
        while not self.wait_exited(_POLL_S) and time.monotonic() < deadline:
            if (addresses := ask_ready(path)) is not None:
                self.urls = tuple(each for each in addresses if not each.startswith("unix:"))
                return
        self._raise_not_serving(timeout_s)


class HolderProcess(ServiceProcess):
    """The holder of a worker's memory. It serves once its socket is there: a worker waits until it listens."""

    def _watch_health(self, timeout_s: float) -> None:
        deadline, path = time.monotonic() + timeout_s, Path(self.address.removeprefix("unix:"))
        while not self.wait_exited(_POLL_S) and time.monotonic() < deadline:
            if path.is_socket():
                return
        self._raise_not_serving(timeout_s)


def _describe_exit(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        cause = " (Linux sends it when memory runs out)" if returncode == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-returncode).name}{cause}"
    return f"ended with status {returncode}"
