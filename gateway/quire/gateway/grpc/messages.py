"""Messages of EngineService: decodes requests to the engine's parameters, and encodes its results. Pure.

Ranges are checked by SamplingParams, CacheParams and Grammar, which raise InvalidRequest. Only errors of the message
form are checked here: a oneof without a value, an unknown enum value, and unbounded lists.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from quire.cache.v1 import cache_service_pb2
from quire.cache.v1.admission_bounds import MAX_BREAKPOINTS, MAX_RANGES
from quire.client.engine.caching import Breakpoint, CacheOutcome, CacheParams, CacheUse, Miss, MissReason, Retention
from quire.client.engine.grammar import Grammar
from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.sampling import BadWord, SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.errors import InvalidRequest
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import MAX_BAD_WORDS
from quire.engine.v1 import engine_service_pb2
from quire.gateway.limits import MAX_TOKEN_IDS

Entry = TypeVar("Entry")

MAX_MESSAGE_TOKENS = 4_096
"""Tokens with their log-probabilities in one message of a stream: at most some 800 KiB."""

# Fields that SamplingParams and CacheParams have under the same name and with the same meaning; those of a message type
# and lists are read one by one.
_SCALARS = tuple(
    field
    for field in engine_service_pb2.GenerationParameters.DESCRIPTOR.fields
    if not field.is_repeated and field.message_type is None
)
_CACHE_USES = {
    cache_service_pb2.CACHE_USE_UNSPECIFIED: CacheUse.READ_AND_WRITE,
    cache_service_pb2.CACHE_USE_READ_AND_WRITE: CacheUse.READ_AND_WRITE,
    cache_service_pb2.CACHE_USE_WRITE_ONLY: CacheUse.WRITE_ONLY,
    cache_service_pb2.CACHE_USE_NONE: CacheUse.NONE,
}
_MISS_REASONS = {reason: cache_service_pb2.MissReason.Value(f"MISS_REASON_{reason.name}") for reason in MissReason}
_FINISH_REASONS = {
    None: engine_service_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: engine_service_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: engine_service_pb2.FINISH_REASON_LENGTH,
    FinishReason.TIMEOUT: engine_service_pb2.FINISH_REASON_TIMEOUT,
}


def decode_parameters(message: engine_service_pb2.GenerationParameters) -> SamplingParams:
    """The sampling parameters of a request. Raises InvalidRequest."""
    untyped: Any = message  # HasField takes the names of the fields alone
    values: dict[str, Any] = {
        field.name: getattr(message, field.name)
        for field in _SCALARS
        if not field.has_presence or untyped.HasField(field.name)
    }
    values.setdefault("max_tokens", None)
    if message.allowed_token_ids:
        values["allowed_token_ids"] = bounded("allowed_token_ids", message.allowed_token_ids, MAX_TOKEN_IDS, "tokens")
    if message.HasField("grammar"):
        values["grammar"] = _decode_grammar(message.grammar)
    if message.HasField("timeout"):
        values["timeout_s"] = _seconds(message.timeout)
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=bounded("stop_token_ids", message.stop_token_ids, MAX_TOKEN_IDS, "tokens"),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(map(_decode_bad_word, bounded("bad_words", message.bad_words, MAX_BAD_WORDS, "words"))),
        **values,
    )


def bounded(field: str, entries: Sequence[Entry], limit: int, what: str) -> tuple[Entry, ...]:
    """The entries of a list, which is not read if it is too long: a message has room for a million of them."""
    if len(entries) > limit:
        raise InvalidRequest.of_field(field, len(entries), f"at most {limit} {what}")
    return tuple(entries)


def _decode_bad_word(message: engine_service_pb2.BadWord) -> BadWord:
    kind = message.WhichOneof("word")
    if kind is None:
        raise InvalidRequest.of_field("bad_words", None, "a text or token_ids")
    return message.text if kind == "text" else tuple(message.token_ids.token_ids)


def _decode_grammar(message: worker_service_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("grammar")
    if kind is None:
        return Grammar()  # its error has the allowed values
    value = getattr(message, kind)
    given: dict[str, Any] = {kind: list(value.texts) if kind == "choice" else value}
    return Grammar(**given)


def decode_cache(message: engine_service_pb2.CacheParameters) -> CacheParams:
    """Return a request's use of the prefix cache. Raises InvalidRequest."""
    cache_use = _CACHE_USES.get(message.cache_use)
    if cache_use is None:
        raise InvalidRequest.of_field("cache_use", message.cache_use, "a value of quire.cache.v1.CacheUse")
    if message.not_expected and message.HasField("expected_in"):
        raise InvalidRequest.of_field("not_expected", True, "false, or expected_in unset")
    expected_s = _seconds(message.expected_in) if message.HasField("expected_in") else None
    return CacheParams(
        salt=message.salt,
        cache_use=cache_use,
        retention=tuple(map(_decode_retention, bounded("retention", message.retention, MAX_RANGES, "ranges"))),
        expected_back_s=math.inf if message.not_expected else expected_s,
        reserve=message.reserve,
        breakpoints=tuple(
            map(_decode_breakpoint, bounded("breakpoints", message.breakpoints, MAX_BREAKPOINTS, "breakpoints"))
        ),
        explain_miss=message.explains_miss,
    )


def _decode_retention(message: cache_service_pb2.Retention) -> Retention:
    ttl_s = _seconds(message.ttl) if message.HasField("ttl") else None
    return Retention(message.token_count, message.priority, ttl_s)


def _decode_breakpoint(message: cache_service_pb2.Breakpoint) -> Breakpoint:
    return Breakpoint(message.token_count, _seconds(message.ttl))


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def duration_of(seconds: float) -> Duration:
    """A time as a message."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def encode_logprobs(entries: Iterable[TokenLogprobs]) -> list[engine_service_pb2.TokenLogprobs]:
    """Log-probabilities of tokens as messages."""
    return [
        engine_service_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top_token_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in entries
    ]


def encode_prompt_logprobs(logprobs: PromptLogprobs) -> Iterator[engine_service_pb2.TokenLogprobs]:
    """Encode the log-probabilities of each token of a prompt except the first."""
    for entry in logprobs:
        if entry is not None:
            yield from encode_logprobs([entry])


def encode_finish_reason(reason: FinishReason | None) -> engine_service_pb2.FinishReason.ValueType:
    """The reason for the end of a sample; None: it continues."""
    return _FINISH_REASONS[reason]


def messages_of(chunk: Chunk) -> Iterator[engine_service_pb2.GenerateResponse]:
    """The messages of a chunk, one almost always: each has at most MAX_MESSAGE_TOKENS tokens. The last has the text."""
    if chunk.prompt_logprobs is not None:
        yield from _messages_of_prompt(chunk.prompt_logprobs)
    last = max(0, len(chunk.token_ids) - 1) // MAX_MESSAGE_TOKENS
    for number in range(last + 1):
        part = slice(number * MAX_MESSAGE_TOKENS, (number + 1) * MAX_MESSAGE_TOKENS)
        yield engine_service_pb2.GenerateResponse(
            chunk=engine_service_pb2.GenerationChunk(
                index=chunk.index,
                text=chunk.text if number == last else "",
                token_ids=chunk.token_ids[part],
                logprobs=encode_logprobs((chunk.logprobs or ())[part]),
                finish_reason=encode_finish_reason(chunk.finish_reason if number == last else None),
            )
        )


def _messages_of_prompt(logprobs: PromptLogprobs) -> Iterator[engine_service_pb2.GenerateResponse]:
    for first in range(1, len(logprobs), MAX_MESSAGE_TOKENS):
        entries = (entry for entry in logprobs[first : first + MAX_MESSAGE_TOKENS] if entry is not None)
        yield engine_service_pb2.GenerateResponse(
            prompt_logprobs=engine_service_pb2.PromptLogprobs(first_position=first, tokens=encode_logprobs(entries))
        )


def _encode_miss(miss: Miss) -> engine_service_pb2.CacheMiss:
    message = engine_service_pb2.CacheMiss(
        block_index=miss.block_index,
        reason=_MISS_REASONS[miss.reason],
        evicted_by_tenant=miss.evicted_by_tenant,
        reset_by=miss.reset_by,
    )
    if miss.lost_at_s is not None:
        message.lost_time.FromNanoseconds(round(miss.lost_at_s * 1e9))
    return message


@dataclass(slots=True)
class Tally:
    """The progress of a request. Times are of one clock, in seconds."""

    num_prompt_tokens: int
    began_s: float
    outcome: CacheOutcome | None = None
    num_generated_tokens: int = 0
    first_token_s: float | None = None

    def note(self, chunk: Chunk, now_s: float) -> None:
        """Count a chunk."""
        self.outcome = chunk.cache_outcome or self.outcome  # one chunk has it
        self.num_generated_tokens += len(chunk.token_ids)
        if self.first_token_s is None and chunk.token_ids:
            self.first_token_s = now_s

    def summary(self, now_s: float) -> engine_service_pb2.GenerationSummary:
        """All samples have ended now."""
        first_s, outcome = self.first_token_s, self.outcome or CacheOutcome()
        return engine_service_pb2.GenerationSummary(
            prompt_token_count=self.num_prompt_tokens,
            cached_token_count=outcome.num_cached_tokens,
            generated_token_count=self.num_generated_tokens,
            first_token_time=None if first_s is None else duration_of(first_s - self.began_s),
            total_time=duration_of(now_s - self.began_s),
            written_token_count=outcome.num_written_tokens,
            kept_token_count=outcome.num_kept_tokens,
            miss=None if outcome.miss is None else _encode_miss(outcome.miss),
        )
