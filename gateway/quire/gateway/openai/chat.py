"""POST /v1/chat/completions, as OpenAI and vLLM have it. docs/reference/http.md lists its fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from quire.client.engine.outputs import Chunk
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.callers import Caller
from quire.gateway.chat.cache_fields import KeptEnds, read_cache_options
from quire.gateway.chat.conversation import Conversation, read_messages, read_tools
from quire.gateway.chat.templates import RESERVED
from quire.gateway.chat.tools import Arguments, CallBegan, Event, Reasoning, Text
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import MAX_INT32, Fields
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, json_response, post
from quire.gateway.http.streams import begin_stream
from quire.gateway.openai.answers import ChoiceEvents, TokenUsage, call_id, diagnostics_of, logprob_entries
from quire.gateway.openai.conversations import BegunConversation, ConversationRequest, begin
from quire.gateway.openai.parameters import (
    StreamUsage,
    cache_of,
    ignore_bookkeeping,
    replace_max_tokens,
    sampling_of,
    stream_usage_of,
)
from quire.gateway.routing.backend import Backend
from quire.gateway.token_texts import SampleTokens, TokenTexts

# The engine's fields under the names of this endpoint.
_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "grammar": "response_format"}


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest(ConversationRequest):
    """A request as it was read."""

    usage: StreamUsage
    return_token_ids: bool


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoint."""
    return [post(gateway, "/v1/chat/completions", _create)]


async def _create(gateway: Gateway, request: PostRequest) -> Response:
    """Answer a request, as a whole or as a stream."""
    asked = read_chat(gateway, request.fields, request.caller)
    begun = await begin(gateway, request.caller, asked, names=_NAMES)
    answer = _ChatAnswer(asked, begun, request, gateway.token_texts(asked.backend))
    if asked.stream:
        return await begin_stream(begun.chunks, answer, gateway.limits)
    async with aclosing(begun.chunks) as chunks:
        async for chunk in chunks:
            answer.take(chunk)
    return json_response(answer.body)


# Reading.


def read_chat(gateway: Gateway, fields: Fields, caller: Caller) -> ChatCompletionRequest:
    """Return the request that a body makes. Raises HttpError."""
    backend = gateway.backend_of(fields.string("model"), caller)
    _refuse(fields)
    kept = KeptEnds(read_cache_options(fields))
    offer, messages = read_tools(fields, kept), read_messages(fields, kept)
    conversation = Conversation(
        messages,
        offer,
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        continues=fields.boolean("continue_final_message"),
        further=_further(fields),
        kept=kept.ends,
    )
    _check_continued(fields, conversation)
    stream = fields.boolean("stream")
    params = replace_max_tokens(
        sampling_of(fields, max_tokens=MAX_INT32, logprobs=_num_logprobs(fields, backend)), _max_tokens(fields)
    )
    if params.n > gateway.limits.max_samples:
        raise invalid("n", params.n, f"at most {gateway.limits.max_samples} samples")
    asked = ChatCompletionRequest(
        backend=backend,
        conversation=conversation,
        params=params,
        cache=cache_of(fields, kept),
        stream=stream,
        usage=stream_usage_of(fields, is_stream=stream),
        return_token_ids=fields.boolean("return_token_ids"),
        compared_with=kept.options.compared_with,
        only_warms=kept.options.only_warms,
        stores=fields.boolean("store", True),
    )
    fields.end()
    return asked


def _refuse(fields: Fields) -> None:
    fields.refuse("functions", "give tools", unless=([],))
    fields.refuse("function_call", "give tool_choice", unless=("none",))
    fields.refuse("modalities", "answers are text", unless=(["text"],))
    fields.refuse("audio", "answers are text")
    fields.refuse("web_search_options", "there is no search")
    fields.refuse("moderation", "there is no moderation")
    fields.refuse("verbosity", "ask for it in a message", unless=("medium",))
    fields.refuse("chat_template", "the operator gives it, with --chat-template FILE")
    fields.refuse("prompt_logprobs", "use /v1/completions")
    fields.refuse("echo", "give continue_final_message", unless=(False,))
    fields.refuse("documents", "give them in a message", unless=([],))
    fields.refuse("add_special_tokens", "the template has them", unless=(False,))
    fields.refuse("best_of", "give n, and choose among the answers", unless=(1,))
    fields.refuse("use_beam_search", "the gateway has no beam search", unless=(False,))
    ignore_bookkeeping(fields)
    fields.ignore("prediction")


def _further(fields: Fields) -> Mapping[str, Any]:
    """Return the values that the template gets beside messages and tools."""
    given = dict(fields.mapping("chat_template_kwargs") or {})
    for name in RESERVED:
        if name in given:
            path = f"{fields.path_of('chat_template_kwargs')}.{name}"
            raise HttpError(400, f"{path} can't be given here", code="invalid_value", param=path)
    if (effort := fields.string("reasoning_effort")) is not None:
        given.setdefault("reasoning_effort", effort)
    return given


def _check_continued(fields: Fields, conversation: Conversation) -> None:
    if not conversation.continues:
        return
    path = fields.path_of("continue_final_message")
    if conversation.add_generation_prompt:
        raise HttpError(400, f"{path} needs add_generation_prompt to be false", code="invalid_value", param=path)
    if not conversation.messages[-1].get("content"):
        raise HttpError(400, f"{path} needs a last message with content", code="invalid_value", param=path)


def _max_tokens(fields: Fields) -> int | None:
    """Return the most tokens of an answer; None: as many as the model holds, which is OpenAI's default here."""
    given = [
        value for name in ("max_completion_tokens", "max_tokens") if (value := fields.integer(name, low=1)) is not None
    ]
    return min(given, default=None)


def _num_logprobs(fields: Fields, backend: Backend) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", low=0, high=backend.max_logprobs)
    if top and not wanted:
        path = fields.path_of("top_logprobs")
        raise HttpError(400, f"{path} is {top}, and logprobs is not true", code="invalid_value", param=path)
    return (top or 0) if wanted else None


# Answering.


@dataclass(slots=True)
class _Message:
    """One sample's message, as far as it has come."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, events: Iterable[Event]) -> dict[str, Any]:
        """Take events found in the text; return them as a delta."""
        delta: dict[str, Any] = {}
        for event in events:
            if isinstance(event, Text):
                self.content.append(event.text)
                delta["content"] = delta.get("content", "") + event.text
            elif isinstance(event, Reasoning):
                self.reasoning.append(event.text)
                delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
            elif isinstance(event, CallBegan):
                head = {"id": self._call_id(event), "type": "function"}
                self.calls.append({**head, "function": {"name": event.name, "arguments": ""}})
                begun = {"index": len(self.calls) - 1, **head, "function": {"name": event.name, "arguments": ""}}
                delta.setdefault("tool_calls", []).append(begun)
            else:
                self._take_arguments(event, delta.setdefault("tool_calls", []))
        return delta

    def _call_id(self, event: CallBegan) -> str:
        """Return the model's own id of a call, unless an earlier one has it, or a new id."""
        is_free = event.id is not None and all(call["id"] != event.id for call in self.calls)
        return event.id if event.id is not None and is_free else call_id()

    def _take_arguments(self, event: Arguments, delta: list[dict[str, Any]]) -> None:
        self.calls[-1]["function"]["arguments"] += event.text
        index = len(self.calls) - 1
        if not delta or delta[-1]["index"] != index:
            delta.append({"index": index, "function": {"arguments": ""}})
        delta[-1]["function"]["arguments"] += event.text

    @property
    def reason(self) -> str | None:
        """Return why it ended; a message that ends with its calls waits for their results."""
        if self.finish_reason is FinishReason.STOP and self.calls:
            return "tool_calls"
        return None if self.finish_reason is None else self.finish_reason.value

    @property
    def body(self) -> dict[str, Any]:
        """Return the message whole. Its content is null if it has only calls, or only reasoning."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        is_null = not content and bool(self.calls or reasoning)
        body: dict[str, Any] = {"role": "assistant", "content": None if is_null else content, "refusal": None}
        body |= {"reasoning_content": reasoning} if reasoning else {}
        return body | {"tool_calls": self.calls} if self.calls else body


class _ChatAnswer:
    """The answer to one request, as a whole or event by event."""

    def __init__(
        self, asked: ChatCompletionRequest, begun: BegunConversation, request: PostRequest, texts: TokenTexts
    ) -> None:
        self._asked = asked
        self._begun = begun
        self._texts = texts
        self._usage = TokenUsage(len(begun.prompt_token_ids), [begun.report])
        self._messages: dict[int, _Message] = {}
        self._tokens: dict[int, SampleTokens] = {}
        self._id = f"chatcmpl-{request.id}"
        self._head = {
            "id": self._id,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": request.began_s,
            "model": asked.backend.model_names[0],
        }
        self._events = ChoiceEvents(self._head, asked.usage, self._usage)

    def take(self, chunk: Chunk) -> tuple[_Message, dict[str, Any], list[dict[str, Any]]]:
        """Take a chunk; return its message and its new content: a delta, and log-probabilities."""
        self._usage.count(chunk, generates=not self._asked.only_warms)
        self._begun.report.take(chunk.cache_outcome, self._id)
        message = self._messages.get(chunk.index)
        if message is None:
            message = self._messages[chunk.index] = _Message()
        delta = message.take(self._begun.events_of(chunk))
        logprobs = self._logprob_entries(chunk)
        message.logprobs += logprobs
        message.token_ids += chunk.token_ids
        message.finish_reason = chunk.finish_reason or message.finish_reason
        return message, delta, logprobs

    def _logprob_entries(self, chunk: Chunk) -> list[dict[str, Any]]:
        if not chunk.logprobs:
            return []
        params, tokens = self._asked.params, self._tokens.get(chunk.index)
        if tokens is None:
            tokens = self._tokens[chunk.index] = self._texts.after(
                self._begun.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        return logprob_entries(chunk, tokens, params)

    def _logprobs_body(self, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        return None if self._asked.params.logprobs is None else {"content": logprobs, "refusal": None}

    def push(self, chunk: Chunk) -> bytes:
        """Return the event of a chunk; nothing if the caller learns nothing of it."""
        choice = self._delta_choice(chunk)
        return b"" if choice is None else self._events.of(choice)

    def finish(self) -> bytes:
        """Return the last events: the diagnosis and the usage if they were asked for."""
        return self._events.last(self._begun.report.diagnosis)

    def _delta_choice(self, chunk: Chunk) -> dict[str, Any] | None:
        """Return new content of a sample; None if there is none for the caller."""
        index = chunk.index
        is_first = index not in self._messages
        message, delta, logprobs = self.take(chunk)
        if is_first:
            delta = {"role": "assistant", "content": "", **delta}
        shows_ids = self._asked.return_token_ids and bool(chunk.token_ids)
        if not (delta or logprobs or shows_ids or message.reason):
            return None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs_body(logprobs) if logprobs else None,
            "finish_reason": message.reason,
        }
        if self._asked.return_token_ids:
            choice["prompt_token_ids"] = self._begun.prompt_token_ids if is_first else None
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    @property
    def body(self) -> dict[str, Any]:
        """Return the answer as one object."""
        choices = [self._choice(index, self._messages[index]) for index in sorted(self._messages)]
        body = {**self._head, "choices": choices, "usage": self._usage.body}
        if (diagnosis := self._begun.report.diagnosis) is not None:
            body["prompt_cache_diagnostics"] = diagnostics_of(diagnosis)
        return body | {"prompt_token_ids": self._begun.prompt_token_ids} if self._asked.return_token_ids else body

    def _choice(self, index: int, message: _Message) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": message.body,
            "logprobs": self._logprobs_body(message.logprobs),
            "finish_reason": message.reason,
        }
        return choice | {"token_ids": message.token_ids} if self._asked.return_token_ids else choice
