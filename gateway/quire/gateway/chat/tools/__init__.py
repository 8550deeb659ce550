"""Formats in which models write their answers: reasoning, and calls of tools. Pure.

events.py         parts of an answer
source.py         text that arrives in pieces, and what reads it
tool_format.py    a format of calls: how it is read, and the grammar that forces it
thinking.py       reasoning between tags
json_objects.py   calls that are JSON objects           hermes.py  llama3.py  mistral.py
named_values.py   calls with one value after the other  qwen3_coder.py  glm.py  pythonic.py
sections.py       calls between special tokens          deepseek.py  kimi.py
harmony.py        messages in channels, for calls and reasoning
formats.py        all formats by name, and the one that a template writes
answers.py        reads an answer by its formats
"""

from quire.gateway.chat.tools.events import Arguments, CallBegan, Event, Reasoning, Text, Tool

__all__ = ["Arguments", "CallBegan", "Event", "Reasoning", "Text", "Tool"]
