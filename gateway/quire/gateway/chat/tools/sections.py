"""Calls between markers, all of them in one section: what DeepSeek's and Kimi's formats share. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from quire.gateway.chat.tools.events import Arguments, CallBegan, Tool
from quire.gateway.chat.tools.json_objects import read_arguments, repeated
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import Grammar, OpenedFormat


class SectionFormat(OpenedFormat):
    """A format with a section of calls.

    section      markers around all calls; a model may leave them out
    call_marks   markers around each call
    separator    text between two calls
    tail         text behind the arguments of a call
    """

    section: tuple[str, str]
    call_marks: tuple[str, str]
    separator = ""
    tail = ""

    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read the calls of a section."""
        if opening == self.section[0] and not (yield from source.takes_all(self.call_marks[0])):
            return False
        if not (yield from self.call(source, tools)):
            return False
        while True:
            end = source.at
            yield from source.space()
            if (yield from source.ends_with(self.call_marks[1])):
                end = source.at
            source.at = end
            yield from source.space()
            if not (yield from source.takes(self.call_marks[0])):
                if not (yield from source.ends_with(self.section[1])):
                    source.at = end
                return True
            if not (yield from self.call(source, tools)):
                source.at = end
                return True

    @abstractmethod
    def call(self, source: Source, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Read what is between the markers of a call; return False, without events, if it is no call."""

    @abstractmethod
    def head(self, grammar: Grammar, name: str) -> str:
        """Return an expression for the text before the arguments of a call."""

    def arguments(self, source: Source, name: str, *, id: str | None = None) -> Steps[bool]:
        """Read an object of arguments; none at all is an empty one."""
        yield from source.space()
        if (yield from source.sees("{")):
            yield from read_arguments(source, name, id=id)
            return True
        if not (yield from source.sees(self.call_marks[1])):
            return False
        source.commit()
        yield CallBegan(name, id)
        yield Arguments("{}")
        return True

    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for a section."""
        begin, end = map(grammar.spell, self.call_marks)
        for index, tool in enumerate(tools):
            inner = f"{self.head(grammar, tool.name)} {grammar.add_arguments(index, tool)} {grammar.spell(self.tail)}"
            grammar.add(f"call_{index}", f"{begin} {inner} {end}")
        call = grammar.add("call", " | ".join(f"call_{index}" for index in range(len(tools))))
        calls = repeated(call, self.separator, parallel=parallel)
        return grammar.add("calls", f"{grammar.spell(self.section[0])} {calls} {grammar.spell(self.section[1])}")
