"""The block pool by itself: states, eviction order, and what it refuses to do."""

from __future__ import annotations

import pytest

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.pool import BlockCounts, BlockPool, BlockState
from quire.cachemgr.prefix import PrefixIndex


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(5, PrefixIndex(5))


def cache(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks that are cached, the first evicted first."""
    block_ids = pool.allocate(len(names))
    for name, block_id in zip(names, block_ids, strict=True):
        pool.publish(name, block_id)
    pool.release(block_ids)
    return block_ids


def test_a_new_pool_is_free_but_for_the_null_block(pool: BlockPool) -> None:
    assert pool.num_usable == pool.num_allocatable == 4
    assert pool.counts() == BlockCounts(free=4, cached=0, active=0, retired=0)
    pool.check_invariants()


def test_the_null_block_is_never_handed_out(pool: BlockPool) -> None:
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(BrokenInvariant, match="1 blocks to allocate, 0 allocatable"):
        pool.allocate(1)


def test_a_block_goes_through_all_states(pool: BlockPool) -> None:
    [block] = pool.allocate(1)
    assert pool.state(block) is BlockState.ACTIVE
    pool.pin(block)
    pool.release([block])
    assert pool.state(block) is BlockState.RETIRED
    assert (pool.num_retired, pool.num_allocatable) == (1, 3)
    pool.unpin([block])
    assert pool.state(block) is BlockState.FREE
    [block] = cache(pool, b"h")
    assert pool.state(block) is BlockState.CACHED
    pool.acquire(block)
    assert pool.counts() == BlockCounts(free=3, cached=0, active=1, retired=0)
    pool.check_invariants()


def test_blocks_without_content_are_handed_out_before_cached_ones_and_the_oldest_of_these_first(
    pool: BlockPool,
) -> None:
    first, second, third = cache(pool, b"1", b"2", b"3")
    [spare] = set(range(1, 5)) - {first, second, third}
    assert pool.allocate(3) == [spare, first, second]
    assert pool.statistics().num_evicted == 2
    assert pool.state(third) is BlockState.CACHED


def test_what_is_acquired_and_released_again_is_the_most_recent(pool: BlockPool) -> None:
    first, second = cache(pool, b"1", b"2")
    pool.acquire(first)
    pool.release([first])
    assert pool.allocate(4)[2:] == [second, first]


def test_a_table_released_tail_first_is_evicted_leaf_first(pool: BlockPool) -> None:
    table = pool.allocate(4)
    for name, block in zip((b"1", b"2", b"3", b"4"), table, strict=True):
        pool.publish(name, block)
    pool.release(table[::-1])
    assert pool.allocate(4) == table[::-1]


def test_an_evicted_block_is_not_found_any_more(pool: BlockPool) -> None:
    cache(pool, b"1", b"2", b"3", b"4")
    pool.allocate(1)
    assert pool._index.lookup(b"1") is None
    assert pool._index.lookup(b"2") is not None
    pool.check_invariants()


def test_a_retired_block_is_handed_out_only_after_its_last_pin(pool: BlockPool) -> None:
    [block] = pool.allocate(1)
    pool.pin(block)
    pool.pin(block)
    pool.release([block])
    pool.unpin([block])
    assert block not in pool.allocate(3)
    assert pool.num_allocatable == 0
    pool.unpin([block])
    assert pool.allocate(1) == [block]


def test_a_retired_block_with_content_can_be_acquired_at_once(pool: BlockPool) -> None:
    [block] = pool.allocate(1)
    pool.publish(b"h", block)
    pool.pin(block)
    pool.release([block])
    pool.acquire(block)
    pool.unpin([block])
    assert pool.state(block) is BlockState.ACTIVE
    pool.release([block])
    assert pool.state(block) is BlockState.CACHED
    pool.check_invariants()


def test_a_block_without_content_cannot_be_shared_once_it_is_let_go(pool: BlockPool) -> None:
    [block] = pool.allocate(1)
    pool.acquire(block)
    pool.release([block, block])
    with pytest.raises(BrokenInvariant, match="no content to share"):
        pool.acquire(block)


def test_only_the_one_holder_of_an_unpublished_block_may_write_it(pool: BlockPool) -> None:
    [block] = pool.allocate(1)
    assert pool.is_writable(block)
    pool.acquire(block)
    assert not pool.is_writable(block)
    pool.release([block])
    assert pool.is_writable(block)
    pool.publish(b"h", block)
    assert not pool.is_writable(block)


def test_a_published_block_stays_unwritable_after_the_cache_was_dropped_until_it_is_handed_out_again(
    pool: BlockPool,
) -> None:
    [block] = pool.allocate(1)
    pool.publish(b"h", block)
    assert pool.drop_cached() == 1
    assert not pool.is_writable(block)
    pool.release([block])
    assert pool.state(block) is BlockState.FREE
    [again] = pool.allocate(1)
    assert again == block
    assert pool.is_writable(again)


def test_a_duplicate_is_not_published_and_stays_writable(pool: BlockPool) -> None:
    first, second = pool.allocate(2)
    assert pool.publish(b"h", first) == first
    assert pool.publish(b"h", second) == first
    assert pool.is_writable(second)


def test_dropping_the_cache_frees_cached_blocks_and_leaves_held_and_retired_ones(pool: BlockPool) -> None:
    cache(pool, b"1", b"2")
    held, retired = pool.allocate(2)
    pool.publish(b"3", held)
    pool.publish(b"4", retired)
    pool.pin(retired)
    pool.release([retired])
    assert pool.drop_cached() == 4
    assert pool.counts() == BlockCounts(free=2, cached=0, active=1, retired=1)
    pool.unpin([retired])
    assert pool.state(retired) is BlockState.FREE
    assert pool.drop_cached() == 0
    pool.check_invariants()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pool: pool.release([1]), "is released, nobody holds it"),
        (lambda pool: pool.pin(1), "is pinned, nobody holds it"),
        (lambda pool: pool.unpin([1]), "it has no pin"),
        (lambda pool: pool.acquire(1), "no content to share"),
    ],
)
def test_a_wrong_call_is_a_broken_invariant(pool: BlockPool, wrong, message: str) -> None:
    with pytest.raises(BrokenInvariant, match=message):
        wrong(pool)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(1), "on the free stack"),
        (lambda pool: pool._lru_append(1), "in the LRU list"),
        (lambda pool: setattr(pool, "_num_cached", 1), "counted as cached"),
        (lambda pool: setattr(pool, "_num_active", 1), "counted as active"),
        (lambda pool: pool._ref_count.__setitem__(0, 1), "null block"),
    ],
)
def test_broken_lists_and_counts_are_noticed(pool: BlockPool, damage, message: str) -> None:
    damage(pool)
    with pytest.raises(BrokenInvariant, match=message):
        pool.check_invariants()
