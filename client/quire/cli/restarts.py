"""Restarts of services that end by themselves, with backoff: what systemd and Kubernetes do for their units."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.cli.launch import LocalServices
from quire.cli.service_process import LaunchError, ServiceProcess

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
MAX_RESTARTS = 5
"""The most restarts of a service, one after the other, of which none lasted GOOD_RUN_S."""
GOOD_RUN_S = 60.0
"""A service that ran for this time begins again with FIRST_PAUSE_S."""


@dataclass(slots=True)
class _Record:
    """The restarts of one service since its last good run, and the time of its last start."""

    started_s: float
    num_restarts: int = 0


def keep_running(services: LocalServices, say: Callable[[str], None]) -> None:
    """Start each service again that ends by itself. Returns only by an exception, such as Ctrl-C.

    `say` gets a text for people at each end and each start. Raises LaunchError, with the end of its log, for a service
    that has been restarted MAX_RESTARTS times.
    """
    records = {service.name: _Record(time.monotonic()) for service in services.all}
    while True:
        ended = services.wait()
        record = records[ended.name]
        if time.monotonic() - record.started_s >= GOOD_RUN_S:
            record.num_restarts = 0
        if record.num_restarts == MAX_RESTARTS:
            raise LaunchError(
                f"{ended.describe_exit()}\nIt was started {MAX_RESTARTS} times again, and ended each time"
            )
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**record.num_restarts)
        say(f"{ended.describe_exit()}\n{ended.name} starts again in {pause_s:g} s.")
        time.sleep(pause_s)
        record.num_restarts += 1
        _start_again(services, ended, say)
        record.started_s = time.monotonic()


def _start_again(services: LocalServices, service: ServiceProcess, say: Callable[[str], None]) -> None:
    try:
        services.start_one(service)
    except LaunchError:
        service.terminate()  # its end is found, and said, by the next wait
    else:
        say(f"{service.name} serves again (pid {service.pid}).")
