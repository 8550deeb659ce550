"""Limits by tenant: requests in flight, requests that wait for their first token, tokens a minute.

    [default]                     # each tenant without a section of its own
    max_requests = 64             # in flight at once, those that wait included
    max_queued = 32               # of these, without a first token
    tokens_per_minute = 100_000   # of prompts and of generated ones

    [tenants.alice]
    max_requests = 256
    priority = 1                  # added to the priority of its requests: served before lower ones
    weight = 3                    # its part of the steps among tenants of equal priority, default 1
    adapters = ["sql"]            # the adapters that it may use, default all; others do not exist for it

A missing key means no limit, even if [default] has the key. The file is read again when it changes.

Tokens a minute are a bucket of one minute's tokens, filled at that rate. A request reserves its prompt and
max_tokens, at most a full bucket, and returns the tokens that it did not use. So a request of any size is served once
the bucket is full, and the next one waits for the tokens that the last one took beyond it.
"""

import math
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from quire.client.engine.sampling import SamplingParams
from quire.client.errors import QuireError
from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError
from quire.serving.watched import FileError, WatchedFiles, read_bytes

_COUNTS = ("max_requests", "max_queued", "tokens_per_minute")
_MAX_COUNT = 2**31 - 1
_MAX_PRIORITY = 1_000_000
_MIN_WEIGHT, _MAX_WEIGHT = 0.001, 1000.0
_HEADER = re.compile(r"\s*\[\s*(?P<name>[^\]]+?)\s*\]")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant; None: no limit.

    max_requests        requests in flight at once, those that wait included, at least 1
    max_queued          of these, without a first token, at least 1
    tokens_per_minute   tokens of prompts and generated ones, at least 1
    priority            added to that of each request, -1,000,000 to 1,000,000
    weight              the tenant's part of an engine's steps, 0.001 to 1000
    adapters            names of the adapters that its requests can have; None: all
    """

    max_requests: int | None = None
    max_queued: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    weight: float = 1.0
    adapters: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class LimitsTable:
    """The limits of all tenants: `tenants` by name, and those of the others."""

    default: TenantLimits = TenantLimits()
    tenants: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, tenant: str) -> TenantLimits:
        """Return a tenant's limits."""
        return self.tenants.get(tenant, self.default)

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights that are not 1, for PriorityPolicy."""
        return {name: limits.weight for name, limits in self.tenants.items() if limits.weight != 1.0}


def read_limits(path: Path) -> LimitsTable:
    """Read a file of limits. Raises FileError, which names file, line, section and key."""
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError:
        raise FileError(f"{path}: not UTF-8") from None
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not TOML: {error}") from None
    try:
        return _table_of(content)
    except _WrongKey as wrong:
        raise FileError(f"{path}:{_line_of(text, wrong.section, wrong.key)}: {wrong}") from None


class _WrongKey(ValueError):
    def __init__(self, section: str, key: str, why: str) -> None:
        super().__init__(f"{section}.{key} {why}" if section else f"{key} {why}")
        self.section, self.key = section, key


def _table_of(content: Mapping[str, Any]) -> LimitsTable:
    for key in content:
        if key not in ("default", "tenants"):
            raise _WrongKey("", key, "is not known; must be default or tenants")
    default = _limits_of(content.get("default", {}), "default")
    if default.weight != 1.0:
        raise _WrongKey("default", "weight", "is for tenants by name: a tenant without a section has 1")
    sections = content.get("tenants", {})
    if not isinstance(sections, dict):
        raise _WrongKey("", "tenants", "must be sections, [tenants.NAME]")
    return LimitsTable(default, {name: _limits_of(each, f"tenants.{name}") for name, each in sections.items()})


def _limits_of(section: Any, where: str) -> TenantLimits:
    if not isinstance(section, dict):
        raise _WrongKey("", where, f"must be a section, [{where}]")
    known = (*_COUNTS, "priority", "weight", "adapters")
    for key, value in section.items():
        if key not in known:
            raise _WrongKey(where, key, f"is not known; must be one of {', '.join(known)}")
        if key == "weight":
            is_right = _is_number(value, int | float) and _MIN_WEIGHT <= value <= _MAX_WEIGHT
            limit = f"a number from {_MIN_WEIGHT} to {_MAX_WEIGHT:.0f}"
        elif key == "adapters":
            is_right = isinstance(value, list) and all(isinstance(name, str) for name in value)
            limit = "a list of names"
        else:
            low, high = (-_MAX_PRIORITY, _MAX_PRIORITY) if key == "priority" else (1, _MAX_COUNT)
            is_right = _is_number(value, int) and low <= value <= high
            limit = f"an integer from {low} to {high}"
        if not is_right:
            raise _WrongKey(where, key, f"is {value!r}; must be {limit}")
    adapters = None if "adapters" not in section else frozenset(section["adapters"])
    return TenantLimits(**{**section, "adapters": adapters})


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _line_of(text: str, section: str, key: str) -> int:
    """Return the line of a key, or of its section; 1 if neither is written as usual."""
    present, found = "", 1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            present = re.sub(r"[\"']|\s*(\.)\s*", r"\1", header["name"])
            found = number if present in (section, key) else found
        elif present == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return found


@dataclass(slots=True)
class _Account:
    """A tenant's requests in flight, and its bucket of tokens, which may be below 0."""

    num_open: int = 0
    num_queued: int = 0
    num_tokens: float = math.inf
    filled_at: float = 0.0


class TenantRateLimiter:
    """Lets the requests of tenants in, by the limits of a file. Keeps nothing of tenants that never asked."""

    def __init__(
        self,
        path: Path,
        *,
        set_weights: Callable[[Mapping[str, float]], None] = lambda weights: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file. set_weights gets the tenants' weights, now and when they change. Raises FileError."""
        self._file = WatchedFiles("limits of tenants", [path], lambda: read_limits(path))
        self._set_weights = set_weights
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._table = self._file.current()
        set_weights(self._table.weights)

    def send_weights_to(self, set_weights: Callable[[Mapping[str, float]], None]) -> None:
        """Give the tenants' weights to this function, now and when they change."""
        self._set_weights = set_weights
        set_weights(self._table.weights)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return a tenant's limits, read again if the file has changed."""
        table = self._file.current()
        if table is not self._table:
            has_other_weights = table.weights != self._table.weights
            self._table = table
            self._forget_idle()
            if has_other_weights:
                self._set_weights(table.weights)
        return table.of(tenant)

    def priority_of(self, tenant: str) -> int:
        """Return the number added to the priority of a tenant's requests; for KeyFile."""
        return self.limits_of(tenant).priority

    def admit(self, caller: Caller, *, num_prompt_tokens: int, params: SamplingParams) -> "TenantAdmission":
        """Let a request in, until the context that is returned ends. Raises HttpError: 429 with the time to wait."""
        limits = self.limits_of(caller.tenant)
        account = self._accounts.setdefault(caller.tenant, _Account())
        _require_place(caller.tenant, "max_requests", account.num_open, limits.max_requests)
        _require_place(caller.tenant, "max_queued", account.num_queued, limits.max_queued)
        num_reserved = 0.0
        if limits.tokens_per_minute is not None:
            rate = limits.tokens_per_minute
            self._fill(account, rate)
            num_reserved = min(float(rate), _most_tokens(num_prompt_tokens, params))
            if account.num_tokens < num_reserved:
                wait_s = (num_reserved - account.num_tokens) * 60 / rate
                left = max(0, int(account.num_tokens))
                message = (
                    f"{caller.tenant!r} has {left} tokens left of tokens_per_minute, {rate}; "
                    f"this request may use {int(num_reserved)}. Retry in {wait_s:.1f} s"
                )
                raise HttpError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
            account.num_tokens -= num_reserved
        return TenantAdmission(account, num_prompt_tokens=num_prompt_tokens, num_reserved=num_reserved)

    def counts_tokens(self, caller: Caller) -> bool:
        """Return whether the caller's tenant has a limit of tokens."""
        return self.limits_of(caller.tenant).tokens_per_minute is not None

    def adapters_of(self, caller: Caller) -> frozenset[str] | None:
        """Return the names of the adapters that the caller's tenant may use; None: all."""
        return self.limits_of(caller.tenant).adapters

    def _fill(self, account: _Account, rate: int) -> None:
        now = self._clock()
        account.num_tokens = min(float(rate), account.num_tokens + (now - account.filled_at) * rate / 60)
        account.filled_at = now

    def _forget_idle(self) -> None:
        self._accounts = {name: account for name, account in self._accounts.items() if account.num_open}


def _most_tokens(num_prompt_tokens: int, params: SamplingParams) -> float:
    return math.inf if params.max_tokens is None else float(num_prompt_tokens + params.n * params.max_tokens)


def _require_place(tenant: str, name: str, count: int, limit: int | None) -> None:
    if limit is not None and count >= limit:
        message = f"{tenant!r} has {count} requests; {name} is {limit}"
        raise HttpError(429, message, code="rate_limit_exceeded")


class TenantAdmission:
    """A request that was let in; a context that ends with the request."""

    __slots__ = ("_account", "_num_prompt", "_num_reserved", "_num_used", "_waits")

    def __init__(self, account: _Account, *, num_prompt_tokens: int, num_reserved: float) -> None:
        self._account = account
        self._num_prompt = num_prompt_tokens
        self._num_reserved = num_reserved
        self._num_used = 0
        self._waits = True
        account.num_open += 1
        account.num_queued += 1

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens, as they come."""
        self._num_used += num_tokens
        self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        if self._waits:
            self._waits = False
            self._account.num_queued -= 1

    def __enter__(self) -> Self:
        """Return itself; the request is in."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back the place, and the tokens that were not used: all of them if the request failed without a token."""
        self._wait_no_longer()
        self._account.num_open -= 1
        if self._num_reserved:
            has_failed = isinstance(error, QuireError) and not self._num_used
            used = 0 if has_failed else self._num_prompt + self._num_used
            self._account.num_tokens += self._num_reserved - used
