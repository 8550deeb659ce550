"""Schedules of fixed seeds; a run is repeatable; and what is put wrong on purpose is found."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from robustness.simulation.gateway import Call
from robustness.simulation.reports import Lie
from robustness.simulation.running import answers, run, run_seed, simulating
from robustness.simulation.schedule import FIRST_WITH_DISK, OF_DISKS, Fault, FaultKind, Schedule, make_schedule
from robustness.simulation.shrinking import kind_of, shrink
from robustness.simulation.workload import ModelKind
from samples import others_at_night

from quire.worker.grant.gate import Gate
from quire.worker.service.steps import Reports

RUN = Path(__file__).with_name("run.py")
CHUNK = 250
CHUNKS = range(3)
NUM_NEW, NUM_NEW_WITH_DISKS = 30, 10
WITH_DISKS = range(FIRST_WITH_DISK + 7, FIRST_WITH_DISK + 19)
HAPPENS = {
    "bytes changed on the disk",
    "calls of the disk that failed",
    "copies found on the disk at a start",
    "copies read from the disk",
    "names of files lost with the power",
    "writes for which there was no room",
    "writes lost with the power",
    "writes torn by a loss of power",
    "writes torn by an error or a kill",
}
"""Effects of faults of disks."""


def run_all(seeds: range) -> None:
    with simulating():
        outcomes = map(run_seed, seeds)
        failed = {outcome.seed: outcome.failure for outcome in outcomes if outcome.failure is not None}
    assert not failed, "make simulate ARGS='--replay SEED' tells the story of one"


@pytest.mark.parametrize("chunk", others_at_night(CHUNKS, [0]))
def test_schedules_of_fixed_seeds(chunk: int) -> None:
    run_all(range(chunk * CHUNK, (chunk + 1) * CHUNK))


def test_schedules_with_disks_of_fixed_seeds() -> None:
    """Each kind of fault has happened in them, and copies were read."""
    fired, happened = Counter[str](), Counter[str]()
    with simulating():
        for seed in WITH_DISKS:
            outcome = run_seed(seed)
            assert outcome.failure is None, seed
            fired, happened = fired + outcome.fired, happened + outcome.happened
    assert {kind.value for kind in OF_DISKS} - fired.keys() == set()
    assert HAPPENS - happened.keys() == set()


@pytest.mark.verify
def test_schedules_of_new_seeds() -> None:
    """A new seed that fails is no failure of the change that is tested: it is printed, for a row of the bug table."""
    first = time.time_ns() // 10**9
    with simulating():
        with_disks = range(FIRST_WITH_DISK + first, FIRST_WITH_DISK + first + NUM_NEW_WITH_DISKS)
        for outcome in map(run_seed, [*range(first, first + NUM_NEW), *with_disks]):
            if outcome.failure is not None:
                warnings.warn(f"make simulate ARGS='--replay {outcome.seed}': {outcome.failure}", stacklevel=1)


def test_a_seed_is_the_same_run_to_the_last_line() -> None:
    for seed in (*range(6), FIRST_WITH_DISK):
        stories: list[list[str]] = [[], []]
        for story in stories:
            with simulating(told=True):
                run(make_schedule(seed), tell=story.append)
        assert stories[0] == stories[1]
        assert len(stories[0]) > 10


def test_a_mistake_is_found_and_its_schedule_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that forgets to refuse the steps of a lease that has ended."""
    with simulating():
        for model in ModelKind:
            answers(model)
        monkeypatch.setattr(Gate, "fence_lease", lambda self, lease_id: None)
        seed, found = next((seed, found) for seed in range(500) if (found := run_seed(seed).failure) is not None)
        schedule = make_schedule(seed)
        smaller = shrink(schedule, found)
        assert kind_of(run(smaller).failure or "") == kind_of(found)
    assert len(smaller.faults) <= len(schedule.faults)
    assert sum(map(len, smaller.calls)) < sum(map(len, schedule.calls)) or smaller.features != schedule.features


def test_a_process_that_holds_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that keeps its reports when cachemgr has acknowledged them."""
    schedule = make_schedule(1)
    with simulating():
        answers(schedule.features.model)
        monkeypatch.setattr(Reports, "acknowledge", lambda self, report_number: None)
        failure = run(schedule).failure
    assert re.fullmatch(r"worker-\d holds \d+ acknowledged reports, 0 at most", failure or "")


@pytest.mark.parametrize("lie", Lie)
def test_a_pool_is_used_again_after_a_wrong_report(lie: Lie) -> None:
    every = make_schedule(1).features
    features = replace(every, keeps_state=False, num_gateways=1, num_pools=1, uses_router=False)
    num_fired = 0
    with simulating():
        for at_callback in range(130, 380, 50):
            fault = Fault(FaultKind.LIE, ("worker-0",), at_callback, way=list(Lie).index(lie))
            calls = tuple(Call(number) for number in (0, 2, 5))
            outcome = run(Schedule(at_callback, features, (calls,), (fault,)))
            assert outcome.failure is None
            num_fired += outcome.fired.total()
    assert num_fired == 5


@pytest.mark.usefixtures("started_by_exec")
def test_a_replay_is_equal_in_another_process() -> None:
    command = [sys.executable, str(RUN), "--replay", "7"]
    texts = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert "digest" in texts[0]
