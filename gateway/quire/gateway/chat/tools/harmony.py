"""Messages in channels, <|channel|>final<|message|>text<|end|>: gpt-oss. Pure.

analysis is reasoning, final is content, and commentary is a call if it has a recipient: to=functions.f.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from quire.gateway.chat.tools.events import Arguments, CallBegan, Reasoning, Text, Tool
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import Grammar, ToolFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BORDERS = (*_ENDS, _START, _CHANNEL)
_HEADER_BEGINNINGS = (_START, _CHANNEL, "to=")
_HEADER = re.compile(r"(?:[^<]|<(?!\|message\|>))*")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]+)")


class Harmony(ToolFormat):
    """The whole answer is in this format, so it is read by it without tools, too."""

    name = "harmony"
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def read(self, source: Source, tools: Mapping[str, Tool], *, hidden: Collection[str] = ()) -> Steps[None]:
        """Read messages. The prompt has the first one's <|start|> and role. A text without a header is content."""
        while not source.is_over:
            start = source.at
            yield from source.space()
            if source.is_over:
                return
            if (yield from source.sees(*_HEADER_BEGINNINGS)):
                header = yield from source.word(_HEADER)
                if (yield from source.takes(_MESSAGE)):
                    yield from self._message(source, tools, header, hidden)
                    continue
                if source.is_over:
                    return  # the answer was cut within a header
                yield from source.takes(header[: len(_CHANNEL)])  # no header, though it begins like one
            else:
                source.at = start
            yield from self._text(source, Text, hidden)

    def _message(self, source: Source, tools: Mapping[str, Tool], header: str, hidden: Collection[str]) -> Steps[None]:
        """Read what follows a header, up to the next one."""
        source.commit()
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in tools:
            yield CallBegan(recipient[1])
            yield from source.space()
            if (yield from source.sees("{")):
                yield from source.pass_value(streams=True)
            elif (yield from source.sees(*_BORDERS)):
                yield Arguments("{}")
            return
        yield from self._text(source, Reasoning if channel and channel[1] == "analysis" else Text, hidden)

    def _text(self, source: Source, kind: type[Text] | type[Reasoning], hidden: Collection[str]) -> Steps[None]:
        border = yield from source.until(_BORDERS, hidden=hidden, kind=kind)
        if border in _ENDS:
            yield from source.takes(border)
            source.commit()

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for one call: an answer has no second one."""
        calls = []
        for index, tool in enumerate(tools):
            head = grammar.spell(f"{_CHANNEL}commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}")
            calls.append(grammar.add(f"call_{index}", f"{head} {grammar.add_arguments(index, tool)}"))
        return grammar.add("calls", " | ".join(calls))
