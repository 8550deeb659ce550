"""Reads a model's answer: reasoning, content and calls, found in a text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quire.gateway.chat.tools.events import Arguments, CallBegan, Event, Reasoning, Text, Tool, joined
from quire.gateway.chat.tools.formats import HARMONY, ReasoningFormat
from quire.gateway.chat.tools.harmony import Harmony
from quire.gateway.chat.tools.source import Reader
from quire.gateway.chat.tools.tool_format import Grammar, ToolFormat

_OF_CALLS = (CallBegan, Arguments)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats of a model's answers; None: it has no calls, or no reasoning, or the format is not known."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model."""
        return tuple(marker for each in (self.tools, self.reasoning) if each is not None for marker in each.markers)

    def parser(
        self,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        begins_in_reasoning: bool = False,
        hidden: Collection[str] = (),
    ) -> AnswerParser:
        """Return a parser of one answer.

        tools                 the tools of which calls are found
        parallel              False: calls behind the first one are left out
        begins_in_reasoning   the prompt has the opening tag
        hidden                markers that are special tokens, and never come out as text
        """
        offered = {tool.name: tool for tool in tools}
        if HARMONY in (self.tools, self.reasoning):
            return AnswerParser([Reader(partial(HARMONY.read, tools=offered, hidden=hidden))], parallel=parallel)
        readers = []
        if self.reasoning is not None:
            assert not isinstance(self.reasoning, Harmony)
            readers.append(Reader(partial(self.reasoning.read, is_open=begins_in_reasoning)))
        if self.tools is not None and tools:
            readers.append(Reader(partial(self.tools.read, tools=offered, hidden=hidden)))
        return AnswerParser(readers, parallel=parallel)

    def lark(
        self,
        tools: Sequence[Tool],
        *,
        special_ids: Mapping[str, int],
        parallel: bool,
        begins_in_reasoning: bool = False,
    ) -> str:
        """Return a Lark grammar of an answer that is one call of these tools, or several if parallel.

        special_ids are the token ids of the markers that are special tokens. If the prompt began reasoning, its end
        comes first. Raises UnwritableSchema.
        """
        assert self.tools is not None
        grammar = Grammar(special_ids)
        start = self.tools.write(grammar, tools, parallel=parallel)
        if begins_in_reasoning and self.reasoning is not None and not isinstance(self.reasoning, Harmony):
            start = self.reasoning.write(grammar, start)
        return "\n".join([f"start: {start}", *grammar.rules]) + "\n"


class AnswerParser:
    """Finds reasoning, content and calls in a text that arrives in pieces.

    The result does not depend on how the text is cut, except for the sizes of the returned pieces. Text is held back
    while it may be the beginning of something else; white space before a call, or before content that follows
    reasoning, belongs to neither.
    """

    def __init__(self, readers: Sequence[Reader], *, parallel: bool = True) -> None:
        """Each reader reads the text that the one before it gives out. Without parallel the first call counts."""
        self._readers = readers
        self._parallel = parallel
        self._space = ""  # white space at the end of a piece, which is not given out yet
        self._last: type[Event] | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Take text; return the decided part."""
        events: list[Event] = [Text(text)] if text else []
        for reader in self._readers:
            events = _pushed(reader, events)
        return self._given_out(events)

    def finish(self) -> list[Event]:
        """Return what was undecided at the end of the text."""
        events: list[Event] = []
        for reader in self._readers:
            events = [*_pushed(reader, events), *reader.finish()]
        found = self._given_out(events)
        ends_with_text = self._last in (None, Text)
        space, self._space = self._space, ""
        return joined([*found, Text(space)]) if space and ends_with_text else found

    def _given_out(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._of_call(event) if isinstance(event, _OF_CALLS) else self._piece(event)
        return joined(found)

    def _piece(self, event: Text | Reasoning) -> list[Event]:
        """Give out text, but for the white space at its end, which may be before something else."""
        kind, text = type(event), event.text
        if self._last in (Text, Reasoning) and self._last is not kind:
            self._space, text = "", text.lstrip()
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._last = kind
        return [event if kept == event.text else kind(kept)]

    def _of_call(self, event: CallBegan | Arguments) -> list[Event]:
        self._space = ""
        self._last = CallBegan
        self._num_calls += isinstance(event, CallBegan)
        return [event] if self._parallel or self._num_calls <= 1 else []


def _pushed(reader: Reader, events: Iterable[Event]) -> list[Event]:
    """Return events with the reader's in place of the texts that it reads."""
    found: list[Event] = []
    for event in events:
        found += reader.push(event.text) if isinstance(event, Text) else [event]
    return found
