"""The items of /v1/responses: those of an input become messages, and are kept so that a later request can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.gateway.chat.cache_fields import KeptEnds
from quire.gateway.chat.conversation import MAX_MESSAGES, PARSED_ARGUMENTS, ROLES, call_message, read_content
from quire.gateway.chat.prefix_ends import Message
from quire.gateway.errors import HttpError, invalid
from quire.gateway.fields import Fields, text_of
from quire.gateway.kept_responses import KeptResponse, KeptResponses
from quire.gateway.openai.response_tools import INPUT

Item = Mapping[str, Any]
FindItem = Callable[[str], Item | None]
"""Returns the item of an id; None if none is kept."""

MAX_PAGE = 100
"""Most items of a page."""

_TEXT_KINDS = ("input_text", "output_text", "text")
# Items that the prompt leaves out: notes of OpenAI's models, and calls of tools that OpenAI runs.
_LEFT_OUT = (
    *("reasoning", "compaction", "compaction_summary", "web_search_call", "file_search_call", "image_generation_call"),
    *("code_interpreter_call", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output"),
)
# Calls that the caller runs, and their results.
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_KINDS = ("message", *_CALLS, *_RESULTS, *_LEFT_OUT)


def read_items(fields: Fields, *, find: FindItem) -> list[Item]:
    """Return the items of `input`; a reference becomes the item that it names. Raises HttpError."""
    value, path = fields.require("input"), fields.path_of("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": text_of(path, value)}]
    if not isinstance(value, list) or not value:
        raise invalid(path, value, "a string, or a list of at least one item")
    each = fields.objects("input", max_length=MAX_MESSAGES) or []
    return [_resolved(item, raw, find) for item, raw in zip(each, value, strict=True)]


def _resolved(item: Fields, raw: Item, find: FindItem) -> Item:
    if item.take("type") != "item_reference":
        return raw
    item.require("id")
    found = find(item.string("id") or "")
    if found is None:
        path = item.path_of("id")
        message = f"{path} is {raw['id']!r}, and no item of this id is kept here: send the item itself"
        raise HttpError(400, message, code="item_not_found", param=path)
    item.end()
    return found


def add_messages(messages: list[Message], items: Iterable[Item], *, path: str, kept: KeptEnds) -> None:
    """Add the messages of items, and collect the ends of prefixes to keep.

    Raises HttpError: 400 with the path of a field that is wrong.
    """
    for index, item in enumerate(items):
        _add(Fields(item, f"{path}[{index}]"), messages, kept)


def _add(item: Fields, messages: list[Message], kept: KeptEnds) -> None:
    """Add an item to the messages: calls belong to the assistant's message before them."""
    kind = item.choice("type", _KINDS, "message")
    if kind in _LEFT_OUT:
        return
    item.ignore("id", "status", "phase", "namespace")
    if kind == "message":
        item.require("role")
        role = item.choice("role", ROLES[:-1])
        item.require("content")
        content = read_content(item, "content", kinds=_TEXT_KINDS, kept=kept, message=len(messages))
        messages.append({"role": role, "content": content})
    elif kind in _CALLS:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(_call(item, kind))
    else:
        item.require("call_id")
        item.require("output")
        item.ignore("name")
        output = read_content(item, "output", kinds=_TEXT_KINDS, kept=kept, message=len(messages))
        messages.append({"role": "tool", "tool_call_id": item.string("call_id"), "content": output})
    item.end()


def _call(item: Fields, kind: str) -> dict[str, Any]:
    """Return a call as templates expect it."""
    if kind == "local_shell_call":
        item.require("call_id")
        item.require("action")
        return call_message(item.string("call_id") or "", "local_shell", json.dumps(item.mapping("action")))
    item.ignore(PARSED_ARGUMENTS)
    texts = {}
    for name in ("call_id", "name", "arguments" if kind == "function_call" else INPUT):
        item.require(name)
        texts[name] = item.string(name) or ""
    arguments = texts.get("arguments", json.dumps({INPUT: texts.get(INPUT)}))
    return call_message(texts["call_id"], texts["name"], arguments)


# -- kept items ---------------------------------------------------------------------------------------------------


def listed(items: Sequence[Item], key: str) -> list[Item]:
    """Return items of an input as the list of input items shows them: each has a type and an id, texts are parts."""
    return [_listed(item, f"in_{key}_{index}") for index, item in enumerate(items)]


def _listed(item: Item, item_id: str) -> Item:
    shown = {**item, "type": item.get("type") or "message", "id": item.get("id") or item_id}
    if shown["type"] == "message" and isinstance(shown["content"], str):
        part: dict[str, Any] = {"type": "input_text", "text": shown["content"]}
        if shown["role"] == "assistant":
            part = {"type": "output_text", "text": shown["content"], "annotations": []}
        shown["content"] = [part]
    return shown


def items_before(conversation: Iterable[KeptResponse]) -> list[Item]:
    """Return the items of responses, one after the other: the input of each, then its output."""
    return [item for response in conversation for item in (*input_items(response), *_output_items(response))]


def input_items(response: KeptResponse) -> list[Item]:
    """Return the items of a response's own input."""
    items: list[Item] = json.loads(response.items)
    return items


def _output_items(response: KeptResponse) -> list[Item]:
    items: list[Item] = json.loads(response.body)["output"]
    return items


def find_item(kept: KeptResponses, tenant: str, item_id: str) -> Item | None:
    """Return a kept item of a tenant: its id has the key of its response, KIND_KEY_NUMBER."""
    key = item_id.partition("_")[2].rpartition("_")[0]
    response = kept.find(tenant, f"resp_{key}")
    if response is None:
        return None
    return next((item for item in items_before([response]) if item["id"] == item_id), None)


def page_of(kept: KeptResponses, tenant: str, response: KeptResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a response's input items, those of the conversation before it included. Raises HttpError.

    query has `limit`, 1 to 100, `order`, `desc` if not given, and `after`, the id that the page follows.
    """
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise invalid("limit", limit, f"an integer from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise invalid("order", order, "'asc' or 'desc'")
    before = (kept.conversation(tenant, response.id) or [response])[:-1]
    items = [*items_before(before), *input_items(response)]
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", after, "the id of an input item of this response")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > len(page)}
