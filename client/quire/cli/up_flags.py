"""The flags of `quire up` that go to the services: one table, made of the services' own lists of flags.

A flag goes to every service that has a flag of this name. Exceptions:

    --listen and the like    each service has its own: --cachemgr-listen, --worker-listen, --gateway-metrics-listen, ...
    --listen of the gateway  is --http-listen, or --host and --port
    --token-file             the gateway takes the same file as its --api-keys, unless its callers are given otherwise
    --api-key                goes through the environment: other users of the machine can read a command line
"""

import functools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from quire.cachemgr.flags import OWN_FLAGS as CACHEMGR_FLAGS
from quire.gateway.config import NO_FLAGS_OF_GATEWAY
from quire.gateway.config import OWN_FLAGS as GATEWAY_FLAGS
from quire.serving.flags import LISTEN_ADDRESS, Flag, add_flags, dial_flags, option, options_of, server_flags
from quire.worker.flags import OWN_FLAGS as WORKER_FLAGS

SERVICES = ("cachemgr", "worker", "gateway")
_DIAL_CACHEMGR = dial_flags("cachemgr", prefix="cachemgr-")
_SERVER_FLAGS = server_flags(default_listen="")
_FLAGS_OF: dict[str, list[click.Option]] = {
    "cachemgr": options_of([*_SERVER_FLAGS, *CACHEMGR_FLAGS]),
    "worker": options_of([*_SERVER_FLAGS, *WORKER_FLAGS, *_DIAL_CACHEMGR]),
    "gateway": options_of(
        [*server_flags(default_listen="", without=NO_FLAGS_OF_GATEWAY), *GATEWAY_FLAGS, *_DIAL_CACHEMGR]
    ),
}
_ADDRESSES = tuple(each.opts[0] for each in options_of(_SERVER_FLAGS) if each.type is LISTEN_ADDRESS)


def _services_with(flag: str) -> list[str]:
    return [service for service, options in _FLAGS_OF.items() if any(each.opts[0] == flag for each in options)]


def _flag_of(service: str, address: str) -> str:
    """Return the flag of `quire up` for an address of one service."""
    return "--http-listen" if (service, address) == ("gateway", "--listen") else f"--{service}{address[1:]}"


# Flags of the services that `quire up` decides itself.
_DECIDED_HERE = {
    "--cachemgr": "the cachemgr of the worker and of the gateway is the one that is started here",
    "--check": "every start checks the flags",
    **{flag: f"give {' or '.join(_flag_of(service, flag) for service in _services_with(flag))}" for flag in _ADDRESSES},
}
_NOT_IN_TABLE = {*_DECIDED_HERE, "--model", "--host", "--port"}
_CALLERS_OF_GATEWAY = ("api_keys", "api_key", "allow_anonymous")
_IN_ENVIRONMENT = {"--api-key": "QUIRE_SERVE_API_KEY"}


@dataclass(frozen=True, slots=True)
class SharedFlag:
    """One row of the table.

    flag       its name at `quire up`
    option     as the services declare it
    services   those that get its value
    """

    flag: str
    option: click.Option
    services: tuple[str, ...]

    @property
    def name(self) -> str:
        """The parameter of the command."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class ServiceFlags:
    """The flags of each service as `quire up` was given them.

    arguments        by service
    environment      by service: values that no command line may show
    drain_timeout_s  of each service
    has_keys         the gateway asks its callers for a key
    """

    arguments: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, Mapping[str, str]]
    drain_timeout_s: float
    has_keys: bool


def shared_flags() -> Iterator[SharedFlag]:
    """Yield the table."""
    names = dict.fromkeys(each.opts[0] for options in _FLAGS_OF.values() for each in options)
    for flag in names:
        having = {service: each for service in SERVICES for each in _FLAGS_OF[service] if each.opts[0] == flag}
        if flag in _ADDRESSES:
            yield from (
                SharedFlag(_flag_of(service, flag), each, (service,))
                for service, each in having.items()
                if (service, flag) != ("gateway", "--listen")
            )
        elif flag not in _NOT_IN_TABLE:
            yield SharedFlag(flag, next(iter(having.values())), tuple(having))


TABLE = tuple(shared_flags())


def service_options(command: Any) -> Any:
    """Adds the table's flags. The command receives those that were given as `flags: ServiceFlags`.

    A flag that no process would get is refused, so the command must have the flag --no-http.
    """

    @functools.wraps(command)
    def with_services(*args: Any, no_http: bool, **values: Any) -> Any:
        given = {each: values.pop(each.name) for each in TABLE}
        _check_callers({each.name: value for each, value in given.items()})
        for each, value in given.items():
            if no_http and each.services == ("gateway",) and value:
                raise click.UsageError(f"{each.flag} is a flag of the gateway, and --no-http starts none.")
        return command(*args, flags=flags_of_services(given), no_http=no_http, **values)

    return add_flags([*map(_flag_of_up, TABLE), *_refusals()])(with_services)


def flags_of_services(given: Mapping[SharedFlag, Any]) -> ServiceFlags:
    """Return the flags of each service; `given` has the value of every row, None or empty if it was not given."""
    arguments: dict[str, list[str]] = {service: [] for service in SERVICES}
    environment: dict[str, dict[str, str]] = {service: {} for service in SERVICES}
    for shared, value in given.items():
        for service in shared.services:
            if shared.flag not in _IN_ENVIRONMENT:
                arguments[service] += as_arguments(shared.option, value)
            elif value:
                environment[service][_IN_ENVIRONMENT[shared.flag]] = " ".join(value)
    values = {shared.name: value for shared, value in given.items()}
    if values["token_file"] and not any(values[name] for name in _CALLERS_OF_GATEWAY):
        arguments["gateway"] += ["--api-keys", values["token_file"]]
    return ServiceFlags(
        {service: tuple(found) for service, found in arguments.items()},
        environment,
        drain_timeout_s=values["drain_timeout"],
        has_keys="--api-keys" in arguments["gateway"] or bool(values["api_key"]),
    )


def _check_callers(values: Mapping[str, Any]) -> None:
    """Raise click.UsageError if cachemgr would authenticate its callers, but not know the worker and the gateway."""
    asking = next((flag for flag in ("token_file", "tls_client_ca") if values[flag]), None)
    if asking is None or (values["token_file"] and values["cachemgr_token_file"]):
        return
    lacking = "--cachemgr-token-file" if values["token_file"] else "--token-file and --cachemgr-token-file"
    raise click.UsageError(
        f"--{asking.replace('_', '-')} needs {lacking}: cachemgr then asks every caller for a token, also the worker "
        "and the gateway. `quire token NAME --role worker --role client --role gateway --out FILE` makes theirs."
    )


def _flag_of_up(shared: SharedFlag) -> Flag:
    """A flag as the service has it, but for its value, which goes to the service as it is written, and its default."""
    each = shared.option
    is_as_written = not isinstance(each.type, click.Choice | click.types.BoolParamType | click.types.FloatParamType)
    return option(
        "/".join((shared.flag, *each.secondary_opts)),
        type=str if is_as_written else each.type,
        is_flag=each.is_flag,
        default=each.default if shared.flag == "--drain-timeout" else None,  # `quire up` waits for as long
        multiple=each.multiple,
        callback=_known_ports if each.type is LISTEN_ADDRESS else None,
        metavar=each.metavar,
        help=each.help if len(shared.services) > 1 else f"{shared.services[0]}: {each.help}",
        hidden=is_of_one(shared),
    )


class UpCommand(click.Command):
    """`quire up`: its help names the flags that are explained by the --help of a service."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, then the names of those that one service has."""
        super().format_options(ctx, formatter)
        for service, manual in zip(SERVICES, ("quire cachemgr", "quire worker", "quire serve"), strict=True):
            flags = [shared.flag for shared in TABLE if is_of_one(shared) and shared.services == (service,)]
            with formatter.section(f"Flags of the {service}, as `{manual} --help` explains them"):
                width, indent = formatter.width - formatter.current_indent, " " * formatter.current_indent
                lines = textwrap.wrap(" ".join(flags), width, break_on_hyphens=False)
                formatter.write("".join(f"{indent}{line}\n" for line in lines))


def is_of_one(shared: SharedFlag) -> bool:
    """Say if the flag is explained by the --help of the one service that has it."""
    return len(shared.services) == 1 and shared.option.opts[0] not in _ADDRESSES


def _known_ports(_: click.Context, __: click.Parameter, given: str | tuple[str, ...] | None) -> Any:
    """Refuse port 0: the command would not print the port that it becomes."""
    for address in (given,) if isinstance(given, str) else given or ():
        if not address.startswith("unix:") and address.endswith(":0"):
            raise click.BadParameter(f"{address} leaves the port open; name one")
    return given


def _refusals() -> Iterator[Flag]:
    """Flags of the services that are no flags of `quire up`: each is refused with what to do instead."""
    for flag, instead in _DECIDED_HERE.items():
        yield option(
            flag,
            is_flag=flag == "--check",
            hidden=True,
            expose_value=False,
            allow_from_autoenv=False,
            callback=functools.partial(_refuse, flag, instead),
        )


def _refuse(flag: str, instead: str, _: click.Context, __: click.Parameter, given: Any) -> None:
    if given:
        raise click.UsageError(f"{flag} can't be passed on: {instead}.")


def as_arguments(of_service: click.Option, value: str | float | tuple[str, ...] | None) -> list[str]:
    """Return a flag as it is written on a service's command line; nothing if it was not given."""
    if value is True:
        return [of_service.opts[0]]
    if value is False:
        return of_service.secondary_opts[:1]
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    return [part for each in values for part in (of_service.opts[0], str(each))]
