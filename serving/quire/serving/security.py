"""The security options of a server process, and the objects made of them: certificates, access, plain text checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.serving.access import Access, Roles
from quire.serving.addresses import Address, AddressError, TcpAddress, is_local
from quire.serving.tls import ServerTls, TlsFiles


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """The security flags of a server.

    tls               None: plain text, on loopback and unix sockets
    token_file        the callers; None: client certificates alone decide
    token_listen      further addresses, which require no client certificate
    health_listen     a further address, always in plain text, that answers only health checks
    allow_plaintext   plain text on any address
    """

    tls: TlsFiles | None = None
    token_file: Path | None = None
    token_listen: tuple[TcpAddress, ...] = ()
    health_listen: TcpAddress | None = None
    allow_plaintext: bool = False

    @property
    def asks_who(self) -> bool:
        """True if callers have to authenticate."""
        return self.token_file is not None or (self.tls is not None and self.tls.client_ca is not None)


class Security:
    """The security of one server: made at start, asked at each port and call. Raises FileError, when it is made.

    roles and domain are Access's.
    """

    def __init__(self, options: SecurityOptions, *, roles: Mapping[str, Roles], domain: str) -> None:
        self._options = options
        self.tls = None if options.tls is None else ServerTls(options.tls)
        self.access = Access(roles, token_file=options.token_file, domain=domain) if options.asks_who else None
        self.token_listen = options.token_listen
        self.health_listen = options.health_listen

    @property
    def asks_clients(self) -> bool:
        """True if TCP connections need a client certificate, but for those of --token-listen."""
        return self.tls is not None and self.tls.asks_clients

    @property
    def asks_tokens(self) -> bool:
        """Return whether there is a token file."""
        return self._options.token_file is not None

    def check_plaintext(self, flag: str, address: Address) -> None:
        """Raises AddressError if plain text there could be read on the network."""
        if self.tls is None and not self._options.allow_plaintext and not is_local(address):
            raise AddressError(
                f"{flag} {address}: not loopback, and there is no certificate: others could read and change the data "
                "on the network. Give --tls-cert and --tls-key, or --allow-plaintext"
            )
