"""The adapters that a worker serves: their names, their bytes, and which one was unused the longest. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.worker.adapter_bounds import DEFAULT_BOUNDS, AdapterBounds


class NoAdapterRoomError(Exception):
    """There is no room for an adapter, and those that could make room are in use. `limit` is the flag and its value."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class AdapterTable:
    """Names of adapters, each with the identity of its content."""

    def __init__(self, bounds: AdapterBounds = DEFAULT_BOUNDS) -> None:
        self.bounds = bounds
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of the names."""
        self._names: dict[str, bytes] = {}
        self._bytes: dict[bytes, int] = {}
        self._last_use: dict[bytes, int] = {}
        self._uses = itertools.count()

    @property
    def names(self) -> Mapping[str, bytes]:
        """The identity of each name."""
        return MappingProxyType(self._names)

    @property
    def num_bytes(self) -> int:
        """Of the weights: two names of one content have its bytes once."""
        return sum(self._bytes.values())

    def has(self, identity: bytes) -> bool:
        """Return True if an adapter of this content is served."""
        return identity in self._bytes

    def use(self, identity: bytes) -> None:
        """Note that an adapter was used just now."""
        self._last_use[identity] = next(self._uses)

    def find_room(
        self, identity: bytes, num_bytes: int, *, is_used: Callable[[bytes], bool] = lambda identity: False
    ) -> list[str]:
        """Return the names that have to go for one more with this content: those unused the longest.

        Raises NoAdapterRoomError if too few can go, because is_used says of their content that sequences have it.
        Changes nothing.
        """
        num_bytes = 0 if self.has(identity) else num_bytes
        bounds, left = self.bounds, dict(self._names)
        idle = [name for name, each in self._names.items() if each != identity and not is_used(each)]
        idle.sort(key=lambda name: self._last_use[self._names[name]])
        gone = []
        while len(left) >= bounds.max_adapters or self._bytes_of(left) + num_bytes > bounds.max_bytes:
            if not idle:
                is_full = len(left) >= bounds.max_adapters
                limit = bounds.count_limit if is_full else f"--lora-memory {bounds.max_bytes}"
                raise NoAdapterRoomError(f"{limit} is reached, and all adapters are in use", limit)
            gone.append(idle.pop(0))
            del left[gone[-1]]
        return gone

    def add(self, name: str, identity: bytes, num_bytes: int) -> None:
        """Serve an adapter under a name that is free. The caller has made room."""
        self._names[name] = identity
        self._bytes.setdefault(identity, num_bytes)
        self.use(identity)
        self.on_change()

    def remove(self, name: str) -> bytes | None:
        """Serve a name no longer. Returns the identity of its content if no other name has it."""
        identity = self._names.pop(name)
        is_last = identity not in self._names.values()
        if is_last:
            del self._bytes[identity], self._last_use[identity]
        self.on_change()
        return identity if is_last else None

    def _bytes_of(self, names: Mapping[str, bytes]) -> int:
        return sum(self._bytes[identity] for identity in set(names.values()))

    def check_invariants(self) -> None:
        """Raise AssertionError if the tables do not fit, or a bound is exceeded."""
        assert set(self._names.values()) == set(self._bytes) == set(self._last_use)
        assert len(self._names) <= self.bounds.max_adapters
        assert self.num_bytes <= self.bounds.max_bytes
