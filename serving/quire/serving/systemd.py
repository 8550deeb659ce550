"""Notifications to systemd, for a process started with Type=notify: ready, stopping, watchdog.

    STARTING  --- ready --->  SERVING  --- stopping --->  STOPPING

The protocol is sd_notify(3): datagrams of VARIABLE=value lines to the socket in $NOTIFY_SOCKET. It is implemented
here: the existing packages are a binding that needs libsystemd's headers, and one with its last release in 2017.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from enum import Enum, auto

log = logging.getLogger(__name__)

# systemd's end has a long queue; one that is full for longer is not worth the calls that wait meanwhile.
_SEND_TIMEOUT_S = 1.0


class Phase(Enum):
    """The progress of the server."""

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()


class ServiceManager:
    """The systemd that waits for word of this process, by its environment; without one every call does nothing.

    A message that can't be sent is a log line, never an error: the server continues.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = _notify_address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_us = _watchdog_us(environment)
        self._phase = Phase.STARTING

    @property
    def has_watchdog(self) -> bool:
        """True if `feed_watchdog` has to run, for as long as the server does."""
        return self._address is not None and self._watchdog_us is not None

    def ready(self, status: str) -> None:
        """The start is over. Without effect once it is stopping."""
        if self._phase is Phase.STARTING:
            self._phase = Phase.SERVING
            self._send("READY=1", f"STATUS={status}")

    def stopping(self, status: str) -> None:
        """The stop has begun."""
        if self._phase is not Phase.STOPPING:
            self._phase = Phase.STOPPING
            self._send("STOPPING=1", f"STATUS={status}")

    async def feed_watchdog(self) -> None:
        """Sends a sign of life twice per watchdog period, for ever, on the loop: one that is stuck sends none.

        systemd's watchdog begins when the start is over. Until then each sign puts off the start's own timeout by one
        period, so a start may take as long as it needs, and a loop that is stuck in it is noticed too.
        """
        assert self._watchdog_us is not None, "only if has_watchdog"
        while True:
            if self._phase is Phase.STARTING:
                self._send("WATCHDOG=1", f"EXTEND_TIMEOUT_USEC={self._watchdog_us}", "STATUS=starting")
            else:
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_us / 2e6)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("can't notify systemd message=%s: %s", lines[0], error.strerror or "timed out")


def _notify_address(text: str) -> str | None:
    """A path, or an abstract address, which is written with @ for its zero byte; None if there is no socket."""
    if not text:
        return None
    if text[0] not in "/@":
        log.warning("NOTIFY_SOCKET is no unix socket, so systemd is not notified: %s", text)
        return None
    return f"\0{text[1:]}" if text[0] == "@" else text


def _watchdog_us(environment: Mapping[str, str]) -> int | None:
    """The watchdog's period in microseconds; None if there is none, or it is another process's."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    period = environment.get("WATCHDOG_USEC", "")
    return int(period) if period.isdecimal() and int(period) else None
