"""An answer as one of Anthropic's messages: its events, and at their end the message whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.client.engine.outputs import Chunk
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.chat.tools import Arguments, CallBegan, Event, Reasoning, Text
from quire.gateway.http.streams import event_of
from quire.gateway.openai.answers import TokenUsage, call_id
from quire.gateway.openai.conversations import BegunConversation
from quire.gateway.prompt_cache import Diagnosis, Divergence, kept_details


@dataclass(slots=True)
class _TextBlock:
    text: str = ""

    @property
    def body(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}

    def take(self, text: str) -> dict[str, Any]:
        """Add text; return its delta."""
        self.text += text
        return {"type": "text_delta", "text": text}


@dataclass(slots=True)
class _Thinking:
    text: str = ""

    @property
    def body(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self.text, "signature": ""}  # nobody signs it here

    def take(self, text: str) -> dict[str, Any]:
        """Add text; return its delta."""
        self.text += text
        return {"type": "thinking_delta", "thinking": text}


@dataclass(slots=True)
class _ToolUse:
    name: str
    id: str = field(default_factory=call_id)
    arguments: str = ""

    @property
    def body(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": _input_of(self.arguments)}

    def take(self, text: str) -> dict[str, Any]:
        """Add a piece of the arguments' JSON; return its delta."""
        self.arguments += text
        return {"type": "input_json_delta", "partial_json": text}


def _input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call. Text that is no JSON object, such as one that was cut, is shown as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


# The reasons that Anthropic has.
_REASONS = {
    Divergence.NOT_FOUND: "previous_message_not_found",
    Divergence.MODEL: "model_changed",
    Divergence.SYSTEM: "system_changed",
    Divergence.TOOLS: "tools_changed",
    Divergence.MESSAGES: "messages_changed",
}


def diagnostics_of(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return `diagnostics` as Anthropic has it, None if nothing was missed.

    Under `quire` it has what only the cache's manager knows.
    """
    if diagnosis.divergence is Divergence.NONE:
        return None
    reason: dict[str, Any] = {"type": _REASONS.get(diagnosis.divergence, "unavailable")}
    if diagnosis.divergence is Divergence.NOT_FOUND:
        return {"cache_miss_reason": reason}
    if reason["type"] != "unavailable":
        reason["cache_missed_input_tokens"] = diagnosis.num_missed
    return {"cache_miss_reason": reason, "quire": diagnosis.detail}


class MessageAnswer:
    """The answer to one request."""

    def __init__(self, request_id: str, model: str, begun: BegunConversation, *, max_tokens: int) -> None:
        self._begun = begun
        self._is_begun = False
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._usage = TokenUsage(len(begun.prompt_token_ids), [begun.report])
        self._blocks: list[_TextBlock | _Thinking | _ToolUse] = []
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    @property
    def body(self) -> dict[str, Any]:
        """Return the message as it is now."""
        content = [block.body for block in self._blocks]
        diagnosis = self._begun.report.diagnosis
        diagnostics = None if diagnosis is None else diagnostics_of(diagnosis)
        return {
            **self._head,
            "content": content,
            **self._stop,
            "usage": self._usage_body,
            "diagnostics": diagnostics,
        }

    @property
    def _usage_body(self) -> dict[str, Any]:
        usage, report = self._usage, self._begun.report
        num_short, num_long = report.num_created_tokens
        num_cached = report.outcome.num_cached_tokens
        return {
            "input_tokens": usage.num_prompt_tokens - num_cached - num_short - num_long,
            "cache_creation_input_tokens": num_short + num_long,
            "cache_read_input_tokens": num_cached,
            "cache_creation": {"ephemeral_5m_input_tokens": num_short, "ephemeral_1h_input_tokens": num_long},
            "output_tokens": usage.num_generated_tokens,
            **kept_details([report]),
        }

    def push(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk: with the first one message_start."""
        return b"".join(self._of_chunk(chunk))

    def _of_chunk(self, chunk: Chunk) -> Iterator[bytes]:
        self._usage.count(chunk, generates=not self._begun.only_warms)
        self._begun.report.take(chunk.cache_outcome, self._head["id"])
        if not self._is_begun:
            self._is_begun = True
            yield _event("message_start", message=self.body)
            yield _event("ping")
        for event in self._begun.events_of(chunk):
            yield from self._take(event)
        if chunk.finish_reason is not None:
            self._stop = self._stopped(chunk)

    def finish(self) -> bytes:
        """Return the last events, up to message_stop."""
        end = _event("content_block_stop", index=len(self._blocks) - 1) if self._blocks else b""
        return end + _event("message_delta", delta=self._stop, usage=self._usage_body) + _event("message_stop")

    def _take(self, event: Event) -> Iterator[bytes]:
        """Take news of the text; iterate over their events."""
        if isinstance(event, CallBegan):
            yield from self._begin(_ToolUse(event.name))
            return
        kind = _TextBlock if isinstance(event, Text) else _Thinking if isinstance(event, Reasoning) else None
        if kind is not None and not (self._blocks and isinstance(self._blocks[-1], kind)):
            yield from self._begin(kind())
        assert isinstance(event, Text | Reasoning | Arguments)
        yield _event("content_block_delta", index=len(self._blocks) - 1, delta=self._blocks[-1].take(event.text))

    def _begin(self, block: _TextBlock | _Thinking | _ToolUse) -> Iterator[bytes]:
        if self._blocks:
            yield _event("content_block_stop", index=len(self._blocks) - 1)
        self._blocks.append(block)
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block.body)

    def _stopped(self, chunk: Chunk) -> dict[str, str | None]:
        """Return why the answer ended, at its last chunk."""
        if chunk.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_string}
        if chunk.finish_reason is FinishReason.STOP:
            has_calls = any(isinstance(block, _ToolUse) for block in self._blocks)
            return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}
        is_cut = self._usage.num_generated_tokens >= self._max_tokens
        return {"stop_reason": "max_tokens" if is_cut else "model_context_window_exceeded", "stop_sequence": None}


def _event(kind: str, **values: Any) -> bytes:
    return event_of({"type": kind, **values}, name=kind)
