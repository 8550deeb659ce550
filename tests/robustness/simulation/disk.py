"""The disk of cachemgr's machine: real files in a folder of their own, and what a fault does to them."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import tempfile
from pathlib import Path

ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""In memory where there is such a file system: thousands of schedules write here."""


class Disk:
    """A folder, made when it is first used; `close` removes it."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._folder: Path | None = None
        self.num_boots = 1

    @property
    def folder(self) -> Path:
        """The state directory."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="quire-simulation-", dir=ROOT))
        return self._folder

    @property
    def boot_id(self) -> str:
        return f"boot {self.num_boots}"

    def lose_power(self) -> None:
        """The machine starts again: files lose their ends, or are gone, as if nothing had reached the disk."""
        self.num_boots += 1
        if self._folder is None:
            return
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and self._generator.random() < 0.5:
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.truncate(self._generator.randint(0, size))

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class FullDisk:
    """While it is entered, no file of this process can be longer than it is: as if the disk had no room."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def __enter__(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._most_bytes, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
