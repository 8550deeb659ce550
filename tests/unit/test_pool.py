"""The block pool by itself: states, order, what it refuses to do, and everything at once beside a plain model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.eviction import POLICIES, Lru, make_policy
from quire.cachemgr.geometry import Blocks
from quire.cachemgr.pool import BlockCounts, BlockPool, BlockState
from quire.cachemgr.prefix import PrefixIndex


def blocks(ids: Iterable[int]) -> Blocks:
    return np.array(list(ids), np.int64)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(5, PrefixIndex(5), Lru(5))


def publish(pool: BlockPool, name: bytes, block_id: int) -> int:
    return pool._index.publish([name], [block_id])[0]


def cache(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks that are cached, the first evicted first."""
    block_ids = pool.allocate(len(names))
    pool._index.publish(names, block_ids.tolist())
    pool.release(block_ids)
    return block_ids.tolist()


def test_a_new_pool_is_free_but_for_the_null_block(pool: BlockPool) -> None:
    assert pool.num_usable == pool.num_allocatable == 4
    assert pool.counts() == BlockCounts(free=4, cached=0, active=0, retired=0)
    pool.check_invariants()


def test_the_null_block_is_never_handed_out(pool: BlockPool) -> None:
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    with pytest.raises(BrokenInvariant, match="1 blocks to evict, 0 are cached"):
        pool.allocate(1)


def test_blocks_are_handed_out_as_int64_and_none_of_none(pool: BlockPool) -> None:
    cache(pool, b"1")
    taken = pool.allocate(4)
    assert (taken.dtype, taken.tolist()) == (np.int64, [2, 3, 4, 1])
    assert pool.allocate(0).tolist() == []


def test_the_block_freed_last_is_handed_out_first(pool: BlockPool) -> None:
    taken = pool.allocate(4)
    pool.release(taken[[2, 0, 3]])
    assert pool.allocate(2).tolist() == [4, 1]
    pool.release(taken[1:2])
    assert pool.allocate(2).tolist() == [2, 3]


def test_a_block_goes_through_all_states(pool: BlockPool) -> None:
    taken = pool.allocate(1)
    [block] = taken.tolist()
    assert pool.state(block) is BlockState.ACTIVE
    pool.retire(taken)
    assert pool.state(block) is BlockState.RETIRED
    assert (pool.num_retired, pool.num_allocatable) == (1, 3)
    pool.unpin(taken)
    assert pool.state(block) is BlockState.FREE
    [block] = cache(pool, b"h")
    assert pool.state(block) is BlockState.CACHED
    pool.acquire(blocks([block]))
    assert pool.counts() == BlockCounts(free=3, cached=0, active=1, retired=0)
    pool.check_invariants()


def test_retiring_one_block_is_retiring_a_table_of_one(pool: BlockPool) -> None:
    taken = pool.allocate(2)
    pool.acquire(taken[:1])
    for block_id in (1, 2):
        pool.retire_one(block_id)
    assert [pool.state(block_id) for block_id in (1, 2)] == [BlockState.ACTIVE, BlockState.RETIRED]
    assert (pool.pin_count(1), pool.pin_count(2)) == (1, 1)
    assert pool.counts() == BlockCounts(free=2, cached=0, active=1, retired=1)
    pool.retire_one(1)
    assert pool.counts() == BlockCounts(free=2, cached=0, active=0, retired=2)
    pool.unpin(taken)
    assert pool.counts() == BlockCounts(free=3, cached=0, active=0, retired=1)
    pool.check_invariants()


def test_blocks_without_content_are_handed_out_before_cached_ones_and_the_oldest_of_these_first(
    pool: BlockPool,
) -> None:
    first, second, third = cache(pool, b"1", b"2", b"3")
    [spare] = set(range(1, 5)) - {first, second, third}
    assert pool.allocate(3).tolist() == [spare, first, second]
    assert pool.statistics().num_evicted == 2
    assert pool.state(third) is BlockState.CACHED


def test_what_is_acquired_and_released_again_is_the_most_recent(pool: BlockPool) -> None:
    first, second = cache(pool, b"1", b"2")
    pool.acquire(blocks([first]))
    pool.release(blocks([first]))
    assert pool.allocate(4)[2:].tolist() == [second, first]


def test_a_table_released_tail_first_is_evicted_leaf_first(pool: BlockPool) -> None:
    table = pool.allocate(4)
    pool._index.publish([b"1", b"2", b"3", b"4"], table.tolist())
    pool.release(table[::-1])
    assert pool.allocate(4).tolist() == table[::-1].tolist()


def test_a_table_unpinned_tail_first_is_evicted_leaf_first(pool: BlockPool) -> None:
    table = pool.allocate(4)
    pool._index.publish([b"1", b"2", b"3", b"4"], table.tolist())
    pool.retire(table[::-1])
    pool.unpin(table[::-1])
    assert pool.allocate(4).tolist() == table[::-1].tolist()


def test_of_a_released_table_the_part_without_content_is_free_and_the_rest_cached(pool: BlockPool) -> None:
    table = pool.allocate(4)
    pool._index.publish([b"1", b"3"], [1, 3])
    pool.release(table[::-1])
    states = [pool.state(block_id) for block_id in table.tolist()]
    assert states == [BlockState.CACHED, BlockState.FREE, BlockState.CACHED, BlockState.FREE]
    assert pool.allocate(4).tolist() == [2, 4, 3, 1]
    pool.check_invariants()


def test_an_evicted_block_is_not_found_any_more(pool: BlockPool) -> None:
    cache(pool, b"1", b"2", b"3", b"4")
    pool.allocate(1)
    assert pool._index.lookup(b"1") is None
    assert pool._index.lookup(b"2") is not None
    pool.check_invariants()


def test_a_retired_block_is_handed_out_only_after_its_last_pin(pool: BlockPool) -> None:
    taken = pool.allocate(1)
    pool.acquire(taken)
    pool.retire(taken)
    pool.retire(taken)
    pool.unpin(taken)
    assert taken.item() not in pool.allocate(3).tolist()
    assert pool.num_allocatable == 0
    pool.unpin(taken)
    assert pool.allocate(1).tolist() == taken.tolist()


def test_a_retired_block_with_content_can_be_acquired_at_once(pool: BlockPool) -> None:
    taken = pool.allocate(1)
    publish(pool, b"h", taken.item())
    pool.retire(taken)
    pool.acquire(taken)
    pool.unpin(taken)
    assert pool.state(taken.item()) is BlockState.ACTIVE
    pool.release(taken)
    assert pool.state(taken.item()) is BlockState.CACHED
    pool.check_invariants()


def test_several_references_are_taken_at_once_and_given_back_one_by_one(pool: BlockPool) -> None:
    taken = pool.allocate(2)
    pool.acquire(taken, 3)
    assert [pool.ref_count(block_id) for block_id in taken.tolist()] == [4, 4]
    for _ in range(3):
        pool.release(taken)
        assert pool.counts().active == 2
    pool.release(taken)
    assert pool.counts() == BlockCounts(free=4, cached=0, active=0, retired=0)


def test_only_blocks_that_nothing_keeps_are_what_acquiring_takes_from_the_allocatable_ones(pool: BlockPool) -> None:
    cached = cache(pool, b"1", b"2")
    active, retired = pool.allocate(2).tolist()
    publish(pool, b"3", retired)
    pool.retire_one(retired)
    assert pool.num_parked(blocks([*cached, active, retired])) == 2
    assert pool.num_parked(blocks([active, retired])) == 0
    assert pool.num_parked(blocks([])) == 0


def test_a_block_without_content_cannot_be_shared_once_it_is_let_go(pool: BlockPool) -> None:
    taken = pool.allocate(1)
    pool.acquire(taken)
    pool.release(taken)
    pool.release(taken)
    with pytest.raises(BrokenInvariant, match="block 1 has no content to share"):
        pool.acquire(taken)


def test_only_the_one_holder_of_an_unpublished_block_may_write_it(pool: BlockPool) -> None:
    taken = pool.allocate(1)
    block = taken.item()
    assert pool.is_writable(block)
    pool.acquire(taken)
    assert not pool.is_writable(block)
    pool.release(taken)
    assert pool.is_writable(block)
    publish(pool, b"h", block)
    assert not pool.is_writable(block)


def test_a_published_block_stays_unwritable_after_the_cache_was_dropped_until_it_is_handed_out_again(
    pool: BlockPool,
) -> None:
    taken = pool.allocate(1)
    publish(pool, b"h", taken.item())
    assert pool.drop_cached(0, 5) == 1
    assert not pool.is_writable(taken.item())
    pool.release(taken)
    assert pool.state(taken.item()) is BlockState.FREE
    again = pool.allocate(1)
    assert again.tolist() == taken.tolist()
    assert pool.is_writable(again.item())
    pool.check_invariants()


def test_a_duplicate_is_not_published_and_stays_writable(pool: BlockPool) -> None:
    first, second = pool.allocate(2).tolist()
    assert publish(pool, b"h", first) == first
    assert publish(pool, b"h", second) == first
    assert pool.is_writable(second)


def test_dropping_the_cache_frees_cached_blocks_and_leaves_held_and_retired_ones(pool: BlockPool) -> None:
    cache(pool, b"1", b"2")
    held, retired = pool.allocate(2).tolist()
    pool._index.publish([b"3", b"4"], [held, retired])
    pool.retire_one(retired)
    assert pool.drop_cached(0, 5) == 4
    assert pool.counts() == BlockCounts(free=2, cached=0, active=1, retired=1)
    assert list(pool._policy) == []
    pool.unpin(blocks([retired]))
    assert pool.state(retired) is BlockState.FREE
    assert pool.drop_cached(0, 5) == 0
    pool.check_invariants()


def test_the_cache_is_dropped_in_slices_of_any_bounds(pool: BlockPool) -> None:
    cache(pool, b"1", b"2", b"3", b"4")
    assert (pool.drop_cached(2, 3), pool.counts().cached) == (1, 3)
    assert [pool.state(block_id) is BlockState.CACHED for block_id in range(1, 5)] == [True, False, True, True]
    assert (pool.drop_cached(-3, 2), pool.drop_cached(2, 3), pool.drop_cached(3, 100)) == (1, 0, 2)
    assert pool.counts() == BlockCounts(free=4, cached=0, active=0, retired=0)


def test_statistics_count_references_sharers_and_what_happened(pool: BlockPool) -> None:
    cache(pool, b"1", b"2", b"3")
    pool.acquire(blocks([1, 2]), 2)
    pool.acquire(blocks([2]))
    pool.allocate(2)
    statistics = pool.statistics()
    assert statistics.counts == BlockCounts(free=0, cached=0, active=4, retired=0)
    assert (statistics.num_references, statistics.num_shared) == (7, 2)
    assert (statistics.num_allocated, statistics.num_evicted) == (5, 1)


class ForgetfulLru(Lru):
    """Remembers what it was told to forget."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.forgotten: list[int] = []

    def forget(self, block_ids: Blocks) -> None:
        self.forgotten += block_ids.tolist()


def test_the_policy_forgets_what_becomes_free_and_nothing_else() -> None:
    policy = ForgetfulLru(5)
    pool = BlockPool(5, PrefixIndex(5), policy)
    cache(pool, b"1")
    table = pool.allocate(3)
    pool.retire(table[:1])
    pool.release(table[1:])
    assert policy.forgotten == [3, 4]
    pool.unpin(table[:1])
    pool.drop_cached(0, 5)
    assert policy.forgotten == [3, 4, 2, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pool: pool.release(blocks([1])), "block 1 is released, nobody holds it"),
        (lambda pool: pool.retire(blocks([1])), "block 1 is released, nobody holds it"),
        (lambda pool: pool.release(np.concatenate([pool.allocate(2), [3]])), "block 3 is released, nobody holds it"),
        (lambda pool: pool.unpin(blocks([1])), "block 1 is unpinned, it has no pin"),
        (lambda pool: pool.acquire(blocks([1])), "block 1 has no content to share"),
        (lambda pool: pool.acquire(np.concatenate([pool.allocate(2), [3]])), "block 3 has no content to share"),
    ],
)
def test_a_wrong_call_is_a_broken_invariant(
    pool: BlockPool, wrong: Callable[[BlockPool], object], message: str
) -> None:
    with pytest.raises(BrokenInvariant, match=message):
        wrong(pool)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: setattr(pool, "_num_free", 3), "3 blocks on the free stack, 4 blocks are free"),
        (lambda pool: pool._free.__setitem__(0, 2), "on the free stack"),
        (lambda pool: pool._policy.park(blocks([1])), "parked with the eviction policy"),
        (lambda pool: setattr(pool._policy, "_num_parked", 1), "1 blocks counted as cached"),
        (lambda pool: setattr(pool, "_num_active", 1), "counted as active"),
        (lambda pool: pool._ref_count.__setitem__(0, 1), "null block"),
        (lambda pool: pool._index.hashes.__setitem__(2, b""), "block 2 is free and still has a past"),
    ],
)
def test_broken_lists_and_counts_are_noticed(
    pool: BlockPool, damage: Callable[[BlockPool], object], message: str
) -> None:
    damage(pool)
    with pytest.raises(BrokenInvariant, match=message):
        pool.check_invariants()


# -- everything at once, beside a plain model -----------------------------------------------------------------------

NUM_BLOCKS = 11
NAMES = [bytes([letter, 7]) for letter in range(6)]
OPERATIONS = (
    ["allocate"] * 3 + ["publish", "acquire", "release"] * 2 + ["retire", "retire_one", "unpin", "unpin", "drop"]
)


class Model:
    """Dictionaries of what should be, a block at a time; calls the pool with arrays and compares."""

    def __init__(self, policy: str) -> None:
        self.pool = BlockPool(NUM_BLOCKS, PrefixIndex(NUM_BLOCKS), make_policy(policy, NUM_BLOCKS))
        self.is_lru = policy == "lru"
        self.refs: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.name_of: dict[int, bytes] = {}
        self.had_name: set[int] = set()
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))
        self.parked: list[int] = []
        self.num_allocated = self.num_evicted = 0

    def pick(self, rng: random.Random, wanted: Callable[[int], object]) -> list[int]:
        """Some of the blocks that are as wanted, in any order."""
        candidates = [block for block in range(1, NUM_BLOCKS) if wanted(block)]
        return rng.sample(candidates, rng.randint(0, len(candidates)))

    def allocate(self, rng: random.Random) -> None:
        count = rng.randint(0, min(4, len(self.free) + len(self.parked)))
        taken = self.pool.allocate(count).tolist()
        num_free = min(count, len(self.free))
        assert taken[:num_free] == [self.free.pop() for _ in range(num_free)]
        evicted = taken[num_free:]
        assert set(evicted) <= set(self.parked)
        assert len(set(taken)) == count
        if self.is_lru:
            assert evicted == self.parked[: len(evicted)]
        for block in evicted:
            self.parked.remove(block)
            del self.name_of[block]
            self.had_name.discard(block)
        self.refs.update(taken)
        self.num_allocated += count
        self.num_evicted += len(evicted)

    def publish(self, rng: random.Random) -> None:
        held = self.pick(rng, lambda block: (self.refs[block] or self.pins[block]) and block not in self.name_of)
        if not held:
            return
        names = [rng.choice(NAMES) for _ in held]
        standing = self.pool._index.publish(names, held)
        block_of = {name: block for block, name in self.name_of.items()}
        assert standing == [block_of.setdefault(name, block) for name, block in zip(names, held, strict=True)]
        self.name_of = {block: name for name, block in block_of.items()}
        self.had_name |= set(self.name_of)

    def acquire(self, rng: random.Random) -> None:
        chosen, count = self.pick(rng, lambda block: self.refs[block] or block in self.name_of), rng.randint(1, 3)
        assert self.pool.num_parked(blocks(chosen)) == len(set(chosen) & set(self.parked))
        self.pool.acquire(blocks(chosen), count)
        self.parked = [block for block in self.parked if block not in chosen]
        self.refs.update(dict.fromkeys(chosen, count))

    def release(self, rng: random.Random) -> None:
        held = self.pick(rng, self.refs.__getitem__)
        self.pool.release(blocks(held))
        self.refs.subtract(held)
        self.rest(held)

    def retire(self, rng: random.Random) -> None:
        held = self.pick(rng, self.refs.__getitem__)
        self.pool.retire(blocks(held))
        self.refs.subtract(held)
        self.pins.update(held)

    def retire_one(self, rng: random.Random) -> None:
        for block in self.pick(rng, self.refs.__getitem__)[:1]:
            self.pool.retire_one(block)
            self.refs[block] -= 1
            self.pins[block] += 1

    def unpin(self, rng: random.Random) -> None:
        pinned = self.pick(rng, self.pins.__getitem__)
        self.pool.unpin(blocks(pinned))
        self.pins.subtract(pinned)
        self.rest(pinned)

    def drop(self, rng: random.Random) -> None:
        first, end = sorted([rng.randint(-1, NUM_BLOCKS + 1), rng.randint(-1, NUM_BLOCKS + 1)])
        dropped = sorted(block for block in self.name_of if first <= block < end)
        assert self.pool.drop_cached(first, end) == len(dropped)
        for block in dropped:
            del self.name_of[block]
            if block in self.parked:
                self.parked.remove(block)
                self.rest([block])

    def rest(self, block_ids: list[int]) -> None:
        """Those that nothing keeps any more go to their places, in this order."""
        for block in block_ids:
            if not self.refs[block] and not self.pins[block]:
                (self.parked if block in self.name_of else self.free).append(block)
                if block not in self.name_of:
                    self.had_name.discard(block)

    def state(self, block: int) -> BlockState:
        if self.refs[block]:
            return BlockState.ACTIVE
        if self.pins[block]:
            return BlockState.RETIRED
        return BlockState.CACHED if block in self.name_of else BlockState.FREE

    def check(self) -> None:
        pool, states = self.pool, [self.state(block) for block in range(1, NUM_BLOCKS)]
        assert list(pool.violations()) == []
        assert list(pool._index.violations()) == []
        for block, state in enumerate(states, 1):
            found = (pool.state(block), pool.ref_count(block), pool.pin_count(block), pool._index.hashes[block] or None)
            assert found == (state, self.refs[block], self.pins[block], self.name_of.get(block))
            assert pool.is_writable(block) == (self.refs[block] == 1 and block not in self.had_name)
        assert pool.counts() == BlockCounts(*(sum(state is other for state in states) for other in BlockState))
        assert pool.num_allocatable == len(self.free) + len(self.parked)
        assert pool.num_retired == states.count(BlockState.RETIRED)
        assert list(pool._policy) == self.parked or not self.is_lru
        statistics = pool.statistics()
        assert (statistics.num_allocated, statistics.num_evicted) == (self.num_allocated, self.num_evicted)
        assert statistics.num_references == self.refs.total()
        assert statistics.num_shared == sum(count > 1 for count in self.refs.values())
        assert dict(pool._index.entries()) == {name: block for block, name in self.name_of.items()}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("policy", POLICIES)
def test_any_calls_leave_the_pool_as_a_plain_model_has_it(policy: str, seed: int) -> None:
    rng, model = random.Random(seed), Model(policy)
    for _ in range(80):
        getattr(model, rng.choice(OPERATIONS))(rng)
        model.check()
