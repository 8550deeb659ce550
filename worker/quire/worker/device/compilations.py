"""Kernels that Triton compiles in this process: how many, how long they took, and the folder that they are kept in.

Importing this module imports Triton; a worker on a CPU does not need it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs  # type: ignore[import-untyped]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompilationStatistics:
    """Kernels of this process: compiled, with the seconds that this took, and read from the folder."""

    num_compiled: int
    num_read: int
    compile_s: float

    def __str__(self) -> str:
        return f"{self.num_compiled} compiled in {self.compile_s:.1f} s, {self.num_read} read from {cache_folder()}"


class Compilations:
    """Counts what Triton compiles from `watch` on. After `expect_no_more` each compilation is a warning in the log."""

    def __init__(self) -> None:
        self.on_late: Callable[[str], None] = lambda name: None
        """Called with a kernel's name for each compilation after expect_no_more()."""
        self._num_compiled = 0
        self._num_read = 0
        self._compile_s = 0.0
        self._is_over = False

    def watch(self) -> None:
        """Count every compilation of this process. Triton has one listener only: the last."""
        knobs.compilation.listener = self._note

    def expect_no_more(self) -> None:
        """Warn of each compilation from now on: all steps wait for it."""
        self._is_over = True

    def statistics(self) -> CompilationStatistics:
        return CompilationStatistics(self._num_compiled, self._num_read, self._compile_s)

    def _note(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        seconds = times.total / 1e6
        if cache_hit:
            self._num_read += 1
        else:
            self._num_compiled += 1
            self._compile_s += seconds
        if self._is_over:
            how = "read from the cache" if cache_hit else "compiled"
            self.on_late(src.name)
            log.warning("a kernel was %s after the warm-up kernel=%s seconds=%.2f", how, src.name, seconds)


def cache_folder() -> Path:
    """Return the folder of Triton's compiled kernels: $TRITON_CACHE_DIR, or ~/.triton/cache."""
    return Path(str(knobs.cache.dir))


def check_cache_folder() -> None:
    """Raises ValueError, naming the folder, if Triton could not write there: then no kernel could be compiled."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"can it be written to?")
            file.flush()
    except OSError as error:
        raise ValueError(
            f"the folder {folder}, where Triton keeps compiled kernels, can't be written to: {error.strerror}. Set "
            "TRITON_CACHE_DIR to one that can"
        ) from error
