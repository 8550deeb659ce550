"""Models that chat: the template of each, and the format of its tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.client.engine.grammar import Grammar
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import InvalidRequest
from quire.gateway.chat.conversation import Conversation, Message, OfferedTools
from quire.gateway.chat.templates import TemplateRefused, Templates, load_templates
from quire.gateway.chat.tools import CallParser, Event, Text, ToolFormat, find_format, lark_of_calls
from quire.gateway.errors import HttpError, http_error_of
from quire.gateway.routing.backend import Backend
from quire.gateway.texts import encode_field


@dataclass(slots=True)
class ChatModel:
    """One model: its templates, the format of its calls, and which of that format's markers are special tokens."""

    templates: Templates
    tool_format: ToolFormat
    special_ids: Mapping[str, int]

    async def prompt_of(self, tokenizer: Tokenizer, conversation: Conversation, *, param: str) -> list[int]:
        """Return the tokens of a conversation. Raises HttpError: 400 that blames `param`."""
        try:
            text = await self.templates.render(
                self._for_template(conversation.messages),
                tools=conversation.offer.shown,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continues,
                further=conversation.further,
            )
        except TemplateRefused as error:
            raise HttpError(400, str(error), code="chat_template_error", param=param) from None
        # The template writes the special tokens itself.
        return await encode_field(param, text, tokenizer, add_special_tokens=False)

    def _for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the developer's as the system's, if the template has no developer role.

        One behind a system's message is joined to it: some templates take a system's message at the beginning alone.
        """
        if "developer" in self.templates.source.text:
            return list(messages)
        made: list[Message] = []
        for each in messages:
            if each["role"] != "developer":
                made.append(each)
            elif made and made[-1]["role"] == "system":
                made[-1] = made[-1] | {"content": f"{made[-1]['content']}\n{each['content']}"}
            else:
                made.append(each | {"role": "system"})
        return made

    def params_of(self, params: SamplingParams, offer: OfferedTools) -> SamplingParams:
        """Return the parameters of an answer that may have calls. Raises HttpError: 400."""
        if not offer.tools:
            return params
        if offer.is_forced and params.grammar is not None:
            message = "tool_choice requires a call, so the format of the answer can't be given, too"
            raise HttpError(400, message, code="invalid_value", param="tool_choice")
        changes: dict[str, object] = {}
        if offer.is_forced:
            lark = lark_of_calls(self.tool_format, offer.tools, special_ids=self.special_ids, parallel=offer.parallel)
            changes["grammar"] = Grammar(lark=lark)
        if self.special_ids:
            changes["skip_special_tokens"] = False
        try:
            return replace(params, **changes)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise http_error_of(error) from None

    def parser_of(self, offer: OfferedTools) -> CallParser | NoCalls:
        """Return the parser that finds the calls in one sample's text."""
        if not offer.tools:
            return NoCalls()
        return CallParser(self.tool_format, [tool.name for tool in offer.tools], parallel=offer.parallel)


class NoCalls:
    """A CallParser for a request without tools: all text is text."""

    num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Return the text."""
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: nothing was held back."""
        return []


@dataclass(slots=True)
class ChatModels:
    """The chat models behind a gateway, by the names of their backends."""

    _by_backend: dict[str, ChatModel] = field(default_factory=dict)

    @classmethod
    async def load(
        cls, backends: Sequence[Backend], *, template_file: Path | None = None, tool_format: ToolFormat | None = None
    ) -> ChatModels:
        """Read and compile the templates of all backends.

        tool_format None: found from the template's text. Raises OSError and ValueError for a bad template.
        """
        models = cls()
        try:
            for backend in backends:
                source = await asyncio.to_thread(
                    load_templates, backend.tokenizer_source or None, template_file=template_file
                )
                found = tool_format or find_format(source.text)
                model = ChatModel(Templates(source), found, _special_ids(backend.tokenizer, found.markers))
                models._by_backend[backend.model_names[0]] = model
                await model.templates.start()
        except BaseException:
            await models.close()
            raise
        return models

    def of(self, backend: Backend) -> ChatModel:
        """Return the chat model of a backend that was there when they were loaded."""
        return self._by_backend[backend.model_names[0]]

    async def close(self) -> None:
        """End the processes that render."""
        for model in self._by_backend.values():
            await model.templates.close()


def _special_ids(tokenizer: Tokenizer | None, markers: Sequence[str]) -> dict[str, int]:
    """Return the markers that are one special token, with its id."""
    found = {}
    for marker in markers if tokenizer is not None else ():
        assert tokenizer is not None
        token_ids = tokenizer.encode(marker, add_special_tokens=False)
        if len(token_ids) == 1 and not tokenizer.decode(token_ids):
            found[marker] = token_ids[0]
    return found


def tokenizer_of(backend: Backend) -> Tokenizer:
    """Return a backend's tokenizer. Raises HttpError: 400 if it has none."""
    if backend.tokenizer is None:
        raise HttpError(400, "the model has no tokenizer, so it can't chat", code="no_tokenizer", param="model")
    return backend.tokenizer
