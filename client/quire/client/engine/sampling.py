"""The choice of tokens and the end of a sample: the parameters of a request. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from quire.client.engine.grammar import Grammar
from quire.client.errors import InvalidRequest
from quire.compute.v1.sampling_ranges import (
    LOGIT_BIAS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    RANGES,
    Range,
)

MAX_SAMPLES = 1024
MAX_STOP_STRINGS = 64
MAX_TENANT_LENGTH = 128
MAX_TIMEOUT_S = 7 * 24 * 3600
_INT32 = (-(2**31), 2**31 - 1)
_INT64 = (-(2**63), 2**63 - 1)
_OPTIONAL_INTEGERS = {
    "max_tokens": (1, _INT32[1]),
    "seed": _INT64,
    "logprobs": (0, _INT32[1]),
    "prompt_logprobs": (0, _INT32[1]),
}
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "speculative")
# The parameters that are the contract's fields of the same name.
_RANGED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

BadWord = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and how many.

    Raises InvalidRequest naming field, value and limit if one is out of range. Floats are checked as
    the worker gets them, in float32: 1e-46 is 0.

    max_tokens           most tokens to generate, at least 1; None: as many as the model and the pool hold
    temperature          at least 0; 0: always the most probable token
    top_k                only the k most probable tokens; 0: all
    top_p                only the most probable tokens, up to this sum of probabilities, above 0, up to 1
    min_p                only tokens at least this times as probable as the most probable one, 0 to 1
    repetition_penalty   divides the logits of tokens that occurred, above 0; 1: none
    presence_penalty     taken from the logits of tokens that were generated, -2 to 2; 0: none
    frequency_penalty    taken from a token's logit once for each time that it was generated, -2 to 2; 0: none
    logit_bias           a mapping of at most 1,024 tokens to a number added to their logits, -100 to 100
    allowed_token_ids    the only tokens that can be chosen; None: all
    bad_words            texts, or sequences of token ids, that are not generated, at most 1,024. A text counts with and
                         without a space before it, as two sequences if its tokens differ, of at most 16 tokens each
    min_tokens           a sample does not end before it has so many tokens: at no end or stop token, which are not
                         chosen, and at no stop string that ends before. At most max_tokens
    seed                 fixes the random numbers that choose the tokens; None: a random seed. The tokens can still
                         differ, as the logits depend on the batch by rounding: docs/reference/scheduling.md, Seeds.
                         They don't with a worker that runs with --deterministic
    stop                 strings at which a sample ends; not part of its text. One string is taken as a tuple of one
    include_stop_str_in_output    they are part of its text, and so is the token at which it ends
    stop_token_ids       tokens of the model's vocabulary at which a sample ends, beside the model's own end tokens
    ignore_eos           do not end at the model's end tokens
    skip_special_tokens  leave special tokens out of the text
    kept_special_tokens  those that are part of the text nevertheless
    logprobs             most probable tokens to report per token, beside the one chosen: 0 (that one only) to the
                         worker's max_logprob_count; None: none
    grammar              the form of the text; None: any. The sample ends with the text, or at max_tokens
                         before it is complete. Not with ignore_eos
    prompt_logprobs      as logprobs, for each token of the prompt but the first. Nothing of the prompt is taken
                         from the prefix cache then; None: none
    n                    samples of the prompt, 1 to 1024; sample i has seed + i
    best_of              samples to generate, n to 1024, of which the n with the highest log-probability per token are
                         given out, when all have ended; None: n
    priority             an engine serves its requests of a higher one first, -2^31 to 2^31 - 1; changes no token
    tenant               an engine divides its steps fairly between the tenants of equal priority, up to 128 characters
    timeout_s            seconds after which open samples end with their tokens so far, for the reason TIMEOUT; above 0,
                         up to 604800; None: no limit
    speculative          its tokens may be guessed ahead, if the engine does that; changes no token, except by rounding
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[BadWord, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    speculative: bool = True

    def __post_init__(self) -> None:
        checked = {
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "kept_special_tokens": _token_ids("kept_special_tokens", self.kept_special_tokens),
            "logit_bias": _biases(self.logit_bias),
            "bad_words": _bad_words(self.bad_words),
            "min_tokens": checked_integer("min_tokens", self.min_tokens, 0, _INT32[1]),
            "n": checked_integer("n", self.n, 1, MAX_SAMPLES),
            "priority": checked_integer("priority", self.priority, *_INT32),
            "timeout_s": _timeout(self.timeout_s),
            **{field: _in_range(field, getattr(self, field)) for field in _RANGED},
        }
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not checked["allowed_token_ids"]:
                raise InvalidRequest.of_field("allowed_token_ids", "no tokens", "at least 1 token, or None for all")
        for field, (low, high) in _OPTIONAL_INTEGERS.items():
            value = getattr(self, field)
            checked[field] = None if value is None else checked_integer(field, value, low, high)
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        if self.best_of is not None:
            object.__setattr__(self, "best_of", checked_integer("best_of", self.best_of, self.n, MAX_SAMPLES))
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_LENGTH:
            raise InvalidRequest.of_field("tenant", self.tenant, f"a string of up to {MAX_TENANT_LENGTH} characters")
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequest.of_field(field, getattr(self, field), "a bool")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest.of_field("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidRequest.of_field("grammar", self.grammar, "a Grammar")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest.of_field("ignore_eos", True, "False with a grammar: its text ends at an end token")
        if self.grammar is not None and (self.min_tokens or self.allowed_token_ids is not None or self.bad_words):
            limit = "None beside min_tokens, allowed_token_ids or bad_words, which could leave no token to choose"
            raise InvalidRequest.of_field("grammar", "a Grammar", limit)

    @property
    def has_penalty(self) -> bool:
        """True if a token's logit depends on the tokens before it, beyond the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def num_sent_ids(self) -> int:
        """Token ids, and numbers of their size, in the parameters for a worker, those of the prompt left out."""
        ends = len(self.stop_token_ids) if self.min_tokens else 0
        words = sum(1 + len(word) for word in self.bad_words)
        letters = 0 if self.grammar is None else self.grammar.num_letters
        return len(self.allowed_token_ids or ()) + 3 * len(self.logit_bias) + words + ends + letters

    def token_ids_by_field(self) -> Iterator[tuple[str, Collection[int]]]:
        """The token ids of each field that has some."""
        yield from (("bad_words", word) for word in self.bad_word_ids)
        fields = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": list(dict(self.logit_bias)),
        }
        yield from ((field, token_ids) for field, token_ids in fields.items() if token_ids)

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """The bad words that are token ids: all of them, once the engine has encoded the texts."""
        return tuple(word for word in self.bad_words if not isinstance(word, str))


def checked_integer(field: str, value: Any, low: int, high: int) -> int:
    """Return an integer in this range. Raises InvalidRequest."""
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidRequest.of_field(field, value, f"an integer from {low} to {high}")
    return int(value)


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= MAX_TIMEOUT_S:
        raise InvalidRequest.of_field("timeout_s", value, f"a number above 0, up to {MAX_TIMEOUT_S}, or None")
    return float(value)


def _in_range(field: str, value: Any) -> float:
    return _number(field, value, RANGES[field])


def _number(field: str, value: Any, allowed: Range) -> float:
    if type(value) is float and allowed.is_float and allowed.allows(value):
        return value
    kind, name = (Real, "a number") if allowed.is_float else (Integral, "an integer")
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not allowed.allows(value):
        raise InvalidRequest.of_field(field, value, f"{name} in {allowed.text}")
    return float(value) if allowed.is_float else int(value)


def _strings(field: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable):
        raise InvalidRequest.of_field(field, value, "a string or several")
    strings = tuple(strings)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest.of_field(field, len(strings), f"at most {MAX_STOP_STRINGS} strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest.of_field(field, string, "a string that is not empty")
    return strings


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest.of_field(field, value, "several token ids")
    return tuple(checked_integer(field, token_id, 0, _INT32[1]) for token_id in value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Tokens with their biases, by token: a mapping can be changed, and has no hash."""
    limit = "a mapping of token ids to numbers"
    if not isinstance(value, Mapping):
        if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            raise InvalidRequest.of_field("logit_bias", value, limit)
        value = dict[Any, Any](value)
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequest.of_field("logit_bias", f"{len(value)} tokens", f"at most {MAX_LOGIT_BIASES} tokens")
    checked = {
        checked_integer("logit_bias", token_id, 0, _INT32[1]): _number("logit_bias", bias, LOGIT_BIAS)
        for token_id, bias in value.items()
    }
    return tuple(sorted(checked.items()))


def _bad_words(value: Any) -> tuple[BadWord, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest.of_field("bad_words", value, "several texts or sequences of token ids")
    words = tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in value)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest.of_field("bad_words", f"{len(words)} sequences", f"at most {MAX_BAD_WORDS} sequences")
    for word in words:
        if not word:
            raise InvalidRequest.of_field("bad_words", word, "a text or a sequence of token ids that is not empty")
        if not isinstance(word, str) and len(word) > MAX_BAD_WORD_TOKENS:
            limit = f"at most {MAX_BAD_WORD_TOKENS} tokens each"
            raise InvalidRequest.of_field("bad_words", f"{len(word)} tokens", limit)
    return words
