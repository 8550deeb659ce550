"""`quire up`: the services on this machine, with an HTTP gateway, until a signal or until one of them dies."""

import contextlib
import itertools
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner

from quire.cli.launch import LocalServices, is_answered
from quire.cli.service_process import GatewayProcess, LaunchError, ServiceProcess
from quire.cli.signals import ending_on, signals_held
from quire.serving.addresses import TcpAddress, explain_bind_failure, parse_listen_address
from quire.serving.runtime_folder import RuntimeFolderError, default_cachemgr, make_serving_folder

CHECK_TIMEOUT_S = 120.0


def run_up(
    *,
    model: str,
    runtime_dir: Path | None,
    cachemgr_flags: Sequence[str],
    worker_flags: Sequence[str],
    gateway_flags: Sequence[str],
    http_listen: Sequence[str] | None,
    logs_here: bool,
) -> None:
    """Check the flags, start, print the addresses, wait. Returns after Ctrl-C or SIGTERM. Raises click.ClickException.

    runtime_dir None is the default folder, where clients look for cachemgr. http_listen None: there is no gateway.
    """
    folder = _default_folder() if runtime_dir is None else runtime_dir.absolute()
    _check_unused(folder)
    _check_ports(http_listen or ())
    services = LocalServices(
        model=model,
        extra_cachemgr_args=cachemgr_flags,
        extra_worker_args=worker_flags,
        extra_gateway_args=gateway_flags,
        http_listen=http_listen,
        runtime_dir=folder,
        output="inherit" if logs_here else "files",
    )
    with ending_on(signal.SIGHUP, signal.SIGTERM):
        _check_flags(services)
        with started(services, Console(stderr=True, highlight=False), model=model):
            listening = (_values_of("--listen", flags) for flags in (cachemgr_flags, worker_flags))
            click.echo(_describe(services, *listening, has_logs=not logs_here))
            sys.stdout.flush()
            try:
                died = services.wait()
            except (KeyboardInterrupt, SystemExit):
                click.echo("Stopping the services.", err=True)
                return
            raise click.ClickException(_describe_death(died))


@contextlib.contextmanager
def started(services: LocalServices, console: Console, *, model: str) -> Iterator[None]:
    """Both services run within the block, none after it. Shows the progress of the start on the console.

    Raises click.ClickException, with the end of the log, if one does not start.
    """
    with contextlib.ExitStack() as stack:
        try:
            with _progress(services, console, model):
                stack.enter_context(services)
        except LaunchError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            raise click.ClickException(f"can't start the services: {error}") from error
        yield


@contextlib.contextmanager
def _progress(services: LocalServices, console: Console, model: str) -> Iterator[None]:
    if not console.is_terminal:
        console.print(f"Starting cachemgr and a worker with {model}", soft_wrap=True)
        yield
        return
    spinner = Spinner("dots", style="cyan")

    def stage() -> RenderableType:
        spinner.update(text=_stage(services, model))
        return spinner

    with Live(console=console, get_renderable=stage, refresh_per_second=10, transient=True):
        yield


def _stage(services: LocalServices, model: str) -> str:
    try:
        is_loading = services.worker.pid is not None
    except IndexError:  # none is made yet
        is_loading = False
    return f"worker: loading {model} and checking it" if is_loading else "cachemgr: starting"


def _values_of(flag: str, flags: Sequence[str]) -> list[str]:
    return [value for given, value in itertools.pairwise(flags) if given == flag]


def _default_folder() -> Path:
    try:
        return make_serving_folder()
    except RuntimeFolderError as error:
        raise click.ClickException(f"{error}. Give --runtime-dir.") from error


def _check_unused(folder: Path) -> None:
    """Raises click.ClickException if services answer in this folder already."""
    for name in ("cachemgr", "worker", "gateway"):
        path = folder / f"{name}.sock"
        if is_answered(path):
            raise click.ClickException(f"a {name} is serving at unix:{path} already: choose another --runtime-dir.")


def _check_ports(http_listen: Sequence[str]) -> None:
    """Raises click.ClickException if an address for HTTP can't be listened on."""
    for text in http_listen:
        address = parse_listen_address(text)
        reason = explain_bind_failure(address) if isinstance(address, TcpAddress) and address.port else ""
        if reason:
            instead = "Choose another --http-listen, or --no-http to do without."
            raise click.ClickException(f"HTTP can't be served at {text}: {reason}. {instead}")


class FlagRefused(click.ClickException):
    """A service refused a flag. Unlike click's UsageError it does not show the usage of `quire up`."""

    exit_code = click.UsageError.exit_code


def _check_flags(services: LocalServices) -> None:
    """Let the services check their flags, at the same time. Raises click.ClickException with their errors."""
    checks: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with signals_held():
            for name, command in services.check_commands().items():
                checks[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
        for name, process in checks.items():
            try:
                _, said = process.communicate(timeout=CHECK_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise click.ClickException(f"{name} has not checked its flags within {CHECK_TIMEOUT_S:g} s") from error
            if process.returncode:
                raise FlagRefused(f"{name}: {_complaint(said.decode(errors='replace'))}")
    finally:
        for process in checks.values():
            process.kill()
            process.wait()


def _complaint(said: str) -> str:
    """Return click's message of an error, without the lines about usage."""
    return said.rpartition("Error: ")[2].strip() or "it can't check its flags"


def _describe(
    services: LocalServices, cachemgr_listen: Sequence[str], worker_listen: Sequence[str], *, has_logs: bool
) -> str:
    is_default = services.cachemgr_address == default_cachemgr()
    lines = [
        f"{'Both' if services.gateway is None else 'All'} services are ready. Ctrl-C ends them.",
        "",
        f"  cachemgr  {' '.join((services.cachemgr_address, *cachemgr_listen))}  (pid {services.cachemgr.pid})",
        f"  worker    {' '.join((services.worker_address, *worker_listen))}  (pid {services.worker.pid})",
        *([] if services.gateway is None else [_line_of(services.gateway)]),
        *([f"  logs      {services.runtime_dir}"] if has_logs else []),
        "",
        "In another terminal:",
        "",
        *([] if is_default else [f"  export QUIRE_CACHEMGR={shlex.quote(services.cachemgr_address)}"]),
        '  quire generate "Once upon a time"',
        "  quire stats",
        *([] if services.gateway is None else [f"  {_curl_line(services.gateway)}"]),
    ]
    if cachemgr_listen and worker_listen:
        lines += [
            "",
            "From another machine, with this one's name in the addresses:",
            "",
            f'  quire generate "Once upon a time" --cachemgr {cachemgr_listen[0]} --worker {worker_listen[0]}',
        ]
    return "\n".join(lines)


def _line_of(gateway: GatewayProcess) -> str:
    return f"  gateway   {' '.join((*gateway.urls, gateway.address))}  (pid {gateway.pid})"


def _curl_line(gateway: GatewayProcess) -> str:
    socket = gateway.address.removeprefix("unix:")
    return curl_command(gateway.urls[0] if gateway.urls else f"--unix-socket {shlex.quote(socket)} http://localhost")


def curl_command(where: str) -> str:
    """Return a command that requests text from the gateway at this URL."""
    body = '{"prompt": "Once upon a time", "max_tokens": 32}'
    return f"curl -s {where}/v1/completions -d '{body}'"


def check_alive(services: LocalServices, *, grace_s: float = 0.0) -> None:
    """Raises click.ClickException, with the end of its log, if one of the services has died, or does within grace_s."""
    for service in services.all:
        if service.wait_exited(grace_s):
            raise click.ClickException(_describe_death(service))


def _describe_death(service: ServiceProcess) -> str:
    status = service.returncode or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    tail = service.log_tail()
    return f"{service.name} {how}; the other processes are ended, too." + (
        f" The end of its log:\n{tail}" if tail else ""
    )
