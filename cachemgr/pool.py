"""The block pool: how often each block is held, which are free, and what is evicted next.

A block is in exactly one state, told by three facts about it:

    references  pins  hash     state
    > 0         any   any      active    in that many block tables
    0           > 0   any      retired   released, but a planned step could still touch it
    0           0     yes      cached    evictable; in the LRU list
    0           0     no       free      on the free stack

Flat lists indexed by block id; the LRU list is intrusive, block 0 (the null block, which nobody owns) is its
sentinel. Every operation is O(1) per block, whatever the pool's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.prefix import PrefixIndex

NULL_BLOCK = 0


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; they add up to the pool's blocks without the null block."""

    free: int
    cached: int
    active: int
    retired: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Present state, and what happened since the pool was made."""

    counts: BlockCounts
    num_allocated: int
    num_evicted: int


class BlockPool:
    """Blocks 1 to num_blocks - 1. Callers keep the books of who holds them; this keeps how many do."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self._num_blocks = num_blocks
        self._index = index
        self._ref_count = [0] * num_blocks
        self._pin_count = [0] * num_blocks
        self._sealed = bytearray(num_blocks)  # was published since it was allocated: never to be written again
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the lowest id on top
        self._lru_next = [NULL_BLOCK] * num_blocks
        self._lru_prev = [NULL_BLOCK] * num_blocks
        self._num_cached = 0
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
        return len(self._free) + self._num_cached

    @property
    def num_retired(self) -> int:
        return self.num_usable - self.num_allocatable - self._num_active

    def counts(self) -> BlockCounts:
        return BlockCounts(len(self._free), self._num_cached, self._num_active, self.num_retired)

    def ref_count(self, block_id: int) -> int:
        return self._ref_count[block_id]

    def pin_count(self, block_id: int) -> int:
        return self._pin_count[block_id]

    def is_writable(self, block_id: int) -> bool:
        """Whether its one holder may write it: nobody else holds it, and it never was findable by content."""
        return self._ref_count[block_id] == 1 and not self._sealed[block_id]

    def is_cached(self, block_id: int) -> bool:
        return self.state(block_id) is BlockState.CACHED

    def state(self, block_id: int) -> BlockState:
        if self._ref_count[block_id]:
            return BlockState.ACTIVE
        if self._pin_count[block_id]:
            return BlockState.RETIRED
        return BlockState.FREE if self._index.hash_of(block_id) is None else BlockState.CACHED

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each: without content first, then the least recently used.

        The caller has compared `count` with `num_allocatable`; raises BrokenInvariant if it is more.
        """
        if count > self.num_allocatable:
            raise BrokenInvariant(f"{count} blocks to allocate, {self.num_allocatable} allocatable")
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_count[block_id] = 1
            self._sealed[block_id] = 0
        self._num_active += count
        self._num_allocated += count
        return block_ids

    def acquire(self, block_id: int) -> None:
        """One more reference to a block that is held, or whose content is findable."""
        if self._ref_count[block_id] == 0:
            if self._index.hash_of(block_id) is None:
                raise BrokenInvariant(f"block {block_id} has no content to share")
            if self._pin_count[block_id] == 0:
                self._lru_remove(block_id)
            self._num_active += 1
        self._ref_count[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less to each. Give a table's tail first: what comes first is evicted first."""
        for block_id in block_ids:
            if self._ref_count[block_id] == 0:
                raise BrokenInvariant(f"block {block_id} is released, nobody holds it")
            self._ref_count[block_id] -= 1
            if self._ref_count[block_id] == 0:
                self._num_active -= 1
                self._rest(block_id)

    def pin(self, block_id: int) -> None:
        """Keeps a block from being handed out until `unpin`, whoever releases it. Call while it is held."""
        if self._ref_count[block_id] == 0:
            raise BrokenInvariant(f"block {block_id} is pinned, nobody holds it")
        self._pin_count[block_id] += 1

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Takes back one pin of each. Give a table's tail first, as for `release`."""
        for block_id in block_ids:
            if self._pin_count[block_id] == 0:
                raise BrokenInvariant(f"block {block_id} is unpinned, it has no pin")
            self._pin_count[block_id] -= 1
            self._rest(block_id)

    def publish(self, prefix_hash: bytes, block_id: int) -> int:
        """Makes a block findable by content and unwritable; returns the block that stands for the hash.

        Only for a block that is held or pinned: it becomes cached when it is let go.
        """
        standing = self._index.publish(prefix_hash, block_id)
        if standing == block_id:
            self._sealed[block_id] = 1
        return standing

    def drop_cached(self) -> int:
        """Makes nothing findable any more; returns how many blocks were. Held blocks stay with their holders."""
        dropped = 0
        for block_id in range(1, self._num_blocks):
            if self._index.hash_of(block_id) is None:
                continue
            dropped += 1
            if self.is_cached(block_id):
                self._lru_remove(block_id)
                self._free.append(block_id)
            self._index.forget(block_id)
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
        lru = list(self._lru_blocks())
        if len(lru) != len(cached) or set(lru) != cached:
            yield f"{len(lru)} blocks in the LRU list, {len(cached)} blocks are cached"
        if self._num_cached != len(cached):
            yield f"{self._num_cached} blocks counted as cached, {len(cached)} are"
        if self._num_active != states.count(BlockState.ACTIVE):
            yield f"{self._num_active} blocks counted as active, {states.count(BlockState.ACTIVE)} are"
        if self._ref_count[NULL_BLOCK] or self._pin_count[NULL_BLOCK]:
            yield "somebody holds the null block"

    def check_invariants(self) -> None:
        """Raises BrokenInvariant with the first violation. Cost: O(blocks)."""
        for violation in self.violations():
            raise BrokenInvariant(violation)

    def _rest(self, block_id: int) -> None:
        """Puts a block that lost a reference or a pin where its state says, if nothing keeps it any more."""
        if self._ref_count[block_id] or self._pin_count[block_id]:
            return
        if self._index.hash_of(block_id) is None:
            self._free.append(block_id)
        else:
            self._lru_append(block_id)

    def _evict(self) -> int:
        block_id = self._lru_next[NULL_BLOCK]
        self._lru_remove(block_id)
        self._index.forget(block_id)
        self._num_evicted += 1
        return block_id

    def _lru_append(self, block_id: int) -> None:
        last = self._lru_prev[NULL_BLOCK]
        self._lru_next[last] = self._lru_prev[NULL_BLOCK] = block_id
        self._lru_prev[block_id], self._lru_next[block_id] = last, NULL_BLOCK
        self._num_cached += 1

    def _lru_remove(self, block_id: int) -> None:
        before, after = self._lru_prev[block_id], self._lru_next[block_id]
        self._lru_next[before], self._lru_prev[after] = after, before
        self._num_cached -= 1

    def _lru_blocks(self) -> Iterator[int]:
        """Least recently used first; stops after as many as there are blocks, should the list be broken."""
        block_id = self._lru_next[NULL_BLOCK]
        for _ in range(self._num_blocks):
            if block_id == NULL_BLOCK:
                return
            yield block_id
            block_id = self._lru_next[block_id]
