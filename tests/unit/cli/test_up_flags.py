"""Each flag of cachemgr, the worker and the gateway, given to `quire up`, reaches every process that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from quire.cachemgr.__main__ import main as cachemgr
from quire.cli.commands import up
from quire.cli.up_flags import ServiceFlags
from quire.gateway.__main__ import main as gateway
from quire.worker.__main__ import main as worker

SERVICES: dict[str, click.Command] = {"cachemgr": cachemgr, "worker": worker, "gateway": gateway}
# What `quire up` decides itself, or has in another form.
OWN = {"--help", "--check", "--model", "--cachemgr", "--host", "--port"}
ADDRESSES = {"--listen", "--metrics-listen", "--health-listen", "--token-listen"}
HTTP_LISTEN = ("gateway", "--listen")
TOKENS = ("--token-file", "/dev/null", "--cachemgr-token-file", "/dev/zero")
# With these the worker and the gateway have to show cachemgr who they are.
NEEDED = {"--token-file": TOKENS[2:], "--tls-client-ca": TOKENS}


def flags_of(service: str) -> dict[str, click.Option]:
    options = (each for each in SERVICES[service].params if isinstance(each, click.Option))
    return {option.opts[0]: option for option in options if option.opts[0] not in OWN}


def sample(option: click.Option) -> list[str]:
    """Return what may stand behind the flag: a value that differs from the default."""
    if option.is_flag:
        return []
    if isinstance(option.type, click.Choice):
        return [next(str(choice) for choice in option.type.choices if choice != option.default)]
    by_name = {"--profile-steps": "3:4", "--memory-share": "0.25", "--keep-share": "0.5", "--advertise": "127.0.0.1:7"}
    by_name |= {"--host-cache-share": "0.75"}
    by_name |= {"--holder": "unix:/h", "--lora": "x=folder"}
    by_name |= {"--allowed-origins": "https://chat.example", "--allowed-hosts": "chat.example"}
    by_name |= {"--max-draft-tokens": "7", "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    if option.opts[0] in ADDRESSES or option.opts[0] in ("--grpc-listen", "--shepherd"):
        return ["127.0.0.1:7"]
    return [by_name.get(option.opts[0], "/dev/null" if isinstance(option.type, click.Path) else "77")]


def run_up(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the command `up` starts."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("quire.cli.up.run_up", lambda **values: given.update(values))
    monkeypatch.delenv("QUIRE_UP_NO_HTTP", raising=False)
    up.main(list(arguments), standalone_mode=False)
    return given


def passed_on(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> ServiceFlags:
    """Return the flags that `quire up` gives to each service."""
    found: ServiceFlags = run_up("m", *arguments, monkeypatch=monkeypatch)["flags"]
    return found


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (flag of up, flag of the service, the services)."""
    found = []
    for flag in sorted({flag for service in SERVICES for flag in flags_of(service)}):
        having = tuple(service for service in SERVICES if flag in flags_of(service))
        if flag in ADDRESSES:
            found += [
                (f"--{service}{flag[1:]}", flag, (service,)) for service in having if (service, flag) != HTTP_LISTEN
            ]
        else:
            found.append((flag, flag, having))
    return found


@pytest.mark.parametrize(("flag", "meant", "services"), cases(), ids=lambda value: str(value))
def test_a_flag_is_in_the_configuration_of_every_process_that_has_it(
    flag: str, meant: str, services: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, needed = flags_of(services[0])[meant], NEEDED.get(flag, ())
    value, without = sample(option), passed_on(*needed, monkeypatch=monkeypatch)
    for written in (flag, *option.secondary_opts):
        given = passed_on(*needed, written, *value, monkeypatch=monkeypatch)
        for service in services:
            expected = read_directly(service, [meant if written == flag else written, *value])
            assert configuration(service, given)[str(option.name)] == expected[str(option.name)]
        for service in set(SERVICES) - {*services, *(["gateway"] if flag == "--token-file" else [])}:
            assert given.arguments[service] == without.arguments[service]
            assert given.environment[service] == without.environment[service]


def configuration(service: str, flags: ServiceFlags) -> dict[str, Any]:
    """Return the values that the process reads from its command line and its environment."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in flags.environment[service].items():
            environment.setenv(name, value)
        return read_directly(service, flags.arguments[service])


def read_directly(service: str, arguments: Any) -> dict[str, Any]:
    model = ["--model", "m"] if service == "worker" else []
    context = SERVICES[service].make_context(service, [*model, *arguments])
    return context.params


def test_the_gateway_takes_the_callers_of_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    found = passed_on(*TOKENS, monkeypatch=monkeypatch)
    assert configuration("gateway", found)["api_keys"] == Path("/dev/null")
    assert configuration("gateway", found)["cachemgr_token_file"] == Path("/dev/zero")
    for own in (("--api-key", "k"), ("--api-keys", "/dev/full"), ("--allow-anonymous",)):
        found = passed_on(*TOKENS, *own, monkeypatch=monkeypatch)
        assert configuration("gateway", found)["api_keys"] in (None, Path("/dev/full"))


@pytest.mark.parametrize("flags", [TOKENS[:2], ("--tls-client-ca", "/dev/null"), ("--tls-client-ca", "a", *TOKENS[2:])])
def test_a_cachemgr_that_would_refuse_its_worker_is_not_started(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(click.UsageError, match="--cachemgr-token-file: cachemgr then asks every caller"):
        passed_on(*flags, monkeypatch=monkeypatch)


def test_a_key_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = passed_on("--api-key", "one", "--api-key", "two", monkeypatch=monkeypatch)
    assert not {"one", "two"} & {word for arguments in found.arguments.values() for word in arguments}
    assert configuration("gateway", found)["api_key"] == ("one", "two")


@pytest.mark.parametrize("flag", sorted(ADDRESSES))
def test_an_address_without_a_service_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError, match=f"give --cachemgr{flag[1:]} or --worker{flag[1:]}"):
        passed_on(flag, "127.0.0.1:7", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("flags", "served"),
    [
        ((), ("127.0.0.1:8000",)),
        (("--http-listen", "127.0.0.1:7", "--http-listen", "unix:/q"), ("127.0.0.1:7", "unix:/q")),
        (("--port", "7"), ("127.0.0.1:7",)),
        (("--host", "0.0.0.0"), ("0.0.0.0:8000",)),
        (("--host", "::1", "--port", "0"), ("[::1]:0",)),
        (("--no-http",), None),
    ],
)
def test_the_address_for_http(flags: tuple[str, ...], served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_up("m", *flags, monkeypatch=monkeypatch)["http_listen"] == served


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "7", "--http-listen", "127.0.0.1:8"), "give one or the other"),
        (("--port", "7", "--no-http"), "--no-http starts none"),
        (("--api-key", "k", "--no-http"), "--api-key is a flag of the gateway, and --no-http starts none"),
        (("--host", "a b"), "neither host:port"),
        (("--model", "n"), "The model is given twice"),
        (("--num-blokcs", "7"), "No such option '--num-blokcs'"),
        (("--grpc-listen", "127.0.0.1:0"), "leaves the port open"),
    ],
)
def test_flags_that_no_process_could_have(flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError) as caught:
        passed_on(*flags, monkeypatch=monkeypatch)
    assert said in caught.value.format_message()


def test_a_typo_is_said_before_a_model_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.NoSuchOption, match="--chat-tempalte"):
        run_up("--chat-tempalte", "f", monkeypatch=monkeypatch)
    with pytest.raises(click.UsageError, match="quire up PATH_OR_HUB_ID"):
        run_up(monkeypatch=monkeypatch)


def test_the_cache_is_kept_by_one_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_up("m", "--keep-cache", monkeypatch=monkeypatch)["keeps_memory"]
    with pytest.raises(click.UsageError, match="--keep-cache starts a holder"):
        run_up("m", "--keep-cache", "--holder", "unix:/h", monkeypatch=monkeypatch)
