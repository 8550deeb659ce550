"""The order in which the pools of a list changed. Pure.

Each pool has one entry: the number of its last change. So a reader that knows all changes up to a number needs no other
memory, however far it is behind, and several changes of a pool are one entry to it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile


class PoolJournal:
    """The last change of each pool, and the callbacks for changes."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.listeners: dict[Callable[[], None], None] = {}
        """To be added to; told in the order in which they came."""
        self._last: dict[str, int] = {}  # the number of each pool's last change, in the order of these numbers

    def touch(self, pool: str) -> None:
        """Note a change of a pool that its watchers see."""
        self.num_changes += 1
        self._last.pop(pool, None)
        self._last[pool] = self.num_changes
        for tell in self.listeners:
            tell()

    def since(self, number: int) -> list[tuple[str, int]]:
        """Return the pools that changed since a number of changes, each with its last change, in their order.

        Cost: O(pools returned).
        """
        found = list(takewhile(lambda entry: entry[1] > number, reversed(self._last.items())))
        found.reverse()
        return found
