"""The block pool: how often each block is held, which are free, and what is evicted next.

A block is in exactly one state, told by three facts about it:

    references  pins  hash     state
    > 0         any   any      active    in that many block tables
    0           > 0   any      retired   released, but a planned step could still touch it
    0           0     yes      cached    evictable; parked with the eviction policy
    0           0     no       free      on the free stack

Flat lists indexed by block id. Every operation takes the blocks of a whole table in one loop and is O(1) per block,
whatever the pool's size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.eviction import EvictionPolicy
from quire.cachemgr.prefix import PrefixIndex

NULL_BLOCK = 0


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"
    RETIRED = "retired"


class BlockCounts(NamedTuple):
    """Blocks by state; they add up to the pool's blocks without the null block."""

    free: int
    cached: int
    active: int
    retired: int


class PoolStatistics(NamedTuple):
    """Present state, and what happened since the pool was made."""

    counts: BlockCounts
    num_allocated: int
    num_evicted: int


class BlockPool:
    """Blocks 1 to num_blocks - 1. Callers keep the books of who holds them; this keeps how many do."""

    def __init__(self, num_blocks: int, index: PrefixIndex, policy: EvictionPolicy) -> None:
        self._num_blocks = num_blocks
        self._index = index
        self._policy = policy
        self._ref_count = [0] * num_blocks
        self._pin_count = array("i", bytes(4 * num_blocks))
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the lowest id on top
        self._num_active = 0
        self._num_allocated = 0
        self._num_evicted = 0

    @property
    def num_usable(self) -> int:
        """Blocks of the pool, the null block not counted."""
        return self._num_blocks - 1

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` could hand out now: free or evictable."""
        return len(self._free) + len(self._policy)

    @property
    def num_retired(self) -> int:
        return self.num_usable - self.num_allocatable - self._num_active

    def counts(self) -> BlockCounts:
        num_free, num_cached = len(self._free), len(self._policy)
        num_retired = self._num_blocks - 1 - num_free - num_cached - self._num_active
        return BlockCounts(num_free, num_cached, self._num_active, num_retired)

    def ref_count(self, block_id: int) -> int:
        return self._ref_count[block_id]

    def pin_count(self, block_id: int) -> int:
        return self._pin_count[block_id]

    def is_writable(self, block_id: int) -> bool:
        """Whether its one holder may write it: nobody else holds it, and it never was findable by content."""
        return self._ref_count[block_id] == 1 and self._index.hashes[block_id] is None

    def state(self, block_id: int) -> BlockState:
        if self._ref_count[block_id]:
            return BlockState.ACTIVE
        if self._pin_count[block_id]:
            return BlockState.RETIRED
        return BlockState.CACHED if self._index.hashes[block_id] else BlockState.FREE

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each: without content first, then what the policy gives up.

        The caller has compared `count` with `num_allocatable`; raises BrokenInvariant if it is more.
        """
        free, refs = self._free, self._ref_count
        num_missing = count - len(free)
        if num_missing <= 0:
            block_ids = free[: -count - 1 : -1]
            del free[len(free) - count :]
        else:
            block_ids = free[::-1]
            block_ids += self._evict(num_missing)
            free.clear()
        for block_id in block_ids:
            refs[block_id] = 1
        self._num_active += count
        self._num_allocated += count
        return block_ids

    def num_parked(self, block_ids: Iterable[int]) -> int:
        """How many of these are cached: what acquiring them takes from the allocatable ones."""
        refs, pins = self._ref_count, self._pin_count
        return sum([not (refs[block_id] or pins[block_id]) for block_id in block_ids])

    def acquire(self, block_ids: Sequence[int], count: int = 1) -> None:
        """`count` more references to each of these blocks, which are held, or whose content is findable."""
        refs = self._ref_count
        resting = [block_id for block_id in block_ids if not refs[block_id]]
        if resting:
            self._wake(resting)
        for block_id in block_ids:
            refs[block_id] += count

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less to each. Give a table's tail first: what comes first is evicted first."""
        refs, pins, hashes, free = self._ref_count, self._pin_count, self._index.hashes, self._free
        parked, num_resting = [], 0
        for block_id in block_ids:
            count = refs[block_id] = refs[block_id] - 1
            if count <= 0:
                if count < 0:
                    raise BrokenInvariant(f"block {block_id} is released, nobody holds it")
                num_resting += 1
                if pins[block_id]:
                    continue
                if hashes[block_id]:
                    parked.append(block_id)
                else:
                    self._discard(block_id, free)
        self._num_active -= num_resting
        if parked:
            self._policy.park(parked)

    def retire(self, block_ids: Iterable[int]) -> None:
        """One reference less and one pin more to each: not handed out until `unpin`."""
        refs, pins, num_resting = self._ref_count, self._pin_count, 0
        for block_id in block_ids:
            count = refs[block_id] = refs[block_id] - 1
            pins[block_id] += 1
            if count <= 0:
                if count < 0:
                    raise BrokenInvariant(f"block {block_id} is retired, nobody holds it")
                num_resting += 1
        self._num_active -= num_resting

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Takes back one pin of each. Give a table's tail first, as for `release`."""
        refs, pins, hashes, free = self._ref_count, self._pin_count, self._index.hashes, self._free
        parked = []
        for block_id in block_ids:
            count = pins[block_id] - 1
            if count < 0:
                raise BrokenInvariant(f"block {block_id} is unpinned, it has no pin")
            pins[block_id] = count
            if count or refs[block_id]:
                continue
            if hashes[block_id]:
                parked.append(block_id)
            else:
                self._discard(block_id, free)
        if parked:
            self._policy.park(parked)

    def publish(self, prefix_hashes: Sequence[bytes], block_ids: Sequence[int]) -> list[int]:
        """Makes blocks findable by content and unwritable; returns the blocks that stand for the hashes.

        Only for blocks that are held or pinned: they become cached when they are let go.
        """
        return self._index.publish(prefix_hashes, block_ids)

    def drop_cached(self, first: int, end: int) -> int:
        """Makes the blocks from `first` to before `end` unfindable; returns how many were findable.

        Held blocks stay with their holders.
        """
        hashes, dropped = self._index.hashes, 0
        for block_id in range(max(first, 1), min(end, self._num_blocks)):
            if not hashes[block_id]:
                continue
            dropped += 1
            if self.state(block_id) is BlockState.CACHED:
                self._policy.unpark([block_id])
                self._index.forget([block_id])
                self._free.append(block_id)
            else:
                self._index.drop(block_id)
        return dropped

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(self.counts(), num_allocated=self._num_allocated, num_evicted=self._num_evicted)

    def violations(self) -> Iterator[str]:
        """What is wrong with the lists and counts, one sentence each. Cost: O(blocks)."""
        states = [self.state(block_id) for block_id in range(1, self._num_blocks)]
        free = {block_id for block_id, state in enumerate(states, 1) if state is BlockState.FREE}
        cached = {block_id for block_id, state in enumerate(states, 1) if state is BlockState.CACHED}
        if len(self._free) != len(free) or set(self._free) != free:
            yield f"{len(self._free)} blocks on the free stack, {len(free)} blocks are free"
        parked = list(self._policy)
        if len(parked) != len(cached) or set(parked) != cached:
            yield f"{len(parked)} blocks parked with the eviction policy, {len(cached)} are cached"
        if len(self._policy) != len(cached):
            yield f"{len(self._policy)} blocks counted as cached, {len(cached)} are"
        if self._num_active != states.count(BlockState.ACTIVE):
            yield f"{self._num_active} blocks counted as active, {states.count(BlockState.ACTIVE)} are"
        if self._ref_count[NULL_BLOCK] or self._pin_count[NULL_BLOCK]:
            yield "somebody holds the null block"
        for block_id in free:
            if self._index.hashes[block_id] is not None:
                yield f"block {block_id} is free and still has a past"

    def check_invariants(self) -> None:
        """Raises BrokenInvariant with the first violation. Cost: O(blocks)."""
        for violation in self.violations():
            raise BrokenInvariant(violation)

    def _wake(self, block_ids: list[int]) -> None:
        """Nobody holds these; somebody is about to."""
        hashes, pins = self._index.hashes, self._pin_count
        for block_id in block_ids:
            if not hashes[block_id]:
                raise BrokenInvariant(f"block {block_id} has no content to share")
        self._policy.unpark([block_id for block_id in block_ids if not pins[block_id]])
        self._num_active += len(block_ids)

    def _discard(self, block_id: int, free: list[int]) -> None:
        """What was in a block that nobody can find any more does not matter from here on."""
        if self._index.hashes[block_id] is not None:
            self._index.forget((block_id,))
        free.append(block_id)

    def _evict(self, count: int) -> list[int]:
        if count > len(self._policy):
            raise BrokenInvariant(f"{count} blocks to evict, {len(self._policy)} are cached")
        block_ids = self._policy.evict(count)
        self._index.forget(block_ids)
        self._num_evicted += count
        return block_ids
