"""Ranges of the fields of SamplingParameters, word for word as the comments of worker_service.proto have them.

The client checks a request with them before it sends it, the worker checks what it gets. A test compares them with the
comments. No gRPC, no torch: both sides may import this.
"""

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Range:
    """An interval in the usual notation, "(0, 1]": the square bracket includes the bound, the round one does not."""

    text: str
    is_float: bool = True
    least: float = field(init=False)
    most: float = field(init=False)

    def __post_init__(self) -> None:
        """Read the bounds."""
        least, most = (float(bound) for bound in self.text[1:-1].split(","))
        object.__setattr__(self, "least", least)
        object.__setattr__(self, "most", most)

    def allows(self, value: float) -> bool:
        """Return whether a message can carry the value and the value that arrives is in the range. NaN is in no range.

        A field of type float carries float32, in which 1e-46 is 0 and 1e39 is infinite.
        """
        if self.is_float:
            value = _as_float32(value)
        if not self.least < value < self.most:
            return (value == self.least and self.text[0] == "[") or (value == self.most and self.text[-1] == "]")
        return True


def _as_float32(value: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return rounded


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range("[0, inf)"),
        "top_k": Range("[0, 2147483647]", is_float=False),
        "top_p": Range("(0, 1]"),
        "min_p": Range("[0, 1]"),
        "repetition_penalty": Range("(0, inf)"),
        "presence_penalty": Range("[-2, 2]"),
        "frequency_penalty": Range("[-2, 2]"),
        "min_sequence_token_count": Range("[0, 2147483647]", is_float=False),
    }
)

LOGIT_BIAS = Range("[-100, 100]")
"""Of each value of the field logit_bias."""
MAX_LOGIT_BIASES = 1_024
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_TOKENS = 16
MAX_CHOICES = 1_024
"""Texts of a grammar that is a choice."""
MAX_GRAMMAR_BYTES = 65_536


def leaves_token(
    vocabulary_size: int,
    *,
    allowed_token_ids: Collection[int],
    bad_words: Iterable[Collection[int]],
    end_token_ids: Collection[int],
) -> bool:
    """Return whether a token can be chosen; of bad words those of one token count. Empty allowed_token_ids: all are.

    end_token_ids are those that can't be chosen at first, none if they always can.
    """
    forbidden = {token_id for word in bad_words if len(word) == 1 for token_id in word} | set(end_token_ids)
    if allowed_token_ids:
        return not forbidden.issuperset(allowed_token_ids)
    return len(forbidden) < vocabulary_size
