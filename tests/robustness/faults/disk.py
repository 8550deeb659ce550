"""A file system of a megabyte that can be filled, for a service's state: needs root, and Linux."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self


class SmallDisk:
    """Mounted at a folder within the `with` block. Raises OSError or CalledProcessError where that is not allowed."""

    def __init__(self, folder: Path, *, size: str = "1m") -> None:
        self._folder = folder
        self._size = size
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self._folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size},mode=700", "quire-faults", str(self._folder)]
        subprocess.run(command, check=True, capture_output=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True, capture_output=True)

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Within the block nothing more can be written."""
        ballast = self._folder / f"ballast-{next(self._numbers)}"
        with ballast.open("wb", buffering=0) as file:
            for size in (65536, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        try:
            yield
        finally:
            ballast.unlink()


def can_mount() -> bool:
    """True if a SmallDisk can be had here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            with SmallDisk(Path(folder, "probe")):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False
