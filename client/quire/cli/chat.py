"""`quire chat`: a conversation in a terminal, through a gateway's chat completions."""

import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from quire.cli.render import printable

TIMEOUT_S = 300.0
"""Longest wait for the next piece of an answer."""
HELP = "/clear begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer."


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it comes: text, or what stands beside it (reasoning, a refusal)."""

    text: str
    is_aside: bool = False


class GatewayError(click.ClickException):
    """An answer of the gateway that is an error, or none at all."""


@dataclass
class Conversation:
    """Messages so far, and the settings of the next request.

    url      of the gateway, without /v1
    key      the API key; None: none is shown
    model    None: the first one that the gateway serves
    options  fields of the request beside the messages
    """

    url: str
    key: str | None = None
    model: str | None = None
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def choose_model(self) -> str:
        """Return the model that answers. Raises GatewayError."""
        if self.model is None:
            with self._open("/v1/models", None) as answer:
                models = json.load(answer)["data"]
            if not models:
                raise GatewayError(f"the gateway at {self.url} serves no model now")
            self.model = str(models[0]["id"])
        return self.model

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Yield the answer's pieces as they come. Then its text joins the messages, also after an interruption.

        Raises GatewayError; the question is forgotten if no text came.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                if not piece.is_aside:
                    pieces.append(piece.text)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[Piece]:
        body = {
            "model": self.choose_model(),
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        with self._open("/v1/chat/completions", body) as answer:
            for line in _lines(answer):
                if line == "[DONE]":
                    return
                chunk = json.loads(line)
                if "error" in chunk:
                    raise GatewayError(chunk["error"]["message"])
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk["choices"]:
                    yield from _pieces_of(choice["delta"])
        raise GatewayError("the answer broke off")

    @contextlib.contextmanager
    def _open(self, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise GatewayError(_message_of(error)) from None
        except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", None) or error
            raise GatewayError(f"no gateway answers at {self.url} ({cause}). `quire up` starts one.") from None


def _pieces_of(delta: dict[str, Any]) -> Iterator[Piece]:
    for name in ("reasoning_content", "refusal", "content"):
        if text := delta.get(name):
            yield Piece(str(text), is_aside=name != "content")


def _lines(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\r\n")


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the gateway answered {error.code} {error.reason}"


def run_chat(conversation: Conversation) -> None:
    """Ask and answer until the input ends. Raises GatewayError if the gateway is unavailable at the start."""
    with contextlib.suppress(ImportError):  # not everywhere; then lines are edited as the terminal does it
        import readline  # noqa: F401
    console = Console(highlight=False)
    model = conversation.choose_model()
    if sys.stdin.isatty():
        console.print(f"{model} at {conversation.url}. {HELP}", style="dim", markup=False)
    while (text := _read(console)) is not None:
        match text.strip():
            case "":
                continue
            case "/quit":
                return
            case "/clear":
                conversation.clear()
            case question if question.startswith("/"):
                console.print(HELP, style="dim", markup=False)
            case question:
                _show(console, conversation, question)


def _read(console: Console) -> str | None:
    """Return the next line; None at the end of the input."""
    try:
        return console.input("[bold cyan]> [/]" if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _print_pieces(console: Console, pieces: Iterator[Piece]) -> None:
    """Print an answer as it comes; what stands beside its text is dim, on lines of its own, and goes to stderr."""
    asides = Console(stderr=True, highlight=False)
    was_aside = False
    for piece in pieces:
        if was_aside and not piece.is_aside:
            asides.out("\n")
        target = asides if piece.is_aside else console
        target.out(printable(piece.text), end="", highlight=False, style="dim italic" if piece.is_aside else None)
        target.file.flush()
        was_aside = piece.is_aside
    if was_aside:
        asides.out()


def _show(console: Console, conversation: Conversation, question: str) -> None:
    is_terminal = sys.stdin.isatty()
    try:
        with contextlib.closing(conversation.ask(question)) as pieces:
            _print_pieces(console, pieces)
        console.print()
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        console.print()
        console.print("stopped", style="dim")
        return
    except GatewayError as error:
        if not is_terminal:
            raise
        console.print(f"\n{printable(error.message)}", style="red", markup=False)
        return
    if is_terminal and conversation.usage is not None:
        usage = conversation.usage
        details = usage.get("prompt_tokens_details") or {}
        cached, written = details.get("cached_tokens", 0), details.get("cache_write_tokens", 0)
        generated = usage["completion_tokens"]
        counts = (
            f"{usage['prompt_tokens']:,} prompt tokens, {cached:,} cached, {written:,} written; {generated:,} generated"
        )
        console.print(counts, style="dim")
