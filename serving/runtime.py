"""Settings of a serving process: the garbage collector must not hold up calls, and memory of large calls is given back.

Objects without cycles are freed at once, with or without a collector; it only looks for cycles, and the time for a look
grows with what it walks through. So what lasts is taken out of its sight at the start, and it looks seldom.

Later nothing is frozen: calls that are open hold cycles that end with them, and would stay for good. Nor is there a
need to: a pool's books are in the core, where the collector does not look. Of one with a million blocks and 1,000
sequences of 4,096 tokens it sees 23 objects.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

THRESHOLDS = (10_000, 10, 10)
"""Container objects made and not freed again before the youngest are looked through, and how many such looks make one
at the next generation. Steps free what they make, so that even the first is reached by growth and cycles alone."""


def tune_garbage_collector() -> None:
    """Collects once, freezes what lives, sets THRESHOLDS. For the start, before calls are answered: tens of ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


TRIM_DELAY_S = 1.0
"""Time from a large request to the return of its memory. Large requests within this time share one return."""


KEPT_FREE_BYTES = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_little_free_memory() -> None:
    """Makes glibc return freed memory of more than KEPT_FREE_BYTES at once. Has no effect elsewhere.

    Otherwise a free of 30 MB teaches glibc to keep 60 MB free in each thread's arena, which malloc_trim does not touch.
    Not for a process that computes: it allocates large tensors again and again.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, KEPT_FREE_BYTES)
        set_option(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


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
