"""Prometheus exposition: a page of metric families, read from statistics at each scrape; metrics_server has its paths.

Threads serve the page, but the event loop owns the objects with the numbers. So the families are read on the loop,
between two of its steps: no page ever has a half-applied change.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric

from quire.serving.addresses import AddressError, AddressInUseError, TcpAddress, explain_bind_failure
from quire.serving.loop_collector import LoopCollector
from quire.serving.metrics_server import MetricsServer
from quire.serving.security import Security
from quire.serving.tls import ServerTls

log = logging.getLogger(__name__)


def certificate_family(tls: ServerTls | None) -> Metric:
    """Return the time at which the certificate in force ends. Without TLS there is no sample."""
    family = GaugeMetricFamily(
        "quire_tls_certificate_expiry_timestamp_seconds", "When the server's certificate ends, in seconds since 1970."
    )
    if tls is not None:
        family.add_metric([], tls.current().expires_at_s)
    return family


@cache
def version() -> str:
    """Return the version of this package."""
    return metadata.version("quire-kv")


def build_family() -> Metric:
    """Return the version of what runs, as a label; the value is 1."""
    return InfoMetricFamily("quire_build", "The version.", value={"version": version()})


class MetricsPage:
    """The HTTP server behind `--metrics-listen`: the metrics given, the process's own, its certificate's, its version.

    `with MetricsPage(...)` serves it on threads of its own and closes it at the end. Must be made on the running event
    loop. Raises AddressInUseError or AddressError if it can't listen.
    """

    def __init__(
        self,
        address: TcpAddress,
        read: Callable[[], Iterable[Metric]],
        *,
        security: Security | None = None,
        health: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Serves TLS if the server's security has a certificate; then it requires client certificates as configured
        there. `health` returns further lines of /healthz; it is called on any thread."""
        if security is not None:
            security.check_plaintext("--metrics-listen", address)
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        tls = None if security is None else security.tls
        loop = asyncio.get_running_loop()
        registry.register(LoopCollector(lambda: (*read(), certificate_family(tls), build_family()), loop=loop))
        try:
            self._server = MetricsServer(address, registry, tls=tls, health=health)
        except OSError as error:
            reason = explain_bind_failure(address) or error.strerror or str(error)
            kind = AddressInUseError if reason == "Address already in use" else AddressError
            raise kind(f"--metrics-listen {address}: {reason}") from error
        self.address = self._server.address
        log.info("metrics address=%s", self.address)

    def close(self) -> None:
        """Stops serving and frees the port. Pages being written are cut off. Idempotent."""
        self._server.close()

    def __enter__(self) -> "MetricsPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
