"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them. docs/reference/http.md lists their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from quire.client.engine.sampling import MAX_STOP_STRINGS, SamplingParams
from quire.gateway.anthropic.answers import MessageAnswer
from quire.gateway.anthropic.conversation import read_conversation
from quire.gateway.anthropic.errors import REQUEST_ID_HEADER, error_event
from quire.gateway.callers import Caller
from quire.gateway.chat.cache_fields import KeptEnds, read_cache_options
from quire.gateway.chat.models import tokenizer_of
from quire.gateway.fields import MAX_INT32, Fields
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, json_response, post
from quire.gateway.http.streams import begin_stream
from quire.gateway.openai.conversations import ConversationRequest, begin, chat_model_of
from quire.gateway.openai.parameters import (
    cache_of,
    ignore_bookkeeping,
    replace_max_tokens,
    sampling_of,
    strings_of,
    with_grammar,
)

PATH = "/v1/messages"

_NAMES = {"prompt": "messages", "grammar": "output_config.format", "stop": "stop_sequences"}
# Fields that advise, or that say something of Anthropic's services; the text does not depend on them.
_ADVICE = ("context_management", "inference_geo", "speed")
_BOOKKEEPING = ("anthropic_beta", "anthropic_version", "betas", "user_profile_id", "workspace_id")


@dataclass(frozen=True, slots=True)
class MessageRequest(ConversationRequest):
    """A request as it was read."""

    max_tokens: int


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoints."""
    return [post(gateway, PATH, _create), post(gateway, f"{PATH}/count_tokens", _count_tokens)]


async def _create(gateway: Gateway, request: PostRequest) -> Response:
    """Answer a request, as a whole or as a stream."""
    asked = read_request(gateway, request.fields, request.caller)
    begun = await begin(gateway, request.caller, asked, names=_NAMES)
    answer = MessageAnswer(request.id, asked.backend.model_names[0], begun, max_tokens=asked.max_tokens)
    headers = {REQUEST_ID_HEADER: request.id}
    if asked.stream:
        return await begin_stream(begun.chunks, answer, gateway.limits, headers=headers, encode_error=error_event)
    async with aclosing(begun.chunks) as chunks:
        async for chunk in chunks:
            answer.push(chunk)
    return json_response(answer.body, headers=headers)


async def _count_tokens(gateway: Gateway, request: PostRequest) -> Response:
    """Answer with the number of tokens of a conversation's prompt."""
    fields = request.fields
    backend = gateway.backend_of(fields.string("model"), request.caller)
    _ignore_advice(fields)
    _compared_with(fields)
    conversation = replace(read_conversation(fields, KeptEnds(read_cache_options(fields))), kept=())
    list(_schemas(fields))
    fields.end()
    prompt = await chat_model_of(gateway, backend).prompt_of(
        tokenizer_of(backend),
        conversation,
        tenant=request.caller.tenant,
        param=_NAMES["prompt"],
        max_tokens=MAX_INT32,
    )
    return json_response({"input_tokens": len(prompt.token_ids)}, headers={REQUEST_ID_HEADER: request.id})


def read_request(gateway: Gateway, fields: Fields, caller: Caller) -> MessageRequest:
    """Return the request that a body makes. Raises HttpError."""
    backend = gateway.backend_of(fields.string("model"), caller)
    _refuse(fields)
    _ignore_advice(fields)
    fields.require("max_tokens")
    max_tokens = fields.integer("max_tokens", low=0) or 0
    kept = KeptEnds(read_cache_options(fields))
    conversation = read_conversation(fields, kept)
    only_warms = kept.options.only_warms or not max_tokens
    params = replace_max_tokens(_sampling(fields), max_tokens or 1)
    compared_with = _compared_with(fields) or kept.options.compared_with
    asked = MessageRequest(
        backend=backend,
        conversation=conversation,
        params=params,
        cache=cache_of(fields, kept, explains_miss=compared_with is not None),
        max_tokens=max_tokens,
        stream=fields.boolean("stream"),
        compared_with=compared_with,
        only_warms=only_warms,
    )
    fields.end()
    return asked


def _compared_with(fields: Fields) -> str | None:
    """Return the id of the earlier message that a diagnosis compares with; None: there is none."""
    asked = fields.object("diagnostics")
    if asked is None:
        return None
    message_id = asked.string("previous_message_id")
    asked.end()
    return message_id


def _sampling(fields: Fields) -> SamplingParams:
    fields.aliases["stop"] = "stop_sequences"
    stop = strings_of(fields, "stop_sequences", max_length=MAX_STOP_STRINGS) if fields.has("stop_sequences") else None
    params = sampling_of(fields, max_tokens=MAX_INT32, stop=stop)
    for path, schema in _schemas(fields):
        params = with_grammar(params, path, json_schema=schema)
    return params


def _schemas(fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the JSON schemas of the answer, with their paths: Anthropic had another place for it before."""
    config = fields.object("output_config")
    if config is not None:
        config.ignore("effort")  # the template gets it
        if (asked := config.object("format")) is not None:
            yield _schema(asked)
        config.end()
    if (asked := fields.object("output_format")) is not None:
        yield _schema(asked)


def _schema(asked: Fields) -> tuple[str, Mapping[str, Any]]:
    asked.require("type")
    asked.choice("type", ("json_schema",))
    asked.require("schema")
    schema = asked.mapping("schema") or {}
    asked.end()
    return asked.path_of("schema"), schema


def _refuse(fields: Fields) -> None:
    fields.refuse("n", "there is one answer", unless=(1,))
    fields.refuse("stop", "give stop_sequences")
    fields.refuse("response_format", "give output_config.format")
    fields.refuse("prompt_logprobs", "use /v1/completions")
    fields.refuse("container", "no code is executed here")
    fields.refuse("mcp_servers", "no MCP servers are called here", unless=([],))


def _ignore_advice(fields: Fields) -> None:
    ignore_bookkeeping(fields)
    fields.ignore(*_ADVICE, *_BOOKKEEPING)
