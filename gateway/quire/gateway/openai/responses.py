"""/v1/responses, as OpenAI and Open Responses have it, for text and tools. docs/reference/http.md lists its fields."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.callers import Caller
from quire.gateway.chat.cache_fields import KeptEnds, read_cache_options
from quire.gateway.chat.conversation import Conversation
from quire.gateway.chat.json_schemas import closed
from quire.gateway.chat.prefix_ends import Message
from quire.gateway.chat.tools import Arguments, CallBegan, Event, Reasoning, Text
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import MAX_INT32, Fields
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, authorization_of, json_response, post
from quire.gateway.http.streams import begin_stream, encode_json, event_of
from quire.gateway.kept_responses import KeptResponse, KeptResponses
from quire.gateway.openai.answers import TokenUsage, call_id, diagnostics_of, logprob_entries
from quire.gateway.openai.conversations import BegunConversation, ConversationRequest, begin
from quire.gateway.openai.parameters import (
    cache_of,
    ignore_bookkeeping,
    replace_max_tokens,
    sampling_of,
    with_grammar,
)
from quire.gateway.openai.response_items import (
    Item,
    add_messages,
    find_item,
    items_before,
    listed,
    page_of,
    read_items,
)
from quire.gateway.openai.response_tools import INPUT, read_response_tools
from quire.gateway.routing.backend import Backend
from quire.gateway.token_texts import TokenTexts

_NAMES = {
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format",
}
_LOGPROBS = "message.output_text.logprobs"
# Values of include that are accepted, though answers never have them.
_ABSENT = (
    *("reasoning.encrypted_content", "message.input_image.image_url", "code_interpreter_call.outputs"),
    *("web_search_call.action.sources", "web_search_call.results", "file_search_call.results"),
    "computer_call_output.output.image_url",
)
_NOT_IN_KEY = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ConversationRequest):
    """A request as it was read.

    items          of its own input
    custom_names   of the tools that take free text
    shown          fields that the answer repeats
    """

    items: Sequence[Item]
    custom_names: frozenset[str]
    shown: Mapping[str, Any]


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoints."""

    async def response(request: Request) -> Response:
        tenant, found = _kept(gateway, request)
        if request.query_params.get("stream") == "true":
            raise HttpError(
                400, "stream is true, must be false: the answer has ended", code="invalid_value", param="stream"
            )
        if request.method == "GET":
            return Response(found.body, media_type="application/json")
        gateway.responses.forget(tenant, found.id)
        return json_response({"id": found.id, "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        tenant, found = _kept(gateway, request)
        return json_response(page_of(gateway.responses, tenant, found, request.query_params))

    return [
        post(gateway, "/v1/responses", _create),
        Route("/v1/responses/{id}", response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
    ]


def _kept(gateway: Gateway, request: Request) -> tuple[str, KeptResponse]:
    """Return the caller's tenant, and its response of the id in the path. Raises HttpError: 404 if there is none."""
    tenant, response_id = gateway.caller_of(authorization_of(request.headers)).tenant, request.path_params["id"]
    found = gateway.responses.find(tenant, response_id)
    if found is None:
        raise HttpError(404, f"no response {response_id[:100]!r} is kept here", code="response_not_found")
    return tenant, found


async def _create(gateway: Gateway, request: PostRequest) -> Response:
    """Answer a request, as a whole or as a stream."""
    tenant = request.caller.tenant
    asked = read_request(gateway, request.fields, request.caller)
    begun = await begin(gateway, request.caller, asked, names=_NAMES)
    answer = _ResponsesAnswer(asked, begun, request, gateway.token_texts(asked.backend))
    if asked.shown["store"]:
        answer.keep = lambda response: gateway.responses.keep(tenant, response)
    if asked.stream:
        return await begin_stream(begun.chunks, answer, gateway.limits, encode_error=answer.error_event)
    async with aclosing(begun.chunks) as chunks:
        async for chunk in chunks:
            answer.push(chunk)
    answer.finish()
    return json_response(answer.body)


# Reading.


def read_request(gateway: Gateway, fields: Fields, caller: Caller) -> ResponsesRequest:
    """Return the request that a body makes. Raises HttpError."""
    backend = gateway.backend_of(fields.string("model"), caller)
    _refuse(fields)
    instructions = fields.string("instructions")
    system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    before = _items_before(gateway.responses, fields, caller.tenant)
    items = read_items(fields, find=partial(find_item, gateway.responses, caller.tenant))
    kept = KeptEnds(read_cache_options(fields))
    tools = read_response_tools(fields, kept)
    messages = [*system]
    add_messages(messages, before, path="previous_response_id", kept=kept)
    add_messages(messages, items, path="input", kept=kept)
    further = _further(fields.object("reasoning"))
    conversation = Conversation(messages, tools.offer, further=further, kept=kept.ends)
    max_tokens = fields.integer("max_output_tokens", low=1)
    params = sampling_of(fields, max_tokens=MAX_INT32, logprobs=_num_logprobs(fields, backend))
    params = replace_max_tokens(_with_format(params, fields.object("text")), max_tokens)
    shown = _shown(fields, params) | {"tools": tools.listed, "store": _stores(gateway, fields)}
    stream = fields.boolean("stream")
    if (options := fields.object("stream_options")) is not None:
        options.ignore("include_obfuscation")
        options.end()
    asked = ResponsesRequest(
        backend=backend,
        conversation=conversation,
        params=params,
        cache=cache_of(fields, kept),
        stream=stream,
        items=items,
        custom_names=tools.custom_names,
        shown=shown,
        compared_with=kept.options.compared_with,
        only_warms=kept.options.only_warms,
        stores=shown["store"],
    )
    fields.end()
    return asked


def _items_before(kept: KeptResponses, fields: Fields, tenant: str) -> list[Item]:
    """Return the items of the conversation that a request continues. Raises HttpError."""
    response_id = fields.string("previous_response_id")
    if response_id is None:
        return []
    conversation = kept.conversation(tenant, response_id)
    if conversation is None:
        path = fields.path_of("previous_response_id")
        why = "is not kept here, or not with all before it: send the items again"
        message = f"{path} is {response_id[:100]!r}, which {why}"
        raise HttpError(400, message, code="previous_response_not_found", param=path)
    return items_before(conversation)


def _stores(gateway: Gateway, fields: Fields) -> bool:
    """Return whether the answer is kept, which is OpenAI's default."""
    wanted: bool = fields.boolean("store", True)
    return wanted and gateway.responses.keep_s > 0


def _shown(fields: Fields, params: SamplingParams) -> dict[str, Any]:
    """Return the fields that the answer repeats, with defaults for those that are not given."""
    reasoning = fields.take("reasoning")
    return {
        "instructions": fields.string("instructions"),
        "max_output_tokens": fields.integer("max_output_tokens"),
        "max_tool_calls": fields.integer("max_tool_calls"),  # of tools that OpenAI runs
        "metadata": fields.mapping("metadata") or {},
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "previous_response_id": fields.string("previous_response_id"),
        "prompt_cache_key": fields.string("prompt_cache_key"),
        "prompt_cache_options": fields.take("prompt_cache_options"),
        "prompt_cache_retention": fields.take("prompt_cache_retention"),
        "safety_identifier": fields.string("safety_identifier"),
        "reasoning": reasoning and {"effort": None, "summary": None} | reasoning,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "tool_choice": fields.take("tool_choice") or "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | (fields.take("text") or {}),
    }


def _refuse(fields: Fields) -> None:
    fields.refuse("conversation", "give previous_response_id, or send the items again")
    fields.refuse("background", "wait for the answer", unless=(False,))
    fields.refuse("prompt", "no prompts are stored")
    fields.refuse("n", "there is one answer", unless=(1,))
    fields.refuse("response_format", "give text.format")
    fields.refuse("prompt_logprobs", "use /v1/completions")
    fields.refuse("moderation", "there is no moderation")
    fields.refuse("context_management", "send a shorter input")
    fields.choice("truncation", ("auto", "disabled"))  # an input that is too long is refused
    ignore_bookkeeping(fields)
    fields.ignore("client_metadata")


def _further(reasoning: Fields | None) -> Mapping[str, Any]:
    """Return the values that the template gets beside messages and tools."""
    if reasoning is None:
        return {}
    effort = reasoning.string("effort")
    reasoning.ignore("summary", "generate_summary")
    reasoning.end()
    return {} if effort is None else {"reasoning_effort": effort}


def _num_logprobs(fields: Fields, backend: Backend) -> int | None:
    top = fields.integer("top_logprobs", low=0, high=backend.max_logprobs)
    path, included = fields.path_of("include"), fields.array("include", max_length=100) or []
    for index, each in enumerate(included):
        if each not in (_LOGPROBS, *_ABSENT):
            raise invalid(f"{path}[{index}]", each, " or ".join(map(repr, (_LOGPROBS, *_ABSENT))))
    return (top or 0) if top or _LOGPROBS in included else None


def _with_format(params: SamplingParams, text: Fields | None) -> SamplingParams:
    """Return parameters with the grammar of text.format."""
    if text is None:
        return params
    text.choice("verbosity", ("low", "medium", "high"))
    asked = text.object("format")
    text.end()
    if asked is None:
        return params
    asked.require("type")
    kind = asked.choice("type", ("text", "json_object", "json_schema"))
    schema = None
    if kind == "json_schema":
        asked.require("schema")
        schema = asked.mapping("schema")
        asked.ignore("name", "description")
        if asked.boolean("strict", True) and schema is not None:
            schema = closed(schema)
    asked.end()
    if kind == "text":
        return params
    wanted: dict[str, Any] = {"json_object": True} if schema is None else {"json_schema": schema}
    return with_grammar(params, text.path_of("format"), **wanted)


# Answering.


@dataclass(slots=True)
class _Text:
    """A message of the answer, as far as it has come."""

    id: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def part(self) -> dict[str, Any]:
        """Return its content."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def body(self, status: str) -> dict[str, Any]:
        """Return the item; it has no content while it is in progress."""
        content = [] if status == "in_progress" else [self.part]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


@dataclass(slots=True)
class _Reasoning:
    """Reasoning of the answer, as far as it has come."""

    id: str
    text: str = ""

    @property
    def part(self) -> dict[str, Any]:
        """Return its content."""
        return {"type": "reasoning_text", "text": self.text}

    def body(self, status: str) -> dict[str, Any]:
        """Return the item; it has no content while it is in progress."""
        content = [] if status == "in_progress" else [self.part]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


@dataclass(slots=True)
class _Call:
    """A call of the answer, as far as it has come."""

    id: str
    name: str
    call_id: str = field(default_factory=call_id)
    arguments: str = ""

    def body(self, status: str) -> dict[str, Any]:
        """Return the item."""
        arguments = "" if status == "in_progress" else self.arguments
        call = {"id": self.id, "type": "function_call", "status": status, "arguments": arguments}
        return call | {"call_id": self.call_id, "name": self.name}


@dataclass(slots=True)
class _CustomCall(_Call):
    """A call of a tool that takes free text: the one argument of its function."""

    @property
    def input(self) -> str:
        """Return the text. Arguments that were cut are shown as they are."""
        try:
            return str(json.loads(self.arguments)[INPUT])
        except (ValueError, LookupError, TypeError):
            return self.arguments

    def body(self, status: str) -> dict[str, Any]:
        """Return the item."""
        text = "" if status == "in_progress" else self.input
        call = {"id": self.id, "type": "custom_tool_call", "status": status, "input": text}
        return call | {"call_id": self.call_id, "name": self.name}


def response_key(request_id: str) -> str:
    """Return the part of an answer's id that its items' ids have too: unique, and of letters that a path may have."""
    return f"{_NOT_IN_KEY.sub('-', request_id)}_{secrets.token_hex(4)}"


class _ResponsesAnswer:
    """The answer to one request: its events, and at their end the answer whole."""

    def __init__(
        self, asked: ResponsesRequest, begun: BegunConversation, request: PostRequest, texts: TokenTexts
    ) -> None:
        self._asked = asked
        self._begun = begun
        self._tokens = texts.after(begun.prompt_token_ids, skip_special_tokens=asked.params.skip_special_tokens)
        self._key = response_key(request.id)
        self.keep: Callable[[KeptResponse], None] = lambda response: None
        self._usage = TokenUsage(len(begun.prompt_token_ids), [begun.report])
        self._numbers = count()
        self._is_begun = False
        self._open: _Text | _Reasoning | _Call | None = None
        self._unshown: list[dict[str, Any]] = []  # log-probabilities of tokens before their text comes
        self._done: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._completed_s: int | None = None
        self._head = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": request.began_s,
            "model": asked.backend.model_names[0],
        }

    @property
    def body(self) -> dict[str, Any]:
        """Return the response as it is now."""
        is_cut = self._status == "incomplete"
        diagnosis = self._begun.report.diagnosis
        return {
            **self._head,
            "status": self._status,
            "completed_at": self._completed_s,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._done,
            "background": False,
            "service_tier": "default",
            "truncation": "disabled",
            **self._asked.shown,
            "top_logprobs": self._asked.params.logprobs or 0,
            "prompt_cache_diagnostics": None if diagnosis is None else diagnostics_of(diagnosis),
            "usage": None if self._status == "in_progress" else self._usage_body,
        }

    @property
    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": usage.prompt_details,
            "output_tokens": usage.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        }

    def push(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk: with the first one response.created and response.in_progress."""
        begun = b""
        self._begun.report.take(chunk.cache_outcome, f"resp_{self._key}")
        if not self._is_begun:
            self._is_begun = True
            begun = b"".join(self._event(f"response.{kind}", response=self.body) for kind in ("created", "in_progress"))
        return begun + b"".join(self._take(chunk))

    def finish(self) -> bytes:
        """Keep the answer; return its last event, response.completed or response.incomplete."""
        self._keep()
        return self._event(f"response.{self._status}", response=self.body)

    def _keep(self) -> None:
        """Keep the answer, before the caller knows that it is whole."""
        items = encode_json(listed(self._asked.items, self._key))
        previous = self._asked.shown["previous_response_id"]
        self.keep(KeptResponse(f"resp_{self._key}", encode_json(self.body), items, previous))

    def error_event(self, error: HttpError) -> bytes:
        """Return the event of an error that ends the stream."""
        found = error.body["error"]
        # OpenAI has the fields beside the type, Open Responses has them in an object.
        return self._event("error", code=found["code"], message=found["message"], param=found["param"], error=found)

    def _event(self, kind: str, **values: Any) -> bytes:
        return event_of({"type": kind, "sequence_number": next(self._numbers), **values}, name=kind)

    def _take(self, chunk: Chunk) -> Iterator[bytes]:
        """Take a chunk; iterate over the events of its new content."""
        self._usage.count(chunk, generates=not self._asked.only_warms)
        self._unshown += logprob_entries(chunk, self._tokens, self._asked.params)
        for event in self._begun.events_of(chunk):
            yield from self._take_event(event)
        if chunk.finish_reason is None:
            return
        is_whole = chunk.finish_reason is FinishReason.STOP or self._asked.only_warms
        status = "completed" if is_whole else "incomplete"
        if self._open is None and not self._asked.only_warms:
            yield from self._begin_text()
        yield from self._close(status)
        self._status = status
        self._completed_s = int(time.time()) if status == "completed" else None

    def _take_event(self, event: Event) -> Iterator[bytes]:
        logprobs, self._unshown = self._unshown, []
        if isinstance(event, Text):
            if not isinstance(self._open, _Text):
                yield from self._begin_text()
            assert isinstance(self._open, _Text)
            self._open.text += event.text
            self._open.logprobs += logprobs
            yield self._item_event("output_text.delta", content_index=0, delta=event.text, logprobs=logprobs)
        elif isinstance(event, Reasoning):
            yield from self._take_reasoning(event)
        elif isinstance(event, CallBegan):
            yield from self._close("completed")
            kind, prefix = (_CustomCall, "ctc") if event.name in self._asked.custom_names else (_Call, "fc")
            yield self._begin(kind(self._id(prefix), event.name, event.id or call_id()))
        else:
            yield from self._take_arguments(event)

    def _take_reasoning(self, event: Reasoning) -> Iterator[bytes]:
        if not isinstance(self._open, _Reasoning):
            yield from self._close("completed")
            item = _Reasoning(self._id("rs"))
            yield self._begin(item)
            yield self._item_event("content_part.added", content_index=0, part=item.part)
        assert isinstance(self._open, _Reasoning)
        self._open.text += event.text
        yield self._item_event("reasoning_text.delta", content_index=0, delta=event.text)

    def _take_arguments(self, event: Arguments) -> Iterator[bytes]:
        assert isinstance(self._open, _Call)
        self._open.arguments += event.text
        if not isinstance(self._open, _CustomCall):  # its input is known at its end
            yield self._item_event("function_call_arguments.delta", delta=event.text)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._key}_{len(self._done)}"

    def _begin_text(self) -> Iterator[bytes]:
        yield from self._close("completed")
        item = _Text(self._id("msg"))
        yield self._begin(item)
        yield self._item_event("content_part.added", content_index=0, part=item.part | {"logprobs": []})

    def _begin(self, item: _Text | _Reasoning | _Call) -> bytes:
        self._open = item
        return self._event("response.output_item.added", output_index=len(self._done), item=item.body("in_progress"))

    def _item_event(self, kind: str, **values: Any) -> bytes:
        assert self._open is not None
        return self._event(f"response.{kind}", item_id=self._open.id, output_index=len(self._done), **values)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open item."""
        item = self._open
        if item is None:
            return
        if isinstance(item, _Text):
            item.logprobs += self._unshown
            self._unshown = []
            yield self._item_event("output_text.done", content_index=0, text=item.text, logprobs=item.logprobs)
            yield self._item_event("content_part.done", content_index=0, part=item.part)
        elif isinstance(item, _CustomCall):
            yield self._item_event("custom_tool_call_input.delta", delta=item.input)
            yield self._item_event("custom_tool_call_input.done", input=item.input)
        elif isinstance(item, _Reasoning):
            yield self._item_event("reasoning_text.done", content_index=0, text=item.text)
            yield self._item_event("content_part.done", content_index=0, part=item.part)
        else:
            yield self._item_event("function_call_arguments.done", name=item.name, arguments=item.arguments)
        body = item.body(status)
        yield self._event("response.output_item.done", output_index=len(self._done), item=body)
        self._done.append(body)
        self._open = None
