"""How a server process dials another one: TLS to host:port if it was given authorities, a token with every call.

Files are read when a channel is made, so a channel made later has the certificate of then; a token is read again when
its file has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire.serving.addresses import Address, UnixAddress
from quire.serving.tls import check_certificate, is_local
from quire.serving.watched import FileError, WatchedFiles, read_bytes

ChannelOptions = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class DialOptions:
    """What to dial with.

    tls_ca            authorities of the server's certificate, PEM; None: plain text
    tls_cert, tls_key  a client certificate's chain and key, PEM; None: there is none
    tls_server_name   whose certificate the server must have; None: the host's that is dialed
    token_file        a file with the token to show; None: there is none
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str | None = None
    token_file: Path | None = None


class Dialer:
    """Makes channels to one address. Raises FileError or AddressError, when it is made, if it never could."""

    def __init__(self, address: Address, options: DialOptions) -> None:
        self.address = address
        self._options = options
        self._token = None if options.token_file is None else watched_token(options.token_file)
        self.uses_tls = options.tls_ca is not None and not isinstance(address, UnixAddress)
        if self.uses_tls:
            self._credentials()
        elif self._token is not None and not is_local(address):
            raise FileError(
                f"{address}: a token is not sent to another machine in plain text; give authorities, for TLS"
            )

    def open(self, options: ChannelOptions) -> grpc.aio.Channel:
        """A new channel. Raises FileError if a certificate can't be used now."""
        if not self.uses_tls:
            return grpc.aio.insecure_channel(str(self.address), options=options)
        name = self._options.tls_server_name
        override = () if name is None else (("grpc.ssl_target_name_override", name),)
        return grpc.aio.secure_channel(str(self.address), self._credentials(), options=(*options, *override))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What to send with a call."""
        return () if self._token is None else (("authorization", f"Bearer {self._token.current()}"),)

    def _credentials(self) -> grpc.ChannelCredentials:
        given = self._options
        assert given.tls_ca is not None, "only with TLS"
        cert = key = None
        if given.tls_cert is not None and given.tls_key is not None:
            check_certificate(given.tls_cert, given.tls_key, is_server=False)
            cert, key = read_bytes(given.tls_cert), read_bytes(given.tls_key)
        return grpc.ssl_channel_credentials(read_bytes(given.tls_ca), key, cert)


def watched_token(path: Path) -> WatchedFiles[str]:
    """The token in a file. Raises FileError if there is none."""
    return WatchedFiles("token", [path], lambda: read_token(path))


def read_token(path: Path) -> str:
    """A token: one word, printable ASCII. Raises FileError, which does not quote it."""
    words = read_bytes(path).split()
    if len(words) != 1 or not words[0].isascii() or not words[0].decode("ascii").isprintable():
        raise FileError(f"{path}: must hold one token, a word of printable ASCII")
    return words[0].decode()
