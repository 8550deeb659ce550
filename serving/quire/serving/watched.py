"""Files that are read again when they change. While they can't be read, the last content stays in force."""

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Stamp = tuple[int, int, int, int]

MAX_FILE_BYTES = 16 << 20
"""The size limit of a file: some 100,000 callers in a token file."""

# Two writes within one tick of the file system's clock leave the same stamp: a file this young is read again.
_YOUNG_NS = 100_000_000


class FileError(ValueError):
    """A file can't be used. The message has its name and the reason, and nothing of its content."""


class WatchedFiles(Generic[Value]):
    """A value read from files.

    what    for log lines ("certificate")
    paths   the files; None entries are skipped
    read    makes the value of them; raises FileError or OSError. Two that are equal are taken for the same

    Raises what `read` raises, when it is made. Safe to use from several threads.
    """

    def __init__(self, what: str, paths: Sequence[Path | None], read: Callable[[], Value]) -> None:
        self._what = what
        self._paths = tuple(path for path in paths if path is not None)
        self._read = read
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamps = self._look()
        self._value = read()

    def current(self) -> Value:
        """The value, read again if a file has changed. Costs one stat per file. Never raises.

        If it can't be read, that is logged once, and the value does not change.
        """
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reread()
            return self._value

    def _look(self) -> tuple[Stamp | None, ...]:
        return tuple(_stamp(path) for path in self._paths)

    def _reread(self) -> None:
        try:
            value = self._read()
        except (FileError, OSError) as error:
            if str(error) != self._complaint:
                log.error("%s not reloaded, the one before stays: %s", self._what, error)
            self._complaint = str(error)
            return
        self._complaint = ""
        if value != self._value:
            self._value = value
            log.info("%s reloaded files=%s", self._what, ",".join(map(str, self._paths)))


def read_bytes(path: Path, flags: int = 0) -> bytes:
    """Return all of a file, opened with these flags beside those to read. Never waits for a writer, as of a fifo.

    Raises FileError if there is none, if it is not a regular file or has more than MAX_FILE_BYTES, or if it is empty,
    as one is that is about to be written.
    """

    def open_at_once(name: str, given: int) -> int:
        return os.open(name, given | os.O_NONBLOCK | flags)

    try:
        with open(path, "rb", opener=open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(f"{path}: not a regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if not content:
        raise FileError(f"{path}: the file is empty")
    if len(content) > MAX_FILE_BYTES:
        raise FileError(f"{path}: the file has more than {MAX_FILE_BYTES} bytes")
    return content


def _stamp(path: Path) -> Stamp | None:
    """Differs if the file does; None if there is none. Of a file just written it differs each time it is asked."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    now_ns = time.time_ns()
    age = now_ns if 0 <= now_ns - found.st_mtime_ns < _YOUNG_NS else 0
    return found.st_mtime_ns, found.st_size, found.st_ino, age
