"""The HTTP application: all endpoints of a door."""

from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.gateway.door import Door
from quire.gateway.errors import HttpError
from quire.gateway.http import page
from quire.gateway.http.endpoint import FrontApp, PostRequest, json_response, post
from quire.gateway.http.fields import text_of
from quire.gateway.openai import chat, completions, responses
from quire.gateway.openai.completions import encode, token_ids_of
from quire.gateway.texts import decoded
from quire.serving.metrics import build_family, version


def make_app(door: Door) -> FrontApp:
    """Return the ASGI application of a door."""
    routes = _own_routes(door)
    for module in (completions, chat, responses, page):
        routes += module.routes(door)
    return FrontApp(door, routes)


def _own_routes(door: Door) -> list[BaseRoute]:
    registry = _registry_of(door)

    async def models(request: Request) -> Response:
        door.caller_of(request.headers.get("authorization"))
        cards = [_card(door, name) for name in door.backends]
        return json_response({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        door.caller_of(request.headers.get("authorization"))
        name = request.path_params["model"]
        door.backend_of(name)
        return json_response(_card(door, name))

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        if door.is_draining:
            raise HttpError(503, "this server is about to end", code="shutting_down")
        away = [backend.model_names[0] for backend in door.models if not backend.is_ready]
        if away or not door.models:
            raise HttpError(503, f"no service computes for {', '.join(away) or 'any model'} now", code="unavailable")
        return json_response({"status": "ready", "addresses": door.addresses})

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
        post(door, "/tokenize", tokenize),
        post(door, "/detokenize", detokenize),
    ]


def _card(door: Door, name: str) -> dict[str, Any]:
    backend = door.backends[name]
    return {
        "id": name,
        "object": "model",
        "created": door.began_s,
        "owned_by": "quire",
        "root": backend.model_names[0],
        "parent": None,
        "max_model_len": backend.max_model_len,
        "pools": list(backend.pools),
    }


class _DoorCollector(Collector):
    def __init__(self, door: Door) -> None:
        self._door = door

    def collect(self) -> list[Metric]:
        return [*self._door.metrics.families(self._door.models), build_family()]

    def describe(self) -> list[Metric]:
        return []


def _registry_of(door: Door) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_DoorCollector(door))
    return registry


async def tokenize(door: Door, request: PostRequest) -> Response:
    """POST /tokenize with a prompt: its tokens."""
    fields = request.fields
    backend = door.backend_of(fields.string("model"))
    prompt = text_of("prompt", fields.require("prompt"))
    add_special_tokens = fields.boolean("add_special_tokens", True)
    has_texts = fields.boolean("return_token_strs")
    fields.end()
    token_ids = await encode("prompt", prompt, backend.tokenizer, add_special_tokens=add_special_tokens)
    texts = door.token_texts(backend)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": backend.max_model_len,
            "tokens": token_ids,
            "token_strs": [texts.of(token_id) for token_id in token_ids] if has_texts else None,
        }
    )


async def detokenize(door: Door, request: PostRequest) -> Response:
    """POST /detokenize with tokens: their text."""
    fields = request.fields
    backend = door.backend_of(fields.string("model"))
    fields.require("tokens")
    token_ids = token_ids_of("tokens", fields.array("tokens", max_length=door.limits.max_body_bytes) or [])
    fields.end()
    if backend.tokenizer is None:
        raise HttpError(400, "there is no tokenizer", code="unsupported_value")
    return json_response({"prompt": await decoded(backend.tokenizer, token_ids, skip_special_tokens=False)})
