"""A request's use of the pool and its prefix cache. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from quire.cache.v1.admission_bounds import (
    ADAPTER_BYTES,
    LEAST_KEEP_S,
    LEAST_PRIORITY,
    MAX_BREAKPOINTS,
    MAX_EXPECTED_S,
    MAX_KEEP_S,
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
class Breakpoint:
    """The end of a prefix of a request's prompt that is kept in the cache. Raises InvalidRequest if out of range.

    num_tokens   the prefix; its full blocks are kept
    ttl_s        seconds after the last use, 1 to 86,400
    """

    num_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        _check_integer("breakpoints.num_tokens", self.num_tokens, 1, _MAX_INT32)
        if not (_is_number(self.ttl_s) and LEAST_KEEP_S <= self.ttl_s <= MAX_KEEP_S):
            limit = f"seconds from {LEAST_KEEP_S:g} to {MAX_KEEP_S:g}"
            raise InvalidRequest.of_field("breakpoints.ttl_s", self.ttl_s, limit)


class MissReason(Enum):
    """Why a block of a prompt was not in the prefix cache."""

    NEVER_COMPUTED = "never_computed"
    UNKNOWN = "unknown"  # Lost or never computed: cachemgr has forgotten losses.
    BEING_COMPUTED = "being_computed"
    EVICTED = "evicted"
    WINDOW_EVICTED = "window_evicted"  # Of a layer group with a window; the other groups have it.
    RESET = "reset"
    OTHER_SALT = "other_salt"
    OTHER_ADAPTER = "other_adapter"


@dataclass(frozen=True, slots=True)
class Miss:
    """The first block of a prompt that was not in the prefix cache, when the request was admitted.

    block_index        from 0
    lost_at_s          the Unix time of its eviction or reset; None if it was not lost
    evicted_by_tenant  the tenant of the allocation that evicted it, if that is the request's; else None
    reset_by           the caller that reset it, if that is the request's tenant; else None
    """

    block_index: int
    reason: MissReason
    lost_at_s: float | None = None
    evicted_by_tenant: str | None = None
    reset_by: str | None = None


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """The parts of a request's prompt that the prefix cache had, and that it has now, as the pool counts them.

    The prompt counts once, whatever the number of samples, preemptions and pools.

    num_cached_tokens    found
    num_written_tokens   computed in full blocks, which later requests find
    num_kept_tokens      kept because of its breakpoints; less than the last one if its tenant's limit is smaller
    miss                 if it was asked for with explain_miss, and not all full blocks were found
    pool, epoch          where
    """

    num_cached_tokens: int = 0
    num_written_tokens: int = 0
    num_kept_tokens: int = 0
    miss: Miss | None = None
    pool: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CacheParams:
    """One request's use of the pool and its prefix cache. Only `adapter` changes tokens, beyond rounding.

    Raises InvalidRequest naming field, value and limit if one is out of range.

    salt              separates prefixes: requests share blocks only if their salts are equal; up to 64 bytes
    cache_use         how it uses the prefix cache
    retention         eviction priorities of ranges of its tokens, at most 16; the first begins at token 0
    expected_back_s   seconds, up to 86,400, from its end until its tokens are needed again; math.inf: never; None:
    unknown
    reserve           it is admitted only if blocks for the prompt and max_tokens are guaranteed. Samples beyond the
                      first of a prompt are best effort
    breakpoints       prefixes of its prompt that are kept, at most 4, each longer than the one before it; not with NONE
    explain_miss      its first chunk says why no more of the prompt was found
    adapter           the identity of the adapter that computes it, one of Engine.adapters; it separates prefixes, too.
                      Empty: the base model
    """

    salt: bytes = b""
    cache_use: CacheUse = CacheUse.READ_AND_WRITE
    retention: tuple[Retention, ...] = ()
    expected_back_s: float | None = None
    reserve: bool = False
    breakpoints: tuple[Breakpoint, ...] = ()
    explain_miss: bool = False
    adapter: bytes = b""

    def __post_init__(self) -> None:
        if not isinstance(self.salt, bytes) or len(self.salt) > MAX_SALT_BYTES:
            raise InvalidRequest.of_field("salt", self.salt, f"at most {MAX_SALT_BYTES} bytes")
        if not isinstance(self.adapter, bytes) or len(self.adapter) not in (0, ADAPTER_BYTES):
            raise InvalidRequest.of_field("adapter", self.adapter, f"empty, or {ADAPTER_BYTES} bytes")
        if not isinstance(self.cache_use, CacheUse):
            raise InvalidRequest.of_field("cache_use", self.cache_use, "a CacheUse")
        object.__setattr__(self, "retention", _ranges(self.retention))
        back = self.expected_back_s
        if back is not None and not (_is_number(back) and (back == math.inf or 0 <= back <= MAX_EXPECTED_S)):
            limit = f"None, math.inf, or seconds from 0 to {MAX_EXPECTED_S:g}"
            raise InvalidRequest.of_field("expected_back_s", back, limit)
        for name in ("reserve", "explain_miss"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest.of_field(name, getattr(self, name), "a bool")
        object.__setattr__(self, "breakpoints", _breakpoints(self.breakpoints))
        if self.breakpoints and self.cache_use is CacheUse.NONE:
            raise InvalidRequest.of_field("breakpoints", len(self.breakpoints), "none, since cache_use is NONE")

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


def _breakpoints(value: Any) -> tuple[Breakpoint, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest.of_field("breakpoints", value, "several Breakpoint")
    breakpoints = tuple(value)
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise InvalidRequest.of_field("breakpoints", len(breakpoints), f"at most {MAX_BREAKPOINTS}")
    end = 0
    for each in breakpoints:
        if not isinstance(each, Breakpoint):
            raise InvalidRequest.of_field("breakpoints", each, "a Breakpoint")
        if each.num_tokens <= end:
            raise InvalidRequest.of_field("breakpoints.num_tokens", each.num_tokens, f"more than {end}, the one before")
        end = each.num_tokens
    return breakpoints


def _check_integer(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidRequest.of_field(field, value, f"an integer from {low} to {high}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


NO_CACHE_PARAMS = CacheParams()
