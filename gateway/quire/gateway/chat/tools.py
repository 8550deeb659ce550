"""Tool calls: the formats in which models write them, as grammars and as parsers. Pure.

    hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one after the other    Hermes, Qwen
    llama3    {"name": "f", "parameters": {...}}; {...}, and nothing before it, but <|python_tag|>   Llama 3
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, {...}], or [TOOL_CALLS]f[ARGS]{...}    Mistral

A requested call follows a grammar of this format. Calls that a model writes by itself are parsed by the same rules.
Text that is not a call of an offered tool stays text, without changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; schema is the JSON schema of its arguments, which are an object."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call of a tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A further piece of the arguments, JSON text, of the call that began last."""

    text: str


Event = Text | CallBegan | Arguments


@dataclass(frozen=True, slots=True)
class Form:
    """The writing of calls in one format.

    opening       the beginning of a call, within a text
    closing       the end of a call; "" if it is the object's end
    separator     pattern between two calls of one opening; "" if each has its own
    end           pattern after the last call of one opening
    key           of the arguments, as the grammar writes it
    begins_text   a call can also begin the text, without its opening
    """

    opening: str
    closing: str
    separator: str
    end: str
    key: str
    begins_text: bool = False


class ToolFormat(Enum):
    """A format by the name that `--tool-format` gives it."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"

    @property
    def form(self) -> Form:
        """Return how it writes calls."""
        return _FORMS[self]

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a model, which are left out of a text unless they are asked for."""
        return tuple(marker for marker in (self.form.opening, self.form.closing) if marker)


_FORMS = {
    ToolFormat.HERMES: Form("<tool_call>", "</tool_call>", "", r"\s*</tool_call>", "arguments"),
    ToolFormat.LLAMA3: Form("<|python_tag|>", "", r"\s*;\s*", "", "parameters", begins_text=True),
    ToolFormat.MISTRAL: Form("[TOOL_CALLS]", "", r"\s*,\s*", r"\s*\]", "arguments"),
}
# In the order in which a template's text is searched for them.
_SIGNS = (
    (ToolFormat.MISTRAL, re.compile(re.escape("[TOOL_CALLS]"))),
    (ToolFormat.HERMES, re.compile("<tool_call>")),
    (ToolFormat.LLAMA3, re.compile(r'<\|python_tag\|>|"parameters"\s*:\s*dictionary of argument name')),
)


def find_format(template: str) -> ToolFormat:
    """Return the format that a chat template writes calls in; the most common one if it does not say."""
    return next((format for format, sign in _SIGNS if sign.search(template)), ToolFormat.HERMES)


# -- calls that are asked for -------------------------------------------------------------------------------------

# Arguments as json.dumps writes them, which is how templates show a model the calls before.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def lark_of_calls(format: ToolFormat, tools: Sequence[Tool], *, special_ids: Mapping[str, int], parallel: bool) -> str:
    """Return a Lark grammar of one call of these tools, or of several if parallel.

    special_ids are the token ids of the format's markers that are special tokens: a text can't spell these.
    """
    form = format.form
    opening, closing = (_literal(marker, special_ids) for marker in (form.opening, form.closing))
    if format is ToolFormat.HERMES:
        rules = [f"start: call{_repeated(' call', chr(10), parallel)}", f'call: {opening} "\\n" object "\\n" {closing}']
    elif format is ToolFormat.LLAMA3:
        rules = [f"start: object{_repeated(' object', '; ', parallel)}"]
    else:
        rules = [f'start: {opening} "[" object{_repeated(" object", ", ", parallel)} "]"']
    rules.append("object: " + " | ".join(f"object_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{form.key}": ')
        schema = {"x-guidance": _LAYOUT, "type": "object", **tool.schema}
        rules += [f'object_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: %json {json.dumps(schema)}"]
    return "\n".join(rules) + "\n"


def _literal(marker: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[marker]}]>" if marker in special_ids else json.dumps(marker)


def _repeated(rule: str, separator: str, parallel: bool) -> str:
    return f" ({json.dumps(separator)}{rule})*" if parallel else ""


# -- calls in a text ----------------------------------------------------------------------------------------------

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BARE_HEAD = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9_-]+)?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BECOME_BARE_HEAD = re.compile(r"[A-Za-z0-9_.\[\]-]{0,512}\s*")


class _Brackets:
    """Finds the end of a JSON value that comes in pieces, by its brackets."""

    def __init__(self, depth: int = 0) -> None:
        """With a depth, so many brackets are open already."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False
        self._num_read = 0

    def find_end(self, text: str) -> int | None:
        """Return the end of the value, None if it continues. Each text begins with the previous text."""
        for index in range(self._num_read, len(text)):
            letter = text[index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        self._num_read = len(text)
        return None

    def forget(self) -> None:
        """Let the next text begin behind the one before."""
        self._num_read = 0


class _State(Enum):
    TEXT = "text"
    HEAD = "the opening of a call, and its object up to the arguments"
    ARGUMENTS = "arguments"
    REST = "the rest of the object, behind the arguments"
    AFTER = "behind a call"


class CallParser:
    """Finds the calls in a text that arrives in pieces.

    The result does not depend on how the text is cut, except for the sizes of the returned pieces. Text is held back
    while it may be the beginning of a call; white space next to a call belongs to the call.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        """Names are those of the tools on offer. Without parallel, calls behind the first one are left out."""
        form = self._form = format.form
        self._names = frozenset(names)
        self._parallel = parallel
        self._takes_bare_names = format is ToolFormat.MISTRAL
        bracket = r"\s*\[?" if self._takes_bare_names else ""
        separator = f"|{form.separator}" if form.separator else ""
        self._lead = re.compile(rf"(?:{re.escape(form.opening)}{bracket}{separator})?\s*")
        self._state = _State.TEXT
        self._buffer = ""
        self._brackets = _Brackets()
        self._may_begin_text = form.begins_text
        self._space = ""  # white space that is not given out yet
        self._follows_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Take text; return the decided part."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and (found := self._STEPS[self._state](self)) is not None:
            events += found
        return _joined(events)

    def finish(self) -> list[Event]:
        """Return the text that was held back at the end of the text: a call that has no arguments yet is text."""
        left, self._buffer = self._buffer, ""
        if self._state is _State.AFTER and self._form.closing.startswith(left.strip()):
            left = ""  # the text was cut within the end of the call
        events = self._text(left)
        space, self._space = self._space, ""
        return _joined([*events, Text(space)] if space and not self._follows_call else events)

    def _text_step(self) -> list[Event] | None:
        """Give out text up to the next opening."""
        if self._may_begin_text:
            begun = self._buffer.lstrip()
            if not begun:
                return None
            self._may_begin_text = False
            if begun[0] == "{":
                return self._take(len(self._buffer) - len(begun), _State.HEAD)
        opening = self._form.opening
        position = self._buffer.find(opening)
        if position >= 0:
            return self._take(position, _State.HEAD)
        num_held = next((n for n in range(len(opening) - 1, 0, -1) if self._buffer.endswith(opening[:n])), 0)
        num_certain = len(self._buffer) - num_held
        return self._take(num_certain, _State.TEXT) if num_certain else None

    def _take(self, num_letters: int, state: _State) -> list[Event]:
        """Emit the beginning of the buffer as text, and change to a state."""
        events = self._text(self._buffer[:num_letters])
        self._cut(num_letters, state)
        return events

    def _cut(self, num_letters: int, state: _State) -> None:
        self._buffer = self._buffer[num_letters:]
        self._brackets = _Brackets(depth=1 if state is _State.REST else 0)
        self._state = state

    def _head_step(self) -> list[Event] | None:
        """Decide if a call begins."""
        lead = self._lead.match(self._buffer)
        assert lead is not None  # it matches nothing, too
        rest = self._buffer[lead.end() :]
        if not rest:
            return None
        if rest[0] != "{":
            return self._bare_head(lead.end(), rest)
        head = _HEAD.match(rest)
        if head is not None and head[1] in self._names:
            self._cut(lead.end() + head.end(), _State.ARGUMENTS)
            return self._began(head[1])
        end = None if head is not None else self._brackets.find_end(rest)
        if head is None and end is None:
            return None
        call = None if end is None else self._read(rest[:end])
        if end is None or call is None:
            return self._take(max(1, lead.end()), _State.TEXT)
        self._cut(lead.end() + end, _State.AFTER)
        name, arguments = call
        return [*self._began(name), *self._arguments(arguments)]

    def _bare_head(self, start: int, rest: str) -> list[Event] | None:
        """Decide if a call begins that is a name with arguments."""
        head = _BARE_HEAD.match(rest) if self._takes_bare_names else None
        if head is not None and head[1] in self._names:
            self._is_bare = True
            self._cut(start + head.end(), _State.ARGUMENTS)
            return self._began(head[1])
        if head is None and self._takes_bare_names and _MAY_BECOME_BARE_HEAD.fullmatch(rest):
            return None
        return self._take(max(1, start), _State.TEXT)

    def _read(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a whole object, None if it is no call."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names:
            return None
        if isinstance(arguments, str):
            return (name, arguments) if _is_object(arguments) else None
        return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None

    def _arguments_step(self) -> list[Event]:
        """Give out arguments up to their end."""
        end = self._brackets.find_end(self._buffer)
        if end is None:
            text, self._buffer = self._buffer, ""
            self._brackets.forget()
            return self._arguments(text)
        text = self._buffer[:end]
        self._cut(end, _State.AFTER if self._is_bare else _State.REST)
        self._is_bare = False
        return self._arguments(text)

    def _rest_step(self) -> list[Event] | None:
        """Skip the remainder of a call's object; a missing bracket is ignored."""
        begun = self._buffer.lstrip()
        if not begun:
            return None
        if begun[0] not in ",}":
            self._state = _State.AFTER
            return []
        end = self._brackets.find_end(self._buffer)
        if end is None:
            return None
        self._cut(end, _State.AFTER)
        return []

    def _after_step(self) -> list[Event] | None:
        """Skip the end of a call, and find out if another call follows at once."""
        begun = self._buffer.lstrip()
        if not begun or (self._form.closing.startswith(begun) and begun != self._form.closing):
            return None
        end = re.match(self._form.end, self._buffer) if self._form.end else None
        if end is not None:
            self._cut(end.end(), _State.TEXT)
        elif self._form.separator and re.match(self._form.separator, self._buffer):
            self._cut(0, _State.HEAD)
        else:
            self._cut(0, _State.TEXT)
        return []

    def _text(self, text: str) -> list[Event]:
        """Give out text, but for the white space at its end, which may be next to a call."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._follows_call = False
        return [Text(kept)]

    def _began(self, name: str) -> list[Event]:
        self._space = ""
        self._follows_call = True
        self._may_begin_text = False
        self.num_calls += 1
        return [CallBegan(name)] if self._parallel or self.num_calls == 1 else []

    def _arguments(self, text: str) -> list[Event]:
        return [Arguments(text)] if self._parallel or self.num_calls == 1 else []

    _is_bare = False
    _STEPS: Mapping[_State, Callable[[CallParser], list[Event] | None]] = {
        _State.TEXT: _text_step,
        _State.HEAD: _head_step,
        _State.ARGUMENTS: _arguments_step,
        _State.REST: _rest_step,
        _State.AFTER: _after_step,
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _joined(events: list[Event]) -> list[Event]:
    """Return the same with neighbouring pieces of one kind put together."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.text + event.text)
        else:
            joined.append(event)
    return joined
