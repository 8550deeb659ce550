"""Models that chat: the template of each, and the formats of its answers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from quire.client.engine.caching import Breakpoint
from quire.client.engine.grammar import Grammar
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import InvalidRequest
from quire.gateway.chat.content import ContentMarks
from quire.gateway.chat.conversation import Conversation, OfferedTools
from quire.gateway.chat.options import AS_THE_TEMPLATE_HAS_IT, ChatOptions
from quire.gateway.chat.prefix_ends import Message, PrefixEnd
from quire.gateway.chat.stand_ins import StandIns
from quire.gateway.chat.templates import TemplateRefused, Templates, load_templates
from quire.gateway.chat.tools.answers import AnswerFormat, AnswerParser
from quire.gateway.chat.tools.formats import (
    HARMONY,
    PROBE,
    PROBE_ARGUMENTS,
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)
from quire.gateway.chat.tools.thinking import ThinkTags
from quire.gateway.chat.tools.tool_format import ToolFormat, UnwritableSchema
from quire.gateway.errors import HttpError, http_error_of
from quire.gateway.routing.backend import Backend, base_of
from quire.gateway.texts import check_length, encode_ordinary, encode_text, encode_to_places

log = logging.getLogger(__name__)

# Ids that templates take: Mistral's have nine letters, Kimi's name the tool.
_PROBE_IDS = ("abcdefghi", f"functions.{PROBE.name}:0")
_CUT_TAG = re.compile(r"[<\[][^<>\[\]]*\Z")


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How a template takes calls of messages before: arguments as an object or its text, content left out or null."""

    arguments_are_text: bool = False
    content_is_null: bool = False

    def apply(self, message: Message) -> Message:
        """Return a message as the template takes it."""
        if "tool_calls" not in message:
            return message
        changed = dict(message)
        if self.content_is_null:
            changed.setdefault("content", None)
        if self.arguments_are_text:
            changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return changed


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a conversation.

    begins_in_reasoning   they end within the model's reasoning
    breakpoints           the ends of the prefixes that its caller wants kept, the first one first
    unplaced              fields that ask to keep a prefix that the template does not show
    """

    token_ids: list[int]
    begins_in_reasoning: bool = False
    breakpoints: tuple[Breakpoint, ...] = ()
    unplaced: tuple[str, ...] = ()


@dataclass(slots=True)
class ChatModel:
    """One model: its templates, the formats of its answers, and which of their markers are special tokens."""

    templates: Templates
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    layout: CallLayout = CallLayout()
    special_ids: Mapping[str, int] = field(default_factory=dict)
    special_tokens_in_content: bool = False

    async def prompt_of(
        self, tokenizer: Tokenizer, conversation: Conversation, *, tenant: str, param: str, max_tokens: int
    ) -> Prompt:
        """Return the prompt of a tenant's conversation. Raises HttpError: 400 that blames `param`.

        One that surely has more than max_tokens is refused before it is encoded.
        """
        marks = ContentMarks(() if self.special_tokens_in_content else tokenizer.special_tokens)
        messages, tools = conversation.messages, conversation.offer.shown
        try:
            text = await self._render(marks, conversation, messages, tools, tenant)
            parts = marks.parts(text)
            check_length(param, sum(map(len, parts)), tokenizer, max_tokens=max_tokens)
            in_reasoning = self._begins_in_reasoning(text, conversation)
            if not conversation.kept:
                return Prompt(await _encode(tokenizer, parts, param=param), in_reasoning)
            stand_ins = StandIns(conversation.kept)
            marked = await self._render(marks, conversation, *stand_ins.put(messages, tools), tenant)
        except TemplateRefused as error:
            raise HttpError(400, marks.reveal(str(error)), code="chat_template_error", param=param) from None
        places = stand_ins.places_in(text, marked)
        prefixes = [marks.parts(text[: place or 0]) for place in places]
        with _blaming(param):
            token_ids, counts = await encode_to_places(tokenizer, parts, prefixes)
        unplaced = tuple(end.path for end, count in zip(conversation.kept, counts, strict=True) if not count)
        return Prompt(token_ids, in_reasoning, _breakpoints_of(conversation.kept, counts), unplaced)

    async def _render(
        self,
        marks: ContentMarks,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        tenant: str,
    ) -> str:
        """Return the text of a conversation with these messages and tools. Raises TemplateRefused."""
        return await self.templates.render(
            marks.hide(self._for_template(messages)),
            tools=marks.hide(tools),
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continues,
            further=marks.hide(conversation.further),
            tenant=tenant,
        )

    def _begins_in_reasoning(self, text: str, conversation: Conversation) -> bool:
        tags = self.answers.reasoning
        if not isinstance(tags, ThinkTags):
            return False
        continued = conversation.messages[-1]["content"] if conversation.continues else ""
        return text.rstrip().endswith(tags.opening) or tags.is_open(continued)

    def _for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template takes them: the developer's as the system's, if it has no developer role.

        One behind a system's message is joined to it: some templates take a system's message at the beginning alone.
        """
        if "developer" in self.templates.source.text:
            return list(map(self.layout.apply, messages))
        made: list[Message] = []
        for each in messages:
            if each["role"] != "developer":
                made.append(each)
            elif made and made[-1]["role"] == "system":
                made[-1] = made[-1] | {"content": f"{made[-1]['content']}\n{each['content']}"}
            else:
                made.append(each | {"role": "system"})
        return list(map(self.layout.apply, made))

    def params_of(self, params: SamplingParams, offer: OfferedTools, prompt: Prompt) -> SamplingParams:
        """Return the parameters of an answer. Raises HttpError: 400."""
        if offer.tools and self.answers.tools is None:
            limit = f"start the gateway with --tool-parser {' | '.join(TOOL_FORMATS)}"
            message = f"the chat template writes calls in no known format, so tools can't be given: {limit}"
            raise HttpError(400, message, code="unsupported_value", param="tools")
        if offer.is_forced and params.grammar is not None:
            message = "tool_choice requires a call, so the format of the answer can't be given, too"
            raise HttpError(400, message, code="invalid_value", param="tool_choice")
        changes: dict[str, object] = {}
        if offer.is_forced:
            changes["grammar"] = Grammar(lark=self._lark_of(offer, prompt))
        if self.special_ids and (offer.is_forced or params.grammar is None):
            changes["kept_special_tokens"] = tuple(self.special_ids.values())
        try:
            return replace(params, **changes)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise http_error_of(error) from None

    def _lark_of(self, offer: OfferedTools, prompt: Prompt) -> str:
        try:
            return self.answers.lark(
                offer.tools,
                special_ids=self.special_ids,
                parallel=offer.parallel,
                begins_in_reasoning=prompt.begins_in_reasoning,
            )
        except UnwritableSchema as error:
            raise HttpError(400, f"tools: {error}", code="unsupported_value", param="tools") from None

    def parser_of(self, params: SamplingParams, offer: OfferedTools, prompt: Prompt) -> AnswerParser:
        """Return the parser of one sample's text. An answer that follows the caller's grammar is content as it is."""
        if params.grammar is not None and not offer.is_forced:
            return AnswerParser([])
        return self.answers.parser(
            offer.tools,
            parallel=offer.parallel,
            begins_in_reasoning=prompt.begins_in_reasoning,
            hidden=frozenset(self.special_ids) if params.skip_special_tokens else frozenset(),
        )


async def _encode(tokenizer: Tokenizer, parts: Sequence[str], *, param: str) -> list[int]:
    """Return the tokens of a rendered text. Its template writes the special tokens itself. Raises HttpError: 400."""
    if len(parts) == 1:
        return await encode_text(tokenizer, parts[0], add_special_tokens=False)
    with _blaming(param):
        return await encode_ordinary(tokenizer, parts)


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Let errors of the tokenizer name this field. Raises HttpError: 400."""
    try:
        yield
    except InvalidRequest as error:
        answer = http_error_of(error)
        answer.param = param
        raise answer from None


def _breakpoints_of(ends: Sequence[PrefixEnd], counts: Sequence[int]) -> tuple[Breakpoint, ...]:
    """Return breakpoints in order. Of several at one token, the one that is kept longest counts."""
    ttls: dict[int, float] = {}
    for end, num_tokens in zip(ends, counts, strict=True):
        ttls[num_tokens] = max(end.ttl_s, ttls.get(num_tokens, 0.0))
    return tuple(Breakpoint(num_tokens, ttls[num_tokens]) for num_tokens in sorted(ttls) if num_tokens)


class ChatModels:
    """The chat model of each backend. It owns the processes that render."""

    def __init__(self) -> None:
        self._by_backend: dict[str, ChatModel] = {}

    @classmethod
    async def load(cls, backends: Sequence[Backend], options: ChatOptions = AS_THE_TEMPLATE_HAS_IT) -> ChatModels:
        """Read and compile the templates of some backends, and find the formats of their answers.

        Blocks on files and network. Raises OSError, and ValueError for a template that can't be used.
        """
        models = cls()
        try:
            for backend in backends:
                source = await asyncio.to_thread(
                    load_templates, backend.tokenizer_source or None, template_file=options.template_file
                )
                templates = Templates(source)
                model = ChatModel(templates, special_tokens_in_content=options.special_tokens_in_content)
                models._by_backend[backend.model_names[0]] = model
                await templates.start()
                model.answers, model.layout = await find_formats(templates, options)
                model.special_ids = _special_ids(backend.tokenizer, model.answers.markers)
                if backend.tokenizer is not None and not options.special_tokens_in_content:
                    await asyncio.to_thread(backend.tokenizer.encode_parts, [""])  # the first call takes long
                _tell(backend.model_names[0], model.answers)
        except BaseException:
            await models.close()
            raise
        return models

    def of(self, backend: Backend) -> ChatModel:
        """Return the chat model of a backend that was there when they were loaded, or of an adapter of one."""
        return self._by_backend[base_of(backend).model_names[0]]

    async def close(self) -> None:
        """End the processes that render."""
        for model in self._by_backend.values():
            await model.templates.close()


def _tell(name: str, answers: AnswerFormat) -> None:
    tools = "unknown" if answers.tools is None else answers.tools.name
    log.info("model=%s tool_parser=%s reasoning_parser=%s", name, tools, answers.reasoning and answers.reasoning.name)


async def find_formats(templates: Templates, options: ChatOptions) -> tuple[AnswerFormat, CallLayout]:
    """Return the formats of a model's answers, and how its template takes calls: by what it writes of a call."""
    tools, layout = await _find_tools(templates, options.tools)
    if not options.has_reasoning:
        return AnswerFormat(tools), layout
    found = HARMONY if tools is HARMONY else find_reasoning_format(templates.source.text)
    return AnswerFormat(tools, options.reasoning or found), layout


async def _find_tools(templates: Templates, chosen: ToolFormat | None) -> tuple[ToolFormat | None, CallLayout]:
    """Return the format of calls, which is the chosen one if there is one, and the layout of calls before."""
    user = {"role": "user", "content": "What is the weather?"}
    shown = {"type": "function", "function": {"name": PROBE.name, "description": "Weather", "parameters": PROBE.schema}}
    try:
        prompt = await templates.render([user], tools=[shown])
    except TemplateRefused:
        return chosen, CallLayout()
    layouts = [CallLayout(*each) for each in product((False, True), repeat=2)]
    for layout, call_id in product(layouts, _PROBE_IDS):
        function = {"name": PROBE.name, "arguments": PROBE_ARGUMENTS}
        message = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
        try:
            chat = await templates.render([user, layout.apply(message)], tools=[shown], add_generation_prompt=False)
        except TemplateRefused:
            continue
        found = find_tool_format(prompt, _behind(prompt, chat))
        if found is not None:
            return chosen or found, layout
    return chosen, CallLayout()


def _behind(prompt: str, chat: str) -> str:
    """Return what a chat has behind the text with which the prompt also begins, from the beginning of a tag on."""
    size = next((i for i, pair in enumerate(zip(prompt, chat, strict=False)) if pair[0] != pair[1]), len(prompt))
    tag = _CUT_TAG.search(chat, 0, size)
    return chat[size if tag is None else tag.start() :]


def _special_ids(tokenizer: Tokenizer | None, markers: Sequence[str]) -> dict[str, int]:
    """Return the markers that are one special token, with its id."""
    special = {} if tokenizer is None else tokenizer.special_tokens
    return {marker: special[marker] for marker in markers if marker in special}


def tokenizer_of(backend: Backend) -> Tokenizer:
    """Return a backend's tokenizer. Raises HttpError: 400 if it has none."""
    if backend.tokenizer is None:
        raise HttpError(400, "the model has no tokenizer, so it can't chat", code="no_tokenizer", param="model")
    return backend.tokenizer
