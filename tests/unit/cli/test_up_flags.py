"""Each flag of cachemgr and of the worker, given to `quire up`, reaches the service or the services that have it."""

from __future__ import annotations

from typing import Any

import click
import pytest

from quire.cachemgr.__main__ import main as cachemgr
from quire.cli.commands import up
from quire.worker.__main__ import main as worker

SERVICES: dict[str, click.Command] = {"cachemgr": cachemgr, "worker": worker}
# What `quire up` decides itself.
OWN = {"--help", "--check", "--model", "--cachemgr"}
ADDRESSES = {"--listen", "--metrics-listen", "--health-listen", "--token-listen"}


def flags_of(service: str) -> dict[str, click.Option]:
    options = (each for each in SERVICES[service].params if isinstance(each, click.Option))
    return {option.opts[0]: option for option in options if option.opts[0] not in OWN}


def sample(option: click.Option) -> list[str]:
    """Return what may stand behind the flag: a value that differs from the default."""
    if option.is_flag:
        return []
    if isinstance(option.type, click.Choice):
        return [next(str(choice) for choice in option.type.choices if choice != option.default)]
    by_name = {"--profile-steps": "3:4", "--memory-share": "0.25", "--advertise": "127.0.0.1:7"}
    if option.opts[0] in ADDRESSES:
        return ["127.0.0.1:7"]
    return [by_name.get(option.opts[0], "/dev/null" if isinstance(option.type, click.Path) else "77")]


def passed_on(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Return by service the flags that `quire up` gives to it."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("quire.cli.up.run_up", lambda **values: given.update(values))
    up.main(["--model", "m", *arguments], standalone_mode=False)
    return {service: given[f"{service}_flags"] for service in SERVICES}


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (flag of up, flag of the service, the services)."""
    found = []
    for flag in sorted(flags_of("cachemgr") | flags_of("worker")):
        having = tuple(service for service in SERVICES if flag in flags_of(service))
        if flag in ADDRESSES:
            found += [(f"--{service}{flag[1:]}", flag, (service,)) for service in having]
        else:
            found.append((flag, flag, having))
    return found


@pytest.mark.parametrize(("flag", "meant", "services"), cases(), ids=lambda value: str(value))
def test_a_flag_reaches_the_services_that_have_it(
    flag: str, meant: str, services: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = sample(flags_of(services[0])[meant])
    found = passed_on(flag, *value, monkeypatch=monkeypatch)
    assert found == {service: (meant, *value) if service in services else () for service in SERVICES}
    for service in services:
        option = flags_of(service)[meant]
        parser = SERVICES[service].make_parser(click.Context(SERVICES[service]))
        read, rest, _ = parser.parse_args([*found[service]])
        assert list(read) == [option.name]
        assert not rest


@pytest.mark.parametrize("flag", sorted(ADDRESSES))
def test_an_address_without_a_service_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError, match=f"give --cachemgr{flag[1:]} and --worker{flag[1:]}"):
        passed_on(flag, "127.0.0.1:7", monkeypatch=monkeypatch)
