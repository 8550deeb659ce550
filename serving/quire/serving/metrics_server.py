"""The HTTP server of a page of metrics, for services and engines: a thread per request.

/metrics is the page. /healthz answers 200 as long as the event loop runs, and 503 if the loop does not answer in
time: this is liveness, as health.LIVENESS, and does not mean that the service has all it needs. Behind "ok" a service
may say how it runs. Any other path is 404.
"""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from quire.serving.addresses import TcpAddress
from quire.serving.logs import describe_exception
from quire.serving.loop_collector import READ_TIMEOUT_S

if TYPE_CHECKING:
    from quire.serving.tls import ServerTls

log = logging.getLogger(__name__)

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

_CONNECTION_TIMEOUT_S = 30.0


class MetricsServer:
    """Serves a registry's metrics on threads of its own until it is closed; `address` has the real port.

    Must be made on the running event loop. Raises OSError if it can't listen.
    """

    def __init__(
        self,
        address: TcpAddress,
        registry: CollectorRegistry,
        *,
        tls: "ServerTls | None" = None,
        health: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._server = _PageServer(address, tls)
        self._server.set_app(_pages(registry, asyncio.get_running_loop(), health))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = TcpAddress(address.host, self._server.server_port)

    def close(self) -> None:
        """Stops serving and frees the port. Pages being written are cut off. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _pages(
    registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, health: Callable[[], Iterable[str]]
) -> Application:
    """The application: a page for each path."""
    metrics: Application = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            # Always as text: in OpenMetrics the library writes the colon of vLLM's names as an underscore.
            return metrics({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)
        if path != "/healthz":
            return _text("404 Not Found", "no such page; /metrics and /healthz are", start_response)
        if not _is_running(loop):
            return _text(
                "503 Service Unavailable", f"the event loop did not answer in {READ_TIMEOUT_S:g} s", start_response
            )
        return _text("200 OK", "\n".join(("ok", *health())), start_response)

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


class _PageServer(ThreadingMixIn, WSGIServer):
    """A thread per request. It does the TLS handshake, too, so that a silent connection delays no other."""

    daemon_threads = True

    def __init__(self, address: TcpAddress, tls: "ServerTls | None") -> None:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._tls = tls
        super().__init__((address.host, address.port), _SilentHandler)

    def server_bind(self) -> None:
        """Binds without asking for the host's full name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one page, over TLS with the current certificate if there is one."""
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
        """Log nothing."""
