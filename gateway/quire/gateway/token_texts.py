"""Tokens as log-probabilities show them: their texts, their bytes, and their positions in the returned text.

A token's text is what it adds to the returned text, so the texts of all tokens join to it. Two kinds of tokens are
exceptions: a part of a character is written by its bytes (`bytes:\\xf0\\x9f`), and a special token that is left out of
the text has its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from quire.client.engine.token_bytes import Pieces, TokenBytes, Utf8Decoder, text_of
from quire.client.engine.tokenizer import Tokenizer


class TokenTexts:
    """Texts of single tokens, each made once: at most one entry for each token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """The text of a token that has none, as without a tokenizer, is its id: "token_id:17"."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self.special_ids: frozenset[int] = frozenset() if tokenizer is None else tokenizer.token_bytes.special_ids

    def of(self, token_id: int) -> str:
        """Return the text of a token within a text, special tokens' too."""
        text = self._texts.get(token_id)
        if text is None:
            text = "" if self._tokenizer is None else self._tokenizer.token_text(token_id)
            text = self._texts[token_id] = text or id_text(token_id)
        return text

    def after(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, num_characters: int = 0
    ) -> SampleTokens:
        """Return the tokens of a sample of this prompt; num_characters are returned before its text."""
        if self._tokenizer is None:
            return SampleTokens(self, None, None, num_characters)
        pieces = self._tokenizer.pieces(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        return SampleTokens(self, pieces, self._tokenizer.token_bytes.decoder(), num_characters)

    def of_prompt(self, text: str, token_ids: Sequence[int]) -> list[PromptToken]:
        """Return the places of a prompt's tokens in its text."""
        if self._tokenizer is None:
            return [PromptToken(token_id, id_text(token_id), 0) for token_id in token_ids]
        return prompt_tokens(self._tokenizer.token_bytes, text, token_ids)


def id_text(token_id: int) -> str:
    """Return a text for a token that has none, or not one of its own."""
    return f"token_id:{token_id}"


class SampleTokens:
    """The tokens of one sample in order: their texts, bytes and positions."""

    def __init__(
        self, texts: TokenTexts, pieces: Pieces | None, decoder: Utf8Decoder | None, num_characters: int
    ) -> None:
        """num_characters are before the first token's text."""
        self._texts = texts
        self._pieces = pieces
        self._decoder = decoder
        self._position = num_characters

    def text_of(self, token_id: int) -> str:
        """Return a token's text if it were the next one; a special token's name if it is left out of the text."""
        if self._pieces is None or self._pieces.leaves_out(token_id):
            return self._texts.of(token_id)
        return text_of(self._pieces.next(token_id))

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token would add to the text as the next one."""
        return b"" if self._pieces is None else self._pieces.next(token_id)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a special one."""
        return token_id in self._texts.special_ids

    def take(self, token_id: int) -> int:
        """Take the next token; return the position of its first character, or of the one that it is a part of."""
        if self._pieces is None or self._decoder is None:
            return self._position
        added = self._pieces.take(token_id)
        position = self._position + self._decoder.num_broken_by(added)
        self._position += len(self._decoder.push(added))
        return position


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt: its text, and the position in the prompt's text, in characters."""

    token_id: int
    text: str
    position: int


def prompt_tokens(vocabulary: TokenBytes, text: str, token_ids: Sequence[int]) -> list[PromptToken]:
    """Return the tokens of a prompt's text.

    Tokens that the tokenizer puts around a text are not part of it, and neither is the space that SentencePiece puts
    before its first word and before one that follows a special token. Where the tokenizer has changed the text, a
    position is that in the tokens' own text, and at most the text's length.
    """
    encoded, num_read = text.encode(), 0
    decoder, position = vocabulary.decoder(), 0
    tokens: list[PromptToken] = []
    is_beginning = True
    for is_special, group in groupby(token_ids, vocabulary.special_ids.__contains__):
        members = list(group)
        if is_special:
            shown = [vocabulary.of(token_id) for token_id in members]
        else:
            shown = _as_in_text(vocabulary, encoded, num_read, members, is_beginning=is_beginning)
            is_beginning = False
        for token_id, raw in zip(members, shown, strict=True):
            at = min(position + decoder.num_broken_by(raw), len(text))
            tokens.append(PromptToken(token_id, text_of(raw), at))
            if is_special and not encoded.startswith(raw, num_read):
                continue
            position += len(decoder.push(raw))
            num_read += len(raw)
    return tokens


def _as_in_text(
    vocabulary: TokenBytes, encoded: bytes, begin: int, token_ids: Sequence[int], *, is_beginning: bool
) -> list[bytes]:
    """Return the bytes of tokens without a special one among them, as the text has them from `begin` on, if it does."""
    whole = [vocabulary.of(token_id) for token_id in token_ids]
    first = next((index for index, raw in enumerate(whole) if raw), 0)
    rest = whole[first + 1 :]
    bare = [*whole[:first], whole[first].removeprefix(b" "), *rest]
    candidates = [whole, bare]
    if is_beginning:
        candidates.insert(0, [*whole[:first], vocabulary.at_beginning(token_ids[first]), *rest])
    return next((each for each in candidates if encoded.startswith(b"".join(each), begin)), candidates[0])
