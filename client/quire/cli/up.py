"""`quire up`: the services on this machine, with an HTTP gateway, until a signal or until one of them dies."""

import contextlib
import itertools
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from quire.cli.launch import LocalServices, is_answered
from quire.cli.restarts import keep_running
from quire.cli.service_process import STOP_TIMEOUT_S, GatewayProcess, LaunchError
from quire.cli.signals import ending_on, signals_held
from quire.cli.up_flags import ServiceFlags
from quire.serving.addresses import DEFAULT_HTTP_LISTEN, TcpAddress, explain_bind_failure, parse_listen_address
from quire.serving.runtime_folder import RuntimeFolderError, default_cachemgr, make_serving_folder

CHECK_TIMEOUT_S = 120.0
DEMO_MODEL = Path("deploy", "demo", "model")
DEFAULT_URL = f"http://{DEFAULT_HTTP_LISTEN}"


def run_up(
    *,
    model: str,
    runtime_dir: Path | None,
    flags: ServiceFlags,
    http_listen: Sequence[str] | None,
    keeps_memory: bool,
    logs_here: bool,
) -> None:
    """Check the flags, start, print the addresses, wait. Returns after Ctrl-C or SIGTERM. Raises click.ClickException.

    runtime_dir None is the default folder, where clients look for cachemgr. http_listen None: there is no gateway.
    """
    folder = _default_folder() if runtime_dir is None else runtime_dir.absolute()
    _check_unused(folder, keeps_memory=keeps_memory)
    _check_ports(http_listen or ())
    services = LocalServices(
        model=model,
        extra_cachemgr_args=flags.arguments["cachemgr"],
        extra_worker_args=flags.arguments["worker"],
        extra_gateway_args=flags.arguments["gateway"],
        keeps_memory=keeps_memory,
        environment=flags.environment,
        http_listen=http_listen,
        runtime_dir=folder,
        output="inherit" if logs_here else "files",
        stop_timeout_s=flags.drain_timeout_s + STOP_TIMEOUT_S,
    )
    with ending_on(signal.SIGHUP, signal.SIGTERM), contextlib.ExitStack() as ends:
        ends.callback(services.stop)
        with _flags_checked(services):
            services.begin()
            # Meanwhile: they take a tenth of a second to import.
            from rich.console import Console

            from quire.cli.starting import started

        with started(services, Console(stderr=True, highlight=False), model=model):
            listening = (_values_of("--listen", flags.arguments[service]) for service in ("cachemgr", "worker"))
            click.echo(_describe(services, *listening, has_keys=flags.has_keys, has_logs=not logs_here))
            if Path(model).resolve().parts[-3:] == DEMO_MODEL.parts:
                click.echo("\nThis is the demo's model: its answers are English, and mean nothing.")
            sys.stdout.flush()
            try:
                keep_running(services, lambda text: click.echo(text, err=True))
            except (KeyboardInterrupt, SystemExit):
                services.stop(lambda: click.echo(_describe_stop(flags.drain_timeout_s), err=True))
            except LaunchError as error:
                raise click.ClickException(f"{error}. The other processes are ended, too.") from error


def _describe_stop(drain_timeout_s: float) -> str:
    return f"Stopping. Open requests may finish, for at most {drain_timeout_s:g} s. Ctrl-C again ends at once."


def _values_of(flag: str, flags: Sequence[str]) -> list[str]:
    return [value for given, value in itertools.pairwise(flags) if given == flag]


def _default_folder() -> Path:
    try:
        return make_serving_folder()
    except RuntimeFolderError as error:
        raise click.ClickException(f"{error}. Give --runtime-dir.") from error


def _check_unused(folder: Path, *, keeps_memory: bool) -> None:
    """Raises click.ClickException if services of these names answer in this folder already."""
    for name in ("cachemgr", "worker", "gateway", *(("holder",) if keeps_memory else ())):
        path = folder / f"{name}.sock"
        if is_answered(path):
            raise click.ClickException(f"a {name} is serving at unix:{path} already: choose another --runtime-dir.")


def _check_ports(http_listen: Sequence[str]) -> None:
    """Raises click.ClickException if an address for HTTP can't be listened on."""
    for text in http_listen:
        address = parse_listen_address(text)
        reason = explain_bind_failure(address) if isinstance(address, TcpAddress) and address.port else ""
        if reason:
            instead = "Choose another --port or --http-listen, or --no-http to do without."
            raise click.ClickException(f"HTTP can't be served at {text}: {reason}. {instead}")


class FlagRefused(click.ClickException):
    """A service refused a flag. Unlike click's UsageError it does not show the usage of `quire up`."""

    exit_code = click.UsageError.exit_code


@contextlib.contextmanager
def _flags_checked(services: LocalServices) -> Iterator[None]:
    """Let the services check their flags, beside the block; at its end raise click.ClickException if one is wrong."""
    checks: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with signals_held():
            for name, (command, environment) in services.check_commands().items():
                checks[name] = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
        try:
            yield
        except (LaunchError, OSError) as error:
            _await_checks(checks)  # a wrong flag may be the cause
            raise click.ClickException(str(error)) from error
        _await_checks(checks)
    finally:
        for process in checks.values():
            process.kill()
            process.wait()


def _await_checks(checks: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for name, process in checks.items():
        try:
            _, said = process.communicate(timeout=CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise click.ClickException(f"{name} has not checked its flags within {CHECK_TIMEOUT_S:g} s") from error
        if process.returncode:
            raise FlagRefused(f"{name}: {_complaint(said.decode(errors='replace'))}")


def _complaint(said: str) -> str:
    """Return click's message of an error, without the lines about usage."""
    return said.rpartition("Error: ")[2].strip() or "it can't check its flags"


def _describe(
    services: LocalServices,
    cachemgr_listen: Sequence[str],
    worker_listen: Sequence[str],
    *,
    has_keys: bool,
    has_logs: bool,
) -> str:
    gateway = services.gateway
    lines = [
        f"{'Both' if gateway is None else 'All'} services are ready. Ctrl-C ends them.",
        "",
        f"  cachemgr  {' '.join((services.cachemgr_address, *cachemgr_listen))}  (pid {services.cachemgr.pid})",
        f"  worker    {' '.join((services.worker_address, *worker_listen))}  (pid {services.worker.pid})",
        *(
            []
            if gateway is None
            else [f"  gateway   {' '.join((*gateway.urls, gateway.address))}  (pid {gateway.pid})"]
        ),
        *([f"  logs      {services.runtime_dir}"] if has_logs else []),
        "",
        "In another terminal:",
        "",
        *_exports(services, has_keys=has_keys),
        '  quire generate "Once upon a time"',
        "  quire stats",
        *([] if gateway is None else _lines_for_http(gateway, has_keys=has_keys)),
    ]
    if cachemgr_listen and worker_listen:
        lines += [
            "",
            "From another machine, with this one's name in the addresses:",
            "",
            f'  quire generate "Once upon a time" --cachemgr {cachemgr_listen[0]} --worker {worker_listen[0]}',
        ]
    return "\n".join(lines)


def _exports(services: LocalServices, *, has_keys: bool) -> list[str]:
    """Return the lines that the commands need in another terminal."""
    lines = []
    if services.cachemgr_address != default_cachemgr():
        lines.append(f"  export QUIRE_CACHEMGR={shlex.quote(services.cachemgr_address)}")
    url = None if services.gateway is None else _url_for_chat(services.gateway)
    if url not in (None, DEFAULT_URL):
        lines.append(f"  export QUIRE_URL={url}")
    if has_keys and services.gateway is not None:
        lines.append("  export QUIRE_API_KEY=...")
    return lines


def _lines_for_http(gateway: GatewayProcess, *, has_keys: bool) -> list[str]:
    """Return commands to try. With TLS, curl takes the unix socket, where it needs no authority."""
    url = _url_for_chat(gateway)
    socket = shlex.quote(gateway.address.removeprefix("unix:"))
    curl = curl_command(url or f"--unix-socket {socket} http://localhost", has_keys=has_keys)
    return [*([] if url is None else ["  quire chat"]), f"  {curl}"]


def _url_for_chat(gateway: GatewayProcess) -> str | None:
    """Return the URL of plain HTTP; None if there is none."""
    return next((url for url in gateway.urls if url.startswith("http://")), None)


def curl_command(where: str, *, has_keys: bool = False) -> str:
    """Return a command that requests text from the gateway at this URL; with keys, it sends that of QUIRE_API_KEY."""
    body = '{"prompt": "Once upon a time", "max_tokens": 32}'
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if has_keys else ""
    return f"curl -s {where}/v1/completions{key} -d '{body}'"
