"""The table of the tiers: what `tiers.py record` keeps of a command, and what `tiers.py show` makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import Taken, files_of, sum_of

TESTS = Path(__file__).parents[2]
BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
# A child that outlives its parent.
LEFT = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN!r}])\n"


def tiers(folder: Path, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, str(TESTS / "framework" / "tiers.py"), "--folder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def cells_of(table: str, second: str) -> list[str]:
    (found,) = (line for line in table.splitlines() if f"| {second} |" in line)
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_part_and_its_tests_are_shown(tmp_path: Path) -> None:
    tiers(
        tmp_path,
        "record",
        "check",
        "python",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        str(TESTS / "unit/cachemgr/test_time.py"),
    )
    table = tiers(tmp_path, "show")
    tier, part, num_tests, num_lines, wall_s, _ = cells_of(table, "python")
    assert (tier, part) == ("check", "python")
    assert int(num_lines) == (TESTS / "unit/cachemgr/test_time.py").read_text().count("\n")
    assert int(num_tests) > 0
    assert float(wall_s) >= 0
    assert cells_of(table, "tests/unit/cachemgr/test_time.py")[:4] == [
        "check",
        "tests/unit/cachemgr/test_time.py",
        num_tests,
        num_lines,
    ]
    assert cells_of(table, "all")[1:4] == ["all", num_tests, num_lines]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such children are not counted")
def test_a_child_that_outlives_the_command_is_counted(tmp_path: Path) -> None:
    tiers(tmp_path, "record", "test", "left", sys.executable, "-c", LEFT)
    assert json.loads((tmp_path / "test" / "left.json").read_text())["processor_s"] > 0.2


def test_the_time_of_parts_beside_each_other_counts_once() -> None:
    parts = [(130.0, Taken(1, 2, 30.0, 5.0)), (120.0, Taken(2, 0, 10.0, 6.0)), (135.0, Taken(0, 0, 10.0, 7.0))]
    assert sum_of([*parts, (900.0, Taken(0, 0, 4.0, 1.0))]) == Taken(3, 2, 39.0, 19.0)
    assert sum_of(reversed(parts)).wall_s == 35.0


def test_a_command_that_fails_is_said(tmp_path: Path) -> None:
    tiers(tmp_path, "record", "test", "bad", sys.executable, "-c", "raise SystemExit(3)", status=3)
    assert "bad (failed: 3)" in tiers(tmp_path, "show")


def test_a_file_that_can_not_be_imported_is_one_of_the_files(tmp_path: Path) -> None:
    results = tmp_path / "python.xml"  # as pytest writes it: such a file has no class, and its name is the case's
    results.write_text('<testsuite><testcase classname="" name="tests.unit.framework.test_tiers" /></testsuite>')
    assert list(files_of(results)) == ["tests/unit/framework/test_tiers.py"]
