"""A model's chat templates: where they are read from, and the processes that render them.

A template comes with a model and runs on values that callers sent. So it is rendered by rendering.py in a process of
its own, which is killed when it takes too long.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.client.engine.tenant_places import TenantPlaces
from quire.gateway.chat.rendering import MAX_TEXT_CHARS

log = logging.getLogger(__name__)

RENDER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
NUM_PROCESSES = 2
"""Processes that render at the same time, and chats of a named tenant that are rendered or wait for a process. A chat
waits at most RENDER_TIMEOUT_S for each chat before it."""
MAX_TEMPLATE_BYTES = 2**20

_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_FURTHER_TEMPLATES = "additional_chat_templates"
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# JSON of a character has at most 6 bytes.
_MAX_LINE_BYTES = 6 * MAX_TEXT_CHARS + 1024

RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
"""Names that `chat_template_kwargs` can't give: they are fields of their own, or refused."""


class TemplateRefused(Exception):
    """A template does not make a text of a chat. Its message is for the caller."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The templates of a model by name, and the texts of its special tokens by name: `bos_token` and others."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of all templates: a model's format of tool calls is found from it."""
        return "\n".join(self.by_name.values())

    def choose(self, *, has_tools: bool) -> str:
        """Return the name of the template for a chat. Raises TemplateRefused."""
        for name in (_WITH_TOOLS, _DEFAULT) if has_tools else (_DEFAULT,):
            if name in self.by_name:
                return name
        if self.by_name:
            raise TemplateRefused(f"the model's chat templates are {sorted(self.by_name)}, and none is the default one")
        raise TemplateRefused("the model has no chat template: start the gateway with --chat-template FILE")


def load_templates(source: str | None, *, template_file: Path | None = None) -> TemplateSource:
    """Read the templates of a model: of a folder, beside a tokenizer.json, or of a hub id; blocks on files and network.

    template_file is a template that is taken in place of the model's own. Raises OSError, and ValueError for files that
    can't be read.
    """
    config = _read_object(source, _CONFIG)
    names = {**_read_object(source, _SPECIAL_TOKENS_MAP), **config}
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _text_of_token(names.get(name))) is not None}
    if template_file is not None:
        by_name = {_DEFAULT: _read_template(template_file)}
    else:
        by_name = _templates_of(config.get("chat_template")) | _template_files(source)
    return TemplateSource(by_name, special_tokens)


def _templates_of(value: Any) -> dict[str, str]:
    """Return the value of `chat_template` in tokenizer_config.json: one template, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    try:
        return {str(each["name"]): str(each["template"]) for each in value}
    except (TypeError, KeyError) as error:
        raise ValueError(f"chat_template in {_CONFIG} is neither a text nor a list of named templates") from error


def _template_files(source: str | None) -> dict[str, str]:
    path = find_file(source, _TEMPLATE)
    if path is None:
        return {}
    further = sorted((path.parent / _FURTHER_TEMPLATES).glob("*.jinja"))
    return {_DEFAULT: _read_template(path)} | {each.stem: _read_template(each) for each in further}


def _read_template(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{path}: a chat template has at most {MAX_TEMPLATE_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _read_object(source: str | None, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one if there is no file."""
    path = find_file(source, name)
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _text_of_token(value: Any) -> str | None:
    """Return a special token's text, which is given as it is or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def find_file(source: str | None, name: str) -> Path | None:
    """Return where a model's file is; None if it has no such file."""
    if source is None:
        return None
    path = Path(source)
    if path.exists():
        found = (path if path.is_dir() else path.parent) / name
        return found if found.is_file() else None
    from huggingface_hub import hf_hub_download  # only here: importing it takes long
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        return Path(hf_hub_download(source, name))
    except EntryNotFoundError:
        return None
    except (HFValidationError, OSError) as error:  # of a path on another machine, or without a network
        log.warning("%s of %s can't be read: %s", name, source, error)
        return None


class _Process:
    """A process that renders. It starts when it is needed, and again after its end."""

    def __init__(self, source: TemplateSource) -> None:
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Wait until the process has compiled the templates. Raises ValueError if it can't."""
        if self._process is not None and self._process.poll() is None:
            return
        await self.close()
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE_BYTES)
        with theirs:
            # Not by the event loop: uvloop's fork runs gRPC's fork handlers, which can end the child before its exec.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.gateway.chat.rendering"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        first = {"templates": dict(self._source.by_name), "special_tokens": dict(self._source.special_tokens)}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await self._exchange(first)
        except TimeoutError:
            answer = {"error": f"the chat template takes more than {START_TIMEOUT_S:g} s to compile"}
        if answer is None or "error" in answer:
            await self.close()
            raise ValueError(
                "the process that renders chat templates does not start" if answer is None else answer["error"]
            )

    async def ask(self, request: Mapping[str, Any]) -> dict[str, str] | None:
        """Return the answer; None if the process ended over it."""
        try:
            await self.start()
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                answer = await self._exchange(request)
        except TimeoutError:
            answer = {"error": f"it takes more than {RENDER_TIMEOUT_S:g} s"}
            await self.close()
        if answer is None:
            await self.close()
        return answer

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, str] | None:
        if self._writer.is_closing():
            return None
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        except (BrokenPipeError, ConnectionResetError):
            return None
        answer: dict[str, str] | None = json.loads(line) if line else None
        return answer

    async def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._process = None
        self._writer.close()


class Templates:
    """Renders chats by a model's templates."""

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._places = asyncio.Semaphore(NUM_PROCESSES)
        self._places_of_tenants = TenantPlaces(NUM_PROCESSES)
        self._idle = [_Process(source) for _ in range(NUM_PROCESSES)]

    async def start(self) -> None:
        """Compile the templates, if the model has some. Raises ValueError if they can't be compiled."""
        if self.source.by_name:
            await self._idle[-1].start()

    async def close(self) -> None:
        """End the processes."""
        for process in self._idle:
            await process.close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        further: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> str:
        """Return the text of a chat. Raises TemplateRefused. Chats of a tenant wait for one another first.

        further are values that the template gets by name, none of which is in RESERVED. With continue_final_message the
        last message has a string as its content, and there is no generation prompt.
        """
        values = {
            "documents": None,
            **(further or {}),
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = self.source.choose(has_tools=bool(tools))
        answer = await self._ask({"template": name, "values": values, "continues": continue_final_message}, tenant)
        if "error" in answer:
            raise TemplateRefused(f"the chat template can't be rendered: {answer['error']}")
        return answer["text"]

    async def _ask(self, request: Mapping[str, Any], tenant: str) -> dict[str, str]:
        async with AsyncExitStack() as places:
            await places.enter_async_context(self._places_of_tenants.place(tenant))
            await places.enter_async_context(self._places)
            # If a caller disconnects, the process finishes its answer: else the next caller would read it.
            return await asyncio.shield(asyncio.create_task(self._ask_idle(request, places.pop_all())))

    async def _ask_idle(self, request: Mapping[str, Any], places: AsyncExitStack) -> dict[str, str]:
        async with places:
            process = self._idle.pop()
            try:
                # A process that fails on a chat fails again; one that was killed from outside does not.
                answer = await process.ask(request) or await process.ask(request)
                return answer or {"error": "it takes too much memory or stack"}
            finally:
                self._idle.append(process)
