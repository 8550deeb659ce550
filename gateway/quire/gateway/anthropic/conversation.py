"""Anthropic's system, messages and tools, read as a conversation. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.gateway.chat.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    Conversation,
    GivenTool,
    Message,
    NamedTool,
    OfferedTools,
    names_of,
    offer_of,
    read_content,
    tool_of,
)
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import Fields, text_of

MAX_TOOLS = 1_024

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Tools that Anthropic's servers run: a model can answer without them.
_RUN_BY_SERVER = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex))_\d{8}|mcp_toolset")
# Claude Code's first block of `system`. Its value differs in each request, so the prefix cache would never be hit.
_BILLING = "x-anthropic-billing-header:"
# Levels of output_config.effort that templates of open models do not have.
_EFFORTS = {"xhigh": "high", "max": "high"}


def read_conversation(fields: Fields) -> Conversation:
    """Return the conversation of a body. Raises HttpError: 400 with the field's path."""
    messages = [*_system(fields), *_messages(fields)]
    is_prefilled = messages[-1]["role"] == "assistant"
    return Conversation(
        messages,
        _tools(fields),
        add_generation_prompt=not is_prefilled,
        continues=is_prefilled,
        further=_further(fields),
    )


# -- messages -----------------------------------------------------------------------------------------------------


def _system(fields: Fields) -> list[Message]:
    """Return the system's message, without Claude Code's billing block."""
    path, value = fields.path_of("system"), fields.take("system")
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else [_text(each) for each in _blocks(fields, "system")]
    text = "\n".join(text_of(path, each) for each in texts if not each.startswith(_BILLING))
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
    text = block.string("text") or ""
    block.ignore("cache_control", "citations")
    block.end()
    return text


def _messages(fields: Fields) -> list[Message]:
    """Return the messages; neighbours of one role are one message, as Anthropic has it."""
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
                _add_block(messages, role, block)
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


def _add_block(messages: list[Message], role: str, block: Fields) -> None:
    kinds = {
        "user": ("text", "tool_result"),
        "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
        "system": ("text",),
    }
    block.require("type")
    kind = block.choice("type", kinds[role])
    if kind == "text":
        _add_text(messages, role, _text_block(block))
    elif kind == "tool_result":
        messages.append(_tool_result(block))
    elif kind == "tool_use":
        _message_of(messages, "assistant").setdefault("tool_calls", []).append(_tool_use(block))
    elif kind == "thinking":
        block.require("thinking")
        _join(_message_of(messages, "assistant"), "reasoning_content", block.string("thinking") or "")
        block.ignore("signature")
        block.end()


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
    block.ignore("cache_control", "caller", "toolset_name")
    block.end()
    return call


def _tool_result(block: Fields) -> Message:
    block.require("tool_use_id")
    content = read_content(block, "content", kinds=("text",)) if block.has("content") else ""
    if block.boolean("is_error"):
        content = f"Error: {content}"  # templates have no other place for it
    message = {"role": "tool", "tool_call_id": block.string("tool_use_id"), "content": content}
    block.ignore("cache_control", "toolset_name")
    block.end()
    return message


# -- tools --------------------------------------------------------------------------------------------------------


def _tools(fields: Fields) -> OfferedTools:
    given: dict[str, GivenTool] = {}
    for index, each in enumerate(fields.objects("tools", max_length=MAX_TOOLS) or []):
        kind = each.string("type", "custom")
        if _RUN_BY_SERVER.fullmatch(kind):
            continue
        if kind != "custom":
            raise invalid(each.path_of("type"), kind, "'custom': give the tool with an input_schema")
        given[f"{fields.path_of('tools')}[{index}]"] = _tool(each)
    choice, parallel = _choice(fields, names_of(given))
    return offer_of(list(given.values()), choice, parallel=parallel)


def _tool(fields: Fields) -> GivenTool:
    for name in ("name", "input_schema"):
        fields.require(name)
    name = fields.string("name") or ""
    if not _NAME.fullmatch(name):
        raise invalid(fields.path_of("name"), name, "1 to 128 letters, digits, underscores or dashes")
    tool = tool_of(fields, name, schema="input_schema")
    fields.ignore("cache_control", "strict", "eager_input_streaming", "input_examples")
    fields.ignore("allowed_callers", "defer_loading")
    fields.end()
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
