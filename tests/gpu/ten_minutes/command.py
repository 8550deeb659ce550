"""All that is to be measured in ten minutes of a GPU: parts with a limit each, and a table beside the predictions.

    make gpu-ten-minutes ARGS="--call 1"                   six minutes: learn and choose
    make gpu-ten-minutes ARGS="--call 2"                   four minutes: the figures of the documentation, and peers
    make gpu-ten-minutes ARGS="--call checks"              a new kind of GPU: an hour and a quarter at most
    make gpu-ten-minutes ARGS=--dry                        all of it tiny, on a CPU
    make gpu-ten-minutes ARGS="--compile FOLDER"           before: compile all kernels, without a GPU
    make gpu-ten-minutes ARGS="--decide RESULTS..."        afterwards: write what was decided into its place

parts.toml has the parts, with the predictions. The results of a call are three files in the folder of --output, else in
$OUT, else in build/ten-minutes: NAME.json, NAME.md and NAME.log. They are written again after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cache import described, settle
from parts import GPU, HERE, ROOT, Call, Part, Plan, read_plan
from reporting import Machine, heading, report, tables
from running import Outcome, missing, run_call, with_checkout


def main() -> int:
    plan = read_plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for call in plan.calls.values() for part in call.parts]
    parser.add_argument("--call", choices=[*plan.calls], help="run this call; --dry without it runs 1 and 2")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help="run only these of its parts")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU; longer parts are only parsed")
    parser.add_argument("--list", action="store_true", help="print the parts, with their limits and predictions")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="the folder of --compile, moved or not: use its kernels"
    )
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="fill a cache of Triton for an H100 or H200")
    parser.add_argument("--decide", type=Path, nargs="+", metavar="RESULTS", help="NAME.json of the calls")
    given = parser.parse_args()
    if given.list:
        print("\n".join(listed(plan)))
        return 0
    if given.compile is not None:
        return subprocess.run([sys.executable, str(HERE / "compiling.py"), given.compile]).returncode
    if given.decide is not None:
        command = [sys.executable, str(HERE / "deciding.py"), *given.decide, *["--dry"] * given.dry]
        environment = os.environ | {"PYTHONPATH": with_checkout(os.environ)}
        return subprocess.run(command, env=environment).returncode
    calls = [plan.calls[given.call]] if given.call else [plan.calls["1"], plan.calls["2"]] if given.dry else []
    if not calls:
        parser.error("say which: --call 1, --call 2, --call checks, or --dry")
    absent = missing()
    if GPU in absent and not given.dry and given.call != "checks":
        parser.error("there is no GPU here; --dry shows on a CPU that everything runs")
    if given.cache is not None:
        settle(given.cache)
        os.environ["TRITON_CACHE_DIR"] = str(given.cache.resolve())
        print(described(given.cache))
    folder = (given.output or Path(os.environ.get("OUT") or ROOT / "build/ten-minutes")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe(plan, absent, dry=given.dry)
    statuses = [run_parts(call, chosen(call, given), folder, machine, dry=given.dry) for call in calls]
    return max(statuses)


def listed(plan: Plan) -> list[str]:
    lines = []
    for call in plan.calls.values():
        lines.append(f"call {call.name}, {call.seconds:g} s: {call.title}")
        for part in call.parts:
            lines.append(f"  {part.name:18} {part.limit_s:5g} s  {part.decides}")
            lines += [
                f"{'':29}{figure.name}: {'~' * figure.estimate}{figure.predicted:g}"
                for figure in part.figures
                if figure.predicted
            ]
    return lines


def chosen(call: Call, given: argparse.Namespace) -> list[Part]:
    """Return the parts that --only names, or all; in a dry run its parts."""
    return [
        part for part in (call.dry_parts() if given.dry else call.parts) if not given.only or part.name in given.only
    ]


def describe(plan: Plan, absent: set[str], *, dry: bool) -> Machine:
    """Ask a process for the GPU's name: this one never opens a device."""
    if dry or GPU in absent:
        return Machine("none", is_predicted=False, absent=frozenset(absent))
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"],
        capture_output=True,
        text=True,
        check=True,
    )
    name = asked.stdout.strip()
    return Machine(name, is_predicted=plan.gpu in name, absent=frozenset(absent))


def run_parts(call: Call, parts: Sequence[Part], folder: Path, machine: Machine, *, dry: bool) -> int:
    """Run parts of a call, and write the results after each. Returns 1 if one of them is not ok."""
    name = file_name(call, machine, dry=dry)
    started, outcomes = time.monotonic(), []
    print(f"call {call.name}: {len(parts)} parts, {call.seconds:g} s at most", flush=True)
    try:
        for outcome in run_call(call, parts, folder, dry=dry, absent=set(machine.absent)):
            outcomes.append(outcome)
            write(call, outcomes, folder, name, machine)
            seconds = time.monotonic() - started
            print(f"[{seconds:5.0f} s] {len(outcomes):2}/{len(parts)} {said(outcome)}", flush=True)
    except KeyboardInterrupt:
        print("stopped")
    shown = [heading(call, outcomes, machine)[0], *tables(outcomes, machine)] if outcomes else []
    print("\n".join([*shown, f"results: {folder / name}.json, .md and .log"]))
    return int(len(outcomes) < len(parts) or any(outcome.verdict != "ok" and _counts(outcome) for outcome in outcomes))


def _counts(outcome: Outcome) -> bool:
    """A check that needs a GPU, on a machine without one, is no failure."""
    return outcome.is_bad or outcome.part.call != "checks"


def said(outcome: Outcome) -> str:
    return f"{outcome.part.name}: {outcome.verdict}, {outcome.seconds:.0f} s {outcome.detail}".rstrip()


def file_name(call: Call, machine: Machine, *, dry: bool) -> str:
    """Return the name of the results' files, which has the name of the machine in it."""
    where = "dry" if dry else re.sub(r"\W+", "_", machine.gpu.lower())
    return f"ten_minutes_{where}_{call.name}"


def write(call: Call, outcomes: Sequence[Outcome], folder: Path, name: str, machine: Machine) -> None:
    """Write the JSON, the report and the logs of all parts so far."""
    content: dict[str, Any] = {
        "command": f"make gpu-ten-minutes ARGS='--call {call.name}'",
        "gpu": machine.gpu,
        "parts": {outcome.part.name: outcome.as_json() for outcome in outcomes},
    }
    files = {
        "json": json.dumps(content, indent=1),
        "md": report(call, outcomes, machine),
        "log": "".join(f"==== {outcome.part.name}\n{outcome.log}\n" for outcome in outcomes),
    }
    for ending, text in files.items():
        unfinished = folder / f".{name}.{ending}"
        unfinished.write_text(text)
        unfinished.replace(folder / f"{name}.{ending}")
