"""Flags: what services and clients have in common, and how every flag becomes an environment variable.

A list of flags is a list of decorators. `quire up` makes its own flags out of the services' lists.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from quire.serving.addresses import (
    DEFAULT_HTTP_LISTEN,
    MAX_PORT,
    Address,
    AddressError,
    TcpAddress,
    parse_dial_address,
    parse_listen_address,
    parse_unix_address,
)
from quire.serving.logs import FORMATS, LEVELS
from quire.serving.runtime_folder import default_cachemgr

Flag = Callable[[Any], Any]

# click.option that shows its default and its environment variable: use it for every flag.
option = functools.partial(click.option, show_default=True, show_envvar=True)


class AddressType(click.ParamType[Address]):
    """A flag with an address to listen on or to dial; malformed ones are usage errors."""

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


DRAIN_TIMEOUT_S = 30.0
FILE = click.Path(dir_okay=False, path_type=Path)
LISTEN_ADDRESS = AddressType(parse_listen_address)
DIAL_ADDRESS = AddressType(parse_dial_address)
UNIX_ADDRESS = AddressType(parse_unix_address)


def cachemgr_option(**settings: Any) -> Flag:
    """Return --cachemgr of a client: by default that of `quire up`. The settings are further ones of click.option."""
    return option(
        "--cachemgr",
        default=default_cachemgr,
        show_default=default_cachemgr(),
        metavar="ADDRESS",
        help="Address of cachemgr: unix:/path or host:port.",
        **settings,
    )


# The address for HTTP in two parts, as servers of other engines have it. They are no environment variables: Kubernetes
# sets NAME_PORT for every service.
HOST_FLAGS: list[Flag] = [
    option(
        "--host",
        metavar="HOST",
        allow_from_autoenv=False,
        show_envvar=False,
        help="Host of the one address for HTTP, in place of an address HOST:PORT.",
    ),
    option(
        "--port",
        type=click.IntRange(0, MAX_PORT),
        metavar="PORT",
        allow_from_autoenv=False,
        show_envvar=False,
        help="Port of the one address for HTTP.",
    ),
]


def http_addresses(
    flag: str, addresses: tuple[Address, ...], *, host: str | None, port: int | None
) -> tuple[Address, ...]:
    """Return the address of --host and --port if one of them was given, else the addresses of `flag`.

    The part that is not given is that of DEFAULT_HTTP_LISTEN. Raises click.UsageError if the command line has `flag`
    too, and for a host that is none.
    """
    if host is None and port is None:
        return addresses
    source = click.get_current_context().get_parameter_source(flag.removeprefix("--").replace("-", "_"))
    if source is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--host and --port are one address, {flag} is another: give one or the other.")
    default = parse_listen_address(DEFAULT_HTTP_LISTEN)
    assert isinstance(default, TcpAddress)
    given = TcpAddress((host or default.host).strip("[]"), default.port if port is None else port)
    try:
        return (parse_listen_address(str(given)),)
    except AddressError as error:
        raise click.BadParameter(str(error), param_hint="'--host'") from error


def command_settings(prefix: str) -> dict[str, Any]:
    """`context_settings` of a command with flags that can also be set as PREFIX_FLAG in the environment
    ("QUIRE_CACHEMGR")."""
    return {"auto_envvar_prefix": prefix, "help_option_names": ["-h", "--help"], "max_content_width": 110}


def add_flags(flags: Sequence[Flag]) -> Flag:
    """Adds these flags to a command, in this order."""

    def decorate(command: Any) -> Any:
        for add in reversed(flags):
            command = add(command)
        return command

    return decorate


def options_of(flags: Sequence[Flag]) -> list[click.Option]:
    """Return the values that click reads of these flags, in this order."""
    made: click.Command = click.command(add_flags(flags)(lambda: None))
    return [each for each in made.params if isinstance(each, click.Option)]


# The options to dial a service, by the fields of DialOptions: metavar and help; "{}" in a help is the service.
DIAL_FLAGS = {
    "tls_ca": ("FILE", "Authorities of the certificate of {}, PEM: TLS to host:port."),
    "tls_cert": ("FILE", "The client certificate for {}, with its chain, PEM."),
    "tls_key": ("FILE", "Its private key, PEM, without a password."),
    "tls_server_name": ("NAME", "The name in the certificate of {}, if not the dialed host."),
    "token_file": ("FILE", "The file with the token for {}."),
}


def dial_flags(peer: str, *, prefix: str = "", envvar_prefix: str | None = None) -> list[Flag]:
    """--PREFIXtls-ca and so on. envvar_prefix is for commands that share variables; None: each has its own."""
    return [
        option(
            f"--{prefix}{name.replace('_', '-')}",
            type=FILE if metavar == "FILE" else str,
            envvar=None if envvar_prefix is None else f"{envvar_prefix}_{name.upper()}",
            metavar=metavar,
            help=text.format(peer),
        )
        for name, (metavar, text) in DIAL_FLAGS.items()
    ]


def server_flags(*, default_listen: str, without: Sequence[str] = ()) -> list[Flag]:
    """The flags that all servers have, without those of these names."""
    flags = [*_serving_flags(default_listen), *_security_flags()]
    return [flag for flag in flags if options_of([flag])[0].opts[0] not in without]


def _serving_flags(default_listen: str) -> list[Flag]:
    return [
        option(
            "--listen",
            type=LISTEN_ADDRESS,
            multiple=True,
            default=(default_listen,),
            metavar="ADDRESS",
            help="Address to serve: host:port or unix:/path. May be given several times; "
            "in the environment, separated by spaces.",
        ),
        option(
            "--metrics-listen",
            type=LISTEN_ADDRESS,
            metavar="HOST:PORT",
            help="Address of Prometheus metrics over HTTP. Off if not given.",
        ),
        option(
            "--health-listen",
            type=LISTEN_ADDRESS,
            metavar="HOST:PORT",
            help="Address that answers only grpc.health.v1, in plain text from the start: for probes "
            "without TLS, such as the kubelet's.",
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
            help="Address for OpenTelemetry traces, OTLP over gRPC: http://host:port. Needs the extra otel. Off by "
            "default; the callers decide which traces are sampled.",
        ),
        option(
            "--drain-timeout",
            type=click.FloatRange(min=0),
            default=DRAIN_TIMEOUT_S,
            metavar="SECONDS",
            help="Time for running work to finish after SIGTERM or SIGINT. A second signal ends it at once.",
        ),
        option(
            "--check",
            is_flag=True,
            allow_from_autoenv=False,
            help="Check the flags and the files that they name, and end: status 0 if nothing is wrong.",
        ),
    ]


def _security_flags() -> list[Flag]:
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
            help="Address with TLS but without client certificates, for callers with a token. May be given "
            "several times.",
        ),
        option("--token-file", type=FILE, metavar="FILE", help="The callers, a line each: NAME ROLES SHA256|cert."),
        option(
            "--allow-plaintext",
            is_flag=True,
            help="Serve addresses that are not loopback without TLS, although others can read the traffic.",
        ),
    ]
