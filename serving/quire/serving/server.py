"""A gRPC server process from start to exit: options, health, reflection, addresses, signals, drain.

    async def serve(signals: StopSignals) -> None:
        async with Server(service_names=["quire.cache.v1.CacheService"], domain="cache.quire.dev") as server:
            add_CacheServiceServicer_to_server(servicer, server.grpc)
            await server.start(addresses)               # health: NOT_SERVING, but for LIVENESS
            await server.announce_serving()             # health: SERVING
            await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=30)

    run(serve)

Life of a stop. First signal: health NOT_SERVING, `drain` is awaited, then no new calls, streams end with UNAVAILABLE
(SHUTTING_DOWN), unary calls that have begun finish, exit 0. Second signal: everything is dropped, exit 128 + signal. A
signal before `serve_until_signal` cancels the start-up and exits 0. Exceptions: one log line, exit 1.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.serving import tracing
from quire.serving.addresses import (
    Address,
    AddressError,
    AddressInUseError,
    TcpAddress,
    claimed_socket,
    explain_bind_failure,
)
from quire.serving.interceptor import MAX_CALLS, CallStatistics, HandlerGuard
from quire.serving.logs import describe_exception
from quire.serving.receiving import MAX_MESSAGE_BYTES
from quire.serving.security import Security, SecurityOptions
from quire.serving.systemd import ServiceManager
from quire.serving.watched import FileError

log = logging.getLogger(__name__)

MAX_PENDING_CALLS = 4 * MAX_CALLS
MAX_CONNECTIONS = MAX_CALLS
"""The most connections of each address. One more is closed at once."""
# Unknown names are ignored without a word: tests watch the effects.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # else a second server binds the same port and takes half of the calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES),  # what clients read
    # Calls that gRPC has and the interceptor has not: beyond these they are cancelled without a reason.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
# A health name beside the services': SERVING as long as the process works, even if it waits for another service.
LIVENESS = "liveness"
# The period of checks of open streams against the token file.
_REVOCATION_PERIOD_S = 1.0
# Left for streams to send their status, when the drain has used up its time.
_LAST_WORDS_S = 0.5


class StopSignals:
    """SIGTERM and SIGINT of this process, as events. Made by `run`."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self._is_awaited = False
        self.last_signal = 0

    @property
    def is_awaited(self) -> bool:
        """True if a task waits for it already: until then a signal cancels the start-up."""
        return self._is_awaited

    async def first(self) -> None:
        """Returns on the first signal."""
        self._is_awaited = True
        await self._first.wait()

    async def second(self) -> None:
        """Returns on the second signal."""
        await self._second.wait()

    def receive(self, number: int) -> None:
        """Takes note of a signal."""
        self.last_signal = number
        (self._second if self._first.is_set() else self._first).set()


class CannotStartError(Exception):
    """The process can't start with its flags; the message is for the operator."""


class AlongsideEndedError(Exception):
    """A task that has to run as long as the process has ended."""


class StoppedAtOnceError(Exception):
    """A second signal came before the drain had ended; running calls were dropped."""


class Server:
    """A grpc.aio server with health, reflection and guarded handlers; one per process, on the running event loop.

    service_names   full names of the services it will carry ("quire.cache.v1.CacheService")
    domain          of the errors made in this package
    fatal           exceptions out of a handler that end the process: health NOT_SERVING, no drain, exit 1
    security        certificates and authorization; by default plain text on loopback and unix sockets, for all
    message_limits  full method name -> bytes that a request of it may have; others are small
    manager         gets word of the start and the stop; None: the systemd of the environment

    `grpc` is the server to add servicers to, before `start`. Health is also answered at the security's health_listen,
    from the beginning of the `async with` block to its end; entering raises AddressError if it can't listen there.
    """

    def __init__(
        self,
        *,
        service_names: Sequence[str],
        domain: str,
        fatal: tuple[type[BaseException], ...] = (),
        security: Security | None = None,
        message_limits: Mapping[str, int] | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        self._security = security or Security(SecurityOptions(), roles={}, domain=domain)
        self._guard = HandlerGuard(
            domain=domain,
            fatal=fatal,
            on_fatal=self.fail,
            access=self._security.access,
            message_limits=message_limits,
        )
        self._health = health.aio.HealthServicer()
        self._manager = manager or ServiceManager(os.environ)
        self._names = ("", *service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._sockets: dict[str, int] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._alongside: list[asyncio.Task[None]] = []
        self.addresses: tuple[Address, ...] = ()
        self.grpc = grpc.aio.server(interceptors=(self._guard,), options=SERVER_OPTIONS)
        self._probes = grpc.aio.server(options=SERVER_OPTIONS)
        for server in (self.grpc, self._probes):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(self._names[1:], self.grpc)

    async def __aenter__(self) -> "Server":
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        if (address := self._security.health_listen) is not None:
            bound = _bound(address, lambda: self._probes.add_insecure_port(str(address)))
            await self._probes.start()
            log.info("health address=%s", bound)
        if self._manager.has_watchdog:
            self.run_alongside(self._manager.feed_watchdog())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._alongside:
            task.cancel()
        await self._health.enter_graceful_shutdown()
        self._guard.end_streams()
        await self.grpc.stop(None)
        await self._probes.stop(None)
        self._unlink_sockets()
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()  # retrieved, whether or not a task waited for it

    async def start(self, addresses: Iterable[Address]) -> None:
        """Binds every address and answers calls; health says NOT_SERVING. `self.addresses` then has the real ports.

        Those of --token-listen come last. Raises AddressInUseError or AddressError, and then serves nothing.
        """
        bound = [self._bind(address) for address in addresses]
        if not bound:
            raise AddressError("no address to listen on")
        bound += [self._bind_tcp(address, asks_clients=False) for address in self._security.token_listen]
        self.addresses = tuple(bound)
        await self.grpc.start()
        if self._security.access is not None:
            self.run_alongside(self._end_revoked_streams())
        given = (self._security.tls is not None, self._security.asks_clients, self._security.asks_tokens)
        log.info("security tls=%s client_certificates=%s tokens=%s", *("yes" if each else "no" for each in given))
        log.info("listening addresses=%s", ",".join(map(str, bound)))

    async def _end_revoked_streams(self) -> None:
        while True:
            await asyncio.sleep(_REVOCATION_PERIOD_S)
            self._guard.end_revoked_streams()

    def statistics(self) -> CallStatistics:
        """Statistics of the calls it answers."""
        return self._guard.statistics()

    async def announce_serving(self) -> None:
        """Health SERVING, for all of it and each service; READY to systemd. Without effect once the stop has begun."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._manager.ready(f"serving at {' '.join(map(str, self.addresses))}")

    async def announce_not_serving(self) -> None:
        """Set health to NOT_SERVING, except LIVENESS, until `announce_serving`. The process continues."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def run_alongside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as long as the server. If it ends by itself, `fail` is called."""
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._alongside_ended)
        self._alongside.append(task)

    def _alongside_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.fail(task.exception() or AlongsideEndedError("a task that runs alongside the server has returned"))

    def fail(self, error: BaseException) -> None:
        """Ends `serve_until_signal` with this error, now and without a drain. For broken invariants."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._manager.stopping("failed, see the log")
            task = asyncio.get_running_loop().create_task(self._health.enter_graceful_shutdown())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def serve_until_signal(
        self, signals: StopSignals, *, drain: Callable[[], Awaitable[None]] | None = None, drain_timeout_s: float = 30.0
    ) -> None:
        """Serves until SIGTERM or SIGINT, then stops in order; see the top of this file.

        `drain` must return when the important work has finished, and should make the servicer refuse new work. It and
        the calls that have begun get `drain_timeout_s` together; calls left then are dropped with a log line. Raises
        StoppedAtOnceError on a second signal, and the exception given to `fail`.
        """
        await self._first_of(signals.first())
        log.info("draining signal=%s timeout_s=%g", _signal_name(signals.last_signal), drain_timeout_s)
        self._manager.stopping(f"draining, for at most {drain_timeout_s:g} s")
        await self._health.enter_graceful_shutdown()
        await self._first_of(self._stop(drain, drain_timeout_s), _hurry(signals))
        log.info("stopped")

    async def _stop(self, drain: Callable[[], Awaitable[None]] | None, drain_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_timeout_s
        if drain is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    await drain()
            except TimeoutError:
                log.warning("drain timed out timeout_s=%g", drain_timeout_s)
        grace_s = max(deadline - loop.time(), _LAST_WORDS_S)
        stopping = asyncio.ensure_future(self.grpc.stop(grace_s))
        await asyncio.sleep(0)  # stop accepts no calls from its first step on
        self._guard.end_streams()
        await stopping
        self._unlink_sockets()

    async def _first_of(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        """Runs them until one ends or `fail` is called, cancels the rest; raises the exception of the first to end."""
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            done, _ = await asyncio.wait((*tasks, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for future in done:
            future.result()

    async def _set_health(self, status: Literal[1, 2]) -> None:
        for name in self._names:
            await self._health.set(name, status)

    def _bind(self, address: Address) -> Address:
        if isinstance(address, TcpAddress):
            return self._bind_tcp(address, asks_clients=self._security.asks_clients)
        with claimed_socket(address.path):
            try:
                self.grpc.add_insecure_port(str(address))
            except RuntimeError as error:
                raise AddressError(f"{address}: can't listen there") from error
            self._sockets[address.path] = os.stat(address.path).st_ino
        return address

    def _bind_tcp(self, address: TcpAddress, *, asks_clients: bool) -> TcpAddress:
        tls = self._security.tls
        self._security.check_plaintext("--listen", address)
        if tls is None:
            return _bound(address, lambda: self.grpc.add_insecure_port(str(address)))
        credentials = tls.port_credentials(asks_clients=asks_clients)
        return _bound(address, lambda: self.grpc.add_secure_port(str(address), credentials))

    def _unlink_sockets(self) -> None:
        """Removes the socket files made here; gRPC does too, but not when a start fails half-way."""
        for path, inode in self._sockets.items():
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    Path(path).unlink()
        self._sockets.clear()


def _bound(address: TcpAddress, bind: Callable[[], int]) -> TcpAddress:
    """The address with the real port. Raises AddressInUseError or AddressError."""
    try:
        return TcpAddress(address.host, bind())
    except RuntimeError as error:
        reason = explain_bind_failure(address)
        if reason == os.strerror(errno.EADDRINUSE):
            raise AddressInUseError(f"{address}: another process is listening there") from error
        raise AddressError(f"{address}: can't listen there: {reason or 'gRPC gives no reason'}") from error


def run(main: Callable[[StopSignals], Coroutine[Any, Any, None]]) -> NoReturn:
    """Runs a server's main coroutine on uvloop with signal handlers, then ends the process.

    Status 0 after an orderly stop, also one during the start-up; 128 + signal after a second signal; 1 after an
    exception, which is logged in one line. Threads are not joined: a task that needs one to finish waits in `drain`
    or in `main`, and a thread that loads or computes can't delay the exit. `main` must not block the loop: signals
    are handled between its steps.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_supervise(main))
        tracing.flush()
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)


async def _supervise(main: Callable[[StopSignals], Coroutine[Any, Any, None]]) -> int:
    """The exit status."""
    signals = StopSignals()
    loop = asyncio.get_running_loop()
    task = loop.create_task(main(signals))

    def on_signal(number: int) -> None:
        signals.receive(number)
        if not signals.is_awaited:
            log.info("start-up cancelled signal=%s", _signal_name(number))
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        return 0 if signals.last_signal else 1
    except StoppedAtOnceError:
        return 128 + signals.last_signal
    except (AddressError, FileError, CannotStartError) as error:
        log.error("can't start: %s", error)
        return 1
    except Exception as error:
        log.error("failed: %s (%s)", error, describe_exception(error))
        return 1
    return 0


async def _hurry(signals: StopSignals) -> None:
    await signals.second()
    log.warning("stopping at once signal=%s", _signal_name(signals.last_signal))
    raise StoppedAtOnceError


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number else "none"
