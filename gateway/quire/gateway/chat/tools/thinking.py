"""Reasoning between tags, before the answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from quire.gateway.chat.tools.events import Reasoning, Text
from quire.gateway.chat.tools.source import Source, Steps
from quire.gateway.chat.tools.tool_format import Grammar


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Tags around reasoning. The opening one is the answer's beginning, or the prompt's end.

    name   of `--reasoning-parser`
    """

    name: str
    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a model."""
        return (self.opening, self.closing)

    def is_in(self, template: str) -> bool:
        """Return whether a chat template knows these tags."""
        return self.closing in template or self.opening in template

    def is_open(self, text: str) -> bool:
        """Return whether reasoning goes on behind a text: its last tag is the opening one."""
        return text.rfind(self.opening) > text.rfind(self.closing)

    def read(self, source: Source, *, is_open: bool) -> Steps[None]:
        """Read an answer: reasoning up to the closing tag, then text. is_open: the prompt has the opening tag."""
        yield from source.space()
        begins = yield from source.takes(self.opening)
        if begins or is_open:
            yield from source.space()
            yield from source.until((self.closing,), kind=Reasoning)
            yield from source.takes(self.closing)
            yield from source.space()
            source.commit()
        else:
            source.at = 0
        while True:
            if source.at < len(source.text):
                yield Text(source.rest)
                source.at = len(source.text)
                source.commit()
            if source.is_whole:
                return
            yield None

    def write(self, grammar: Grammar, rule: str) -> str:
        """Add a rule for reasoning that the prompt began, and what follows it; return its name."""
        thought = grammar.add_text("thought", end=self.closing)
        return grammar.add("answer", f"{thought} /\\s{{0,4}}/ {rule}")


THINK = ThinkTags("think", "<think>", "</think>")
MISTRAL_THINK = ThinkTags("mistral", "[THINK]", "[/THINK]")
