"""The choice among pools by prefix, load and room."""

from __future__ import annotations

import pytest

from quire.gateway.routing.choosing import OpenRequest, OutputLength, PoolLoad, PoolUse, cheapest, cost_of

ROOMY = 100_000


def load(**fields: float) -> PoolLoad:
    return PoolLoad(**{"num_available": ROOMY} | fields)  # type: ignore[arg-type]


def choose(num_tokens: int = 1000, **loads: PoolLoad) -> str:
    return cheapest(loads.items(), num_tokens)


def test_the_pool_that_holds_the_prompt_is_chosen() -> None:
    assert choose(a=load(), b=load(num_cached=600), c=load(num_cached=500)) == "b"
    assert choose(b=load(), a=load()) == "a", "equals by name"


@pytest.mark.parametrize("field", ["num_pending", "num_expected"])
def test_a_prefix_is_worth_as_much_load_as_it_saves(field: str) -> None:
    assert choose(holder=load(num_cached=600, **{field: 599}), idle=load()) == "holder"
    assert choose(holder=load(num_cached=600, **{field: 601}), idle=load()) == "idle"


def test_blocks_that_others_hold_count_and_shared_ones_do_not() -> None:
    assert choose(busy=load(num_in_use=8000), idle=load(num_in_use=7000)) == "idle"
    assert cost_of(load(num_cached=600, num_in_use=600), 1000) == cost_of(load(num_cached=600), 1000)


def test_a_pool_without_room_is_the_last_choice() -> None:
    full = PoolLoad(num_cached=0, num_available=999)
    assert choose(full=full, busy=load(num_pending=50_000)) == "busy"
    assert choose(full=PoolLoad(num_cached=1, num_available=999), busy=load(num_pending=50_000)) == "full"


def test_a_burst_on_one_prefix_is_spread_once_the_holder_has_enough() -> None:
    uses = {"holder": PoolUse(), "other": PoolUse()}
    placed = {"holder": 0, "other": 0}
    for _ in range(32):
        loads = {
            name: load(
                num_cached=900 if name == "holder" else 0, num_pending=use.num_pending, num_expected=use.num_expected
            )
            for name, use in uses.items()
        }
        name = choose(**loads)
        placed[name] += 1
        OpenRequest(uses[name], num_missing=1000 - loads[name].num_cached, num_expected=50)
    assert placed["holder"] > placed["other"] >= 1
    for use in uses.values():
        assert use.num_open == placed["holder" if use is uses["holder"] else "other"]


def test_the_use_of_a_pool_ends_with_its_requests() -> None:
    use = PoolUse()
    requests = [OpenRequest(use, num_missing=10 * number, num_expected=0.1) for number in range(5)]
    assert use.num_pending == 100
    requests[4].begin_output()
    requests[4].begin_output()
    assert use.num_pending == 60
    for request in requests:
        request.leave()
    assert use == PoolUse()


def test_expected_outputs_follow_what_samples_generate() -> None:
    lengths = OutputLength()
    assert lengths.expected(10, 3) == 30
    for _ in range(200):
        lengths.observe(20)
    assert lengths.expected(None, 2) == pytest.approx(40, rel=0.01)
