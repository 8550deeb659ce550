"""The start of the services, and how far it is, on a console."""

import contextlib
import signal
from collections.abc import Iterator

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner

from quire.cli.launch import LocalServices
from quire.cli.service_process import LaunchError, ServiceProcess


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
    stages = {
        "cachemgr": "cachemgr: starting",
        "worker": f"worker: loading {model} and checking it",
        "gateway": "gateway: starting",
        "holder": "holder: starting",
    }
    return stages[next((service.name for service in services.all if not service.is_serving), "cachemgr")]


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
