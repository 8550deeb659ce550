"""`make gpu-ten-minutes` without a GPU: its dry run, and the checks that run on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_RUN = ("graphs", "sync", "capture-failure", "memory")
RUN = ("environment", "kernels", "start", "dtypes", "traces", "compilations", "host-tier", "kept-memory", "device-loss")


def make(arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu-ten-minutes", f"GPU_PYTHON={sys.executable}", f"ARGS={arguments}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False)


def test_a_dry_run_is_green_and_reads_every_command_line(tmp_path: Path) -> None:
    done = make(f"--dry --output {tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {number: (tmp_path / f"ten_minutes_dry_{number}.md").read_text() for number in (1, 2)}
    for report in reports.values():
        assert "0 are not, 0 were not run." in report
        assert re.search(r"(\d+) of \1 command lines are right", report), report
    written = json.loads((tmp_path / "ten_minutes_dry_1.json").read_text())
    assert written["parts"]["rates"]["figures"]["read by a kernel, GB/s"] > 0
    assert written["parts"]["chains"]["content"]["kernel_us"].keys() == {"plain"}
    for number, report in reports.items():
        whole = report[report.index("| part ") :]
        assert whole.strip() in done.stdout, f"the tables of call {number} are not shown whole"


def compile_chains(folder: Path) -> str:
    """Compile the kernels of one part for an H100; the line that counts them."""
    command = [sys.executable, str(ROOT / "tests/gpu/ten_minutes/compiling.py"), str(folder), "--only", "chains"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("chains: "))


def test_kernels_compiled_before_are_found_where_the_cache_was_moved_to(tmp_path: Path) -> None:
    made, moved = tmp_path / "made", tmp_path / "moved"
    assert compile_chains(made).startswith("chains: 2 compiled in ")
    assert {path.suffix for path in made.glob("*/*")} == {".json", ".cubin", ".so"}
    made.rename(moved)
    sys.path.insert(0, str(ROOT / "tests/gpu/ten_minutes"))
    from cache import settle

    sys.path.pop(0)
    settle(moved)
    assert compile_chains(moved).startswith("chains: 0 compiled in 0.0 s, 2 read from ")


def test_without_a_gpu_it_measures_nothing(tmp_path: Path) -> None:
    done = make(f"--call 1 --output {tmp_path}")
    assert done.returncode != 0
    assert "there is no GPU here" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.night
def test_the_checks_run_to_their_end_and_say_what_was_not_run(tmp_path: Path) -> None:
    done = make(f"--call checks --output {tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "ten_minutes_none_checks.md").read_text()
    assert "9 parts are ok, 0 are not, 4 were not run." in report
    assert "**There is no GPU here: what is below says nothing about one.**" in report
    verdicts = {name: verdict for name, verdict, *_ in map(_cells, report.splitlines()) if verdict}
    assert [name for name in NOT_RUN if verdicts[name] != "not run"] == []
    assert [name for name in RUN if verdicts[name] != "ok"] == []
    for found in (
        "MISSING: GPU that torch finds",
        "float32, pool auto: 100% equal tokens",
        "0 compilations in ",
        "100% of the tokens are the same with a host tier as without one",
        "lose: status 1, requests finished",
        "hang: status 1, requests finished",
    ):
        assert found in report


def _cells(line: str) -> list[str]:
    """The cells of a table's line, else two that are empty."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else ["", ""]
