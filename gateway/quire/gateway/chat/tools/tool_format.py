"""A format in which models write calls of tools. Pure."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quire.gateway.chat.tools.events import Arguments, CallBegan, Event, Text, Tool
from quire.gateway.chat.tools.source import Reader, Source, Steps

NAME = re.compile(r"[A-Za-z0-9_.-]*")
"""A tool's name."""

# Arguments as json.dumps writes them, which is how templates show a model the calls before.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class UnwritableSchema(Exception):
    """A format can't write calls of a schema. Its message is for the caller."""


@dataclass(slots=True)
class Grammar:
    """A Lark grammar while it is written.

    special_ids   token ids of the markers that are special tokens: a text can't spell these
    """

    special_ids: Mapping[str, int] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)

    def spell(self, text: str) -> str:
        """Return an expression for a text, in which markers are special tokens if they are some."""
        pattern = "|".join(re.escape(each) for each in sorted(self.special_ids, key=len, reverse=True))
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        spelled = (
            f"<[{self.special_ids[each]}]>" if each in self.special_ids else _quoted(each) for each in pieces if each
        )
        return " ".join(spelled)

    def add(self, name: str, expression: str) -> str:
        """Add a rule; return its name."""
        self.rules.append(f"{name}: {expression}")
        return name

    def add_text(self, name: str, *, end: str, pattern: str = "(?s:.*)") -> str:
        """Add a rule for free text and its end, which is not within the text; return its name."""
        first = next((each for each in self.special_ids if end.startswith(each)), None)
        if first is not None:
            return self.add(name, f"/{pattern}/ {self.spell(end)}")
        return self.add(f"{name}[suffix={_quoted(end)}]", f"/{pattern}/") and name

    def add_json(self, name: str, schema: Mapping[str, object]) -> str:
        """Add a rule for JSON of a schema; return its name."""
        return self.add(name, f"%json {json.dumps({'x-guidance': _LAYOUT, **schema})}")

    def add_arguments(self, index: int, tool: Tool) -> str:
        """Add a rule for the arguments of a tool, a JSON object; return its name."""
        return self.add_json(f"arguments_{index}", {"type": "object", **tool.schema})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class ToolFormat(ABC):
    """A format in which models write calls.

    name          of `--tool-parser`
    markers       texts that may be special tokens of a model, which are left out of a text unless they are asked for
    instruction   text by which templates ask for this format, whatever they show of calls before; "": there is none
    """

    name: str
    markers: tuple[str, ...]
    instruction = ""

    @abstractmethod
    def read(self, source: Source, tools: Mapping[str, Tool], *, hidden: Collection[str] = ()) -> Steps[None]:
        """Read an answer: text with calls of these tools. Text that is no such call stays text.

        hidden are markers that are special tokens, and never come out as text.
        """

    @abstractmethod
    def write(self, grammar: Grammar, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Add rules for one call of these tools, or for several if parallel; return the name of the first rule.

        Raises UnwritableSchema.
        """

    def reads(self, text: str, tool: Tool, arguments: Mapping[str, object]) -> bool:
        """Return whether a text has one call of this tool with these arguments, and no other."""
        reader = Reader(lambda source: self.read(source, {tool.name: tool}))
        return _calls_of([*reader.push(text), *reader.finish()]) == [(tool.name, arguments)]


class OpenedFormat(ToolFormat):
    """A format in which a marker opens calls, anywhere in a text.

    openings   texts with which calls begin
    """

    openings: tuple[str, ...]

    def read(self, source: Source, tools: Mapping[str, Tool], *, hidden: Collection[str] = ()) -> Steps[None]:
        """Read text up to an opening, and the calls behind it."""
        while (opening := (yield from source.until(self.openings, hidden=hidden))) is not None:
            source.at = len(opening)
            if not (yield from self.calls(source, tools, opening)):
                source.at = len(opening)
                if opening not in hidden:
                    yield Text(opening)
            source.commit()

    @abstractmethod
    def calls(self, source: Source, tools: Mapping[str, Tool], opening: str) -> Steps[bool]:
        """Read the calls behind an opening, to the end of the last one.

        Return False if there is none: then no event was given out, and no text committed.
        """


def _calls_of(events: Sequence[Event]) -> list[tuple[str, object]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegan):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, text = calls[-1]
            calls[-1] = (name, text + event.text)
    try:
        return [(name, json.loads(text)) for name, text in calls]
    except ValueError:
        return []
