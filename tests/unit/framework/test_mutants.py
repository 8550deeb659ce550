"""The tests notice seeded bugs: see tests/robustness/mutation."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutants
import pytest
import simulated
from robustness.simulation.schedule import FIRST_WITH_DISK, make_schedule
from seeded_bugs import (
    BUGS,
    KEPT_AWAY_BY,
    NEEDS,
    NEEDS_OF_IDEA,
    NOT_SIMULATED,
    Change,
    NotSeeded,
    needs_of,
    read_sources,
)


def test_every_seeded_bug_fits_the_present_source() -> None:
    misfits = {}
    for bug in BUGS:
        sources = before = read_sources(mutants.package_folder(bug.package), bug.package)
        try:
            for change in bug.changes:
                sources = change.applied(sources)
        except NotSeeded as error:
            misfits[bug.name] = str(error)
        else:
            assert sources != before, bug.name
    assert misfits == {}
    assert [name for name, count in Counter(bug.name for bug in BUGS).items() if count > 1] == []


RUST = """
impl Pool {
    pub(crate) fn take(&mut self, count: usize) -> usize {
        self.free
            .split_off(self.len(count))
    }

    fn give(&mut self) {
        self.free.split_off(self.len(count));
    }
}

#[cfg(test)]
mod tests {
    fn take() {
        self.free.split_off(self.len(count))
    }
}
"""
PYTHON = """
class Pool:
    def take(
        self, count: int
    ) -> int:
        if count > 3:
            raise ValueError(
                "no room",
            )
        return count
"""


def test_a_change_is_found_by_its_function_whatever_its_file_and_line_breaks_are() -> None:
    rust, python = Path("pool/blocks.rs"), Path("pool.py")
    taken = Change("take", "self.free.split_off(self.len(count))", "0").applied({rust: RUST})
    assert taken[rust] == RUST.replace("self.free\n            .split_off(self.len(count))", "0", 1)
    raised = Change("take", 'if count > 3:\n    raise ValueError("no room")', "if count:\n    pass").applied(
        {python: PYTHON}
    )
    assert "        if count:\n            pass\n        return count\n" in raised[python]


@pytest.mark.parametrize("function", ["give", "take"])
def test_a_change_that_is_not_there_or_there_twice_is_refused(function: str) -> None:
    sources = {Path("a.rs"): RUST.replace("fn give", "fn take")}
    with pytest.raises(NotSeeded, match=r"give has this statement 0 times|take has this statement 2 times"):
        Change(function, "self.free.split_off(self.len(count))", "0").applied(sources)


@pytest.mark.usefixtures("started_by_exec")
def test_seeded_bugs_are_noticed() -> None:
    """In a process that has not imported the packages: copies stand in for them."""
    command = [sys.executable, mutants.__file__, "--sample", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("started_by_exec")
def test_simulated_schedules_notice_a_seeded_bug() -> None:
    """One that only a line in a log shows."""
    command = [sys.executable, mutants.__file__, "--suite", "simulation", "--schedules", "40", "--jobs", "1"]
    done = subprocess.run([*command, "report that comes twice"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "simulation" in done.stdout
    assert "cachemgr logs: attachment refused" in done.stdout


def test_a_bug_is_judged_again_with_more_schedules_or_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found, survivor = {"schedules": 3, "limit": 100, "drawn": 7}, {"schedules": None, "limit": 100, "drawn": 7}
    monkeypatch.setattr(simulated, "drawn", lambda bug: 7)
    assert simulated.is_judged(BUGS[0], found, 300)
    assert simulated.is_judged(BUGS[0], survivor, 100)
    assert not simulated.is_judged(BUGS[0], survivor, 300)
    assert not simulated.is_judged(BUGS[0], {}, 100)
    monkeypatch.setattr(simulated, "drawn", lambda bug: 8)
    assert not simulated.is_judged(BUGS[0], found, 100)


def test_what_a_bug_needs_is_drawn_by_some_schedule() -> None:
    """Else no schedule would run."""
    assert {*NEEDS, *NOT_SIMULATED, *KEPT_AWAY_BY} <= {bug.name for bug in BUGS}
    assert NEEDS_OF_IDEA.keys() <= {bug.idea for bug in BUGS}
    schedules = list(map(make_schedule, [*range(300), FIRST_WITH_DISK]))
    drawn = {name for schedule in schedules for name in schedule.features.names()}
    drawn |= {fault.kind.value for schedule in schedules for fault in schedule.faults}
    assert {need for bug in BUGS for need in needs_of(bug)} <= drawn
