"""The tests notice seeded bugs: see tests/mutants.py, which also has those that take too long for here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import mutants


def test_every_seeded_bug_is_one_change_of_the_present_text() -> None:
    assert {mutant.name: mutant.count() for mutant in mutants.MUTANTS if mutant.count() != 1} == {}
    assert [mutant.name for mutant in mutants.MUTANTS if mutant.old == mutant.new] == []
    names = Counter(mutant.name for mutant in mutants.MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []
    assert set(names) >= mutants.SAMPLE


def test_seeded_bugs_are_noticed_by_the_examples() -> None:
    command = [sys.executable, mutants.__file__, "--suite", "examples", "--sample"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
