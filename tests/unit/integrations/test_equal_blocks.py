"""Consumers of events and cachemgr's books, while several sequences compute, copy, and lose one prefix at once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import product

import pytest
from planning import Admission, Fork, StepOutcome, lease_numbers_of
from unit.cachemgr.test_ledger import Bench, bench_of, pack
from unit.integrations.test_prefix_replica import Consumer

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr._core import Known
from quire.integrations.kv_events.replica import BlocksStored, Change, PrefixReplica

PROMPTS = list(product((1, 2), repeat=6))
"""Three blocks each, of two tokens."""


class Index(Consumer):
    """Finds prompts by the tokens of the blocks that were stored."""

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[tuple[bytes, tuple[int, ...]], bytes] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        changes = list(changes)
        super().apply(changes)
        for change in changes:
            if isinstance(change, BlocksStored):
                parent = change.parent_hash
                for block in change.blocks:
                    parent = self.children.setdefault((parent, tuple(block.token_ids)), block.prefix_hash)

    def find(self, tokens: tuple[int, ...]) -> int:
        """Return how many of the tokens are in blocks that are stored now."""
        parent = b""
        for start in range(0, len(tokens), 2):
            found = self.children.get((parent, tokens[start : start + 2]))
            if found not in self.parents:
                return start
            parent = found
        return len(tokens)


class Follower:
    """Reads the changes of a ledger into an index, some blocks at a time."""

    def __init__(self, bench: Bench) -> None:
        self._inspector = bench.ledger.inspector
        self._replica, self.index = PrefixReplica(), Index()
        self._known = Known(0)

    def read(self, most: int) -> None:
        while self._known.number < self._inspector.num_changes():
            found = self._inspector.changes(self._known, most, tenant=None, with_content=True)
            assert found is not None
            answer = pb.WatchBlocksResponse.FromString(found)
            answer.cursor = "c" if self._known.number == self._inspector.num_changes() else ""
            self.index.apply(self._replica.apply(answer))


def acts(bench: Bench, draw: random.Random) -> Iterator[str]:
    """Do things that are drawn: with two leases, steps in flight, failures, forks and resets. Yields their names."""
    running: dict[str, list[int]] = {"a": [], "b": []}
    for seq_id in range(1, 10_000):
        lease_id = draw.choice("ab")
        next_step, settled, num_in_flight, _ = lease_numbers_of(bench.ledger, lease_id)
        name = draw.choices(["admit", "settle", "release", "fork", "fail", "reset"], [9, 9, 6, 2, 0.5, 0.3])[0]
        if name == "admit" and num_in_flight < 3:
            plan = bench.plan(lease_id, admissions=[Admission(seq_id, pack(*draw.choice(PROMPTS), 3))])
            running[lease_id] += [] if plan.refusals else [seq_id]
        elif name == "settle" and num_in_flight:
            bench.settle(lease_id=lease_id)
        elif name == "release" and running[lease_id] and num_in_flight < 3:
            bench.plan(lease_id, releases=[running[lease_id].pop(draw.randrange(len(running[lease_id])))])
        elif name == "fork" and running[lease_id] and not num_in_flight:
            parent, length = draw.choice(running[lease_id]), draw.randint(2, 7)
            extends = {"extend_ids": [seq_id], "extend_token_counts": [1]}
            plan = bench.plan(lease_id, forks=[Fork(parent, [seq_id], length)], **extends)
            running[lease_id] += [seq_id] if bench.ledger.inspector.sequence(lease_id, seq_id) else []
        elif name == "fail" and num_in_flight:
            for number in range(settled + 1, next_step):
                bench.report(number, StepOutcome.FAILED, lease_id)
            bench.plan(lease_id, releases=running[lease_id])
            running[lease_id].clear()
        elif name == "reset":
            bench.ledger.reset_prefix_cache()
        yield name


@pytest.mark.parametrize("seed", range(12))
def test_an_index_finds_what_an_admission_would_find(seed: int) -> None:
    """dynamo#8012, llm-d-kv-cache#680: a hash that was stored twice, and removed once, was lost or left."""
    bench, draw = bench_of(num_usable=10), random.Random(seed)
    follower = Follower(bench)
    num_found = 0
    for _ in zip(range(1200), acts(bench, draw), strict=False):
        if draw.random() < 0.7:
            continue
        follower.read(draw.choice([1, 2, 100]))
        for tokens in draw.sample(PROMPTS, 16):
            expected = bench.ledger.inspector.num_cached_tokens(pack(*tokens, 9), salt=b"")
            assert follower.index.find(tokens) == expected
            num_found += expected > 0
    assert num_found > 500
