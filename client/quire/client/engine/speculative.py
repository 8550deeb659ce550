"""The configuration of drafts: guesses at next tokens, which the worker verifies in one step. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from quire.client.errors import InvalidRequest

METHODS = ("ngram", "suffix")
MAX_DRAFTS = 64
_MAX_LOOKUP = 32
_LOOKUP_MIN = 3
_LOOKUP_MAX = 8


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How the engine drafts. Raises InvalidRequest naming field, value and limit if one is out of range.

    The names are those of vLLM's --speculative-config.

    method                   "ngram": what followed the last tokens earlier in the same sequence. "suffix": that, or
                             what followed them in recent answers of the same tenant
    num_speculative_tokens   the most drafts of a sequence in a step, 1 to 64. The engine learns how many pay
    prompt_lookup_min        the fewest last tokens that must have occurred before, 1 to 32
    adaptive                 drafts are as many as pay, by what came true and what steps take; False: as many as may be
    prompt_lookup_max        of several places the one that agrees in the most last tokens is taken, up to this many
    """

    method: str = "ngram"
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = _LOOKUP_MIN
    prompt_lookup_max: int = _LOOKUP_MAX
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidRequest.of_field("speculative_config.method", self.method, f"one of {', '.join(METHODS)}")
        if not isinstance(self.adaptive, bool):
            raise InvalidRequest.of_field("speculative_config.adaptive", self.adaptive, "a bool")
        self._check("num_speculative_tokens", 1, MAX_DRAFTS)
        self._check("prompt_lookup_min", 1, _MAX_LOOKUP)
        self._check("prompt_lookup_max", self.prompt_lookup_min, _MAX_LOOKUP)

    def _check(self, name: str, low: int, high: int) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            limit = f"an integer from {low} to {high}"
            raise InvalidRequest.of_field(f"speculative_config.{name}", value, limit)

    @classmethod
    def of_json(cls, text: str) -> "SpeculativeConfig":
        """Return the configuration that a JSON object has. Raises InvalidRequest."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidRequest.of_field("speculative_config", text, f"a JSON object ({error})") from error
        if not isinstance(given, dict):
            raise InvalidRequest.of_field("speculative_config", text, "a JSON object")
        return cls.of_fields(given)

    @classmethod
    def of_fields(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """Return the configuration with these fields. A bound of the lookup that is left out gives way to the other.

        Raises InvalidRequest for a field that there is not.
        """
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                limit = f"a field of the configuration: {', '.join(names)}"
                raise InvalidRequest.of_field("speculative_config", name, limit)
        values = dict(given)
        low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        if high is None and isinstance(low, int):
            values["prompt_lookup_max"] = max(low, _LOOKUP_MAX)
        if low is None and isinstance(high, int):
            values["prompt_lookup_min"] = min(high, _LOOKUP_MIN)
        return cls(**values)
