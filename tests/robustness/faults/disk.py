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


@contextlib.contextmanager
def bad_disk(directory: Path, way: str) -> Iterator[None]:
    """Within the block there are folders in place of a worker's files of copies. Afterwards these are back, but `way`:
    "changed" in some bytes, "cut off" in the middle, or "removed"."""
    files = sorted(directory.glob("blocks-*.kv"))
    asides = [path.rename(path.with_suffix(".aside")) for path in files if path.is_file()]
    for aside in asides:
        with contextlib.suppress(FileExistsError):  # the worker was faster
            aside.with_suffix(".kv").mkdir()
    yield
    for aside in asides:
        content = bytearray(aside.read_bytes())
        aside.unlink()
        path = aside.with_suffix(".kv")
        if path.is_dir():
            path.rmdir()
        if way == "changed":
            content[:: 1 + len(content) // 50] = bytes(len(content[:: 1 + len(content) // 50]))
        if way == "cut off":
            content = content[: len(content) // 2]
        if way != "removed":
            path.write_bytes(content)


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
