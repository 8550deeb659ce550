"""The services' flags that `quire up` takes, and their way to cachemgr, the worker or both."""

import functools
from collections.abc import Iterator
from typing import Any

import click

from quire.cachemgr.flags import OWN_FLAGS
from quire.serving.addresses import Address
from quire.serving.flags import LISTEN_ADDRESS, Flag, add_flags, option, options_of, server_flags

_SERVICES = ("cachemgr", "worker")
# Flags of a service that `quire up` does not take.
_NOT_OF_UP = {
    "--cachemgr": "the worker's cachemgr is the one that is started here",
    "--check": "it is done at each start",
}


def addresses_as_written(_: click.Context, __: click.Parameter, given: tuple[Address, ...]) -> tuple[str, ...]:
    return tuple(map(str, given))


def _known_ports(_: click.Context, __: click.Parameter, given: str | tuple[str, ...] | None) -> Any:
    """Refuse port 0: the command would not print the port that it becomes."""
    for address in (given,) if isinstance(given, str) else given or ():
        if not address.startswith("unix:") and address.endswith(":0"):
            raise click.BadParameter(f"{address} leaves the port open; name one")
    return given


def _own_addresses() -> list[click.Option]:
    """The addresses to listen on. Each service has its own, as --cachemgr-listen and --worker-listen."""
    return [each for each in options_of(server_flags(default_listen="")) if each.type is LISTEN_ADDRESS]


def _passed_on() -> Iterator[tuple[str, click.Option, tuple[str, ...]]]:
    """The services' flags that `quire up` has: its name here, the service's option, and which services get it.

    All other flags go to the worker.
    """
    for each in options_of(server_flags(default_listen="")):
        if each.type is not LISTEN_ADDRESS and each.opts[0] not in _NOT_OF_UP:
            yield each.opts[0], each, _SERVICES
    yield from ((each.opts[0], each, ("cachemgr",)) for each in options_of(OWN_FLAGS))
    for service in _SERVICES:
        yield from ((f"--{service}{each.opts[0][1:]}", each, (service,)) for each in _own_addresses())


def service_options(command: Any) -> Any:
    """Adds the services' flags that `quire up` knows.

    The command receives those that were given as `cachemgr_flags` and `worker_flags`, ready for the services.
    """
    passed_on = list(_passed_on())

    @functools.wraps(command)
    def with_services(*args: Any, worker_flags: tuple[str, ...], **values: Any) -> Any:
        _refuse_others(worker_flags)
        given: dict[str, list[str]] = {service: [] for service in _SERVICES}
        for flag, of_service, services in passed_on:
            passed = as_arguments(of_service.opts[0], values.pop(_name_of(flag)))
            for service in services:
                given[service] += passed
        flags = {f"{service}_flags": tuple(found) for service, found in given.items()}
        flags["worker_flags"] += worker_flags
        return command(*args, **flags, **values)

    return add_flags([_flag_of_up(*each) for each in passed_on])(with_services)


def _flag_of_up(flag: str, of_service: click.Option, services: tuple[str, ...]) -> Flag:
    """A flag as the service has it, but for its value, which goes to the service as it is written, and its default."""
    is_as_written = not isinstance(of_service.type, click.Choice | click.types.BoolParamType)
    return option(
        flag,
        type=str if is_as_written else of_service.type,
        is_flag=of_service.is_flag,
        multiple=of_service.multiple,
        callback=_known_ports if of_service.type is LISTEN_ADDRESS else None,
        metavar=of_service.metavar,
        help=of_service.help if services == _SERVICES else f"{services[0]}: {of_service.help}",
    )


def _refuse_others(worker_flags: tuple[str, ...]) -> None:
    """Raises click.UsageError for a flag that can't be passed on to the worker."""
    own = (each.opts[0] for each in _own_addresses())
    refused = _NOT_OF_UP | {flag: f"give --cachemgr{flag[1:]} and --worker{flag[1:]}" for flag in own}
    for flag, instead in refused.items():
        if any(each == flag or each.startswith(f"{flag}=") for each in worker_flags):
            raise click.UsageError(f"{flag} can't be passed on: {instead}.")


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def as_arguments(flag: str, value: str | tuple[str, ...] | bool | None) -> list[str]:
    """Return a flag as it is written on a command line; nothing if it was not given."""
    if isinstance(value, bool):
        return [flag] if value else []
    values = (value,) if isinstance(value, str) else value or ()
    return [part for each in values for part in (flag, each)]
