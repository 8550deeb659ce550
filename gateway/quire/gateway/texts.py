"""Texts and token ids: those of requests; those of single tokens in log-probabilities, with their offsets."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.tokenizer import Tokenizer

LONG_TEXT = 4096
"""Characters, or tokens. The tokenizer runs on a thread for longer texts, so that the event loop is not blocked."""


async def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the text's tokens."""
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def decoded(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the tokens' text."""
    if len(token_ids) <= LONG_TEXT:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)


class TokenTexts:
    """Texts of single tokens, each decoded once: at most one entry for each token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer a token's text is its id: "token_id:17"."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        """Return the text of a token, special tokens' too."""
        text = self._texts.get(token_id)
        if text is None:
            tokenizer = self._tokenizer
            text = (
                f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
            )
            self._texts[token_id] = text
        return text


class CompletionLogprobs:
    """The `logprobs` object of one choice of a completion, in as many parts as its text comes in."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def part(self, entries: Iterable[TokenLogprobs | None], token_ids: Iterable[int]) -> dict[str, Any]:
        """Return the next tokens' log-probabilities; None for a token that nothing comes before."""
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._texts.of(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            logprobs.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._top(entry))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most probable tokens by text, and the token itself; of equal texts the most probable one."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._texts.of(token_id), finite(logprob))
        return top


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry: minus infinity becomes -9999, as OpenAI has it."""
    return max(logprob, -9999.0)


def prompt_logprobs_of(logprobs: PromptLogprobs, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` as vLLM has it: for each token those of the most probable ones and its own, by id."""
    return [None if entry is None else _ranked(entry, texts) for entry in logprobs]


def _ranked(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    top: Sequence[tuple[int, float]] = entry.top
    ranked: dict[str, Any] = {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.of(token_id)}
        for rank, (token_id, logprob) in enumerate(top, start=1)
    }
    own = {"logprob": finite(entry.logprob), "rank": None, "decoded_token": texts.of(entry.token_id)}
    ranked.setdefault(str(entry.token_id), own)
    return ranked
