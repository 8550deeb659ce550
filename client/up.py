"""`quire up`: both services on this machine, until a signal or until one of them dies."""

import contextlib
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner

from quire.client.launch import LaunchError, LocalServices, ServiceProcess


def run_up(
    *,
    model: str,
    runtime_dir: Path | None,
    cachemgr_listen: Sequence[str],
    worker_listen: Sequence[str],
    security_flags: Sequence[str],
    worker_flags: Sequence[str],
    logs_here: bool,
) -> None:
    """Starts, prints the addresses, waits. Returns after Ctrl-C or SIGTERM. Raises click.ClickException."""
    if runtime_dir is not None:
        _check_unused(runtime_dir)
    services = LocalServices(
        model=model,
        extra_cachemgr_args=(*_listen_flags(cachemgr_listen), *security_flags),
        extra_worker_args=(*_listen_flags(worker_listen), *security_flags, *worker_flags),
        runtime_dir=runtime_dir,
        output="inherit" if logs_here else "files",
    )
    with ending_on_hangup(), started(services, Console(stderr=True, highlight=False), model=model):
        click.echo(_describe(services, cachemgr_listen, worker_listen, has_logs=not logs_here))
        sys.stdout.flush()
        try:
            died = services.wait()
        except (KeyboardInterrupt, SystemExit):
            click.echo("Stopping both services.", err=True)
            return
        raise click.ClickException(_describe_death(died))


@contextlib.contextmanager
def started(services: LocalServices, console: Console, *, model: str) -> Iterator[None]:
    """Both services run within the block, none after it. Shows on the console what is waited for.

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


@contextlib.contextmanager
def ending_on_hangup() -> Iterator[None]:
    """Within the block a terminal that goes away ends the program in order, unless it was told to stay (nohup)."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _listen_flags(addresses: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for address in addresses for part in ("--listen", address))


def _check_unused(runtime_dir: Path) -> None:
    """Raises click.ClickException if services of somebody else answer in this folder."""
    for name in ("cachemgr", "worker"):
        path = runtime_dir.absolute() / f"{name}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            try:
                probe.connect(str(path))
            except OSError:
                continue
        raise click.ClickException(f"a {name} is serving at unix:{path} already: choose another --runtime-dir.")


def _describe(
    services: LocalServices, cachemgr_listen: Sequence[str], worker_listen: Sequence[str], *, has_logs: bool
) -> str:
    lines = [
        "Both services are ready. Ctrl-C ends them.",
        "",
        f"  cachemgr  {' '.join((services.cachemgr_address, *cachemgr_listen))}  (pid {services.cachemgr.pid})",
        f"  worker    {' '.join((services.worker_address, *worker_listen))}  (pid {services.worker.pid})",
        *([f"  logs      {services.runtime_dir}"] if has_logs else []),
        "",
        "In another terminal:",
        "",
        f"  export QUIRE_CACHEMGR={shlex.quote(services.cachemgr_address)}",
        '  quire generate "Once upon a time"',
        "  quire stats",
    ]
    if cachemgr_listen and worker_listen:
        lines += [
            "",
            "From another machine, with this one's name in the addresses:",
            "",
            f'  quire generate "Once upon a time" --cachemgr {cachemgr_listen[0]} --worker {worker_listen[0]}',
        ]
    return "\n".join(lines)


def check_alive(services: LocalServices, *, grace_s: float = 0.0) -> None:
    """Raises click.ClickException, with the end of its log, if one of the services has died, or does within grace_s."""
    for service in (services.cachemgr, services.worker):
        if service.wait_exited(grace_s):
            raise click.ClickException(_describe_death(service))


def _describe_death(service: ServiceProcess) -> str:
    status = service.returncode or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    tail = service.log_tail()
    return f"{service.name} {how}; the other service is ended too." + (f" The end of its log:\n{tail}" if tail else "")
