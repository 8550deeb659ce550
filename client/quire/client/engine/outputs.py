"""The chunks that callers get, and how a sample's tokens become text. Pure except for the given tokenizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from quire.client.engine.caching import CacheOutcome
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
    cache_outcome  what the prompt found in the prefix cache, with the same chunk; None in the others
    stop_string    the stop string that ended the sample, with finish_reason; None if something else did, and of best_of
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cache_outcome: CacheOutcome | None = None
    stop_string: str | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Return the tokens of the prompt that were found in the prefix cache; None if it has no cache_outcome."""
        return None if self.cache_outcome is None else self.cache_outcome.num_cached_tokens


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
    """All samples of one prompt, by index; prompt_logprobs as in Chunk, cache_outcome None if nothing was computed."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    prompt_logprobs: PromptLogprobs | None = None
    cache_outcome: CacheOutcome | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Return the tokens of the prompt that were found in the prefix cache."""
        return 0 if self.cache_outcome is None else self.cache_outcome.num_cached_tokens

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
        self.has_stop = bool(stop) and detokenizer is not None
        self._stop = StopStrings(stop, keep=keep_stop)
        self._keep_stop = keep_stop
        self._num_left_before_stop = min_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ends the sample here; None if there is none."""
        return self._stop.matched

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> str:
        """Take tokens; returns new text. The token that a sample stops at has none, but with keep_stop.

        The reason is that of the last token. Raises whatever the tokenizer raises.
        """
        if self._detokenizer is None:
            return ""
        if finish_reason is FinishReason.STOP and not self._keep_stop:
            token_ids = token_ids[:-1]
        if self.has_stop:
            text = "".join(map(self._push_one, token_ids))
        else:
            text = self._detokenizer.push(token_ids)
        return text if finish_reason is None else text + self.flush()

    def _push_one(self, token_id: int) -> str:
        """Return the text that one token adds, up to a stop string."""
        assert self._detokenizer is not None
        text = self._stop.push(self._detokenizer.push((token_id,)), is_exempt=self._num_left_before_stop > 0)
        self._num_left_before_stop = max(0, self._num_left_before_stop - 1)
        return text

    def takes_long(self, num_tokens: int) -> bool:
        """Return whether push takes longer than 1 ms for so many tokens."""
        return self._detokenizer is not None and num_tokens > self._detokenizer.tokens_per_ms

    def flush(self) -> str:
        """Return the text that was held back, since the sample has ended."""
        if self._detokenizer is None:
            return ""
        rest = self._stop.push(self._detokenizer.flush(), is_exempt=self._num_left_before_stop > 0)
        return rest + self._stop.flush()


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
            cache_outcome=None if index else completion.cache_outcome,
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
    cache_outcome: CacheOutcome | None = None
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
        prompt_logprobs = prompt_logprobs or chunk.prompt_logprobs
        cache_outcome = cache_outcome or chunk.cache_outcome
    each = tuple(_sample(index, samples[index]) for index in sorted(samples))
    return Completion(tuple(prompt_token_ids), each, prompt_logprobs, cache_outcome)


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
