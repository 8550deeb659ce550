"""The HTTP application: all endpoints of a gateway."""

from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.gateway.errors import HttpError
from quire.gateway.fields import text_of
from quire.gateway.gateway import Gateway
from quire.gateway.http import page
from quire.gateway.http.endpoint import HttpApp, PostRequest, json_response, post
from quire.gateway.openai import chat, completions, responses
from quire.gateway.openai.completions import encode, token_ids_of
from quire.gateway.texts import decoded
from quire.serving.metrics import build_family, version


def make_app(gateway: Gateway) -> HttpApp:
    """Return the ASGI application of a gateway."""
    routes = _own_routes(gateway)
    for module in (completions, chat, responses, page):
        routes += module.routes(gateway)
    return HttpApp(gateway, routes)


def _own_routes(gateway: Gateway) -> list[BaseRoute]:
    registry = _registry_of(gateway)

    async def models(request: Request) -> Response:
        gateway.caller_of(request.headers.get("authorization"))
        cards = [_card(gateway, name) for name in gateway.backends]
        return json_response({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        gateway.caller_of(request.headers.get("authorization"))
        name = request.path_params["model"]
        gateway.backend_of(name)
        return json_response(_card(gateway, name))

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        if gateway.is_draining:
            raise HttpError(503, "this server is about to end", code="shutting_down")
        away = [backend.model_names[0] for backend in gateway.models if not backend.is_ready]
        if away or not gateway.models:
            raise HttpError(503, f"no service computes for {', '.join(away) or 'any model'} now", code="unavailable")
        return json_response({"status": "ready", "addresses": gateway.addresses})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def show_version(request: Request) -> Response:
        return json_response({"version": version()})

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
        post(gateway, "/tokenize", tokenize),
        post(gateway, "/detokenize", detokenize),
    ]


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    backend = gateway.backends[name]
    return {
        "id": name,
        "object": "model",
        "created": gateway.began_s,
        "owned_by": "quire",
        "root": backend.model_names[0],
        "parent": None,
        "max_model_len": backend.max_model_len,
        "pools": list(backend.pools),
    }


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> list[Metric]:
        return [*self._gateway.metrics.families(self._gateway.models), build_family()]

    def describe(self) -> list[Metric]:
        return []


def _registry_of(gateway: Gateway) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_GatewayCollector(gateway))
    return registry


async def tokenize(gateway: Gateway, request: PostRequest) -> Response:
    """POST /tokenize with a prompt: its tokens."""
    fields = request.fields
    backend = gateway.backend_of(fields.string("model"))
    prompt = text_of("prompt", fields.require("prompt"))
    add_special_tokens = fields.boolean("add_special_tokens", True)
    has_texts = fields.boolean("return_token_strs")
    fields.end()
    token_ids = await encode("prompt", prompt, backend.tokenizer, add_special_tokens=add_special_tokens)
    texts = gateway.token_texts(backend)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": backend.max_model_len,
            "tokens": token_ids,
            "token_strs": [texts.of(token_id) for token_id in token_ids] if has_texts else None,
        }
    )


async def detokenize(gateway: Gateway, request: PostRequest) -> Response:
    """POST /detokenize with tokens: their text."""
    fields = request.fields
    backend = gateway.backend_of(fields.string("model"))
    fields.require("tokens")
    token_ids = token_ids_of("tokens", fields.array("tokens", max_length=gateway.limits.max_body_bytes) or [])
    fields.end()
    if backend.tokenizer is None:
        raise HttpError(400, "there is no tokenizer", code="unsupported_value")
    return json_response({"prompt": await decoded(backend.tokenizer, token_ids, skip_special_tokens=False)})
