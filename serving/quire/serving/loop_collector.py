"""Metrics that belong to an event loop, collected from any thread."""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

READ_TIMEOUT_S = 5.0


class LoopCollector(Collector):
    """Collects the families that `read` returns; `read` runs on `loop`, whichever thread collects.

    Raises TimeoutError, which makes the page a 500, if the loop does not run it within READ_TIMEOUT_S.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]], *, loop: asyncio.AbstractEventLoop) -> None:
        self._read = read
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def read() -> list[Metric]:
            return list(self._read())

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(READ_TIMEOUT_S)
