"""The channels of clients and workers to cachemgr and workers: TLS to host:port if there are authorities, and a token.

Certificate files are read when a channel is made: a later channel has the newer certificate. A token is read again
when its file has changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from quire.serving.addresses import Address, UnixAddress, is_local
from quire.serving.tls import check_certificate
from quire.serving.watched import FileError, WatchedFiles, read_bytes

ChannelOptions = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DialOptions:
    """Credentials to send, and authorities to trust. Addresses "unix:/path" never use TLS.

    tls_ca             authorities of the server's certificate, PEM; given: TLS to every host:port
    tls_cert, tls_key  a client certificate's chain and its private key, PEM
    tls_server_name    the name in the server's certificate; None: the dialed host
    token_file         a file that holds the token; read again when it changes
    token              the token itself

    Raises ValueError, which names the flags, for values that do not go together.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str | None = None
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_ca is None and (self.tls_cert is not None or self.tls_server_name is not None):
            raise ValueError("--tls-cert and --tls-server-name need --tls-ca")
        if self.token is not None and self.token_file is not None:
            raise ValueError("there is a token and a --token-file: give one of them")


class Dialer:
    """Makes channels to one address. Raises FileError or AddressError, when it is made, if it never could."""

    def __init__(self, address: Address, options: DialOptions) -> None:
        self.address = address
        self._options = options
        self._token = _token_of(options)
        self.uses_tls = options.tls_ca is not None and not isinstance(address, UnixAddress)
        if self.uses_tls:
            self._credentials()
        elif self._token is not None and not is_local(address):
            raise FileError(
                f"{address}: a token is not sent to another machine in plain text; give the authorities of its "
                "certificate (tls-ca)"
            )

    def open(self, options: ChannelOptions) -> grpc.aio.Channel:
        """A new channel. Raises FileError if a certificate can't be used now."""
        if not self.uses_tls:
            return grpc.aio.insecure_channel(str(self.address), options=options)
        name = self._options.tls_server_name
        override = () if name is None else (("grpc.ssl_target_name_override", name),)
        return grpc.aio.secure_channel(str(self.address), self._credentials(), options=(*options, *override))

    @property
    def shows_token(self) -> bool:
        """True if there is a token."""
        return self._token is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata to send with a call."""
        return () if self._token is None else (("authorization", f"Bearer {self._token()}"),)

    def _credentials(self) -> grpc.ChannelCredentials:
        given = self._options
        assert given.tls_ca is not None, "only with TLS"
        cert = key = None
        if given.tls_cert is not None and given.tls_key is not None:
            check_certificate(given.tls_cert, given.tls_key, is_server=False)
            cert, key = read_bytes(given.tls_cert), read_bytes(given.tls_key)
        return grpc.ssl_channel_credentials(read_bytes(given.tls_ca), key, cert)


def _token_of(options: DialOptions) -> Callable[[], str] | None:
    """A function that returns the token to show now; None if there is none. Raises FileError if it is no token."""
    path = options.token_file
    if path is not None:
        return WatchedFiles("token", [path], lambda: read_token(path)).current
    if options.token is None:
        return None
    token = _one_word(options.token.encode(), "the token")
    return lambda: token


def read_token(path: Path) -> str:
    """A token: one word, printable ASCII. Raises FileError, which does not quote it."""
    return _one_word(read_bytes(path), str(path))


def _one_word(text: bytes, where: str) -> str:
    words = text.split()
    if len(words) != 1 or not words[0].isascii() or not words[0].decode("ascii").isprintable():
        raise FileError(f"{where}: must be one token, a word of printable ASCII")
    return words[0].decode()
