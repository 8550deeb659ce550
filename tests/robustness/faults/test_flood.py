"""Every attack of flood.py, shortened, against both services: no bound is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from robustness.faults.flood import CASES, Target, measure, services

from quire.cli.launch import LocalServices

QUICK = 0.1


@pytest.fixture(scope="module")
def started() -> Iterator[LocalServices]:
    with services() as started:
        yield started


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("service", ["cachemgr", "worker"])
def test_no_bound_is_broken(started: LocalServices, service: str, name: str) -> None:
    result = asyncio.run(measure(Target(service, getattr(started, service), QUICK), CASES[name]))
    assert not list(result.broken_bounds()), result.answers
