"""The flags that both servers take, and how every flag of a command becomes an environment variable."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from quire.serving.addresses import (
    Address,
    AddressError,
    TcpAddress,
    parse_dial_address,
    parse_listen_address,
)
from quire.serving.logs import LEVELS

F = TypeVar("F", bound=Callable[..., Any])

# click.option that shows its default and its environment variable: use it for every flag.
option = functools.partial(click.option, show_default=True, show_envvar=True)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The values of the shared flags."""

    listen: tuple[Address, ...]
    metrics_listen: TcpAddress | None
    log_level: str
    drain_timeout_s: float


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


LISTEN_ADDRESS = AddressType(parse_listen_address)
DIAL_ADDRESS = AddressType(parse_dial_address)


def command_settings(prefix: str) -> dict[str, Any]:
    """`context_settings` of a command whose flags are also PREFIX_FLAG in the environment ("QUIRE_CACHEMGR")."""
    return {"auto_envvar_prefix": prefix, "help_option_names": ["-h", "--help"], "max_content_width": 110}


def server_options(*, default_listen: str) -> Callable[[F], F]:
    """Adds the shared flags to a command, which receives them as one argument `server: ServerOptions`."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_server(*args: Any, **values: Any) -> Any:
            server = ServerOptions(
                listen=values.pop("listen"),
                metrics_listen=_metrics_address(values.pop("metrics_listen")),
                log_level=values.pop("log_level"),
                drain_timeout_s=values.pop("drain_timeout"),
            )
            return command(*args, server=server, **values)

        decorated: Any = with_server
        for add in reversed(_shared_flags(default_listen)):
            decorated = add(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def _shared_flags(default_listen: str) -> list[Callable[[Any], Any]]:
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
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default="info",
            help="The least severe log lines to write to stderr.",
        ),
        option(
            "--drain-timeout",
            type=click.FloatRange(min=0),
            default=30.0,
            metavar="SECONDS",
            help="On SIGTERM or SIGINT, how long work that has begun may take to finish. A second signal ends it at "
            "once.",
        ),
    ]


def _metrics_address(address: Address | None) -> TcpAddress | None:
    if address is None or isinstance(address, TcpAddress):
        return address
    raise click.BadParameter("metrics are served on host:port, not on a unix socket", param_hint="'--metrics-listen'")
