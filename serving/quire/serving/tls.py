"""Certificates of a server: read and checked, given to gRPC and to the metrics page, and read again when they change.

One certificate is used on every port. Handshakes that begin after the files have changed use the new one; connections
that are open stay as they are. A certificate that can't be used, and a key that is not its own, are refused: at the
start the process does not start, later the certificate before stays in force.
"""

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from quire.serving.watched import FileError, WatchedFiles, read_bytes

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server's certificate.

    cert        its chain, PEM: its own certificate first
    key         its private key, PEM, not encrypted
    client_ca   authorities of client certificates, PEM; None: clients need none
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Certificate:
    """The content of TlsFiles.

    expires_at_s  when the server's own certificate ends, since 1970
    context       for servers other than gRPC's
    """

    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    client_ca_pem: bytes | None
    expires_at_s: float
    context: ssl.SSLContext = field(repr=False, compare=False)


class ServerTls:
    """The certificate of a server process. Raises FileError, when it is made, if it can't be used."""

    def __init__(self, files: TlsFiles) -> None:
        paths = (files.cert, files.key, files.client_ca)
        self._watched = WatchedFiles("certificate", paths, lambda: read_certificate(files))
        self.asks_clients = files.client_ca is not None

    def current(self) -> Certificate:
        """The certificate in force."""
        return self._watched.current()

    def port_credentials(self, *, asks_clients: bool) -> grpc.ServerCredentials:
        """Return the credentials of one port of a gRPC server; another port needs its own.

        gRPC checks before each handshake, port by port, whether the certificate has changed.
        """
        served = self.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            found = self.current()
            if found is served:
                return None
            served = found
            return _configuration(found, asks_clients=asks_clients)

        initial = _configuration(served, asks_clients=asks_clients)
        # The stubs do not know that it may return None, which is "as before".
        fetch: Any = changed
        return grpc.dynamic_ssl_server_credentials(initial, fetch, require_client_authentication=asks_clients)


def _configuration(certificate: Certificate, *, asks_clients: bool) -> grpc.ServerCertificateConfiguration:
    pairs = [(certificate.key_pem, certificate.cert_pem)]
    return grpc.ssl_server_certificate_configuration(pairs, certificate.client_ca_pem if asks_clients else None)


def read_certificate(files: TlsFiles) -> Certificate:
    """Raises FileError if a file can't be read, the key is not the certificate's, or the certificate is not valid."""
    cert_pem, key_pem = read_bytes(files.cert), read_bytes(files.key)
    client_ca_pem = None if files.client_ca is None else read_bytes(files.client_ca)
    expires_at_s = check_certificate(files.cert, files.key, is_server=True)
    context = _loaded(ssl.PROTOCOL_TLS_SERVER, files.cert, files.key)
    if files.client_ca is not None:
        trust(context, files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if (cert_pem, key_pem) != (read_bytes(files.cert), read_bytes(files.key)):
        raise FileError(f"{files.cert}: changed while it was read")
    return Certificate(cert_pem, key_pem, client_ca_pem, expires_at_s, context)


def check_certificate(cert: Path, key: Path, *, is_server: bool) -> float:
    """Tries a handshake with it, in memory; returns when it expires, in seconds since 1970.

    The issuer is not checked: that is for the other side to do. Raises FileError if it is expired, not valid yet, or
    for another purpose.
    """
    first = _CERTIFICATE.search(read_bytes(cert))
    if first is None:
        raise FileError(f"{cert}: no certificate in it (PEM, -----BEGIN CERTIFICATE-----)")
    server = _loaded(ssl.PROTOCOL_TLS_SERVER, cert, key)
    client = _loaded(ssl.PROTOCOL_TLS_CLIENT, cert, key)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    judge = client if is_server else server
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(cadata=first[0].decode("ascii", "replace"))
    try:
        server_side, client_side = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise FileError(f"{cert}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise FileError(f"{cert}: can't be used: {error.reason or error}") from error
    shown = (client_side if is_server else server_side).getpeercert() or {}
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def trust(context: ssl.SSLContext, authorities: Path) -> None:
    """Makes the context trust the certificates of a file. Raises FileError."""
    read_bytes(authorities)
    try:
        context.load_verify_locations(cafile=authorities)
    except (ssl.SSLError, OSError) as error:
        raise FileError(f"{authorities}: no certificate of an authority in it (PEM)") from error


def _loaded(protocol: ssl._SSLMethod, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise FileError(f"{key}: not the key of the certificate in {cert}") from error
        culprit = cert if not _is_readable_chain(cert) else key
        what = "a certificate" if culprit is cert else "a private key without a password"
        raise FileError(f"{culprit}: not {what} (PEM)") from error
    except OSError as error:
        raise FileError(f"{key}: {error.strerror}") from error
    return context


def _is_readable_chain(cert: Path) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=cert)
    except (ssl.SSLError, OSError):
        return False
    return True


def _no_password() -> bytes:
    """Return no password. Without this function OpenSSL would prompt on the terminal."""
    return b"-"


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both sides of it, the server's first."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):  # more flights than a handshake has
        is_done = True
        for side in (client_side, server_side):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
        if is_done:
            break
    return server_side, client_side
