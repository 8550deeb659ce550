"""The services on this machine as child processes: `quire up`, the demo and the integration tests.

    with LocalServices.start(model="deploy/demo/model", num_blocks=256) as services:
        Engine.connect(services.cachemgr_address)

After the block nothing is left, also after an exception. Each child is ended by its own handle: SIGTERM first, SIGKILL
after a bounded wait. Its socket and the folder made for it are removed. While services run, SIGTERM to this process
becomes SystemExit(143), unless the program has a handler for it, so that it ends in the same way as Ctrl-C. Signals
that come while a child is being created are delayed until its handle is kept. If this process is killed with SIGKILL,
the children notice it by a pipe and end by themselves; only then the folder stays.

    exceptions      LaunchError
                      ServiceExitedError     the process ended before it was serving
                      ServiceTimeoutError    it lives, but did not say SERVING in time
"""

import asyncio
import atexit
import contextlib
import http.client
import json
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import grpc
from grpc_health.v1 import health_pb2

from quire.serving import addresses
from quire.serving.runtime_folder import MAX_SOCKET_PATH_BYTES, short_temporary_folder

CACHEMGR_START_TIMEOUT_S = 30.0
GATEWAY_START_TIMEOUT_S = 60.0
WORKER_START_TIMEOUT_S = 600.0  # a model may have to be downloaded
STOP_TIMEOUT_S = 10.0

_GUARDED = Path(__file__).with_name("guarded.py")
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 30
_POLL_S = 0.05
_EXIT_POLL_S = 0.01
_DEATH_POLL_S = 0.2
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 200),
)


class LaunchError(Exception):
    """A service could not be started."""


class ServiceExitedError(LaunchError):
    """The process ended before it was serving; the message has the end of its log."""


class ServiceTimeoutError(LaunchError):
    """The process lives but its health did not become SERVING in time; the message has the end of its log."""


class ServiceProcess:
    """One service: a command, its address, and its process if it runs.

    name      for messages ("cachemgr")
    target    module or .py file to run with this interpreter
    address   the address of its health check ("unix:/run/q/worker.sock")
    log_path  file that gets its stdout and stderr; None: they go to ours
    """

    def __init__(
        self, name: str, *, target: str, arguments: Sequence[str], address: str, log_path: Path | None = None
    ) -> None:
        self.name = name
        self.address = address
        self.log_path = log_path
        self._target = target
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_running = False
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

    def start(self) -> None:
        """Starts the process; does not wait for it. Raises LaunchError if it runs already."""
        if self.is_running:
            raise LaunchError(f"{self.name} runs already (pid {self.pid})")
        with signals_held():
            self._spawn()

    def wait_serving(self, timeout_s: float) -> None:
        """Waits until its health is SERVING. Raises ServiceExitedError or ServiceTimeoutError."""
        # On a thread of its own: a KeyboardInterrupt out of the midst of a call leaves gRPC's locks taken for ever.
        # It ends by itself when the process does, and is waited for then: gRPC is not to be left in the midst of
        # something when the interpreter ends.
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def watch() -> None:
            try:
                self._watch_health(timeout_s)
            except BaseException as error:
                outcome.put(error)
            else:
                outcome.put(None)

        self._watch = threading.Thread(target=watch, name=f"health-{self.name}", daemon=True)
        self._watch.start()
        error = outcome.get()
        if error is not None:
            raise error

    def _watch_health(self, timeout_s: float) -> None:
        with grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            call = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            watch: Any = call(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=timeout_s)
            with self._called_on_exit(watch.cancel):
                self._await_serving(watch, timeout_s)

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
        """The last lines of its log, empty if it has none of its own."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _spawn(self) -> None:
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-P", str(_GUARDED), str(read_fd), self._target, *self._arguments]
        try:
            with contextlib.ExitStack() as stack:
                output = None if self.log_path is None else stack.enter_context(self.log_path.open("ab"))
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(read_fd,),
                    start_new_session=True,  # Ctrl-C in the terminal is ours to handle
                )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        self._process = process
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

    def _await_serving(self, watch: Any, timeout_s: float) -> None:
        try:
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError:
            pass  # the code says how it ended
        finally:
            watch.cancel()
        timed_out = watch.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # A stream that broke otherwise means that the process is about to end.
        self._raise_not_serving(timeout_s, "" if timed_out else f"answered {watch.code()}")

    def _raise_not_serving(self, timeout_s: float, answered: str = "") -> NoReturn:
        """Raise ServiceExitedError or ServiceTimeoutError; `answered` is what else the process did, if anything."""
        if self.wait_exited(STOP_TIMEOUT_S if answered else 0.0):
            raise ServiceExitedError(f"{self.name} {_describe_exit(self.returncode)} at start{self._tail_text()}")
        what = answered or f"was not serving within {timeout_s:g} s"
        raise ServiceTimeoutError(f"{self.name} (pid {self.pid}) {what}{self._tail_text()}")

    def _tail_text(self) -> str:
        tail = self.log_tail()
        return f"; the end of its log:\n{tail}" if tail else ""


class GatewayProcess(ServiceProcess):
    """The gateway, with its health check over HTTP on its unix socket."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.urls: tuple[str, ...] = ()
        """The URLs at which it serves HTTP over TCP, once it serves."""

    def _watch_health(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.wait_exited(_POLL_S) and time.monotonic() < deadline:
            if (addresses := self._ask_ready()) is not None:
                self.urls = tuple(each for each in addresses if not each.startswith("unix:"))
                return
        self._raise_not_serving(timeout_s)

    def _ask_ready(self) -> list[str] | None:
        """Return where it serves; None if it does not yet."""
        connection = _UnixConnection(self.address.removeprefix("unix:"))
        try:
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            found: list[str] | None = json.loads(answer.read())["addresses"] if answer.status == 200 else None
            return found
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=STOP_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class LocalServices:
    """cachemgr and worker, and perhaps a gateway, on unix sockets in one folder.

    As a context manager, `with` or `async with`, it starts them, and ends them at the block's end; `start` does the
    first part at once. After it, `cachemgr` and `worker` are their processes.

    model                 path or hub id for the worker
    num_blocks            size of its pool; None: the worker decides
    extra_cachemgr_args, extra_worker_args, extra_gateway_args
                          further flags
    http_listen           the gateway's address for HTTP, beside its unix socket; None: there is no gateway
    runtime_dir           folder for sockets and logs. None: one is made, and removed at the end. One that is given is
                          made if missing, and keeps the logs
    output                "files": a log file per service in the folder; "inherit": to ours
    cachemgr_target, worker_target
                          module or .py file to run
    """

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        num_blocks: int | None = None,
        extra_cachemgr_args: Sequence[str] = (),
        extra_worker_args: Sequence[str] = (),
        http_listen: Sequence[str] | None = None,
        extra_gateway_args: Sequence[str] = (),
        runtime_dir: str | os.PathLike[str] | None = None,
        output: str = "files",
        worker_start_timeout_s: float = WORKER_START_TIMEOUT_S,
        cachemgr_target: str = "quire.cachemgr",
        worker_target: str = "quire.worker",
    ) -> None:
        if output not in ("files", "inherit"):
            raise ValueError(f"output={output!r}: neither 'files' nor 'inherit'")
        self._model = os.fspath(model)
        self._pool_arguments = () if num_blocks is None else ("--num-blocks", str(num_blocks))
        self._extra_cachemgr_args = tuple(extra_cachemgr_args)
        self._extra_worker_args = tuple(extra_worker_args)
        self._http_listen = None if http_listen is None else tuple(http_listen)
        self._extra_gateway_args = tuple(extra_gateway_args)
        self._given_dir = None if runtime_dir is None else Path(runtime_dir).absolute()
        self._output = output
        self._worker_start_timeout_s = worker_start_timeout_s
        self._cachemgr_target = cachemgr_target
        self._worker_target = worker_target
        self._own_dir: Path | None = None
        self._services: list[ServiceProcess] = []
        self._is_stopped = False
        self._stop_lock = threading.RLock()
        self._previous_sigterm: Any = None

    @classmethod
    def start(cls, **options: Any) -> Self:
        """Makes one with these options (the constructor's) and starts the services.

        Returns when all say SERVING. Raises LaunchError, with the end of the log of the service that failed; then, as
        after any exception, nothing is left running.
        """
        services = cls(**options)
        services._start()
        return services

    @property
    def cachemgr(self) -> ServiceProcess:
        """The block manager's process."""
        return self._services[0]

    @property
    def worker(self) -> ServiceProcess:
        """The worker's process."""
        return self._services[1]

    @property
    def gateway(self) -> GatewayProcess | None:
        """The gateway's process; None if there is none."""
        return next((each for each in self._services if isinstance(each, GatewayProcess)), None)

    @property
    def all(self) -> tuple[ServiceProcess, ...]:
        """All processes, in the order in which they start."""
        return tuple(self._services)

    @property
    def cachemgr_address(self) -> str:
        """The address of cachemgr for clients."""
        return self.cachemgr.address

    @property
    def worker_address(self) -> str:
        """The address of the worker for clients."""
        return self.worker.address

    @property
    def runtime_dir(self) -> Path:
        """The folder with sockets and logs."""
        folder = self._given_dir or self._own_dir
        if folder is None:
            raise LaunchError("not started")
        return folder

    def check_commands(self) -> dict[str, list[str]]:
        """Return by service a command that checks the service's flags, starts nothing, and reports errors."""
        with_folder = self._given_dir or Path(short_temporary_folder())
        return {
            name: [sys.executable, "-P", "-m", target, *arguments, "--check"]
            for name, (target, arguments) in self._targets(with_folder).items()
        }

    def wait(self) -> ServiceProcess:
        """Waits until one of the services has ended by itself; returns it. Signals interrupt the wait as usual."""
        while True:
            for service in self._services:
                if not service.is_running:
                    return service
            time.sleep(_DEATH_POLL_S)

    def stop(self) -> None:
        """Ends all, the last one first, and removes sockets and, if it was made here, the folder. Idempotent.

        Takes at most 10 s per service; a signal that comes meanwhile makes it SIGKILL and is delivered afterwards.
        """
        with signals_held(self._kill_all), self._stop_lock:
            self._is_stopped = True
            for service in reversed(self._services):
                service.terminate()
            self._remove_files()
            atexit.unregister(self.stop)
            self._restore_sigterm()

    def __enter__(self) -> Self:
        try:
            if not self._services:
                self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        if self._services:
            return self
        starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop)  # ends the children, and with them the start
            await asyncio.gather(starting, return_exceptions=True)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _start(self) -> None:
        with interrupted_once():  # an interrupt between the first one and stop() would leave the children
            try:
                atexit.register(self.stop)
                self._catch_sigterm()
                with signals_held():
                    self._make_services()
                self._start_one(self.cachemgr)
                self.cachemgr.wait_serving(CACHEMGR_START_TIMEOUT_S)
                self._start_one(self.worker)
                self.worker.wait_serving(self._worker_start_timeout_s)
                if self.gateway is not None:
                    self._start_one(self.gateway)
                    self.gateway.wait_serving(GATEWAY_START_TIMEOUT_S)
            except BaseException:
                self.stop()
                raise

    def _start_one(self, service: ServiceProcess) -> None:
        with self._stop_lock:
            if self._is_stopped:
                raise LaunchError("stopped during the start")
            service.start()

    def _make_services(self) -> None:
        folder = self._make_folder()
        self._services = [
            _KINDS.get(name, ServiceProcess)(
                name,
                target=target,
                arguments=arguments,
                address=_address_of(name, folder),
                log_path=self._log_path(folder / f"{name}.log"),
            )
            for name, (target, arguments) in self._targets(folder).items()
        ]

    def _targets(self, folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return by service, cachemgr first, the target and its arguments with sockets in `folder`."""
        cachemgr, worker = _address_of("cachemgr", folder), _address_of("worker", folder)
        own = ("--cachemgr", cachemgr, "--model", self._model, *self._pool_arguments)
        targets: dict[str, tuple[str, tuple[str, ...]]] = {
            "cachemgr": (self._cachemgr_target, ("--listen", cachemgr, *self._extra_cachemgr_args)),
            "worker": (self._worker_target, ("--listen", worker, *own, *self._extra_worker_args)),
        }
        if self._http_listen is not None:
            listen = (_address_of("gateway", folder), *self._http_listen)
            flags = [part for each in listen for part in ("--listen", each)]
            targets["gateway"] = (
                "quire.gateway",
                (*flags, "--cachemgr", cachemgr, *self._extra_gateway_args),
            )
        return targets

    def _make_folder(self) -> Path:
        if self._given_dir is not None:
            check_folder(self._given_dir)
            self._given_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._given_dir
        self._own_dir = Path(tempfile.mkdtemp(prefix="quire-", dir=short_temporary_folder()))
        return self._own_dir

    def _log_path(self, path: Path) -> Path | None:
        return path if self._output == "files" else None

    def _remove_files(self) -> None:
        for service in self._services:
            path = Path(service.address.removeprefix("unix:"))
            if not is_answered(path):  # another user's service that was started before
                path.unlink(missing_ok=True)
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)

    def _kill_all(self) -> None:
        for service in self._services:
            service.kill()

    def _catch_sigterm(self) -> None:
        if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._previous_sigterm = signal.signal(signal.SIGTERM, _exit_on_signal)

    def _restore_sigterm(self) -> None:
        if self._previous_sigterm is not None and _in_main_thread():
            signal.signal(signal.SIGTERM, self._previous_sigterm)
            self._previous_sigterm = None


_KINDS: dict[str, type[ServiceProcess]] = {"gateway": GatewayProcess}


def check_folder(folder: Path) -> None:
    """Raises LaunchError if the path of a socket in the folder would be too long."""
    num_bytes, most = len(os.fsencode(folder)), MAX_SOCKET_PATH_BYTES - len("/cachemgr.sock")
    if num_bytes > most:
        raise LaunchError(
            f"the runtime folder {folder} has a path of {num_bytes} bytes; must be at most {most}, as a unix socket's "
            "path is limited"
        )


@contextlib.contextmanager
def signals_held(on_signal: Callable[[], None] | None = None) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM are only noted, and `on_signal` is called; they are delivered at its end.

    In other threads than the main one it does nothing: Python runs signal handlers in the main thread.
    """
    if not _in_main_thread():
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
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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


def _address_of(name: str, folder: Path) -> str:
    return f"unix:{folder}/{name}.sock"


def is_answered(path: Path) -> bool:
    """Say if a process answers on the unix socket at `path`; none does that this user can't reach."""
    try:
        return addresses.is_answered(str(path))
    except addresses.AddressError:
        return False


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _describe_exit(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
