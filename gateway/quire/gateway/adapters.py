"""The open requests of each adapter: for metrics, and for an adapter that is to be unloaded behind them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client.core import GaugeMetricFamily, Metric

from quire.gateway.routing.backend import Backend


class AdapterRequest:
    """An open request with an adapter; it waits until it has its first token."""

    __slots__ = ("_on_token", "is_waiting")

    def __init__(self, on_token: Callable[[], None]) -> None:
        self.is_waiting = True
        self._on_token = on_token

    def generated(self) -> None:
        """Say that it has a token."""
        if self.is_waiting:
            self.is_waiting = False
            self._on_token()


class AdapterRequests:
    """Numbers of open requests by the adapter's name, and the adapters that are being unloaded."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin without requests; clock gives seconds since 1970."""
        self._clock = clock
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._ended = asyncio.Event()
        self._changed_at = clock()
        self.leaving: set[str] = set()
        """Adapters that new requests can't have, because they are unloaded when the others have ended."""

    @contextmanager
    def open(self, name: str) -> Iterator[AdapterRequest]:
        """Count a request from here to the end of the block."""

        def on_token() -> None:
            self._count(self._waiting, name, -1)
            self._count(self._running, name, 1)

        self._count(self._waiting, name, 1)
        request = AdapterRequest(on_token)
        try:
            yield request
        finally:
            self._count(self._waiting if request.is_waiting else self._running, name, -1)
            self._ended.set()

    async def ended(self, name: str) -> None:
        """Wait until no request has the adapter."""
        while name in self._waiting or name in self._running:
            self._ended.clear()
            await self._ended.wait()

    def _count(self, counts: Counter[str], name: str, change: int) -> None:
        counts[name] += change
        if not counts[name]:
            del counts[name]
        self._changed_at = self._clock()

    def families(self, backends: Iterable[Backend], *, shown: Collection[str] | None = None) -> Iterator[Metric]:
        """The adapters as routers read them of an engine: the names are labels, the value is the time of the change.

        shown are the names that may be read; None: all.
        """
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of open requests with and without a first token, and most adapters, as labels; the time of the "
            "last change, in seconds since 1970.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        max_adapters = max((backend.max_adapters for backend in backends), default=0)
        allowed = self._running.keys() | self._waiting.keys() if shown is None else set(shown)
        names = [",".join(sorted(allowed & counts.keys())) for counts in (self._running, self._waiting)]
        gauge.add_metric((str(max_adapters), *names), self._changed_at)
        yield gauge
