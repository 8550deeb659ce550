"""The allocator benchmark runs: every row of ours once, metadata and mixed load, on a small pool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "allocator"
ROWS = {"fresh", "cached", "extend", "extend_and_publish", "release", "fork", "full", "empty_step"}


def test_smoke_measures_every_row_and_writes_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "allocator_rows.json").read_text())
    samples = written["quire"]["samples_ns"]["1000"]
    assert samples.keys() >= ROWS
    assert all(times and min(times) > 0 for times in samples.values())
    assert 0 <= written["metadata_bytes_per_block"]["quire"] < 10_000  # of a tiny pool: whole pages
    mixed = json.loads((tmp_path / "allocator_mixed.json").read_text())
    assert mixed["kinds"]["all"]["calls"] > 0
    assert (tmp_path / "allocator.svg").stat().st_size > 0
