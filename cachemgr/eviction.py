"""What is given up first of the blocks that nobody holds but that could be found again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Keeps the parked blocks: cached ones, in the order in which they are to be given up."""

    def admit(self, found: Sequence[int], fresh: Sequence[int]) -> None: ...
    def park(self, block_ids: Sequence[int]) -> None: ...
    def unpark(self, block_ids: Sequence[int]) -> None: ...
    def evict(self, count: int) -> list[int]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class Lru:
    def __init__(self, num_blocks: int) -> None:
        self._next = array("i", bytes(4 * num_blocks))
        self._prev = array("i", bytes(4 * num_blocks))
        self._num = 0

    def admit(self, found: Sequence[int], fresh: Sequence[int]) -> None:
        pass

    def park(self, block_ids: Sequence[int]) -> None:
        after, before = self._next, self._prev
        last = before[0]
        for block_id in block_ids:
            after[last] = block_id
            before[block_id] = last
            last = block_id
        after[last] = 0
        before[0] = last
        self._num += len(block_ids)

    def unpark(self, block_ids: Sequence[int]) -> None:
        after, before = self._next, self._prev
        for block_id in block_ids:
            left, right = before[block_id], after[block_id]
            after[left] = right
            before[right] = left
        self._num -= len(block_ids)

    def evict(self, count: int) -> list[int]:
        after = self._next
        block_id, victims = after[0], []
        for _ in range(count):
            victims.append(block_id)
            block_id = after[block_id]
        after[0] = block_id
        self._prev[block_id] = 0
        self._num -= count
        return victims

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[0]
        for _ in range(len(self._next)):
            if not block_id:
                return
            yield block_id
            block_id = self._next[block_id]


POLICIES = {"lru": Lru}


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    return POLICIES[name](num_blocks)
DEFAULT_POLICY = "lru"
