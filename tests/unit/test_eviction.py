"""Eviction policies by themselves, driven as the pool drives them, with a plain model beside them."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cachemgr.eviction import (
    BASE_TIME,
    DEFAULT_POLICY,
    NUM_TIMES,
    POLICIES,
    Curve,
    EvictionPolicy,
    Lineage,
    Lru,
    RetentionPlanner,
    hull,
    make_policy,
    plan_retention,
)
from quire.cachemgr.geometry import Blocks

Prompt = list[int]


def blocks(ids: Iterable[int]) -> Blocks:
    return np.array(list(ids), np.int64)


class Pool:
    """Blocks of prompts whose elements stand for whole prefixes, and a policy that is told what the pool tells it."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self.policy = policy
        self.block_of: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.free = list(range(num_blocks - 1, 0, -1))
        self.holders: dict[int, int] = {}
        self.evicted: list[int] = []
        self.num_hits = 0

    def admit(self, prompt: Prompt, *, has_tail: bool = False) -> list[int]:
        """A table for the prompt: one block for each element, and one for a partial tail."""
        prefixes = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        found = []
        for prefix in prefixes:
            if prefix not in self.block_of:
                break
            found.append(self.block_of[prefix])
        self.num_hits += len(found)
        self.policy.unpark(blocks(block for block in found if block not in self.holders))
        for block in found:
            self.holders[block] = self.holders.get(block, 0) + 1
        fresh = self.take(len(prompt) - len(found) + has_tail)
        hashes = [sha256(repr(prefix).encode()).digest() for prefix in prefixes]
        self.policy.admit(found, fresh, hashes)
        for prefix, block in zip(prefixes[len(found) :], fresh, strict=False):
            self.block_of[prefix] = block
            self.prefix_of[block] = prefix
        return found + fresh

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(min(count, len(self.free)))]
        victims = self.policy.evict(count - len(taken)) if count > len(taken) else []
        assert len(victims) == count - len(taken)
        for block in victims:
            assert block not in self.holders
            prefix = self.prefix_of.pop(block)
            assert not any(other[:-1] == prefix for other in self.block_of), "a parent went before its child"
            del self.block_of[prefix]
        self.evicted += victims
        for block in taken + victims:
            self.holders[block] = 1
        return taken + victims

    def release(self, table: list[int]) -> None:
        idle = []
        for block in reversed(table):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                idle.append(block)
        empty = [block for block in idle if block not in self.prefix_of]
        self.free += empty
        self.policy.forget(blocks(empty))
        self.policy.park(blocks(block for block in idle if block in self.prefix_of))

    def check(self) -> None:
        parked = [block for block in self.prefix_of if block not in self.holders]
        assert len(self.policy) == len(parked)
        assert sorted(self.policy) == sorted(parked)


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def chats(rng: random.Random, *, count: int, num_chats: int = 12) -> list[Prompt]:
    """Prompts that continue earlier ones, leave them in the middle, or are new."""
    open_chats: list[Prompt] = []
    prompts = []
    for number in range(count):
        if open_chats and rng.random() < 0.7:
            start = open_chats[rng.randrange(len(open_chats))]
            start = start if rng.random() < 0.8 else start[: rng.randrange(len(start))]
        else:
            start = [0, 1]
        prompt = start + [1000 * (number + 1) + index for index in range(rng.randrange(1, 5))]
        prompts.append(prompt[:20])
        open_chats = [*open_chats, prompts[-1]][-num_chats:]
    return prompts


def test_the_first_policy_is_the_default() -> None:
    assert next(iter(POLICIES)) == DEFAULT_POLICY
    assert isinstance(make_policy("lru", 4), Lru)
    with pytest.raises(KeyError):
        make_policy("mru", 4)


@given(st.lists(st.tuples(st.sampled_from(["park", "unpark", "evict"]), st.randoms()), max_size=60))
def test_lru_is_an_ordered_dict(calls: list[tuple[str, random.Random]]) -> None:
    policy, model, idle = Lru(9), OrderedDict[int, None](), set(range(1, 9))
    for call, rng in calls:
        if call == "park":
            blocks = rng.sample(sorted(idle), rng.randint(0, len(idle)))
            policy.park(np.array(blocks, np.int64))
            model.update(dict.fromkeys(blocks))
        elif call == "unpark":
            blocks = rng.sample(sorted(model), rng.randint(0, len(model)))
            policy.unpark(np.array(blocks, np.int64))
            for block in blocks:
                del model[block]
        else:
            count = rng.randint(0, len(model))
            assert policy.evict(count) == [model.popitem(last=False)[0] for _ in range(count)]
        idle = set(range(1, 9)) - set(model)
        assert list(policy) == list(model)
        assert len(policy) == len(model)


@pytest.mark.parametrize("seed", range(6))
def test_chains_go_leaf_first_and_every_block_comes_back_once(name: str, seed: int) -> None:
    """With up to three prompts held at a time, and partial tails. The pool asserts the order."""
    rng = random.Random(seed)
    pool = Pool(make_policy(name, 81), 81)
    held: list[list[int]] = []
    for prompt in chats(rng, count=400):
        held.append(pool.admit(prompt, has_tail=rng.random() < 0.5))
        while len(held) > rng.randrange(3):
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check()
    for table in held:
        pool.release(table)
    num_parked = len(pool.policy)
    assert sorted(pool.policy.evict(num_parked)) == sorted(pool.prefix_of)
    assert len(pool.policy) == 0
    assert list(pool.policy) == []


def test_a_growing_sequence_parks_with_its_parent(name: str) -> None:
    policy = make_policy(name, 8)
    policy.admit([], [1, 2])
    policy.park(np.array([4, 3, 2, 1]))
    assert policy.evict(4) == [4, 3, 2, 1]


def test_blocks_nobody_told_of_are_parked_like_their_parent_or_go_first(name: str) -> None:
    policy = make_policy(name, 8)
    policy.admit([], [1, 2])
    policy.park(np.array([3, 2, 1]))
    policy.unpark(np.array([2]))
    assert policy.evict(2) == [3, 1]
    policy.park(np.array([5, 4]))
    assert sorted(policy) == [4, 5]
    assert policy.evict(2) == [5, 4]


def test_without_proof_of_a_gain_it_is_lru() -> None:
    pools = [Pool(make_policy(name, 61), 61) for name in ("lineage", "lru")]
    rng = random.Random(1)
    for _ in range(500):
        prompt = [rng.randrange(10**6) for _ in range(7)]
        for pool in pools:
            pool.release(pool.admit(prompt))
    assert pools[0].evicted == pools[1].evicted


def loops(count: int) -> list[Prompt]:
    """Twelve prompts of ten blocks in turn: LRU finds none of them in a pool of less than 120 blocks."""
    return [[100 * (number % 12) + index for index in range(10)] for number in range(count)]


def hits(name: str, prompts: list[Prompt], num_usable: int) -> int:
    pool = Pool(make_policy(name, num_usable + 1), num_usable + 1)
    for prompt in prompts:
        pool.release(pool.admit(prompt))
    return pool.num_hits


def test_part_of_a_loop_that_does_not_fit_is_kept() -> None:
    assert hits("lru", loops(1500), 60) == 0
    assert hits("lineage", loops(1500), 60) > 3000


def test_returning_chats_survive_a_stream_of_prompts_that_never_return() -> None:
    """Eight chats come back every 40 prompts, the others are asked once."""
    prompts: list[Prompt] = []
    for number in range(4000):
        chat = number % 40
        prompts.append([10 * chat + index for index in range(5)] if chat < 8 else [-5 * number - i for i in range(5)])
    assert hits("lru", prompts, 100) == 0
    assert hits("lineage", prompts, 100) > 2000


def test_the_same_calls_give_the_same_evictions() -> None:
    evicted = []
    for _ in range(2):
        pool = Pool(Lineage(61), 61)
        for prompt in chats(random.Random(3), count=600):
            pool.release(pool.admit(prompt))
        evicted.append(pool.evicted)
    assert evicted[0] == evicted[1]


def test_memory_does_not_grow_with_time() -> None:
    policy = Lineage(101)
    policy._most_ghosts = 50
    pool = Pool(policy, 101)
    for prompt in chats(random.Random(5), count=3000):
        pool.release(pool.admit(prompt, has_tail=True))
        assert len(policy._segments) <= 100
        assert len(policy._ghosts) <= 50
    assert len(policy._segments.start) <= 101
    num_labelled = sum(segment > 0 for segment in policy._segment_of)
    assert num_labelled == len(pool.prefix_of)


def test_gaps_are_placed_at_the_first_time_that_is_long_enough() -> None:
    planner = RetentionPlanner(160)
    assert [planner.place(gap) for gap in (0, 1, 10, 11, 20, 21, 160, 161, 2560, 2561)] == [
        *(0, 1, 1, 2, 2, 3, BASE_TIME, BASE_TIME + 1, NUM_TIMES - 1, NUM_TIMES),
    ]
    assert all(planner.place(int(time)) == place for place, time in enumerate(planner.times))


def test_the_hull_leaves_out_times_that_bring_less_than_their_neighbours() -> None:
    assert hull(Curve(1.0, hits=[0.0, 0.1, 0.8, 0.9], held=[0.0, 1.0, 2.0, 8.0])) == [0, 2, 3]


def test_room_goes_to_the_densest_class_first_and_the_rest_in_part() -> None:
    dense = Curve(1.0, hits=[0.0, 0.9], held=[0.0, 4.0])
    sparse = Curve(1.0, hits=[0.0, 0.5], held=[0.0, 8.0])
    plan = plan_retention([sparse, dense], room=6.0)
    assert plan[1] == (1, 1, 0.0)
    assert plan[0] == (0, 1, 0.25)
