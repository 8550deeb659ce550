"""Values of the flags that both servers take, out of what their command lines say. The flags are in flags.py."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from quire.serving.access import Roles
from quire.serving.addresses import Address, TcpAddress, UnixAddress
from quire.serving.dialing import DialOptions
from quire.serving.flags import DIAL_FLAGS, add_flags, dial_flags, server_flags
from quire.serving.runtime_folder import RuntimeFolderError, make_serving_folder
from quire.serving.security import Security, SecurityOptions
from quire.serving.tls import TlsFiles
from quire.serving.tracing import TracingUnavailableError, configure_tracing

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The values of the shared flags."""

    listen: tuple[Address, ...]
    metrics_listen: TcpAddress | None
    log_level: str
    log_format: str
    drain_timeout_s: float
    security: SecurityOptions = field(default_factory=SecurityOptions)
    only_check: bool = False

    def secure(self, *, roles: Mapping[str, Roles], domain: str) -> Security:
        """The security of a server with these flags; roles and domain are Access's.

        Raises FileError, or AddressError if plain text would be served where others can read it.
        """
        security = Security(self.security, roles=roles, domain=domain)
        for address in self.listen:
            security.check_plaintext("--listen", address)
        if self.metrics_listen is not None:
            security.check_plaintext("--metrics-listen", self.metrics_listen)
        return security

    def end_check(self, check: Callable[[], object]) -> NoReturn:
        """End the process as --check promises: with status 0, or with what `check` raises as a ValueError."""
        try:
            check()
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        raise click.exceptions.Exit(0)


def server_options(*, default_listen: str, without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Adds the shared flags to a command, which receives them as one argument `server: ServerOptions`.

    Flags `without` are left out.

    If default_listen is a unix socket and no other address is given, the runtime folder is made.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_server(*args: Any, **values: Any) -> Any:
            _trace(values.pop("otlp_endpoint", None))
            only_check = values.pop("check")
            if not only_check:
                _make_default_folder(values["listen"])
            server = ServerOptions(
                listen=values.pop("listen"),
                metrics_listen=_port_only(values.pop("metrics_listen"), "--metrics-listen", "metrics are served"),
                log_level=values.pop("log_level"),
                log_format=values.pop("log_format"),
                drain_timeout_s=values.pop("drain_timeout", 0.0),
                security=_security(values),
                only_check=only_check,
            )
            return command(*args, server=server, **values)

        return add_flags(server_flags(default_listen=default_listen, without=without))(with_server)  # type: ignore[no-any-return]

    return decorate


def dial_options(peer: str) -> Callable[[Command], Command]:
    """Adds the flags of how a server of another kind is dialed, --PEER-tls-ca and so on.

    The command receives them as one argument `PEER_dial: DialOptions`.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_dial(*args: Any, **values: Any) -> Any:
            try:
                dial = DialOptions(**{name: values.pop(f"{peer}_{name}") for name in DIAL_FLAGS})
            except ValueError as error:  # it names the flags as a client has them
                raise click.UsageError(f"{str(error).replace('--', f'--{peer}-')}.") from error
            return command(*args, **{f"{peer}_dial": dial}, **values)

        return add_flags(dial_flags(peer, prefix=f"{peer}-"))(with_dial)  # type: ignore[no-any-return]

    return decorate


def _security(values: dict[str, Any]) -> SecurityOptions:
    cert, key, client_ca = (values.pop(name, None) for name in ("tls_cert", "tls_key", "tls_client_ca"))
    token_listen, token_file = values.pop("token_listen", ()), values.pop("token_file", None)
    health_listen = _port_only(values.pop("health_listen", None), "--health-listen", "health is answered")
    if (cert is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if client_ca is not None and cert is None:
        raise click.UsageError("--tls-client-ca needs --tls-cert and --tls-key.")
    if token_listen and (cert is None or token_file is None):
        raise click.UsageError("--token-listen needs --tls-cert, --tls-key and --token-file.")
    if any(not isinstance(address, TcpAddress) for address in token_listen):
        raise click.BadParameter("unix sockets require no certificate: use --listen", param_hint="'--token-listen'")
    tls = None if cert is None else TlsFiles(cert, key, client_ca)
    return SecurityOptions(tls, token_file, token_listen, health_listen, allow_plaintext=values.pop("allow_plaintext"))


def _make_default_folder(listen: tuple[Address, ...]) -> None:
    """Make the runtime folder, if `listen` is the default and a socket in it."""
    is_default = click.get_current_context().get_parameter_source("listen") is ParameterSource.DEFAULT
    if not is_default or not any(isinstance(address, UnixAddress) for address in listen):
        return
    try:
        make_serving_folder()
    except RuntimeFolderError as error:
        raise click.ClickException(f"{error}. Give --listen.") from error


def _trace(endpoint: str | None) -> None:
    name = click.get_current_context().command.name
    try:
        configure_tracing(endpoint, service_name=f"quire-{name}")
    except TracingUnavailableError as error:
        raise click.UsageError(f"--otlp-endpoint needs OpenTelemetry: {error}") from error


def _port_only(address: Address | None, flag: str, what: str) -> TcpAddress | None:
    if address is None or isinstance(address, TcpAddress):
        return address
    raise click.BadParameter(f"{what} on host:port, not on a unix socket", param_hint=f"'{flag}'")
