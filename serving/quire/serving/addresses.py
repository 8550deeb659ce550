"""Addresses to listen on and to dial: "unix:/path" and "host:port"; checks for addresses of this machine.

The file of a unix socket remains when its server is killed. gRPC removes any such file before it binds, also one of a
running server; that server would then run on, unreachable. So a socket is claimed before it is bound: removed if no
server answers on it, refused if one does. Claim and bind are done under a lock on the socket's folder, so two servers
that start together can't both succeed; the lock leaves no file behind.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.serving.runtime_folder import MAX_SOCKET_PATH_BYTES

MAX_PORT = 65535
DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"
"""The gateway's default address for HTTP."""
_PROBE_TIMEOUT_S = 2.0
_BRACKETED = re.compile(r"\[(?P<host>[0-9A-Fa-f:.%]+)\]:(?P<port>.*)")


class AddressError(ValueError):
    """The address can't be used; the message has the reason and a correct form."""


class AddressInUseError(AddressError):
    """A living server has the address, or something that is no socket lies there."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket by its absolute path."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host name or IP address without brackets, and a port; port 0 asks for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_listen_address(text: str) -> Address:
    """Reads an address to listen on. Port 0 is allowed. Raises AddressError."""
    if text.startswith("unix:"):
        return parse_unix_address(text)
    return _parse_tcp(text, lowest_port=0)


def parse_dial_address(text: str) -> Address:
    """Reads an address to connect to: as for listening, but the port must be real. Raises AddressError."""
    if text.startswith("unix:"):
        return parse_unix_address(text)
    return _parse_tcp(text, lowest_port=1)


def parse_unix_address(text: str) -> UnixAddress:
    """Reads the address of a unix socket, to listen on or to connect to. Raises AddressError."""
    if not text.startswith("unix:"):
        raise AddressError(f"{text!r}: not unix:/path")
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path.startswith("/"):
        raise AddressError(f"{text!r}: a unix socket needs an absolute path, as in unix:/run/quire/cachemgr.sock")
    if "\0" in path or path.endswith("/"):
        raise AddressError(f"{text!r}: not the path of a socket")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise AddressError(
            f"{text!r}: the path has {num_bytes} bytes, a unix socket's may have at most {MAX_SOCKET_PATH_BYTES}"
        )
    return UnixAddress(path)


def _parse_tcp(text: str, *, lowest_port: int) -> TcpAddress:
    bracketed = _BRACKETED.fullmatch(text)
    host, _, port_text = (bracketed["host"], ":", bracketed["port"]) if bracketed else text.rpartition(":")
    if not host or any(c.isspace() or c in "/@" for c in host):
        raise AddressError(f"{text!r}: neither host:port (127.0.0.1:7070, [::1]:7070) nor unix:/path")
    if ":" in host and not bracketed:
        raise AddressError(f"{text!r}: an IPv6 address goes in brackets, as in [::1]:7070")
    if not (port_text.isascii() and port_text.isdigit()) or not lowest_port <= int(port_text) <= MAX_PORT:
        raise AddressError(f"{text!r}: the port must be a number from {lowest_port} to {MAX_PORT}")
    return TcpAddress(host, int(port_text))


def is_local(address: Address) -> bool:
    """True if nothing sent there leaves this machine: a unix socket, a loopback address, a name of only such.

    Raises AddressError for a name that can't be resolved.
    """
    if isinstance(address, UnixAddress):
        return True
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"{address}: no such host ({error})") from error
    return all(_is_loopback(str(sockaddr[0])) for *_, sockaddr in found)


def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def remove_stale_socket(path: str) -> None:
    """Removes the socket file at `path` if no server answers on it. Nothing there is fine.

    Raises AddressInUseError if a server answers or the file is no socket, AddressError if this can't be determined.
    To bind afterwards without a race use `claimed_socket`.
    """
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressError(f"unix:{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise AddressInUseError(f"unix:{path}: there is a file that is no socket; not touching it")
    if is_answered(path):
        raise AddressInUseError(f"unix:{path}: another server is listening there")
    Path(path).unlink(missing_ok=True)


def is_answered(path: str) -> bool:
    """True if a process answers on the unix socket at `path`. Raises AddressError if this can't be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):
            return True  # a full backlog: a server that is slow is alive
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                return True  # a process listens on a socket of another type, as a holder does
            raise AddressError(f"unix:{path}: can't determine if a server listens there: {error.strerror}") from error
    return True


@contextlib.contextmanager
def claimed_socket(path: str) -> Iterator[None]:
    """Keep other servers that use this function from binding in the socket's folder meanwhile; `path` is free.

    Raises AddressError if the folder is missing or not writable, AddressInUseError as `remove_stale_socket`.
    """
    folder = str(Path(path).parent)
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AddressError(f"unix:{path}: the folder {folder}: {error.strerror}") from error
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX)
        remove_stale_socket(path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AddressError(f"unix:{path}: the folder {folder} is not writable")
        yield
    finally:
        os.close(folder_fd)


def explain_bind_failure(address: TcpAddress) -> str:
    """Return the reason why this address can't be bound, in the system's words; empty if it could be bound now."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return f"no such host ({error})"
    for family, kind, protocol, _, sockaddr in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(sockaddr)
                probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""
