"""What a client shows and whom it trusts: TLS, a client certificate, a token."""

import contextlib
import os
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from quire.client.errors import CredentialsUnusable
from quire.serving.loopback import is_loopback_host

ChannelOptions = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """For cachemgr and the worker alike; addresses "unix:/path" are never TLS.

    tls_ca             authorities of the servers' certificates, PEM; given: TLS to every host:port
    tls_cert, tls_key  a client certificate's chain and its private key, PEM
    tls_server_name    whose certificate the servers must have; None: the host's that is dialed
    token_file         a file that holds the token; read at each call, so it may be replaced
    token              the token itself

    Certificates are read when a channel is made. Raises CredentialsUnusable for what never could be used.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str | None = None
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise CredentialsUnusable("a client certificate and its key go together: --tls-cert and --tls-key")
        if self.tls_ca is None and (self.tls_cert is not None or self.tls_server_name is not None):
            raise CredentialsUnusable("TLS needs the authorities of the servers' certificates: --tls-ca")
        if self.token is not None and self.token_file is not None:
            raise CredentialsUnusable("there is a token and a token file: give one of them")

    def open_channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel that shows all of this. Raises CredentialsUnusable, also if others could read the token."""
        uses_tls = self.tls_ca is not None and not address.startswith("unix:")
        token = None if self.token is None and self.token_file is None else _TokenSource(self)
        if token is not None and not uses_tls and not is_local(address):
            raise CredentialsUnusable(
                f"a token is not sent in plain text to {address}: it is no unix socket and not loopback. Give the "
                "authorities of its certificate, --tls-ca"
            )
        if uses_tls:
            channel = self._tls_channel(address, options)
        else:
            channel = grpc.aio.insecure_channel(address, options=options)
        return channel if token is None else cast(grpc.aio.Channel, _TokenChannel(channel, token))

    def _tls_channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        assert self.tls_ca is not None, "only with TLS"
        cert = key = None
        if self.tls_cert is not None and self.tls_key is not None:
            _check_pair(self.tls_cert, self.tls_key)
            cert, key = _read(self.tls_cert), _read(self.tls_key)
        name = self.tls_server_name
        override = () if name is None else (("grpc.ssl_target_name_override", name),)
        credentials = grpc.ssl_channel_credentials(_read(self.tls_ca), key, cert)
        return grpc.aio.secure_channel(address, credentials, options=(*options, *override))


NO_CREDENTIALS = Credentials()


class _TokenSource:
    """The metadata of a call. A token file that can't be read just now gives the token of before."""

    def __init__(self, credentials: Credentials) -> None:
        self._file = credentials.token_file
        self._token = (
            _check_token(credentials.token or "", "the token") if self._file is None else _token_in(self._file)
        )

    def metadata(self) -> Metadata:
        """What to send now."""
        if self._file is not None:
            with contextlib.suppress(CredentialsUnusable):  # about to be replaced
                self._token = _token_in(self._file)
        return (("authorization", f"Bearer {self._token}"),)


class _TokenChannel:
    """A channel whose calls carry a token. gRPC's own way works over TLS only; interceptors slow streams down."""

    def __init__(self, channel: grpc.aio.Channel, source: _TokenSource) -> None:
        self._channel = channel
        self._source = source

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def with_token(*args: Any, **options: Any) -> Callable[..., Any]:
            call = found(*args, **options)

            def begin(*args: Any, metadata: Metadata = (), **options: Any) -> Any:
                return call(*args, metadata=(*(metadata or ()), *self._source.metadata()), **options)

            return begin

        return with_token


def is_local(address: str) -> bool:
    """True if nothing sent to "unix:/path" or "host:port" leaves this machine. A name nobody knows is not local."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return is_loopback_host(host)
    except (OSError, UnicodeError):
        return False


def _token_in(path: Path) -> str:
    return _check_token(_read(path).decode("ascii", "replace").strip(), str(path))


def _check_token(token: str, where: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialsUnusable(f"{where}: must be one token, a word of printable ASCII")
    return token


def _read(path: Path) -> bytes:
    """All of a regular file; never waits for a writer, as of a fifo."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CredentialsUnusable(f"{path}: not a regular file")
            return file.read()
    except OSError as error:
        raise CredentialsUnusable(f"{path}: {error.strerror}") from error


def _check_pair(cert: Path, key: Path) -> None:
    _read(cert), _read(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=lambda: b"-")
    except ssl.SSLError as error:
        why = "the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else "not PEM, or a password"
        raise CredentialsUnusable(f"{cert} and {key}: {why}") from error
