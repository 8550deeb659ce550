"""The services on this machine as child processes: `quire up`, the demo and the integration tests.

    with LocalServices.start(model="deploy/demo/model", num_blocks=256) as services:
        Engine.connect(services.cachemgr_address)

After the block nothing is left, also after an exception. Each child is ended by its own handle: SIGTERM first, SIGKILL
after a bounded wait. Its socket and the folder made for it are removed. While services run, SIGTERM to this process
becomes SystemExit(143), unless the program has a handler for it, so that it ends in the same way as Ctrl-C. Signals
that come while a child is being created are delayed until its handle is kept. If this process is killed with SIGKILL,
the children notice it by a pipe and end by themselves; only then the folder stays.
"""

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from quire.cli.service_process import (
    STOP_TIMEOUT_S,
    WORKER_START_TIMEOUT_S,
    GatewayProcess,
    HolderProcess,
    LaunchError,
    ServiceProcess,
    wait_all_serving,
)
from quire.cli.signals import exit_on_signal, in_main_thread, interrupted_once, signals_held
from quire.serving import addresses
from quire.serving.runtime_folder import MAX_SOCKET_PATH_BYTES, short_temporary_folder

CACHEMGR_START_TIMEOUT_S = 30.0
GATEWAY_START_TIMEOUT_S = 60.0
HOLDER_START_TIMEOUT_S = 30.0

_DEATH_POLL_S = 0.2


class LocalServices:
    """cachemgr and worker, and perhaps a gateway and a holder, on unix sockets in one folder.

    As a context manager, `with` or `async with`, it starts them, all at the same time, and ends them at the block's
    end; `start` does the first part at once. After it, `cachemgr` and `worker` are their processes.

    model                 path or hub id for the worker
    num_blocks            size of its pool; None: the worker decides
    extra_cachemgr_args, extra_worker_args, extra_gateway_args
                          further flags
    keeps_memory          the worker's pool lies in the memory of a holder, which is started, too
    environment           by service ("gateway"): further variables of its environment
    http_listen           the gateway's address for HTTP, beside its unix socket; None: there is no gateway
    runtime_dir           folder for sockets and logs. None: one is made, and removed at the end. One that is given is
                          made if missing, and keeps the logs
    output                "files": a log file per service in the folder; "inherit": to ours
    stop_timeout_s        the most time of a service to end, before SIGKILL; longer than its --drain-timeout
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
        keeps_memory: bool = False,
        environment: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        runtime_dir: str | os.PathLike[str] | None = None,
        output: str = "files",
        worker_start_timeout_s: float = WORKER_START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
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
        self._keeps_memory = keeps_memory
        self._environment = environment
        self._given_dir = None if runtime_dir is None else Path(runtime_dir).absolute()
        self._output = output
        self._start_timeouts_s = {
            "cachemgr": CACHEMGR_START_TIMEOUT_S,
            "worker": worker_start_timeout_s,
            "holder": HOLDER_START_TIMEOUT_S,
            "gateway": worker_start_timeout_s + GATEWAY_START_TIMEOUT_S,  # it serves once the worker does
        }
        self._stop_timeout_s = stop_timeout_s
        self._cachemgr_target = cachemgr_target
        self._worker_target = worker_target
        self._own_dir: Path | None = None
        self._services: list[ServiceProcess] = []
        self._is_started = False
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

    def begin(self) -> None:
        """Starts the worker alone, which imports for seconds before it does anything; the block starts the others.

        Raises LaunchError if the folder's path is too long, OSError. Call stop() if the block is not entered.
        """
        with self._starting():
            self._prepare()
            self._spawn([self.worker])

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
    def holder(self) -> HolderProcess | None:
        """The holder's process; None if there is none."""
        return next((each for each in self._services if isinstance(each, HolderProcess)), None)

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

    def check_commands(self) -> dict[str, tuple[list[str], dict[str, str]]]:
        """Return by service a command that checks the service's flags, starts nothing, and reports errors.

        With each command comes its environment.
        """
        with_folder = self._given_dir or Path(short_temporary_folder())
        return {
            name: (
                [sys.executable, "-P", "-m", target, *arguments, "--check"],
                {**os.environ, **self._environment.get(name, {})},
            )
            for name, (target, arguments) in self._targets(with_folder).items()
            if name != "holder"  # it has no flag but its address
        }

    def wait(self) -> ServiceProcess:
        """Waits until one of the services has ended by itself; returns it. Signals interrupt the wait as usual."""
        while True:
            for service in self._services:
                if not service.is_running:
                    return service
            time.sleep(_DEATH_POLL_S)

    def start_one(self, service: ServiceProcess) -> None:
        """Start one service, which does not run, and wait until it serves. Raises LaunchError."""
        self._spawn([service])
        self._wait_serving([service])

    def _spawn(self, services: Sequence[ServiceProcess]) -> None:
        for service in services:
            with self._stop_lock:
                if self._is_stopped:
                    raise LaunchError("stopped during the start")
                service.start()

    def _wait_serving(self, services: Sequence[ServiceProcess]) -> None:
        wait_all_serving({service: self._start_timeouts_s[service.name] for service in services})

    def stop(self, say: Callable[[], None] = lambda: None) -> None:
        """Ends all, the last one first, and removes sockets and, if it was made here, the folder. Idempotent.

        `say` is called when a further signal will end all at once.

        Takes at most stop_timeout_s per service. A signal that comes meanwhile makes it SIGKILL, and is delivered
        afterwards.
        """
        with signals_held(self._kill_all), self._stop_lock:
            self._is_stopped = True
            say()
            for service in reversed(self._services):
                service.terminate(self._stop_timeout_s)
            self._remove_files()
            atexit.unregister(self.stop)
            self._restore_sigterm()

    def __enter__(self) -> Self:
        try:
            if not self._is_started:
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
        import asyncio  # `quire up` needs none

        if self._is_started:
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
        import asyncio

        await asyncio.to_thread(self.stop)

    def _start(self) -> None:
        """Start all at the same time: each waits by itself for those that it needs."""
        with self._starting():
            self._prepare()
            self._spawn([service for service in self._services if service.pid is None])
            self._wait_serving(self._services)
            self._is_started = True

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """End all if the block raises."""
        with interrupted_once():  # an interrupt between the first one and stop() would leave the children
            try:
                yield
            except BaseException:
                self.stop()
                raise

    def _prepare(self) -> None:
        if self._services:
            return
        atexit.register(self.stop)
        self._catch_sigterm()
        with signals_held():
            self._make_services()

    def _make_services(self) -> None:
        folder = self._make_folder()
        self._services = [
            _KINDS.get(name, ServiceProcess)(
                name,
                target=target,
                arguments=arguments,
                address=_address_of(name, folder),
                environment=self._environment.get(name, {}),
                log_path=self._log_path(folder / f"{name}.log"),
            )
            for name, (target, arguments) in self._targets(folder).items()
        ]

    def _targets(self, folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return by service, cachemgr first, the target and its arguments with sockets in `folder`."""
        cachemgr, worker = _address_of("cachemgr", folder), _address_of("worker", folder)
        own = ("--cachemgr", cachemgr, "--model", self._model, *self._pool_arguments)
        holder = ("--holder", _address_of("holder", folder)) if self._keeps_memory else ()
        targets: dict[str, tuple[str, tuple[str, ...]]] = {
            "cachemgr": (self._cachemgr_target, ("--listen", cachemgr, *self._extra_cachemgr_args)),
            "worker": (self._worker_target, ("--listen", worker, *own, *holder, *self._extra_worker_args)),
        }
        if self._http_listen is not None:
            listen = (_address_of("gateway", folder), *self._http_listen)
            flags = [part for each in listen for part in ("--listen", each)]
            targets["gateway"] = (
                "quire.gateway",
                (*flags, "--cachemgr", cachemgr, *self._extra_gateway_args),
            )
        if self._keeps_memory:
            targets["holder"] = ("quire.worker.holder", ("--listen", _address_of("holder", folder)))
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
        if not in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._previous_sigterm = signal.signal(signal.SIGTERM, exit_on_signal)

    def _restore_sigterm(self) -> None:
        if self._previous_sigterm is not None and in_main_thread():
            signal.signal(signal.SIGTERM, self._previous_sigterm)
            self._previous_sigterm = None


_KINDS: dict[str, type[ServiceProcess]] = {"gateway": GatewayProcess, "holder": HolderProcess}


def check_folder(folder: Path) -> None:
    """Raises LaunchError if the path of a socket in the folder would be too long."""
    num_bytes, most = len(os.fsencode(folder)), MAX_SOCKET_PATH_BYTES - len("/cachemgr.sock")
    if num_bytes > most:
        raise LaunchError(
            f"the runtime folder {folder} has a path of {num_bytes} bytes; must be at most {most}, as a unix socket's "
            "path is limited"
        )


def _address_of(name: str, folder: Path) -> str:
    return f"unix:{folder}/{name}.sock"


def is_answered(path: Path) -> bool:
    """Say if a process answers on the unix socket at `path`; none does that this user can't reach."""
    try:
        return addresses.is_answered(str(path))
    except addresses.AddressError:
        return False
