"""The raw bytes of a vocabulary's tokens. The UTF-8 of a text is the bytes of its tokens, one after the other.

A decoder of a tokenizer.json says how its tokens are written:

    ByteLevel                   each character stands for one byte
    Replace, ByteFallback, ...  SentencePiece's: "▁" is a space, and "<0xF0>" is a byte. A text begins without the space
    Metaspace                   before its first word, which the tokenizer has put there
    none                        tokens are words, with a space between two of them

Other decoders look at several tokens together, or change them in other ways. Their tokens' bytes are those of the text
that a token adds to another one. TokenBytes.is_exact is False then, and a text is made by the decoder itself.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

REPLACEMENT = "\ufffd"
_EACH_BYTE = "quire.replace_each_byte"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# One letter for each step of a sequence of decoders, and the sequences that leave each token bytes of its own.
_LETTERS = {"Replace": "R", "Metaspace": "M", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}
_SENTENCE_PIECE = re.compile("R*B?(FS?)?|MB?F?")


def text_of(raw: bytes) -> str:
    r"""Return a token's bytes as text. Those of a part of a character are written as OpenAI does: `bytes:\xf0\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if _is_plain(byte) else f"\\x{byte:02x}" for byte in raw)


def _is_plain(byte: int) -> bool:
    return 0x20 <= byte < 0x7F and byte != ord("\\")


class TokenBytes:
    """The bytes of each token. They are found when a token is first asked for: at most one entry per token."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        written = None if raw.decoder is None else json.loads(raw.decoder.__getstate__())
        writing = _writing_of(written)
        self.is_exact = writing is not None
        self._writing = writing or _Added(raw)
        self.special_ids = frozenset(
            token_id for token_id, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes within a text, those of a special token's name too; none of an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._raw.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._writing.of(token)
        return found

    def at_beginning(self, token_id: int) -> bytes:
        """Return a token's bytes at the beginning of a text."""
        token = self._raw.id_to_token(token_id)
        return b"" if token is None else self._writing.at_beginning(token)

    def decoder(self) -> Utf8Decoder:
        """Return a decoder for the bytes of one text."""
        return Utf8Decoder(replaces_each_byte=self._writing.replaces_each_byte)


class Pieces:
    """The bytes that each token of one growing text adds to it."""

    __slots__ = ("_bytes", "_is_beginning", "_left_out")

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_token_ids: Iterable[int] = (),
        *,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        """Take the tokens that follow a prompt. Special tokens in left_out are no part of the text."""
        self._bytes = token_bytes
        self._left_out = left_out
        self._is_beginning = all(map(self.leaves_out, prompt_token_ids))

    def next(self, token_id: int) -> bytes:
        """Return the bytes that a token would add now; none of a special token that is left out of the text."""
        if token_id in self._left_out:
            return b""
        return self._bytes.at_beginning(token_id) if self._is_beginning else self._bytes.of(token_id)

    def leaves_out(self, token_id: int) -> bool:
        """Return whether a token has no part in the text, wherever it is."""
        return token_id in self._left_out or not self._bytes.of(token_id)

    def take(self, token_id: int) -> bytes:
        """Add a token; return its bytes."""
        added = self.next(token_id)
        self._is_beginning = self._is_beginning and self.leaves_out(token_id)
        return added


class Utf8Decoder:
    """Bytes to text as they come. A character's first bytes are kept until the others have come.

    Bytes that are no character become U+FFFD, one for each sequence that could have begun a character, as Unicode
    recommends; or one for each byte, as SentencePiece does.
    """

    def __init__(self, *, replaces_each_byte: bool = False) -> None:
        self._replaces_each_byte = replaces_each_byte
        self._decoder = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE if replaces_each_byte else "replace")

    def push(self, raw: bytes) -> str:
        """Take bytes; return the text that is certain now."""
        return self._decoder.decode(raw)

    def num_broken_by(self, raw: bytes) -> int:
        """Return how many U+FFFD come of a character that has begun, if these bytes do not continue it."""
        begun, _ = self._decoder.getstate()
        if not begun or not raw or raw[0] & 0xC0 == 0x80:
            return 0
        return len(begun) if self._replaces_each_byte else 1

    def drop(self) -> None:
        """Forget a character that has begun: no more bytes come."""
        self._decoder.reset()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


# How tokens are written.


class _Writing(Protocol):
    """How a vocabulary writes its tokens."""

    @property
    def replaces_each_byte(self) -> bool: ...

    def of(self, token: str) -> bytes: ...

    def at_beginning(self, token: str) -> bytes: ...


def _writing_of(decoder: Mapping[str, Any] | None) -> _Writing | None:
    """Return how the tokens of a decoder are written; None if each token does not have bytes of its own."""
    if decoder is None:
        return _Words()
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevel()
    if not _SENTENCE_PIECE.fullmatch("".join(_LETTERS.get(step["type"], "?") for step in steps)):
        return None
    return _sentence_piece(steps)


def _sentence_piece(steps: Iterable[Mapping[str, Any]]) -> _SentencePiece | None:
    replaced: list[tuple[str, str]] = []
    has_bytes, stripped, dropped = False, "", ""
    for step in steps:
        if step["type"] == "Replace":
            if not step["pattern"].get("String"):
                return None
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
            dropped = "" if step["prepend_scheme"] == "never" else step["replacement"]
        elif step["type"] == "Strip":
            if step["start"] not in (0, 1) or step["stop"]:
                return None
            stripped = step["content"] * step["start"]
        else:
            has_bytes = has_bytes or step["type"] == "ByteFallback"
    return _SentencePiece(tuple(replaced), has_bytes, stripped.encode(), dropped)


@dataclass(frozen=True, slots=True)
class _Words:
    """Words with a space between them."""

    replaces_each_byte: bool = False

    def of(self, token: str) -> bytes:
        return f" {token}".encode()

    def at_beginning(self, token: str) -> bytes:
        return token.encode()


@dataclass(frozen=True, slots=True)
class _ByteLevel:
    """Each character of a token stands for one byte, as in GPT-2's vocabulary."""

    replaces_each_byte: bool = False

    def of(self, token: str) -> bytes:
        """Return the bytes. A token with another character, which was added to the vocabulary, is text."""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()

    at_beginning = of


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character: visible ones of Latin-1 stand for themselves, others follow from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class _SentencePiece:
    """Tokens of SentencePiece.

    replaced   texts within a token, and what they stand for
    has_bytes  a token like "<0xF0>" is a byte
    stripped   is taken once from the beginning of a text
    dropped    is left out of the first token of a text
    """

    replaced: tuple[tuple[str, str], ...]
    has_bytes: bool
    stripped: bytes
    dropped: str

    @property
    def replaces_each_byte(self) -> bool:
        return self.has_bytes

    def of(self, token: str) -> bytes:
        if self.has_bytes and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode()

    def at_beginning(self, token: str) -> bytes:
        if self.dropped:
            token = token.replace(self.dropped, "")
        return self.of(token).removeprefix(self.stripped)


class _Added:
    """The text that a token adds to another one, by the decoder itself. Parts of a character are U+FFFD."""

    replaces_each_byte = False

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        ids = range(raw.get_vocab_size())
        self._before = next((token_id for token_id in ids if self._decode([token_id]).isalnum()), None)

    def _decode(self, token_ids: list[int]) -> str:
        return self._raw.decode(token_ids, skip_special_tokens=False)

    def of(self, token: str) -> bytes:
        token_id = self._raw.token_to_id(token)
        if self._before is None or token_id is None:
            return self.at_beginning(token)
        before, both = self._decode([self._before]), self._decode([self._before, token_id])
        return both.removeprefix(before).encode()

    def at_beginning(self, token: str) -> bytes:
        token_id = self._raw.token_to_id(token)
        return b"" if token_id is None else self._decode([token_id]).encode()
