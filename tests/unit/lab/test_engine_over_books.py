"""The engine's scheduler over cachemgr's books, in virtual time: many requests with one prefix, and exact room."""

from __future__ import annotations

from typing import Any

import pytest
from unit.lab.test_lab import STEP, config, text

from quire.lab.simulation import Simulation

PREFIX, OWN, NUM_REQUESTS = 2048, 5, 16


def simulate(requests: list[Any], **fleet: Any) -> Simulation:
    load = {"sessions": "chat", "requests": len(requests), "lengths": "known"}
    simulation = Simulation(config(load, fleet={"workers": 1, "step": STEP} | fleet), 1, requests)
    simulation.run()
    return simulation


@pytest.mark.parametrize("max_step_tokens", [512, 4096])
def test_requests_with_one_cold_prefix_compute_it_once(max_step_tokens: int) -> None:
    """vLLM#37152: of requests that arrive together, each computed the prefix."""
    requests = [
        text((1, 0, PREFIX), (2 + number, 0, OWN + 2), num_prompt=PREFIX + OWN) for number in range(NUM_REQUESTS)
    ]
    simulation = simulate(requests, blocks=400, block_size=16, max_step_tokens=max_step_tokens)
    assert [record.num_generated for record in simulation.records] == [2] * NUM_REQUESTS
    assert simulation.pools[0].num_computed <= PREFIX + NUM_REQUESTS * (OWN + 1) + 16 * NUM_REQUESTS
    assert sorted(record.num_cached for record in simulation.records)[1:] == [PREFIX] * (NUM_REQUESTS - 1)


GROUPS: dict[str, list[dict[str, Any]]] = {
    "full": [],
    "full and window": [{"kind": "full", "layers": 1}, {"kind": "sliding", "layers": 1, "window": 5}],
    "chunks": [{"kind": "chunked", "layers": 2, "window": 6}],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_a_request_that_fills_the_pool_gets_each_token(groups: str) -> None:
    """One after the other, with prompts of all lengths; one token more is refused at once."""
    fleet = {"blocks": 9, "block_size": 4, "max_sequence_tokens": 23, "layer_groups": GROUPS[groups]}
    lengths = range(1, 23)
    requests = [text((number, 0, 23), num_prompt=number, at_s=100.0 * number) for number in lengths]
    simulation = simulate([*requests, text((50, 0, 24), num_prompt=3)], **fleet)
    assert [record.num_generated for record in simulation.records] == [*(23 - number for number in lengths), 0]
