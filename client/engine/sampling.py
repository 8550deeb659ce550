"""How tokens are chosen and when a sample ends: what a caller may ask for. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from quire.client.errors import InvalidRequest
from quire.compute.v1.sampling_ranges import RANGES

MAX_SAMPLES = 1024
MAX_STOP_STRINGS = 64
MAX_TENANT_LENGTH = 128
MAX_TIMEOUT_S = 7 * 24 * 3600
_INT32 = (-(2**31), 2**31 - 1)
_INT64 = (-(2**63), 2**63 - 1)
_OPTIONAL_INTEGERS = {"max_tokens": (1, _INT32[1]), "seed": _INT64, "logprobs": (0, _INT32[1])}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and how many.

    Raises InvalidRequest naming field, value and limit if one is out of range. Numbers with a fraction are checked as
    the worker gets them, in float32: 1e-46 is 0.

    max_tokens           most tokens to generate, at least 1; None: as many as the model and the pool hold
    temperature          at least 0; 0: always the most probable token
    top_k                only the k most probable tokens; 0: all
    top_p                only the most probable tokens whose probabilities add up to this, above 0, up to 1
    min_p                only tokens at least this times as probable as the most probable one, 0 to 1
    repetition_penalty   divides the logits of tokens that occurred, above 0; 1: none
    presence_penalty     taken from the logits of tokens that were generated, -2 to 2; 0: none
    seed                 fixes the random numbers that choose the tokens; None: others each time. The tokens can still
                         differ, as the logits depend on the batch by rounding: docs/architecture.md, Seeds
    stop                 strings at which a sample ends; not part of its text. One string is taken as a tuple of one
    stop_token_ids       tokens of the model's vocabulary at which a sample ends, beside the model's own end tokens
    ignore_eos           go on at the model's end tokens
    logprobs             most probable tokens to report per token, beside the one chosen: 0 (that one only) to the
                         worker's max_logprob_count; None: none
    n                    samples of the prompt, 1 to 1024; sample i has seed + i
    priority             an engine serves its requests of a higher one first, -2^31 to 2^31 - 1; changes no token
    tenant               an engine divides its steps fairly between the tenants of equal priority, up to 128 characters
    timeout_s            seconds after which open samples end with what they have, for the reason TIMEOUT; above 0,
                         up to 604800; None: no limit
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
    tenant: str = ""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        checked = {
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "n": _integer("n", self.n, 1, MAX_SAMPLES),
            "priority": _integer("priority", self.priority, *_INT32),
            "timeout_s": _timeout(self.timeout_s),
            **{field: _in_range(field, getattr(self, field)) for field in RANGES},
        }
        for field, (low, high) in _OPTIONAL_INTEGERS.items():
            value = getattr(self, field)
            checked[field] = None if value is None else _integer(field, value, low, high)
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_LENGTH:
            raise InvalidRequest.of_field("tenant", self.tenant, f"a string of up to {MAX_TENANT_LENGTH} characters")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest.of_field("ignore_eos", self.ignore_eos, "a bool")

    @property
    def has_penalty(self) -> bool:
        """True if choosing a token depends on the tokens before it beyond their logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0


def _integer(field: str, value: Any, low: int, high: int) -> int:
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
    allowed = RANGES[field]
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
    return tuple(_integer(field, token_id, 0, _INT32[1]) for token_id in value)
