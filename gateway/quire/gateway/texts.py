"""Texts and token ids of requests."""

import asyncio
from collections.abc import Sequence

from quire.client.engine.tokenizer import Tokenizer
from quire.gateway.errors import invalid

LONG_TEXT = 4096
"""Characters, or tokens. The tokenizer runs on a thread for longer texts, so that the event loop is not blocked."""


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the text's tokens."""
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def encode_field(
    path: str, text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the tokens of a field's text. Raises HttpError if there is no tokenizer."""
    if tokenizer is None:
        raise invalid(path, "text", "token ids, since there is no tokenizer")
    return await encode_text(tokenizer, text, add_special_tokens=add_special_tokens)


async def decode_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the tokens' text."""
    if len(token_ids) <= LONG_TEXT:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
