"""The state of the process, for operators: GET /health, /ready, /metrics and /version.

/metrics needs no key, and names no tenant then. With a key it has the metrics of the key's tenant too. The page of
--metrics-listen has those of all tenants.
"""

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.gateway.callers import NOBODY, Caller
from quire.gateway.errors import HttpError
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import authorization_of, json_response
from quire.serving.metrics import build_family, version


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoints."""

    async def health(request: Request) -> Response:
        if gateway.failure:
            raise HttpError(503, f"this server has failed, and ends: {gateway.failure}", code="failed")
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        if gateway.failure:
            raise HttpError(503, f"this server has failed, and ends: {gateway.failure}", code="failed")
        if gateway.is_draining:
            raise HttpError(503, "this server is about to end", code="shutting_down")
        away = [backend.model_names[0] for backend in gateway.models if not backend.is_ready]
        if away or not gateway.models:
            raise HttpError(503, f"no service computes for {', '.join(away) or 'any model'} now", code="unavailable")
        return json_response({"status": "ready", "addresses": gateway.addresses})

    async def metrics(request: Request) -> Response:
        shown = authorization_of(request.headers)
        caller = NOBODY if shown is None else gateway.caller_of(shown)
        return Response(generate_latest(_registry_of(gateway, caller)), media_type=CONTENT_TYPE_LATEST)

    async def show_version(request: Request) -> Response:
        return json_response({"version": version()})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
    ]


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway, caller: Caller) -> None:
        self._gateway = gateway
        self._caller = caller

    def collect(self) -> list[Metric]:
        return [*self._gateway.families(self._caller), build_family()]

    def describe(self) -> list[Metric]:
        return []


def _registry_of(gateway: Gateway, caller: Caller) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_GatewayCollector(gateway, caller))
    return registry
