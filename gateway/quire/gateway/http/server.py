"""The HTTP server of a gateway: sockets, TLS, limits of connections and headers, drain and end."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.gateway.errors import HttpError
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import HttpApp
from quire.gateway.http.streams import encode_json
from quire.serving.addresses import (
    Address,
    AddressError,
    AddressInUseError,
    TcpAddress,
    UnixAddress,
    claimed_socket,
)
from quire.serving.logs import begin_call
from quire.serving.tls import ServerTls

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65_536
"""The most bytes of a request's first line and headers together."""
HEAD_TIMEOUT_S = 30.0
"""The time limit for a request's headers, once the connection is open."""
KEEP_ALIVE_S = 75
"""The time that a connection may wait for its next request."""
MAX_CONNECTIONS = 4096
"""The most open connections. A further one is closed at once."""
BACKLOG = 1024
_DRAIN_POLL_S = 0.05
_LAST_WORDS_S = 1


# Headers that offer another protocol. They are dropped, with their names in `Connection`: HTTP/1.1 goes on.
_UPGRADES = (b"upgrade", b"http2-settings")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection, with bounds on its headers and on the number of connections.

    The parser ends at a request that offers an upgrade (h2c, as curl --http2 and Java's client do), and loses its body.
    Such a request is parsed again without the offer.
    """

    def connection_made(self, transport: Any) -> None:
        """Take a connection, or close it if there are too many."""
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)
        if len(self.connections) > MAX_CONNECTIONS:
            log.warning("a connection was closed: there are too many limit=%d", MAX_CONNECTIONS)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data; refuse headers that are too long."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._is_in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        if self._is_in_head:
            self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("this is no HTTP request")
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the headers have more than {MAX_HEAD_BYTES} bytes")

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self.send_400_response("CONNECT is not served")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in value.split(b",") if each.strip().lower() not in _UPGRADES)
            if name not in _UPGRADES and value:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request with an error as all others have, and close the connection."""
        error = HttpError(400, msg, code="invalid_http")
        call = begin_call([])
        log.info("refused code=%s", error.code)
        content = encode_json(error.body)
        head = (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(content)}\r\nX-Request-Id: {call.request_id}\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Begin the request, unless it is parsed again without the offer of an upgrade."""
        if self.parser.should_upgrade():
            return
        self._stop_head_timer()
        self._is_in_head, self._num_head_bytes = False, 0
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEAD_BYTES:
            raise ValueError("the headers are too long")  # the parser makes an HttpParserError of it
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body; the next request's headers may follow."""
        if self.parser.should_upgrade():
            return
        self._is_in_head = True
        super().on_message_complete()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class HttpServer:
    """Serves an application on some addresses. Raises AddressError or AddressInUseError when it is started."""

    def __init__(self, app: HttpApp, gateway: Gateway, *, tls: ServerTls | None) -> None:
        self._gateway = gateway
        self._tls = tls
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_context_factory=None if tls is None else lambda *_: _context(tls),
        )
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._ssl = config.ssl
        config.ssl = None  # unix sockets are plain text; see start
        self._config = config
        self._unix_paths: dict[str, int] = {}
        self._ticks: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._server.server_state.tasks)

    async def start(self, addresses: Sequence[Address]) -> None:
        """Listen on each address; gateway.addresses then says where."""
        _allow_many_files()
        unix = [self._bind_unix(each) for each in addresses if isinstance(each, UnixAddress)]
        tcp = [_bind_tcp(each) for each in addresses if isinstance(each, TcpAddress)]
        await self._server.startup(sockets=unix)
        servers = list(self._server.servers)
        self._config.ssl = self._ssl
        await self._server.startup(sockets=tcp)
        self._server.servers += servers
        scheme = "http" if self._tls is None else "https"
        hosts = iter(each.host for each in addresses if isinstance(each, TcpAddress))
        self._gateway.addresses += [f"{scheme}://{TcpAddress(next(hosts), sock.getsockname()[1])}" for sock in tcp] + [
            f"unix:{path}" for path in self._unix_paths
        ]
        self._ticks = asyncio.create_task(self._server.main_loop())

    async def drain(self) -> None:
        """Refuse new requests, and wait until those that have begun have ended."""
        self._gateway.is_draining = True
        while self.num_open:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """Close all connections."""
        self._gateway.is_draining = True
        self._server.should_exit = True
        if self._ticks is not None:
            self._ticks.cancel()
            await asyncio.wait([self._ticks])
            await self._server.shutdown()
        for path, inode in self._unix_paths.items():
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    Path(path).unlink()

    def _bind_unix(self, address: UnixAddress) -> socket.socket:
        with claimed_socket(address.path):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(address.path)
            except OSError as error:
                raise AddressError(f"{address}: {error.strerror}") from error
            sock.listen(BACKLOG)
            self._unix_paths[address.path] = os.stat(address.path).st_ino
        return sock


def _bind_tcp(address: TcpAddress) -> socket.socket:
    try:
        family, *_, sockaddr = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.strerror == "Address already in use"
        kind = AddressInUseError if taken else AddressError
        why = "another process is listening there" if taken else str(error)
        raise kind(f"--listen {address}: {why}") from error
    return sock


def _context(tls: ServerTls) -> ssl.SSLContext:
    """Return a context that uses the current certificate in each handshake."""
    context = tls.current().context

    def use_current(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = tls.current().context

    context.sni_callback = use_current
    return context


def _allow_many_files() -> None:
    """Let the process have as many descriptors as it may: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
