"""The first hour on a GPU: every step in a process of its own, with a time limit and a log, and one report of all.

    make gpu-first-hour                                 all steps; the report is build/gpu-first-hour/report.md
    make gpu-first-hour ARGS="--only dtypes traces"     some of them
    make gpu-first-hour ARGS=--list                     their names

Without a GPU the steps that can run without one do, on the CPU; the report says which ones were not run, and why. Needs
Python alone: a step that misses something says so itself.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
REPORTED = "report: "
"""A line of a log that begins so is in the report too."""
TAIL_LINES = 25
CHECKS = str(HERE / "checks.py")
GPU, CORE = "GPU that torch finds", "native core of cachemgr (make venv)"

# What says that something is there: it exits with 0.
PROBES = {
    GPU: "import sys, torch; sys.exit(not torch.cuda.is_available())",
    CORE: "import quire.cachemgr._core",
}


@dataclass(frozen=True)
class Step:
    """One step: its Python command, its time limit in seconds, and its results to look at.

    without_gpu    the Python command for a machine without a GPU, if there is one
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    limit_s: int
    look_at: str
    needs: tuple[str, ...] = (GPU,)
    without_gpu: tuple[str, ...] | None = None


def check(name: str) -> tuple[str, ...]:
    """Return the arguments that run a check of checks.py."""
    return (CHECKS, name)


def pytest(*arguments: str) -> tuple[str, ...]:
    """Return the arguments that run tests."""
    return ("-m", "pytest", "-q", "-ra", "--no-header", *arguments)


STEPS = (
    Step(
        "environment",
        "Environment",
        (str(HERE / "environment.py"),),
        60,
        "Every line that begins with MISSING.",
        needs=(),
    ),
    Step(
        "kernels",
        "Kernel tests, compiled",
        pytest("tests/kernels", *(f"tests/gpu/test_{name}.py" for name in ("large", "repeatability", "sanitizer"))),
        1500,
        "Failures by kernel. A kernel that does not compile names the GPU's shared memory or an instruction it lacks.",
        without_gpu=pytest("tests/kernels/test_silu_mul.py", "tests/kernels/test_merge_states.py"),
    ),
    Step(
        "graphs",
        "Graph tests",
        pytest("tests/gpu/test_graphs.py", "tests/gpu/test_step.py", "-k", "not services"),
        300,
        "A replay that differs from the eager step reads numbers of the capture: the kernel's arguments on the host.",
    ),
    Step(
        "start",
        "Default start",
        check("start"),
        240,
        "Time to serving; attention in Triton; decode and mixed steps as graphs; the share of tokens as on a CPU.",
        needs=(CORE,),
    ),
    Step(
        "sync",
        "Sync check: which models are captured",
        check("sync"),
        300,
        "A model listed as not captured, with the line of its forward that waits for the device.",
    ),
    Step(
        "capture-failure",
        "Forced capture failure",
        check("capture-failure"),
        120,
        "After a capture that failed the same process starts another model, captures it and runs its steps.",
    ),
    Step(
        "dtypes",
        "Dtypes of model and pool",
        check("dtypes"),
        420,
        "A pair that does not start without a line that says why; a share of equal tokens far below the others. A pool "
        "in float8 rounds more: without a GPU it has 77% with the model of these tests.",
        needs=(CORE,),
    ),
    Step(
        "traces",
        "Traces of steps",
        check("traces"),
        240,
        "Kernels a step, and the share of the time in which the GPU had work. The trace lies beside this report.",
        needs=(CORE,),
    ),
    Step(
        "compilations",
        "Compilations under traffic",
        check("compilations"),
        300,
        "The number of compilations must be 0. Each kernel is named in the log with its seconds.",
        needs=(CORE,),
    ),
    Step(
        "memory",
        "Memory at its limits",
        check("memory"),
        360,
        "No step fails for lack of memory; how much of the GPU's memory is left at the peak.",
        needs=(GPU, CORE),
    ),
    Step(
        "host-tier",
        "Host tier",
        check("host-tier"),
        180,
        "Equal tokens with and without a host tier, and the rate of its copies (PCIe 5: 45 GB/s one way is good).",
        needs=(CORE,),
    ),
    Step(
        "device-loss",
        "Device loss, and a kernel that hangs",
        check("device-loss"),
        240,
        "Both times the process ends with status 1 and requests finish on the next one.",
        needs=(CORE,),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: ok, failed, timed out, not run; and the reason."""

    step: Step
    verdict: str
    detail: str
    seconds: float = 0.0
    log: Path | None = None

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("FAILED", "TIMED OUT")


def missing(what: Sequence[str]) -> set[str]:
    """Return those of PROBES that are not there."""
    done = {name: subprocess.run([sys.executable, "-c", PROBES[name]], capture_output=True) for name in what}
    return {name for name in what if done[name].returncode}


def run(step: Step, folder: Path, absent: set[str], *, limit_s: float | None = None) -> Outcome:
    """Run a step, or say why not. Ctrl-C ends its process and goes on to the caller."""
    arguments, note = step.arguments, ""
    if GPU in absent and step.without_gpu is not None:
        arguments, note = step.without_gpu, "on the CPU: "
    elif lacking := sorted(absent.intersection(step.needs)):
        return Outcome(step, "not run", f"there is no {' and no '.join(lacking)}")
    elif GPU in absent:
        note = "on the CPU: "
    log = folder / f"{step.name}.log"
    environment = os.environ | {"QUIRE_FIRST_HOUR": str(folder)}
    if note and step.without_gpu is not None:
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    status = run_limited([sys.executable, *arguments], log, environment, limit_s or step.limit_s)
    seconds = time.monotonic() - started
    if status is None:
        return Outcome(step, "TIMED OUT", f"{note}not over after {limit_s or step.limit_s:g} s", seconds, log)
    if status:
        return Outcome(step, "FAILED", f"{note}status {status}", seconds, log)
    return Outcome(step, "ok", note.removesuffix(": "), seconds, log)


def run_limited(command: Sequence[str], log: Path, environment: dict[str, str], limit_s: float) -> int | None:
    """Run a command with its output in the log. Returns its status, None if the time was over; then it is killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nothing else is in it
                process.wait()


def reported(outcome: Outcome) -> list[str]:
    """Return what a step's log says for the report; of tests the last line, which counts them."""
    if outcome.log is None:
        return []
    lines = outcome.log.read_text(errors="replace").splitlines()
    found = [line.removeprefix(REPORTED) for line in lines if line.startswith(REPORTED)]
    return found or lines[-1:]


def report(outcomes: Sequence[Outcome], *, absent: set[str]) -> str:
    """Return the report, in Markdown."""
    now = datetime.datetime.now(datetime.UTC)
    counts = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in ("ok", "not run")}
    num_bad = sum(outcome.is_bad for outcome in outcomes)
    lines = [
        "# The first hour on a GPU",
        "",
        f"{now:%Y-%m-%d %H:%M} UTC, {platform.platform()}, Python {platform.python_version()}",
        "",
        f"{counts['ok']} of {len(outcomes)} steps are ok, {num_bad} are not, {counts['not run']} were not run.",
        "",
    ]
    if GPU in absent:
        lines += ["**There is no GPU here: what is below says nothing about one.**", ""]
    lines += ["| step | | seconds | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| [{each.step.title}](#{each.step.name}) | {each.verdict} | {each.seconds:.0f} | {each.detail} |"
        for each in outcomes
    ]
    for outcome in outcomes:
        lines += section(outcome)
    return "\n".join(lines) + "\n"


def section(outcome: Outcome) -> list[str]:
    step = outcome.step
    lines = ["", f'## <a id="{step.name}"></a>{step.title}: {outcome.verdict}', "", f"Look at: {step.look_at}", ""]
    lines += [f"- {line}" for line in reported(outcome)]
    if outcome.log is None:
        return [*lines, f"Not run: {outcome.detail}."]
    lines += ["", f"Log: [{outcome.log.name}]({outcome.log.name})"]
    if outcome.is_bad:
        tail = outcome.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        lines += ["", "```text", *tail, "```"]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in STEPS])
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu-first-hour", metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print the steps and their time limits")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{step.name:16} {step.limit_s:5} s  {step.title}" for step in STEPS))
        return 0
    steps = [step for step in STEPS if given.only is None or step.name in given.only]
    folder = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return run_all(steps, folder, missing(list(PROBES)))


def run_all(steps: Sequence[Step], folder: Path, absent: set[str]) -> int:
    """Run the steps one after the other, write the report after each. Returns 1 if one was not ok."""
    path, outcomes = folder / "report.md", []
    try:
        for number, step in enumerate(steps, start=1):
            print(f"[{number:2}/{len(steps)}] {step.title} (at most {step.limit_s} s) ... ", end="", flush=True)
            outcomes.append(run(step, folder, absent))
            print(f"{outcomes[-1].verdict}, {outcomes[-1].seconds:.0f} s {outcomes[-1].detail}".rstrip(), flush=True)
            path.write_text(report(outcomes, absent=absent))
    except KeyboardInterrupt:
        print("stopped")
    print(f"report: {path}")
    return int(len(outcomes) < len(steps) or any(outcome.is_bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
