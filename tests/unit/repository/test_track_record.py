"""The page docs/reference/track-record.md, its data, and the command that shows a bug on an old commit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter

import pytest
from pages import ROOT
from robustness import track_record
from robustness.track_record import FAILS, NEEDS_MEND, NO_COMMAND, NOT_RUN, PASSES, SHOWS, Result, old_commits

ENTRIES = track_record.read_entries()


def test_the_page_has_the_tables_of_the_data() -> None:
    page = track_record.PAGE.read_text()
    assert f"{track_record.BEGIN}{track_record.tables(ENTRIES)}{track_record.END}" in page, "run track_record.py page"


def test_each_bug_has_an_entry() -> None:
    """In the order of tests/README.md. The last bugs may have none yet: a mend has no hash before it is committed."""
    bugs = track_record.read_bugs()
    assert len(ENTRIES) > 200
    for entry, bug in zip(ENTRIES, bugs, strict=False):
        assert bug.startswith(entry.bug)
        assert sum(each.startswith(entry.bug) for each in bugs) == 1, f"more than one bug begins so: {entry.bug}"


def test_entries_are_whole() -> None:
    assert {entry.outcome for entry in ENTRIES} <= set(track_record.OUTCOMES)
    for entry in ENTRIES:
        has_command = entry.outcome != NO_COMMAND
        assert [bool(entry.name), bool(entry.mend), bool(entry.tests)] == [has_command] * 3, entry
        assert bool(entry.seen) == (entry.outcome not in (PASSES, NOT_RUN)), entry
    assert [name for name, count in Counter(entry.name for entry in ENTRIES if entry.name).items() if count > 1] == []


def has_history() -> bool:
    """Return whether the checkout has all commits: a shallow clone has not."""
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() == "false"


@pytest.mark.skipif(not has_history(), reason="the clone is shallow")
def test_mends_are_commits_of_the_history() -> None:
    command = ["git", "log", "--abbrev=8", "--format=%h"]
    history = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {commit for entry in ENTRIES for commit in (entry.mend, entry.tests_of) if commit} <= set(history)


@pytest.mark.parametrize(
    ("before", "behind", "expected"),
    [
        (Result(False, "assert 1 == 2"), Result(True, ""), (SHOWS, "assert 1 == 2")),
        (Result(True, ""), Result(True, ""), (PASSES, "")),
        (
            Result(False, "AttributeError: no attribute 'x'"),
            Result(True, ""),
            (NEEDS_MEND, "AttributeError: no attribute 'x'"),
        ),
        (Result(None, "ImportError: no x"), Result(True, ""), (NEEDS_MEND, "ImportError: no x")),
        (Result(None, "error: x"), Result(True, ""), (FAILS, "error: x")),
        (Result(False, "assert 1 == 2"), Result(False, "assert 1 == 3"), (FAILS, "on the mend: assert 1 == 3")),
        (Result(False, "assert 1 == 2"), Result(None, "skipped"), (FAILS, "on the mend: skipped")),
    ],
)
def test_an_outcome_is_that_of_both_commits(before: Result, behind: Result, expected: tuple[str, str]) -> None:
    assert track_record.judge(before, behind) == expected


def test_folders_of_a_machine_are_left_out() -> None:
    said = f"no file {old_commits.CHECKOUT}/tests/a.py, {tempfile.gettempdir()}/pytest-of-x/a/b, {ROOT}/c"
    assert old_commits.shortened(said) == "no file tests/a.py, b, c"


@pytest.mark.skipif(not has_history(), reason="the clone is shallow")
@pytest.mark.night
def test_an_old_bug_shows() -> None:
    command = [sys.executable, "tests/robustness/track_record.py", "show", "released-parent-publishes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "before the mend: fails: AssertionError" in done.stdout
    assert "on the mend 9f87713b: passes\nshows\n" in done.stdout
