"""`make gpu-first-hour` without a GPU: it runs to its end, and its report lists the steps that ran and the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_RUN = ("Graph tests", "Sync check: which models are captured", "Forced capture failure", "Memory at its limits")
RUN = (
    "Environment",
    "Kernel tests, compiled",
    "Default start",
    "Dtypes of model and pool",
    "Traces of steps",
    "Compilations under traffic",
    "Host tier",
    "Device loss, and a kernel that hangs",
)


def test_it_runs_to_its_end_and_says_what_was_not_run(tmp_path: Path) -> None:
    command = ["make", "gpu-first-hour", f"GPU_PYTHON={sys.executable}", f"ARGS=--output {tmp_path}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "8 of 12 steps are ok, 0 are not, 4 were not run." in report
    assert "**There is no GPU here: what is below says nothing about one.**" in report
    for title in NOT_RUN:
        assert f"## {title}: not run\n" in _without_anchors(report)
    for title in RUN:
        assert f"## {title}: ok\n" in _without_anchors(report)
    for found in (
        "MISSING: GPU that torch finds",
        "float32, pool auto: 100% equal tokens",
        "0 compilations in ",
        "100% of the tokens are the same with a host tier as without one",
        "lose: status 1, requests finished",
        "hang: status 1, requests finished",
    ):
        assert found in report
    assert done.stdout.count("\n") >= 13, "a line a step, and where the report is"


def _without_anchors(report: str) -> str:
    return (
        "\n".join(
            line.replace(line[3 : line.find("</a>") + 4], "") if "<a id" in line else line
            for line in report.splitlines()
        )
        + "\n"
    )
