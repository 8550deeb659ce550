"""The engine's configuration."""

import os
from dataclasses import dataclass, field

from quire.cache.v1.lease_bounds import DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S
from quire.client.engine.scheduling.plans import DEFAULT_EXPECTED_PROMPTS
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import InvalidRequest

_LIMITS = ("max_waiting_requests", "max_waiting_requests_per_tenant", "max_waiting_tokens", "max_unread_tokens")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine uses a pool.

    pool                     its name; "": the only one
    max_step_tokens          tokens computed per step at most; the worker may allow fewer
    max_running_sequences    sequences that hold blocks at once at most; the worker may have room for fewer
    max_expected_prompts     prompts at the head of the queue that cachemgr is told of: the cached blocks that they
                             would find are evicted last
    lease_ttl_s              the pool's blocks are released this long after the end of this process; lease_bounds has
                             the range
    recovery_timeout_s       requests fail if a service can't be used for this long; errors count the delivered tokens
    max_recoveries           requests fail after this many recoveries without a computed step in between
    max_waiting_requests     requests that may wait for their first token; one more is refused with the reason
                             QUEUE_FULL, at least 1; None: no limit
    max_waiting_requests_per_tenant    the same limit for each tenant
    max_waiting_tokens       the limit of tokens of their prompts, as above
    tenants                  requests' tenants are cachemgr's too: shares, cache, pins; needs the role "gateway" there
    max_unread_tokens        a request fails with the reason TOO_SLOW if its caller leaves more generated tokens unread;
                             None: no limit
    max_mask_s               a request fails if the masks of its grammar that no step waits for take more seconds of the
                             worker's processors together
    speculative              how tokens are guessed ahead; None: they are not. docs/how-to/speculative-decoding.md
    verify                   check the scheduler's invariants after each change; on if QUIRE_VERIFY is 1
    metrics_listen           "host:port" for a page of metrics, port 0 being a free one; None: no page
    """

    pool: str = ""
    max_step_tokens: int = 2048
    max_running_sequences: int = 256
    max_expected_prompts: int = DEFAULT_EXPECTED_PROMPTS
    lease_ttl_s: float = DEFAULT_TTL_S
    recovery_timeout_s: float = 60.0
    max_recoveries: int = 8
    max_waiting_requests: int | None = None
    max_waiting_requests_per_tenant: int | None = None
    max_waiting_tokens: int | None = None
    tenants: bool = False
    max_unread_tokens: int | None = None
    max_mask_s: float = 10.0
    speculative: SpeculativeConfig | None = None
    verify: bool = field(default_factory=lambda: os.environ.get("QUIRE_VERIFY") == "1")
    metrics_listen: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running_sequences", "max_recoveries"):
            if getattr(self, name) < 1:
                raise InvalidRequest.of_field(name, getattr(self, name), "at least 1")
        if not self.max_mask_s > 0:
            raise InvalidRequest.of_field("max_mask_s", self.max_mask_s, "above 0")
        if not isinstance(self.speculative, SpeculativeConfig | None):
            raise InvalidRequest.of_field("speculative", self.speculative, "a SpeculativeConfig, or None")
        if self.max_expected_prompts < 0:
            raise InvalidRequest.of_field("max_expected_prompts", self.max_expected_prompts, "at least 0")
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InvalidRequest.of_field(name, limit, "at least 1, or None")
        if not MIN_TTL_S <= self.lease_ttl_s <= MAX_TTL_S:
            raise InvalidRequest.of_field("lease_ttl_s", self.lease_ttl_s, f"from {MIN_TTL_S:g} to {MAX_TTL_S:g}")
