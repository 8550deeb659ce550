"""The suite of every eviction policy: the crate's own by name, and one in Python."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from planning import Admission, PlanItem
from unit.cachemgr.test_ledger import EPOCH, Bench, geometry, pack, reasons

from quire.cachemgr._core import POLICIES, Ledger
from quire.cachemgr.errors import Reason
from quire.cachemgr.eviction_interface import EvictionPolicy


class PythonLru:
    """Evicts the block that was parked first."""

    def __init__(self) -> None:
        self.parked: dict[int, None] = {}

    def admit(self, found: Sequence[int], fresh: Sequence[int], hashes: Sequence[bytes]) -> None:
        pass

    def park(self, blocks: Sequence[int]) -> None:
        self.parked.update(dict.fromkeys(blocks))

    def unpark(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.parked[block]

    def forget(self, blocks: Sequence[int]) -> None:
        assert not self.parked.keys() & set(blocks)

    def evict(self, count: int) -> Sequence[int]:
        victims = list(self.parked)[:count]
        self.unpark(victims)
        return victims


MAKERS: dict[str, Callable[[], str | EvictionPolicy]] = {name: lambda name=name: name for name in POLICIES}
MAKERS["a policy in Python"] = PythonLru


@pytest.fixture(params=MAKERS)
def bench(request: pytest.FixtureRequest) -> Bench:
    """A pool of 8 blocks of 2 tokens."""
    return Bench(Ledger("pool", EPOCH, geometry(), policy=MAKERS[request.param](), verify=True))


def compute_and_release(bench: Bench, *tokens: int) -> None:
    bench.admit(1, *tokens)
    bench.settle()
    bench.plan(releases=[1])
    bench.settle()


def num_found(bench: Bench, *tokens: int) -> int:
    return bench.ledger.inspector.num_cached_tokens(pack(*tokens), salt=b"")


def test_the_end_of_a_prefix_is_evicted_before_its_beginning(bench: Bench) -> None:
    compute_and_release(bench, 1, 2, 3, 4, 5)
    assert bench.counts() == (6, 2, 0, 0)
    bench.admit(2, *range(20, 34))
    assert num_found(bench, 1, 2, 3, 4, 5) == 2


def test_all_cached_blocks_can_be_evicted(bench: Bench) -> None:
    for first in (10, 20, 30):
        compute_and_release(bench, *range(first, first + 4), 9)
    assert bench.counts() == (2, 6, 0, 0)
    assert bench.admit(2, *range(40, 56)).refusals == []
    assert bench.counts() == (0, 0, 8, 0)


def test_blocks_that_a_sequence_holds_are_not_evicted(bench: Bench) -> None:
    compute_and_release(bench, 1, 2, 3, 4, 5)
    bench.admit(2, 1, 2, 3, 4, 6)
    bench.settle()
    held = bench.table(2)
    assert reasons(bench.admit(3, *range(20, 32))) == [(PlanItem.ADMISSION, 3, Reason.OUT_OF_BLOCKS)]
    assert bench.admit(3, *range(20, 30)).refusals == []
    assert not set(held) & set(bench.table(3))
    assert num_found(bench, 1, 2, 3, 4, 6) == 4


def test_pinned_blocks_are_not_evicted(bench: Bench) -> None:
    compute_and_release(bench, 1, 2, 3, 4, 5)
    pin = bench.ledger.pin_prefix(pack(1, 2, 3, 4), salt=b"", tenant="", ttl_s=60.0, now=1.0)
    assert bench.admit(2, *range(20, 32)).refusals == []
    bench.settle()
    assert num_found(bench, 1, 2, 3, 4, 5) == 4
    bench.plan(releases=[2])
    bench.settle()
    bench.ledger.unpin_prefix(pin.pin_id)
    assert bench.admit(3, *range(40, 56)).refusals == []


def test_after_a_reset_the_pool_can_be_filled_again(bench: Bench) -> None:
    compute_and_release(bench, 1, 2, 3, 4, 5)
    bench.ledger.reset_prefix_cache()
    assert bench.counts() == (8, 0, 0, 0)
    compute_and_release(bench, 1, 2, 3, 4, 5)
    assert num_found(bench, 1, 2, 3, 4, 5) == 4
    assert bench.admit(2, *range(40, 56)).refusals == []


def test_the_books_are_whole_after_each_of_many_plans(bench: Bench) -> None:
    rng = Random(1)
    for step in range(1, 121):
        prompt = pack(*rng.choices([1, 2], k=rng.randint(1, 12)))
        bench.plan(releases=[step - 2], admissions=[Admission(step, prompt)])
        bench.settle()
        assert bench.ledger.probe.violations() == []
        if step % 40 == 0:
            bench.ledger.reset_prefix_cache()
