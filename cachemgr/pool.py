"""The block pool: how often each block is held, which are free, and what is evicted next.

A block is in exactly one state, told by three facts about it:

    references  pins  hash     state
    > 0         any   any      active    in that many block tables
    0           > 0   any      retired   released, but a planned step could still touch it
    0           0     yes      cached    evictable; parked with the eviction policy
    0           0     no       free      on the free stack

Flat arrays indexed by block id. Every operation takes the blocks of a whole table at once, as an int64 array of
distinct ids (NumPy indexes by it without converting): some array operations, whatever the size of the pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.eviction import EvictionPolicy
from quire.cachemgr.geometry import Blocks
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
    num_references: int
    num_shared: int
    """Blocks with more than one reference."""
    num_allocated: int
    num_evicted: int


class BlockPool:
    """Blocks 1 to num_blocks - 1. Callers keep the books of who holds them; this keeps how many do."""

    def __init__(self, num_blocks: int, index: PrefixIndex, policy: EvictionPolicy) -> None:
        self._num_blocks = num_blocks
        self._index = index
        self._policy = policy
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._pin_count = array("i", bytes(4 * num_blocks))
        self._refs = np.frombuffer(self._ref_count, np.int32)  # the same memory, for many blocks at once
        self._pins = np.frombuffer(self._pin_count, np.int32)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: the lowest id on top
        self._num_free = num_blocks - 1
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
        return self._num_free + len(self._policy)

    @property
    def num_retired(self) -> int:
        return self.counts().retired

    def counts(self) -> BlockCounts:
        num_free, num_cached = self._num_free, len(self._policy)
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

    def allocate(self, count: int) -> Blocks:
        """Hands out `count` blocks with one reference each: without content first, then what the policy gives up.

        The caller has compared `count` with `num_allocatable`; raises BrokenInvariant if it is more.
        """
        num_popped = min(count, self._num_free)
        top = self._num_free - num_popped
        block_ids = self._free[top : self._num_free][::-1].astype(np.int64)
        self._num_free = top
        if num_popped < count:
            block_ids = np.concatenate([block_ids, self._evict(count - num_popped)])
        self._refs[block_ids] = 1
        self._num_active += count
        self._num_allocated += count
        return block_ids

    def num_parked(self, block_ids: Blocks) -> int:
        """How many of these are cached: what acquiring them takes from the allocatable ones."""
        if not len(block_ids):
            return 0
        return len(block_ids) - int(np.count_nonzero(self._refs[block_ids] + self._pins[block_ids]))

    def acquire(self, block_ids: Blocks, count: int = 1) -> None:
        """`count` more references to each of these blocks, which are held, or whose content is findable."""
        refs = self._refs[block_ids]
        if np.count_nonzero(refs) < len(refs):
            self._wake(block_ids[refs == 0])
        self._refs[block_ids] = refs + count

    def release(self, block_ids: Blocks) -> None:
        """One reference less to each. Give a table's tail first: what comes first is evicted first."""
        resting = self._let_go(block_ids)
        pins = self._pins[resting]
        self._rest(resting[pins == 0] if np.count_nonzero(pins) else resting)

    def retire(self, block_ids: Blocks) -> None:
        """One reference less and one pin more to each: not handed out until `unpin`."""
        self._let_go(block_ids)
        self._pins[block_ids] += 1

    def retire_one(self, block_id: int) -> None:
        """`retire` of one block."""
        self._ref_count[block_id] -= 1
        self._pin_count[block_id] += 1
        self._num_active -= self._ref_count[block_id] == 0

    def unpin(self, block_ids: Blocks) -> None:
        """Takes back one pin of each. Give a table's tail first, as for `release`."""
        pins = self._pins[block_ids] - 1
        if len(pins) and pins.min() < 0:
            raise BrokenInvariant(f"block {block_ids[pins.argmin()]} is unpinned, it has no pin")
        self._pins[block_ids] = pins
        held = pins + self._refs[block_ids]
        self._rest(block_ids[held == 0] if np.count_nonzero(held) else block_ids)

    def drop_cached(self, first: int, end: int) -> int:
        """Makes the blocks from `first` to before `end` unfindable; returns how many were findable.

        Held blocks stay with their holders.
        """
        index, dropped = self._index, 0
        for block_id in range(max(first, 1), min(end, self._num_blocks)):
            if not index.hashes[block_id]:
                continue
            dropped += 1
            if self.state(block_id) is BlockState.CACHED:
                self._policy.unpark(np.array([block_id]))
                index.forget([block_id])
                self._push_free(np.array([block_id]))
            else:
                index.drop(block_id)
        return dropped

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            self.counts(),
            num_references=int(self._refs.sum()),
            num_shared=int(np.count_nonzero(self._refs > 1)),
            num_allocated=self._num_allocated,
            num_evicted=self._num_evicted,
        )

    def violations(self) -> Iterator[str]:
        """What is wrong with the lists and counts, one sentence each. Cost: O(blocks)."""
        states = [self.state(block_id) for block_id in range(1, self._num_blocks)]
        free = {block_id for block_id, state in enumerate(states, 1) if state is BlockState.FREE}
        cached = {block_id for block_id, state in enumerate(states, 1) if state is BlockState.CACHED}
        stack = self._free[: self._num_free].tolist()
        if len(stack) != len(free) or set(stack) != free:
            yield f"{len(stack)} blocks on the free stack, {len(free)} blocks are free"
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

    def _let_go(self, block_ids: Blocks) -> Blocks:
        """One reference less to each; returns those that nobody holds any more."""
        refs = self._refs[block_ids] - 1
        self._refs[block_ids] = refs
        if not np.count_nonzero(refs):
            self._num_active -= len(block_ids)
            return block_ids
        if refs.min() < 0:
            raise BrokenInvariant(f"block {block_ids[refs.argmin()]} is released, nobody holds it")
        resting: Blocks = block_ids[refs == 0]
        self._num_active -= len(resting)
        return resting

    def _rest(self, block_ids: Blocks) -> None:
        """Nothing keeps these any more: those with content are parked, the others are free."""
        is_findable = self._index.findable[block_ids]
        if np.count_nonzero(is_findable) < len(block_ids):
            self._push_free(block_ids[~is_findable])
            block_ids = block_ids[is_findable]
        if len(block_ids):
            self._policy.park(block_ids)

    def _push_free(self, block_ids: Blocks) -> None:
        """What was in these does not matter from here on."""
        self._index.forget_dropped(block_ids)
        self._policy.forget(block_ids)
        end = self._num_free + len(block_ids)
        self._free[self._num_free : end] = block_ids
        self._num_free = end

    def _wake(self, block_ids: Blocks) -> None:
        """Nobody holds these; somebody is about to."""
        is_findable = self._index.findable[block_ids]
        if np.count_nonzero(is_findable) < len(block_ids):
            raise BrokenInvariant(f"block {block_ids[is_findable.argmin()]} has no content to share")
        pins = self._pins[block_ids]
        self._num_active += len(block_ids)
        self._policy.unpark(block_ids[pins == 0] if np.count_nonzero(pins) else block_ids)

    def _evict(self, count: int) -> Blocks:
        if count > len(self._policy):
            raise BrokenInvariant(f"{count} blocks to evict, {len(self._policy)} are cached")
        block_ids = self._policy.evict(count)
        self._index.forget(block_ids)
        self._num_evicted += count
        return np.array(block_ids, np.int64)
