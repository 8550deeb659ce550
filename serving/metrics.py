"""Prometheus exposition: a page of metric families, read from statistics at each scrape.

/metrics is the page. /healthz answers 200 as long as the event loop runs, and 503 if the loop does not answer in
time: this is liveness, as health.LIVENESS, and does not mean that the service has all it needs. Any other path is
404.

Threads serve the page, but the event loop owns the objects with the numbers. So the families are read on the loop,
between two of its steps: no page ever has a half-applied change.
"""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric

from quire.serving.addresses import AddressError, AddressInUseError, TcpAddress, explain_bind_failure
from quire.serving.logs import describe_exception
from quire.serving.loop_collector import READ_TIMEOUT_S, LoopCollector
from quire.serving.security import Security
from quire.serving.tls import ServerTls

log = logging.getLogger(__name__)

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

_CONNECTION_TIMEOUT_S = 30.0


def certificate_family(tls: ServerTls | None) -> Metric:
    """When the certificate in force ends. Without TLS there is no sample."""
    family = GaugeMetricFamily(
        "quire_tls_certificate_expiry_timestamp_seconds", "When the server's certificate ends, in seconds since 1970."
    )
    if tls is not None:
        family.add_metric([], tls.current().expires_at_s)
    return family


@cache
def version() -> str:
    """Return the version of this package."""
    return metadata.version("quire-kv")


def build_family() -> Metric:
    """Return the version of what runs, as a label; the value is 1."""
    return InfoMetricFamily("quire_build", "The version.", value={"version": version()})


class MetricsPage:
    """The HTTP server behind `--metrics-listen`: the metrics given, the process's own, its certificate's, its version.

    `with MetricsPage(...)` serves it on threads of its own and closes it at the end. Must be made on the running event
    loop. Raises AddressInUseError or AddressError if it can't listen.
    """

    def __init__(
        self, address: TcpAddress, read: Callable[[], Iterable[Metric]], *, security: Security | None = None
    ) -> None:
        """Serves TLS if the server's security has a certificate; then it requires client certificates as configured
        there."""
        if security is not None:
            security.check_plaintext("--metrics-listen", address)
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        tls = None if security is None else security.tls
        loop = asyncio.get_running_loop()
        registry.register(LoopCollector(lambda: (*read(), certificate_family(tls), build_family()), loop=loop))
        self._server = _listen(address, _pages(registry, loop), tls)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = TcpAddress(address.host, self._server.server_port)
        log.info("metrics address=%s", self.address)

    def close(self) -> None:
        """Stops serving and frees the port. Pages being written are cut off. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "MetricsPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pages(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> Application:
    """The application: a page for each path."""
    metrics: Application = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path != "/healthz":
            return _text("404 Not Found", "no such page; /metrics and /healthz are", start_response)
        if not _is_running(loop):
            return _text(
                "503 Service Unavailable", f"the event loop did not answer in {READ_TIMEOUT_S:g} s", start_response
            )
        return _text("200 OK", "ok", start_response)

    return answer


def _text(status: str, text: str, start_response: Any) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Runs nothing on the loop. Waits for that for READ_TIMEOUT_S at most."""

    async def nothing() -> None:
        pass

    try:
        asyncio.run_coroutine_threadsafe(nothing(), loop).result(READ_TIMEOUT_S)
    except TimeoutError:
        return False
    return True


def _listen(address: TcpAddress, pages: Application, tls: ServerTls | None) -> "_PageServer":
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        server = _PageServer(address, family, tls)
    except OSError as error:
        reason = explain_bind_failure(address) or error.strerror or str(error)
        kind = AddressInUseError if reason == "Address already in use" else AddressError
        raise kind(f"--metrics-listen {address}: {reason}") from error
    server.set_app(pages)
    return server


class _PageServer(ThreadingMixIn, WSGIServer):
    """A thread per request. It does the TLS handshake, too, so that a silent connection delays no other."""

    daemon_threads = True

    def __init__(self, address: TcpAddress, family: socket.AddressFamily, tls: ServerTls | None) -> None:
        self.address_family = family
        self._tls = tls
        super().__init__((address.host, address.port), _SilentHandler)

    def server_bind(self) -> None:
        """Binds without asking for the host's full name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """One page, over TLS if there is a certificate: the one in force now."""
        request.settimeout(_CONNECTION_TIMEOUT_S)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._tls.current().context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that failed is the other side's trouble; its reason is not printed as a traceback."""
        error = sys.exception()
        log.debug("metrics connection failed error=%s", "" if error is None else describe_exception(error))


class _SilentHandler(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
