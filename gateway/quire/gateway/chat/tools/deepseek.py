"""<｜tool▁call▁begin｜>, a name, <｜tool▁sep｜>, arguments, <｜tool▁call▁end｜>: DeepSeek V3, R1 and V3.1. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from quire.gateway.chat.tools.events import Tool
from quire.gateway.chat.tools.sections import SectionFormat
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import NAME, Grammar

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"


class _DeepSeek(SectionFormat):
    """The markers that both formats have."""

    section = _SECTION
    call_marks = _CALL
    openings = (_SECTION[0], _CALL[0])
    markers = (*_SECTION, *_CALL, _SEPARATOR)


class DeepSeekV3(_DeepSeek):
    """The type of the tool, its name and arguments in a block of JSON: DeepSeek V3 and R1."""

    name = "deepseek-v3"
    separator = "\n"
    tail = "\n```"

    def call(self, source: Source, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Read a call."""
        if not (yield from source.takes_all("function", _SEPARATOR)):
            return False
        name = yield from source.word(NAME)
        if name not in tools or not (yield from source.takes_all("```json")):
            return False
        yield from source.space()
        if (yield from source.takes("```")):
            return (yield from self.arguments(source, name))
        if not (yield from self.arguments(source, name)):
            return False
        end = source.at
        yield from source.space()
        if not (yield from source.ends_with("```")):
            source.at = end
        return True

    def head(self, grammar: Grammar, name: str) -> str:
        """Return an expression for type and name."""
        return grammar.spell(f"function{_SEPARATOR}{name}\n```json\n")


class DeepSeekV31(_DeepSeek):
    """The name of the tool and its arguments: DeepSeek V3.1."""

    name = "deepseek-v3.1"

    def call(self, source: Source, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Read a call."""
        yield from source.space()
        name = yield from source.word(NAME)
        if name not in tools or not (yield from source.takes_all(_SEPARATOR)):
            return False
        return (yield from self.arguments(source, name))

    def head(self, grammar: Grammar, name: str) -> str:
        """Return an expression for the name."""
        return grammar.spell(f"{name}{_SEPARATOR}")
