"""Parts of the answers of several endpoints: tokens used, events of choices, log-probabilities, ids of calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.http.streams import DONE, encode_json, event_of
from quire.gateway.openai.parameters import StreamUsage
from quire.gateway.prompt_cache import CacheReport, Diagnosis, Divergence, kept_details
from quire.gateway.token_texts import PromptToken, SampleTokens, TokenTexts, id_text

_CALL_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class TokenUsage:
    """Tokens of a request, counted as its chunks come. The report of each of its prompts counts those of the cache."""

    num_prompt_tokens: int
    reports: Sequence[CacheReport]
    num_generated_tokens: int = 0

    def count(self, chunk: Chunk, *, generates: bool = True) -> None:
        """Count a chunk's. generates False: the chunk's tokens are not shown, and not counted."""
        self.num_generated_tokens += len(chunk.token_ids) if generates else 0

    @property
    def body(self) -> dict[str, Any]:
        """Return the `usage` object of completions and chat completions."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": self.prompt_details,
        }

    @property
    def prompt_details(self) -> dict[str, Any]:
        """Return what of the prompts was found in the prefix cache, written to it, and kept."""
        outcomes = [report.outcome for report in self.reports]
        found = {
            "cached_tokens": sum(outcome.num_cached_tokens for outcome in outcomes),
            "cache_write_tokens": sum(outcome.num_written_tokens for outcome in outcomes),
        }
        return found | kept_details(self.reports)


# Reasons that OpenAI has; it tells a system's message and the others as one input.
_REASONS = {
    Divergence.MODEL: "model_changed",
    Divergence.TOOLS: "tools_changed",
    Divergence.SYSTEM: "input_changed",
    Divergence.MESSAGES: "input_changed",
    Divergence.OTHER: "input_changed",
}


def diagnostics_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return `prompt_cache_diagnostics` as OpenAI has it. Under `quire` it has what only the cache's manager knows."""
    if diagnosis.divergence is Divergence.NONE:
        return {"type": "cache_hit"}
    if diagnosis.divergence is Divergence.NOT_FOUND:
        return {"type": "comparison_response_not_found"}
    found: dict[str, Any] = {"type": "unavailable"}
    if (reason := _REASONS.get(diagnosis.divergence)) is not None:
        found = {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": diagnosis.num_missed,
            "comparison_reusable_tokens": diagnosis.num_reusable,
        }
    return found | {"quire": diagnosis.detail}


class ChoiceEvents:
    """The events of a stream of choices, with the usage where it was asked for. Their common part is encoded once."""

    def __init__(self, head: Mapping[str, Any], asked: StreamUsage, usage: TokenUsage) -> None:
        """head has the fields before `choices`, at least one; usage counts while the stream goes on."""
        self._head = head
        self._asked = asked
        self._usage = usage
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._behind = (b'],"usage":null}' if asked.at_end else b"]}") + b"\n\n"

    def of(self, choice: Any) -> bytes:
        """Return the event of one choice."""
        if self._asked.in_each:
            return event_of({**self._head, "choices": [choice], "usage": self._usage.body})
        return self._before + encode_json(choice) + self._behind

    def last(self, diagnosis: Diagnosis | None) -> bytes:
        """Return the events behind those of the choices: the diagnosis, and the usage if it was asked for."""
        told = b""
        if diagnosis is not None:
            told = event_of({**self._head, "choices": [], "prompt_cache_diagnostics": diagnostics_of(diagnosis)})
        if not self._asked.at_end:
            return told + DONE
        return told + event_of({**self._head, "choices": [], "usage": self._usage.body}) + DONE


def call_id() -> str:
    """Return a new id of a call: nine letters and digits, which is all that Mistral's templates take."""
    return "".join(secrets.choice(_CALL_ID_LETTERS) for _ in range(9))


class CompletionLogprobs:
    """The `logprobs` object of one choice of a completion, in as many parts as its text comes in."""

    def __init__(self, texts: TokenTexts, tokens: SampleTokens) -> None:
        self._texts = texts
        self._tokens = tokens

    def part(
        self,
        entries: Iterable[TokenLogprobs],
        *,
        prompt: Iterable[tuple[PromptToken, TokenLogprobs | None]] = (),
        num_characters: int | None = None,
    ) -> dict[str, Any]:
        """Return the log-probabilities of a prompt's tokens and of the sample's next ones.

        num_characters is the length of the returned text, once that is known: positions end there.
        """
        rows = [self._of_prompt(token, entry) for token, entry in prompt] + [self._of(entry) for entry in entries]
        return {
            "tokens": [row.text for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [row.top for row in rows],
            "text_offset": [
                row.position if num_characters is None else min(row.position, num_characters) for row in rows
            ],
        }

    def _of_prompt(self, token: PromptToken, entry: TokenLogprobs | None) -> _Row:
        if entry is None:
            return _Row(token.text, None, None, token.position)
        is_bare = token.text != self._texts.of(token.token_id)  # without the space that its text would begin with
        text_of = self._bare_text_of if is_bare else self._texts.of
        return _Row(token.text, finite(entry.logprob), _top(entry, text_of), token.position)

    def _bare_text_of(self, token_id: int) -> str:
        return self._texts.of(token_id).removeprefix(" ")

    def _of(self, entry: TokenLogprobs) -> _Row:
        text, top = self._tokens.text_of(entry.token_id), _top(entry, self._tokens.text_of)
        return _Row(text, finite(entry.logprob), top, self._tokens.take(entry.token_id))


@dataclass(frozen=True, slots=True)
class _Row:
    """One token in the four lists of the object."""

    text: str
    logprob: float | None
    top: dict[str, float] | None
    position: int


def _top(entry: TokenLogprobs, text_of: Callable[[int], str]) -> dict[str, float]:
    """Return the most probable tokens by text, and the token itself. A text that another token has becomes its id."""
    own = text_of(entry.token_id)
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        text = text_of(token_id)
        if token_id != entry.token_id and (text == own or text in top):
            text = id_text(token_id)
        top.setdefault(text, finite(logprob))
    return top


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry: minus infinity becomes -9999, as OpenAI has it."""
    return max(logprob, -9999.0)


def prompt_logprobs_of(logprobs: Iterable[TokenLogprobs | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
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


def logprob_entries(chunk: Chunk, tokens: SampleTokens, params: SamplingParams) -> list[dict[str, Any]]:
    """Return a chunk's log-probabilities as chat completions and responses have them."""
    made = []
    for entry in chunk.logprobs or ():
        own = _logprob(entry.token_id, entry.logprob, tokens)
        made.append(own | {"top_logprobs": [_logprob(token_id, logprob, tokens) for token_id, logprob in entry.top]})
        tokens.take(entry.token_id)
    if made and _ends_without_text(chunk, tokens, params):
        made[-1]["bytes"] = []
    return made


def _logprob(token_id: int, logprob: float, tokens: SampleTokens) -> dict[str, Any]:
    return {
        "token": tokens.text_of(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokens.bytes_of(token_id)),
    }


def _ends_without_text(chunk: Chunk, tokens: SampleTokens, params: SamplingParams) -> bool:
    """Return whether the chunk ends with a token that the sample stopped at and that its text does not have."""
    if chunk.finish_reason is not FinishReason.STOP or params.include_stop_str_in_output or not chunk.token_ids:
        return False
    last = chunk.token_ids[-1]
    return not params.stop or last in params.stop_token_ids or tokens.is_special(last)
