"""The flags that both servers take, and how every flag of a command becomes an environment variable."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from quire.serving.access import Roles
from quire.serving.addresses import (
    Address,
    AddressError,
    TcpAddress,
    UnixAddress,
    parse_dial_address,
    parse_listen_address,
)
from quire.serving.dialing import DialOptions
from quire.serving.logs import FORMATS, LEVELS
from quire.serving.runtime_folder import RuntimeFolderError, make_serving_folder
from quire.serving.security import Security, SecurityOptions
from quire.serving.tls import TlsFiles
from quire.serving.tracing import TracingUnavailableError, configure_tracing

F = TypeVar("F", bound=Callable[..., Any])

# click.option that shows its default and its environment variable: use it for every flag.
option = functools.partial(click.option, show_default=True, show_envvar=True)


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


class AddressType(click.ParamType[Address]):
    """A flag whose value is an address, to listen on or to dial; malformed ones are usage errors."""

    name = "address"

    def __init__(self, parse: Callable[[str], Address]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # a default, parsed already
        try:
            return self._parse(value)
        except AddressError as error:
            self.fail(str(error), param, ctx)


FILE = click.Path(dir_okay=False, path_type=Path)
LISTEN_ADDRESS = AddressType(parse_listen_address)
DIAL_ADDRESS = AddressType(parse_dial_address)


def command_settings(prefix: str) -> dict[str, Any]:
    """`context_settings` of a command whose flags are also PREFIX_FLAG in the environment ("QUIRE_CACHEMGR")."""
    return {"auto_envvar_prefix": prefix, "help_option_names": ["-h", "--help"], "max_content_width": 110}


def server_options(*, default_listen: str) -> Callable[[F], F]:
    """Adds the shared flags to a command, which receives them as one argument `server: ServerOptions`.

    If default_listen is a unix socket and no other address is given, the runtime folder is made.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_server(*args: Any, **values: Any) -> Any:
            _trace(values.pop("otlp_endpoint"))
            only_check = values.pop("check")
            if not only_check:
                _make_default_folder(values["listen"])
            server = ServerOptions(
                listen=values.pop("listen"),
                metrics_listen=_port_only(values.pop("metrics_listen"), "--metrics-listen", "metrics are served"),
                log_level=values.pop("log_level"),
                log_format=values.pop("log_format"),
                drain_timeout_s=values.pop("drain_timeout"),
                security=_security(values),
                only_check=only_check,
            )
            return command(*args, server=server, **values)

        decorated: Any = with_server
        for add in reversed(_shared_flags(default_listen)):
            decorated = add(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def dial_options(peer: str) -> Callable[[F], F]:
    """Adds the flags of how a server of another kind is dialed, --PEER-tls-ca and so on.

    The command receives them as one argument `PEER_dial: DialOptions`.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_dial(*args: Any, **values: Any) -> Any:
            names = ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")
            dial = DialOptions(**{name: values.pop(f"{peer}_{name}") for name in names})
            if (dial.tls_cert is None) != (dial.tls_key is None):
                raise click.UsageError(f"--{peer}-tls-cert and --{peer}-tls-key go together.")
            if dial.tls_ca is None and (dial.tls_cert or dial.tls_server_name):
                raise click.UsageError(f"--{peer}-tls-cert and --{peer}-tls-server-name need --{peer}-tls-ca.")
            return command(*args, **{f"{peer}_dial": dial}, **values)

        decorated: Any = with_dial
        for add in reversed(_dial_flags(peer)):
            decorated = add(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def _dial_flags(peer: str) -> list[Callable[[Any], Any]]:
    return [
        option(
            f"--{peer}-tls-ca",
            type=FILE,
            metavar="FILE",
            help=f"Authorities of the {peer}'s certificate, PEM: TLS, if it is at host:port.",
        ),
        option(f"--{peer}-tls-cert", type=FILE, metavar="FILE", help=f"The certificate to show the {peer}, PEM."),
        option(f"--{peer}-tls-key", type=FILE, metavar="FILE", help="Its private key, PEM, without a password."),
        option(
            f"--{peer}-tls-server-name",
            metavar="NAME",
            help=f"Whose certificate the {peer} must have, if not that of the host dialed.",
        ),
        option(f"--{peer}-token-file", type=FILE, metavar="FILE", help=f"Holds the token to show the {peer}."),
    ]


def _shared_flags(default_listen: str) -> list[Callable[[Any], Any]]:
    return [*_serving_flags(default_listen), *_security_flags()]


def _serving_flags(default_listen: str) -> list[Callable[[Any], Any]]:
    return [
        option(
            "--listen",
            type=LISTEN_ADDRESS,
            multiple=True,
            default=(default_listen,),
            metavar="ADDRESS",
            help="Where to serve gRPC: host:port (port 0: a free one) or unix:/path. May be given several times; "
            "in the environment, separated by spaces.",
        ),
        option(
            "--metrics-listen",
            type=LISTEN_ADDRESS,
            metavar="HOST:PORT",
            help="Where to serve Prometheus metrics over HTTP. Off if not given.",
        ),
        option(
            "--health-listen",
            type=LISTEN_ADDRESS,
            metavar="HOST:PORT",
            help="Where to answer grpc.health.v1 and nothing else, in plain text from the first moment on: for probes "
            "that know no TLS, such as the kubelet's.",
        ),
        option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default="info",
            help="The least severe log lines to write to stderr.",
        ),
        option(
            "--log-format",
            type=click.Choice(FORMATS),
            default=FORMATS[0],
            help="Log lines for people, with key=value pairs, or a JSON object each.",
        ),
        option(
            "--otlp-endpoint",
            metavar="URL",
            help="Where to send OpenTelemetry traces, OTLP over gRPC: http://host:port. Needs the extra otel. Off if "
            "not given; what is sampled is the callers' decision.",
        ),
        option(
            "--drain-timeout",
            type=click.FloatRange(min=0),
            default=30.0,
            metavar="SECONDS",
            help="On SIGTERM or SIGINT, how long work that has begun may take to finish. A second signal ends it at "
            "once.",
        ),
        option(
            "--check",
            is_flag=True,
            allow_from_autoenv=False,
            help="Check the flags and the files that they name, and end: status 0 if nothing is wrong.",
        ),
    ]


def _security_flags() -> list[Callable[[Any], Any]]:
    return [
        option("--tls-cert", type=FILE, metavar="FILE", help="The certificate's chain, PEM: TLS on every TCP port."),
        option("--tls-key", type=FILE, metavar="FILE", help="The certificate's private key, PEM, without a password."),
        option(
            "--tls-client-ca",
            type=FILE,
            metavar="FILE",
            help="Authorities of client certificates, PEM: every TCP connection must bring one, metrics too.",
        ),
        option(
            "--token-listen",
            type=LISTEN_ADDRESS,
            multiple=True,
            metavar="HOST:PORT",
            help="Where to serve with TLS but without client certificates, for who has a token. May be given several "
            "times.",
        ),
        option("--token-file", type=FILE, metavar="FILE", help="Who may call, a line each: NAME ROLES SHA256|cert."),
        option(
            "--allow-plaintext",
            is_flag=True,
            help="Serve without TLS where others can read it: on addresses that are not loopback.",
        ),
    ]


def _security(values: dict[str, Any]) -> SecurityOptions:
    cert, key, client_ca = (values.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
    token_listen, token_file = values.pop("token_listen"), values.pop("token_file")
    health_listen = _port_only(values.pop("health_listen"), "--health-listen", "health is answered")
    if (cert is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if client_ca is not None and cert is None:
        raise click.UsageError("--tls-client-ca needs --tls-cert and --tls-key.")
    if token_listen and (cert is None or token_file is None):
        raise click.UsageError("--token-listen needs --tls-cert, --tls-key and --token-file.")
    if any(not isinstance(address, TcpAddress) for address in token_listen):
        raise click.BadParameter("unix sockets ask for no certificate: use --listen", param_hint="'--token-listen'")
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
