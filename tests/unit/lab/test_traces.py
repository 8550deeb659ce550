"""Recorded requests through the ledger: LRU exactly as expected.json says, the default never much below it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "harness"))

from replay import expectations, load
from samples import others_at_night

from quire.cachemgr._core import DEFAULT_POLICY
from quire.lab.replay import Outcome, Replay
from quire.lab.requests import Prompt

FILES = expectations()
CASES = [(name, int(capacity)) for name, file in FILES.items() for capacity in file["capacity"]]
QUICK = [(name, int(next(iter(file["capacity"])))) for name, file in FILES.items()]
"""A capacity of each trace."""
CASES_BY_TIER = others_at_night(CASES, QUICK)


@cache
def requests(name: str) -> list[Prompt]:
    return load(name)


@cache
def outcome(name: str, capacity: int, policy: str) -> Outcome:
    return Replay(capacity, block_size=FILES[name]["block"], policy=policy).run(requests(name))


@pytest.mark.parametrize("name", FILES)
def test_a_trace_is_what_expected_json_was_made_of(name: str) -> None:
    expected, trace = FILES[name], requests(name)
    assert len(trace) == expected["requests"]
    assert sum(request.num_tokens for request in trace) == expected["input_tokens"]
    assert sum(len(request.block_ids) for request in trace) == expected["full_blocks"]


@pytest.mark.parametrize(("name", "capacity"), CASES_BY_TIER)
def test_lru_hits_and_evicts_exactly_as_expected(name: str, capacity: int) -> None:
    expected = FILES[name]["capacity"][str(capacity)]
    assert outcome(name, capacity, "lru") == Outcome(expected["lru_hit_blocks"], expected["lru_evictions"])


@pytest.mark.parametrize(("name", "capacity"), CASES_BY_TIER)
def test_the_default_is_at_most_two_percent_below_lru(name: str, capacity: int) -> None:
    expected = FILES[name]["capacity"][str(capacity)]
    num_hits = outcome(name, capacity, DEFAULT_POLICY).num_hits
    assert 0.98 * expected["lru_hit_blocks"] <= num_hits <= expected["opt_hit_blocks"]


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param(CASES, marks=pytest.mark.night)], ids=["a capacity of each", "all"]
)
def test_the_default_is_better_than_lru_in_total(cases: list[tuple[str, int]]) -> None:
    lru = sum(FILES[name]["capacity"][str(capacity)]["lru_hit_blocks"] for name, capacity in cases)
    assert sum(outcome(name, capacity, DEFAULT_POLICY).num_hits for name, capacity in cases) > lru
