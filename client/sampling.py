"""How tokens are chosen and when a sample ends: what a caller may ask for. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from quire.client.errors import InvalidRequest

MAX_SAMPLES = 1024
MAX_STOP_STRINGS = 64
_INT64 = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of the sampler. Raises InvalidRequest naming field, value and limit if one is out of range.

    max_tokens           most tokens to generate, at least 1; None: as many as the model and the pool hold
    temperature          0 (always the most probable token) to 100
    top_k                only the k most probable tokens; 0: all
    top_p                only the most probable tokens whose probabilities add up to this, above 0, up to 1
    min_p                only tokens at least this times as probable as the most probable one, 0 to 1
    repetition_penalty   divides the logits of tokens that occurred, above 0, up to 100; 1: none
    presence_penalty     taken from the logits of tokens that were generated, -100 to 100; 0: none
    seed                 fixes the random numbers that choose the tokens; None: others each time. The tokens can still
                         differ, as the logits depend on the batch by rounding: docs/architecture.md, Seeds
    stop                 strings at which a sample ends; not part of its text. One string is taken as a tuple of one
    stop_token_ids       tokens at which a sample ends, beside the model's own end tokens
    ignore_eos           go on at the model's end tokens
    logprobs             most probable tokens to report per token, beside the one chosen; 0: that one only; None: none
    n                    samples of the prompt, 1 to 1024; sample i has seed + i
    priority             an engine serves its requests of a higher one first, -2^31 to 2^31 - 1; changes no token
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, *_INT64)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 2**31 - 1)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        _check_real("temperature", self.temperature, 0, 100)
        _check_real("min_p", self.min_p, 0, 1)
        _check_real("presence_penalty", self.presence_penalty, -100, 100)
        _check_real("top_p", self.top_p, 0, 1, above=True)
        _check_real("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest.of_field("ignore_eos", self.ignore_eos, "a bool")

    @property
    def has_penalty(self) -> bool:
        """Whether choosing a token depends on the tokens before it beyond their logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0


def _check_int(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidRequest.of_field(field, value, f"an integer from {low} to {high}")


def _check_real(field: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    # NaN compares false with everything and so is refused.
    inside = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high
    if not inside or (above and value == low):
        raise InvalidRequest.of_field(field, value, f"a number {'above' if above else 'from'} {low} to {high}")


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
    token_ids = tuple(value)
    for token_id in token_ids:
        _check_int(field, token_id, 0, 2**31 - 1)
    return token_ids
