"""Parts of the answers of several endpoints: tokens used, log-probabilities, ids of calls."""

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.gateway.texts import TokenTexts

_CALL_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class TokenUsage:
    """Tokens of a request, counted as its chunks come."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def count(self, chunk: Chunk, *, generates: bool = True) -> None:
        """Count a chunk's. generates False: the chunk's tokens are not shown, and not counted."""
        self.num_cached_tokens += chunk.num_cached_tokens or 0
        self.num_generated_tokens += len(chunk.token_ids) if generates else 0

    @property
    def body(self) -> dict[str, Any]:
        """Return the `usage` object of completions and chat completions."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def call_id() -> str:
    """Return a new id of a call: nine letters and digits, which is all that Mistral's templates take."""
    return "".join(secrets.choice(_CALL_ID_LETTERS) for _ in range(9))


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


def logprob_entries(entries: Iterable[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return log-probabilities of tokens as chat completions and responses have them."""
    return [
        {
            **_logprob(entry.token_id, entry.logprob, texts),
            "top_logprobs": [_logprob(token_id, logprob, texts) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _logprob(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text = texts.of(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
