"""Requests that wait for their first token, counted against the engine's limits."""

from collections import Counter

from quire.client.engine.config import EngineConfig
from quire.client.errors import OutOfRoom


class Backlog:
    """The numbers of requests and of prompt tokens that wait, in all and by tenant."""

    def __init__(self, config: EngineConfig) -> None:
        """Count nothing yet; limits as in EngineConfig."""
        self._config = config
        self._num_tokens = 0
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return self._by_tenant.total()

    def enter(self, tenant: str, num_tokens: int, *, is_limited: bool = True) -> None:
        """Count a request with a prompt of so many tokens. Raises OutOfRoom with the reason QUEUE_FULL.

        is_limited False: count it without a limit. Another engine had accepted it, and it continues here after a
        failure.
        """
        if is_limited:
            self._require_room(tenant, num_tokens)
        self._by_tenant[tenant] += 1
        self._num_tokens += num_tokens

    def _require_room(self, tenant: str, num_tokens: int) -> None:
        config = self._config
        _require_room("max_waiting_requests", len(self), 1, config.max_waiting_requests)
        _require_room("max_waiting_tokens", self._num_tokens, num_tokens, config.max_waiting_tokens)
        of_tenant = self._by_tenant.get(tenant, 0)
        _require_room("max_waiting_requests_per_tenant", of_tenant, 1, config.max_waiting_requests_per_tenant)

    def leave(self, tenant: str, num_tokens: int) -> None:
        """Count a request no longer."""
        self._num_tokens -= num_tokens
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


def _require_room(name: str, waiting: int, wanted: int, limit: int | None) -> None:
    """Raise if the limit is reached. One request may always wait, even if its prompt alone exceeds the limit."""
    if limit is None or not waiting or waiting + wanted <= limit:
        return
    metadata = {"limited_by": name, "waiting": str(waiting), "wanted": str(wanted), "limit": str(limit)}
    message = f"the queue is full: {waiting} wait, {wanted} more are too many for {name}, {limit}"
    raise OutOfRoom(message, reason="QUEUE_FULL", metadata=metadata)
