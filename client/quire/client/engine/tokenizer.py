"""Text to token ids and back: whole, and token by token while they are generated.

Both incremental parts hold undecided text back: the detokenizer an incomplete character, the stop string search the
possible beginning of a stop string.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from quire.client.engine.token_bytes import REPLACEMENT, Pieces, TokenBytes, Utf8Decoder, text_of
from quire.client.engine.token_lengths import max_token_characters
from quire.client.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

_FILE = "tokenizer.json"
# Tokens of the prompt that are decoded along with the first new ones: some decoders drop a leading space.
_CONTEXT_TOKENS = 6
# A character is at most 4 bytes, so text that is undecided for longer is not the beginning of one.
_MAX_UNDECIDED_TOKENS = 16


class Tokenizer:
    """A tokenizer.json."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw

    @classmethod
    def load(cls, source: str) -> Tokenizer:
        """Load it from a folder, a tokenizer.json, or a hub id. Blocks on files and the network.

        Raises OSError if there is none, ValueError if it can't be read.
        """
        path = Path(source)
        if path.is_dir():
            path = path / _FILE
        elif not path.is_file():
            path = _download(source)
        if not path.is_file():
            raise FileNotFoundError(f"no {_FILE} at {source}")
        from tokenizers import Tokenizer as RawTokenizer  # only here: without text no client needs it

        try:
            return cls(RawTokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is no tokenizer: {error}") from error

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The special tokens' ids by their texts."""
        added = self._raw.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens; with add_special_tokens also those that the tokenizer puts around a text.

        Raises InvalidRequest for a lone surrogate, which is no character and which UTF-8 can't encode.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of several texts, each as `encode` makes them. Other threads run meanwhile."""
        for text in texts:
            _check_characters(text)
        # `encode` would hold the interpreter's lock, and look for each token's place in the text.
        return [each.ids for each in self._raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def least_tokens(self, num_characters: int) -> int:
        """The tokens that a text of so many characters has at least; 0 if there is no such bound. Cost: none."""
        return -(-num_characters // self.max_token_characters) if self.max_token_characters else 0

    @cached_property
    def max_token_characters(self) -> int:
        """The most characters of a text that become one token; 0 if there is no such limit. The first call is slow."""
        return max_token_characters(self._raw, self.token_bytes)

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """The tokens of a text in parts, of which every second one is ordinary: no special token is found in it.

        Raises InvalidRequest for a lone surrogate, and if the vocabulary itself has a special token's text as a word.
        The first call makes a second tokenizer, which takes as long as loading one.
        """
        _check_characters("".join(parts))
        return self._ordinary.encode(parts)

    def encode_to_places(self, parts: Sequence[str], prefixes: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
        """The tokens as encode_parts makes them, and for each prefix of the parts the tokens that lie in it whole.

        A text in one part has special tokens where it writes them. Raises as encode_parts.
        """
        if len(parts) > 1:
            return self._ordinary.encode_to_places(parts, prefixes)
        _check_characters(parts[0])
        [encoding] = self._raw.encode_batch(parts, add_special_tokens=False)
        return encoding.ids, [_num_within(encoding.offsets, len(prefix[0])) for prefix in prefixes]

    @cached_property
    def _ordinary(self) -> _OrdinaryText:
        return _OrdinaryText(self._raw, self.special_tokens)

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of a text in the middle of another, without a space before it and with one, if these differ.

        Raises InvalidRequest for a lone surrogate.
        """
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest.of_field("bad_words", ascii(word), "texts without lone surrogates") from error
        texts = (word, " " + word.lstrip())
        encoded = (tuple(self._raw.encode(text, add_special_tokens=False).ids) for text in texts)
        return [token_ids for token_ids in dict.fromkeys(encoded) if token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The tokens' text. Other threads run meanwhile."""
        return self._raw.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self._raw)

    def token_text(self, token_id: int) -> str:
        r"""The text of one token within a text, special tokens' too; `bytes:\xf0\x9f` for a part of a character."""
        return text_of(self.token_bytes.of(token_id))

    def pieces(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        kept_special_tokens: Collection[int] = (),
    ) -> Pieces:
        """The bytes of the tokens that follow a prompt."""
        return Pieces(
            self.token_bytes, prompt_token_ids, left_out=self._left_out(skip_special_tokens, kept_special_tokens)
        )

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        kept_special_tokens: Collection[int] = (),
    ) -> Detokenizer:
        """For the tokens that follow a prompt. kept_special_tokens are part of the text, though others are skipped."""
        if self.token_bytes.is_exact:
            pieces = self.pieces(
                prompt_token_ids, skip_special_tokens=skip_special_tokens, kept_special_tokens=kept_special_tokens
            )
            return _ByteDetokenizer(pieces, self.token_bytes.decoder())
        left_out = self._left_out(skip_special_tokens, kept_special_tokens)
        return _WindowDetokenizer(partial(self._decode_without, left_out), prompt_token_ids)

    def _left_out(self, skip_special_tokens: bool, kept: Collection[int]) -> frozenset[int]:
        """The special tokens that have no part in a text."""
        return self.token_bytes.special_ids.difference(kept) if skip_special_tokens else frozenset()

    def _decode_without(self, left_out: frozenset[int], token_ids: Sequence[int]) -> str:
        shown = [each for each in token_ids if each not in left_out]
        return self._raw.decode(shown, skip_special_tokens=False)


def _download(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download  # only here: importing it takes long

    return Path(hf_hub_download(hub_id, _FILE))


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!a} at {error.start}"
        raise InvalidRequest.of_field("prompt", found, "text without lone surrogates") from error


def _num_within(offsets: Sequence[tuple[int, int]], num_chars: int) -> int:
    """Return the leading tokens that end within so many characters."""
    return next((index for index, (_, end) in enumerate(offsets) if end > num_chars), len(offsets))


class _OrdinaryText:
    """A tokenizer that finds no special tokens, but stand-ins for them: texts that no caller can know."""

    def __init__(self, raw: RawTokenizer, special_tokens: Mapping[str, int]) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as RawTokenizer

        self._raw = RawTokenizer.from_str(raw.to_str())
        self._raw.encode_special_tokens = True
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        nonce = secrets.token_hex(8)
        self._stand_ins = {text: f"<{nonce}:{index}>" for index, text in enumerate(longest_first)}
        stripping = {token.content: token for token in raw.get_added_tokens_decoder().values() if token.special}
        self._raw.add_tokens(
            [
                AddedToken(stand_in, lstrip=stripping[text].lstrip, rstrip=stripping[text].rstrip, normalized=False)
                for text, stand_in in self._stand_ins.items()
            ]
        )
        self._ids = {self._raw.token_to_id(self._stand_ins[text]): special_tokens[text] for text in longest_first}
        self._special_ids = frozenset(special_tokens.values())

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Return the tokens of texts, of which every second one is ordinary."""
        [encoding] = self._raw.encode_batch_fast([self._joined(parts)], add_special_tokens=False)
        return self._checked(encoding.ids, parts)

    def encode_to_places(self, parts: Sequence[str], prefixes: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
        """Return the tokens, and for each prefix of the parts those that lie in it whole."""
        _check_characters("".join(parts))
        [encoding] = self._raw.encode_batch([self._joined(parts)], add_special_tokens=False)
        counts = [_num_within(encoding.offsets, len(self._joined(prefix))) for prefix in prefixes]
        return self._checked(encoding.ids, parts), counts

    def _joined(self, parts: Sequence[str]) -> str:
        return "".join(
            part if index % 2 else self._pattern.sub(lambda found: self._stand_ins[found[0]], part)
            for index, part in enumerate(parts)
        )

    def _checked(self, token_ids: list[int], parts: Sequence[str]) -> list[int]:
        if not self._special_ids.isdisjoint(token_ids):
            found = next(each for each in parts[1::2] if self._pattern.search(each))
            raise InvalidRequest.of_field("prompt", found, "text that this tokenizer can write without special tokens")
        return [self._ids.get(each, each) for each in token_ids]


class Detokenizer(Protocol):
    """The text of one growing sequence, in pieces. A piece never ends in half a character.

    tokens_per_ms  so many, at least, that push takes in a millisecond
    """

    tokens_per_ms: ClassVar[int]

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens; return the text that is certain now."""

    def flush(self) -> str:
        """Return the rest of the text, once no more tokens come."""


class _ByteDetokenizer:
    """A detokenizer of tokens with bytes of their own. Cost per token: two look-ups, and decoding its bytes.

    The pieces together are what Tokenizer.decode gives for all tokens after the prompt, with two exceptions. At the end
    it replaces a character that is not complete by U+FFFD; here that character is left out. Of tokens that are bytes
    (SentencePiece's "<0xF0>") it replaces all that follow one another if one of them is wrong; here only the wrong ones
    are replaced.
    """

    tokens_per_ms: ClassVar[int] = 1_000

    def __init__(self, pieces: Pieces, decoder: Utf8Decoder) -> None:
        self._take = pieces.take
        self._decoder = decoder

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.push(b"".join(map(self._take, token_ids)))

    def flush(self) -> str:
        self._decoder.drop()
        return ""


class _WindowDetokenizer:
    """A detokenizer of tokens that have no bytes of their own. Cost per token: two decodes of a few tokens.

    The pieces together are what the tokenizer's decode gives for all tokens after the prompt, as far as the decoder
    looks at few tokens together. Text that ends in U+FFFD is undecided, for up to 16 tokens.
    """

    tokens_per_ms: ClassVar[int] = 20

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        if self._decode(self._token_ids).endswith(REPLACEMENT):
            self._token_ids.clear()
        # Text of [0, _num_read) is out; it is decoded again as the context of what follows.
        self._num_read = len(self._token_ids)
        self._context = self._decode(self._token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        num_undecided = len(self._token_ids) - self._num_read
        if text.endswith(REPLACEMENT) and num_undecided < _MAX_UNDECIDED_TOKENS:
            return ""
        piece = text[len(self._context) :]
        if piece or num_undecided >= _MAX_UNDECIDED_TOKENS:
            self._forget_read()
        return piece

    def _forget_read(self) -> None:
        """Make the undecided tokens the context of the next ones."""
        del self._token_ids[: self._num_read]
        self._num_read = len(self._token_ids)
        self._context = self._decode(self._token_ids)

    def flush(self) -> str:
        return self._decode(self._token_ids)[len(self._context) :]


class StopStrings:
    """Looks for stop strings in text that comes in pieces."""

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        """With keep, the stop string that is met belongs to the output."""
        self._stop = tuple(stop)
        self._keep = keep
        self._held = ""
        self._num_exempt = 0  # characters at the beginning of _held in which no stop string may end
        self.matched: str | None = None

    def push(self, text: str, *, is_exempt: bool = False) -> str:
        """Take text; returns what belongs to the output: up to the first place where a stop string begins.

        Once one is met, `matched` is set and nothing more is returned. One that ends within exempt text is not met;
        one that begins there and ends later is.
        """
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        num_exempt = len(text) if is_exempt else self._num_exempt
        found = min(
            ((at, stop) for stop in self._stop if (at := text.find(stop, max(0, num_exempt + 1 - len(stop)))) >= 0),
            default=None,
        )
        if found is not None:
            position, self.matched = found
            self._held = ""
            return text[: position + len(self.matched)] if self._keep else text[:position]
        num_out = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[num_out:]
        self._num_exempt = max(0, num_exempt - num_out)
        return text[:num_out]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string may begin with, the whole of it left out."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
