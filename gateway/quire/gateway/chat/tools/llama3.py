"""{"name": "f", "parameters": {...}}; {...}, and nothing before it, but <|python_tag|>: Llama 3.1 and later. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quire.gateway.chat.tools.events import Tool
from quire.gateway.chat.tools.json_objects import read_objects, repeated, write_objects
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import Grammar, OpenedFormat

_TAG = "<|python_tag|>"


class Llama3(OpenedFormat):
    """Objects that are the whole answer."""

    name = "llama3"
    openings = (_TAG,)
    markers = (_TAG,)

    def read(self, source: Source, tools: Mapping[str, Tool], *, hidden: Collection[str] = ()) -> Steps[None]:
        """Read an answer that may begin with a call."""
        if not (yield from self.calls(source, tools, "")):
            source.at = 0
        yield from super().read(source, tools, hidden=hidden)

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read the objects."""
        is_tagged = bool(opening)
        return (yield from read_objects(source, tools, (";", ","), needs_arguments=not is_tagged))

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for objects."""
        return grammar.add("calls", repeated(write_objects(grammar, tools, "parameters"), "; ", parallel=parallel))
