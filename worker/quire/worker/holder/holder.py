"""The holder's side: one memory, one borrower.

    request                                 answer
    bytes, fresh                            memory_id, with the descriptor of the memory, and that of its deposit
    deposit, a memory_id, with a descriptor memory_id

A deposit is memory that the holder can't make, such as that of a GPU: the borrower makes it, and the holder keeps its
descriptor as long as the memory. With the descriptor the driver keeps what it is of.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
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


@dataclass(slots=True)
class Memory:
    """Zeros at first. `memory_id` is random: it never names another memory."""

    memory_id: str
    num_bytes: int
    descriptor: int
    deposit: int | None = None

    @property
    def descriptors(self) -> list[int]:
        """Those that a borrower gets."""
        return [self.descriptor, *([] if self.deposit is None else [self.deposit])]

    def close(self) -> None:
        """Let the memory go, when its borrower has let it go, too."""
        for descriptor in self.descriptors:
            os.close(descriptor)


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for memory of this size; is_fresh: for zeros."""

    num_bytes: int
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Deposit:
    """A borrower's descriptor, to be kept with its memory."""

    memory_id: str
    descriptor: int


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
        received: list[int] = []
        try:
            message, received, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
            request = read_request(message, received)
            if request is None:
                return False
            if self._borrower is not None and self._borrower is not connection:
                raise ValueError(f"the memory is lent to process {pid_of(self._borrower)}, which is alive")
            if isinstance(request, Deposit):
                self._take(request, connection)
                received = []
                send(connection, {"memory_id": request.memory_id})
            else:
                memory = self._find(request)
                send(connection, {"memory_id": memory.memory_id}, descriptors=memory.descriptors)
        except OSError as error:
            log.warning("request not answered error=%s", error)
            return False
        except ValueError as error:
            send(connection, {"refused": str(error)})
            return False
        finally:
            for descriptor in received:
                os.close(descriptor)
        return True

    def _take(self, deposit: Deposit, connection: socket.socket) -> None:
        """Keep a borrower's descriptor with the memory. Raises ValueError if it has none, or one already."""
        memory = self._memory
        if memory is None or self._borrower is not connection or memory.memory_id != deposit.memory_id:
            raise ValueError(f"memory {deposit.memory_id} is not lent to this process")
        if memory.deposit is not None:
            raise ValueError(f"memory {deposit.memory_id} has a deposit already")
        memory.deposit = deposit.descriptor
        log.info("deposit taken pid=%d", pid_of(connection))

    def _find(self, wanted: Wanted) -> Memory:
        """Return the memory of this size; a new one if there is none, or if it is to be fresh. Raises OSError."""
        known = self._memory
        if known is not None and known.num_bytes == wanted.num_bytes and not wanted.is_fresh:
            return known
        if known is not None:
            known.close()
            self._memory = None
        self._memory = make_memory(wanted.num_bytes)
        log.info("memory made bytes=%d", wanted.num_bytes)
        return self._memory


def read_request(message: bytes, descriptors: Sequence[int]) -> Wanted | Deposit | None:
    """Return what a caller wants. None if it is gone. Raises ValueError for anything else."""
    if not message:
        return None
    request = json.loads(message)
    fields = request if isinstance(request, dict) else {}
    if "deposit" in fields:
        if not isinstance(fields["deposit"], str) or len(descriptors) != 1:
            raise ValueError("a deposit has the memory_id, and a descriptor")
        return Deposit(fields["deposit"], descriptors[0])
    num_bytes, is_fresh = fields.get("bytes"), fields.get("fresh")
    if type(num_bytes) is not int or num_bytes <= 0 or type(is_fresh) is not bool:
        raise ValueError("a request has bytes, a number above 0, and fresh, true or false")
    return Wanted(num_bytes, is_fresh)


def send(connection: socket.socket, answer: dict[str, str], *, descriptors: Sequence[int] = ()) -> None:
    """Send an answer, with descriptors. Nothing happens if the caller is gone."""
    try:
        socket.send_fds(connection, [json.dumps(answer).encode()], list(descriptors))
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
