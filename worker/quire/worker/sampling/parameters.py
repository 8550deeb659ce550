"""The sampling parameters of one sequence, and their ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from quire.compute.v1.sampling_ranges import RANGES
from quire.worker.sampling.constraints import Constraints

MAX_LOGPROBS = 20

TokenArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
TokenIds = Sequence[int] | TokenArray


class SamplingOutOfRange(ValueError):
    """A parameter is out of its range."""

    def __init__(self, field: str, value: float, limit: str) -> None:
        super().__init__(f"{field}={value} is not {limit}")
        self.field = field
        self.value = value
        self.limit = limit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The choice of one sequence's tokens. The defaults are greedy, and change nothing else.

    temperature             0 is greedy: the greatest logit, and no filter matters
    top_k                   0 keeps all; ties with the k-th are kept
    top_p                   keep the likeliest tokens until their probabilities reach p
    min_p                   keep tokens at least p times as likely as the likeliest
    repetition_penalty      divides positive logits of tokens in prompt or output, multiplies others
    presence_penalty        subtracted from logits of tokens seen in the output
    frequency_penalty       subtracted once for each time that the token was seen
    seed                    0 .. 2**63 - 1
    num_logprobs            0 .. 20 or None: how many of the likeliest tokens to report besides the chosen one; None: no
                            log-probabilities at all
    constraints             forbidden tokens, and biases of logits; None: none
    The ranges of the others are in sampling_ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None
    constraints: Constraints | None = None

    def validate(self) -> None:
        """Raises ValueError naming the first field that is out of its range, its value and the range."""
        for name in _LIMITED:
            allowed, limit = _LIMITS[name]
            value = getattr(self, name)
            if value is not None and not allowed(value):
                raise SamplingOutOfRange(name, value, limit)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: (allowed.allows, f"in {allowed.text}") for name, allowed in RANGES.items()},
    "seed": (lambda x: 0 <= x < 2**63, "in 0 .. 2**63 - 1"),
    "num_logprobs": (lambda x: 0 <= x <= MAX_LOGPROBS, f"in 0 .. {MAX_LOGPROBS}"),
}


_LIMITED = tuple(field.name for field in fields(SamplingParams) if field.name != "constraints")
