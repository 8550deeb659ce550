"""The holder's side: one memory, one borrower."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from quire.serving.addresses import AddressError, claimed_socket

log = logging.getLogger("quire.holder")

REQUEST_TIMEOUT_S = 1.0
"""A caller that has connected must send its request within this time: others wait for it."""
MAX_REQUEST_BYTES = 4_096
SOCKET_MODE = 0o600
# A worker must not change the size under a mapping.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Memory:
    """Zeros at first. `memory_id` is random: it never names another memory."""

    memory_id: str
    num_bytes: int
    descriptor: int


def make_memory(num_bytes: int) -> Memory:
    """Make memory of so many bytes. It is allocated when it is written. Raises OSError."""
    descriptor = os.memfd_create("quire-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return Memory(secrets.token_hex(16), num_bytes, descriptor)


class Holder:
    """Keeps at most one memory. `serve` answers until `stop` is readable."""

    def __init__(self, listener: socket.socket) -> None:
        """`listener` is a listening unix socket of type SOCK_SEQPACKET."""
        self._listener = listener
        self._memory: Memory | None = None
        self._borrower: socket.socket | None = None

    def serve(self, stop: int) -> None:
        """Answer callers, one after the other, until the descriptor `stop` is readable."""
        while True:
            waited: list[socket.socket | int] = [
                self._listener,
                stop,
                *([] if self._borrower is None else [self._borrower]),
            ]
            ready, _, _ = select.select(waited, [], [])
            if stop in ready:
                return
            self._hear_borrower()  # first: the death of the old worker comes before the request of the new one
            if self._listener in ready:
                self._accept()

    def _hear_borrower(self) -> None:
        """Answer the borrower, or note that it is gone."""
        while self._borrower is not None and select.select([self._borrower], [], [], 0)[0]:
            if not self._answer(self._borrower):
                self._borrower.close()
                self._borrower = None
                log.info("memory returned")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(REQUEST_TIMEOUT_S)
        if self._answer(connection):
            self._borrower = connection
            log.info("memory lent pid=%d", pid_of(connection))
        else:
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request. False if there is none: the connection is to be closed."""
        try:
            request = read_request(connection.recv(MAX_REQUEST_BYTES))
            if request is None:
                return False
            if self._borrower is not None and self._borrower is not connection:
                raise ValueError(f"the memory is lent to process {pid_of(self._borrower)}, which is alive")
            memory = self._find(*request)
            send(connection, {"memory_id": memory.memory_id}, descriptor=memory.descriptor)
        except OSError as error:
            log.warning("request not answered error=%s", error)
            return False
        except ValueError as error:
            send(connection, {"refused": str(error)})
            return False
        return True

    def _find(self, num_bytes: int, is_fresh: bool) -> Memory:
        """Return the memory of this size; a new one if there is none, or if it is to be fresh. Raises OSError."""
        known = self._memory
        if known is not None and known.num_bytes == num_bytes and not is_fresh:
            return known
        if known is not None:
            os.close(known.descriptor)
            self._memory = None
        self._memory = make_memory(num_bytes)
        log.info("memory made bytes=%d", num_bytes)
        return self._memory


def read_request(message: bytes) -> tuple[int, bool] | None:
    """Return the wanted size in bytes, and True if the memory is to be fresh. None if the caller is gone.

    Raises ValueError for anything else.
    """
    if not message:
        return None
    request = json.loads(message)
    num_bytes, is_fresh = (request.get(field) for field in ("bytes", "fresh")) if isinstance(request, dict) else (0, 0)
    if type(num_bytes) is not int or num_bytes <= 0 or type(is_fresh) is not bool:
        raise ValueError("a request has bytes, a number above 0, and fresh, true or false")
    return num_bytes, is_fresh


def send(connection: socket.socket, answer: dict[str, str], *, descriptor: int | None = None) -> None:
    """Send an answer, with a descriptor if there is one. Nothing happens if the caller is gone."""
    try:
        socket.send_fds(connection, [json.dumps(answer).encode()], [] if descriptor is None else [descriptor])
    except OSError as error:
        log.warning("answer not sent error=%s", error)


def pid_of(connection: socket.socket) -> int:
    """Return the process that opened the connection."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[0])


def listen_at(path: Path) -> socket.socket:
    """Listen on a unix socket for this user only. Raises AddressError, AddressInUseError if a process listens there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with claimed_socket(str(path)):
        before = os.umask(0o777 & ~SOCKET_MODE)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise AddressError(f"unix:{path}: {error.strerror}") from error
        finally:
            os.umask(before)
        listener.listen()
    return listener
