"""Responses that callers can fetch and continue: each for a time, and those of a tenant up to a limit of bytes. Pure.

A response holds its own input alone, and the id of the response that it continues. So a conversation takes memory once.
A response is used when it is kept, and when another one continues it. The responses before it count as used after it:
the end of a conversation is dropped before its beginning, without which it is of no use.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

ENTRY_BYTES = 512
"""Counted for each response beside its texts."""


class Entry(Protocol):
    """A thing that is kept under an id, perhaps behind another one."""

    @property
    def id(self) -> str:
        """Return its id."""

    @property
    def previous(self) -> str | None:
        """Return the id of the entry that it continues; None: there is none."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it counts for."""


Kind = TypeVar("Kind", bound=Entry)


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """One response.

    body       the answer, as JSON
    items      the items of its own input, as JSON
    previous   the id of the response that it continues; None: it began a conversation
    """

    id: str
    body: bytes
    items: bytes
    previous: str | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it counts for."""
        return len(self.body) + len(self.items) + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class KeptStatistics:
    """Present numbers, and counters since the start.

    num_expired    dropped after their time
    num_evicted    dropped for later ones of their tenant
    """

    num_responses: int
    num_bytes: int
    num_expired: int
    num_evicted: int


class Kept(Generic[Kind]):
    """The entries of all tenants. No tenant sees, or makes room at the expense of, another's."""

    def __init__(self, *, keep_s: float, max_tenant_bytes: int, clock: Callable[[], float]) -> None:
        """keep_s is the time from the last use, 0: nothing is kept."""
        self.keep_s = keep_s
        self._max_tenant_bytes = max_tenant_bytes
        self._clock = clock
        self._tenants: dict[str, OrderedDict[str, Kind]] = {}  # the one used longest ago first
        self._num_bytes: dict[str, int] = {}
        self._used_at: OrderedDict[tuple[str, str], float] = OrderedDict()  # likewise, of all tenants
        self._num_expired = 0
        self._num_evicted = 0

    def keep(self, tenant: str, response: Kind) -> None:
        """Keep a response of a tenant, and drop as many of its others as have no room beside it."""
        self._expire()
        if not self.keep_s or response.num_bytes > self._max_tenant_bytes:
            return
        self.forget(tenant, response.id)
        responses = self._tenants.setdefault(tenant, OrderedDict())
        responses[response.id] = response
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + response.num_bytes
        self._use(tenant, response.id)
        while self._num_bytes.get(tenant, 0) > self._max_tenant_bytes:
            self.forget(tenant, next(iter(responses)))
            self._num_evicted += 1

    def find(self, tenant: str, response_id: str) -> Kind | None:
        """Return a response of a tenant; None if none of this id is kept for it."""
        self._expire()
        responses = self._tenants.get(tenant)
        return None if responses is None else responses.get(response_id)

    def conversation(self, tenant: str, response_id: str) -> list[Kind] | None:
        """Return a response and those before it, the first one first; None if one of them is not kept any more."""
        self._expire()
        found = self._back_from(tenant, response_id)
        if not found or found[-1].previous is not None:
            return None
        self._use(tenant, response_id)
        return found[::-1]

    def forget(self, tenant: str, response_id: str) -> bool:
        """Drop a response. Return whether it was there."""
        responses = self._tenants.get(tenant)
        response = None if responses is None else responses.pop(response_id, None)
        if responses is None or response is None:
            return False
        del self._used_at[tenant, response_id]
        self._num_bytes[tenant] -= response.num_bytes
        if not responses:
            del self._tenants[tenant], self._num_bytes[tenant]
        return True

    def statistics(self) -> KeptStatistics:
        """Return present numbers and counters."""
        self._expire()
        return KeptStatistics(len(self._used_at), sum(self._num_bytes.values()), self._num_expired, self._num_evicted)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not agree."""
        each = {(tenant, each) for tenant, responses in self._tenants.items() for each in responses}
        assert each == self._used_at.keys()
        assert list(self._used_at.values()) == sorted(self._used_at.values())
        for tenant, responses in self._tenants.items():
            assert responses
            assert [name for of, name in self._used_at if of == tenant] == list(responses)
            assert self._num_bytes[tenant] == sum(response.num_bytes for response in responses.values())
            assert self._num_bytes[tenant] <= self._max_tenant_bytes
        assert self._num_bytes.keys() == self._tenants.keys()

    def _back_from(self, tenant: str, response_id: str) -> list[Kind]:
        """Return a response and those before it, the last one first, as far as they are kept."""
        responses = self._tenants.get(tenant)
        found: list[Kind] = []
        name: str | None = response_id
        while responses and name is not None and (response := responses.get(name)) is not None:
            found.append(response)
            name = response.previous
        return found

    def _use(self, tenant: str, response_id: str) -> None:
        now = self._clock()
        for response in self._back_from(tenant, response_id):
            self._used_at[tenant, response.id] = now
            self._used_at.move_to_end((tenant, response.id))
            self._tenants[tenant].move_to_end(response.id)

    def _expire(self) -> None:
        """Drop the responses that have outlived their time."""
        last = self._clock() - self.keep_s
        while self._used_at:
            (tenant, response_id), used_at = next(iter(self._used_at.items()))
            if used_at > last:
                return
            self.forget(tenant, response_id)
            self._num_expired += 1


KeptResponses = Kept[KeptResponse]
