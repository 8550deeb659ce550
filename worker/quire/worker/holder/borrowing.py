"""The worker's side of the holder: asks for memory, and maps it."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import time
from pathlib import Path

START_TIMEOUT_S = 10.0
"""Of a holder that is started together with the worker."""
CONNECT_INTERVAL_S = 0.05
ANSWER_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4_096


class HolderError(ValueError):
    """The holder can't be reached, or refuses; the text is for people."""


class Borrowed:
    """Memory that a holder has lent to this process. It is this process's until its death, or `close`."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Raises HolderError."""
        self._path = path
        self._num_bytes = num_bytes
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        self._lock = -1
        self.deposit: int | None = None
        """The descriptor of the deposit, if an earlier borrower has left one."""
        try:
            self._connect()
            self.memory_id, self.buffer = self._borrow(is_fresh=False)
        except OSError as error:
            self.close()
            raise HolderError(f"holder {path}: {error.strerror or error}") from error
        except HolderError:
            self.close()
            raise

    def replace(self) -> None:
        """Have other memory instead, with zeros and another identity. Raises HolderError."""
        try:
            self.memory_id, self.buffer = self._borrow(is_fresh=True)
        except OSError as error:
            raise HolderError(f"holder {self._path}: {error.strerror or error}") from error

    def leave(self, descriptor: int) -> None:
        """Have the holder keep a descriptor with the memory: its deposit. Raises HolderError."""
        request = json.dumps({"deposit": self.memory_id}).encode()
        try:
            socket.send_fds(self._connection, [request], [descriptor])
            self._receive()
        except OSError as error:
            raise HolderError(f"holder {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Give the memory back. No mapping of it may be used after that."""
        self._forget_deposit()
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connect(self) -> None:
        """Raises OSError if no holder listens within START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return self._connection.connect(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(CONNECT_INTERVAL_S)

    def _borrow(self, *, is_fresh: bool) -> tuple[str, mmap.mmap]:
        self._forget_deposit()
        self._connection.send(json.dumps({"bytes": self._num_bytes, "fresh": is_fresh}).encode())
        memory_id, (descriptor, *deposits) = self._receive()
        self.deposit = deposits[0] if deposits else None
        try:
            self._take_lock(descriptor)
            return memory_id, mmap.mmap(descriptor, self._num_bytes)
        finally:
            os.close(descriptor)

    def _receive(self) -> tuple[str, list[int]]:
        """Return the identity of the memory, and its descriptors if it was asked for. Raises HolderError, OSError."""
        message, descriptors, _, _ = socket.recv_fds(self._connection, MAX_ANSWER_BYTES, 2)
        if not message:
            raise HolderError(f"holder {self._path} has ended")
        answer = json.loads(message)
        if "refused" in answer:
            raise HolderError(f"holder {self._path}: {answer['refused']}")
        return answer["memory_id"], descriptors

    def _forget_deposit(self) -> None:
        if self.deposit is not None:
            os.close(self.deposit)
            self.deposit = None

    def _take_lock(self, descriptor: int) -> None:
        """Lock the memory against other workers, whatever the holder says; the kernel ends it with this process.

        Through an open file of its own: the one that the holder passes is the same for every borrower.
        """
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HolderError(f"holder {self._path}: another process still uses the memory") from error
