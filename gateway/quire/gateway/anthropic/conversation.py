"""Anthropic's system, messages and tools, read as a conversation. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.gateway.chat.cache_fields import KeptEnds
from quire.gateway.chat.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    Conversation,
    GivenTool,
    NamedTool,
    OfferedTools,
    names_of,
    offer_of,
    read_content,
    tool_of,
)
from quire.gateway.chat.prefix_ends import BehindTool, InMessage, Message
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import Fields, text_of

MAX_TOOLS = 1_024

# Blocks behind which a prefix to keep may end.
_CACHEABLE = ("text", "tool_use", "tool_result")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Tools that Anthropic's servers run: a model can answer without them.
_RUN_BY_SERVER = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex))_\d{8}|mcp_toolset")
# Claude Code's first block of `system`. Its value differs in each request, so the prefix cache would never be hit.
_BILLING = "x-anthropic-billing-header:"
# Levels of output_config.effort that templates of open models do not have.
_EFFORTS = {"xhigh": "high", "max": "high"}


def read_conversation(fields: Fields, kept: KeptEnds) -> Conversation:
    """Return the conversation of a body, and collect the ends of prefixes to keep.

    Raises HttpError: 400 with the field's path.
    """
    offer = _tools(fields, kept)
    system = _system(fields, kept)
    messages = [*system, *_messages(fields, kept, len(system))]
    last = messages[-1]
    is_prefilled = last["role"] == "assistant"
    kept.take(fields, InMessage(len(messages) - 1, len(last["content"]) if last.get("content") else None))
    return Conversation(
        messages,
        offer,
        add_generation_prompt=not is_prefilled,
        continues=is_prefilled,
        further=_further(fields),
        kept=kept.ends,
    )


# -- messages -----------------------------------------------------------------------------------------------------


def _system(fields: Fields, kept: KeptEnds) -> list[Message]:
    """Return the system's message, without Claude Code's billing block."""
    path, value = fields.path_of("system"), fields.take("system")
    if value is None:
        return []
    text: str | None = None
    if isinstance(value, str):
        text = None if value.startswith(_BILLING) else text_of(path, value)
    else:
        for block in _blocks(fields, "system"):
            added = _text(block)
            if not added.startswith(_BILLING):
                text = added if text is None else f"{text}\n{added}"
            kept.take(block, InMessage(0, len(text or "")))
            block.end()
    return [{"role": "system", "content": text}] if text else []


def _blocks(fields: Fields, name: str) -> list[Fields]:
    if not isinstance(fields.take(name), list):
        raise invalid(fields.path_of(name), fields.take(name), "a string or a list of blocks")
    return fields.objects(name, max_length=MAX_PARTS) or []


def _text(block: Fields) -> str:
    block.require("type")
    block.choice("type", ("text",))
    return _text_block(block)


def _text_block(block: Fields) -> str:
    block.require("text")
    block.ignore("citations")
    return block.string("text") or ""


def _messages(fields: Fields, kept: KeptEnds, first: int) -> list[Message]:
    """Return the messages; neighbours of one role are one message, as Anthropic has it. So many are before them."""
    fields.require("messages")
    given = fields.objects("messages", max_length=MAX_MESSAGES) or []
    messages: list[Message] = []
    for each in given:
        each.require("role")
        role = each.choice("role", ("user", "assistant", "system")) or ""
        each.require("content")
        if isinstance(each.take("content"), str):
            _add_text(messages, role, each.string("content") or "")
        else:
            for block in _blocks(each, "content"):
                kind = _add_block(messages, role, block, kept, first)
                if kind in _CACHEABLE:
                    in_content = None if kind == "tool_use" else len(messages[-1]["content"])
                    kept.take(block, InMessage(first + len(messages) - 1, in_content))
                block.end()
        each.end()
    if not messages:
        raise invalid(fields.path_of("messages"), [], "a list of at least one message with content")
    _check_last(messages[-1], f"{fields.path_of('messages')}[{len(given) - 1}].content")
    return messages


def _check_last(last: Message, path: str) -> None:
    """Raise HttpError if the model can't answer to the last message, or continue it."""
    if last["role"] != "assistant":
        return
    if "tool_calls" in last:
        raise HttpError(400, f"{path} has tool_use, so tool_result must follow", code="invalid_value", param=path)
    if not last.get("content"):
        raise HttpError(400, f"{path} has no text to continue", code="invalid_value", param=path)


def _add_block(messages: list[Message], role: str, block: Fields, kept: KeptEnds, first: int) -> str:
    """Add a block to the messages; return its kind."""
    kinds = {
        "user": ("text", "tool_result"),
        "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
        "system": ("text",),
    }
    block.require("type")
    kind: str = block.choice("type", kinds[role], "")
    if kind == "text":
        _add_text(messages, role, _text_block(block))
    elif kind == "tool_result":
        messages.append(_tool_result(block, kept, first + len(messages)))
    elif kind == "tool_use":
        _message_of(messages, "assistant").setdefault("tool_calls", []).append(_tool_use(block))
    elif kind == "thinking":
        block.require("thinking")
        _join(_message_of(messages, "assistant"), "reasoning_content", block.string("thinking") or "")
        block.ignore("signature")
    else:
        block.ignore(*block)  # what Anthropic's servers alone can read
    return kind


def _add_text(messages: list[Message], role: str, text: str) -> None:
    _join(_message_of(messages, role), "content", text)


def _message_of(messages: list[Message], role: str) -> Message:
    """Return the last message if it has this role, otherwise a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role})
    return messages[-1]


def _join(message: Message, name: str, text: str) -> None:
    message[name] = f"{message[name]}\n{text}" if name in message else text


def _tool_use(block: Fields) -> dict[str, Any]:
    for name in ("id", "name", "input"):
        block.require(name)
    function = {"name": block.string("name"), "arguments": block.mapping("input")}
    call = {"id": block.string("id"), "type": "function", "function": function}
    block.ignore("caller", "toolset_name")
    return call


def _tool_result(block: Fields, kept: KeptEnds, index: int) -> Message:
    block.require("tool_use_id")
    content = ""
    if block.has("content"):
        content = read_content(block, "content", kinds=("text",), kept=kept, message=index)
    if block.boolean("is_error"):
        content = f"Error: {content}"  # templates have no other place for it
    message = {"role": "tool", "tool_call_id": block.string("tool_use_id"), "content": content}
    block.ignore("toolset_name")
    return message


# -- tools --------------------------------------------------------------------------------------------------------


def _tools(fields: Fields, kept: KeptEnds) -> OfferedTools:
    given: dict[str, GivenTool] = {}
    for index, each in enumerate(fields.objects("tools", max_length=MAX_TOOLS) or []):
        kind = each.string("type", "custom")
        if _RUN_BY_SERVER.fullmatch(kind):
            continue
        if kind != "custom":
            raise invalid(each.path_of("type"), kind, "'custom': give the tool with an input_schema")
        given[f"{fields.path_of('tools')}[{index}]"] = _tool(each)
        kept.take(each, BehindTool(len(given) - 1))
        each.end()
    choice, parallel = _choice(fields, names_of(given))
    return offer_of(list(given.values()), choice, parallel=parallel)


def _tool(fields: Fields) -> GivenTool:
    for name in ("name", "input_schema"):
        fields.require(name)
    name = fields.string("name") or ""
    if not _NAME.fullmatch(name):
        raise invalid(fields.path_of("name"), name, "1 to 128 letters, digits, underscores or dashes")
    tool = tool_of(fields, name, schema="input_schema")
    fields.ignore("strict", "eager_input_streaming", "input_examples", "allowed_callers", "defer_loading")
    return tool


def _choice(fields: Fields, names: list[str]) -> tuple[str | NamedTool, bool]:
    """Return the choice of a tool, and whether several calls in one answer are allowed."""
    asked = fields.object("tool_choice")
    if asked is None:
        return "auto", True
    asked.require("type")
    kind = asked.choice("type", ("auto", "any", "tool", "none"))
    parallel = not asked.boolean("disable_parallel_tool_use")
    name = asked.string("name")
    asked.end()
    if kind == "any" and not names:
        path = asked.path_of("type")
        raise HttpError(400, f"{path} is 'any', and there are no tools to call", code="invalid_value", param=path)
    if kind != "tool":
        return {"any": "required"}.get(kind or "", kind or ""), parallel
    if name not in names:
        asked.require("name")
        raise invalid(asked.path_of("name"), name, "the name of a tool with an input_schema in tools")
    return NamedTool(name), parallel


# -- the template's values ----------------------------------------------------------------------------------------


def _further(fields: Fields) -> Mapping[str, Any]:
    """Return the values that the template gets beside messages and tools."""
    given: dict[str, Any] = {}
    if (thinking := fields.object("thinking")) is not None:
        thinking.require("type")
        kind = thinking.choice("type", ("enabled", "adaptive", "between_tools", "disabled"))
        given["enable_thinking"] = kind != "disabled"
        thinking.ignore("budget_tokens", "display")
        thinking.end()
    config = fields.object("output_config")
    if config is not None and (effort := config.string("effort")) is not None:
        given["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return given
