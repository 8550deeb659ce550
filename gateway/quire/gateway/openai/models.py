"""The models and their tokenizers: GET /v1/models, and POST /tokenize and /detokenize, as vLLM has them."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.gateway.errors import HttpError
from quire.gateway.fields import text_of, token_ids_of
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, authorization_of, json_response, post
from quire.gateway.routing.backend import Backend, base_of
from quire.gateway.texts import check_countable, decode_tokens, encode_text, tokenizer_for


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoints."""

    async def models(request: Request) -> Response:
        served = gateway.served(gateway.caller_of(authorization_of(request.headers)))
        names = list(served)
        pages = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return json_response(
            {"object": "list", "data": [_card(gateway, name, backend) for name, backend in served.items()], **pages}
        )

    async def model(request: Request) -> Response:
        caller = gateway.caller_of(authorization_of(request.headers))
        name = request.path_params["model"]
        return json_response(_card(gateway, name, gateway.backend_of(name, caller)))

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        post(gateway, "/tokenize", tokenize),
        post(gateway, "/detokenize", detokenize),
    ]


def _card(gateway: Gateway, name: str, backend: Backend) -> dict[str, Any]:
    """Return a model or an adapter as OpenAI and vLLM have it, and with Anthropic's fields."""
    base = base_of(backend)
    return {
        "id": name,
        "object": "model",
        "created": gateway.began_s,
        "owned_by": "quire",
        "root": backend.model_names[0],
        "parent": None if base is backend else base.model_names[0],
        "max_model_len": backend.max_model_len,
        "pools": list(backend.pools),
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(gateway.began_s, UTC).isoformat(),
    }


async def tokenize(gateway: Gateway, request: PostRequest) -> Response:
    """POST /tokenize with a prompt: its tokens."""
    fields = request.fields
    backend = gateway.backend_of(fields.string("model"), request.caller)
    prompt = text_of("prompt", fields.require("prompt"))
    add_special_tokens = fields.boolean("add_special_tokens", True)
    has_texts = fields.boolean("return_token_strs")
    fields.end()
    tokenizer = tokenizer_for("prompt", backend.tokenizer)
    check_countable("prompt", prompt, tokenizer, max_tokens=backend.max_model_len)
    token_ids = await encode_text(tokenizer, prompt, add_special_tokens=add_special_tokens)
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
    backend = gateway.backend_of(fields.string("model"), request.caller)
    fields.require("tokens")
    token_ids = token_ids_of("tokens", fields.array("tokens", max_length=gateway.limits.max_body_bytes) or [])
    fields.end()
    if backend.tokenizer is None:
        raise HttpError(400, "there is no tokenizer", code="unsupported_value")
    return json_response({"prompt": await decode_tokens(backend.tokenizer, token_ids, skip_special_tokens=False)})
