"""The chunks that callers get, and how a sample's tokens become text. Pure except for the given tokenizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.engine.tokenizer import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Chunk:
    """New content of one sample.

    index          the sample, 0 to n - 1
    text           may lag behind token_ids, while it ends within a character or may begin a stop string; complete
                   with finish_reason. Empty if the engine has no tokenizer
    token_ids      every token generated, each once, an end token included
    logprobs       parallel to token_ids; None if not asked for
    finish_reason  the reason why the sample ended; None if it continues
    prompt_logprobs    of the prompt's tokens, by position, None for the first one; with the request's first chunk
                       that has a token. None in the others, and if not asked for
    num_cached_tokens  tokens of the prompt that were found in the prefix cache, with the same chunk; None in the others
    stop_string    the stop string that ended the sample, with finish_reason; None if something else did, and of best_of
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, whole. Fields as in Chunk."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """All samples of one prompt, by index; prompt_logprobs as in Chunk, num_cached_tokens 0 if nothing was computed."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's tokens."""
        return self.samples[0].token_ids


@dataclass(frozen=True, slots=True)
class Beam:
    """One result of a beam search.

    score               the order of beams: cumulative_logprob, divided by the number of token_ids to the power of
                        length_penalty
    cumulative_logprob  the sum of the log-probabilities of the tokens
    token_ids           all generated tokens, with the end token
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamCompletion:
    """The n best beams of one prompt, the best first."""

    prompt_token_ids: tuple[int, ...]
    beams: tuple[Beam, ...]

    @property
    def text(self) -> str:
        """Return the text of the best beam."""
        return self.beams[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of the best beam."""
        return self.beams[0].token_ids


class SampleText:
    """The text of one sample while it grows."""

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop: tuple[str, ...],
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Without a detokenizer there is no text.

        With keep_stop, the stop string or token belongs to the text. No stop string is met that ends within the first
        min_tokens tokens.
        """
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop, keep=keep_stop)
        self._keep_stop = keep_stop
        self._num_left_before_stop = min_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ends the sample here; None if there is none."""
        return self._stop.matched

    def push(self, token_id: int, finish_reason: FinishReason | None) -> str:
        """Take a token; returns new text. The token that a sample stops at has none, but with keep_stop."""
        if self._detokenizer is None:
            return ""
        token_ids = () if finish_reason is FinishReason.STOP and not self._keep_stop else (token_id,)
        text = self._stop.push(self._detokenizer.push(token_ids), is_exempt=self._num_left_before_stop > 0)
        self._num_left_before_stop = max(0, self._num_left_before_stop - 1)
        return text if finish_reason is None else text + self.flush()

    def whole(self, token_ids: Sequence[int], finish_reason: FinishReason) -> str:
        """Return the text of all tokens of a sample that has ended, when none was taken before."""
        last = len(token_ids) - 1
        pieces = [self.push(each, finish_reason if i == last else None) for i, each in enumerate(token_ids)]
        return "".join(pieces)

    def flush(self) -> str:
        """Return the text that was held back, since the sample has ended."""
        if self._detokenizer is None:
            return ""
        rest = self._stop.push(self._detokenizer.flush(), is_exempt=self._num_left_before_stop > 0)
        return rest + self._stop.flush()


@dataclass(slots=True)
class _Unread:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None


class Mailbox:
    """Unread chunks of one request: at most one per sample, later ones are joined to it.

    So the unread content of a slow caller is bounded by its max_tokens, and by EngineConfig.max_unread_tokens.
    """

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self._unread: dict[int, _Unread] = {}
        self._of_prompt: dict[str, Any] = {}
        self.num_unread_tokens = 0

    def put_prompt(self, *, logprobs: PromptLogprobs | None, num_cached_tokens: int | None) -> None:
        """Add results for the prompt, to the first chunk that is taken next."""
        self._of_prompt = {"prompt_logprobs": logprobs, "num_cached_tokens": num_cached_tokens}

    def put(
        self,
        index: int,
        *,
        text: str,
        token_ids: Iterable[int],
        logprobs: Iterable[TokenLogprobs] = (),
        finish_reason: FinishReason | None,
        stop_string: str | None = None,
    ) -> None:
        """Add new content of a sample."""
        unread = self._unread.setdefault(index, _Unread())
        unread.text.append(text)
        self.num_unread_tokens -= len(unread.token_ids)
        unread.token_ids += token_ids
        self.num_unread_tokens += len(unread.token_ids)
        unread.logprobs += logprobs
        unread.finish_reason, unread.stop_string = finish_reason, stop_string

    def take(self) -> list[Chunk]:
        """All that is unread, by the order in which samples got it."""
        unread, self._unread = self._unread, {}
        self.num_unread_tokens = 0
        chunks = [
            Chunk(
                index=index,
                text="".join(parts.text),
                token_ids=tuple(parts.token_ids),
                logprobs=tuple(parts.logprobs) if self._has_logprobs else None,
                finish_reason=parts.finish_reason,
                stop_string=parts.stop_string,
            )
            for index, parts in unread.items()
        ]
        if chunks and self._of_prompt:
            chunks[0] = replace(chunks[0], **self._of_prompt)
            self._of_prompt = {}
        return chunks


def best_of(completion: Completion, count: int, *, has_logprobs: bool) -> list[Chunk]:
    """The samples with the highest log-probability per token as whole chunks, the best first, numbered from 0.

    The samples of the completion have log-probabilities, which are left out again without has_logprobs.
    """
    ranked = sorted(completion.samples, key=lambda sample: -_mean_logprob(sample))
    return [
        Chunk(
            index=index,
            text=sample.text,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs if has_logprobs else None,
            finish_reason=sample.finish_reason,
            prompt_logprobs=None if index else completion.prompt_logprobs,
            num_cached_tokens=None if index else completion.num_cached_tokens,
        )
        for index, sample in enumerate(ranked[:count])
    ]


def _mean_logprob(sample: Sample) -> float:
    logprobs = [entry.logprob for entry in sample.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -inf


def complete(prompt_token_ids: Iterable[int], chunks: Iterable[Chunk]) -> Completion:
    """All chunks of a request that has ended, put together. Raises ValueError if a sample has not ended."""
    samples: dict[int, list[Chunk]] = {}
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens = 0
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
        prompt_logprobs = prompt_logprobs or chunk.prompt_logprobs
        num_cached_tokens += chunk.num_cached_tokens or 0
    each = tuple(_sample(index, samples[index]) for index in sorted(samples))
    return Completion(tuple(prompt_token_ids), each, prompt_logprobs, num_cached_tokens)


def _sample(index: int, chunks: list[Chunk]) -> Sample:
    reason = chunks[-1].finish_reason
    if reason is None:
        raise ValueError(f"sample {index} has not ended")
    has_logprobs = chunks[0].logprobs is not None
    return Sample(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) if has_logprobs else None,
        finish_reason=reason,
    )
