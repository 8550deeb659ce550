"""GET /openapi.json and its page at /docs: the endpoints, with the fields that most callers use.

docs/reference/http.md has all fields. So bodies allow further ones. The page loads nothing from elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from quire.gateway.http.endpoint import json_response
from quire.gateway.http.page import FOLDER, HEADERS
from quire.serving.metrics import version

_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
_COUNT, _OBJECTS = {"type": "integer", "minimum": 0}, {"type": "array", "items": {"type": "object"}}
_SAMPLING = {
    "model": _TEXT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": {"type": "integer"},
    "stop": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "n": _COUNT,
    "stream": _FLAG,
}
# What an endpoint does, its required fields, and its fields.
_BODIES: Mapping[str, tuple[str, Sequence[str], Mapping[str, Any]]] = {
    "/v1/completions": (
        "Continue a text",
        ("prompt",),
        {"prompt": {"oneOf": [_TEXT, {"type": "array"}]}, "max_tokens": _COUNT, **_SAMPLING},
    ),
    "/v1/chat/completions": (
        "Write the next message of a chat",
        ("messages",),
        {"messages": _OBJECTS, "max_completion_tokens": _COUNT, "tools": _OBJECTS, **_SAMPLING},
    ),
    "/v1/responses": (
        "Write the next items of a response",
        ("input",),
        {"input": {"oneOf": [_TEXT, _OBJECTS]}, "instructions": _TEXT, "max_output_tokens": _COUNT, **_SAMPLING},
    ),
    "/v1/messages": (
        "Write the next message of a chat, in Anthropic's form",
        ("messages", "max_tokens"),
        {"messages": _OBJECTS, "max_tokens": _COUNT, "system": _TEXT, "tools": _OBJECTS, "stream": _FLAG},
    ),
    "/v1/messages/count_tokens": (
        "Count the tokens of a chat, in Anthropic's form",
        ("messages",),
        {"messages": _OBJECTS, "system": _TEXT, "tools": _OBJECTS},
    ),
    "/v1/load_lora_adapter": (
        "Load an adapter from a folder of the workers' machines",
        ("lora_name", "lora_path"),
        {"lora_name": _TEXT, "lora_path": _TEXT, "model": _TEXT},
    ),
    "/v1/unload_lora_adapter": ("Unload an adapter", ("lora_name",), {"lora_name": _TEXT, "model": _TEXT}),
    "/tokenize": ("Return the tokens of a text", ("prompt",), {"prompt": _TEXT, "model": _TEXT}),
    "/detokenize": ("Return the text of tokens", ("tokens",), {"tokens": {"type": "array", "items": _COUNT}}),
}
_SUMMARIES = {
    "/": "The playground and the live cache, for a browser",
    "/live": "The cache as it changes, as server-sent events",
    "/live/sequence": "The block table of a sequence",
    "/v1/models": "List the served models",
    "/v1/models/{model:path}": "Describe a served model",
    "/v1/responses/{id}/input_items": "List the items that a kept response was asked with",
    "/health": "Answer while the process can",
    "/ready": "Tell whether a request can be computed now",
    "/metrics": "Metrics for Prometheus",
    "/version": "The version of Quire",
}
_SUMMARIES_BY_METHOD = {
    ("GET", "/v1/responses/{id}"): "Return a kept response",
    ("DELETE", "/v1/responses/{id}"): "Forget a kept response",
}


def routes(others: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Return the endpoints, which describe the others."""
    document = describe(others)

    async def openapi(request: Request) -> Response:
        return json_response(document)

    async def docs(request: Request) -> Response:
        return FileResponse(FOLDER / "docs.html", headers=HEADERS)

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def describe(endpoints: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        if isinstance(each, Route):
            for method in sorted((each.methods or {"GET"}) - {"HEAD"}):
                paths.setdefault(each.path.replace(":path}", "}"), {})[method.lower()] = _operation(each, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version()},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(route: Route, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": _SUMMARIES_BY_METHOD.get((method, route.path)) or _SUMMARIES.get(route.path, route.path),
        "responses": {"200": {"description": "The answer"}, "default": {"description": "An error, {error: {...}}"}},
    }
    if parameters := list(route.param_convertors):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in parameters
        ]
    if method == "POST":
        summary, required, properties = _BODIES.get(route.path, (route.path, (), {}))
        schema = {"type": "object", "required": list(required), "properties": dict(properties)}
        operation["summary"] = summary
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
