"""Prometheus exposition: a page of metric families, read from statistics at the moment it is asked for.

The page is served by threads, but whatever owns the numbers belongs to the event loop. So the families are read on the
loop, between two of its steps: no page ever shows half a change.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.serving.addresses import AddressError, AddressInUseError, TcpAddress, explain_bind_failure

log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0


class LoopCollector(Collector):
    """Collects the families that `read` returns; `read` runs on `loop`, whichever thread asks.

    Raises TimeoutError, which makes the page a 500, if the loop does not get to it within 5 s.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]], *, loop: asyncio.AbstractEventLoop) -> None:
        self._read = read
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def read() -> list[Metric]:
            return list(self._read())

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_READ_TIMEOUT_S)


class MetricsPage:
    """The HTTP server behind `--metrics-listen`, with the process's own metrics beside those given.

    `with MetricsPage(...)` serves it on threads of its own and closes it at the end. Must be made on the running event
    loop. Raises AddressInUseError or AddressError if it can't listen.
    """

    def __init__(self, address: TcpAddress, read: Callable[[], Iterable[Metric]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(LoopCollector(read, loop=asyncio.get_running_loop()))
        self._server, self._thread = _listen(address, registry)
        self.address = TcpAddress(address.host, self._server.server_port)
        log.info("metrics address=%s", self.address)

    def close(self) -> None:
        """Stops serving and frees the port. Pages being written are cut off. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "MetricsPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(address: TcpAddress, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread]:
    try:
        started: tuple[Any, threading.Thread] = start_http_server(address.port, address.host, registry)
    except OSError as error:
        reason = explain_bind_failure(address) or error.strerror or str(error)
        kind = AddressInUseError if reason == "Address already in use" else AddressError
        raise kind(f"--metrics-listen {address}: {reason}") from error
    return started
