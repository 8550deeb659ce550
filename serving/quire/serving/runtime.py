"""Settings of a serving process: short garbage collections, and the return of large calls' memory to the system.

Objects without cycles are freed at once, with or without a collector. The collector only finds cycles, and its time
grows with the number of objects that it scans. So long-lived objects are frozen at the start, and it runs seldom.

Nothing is frozen later: open calls hold cycles that end with them, and would then stay for good. Nor is it needed: a
pool's books are in the core, which the collector does not scan. Of a pool with a million blocks and 1,000 sequences
of 4,096 tokens it scans 23 objects.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator

THRESHOLDS = (10_000, 10, 10)
"""The number of container objects made and not freed before a collection of the youngest generation, and of
collections before one of the next generation. Steps free their objects, so that only growth and cycles reach even the
first."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection within the block, and none of its objects is scanned later. For imports: what they make stays.

    Collections are a fifth of the time in which a worker imports torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_garbage_collector() -> None:
    """Collects once, freezes what lives, sets THRESHOLDS. For the start, before calls are answered: tens of ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


TRIM_DELAY_S = 1.0
"""Time from a large request to the return of its memory. Large requests within this time share one return."""


LITTLE_FREE_BYTES = 2**20
MUCH_FREE_BYTES = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_SETTINGS_OF_MALLOC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_little_free_memory() -> None:
    """Makes glibc return freed memory of more than LITTLE_FREE_BYTES at once. Has no effect elsewhere.

    Otherwise a free of 30 MB teaches glibc to keep 60 MB free in each thread's arena, which malloc_trim does not touch.
    Not for a process that computes: it allocates large tensors again and again.
    """
    _keep_free(LITTLE_FREE_BYTES)


def keep_freed_memory() -> None:
    """Makes glibc keep up to MUCH_FREE_BYTES for later. Has no effect elsewhere, or if the environment sets it.

    For a process that computes: what a step frees and the system takes back, the next step gets again page by page.
    """
    if not any(name in os.environ for name in _SETTINGS_OF_MALLOC):
        _keep_free(MUCH_FREE_BYTES)


def _keep_free(num_bytes: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, num_bytes)
        set_option(_M_TRIM_THRESHOLD, num_bytes)


class MemoryTrim:
    """Returns freed memory to the system after large requests.

    glibc keeps what many small buffers had, those of a message that gRPC received, for later. Has no effect elsewhere.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._is_planned = False

    def plan(self) -> None:
        """Makes a thread return the memory, TRIM_DELAY_S from now. For the event loop."""
        if self._trim is not None and not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._begin)

    def _begin(self) -> None:
        self._is_planned = False
        if self._trim is not None:
            asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
