"""A request's use of the pool and its prefix cache. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from quire.cache.v1.admission_bounds import (
    LEAST_PRIORITY,
    MAX_EXPECTED_S,
    MAX_RANGES,
    MAX_RETENTION_S,
    MAX_SALT_BYTES,
    MOST_PRIORITY,
)
from quire.client.errors import InvalidRequest

_MAX_INT32 = 2**31 - 1


class CacheUse(Enum):
    """How a request uses the prefix cache."""

    READ_AND_WRITE = "read_and_write"  # Uses cached blocks, and publishes the blocks that it computes.
    WRITE_ONLY = "write_only"  # Computes every token, and publishes.
    NONE = "none"  # Takes nothing and publishes nothing.


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention of a range of a request's tokens. Raises InvalidRequest if a field is out of range.

    num_tokens   from the end of the range before it on; 0, in the last range only: all that follow, also generated ones
    priority     1 (evicted first) to 9 (kept longest); 5: as without advice
    ttl_s        its validity, up to 86,400; None: as long as the content is cached
    """

    num_tokens: int
    priority: int
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        _check_integer("retention.num_tokens", self.num_tokens, 0, _MAX_INT32)
        _check_integer("retention.priority", self.priority, LEAST_PRIORITY, MOST_PRIORITY)
        if self.ttl_s is not None and not (_is_number(self.ttl_s) and 1e-9 <= self.ttl_s <= MAX_RETENTION_S):
            limit = f"None, or seconds: more than 0, at most {MAX_RETENTION_S:g}"
            raise InvalidRequest.of_field("retention.ttl_s", self.ttl_s, limit)


@dataclass(frozen=True, slots=True)
class CacheParams:
    """One request's use of the pool and its prefix cache. It changes no token, except by rounding.

    Raises InvalidRequest naming field, value and limit if one is out of range.

    salt              separates prefixes: requests share blocks only if their salts are equal; up to 64 bytes
    cache_use         how it uses the prefix cache
    retention         eviction priorities of ranges of its tokens, at most 16; the first begins at token 0
    expected_back_s   seconds, up to 86,400, from its end until its tokens are needed again; math.inf: never; None:
    unknown
    reserve           it is admitted only if blocks for the prompt and max_tokens are guaranteed. Samples beyond the
                      first of a prompt are best effort
    """

    salt: bytes = b""
    cache_use: CacheUse = CacheUse.READ_AND_WRITE
    retention: tuple[Retention, ...] = ()
    expected_back_s: float | None = None
    reserve: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.salt, bytes) or len(self.salt) > MAX_SALT_BYTES:
            raise InvalidRequest.of_field("salt", self.salt, f"at most {MAX_SALT_BYTES} bytes")
        if not isinstance(self.cache_use, CacheUse):
            raise InvalidRequest.of_field("cache_use", self.cache_use, "a CacheUse")
        object.__setattr__(self, "retention", _ranges(self.retention))
        back = self.expected_back_s
        if back is not None and not (_is_number(back) and (back == math.inf or 0 <= back <= MAX_EXPECTED_S)):
            limit = f"None, math.inf, or seconds from 0 to {MAX_EXPECTED_S:g}"
            raise InvalidRequest.of_field("expected_back_s", back, limit)
        if not isinstance(self.reserve, bool):
            raise InvalidRequest.of_field("reserve", self.reserve, "a bool")

    @property
    def reads_cache(self) -> bool:
        """True if it uses cached blocks."""
        return self.cache_use is CacheUse.READ_AND_WRITE


def cache_params_of(cache: CacheParams | None) -> CacheParams:
    """The parameters given, or the default ones. Raises InvalidRequest for another type."""
    if cache is None:
        return NO_CACHE_PARAMS
    if not isinstance(cache, CacheParams):
        raise InvalidRequest.of_field("cache", type(cache).__name__, "CacheParams")
    return cache


def _ranges(value: Any) -> tuple[Retention, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest.of_field("retention", value, "several Retention")
    ranges = tuple(value)
    if len(ranges) > MAX_RANGES:
        raise InvalidRequest.of_field("retention", len(ranges), f"at most {MAX_RANGES} ranges")
    for index, each in enumerate(ranges):
        if not isinstance(each, Retention):
            raise InvalidRequest.of_field("retention", each, "a Retention")
        if not each.num_tokens and index < len(ranges) - 1:
            raise InvalidRequest.of_field("retention.num_tokens", 0, "at least 1 but in the last range")
    return ranges


def _check_integer(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidRequest.of_field(field, value, f"an integer from {low} to {high}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


NO_CACHE_PARAMS = CacheParams()
