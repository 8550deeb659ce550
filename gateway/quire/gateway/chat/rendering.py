"""Renders chat templates, in a process of its own that may be killed: nothing else bounds a template's time and memory.

    python -m quire.gateway.chat.rendering

The first line of the input is {"templates": {name: text}, "special_tokens": {name: text}} as JSON. The first line of
the output answers it: {}, or {"error"} if a template can't be compiled. A line of the input is then {"template": name,
"values", "continues"}, and its answer is a line {"text"} or {"error"}. The process ends with its input.

The environment is the one in which transformers renders templates: docs/reference/http.md lists its content.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 * 2**20
"""The most memory that rendering may take, beyond the process itself."""
MAX_TEXT_CHARS = 8 * 2**20
"""The most characters of a rendered text."""
MAX_ERROR_CHARS = 500

# Marks the end of the message to continue. The space shows if the template strips the message.
_END = "\ue0ff<end of the message to continue> "
_TOO_MUCH = "it takes too much memory or stack"
# Names under which templates read an assistant's reasoning.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class CannotRender(Exception):
    """A template does not make a text of these values. Its message is for the caller."""


class _Generation(Extension):
    """The block `{% generation %}`, which marks text of the assistant: for rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja reads it of the class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content with a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Jinja's own filter escapes what HTML needs, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def compile_template(text: str) -> Template:
    """Return a template. Raises ValueError that names the line."""
    try:
        return _environment().from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ValueError(f"line {line}: {error}" if line else str(error)) from error


def render(template: Template, values: Mapping[str, Any], *, continues: bool = False) -> str:
    """Return the text of a chat. Raises CannotRender.

    values      `messages`, `tools`, `add_generation_prompt` and other names, all of them plain JSON values
    continues   the text ends with the content of the last message, which is a string
    """
    messages = [_for_template(message) for message in values["messages"]]
    if continues:
        messages[-1]["content"] += _END
    try:
        text = _bounded_text(template, {**values, "messages": messages})
    except CannotRender:
        raise
    except (MemoryError, RecursionError) as error:
        raise CannotRender(_TOO_MUCH) from error
    except Exception as error:  # any error of the template's code for these values
        raise CannotRender(_describe(error)) from error
    return _without_end(text) if continues else text


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without nulls, and with its reasoning under the names that templates read.

    A content that is null beside calls stays: templates ask for it.
    """
    given = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in given and "content" in message:
        given["content"] = message["content"]
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _bounded_text(template: Template, values: Mapping[str, Any]) -> str:
    pieces, num_chars = [], 0
    for piece in template.generate(values):
        num_chars += len(piece)
        if num_chars > MAX_TEXT_CHARS:
            raise CannotRender(f"its text has more than {MAX_TEXT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _without_end(text: str) -> str:
    """Return the text up to the end of the message to continue."""
    position = text.rfind(_END.strip())
    if position < 0:
        raise CannotRender("it leaves out the content of the last message, so that can't be continued")
    is_kept = text.startswith(_END, position)
    return text[:position] if is_kept else text[:position].rstrip()


def _describe(error: Exception) -> str:
    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "replace").decode()[:MAX_ERROR_CHARS]


def _answer(templates: Mapping[str, Template], special_tokens: Mapping[str, str], line: str) -> dict[str, str]:
    try:
        request = json.loads(line)
        # A caller's value comes before a special token of this name, as in transformers.
        values = {**special_tokens, **request["values"]}
        text = render(templates[request["template"]], values, continues=request["continues"])
        text.encode()
    except CannotRender as error:
        return {"error": str(error)}
    except UnicodeEncodeError:
        return {"error": "the text has a lone surrogate, which is no character"}
    except (MemoryError, RecursionError):
        return {"error": _TOO_MUCH}
    return {"text": text}


def _bound_memory() -> None:
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _say(answer: Mapping[str, str]) -> None:
    sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer lines until the input ends, which is when the gateway has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for the gateway, which drains
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    source = json.loads(sys.stdin.readline())
    _bound_memory()
    templates = {}
    for name, text in source["templates"].items():
        try:
            templates[name] = compile_template(text)
        except (ValueError, MemoryError, RecursionError) as error:
            _say({"error": f"the chat template {name!r}: {str(error)[:MAX_ERROR_CHARS]}"})
            return
    _say({})
    for line in sys.stdin:
        _say(_answer(templates, source["special_tokens"], line))


if __name__ == "__main__":
    main()
