"""Callers: the tenant of each, and the protocols by which keys and rate limits are checked. Pure."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from quire.client.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, as its key says.

    name           of the key, for logs; "": there are no keys
    tenant         requests of one tenant share their part of the engine's steps; "": all callers are one
    priority       is added to the request's own: an engine serves the higher one first
    is_operator    it may load and unload adapters
    """

    name: str = ""
    tenant: str = ""
    priority: int = 0
    is_operator: bool = False


NOBODY = Caller()


class Keys(Protocol):
    """Callers by the key that they show."""

    def caller_of(self, key: str | None) -> Caller:
        """Return the caller with this key, None being no key. Raises HttpError: 401, or 403."""


class NoKeys:
    """Keys of a gateway without keys: all callers are one caller, with any key."""

    def caller_of(self, key: str | None) -> Caller:
        """Return the one caller."""
        return NOBODY


class Admission(Protocol):
    """A request that a rate limiter has admitted."""

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens, as they come."""


class RateLimiter(Protocol):
    """Limits by tenant: requests in flight, tokens a minute."""

    def admit(
        self, caller: Caller, *, num_prompt_tokens: int, params: SamplingParams
    ) -> AbstractContextManager[Admission]:
        """Admit a request until the context ends. Raises HttpError: 429 with the time to wait."""

    def counts_tokens(self, caller: Caller) -> bool:
        """Return whether the caller has to be admitted by the tokens that its requests have generated."""

    def adapters_of(self, caller: Caller) -> Collection[str] | None:
        """Return the names of the adapters that the caller may use; None: all."""


class _UnlimitedAdmission:
    def generated(self, num_tokens: int) -> None:
        pass


class NoRateLimits:
    """A rate limiter without limits."""

    def admit(
        self, caller: Caller, *, num_prompt_tokens: int, params: SamplingParams
    ) -> AbstractContextManager[Admission]:
        """Admit every request."""
        return nullcontext(_UnlimitedAdmission())

    def counts_tokens(self, caller: Caller) -> bool:
        """Return False."""
        return False

    def adapters_of(self, caller: Caller) -> Collection[str] | None:
        """Return None, for all."""
        return None
