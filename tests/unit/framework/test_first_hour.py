"""The runner of `make gpu-first-hour`: verdicts, time limits and the report, with steps made here; and its steps."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

MAIN = Path(__file__).parents[2] / "gpu/first_hour/__main__.py"
ENDLESS_S = 600


@pytest.fixture(scope="module")
def first_hour() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hour_main", MAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def says(text: str, *, status: int = 0) -> tuple[str, ...]:
    return ("-c", f"import sys; print({text!r}); sys.exit({status})")


def test_every_step_gets_its_verdict_and_the_report_says_why(first_hour: ModuleType, tmp_path: Path) -> None:
    gpu, core = first_hour.GPU, first_hour.CORE

    def step(name: str, arguments: tuple[str, ...], **options: object) -> object:
        return first_hour.Step(name, f"The {name}", arguments, 60, f"the figures of {name}", **options)

    steps = [
        step("good", says("noise\nreport: 3 of 3\nmore noise"), needs=()),
        step("tests", says("dots\n7 passed in 1 s"), needs=()),
        step("bad", says("it broke here", status=3), needs=()),
        step("real", says("unused", status=1)),
        step("both", says("unused", status=1), needs=(gpu, core)),
        step("small", says("unused", status=1), without_gpu=says("report: interpreted")),
    ]
    assert first_hour.run_all(steps, tmp_path, {gpu, core}) == 1
    report = (tmp_path / "report.md").read_text()
    assert "3 of 6 steps are ok, 1 are not, 2 were not run." in report
    assert "There is no GPU here" in report
    without_seconds = re.sub(r"\| \d+ \|", "| 0 |", report)
    for line in (
        "| [The good](#good) | ok | 0 | on the CPU |",
        "| [The bad](#bad) | FAILED | 0 | on the CPU: status 3 |",
        f"| [The real](#real) | not run | 0 | there is no {gpu} |",
        f"| [The both](#both) | not run | 0 | there is no {gpu} and no {core} |",
        "| [The small](#small) | ok | 0 | on the CPU |",
        "Look at: the figures of tests",
        "- 3 of 3",
        "- 7 passed in 1 s",
        "- interpreted",
    ):
        assert line in without_seconds, line
    assert "noise" not in report
    assert "```text\nit broke here\n```" in report
    assert (tmp_path / "good.log").read_text() == "noise\nreport: 3 of 3\nmore noise\n"


def test_where_there_is_a_gpu_the_whole_step_runs(first_hour: ModuleType, tmp_path: Path) -> None:
    step = first_hour.Step("x", "X", says("report: compiled"), 60, "", without_gpu=says("", status=1))
    assert first_hour.run_all([step], tmp_path, set()) == 0
    report = (tmp_path / "report.md").read_text()
    assert "- compiled" in report
    assert "no GPU" not in report


def test_a_step_that_does_not_end_is_killed_with_its_children(first_hour: ModuleType, tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep({ENDLESS_S})']); print(child.pid, flush=True); time.sleep({ENDLESS_S})"
    )
    step = first_hour.Step("endless", "Endless", ("-c", script), ENDLESS_S, "", needs=())
    started = time.monotonic()
    outcome = first_hour.run(step, tmp_path, set(), limit_s=5)
    assert (outcome.verdict, outcome.detail) == ("TIMED OUT", "not over after 5 s")
    assert time.monotonic() - started < ENDLESS_S / 2
    child = int((tmp_path / "endless.log").read_text())
    while _runs(child):
        assert time.monotonic() - started < ENDLESS_S / 2


def _runs(pid: int) -> bool:
    """True if the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before it was opened, or before it was read
        return False


def test_the_twelve_steps_name_files_that_exist_and_have_75_minutes_at_most(first_hour: ModuleType) -> None:
    assert [step.name for step in first_hour.STEPS] == [
        "environment",
        "kernels",
        "graphs",
        "start",
        "sync",
        "capture-failure",
        "dtypes",
        "traces",
        "compilations",
        "memory",
        "host-tier",
        "device-loss",
    ]
    for step in first_hour.STEPS:
        for argument in (*step.arguments, *(step.without_gpu or ())):
            assert not argument.startswith("tests/") or (first_hour.ROOT / argument).exists(), argument
        assert step.look_at
    assert sum(step.limit_s for step in first_hour.STEPS) <= 4500
    assert os.access(MAIN.with_name("checks.py"), os.R_OK)
