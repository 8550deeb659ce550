"""POST /v1/responses, as OpenAI has it, for text and functions, stateless. docs/reference/http.md lists its fields."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.chat.conversation import (
    MAX_MESSAGES,
    ROLES,
    Conversation,
    Message,
    call_message,
    read_content,
    read_tools,
)
from quire.gateway.chat.tools import Arguments, CallBegan, Event, Text
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import MAX_INT32, Fields, text_of
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, json_response, post
from quire.gateway.http.streams import EventStream, event_of, primed
from quire.gateway.openai.answers import TokenUsage, call_id, logprob_entries
from quire.gateway.openai.conversations import ConversationRequest, Piece, begin
from quire.gateway.openai.parameters import (
    cache_of,
    ignore_bookkeeping,
    replace_max_tokens,
    sampling_of,
    with_grammar,
)
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
_ABSENT = ("reasoning.encrypted_content",)
_TEXT_KINDS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ConversationRequest):
    """A request as it was read; shown are fields that the answer repeats."""

    stream: bool
    shown: Mapping[str, Any]


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoint."""
    return [post(gateway, "/v1/responses", _create)]


async def _create(gateway: Gateway, request: PostRequest) -> Response:
    """Answer a request, as a whole or as a stream."""
    asked = read_request(gateway, request.fields)
    prompt, pieces = await begin(gateway, request.caller, asked, names=_NAMES)
    answer = _ResponsesAnswer(asked, prompt, request, gateway.token_texts(asked.backend))
    if asked.stream:
        events = await primed(answer.events(pieces))
        return EventStream(events, send_timeout_s=gateway.limits.send_timeout_s, encode_error=answer.error_event)
    async with aclosing(answer.events(pieces)) as events:
        async for _ in events:
            pass
    return json_response(answer.body)


# Reading.


def read_request(gateway: Gateway, fields: Fields) -> ResponsesRequest:
    """Return the request that a body makes. Raises HttpError."""
    backend = gateway.backend_of(fields.string("model"))
    metadata = fields.mapping("metadata")
    _refuse(fields)
    instructions = fields.string("instructions")
    system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    conversation = Conversation(
        [*system, *_input(fields)], read_tools(fields, is_flat=True), further=_further(fields.object("reasoning"))
    )
    max_tokens = fields.integer("max_output_tokens", low=1)
    params = sampling_of(fields, max_tokens=MAX_INT32, logprobs=_num_logprobs(fields, backend))
    params = replace_max_tokens(_with_format(params, fields.object("text")), max_tokens)
    shown = {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "metadata": metadata or {},
        "parallel_tool_calls": conversation.offer.parallel,
        "temperature": params.temperature,
        "tool_choice": fields.take("tool_choice") or "auto",
        "tools": fields.take("tools") or [],
        "top_p": params.top_p,
        "text": fields.take("text") or {"format": {"type": "text"}},
    }
    stream = fields.boolean("stream")
    if (options := fields.object("stream_options")) is not None:
        options.ignore("include_obfuscation")
        options.end()
    asked = ResponsesRequest(backend, conversation, params, cache_of(fields), stream, shown)
    fields.end()
    return asked


def _refuse(fields: Fields) -> None:
    fields.refuse("previous_response_id", "nothing is stored: send the items again")
    fields.refuse("conversation", "nothing is stored: send the items again")
    fields.refuse("background", "answers are not stored: wait for the answer", unless=(False,))
    fields.refuse("prompt", "no prompts are stored")
    fields.refuse("truncation", "an input that is too long is refused", unless=("disabled",))
    fields.refuse("n", "there is one answer", unless=(1,))
    fields.refuse("response_format", "give text.format")
    fields.refuse("prompt_logprobs", "use /v1/completions")
    fields.refuse("moderation", "there is no moderation")
    fields.refuse("context_management", "nothing is stored")
    ignore_bookkeeping(fields)
    fields.ignore("max_tool_calls")  # of tools that OpenAI runs; functions are run by the caller


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
            raise invalid(f"{path}[{index}]", each, f"{_LOGPROBS!r}")
    return (top or 0) if top or _LOGPROBS in included else None


def _with_format(params: SamplingParams, text: Fields | None) -> SamplingParams:
    """Return parameters with the grammar of text.format."""
    if text is None:
        return params
    text.refuse("verbosity", "ask for it in the instructions", unless=("medium",))
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
        asked.ignore("name", "description", "strict")
    asked.end()
    if kind == "text":
        return params
    wanted: dict[str, Any] = {"json_object": True} if schema is None else {"json_schema": schema}
    return with_grammar(params, text.path_of("format"), **wanted)


def _input(fields: Fields) -> list[Message]:
    """Return the messages of the items of `input`."""
    value = fields.require("input")
    path = fields.path_of("input")
    if isinstance(value, str):
        return [{"role": "user", "content": text_of(path, value)}]
    if not isinstance(value, list) or not value:
        raise invalid(path, value, "a string, or a list of at least one item")
    messages: list[Message] = []
    for item in fields.objects("input", max_length=MAX_MESSAGES) or []:
        _add_item(item, messages)
    return messages


def _add_item(item: Fields, messages: list[Message]) -> None:
    """Add an input item to the messages: calls belong to the assistant's message before them."""
    kind = item.choice("type", ("message", "function_call", "function_call_output"), "message")
    item.ignore("id", "status", "phase")
    if kind == "message":
        item.require("role")
        role = item.choice("role", ROLES[:-1])
        item.require("content")
        messages.append({"role": role, "content": read_content(item, "content", kinds=_TEXT_KINDS)})
    elif kind == "function_call":
        texts = {}
        for name in ("call_id", "name", "arguments"):
            item.require(name)
            texts[name] = item.string(name) or ""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(call_message(*texts.values()))
    else:
        item.require("call_id")
        item.require("output")
        output = read_content(item, "output", kinds=_TEXT_KINDS)
        messages.append({"role": "tool", "tool_call_id": item.string("call_id"), "content": output})
    item.end()


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


class _ResponsesAnswer:
    """The answer to one request: its events, and at their end the answer whole."""

    def __init__(
        self, asked: ResponsesRequest, prompt_token_ids: list[int], request: PostRequest, texts: TokenTexts
    ) -> None:
        self._asked = asked
        self._tokens = texts.after(prompt_token_ids, skip_special_tokens=asked.params.skip_special_tokens)
        self._request_id = request.id
        self._usage = TokenUsage(len(prompt_token_ids))
        self._numbers = count()
        self._open: _Text | _Call | None = None
        self._unshown: list[dict[str, Any]] = []  # log-probabilities of tokens before their text comes
        self._done: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._head = {
            "id": f"resp_{request.id}",
            "object": "response",
            "created_at": request.began_s,
            "model": asked.backend.model_names[0],
        }

    @property
    def body(self) -> dict[str, Any]:
        """Return the response as it is now."""
        is_cut = self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._done,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._asked.shown,
            "top_logprobs": self._asked.params.logprobs or 0,
            "usage": None if self._status == "in_progress" else self._usage_body,
        }

    @property
    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        }

    async def events(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, from response.created to response.completed or response.incomplete."""
        async with aclosing(pieces):
            is_begun = False
            async for piece in pieces:
                if not is_begun:  # an error before the first token is an HTTP status
                    yield self._event("response.created", response=self.body)
                    yield self._event("response.in_progress", response=self.body)
                    is_begun = True
                for event in self._take(piece):
                    yield event
        yield self._event(f"response.{self._status}", response=self.body)

    def error_event(self, error: HttpError) -> bytes:
        """Return the event of an error that ends the stream."""
        found = error.body["error"]
        return self._event("error", code=found["code"], message=found["message"], param=found["param"])

    def _event(self, kind: str, **values: Any) -> bytes:
        return event_of({"type": kind, "sequence_number": next(self._numbers), **values}, name=kind)

    def _take(self, piece: Piece) -> Iterator[bytes]:
        """Take a piece; iterate over the events of its new content."""
        chunk = piece.chunk
        self._usage.count(chunk)
        self._unshown += logprob_entries(chunk, self._tokens, self._asked.params)
        for event in piece.events:
            yield from self._take_event(event)
        if chunk.finish_reason is None:
            return
        status = "completed" if chunk.finish_reason is FinishReason.STOP else "incomplete"
        if self._open is None:
            yield from self._begin_text()
        yield from self._close(status)
        self._status = status

    def _take_event(self, event: Event) -> Iterator[bytes]:
        logprobs, self._unshown = self._unshown, []
        if isinstance(event, Text):
            if not isinstance(self._open, _Text):
                yield from self._begin_text()
            assert isinstance(self._open, _Text)
            self._open.text += event.text
            self._open.logprobs += logprobs
            yield self._item_event("output_text.delta", content_index=0, delta=event.text, logprobs=logprobs)
        elif isinstance(event, CallBegan):
            yield from self._close("completed")
            yield self._begin(_Call(self._id("fc"), event.name))
        else:
            yield from self._take_arguments(event)

    def _take_arguments(self, event: Arguments) -> Iterator[bytes]:
        assert isinstance(self._open, _Call)
        self._open.arguments += event.text
        yield self._item_event("function_call_arguments.delta", delta=event.text)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self._done)}"

    def _begin_text(self) -> Iterator[bytes]:
        yield from self._close("completed")
        item = _Text(self._id("msg"))
        yield self._begin(item)
        yield self._item_event("content_part.added", content_index=0, part=item.part | {"logprobs": []})

    def _begin(self, item: _Text | _Call) -> bytes:
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
        else:
            yield self._item_event("function_call_arguments.done", name=item.name, arguments=item.arguments)
        body = item.body(status)
        yield self._event("response.output_item.done", output_index=len(self._done), item=body)
        self._done.append(body)
        self._open = None
