"""The tests notice seeded bugs: see tests/mutants.py, which also has those that need the state machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "mutants.py"


def test_every_seeded_bug_is_noticed_by_the_examples() -> None:
    command = [sys.executable, str(SCRIPT), "--suite", "examples"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
