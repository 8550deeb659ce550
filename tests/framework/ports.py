"""TCP ports for services that must name theirs: no other process takes one before the service listens.

A port that the system chose, and that a test closed again, can go to any process that binds port 0 or connects. So
these are below the ports that Linux gives out by itself. A lock file keeps each one for this process until it ends.
"""

from __future__ import annotations

import fcntl
import socket
import tempfile
from pathlib import Path
from typing import IO

FIRST, LAST = 20_000, 29_999
_candidates = iter(range(FIRST, LAST + 1))
_locks: list[IO[str]] = []


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on. Raises StopIteration if all are taken."""
    return next(port for port in _candidates if _is_ours(port))


def free_ports(count: int) -> list[int]:
    """Return so many ports."""
    return [free_port() for _ in range(count)]


def _is_ours(port: int) -> bool:
    """Return True if no other process of tests has the port, and no service listens there."""
    lock = (Path(tempfile.gettempdir()) / f"quire-test-port-{port}").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.create_server(("127.0.0.1", port)):
            pass
    except OSError:
        lock.close()
        return False
    _locks.append(lock)
    return True
