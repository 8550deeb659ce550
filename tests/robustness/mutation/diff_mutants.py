"""Mutates the lines of a change, and prints each mutant that no test notices: cargo-mutants and mutmut on a diff.

    python tests/robustness/mutation/diff_mutants.py                  what the working tree changes since main
    python tests/robustness/mutation/diff_mutants.py --base HEAD~3    since another revision
    python tests/robustness/mutation/diff_mutants.py --seeded         the seeded bugs first, see mutants.py
    python tests/robustness/mutation/diff_mutants.py --minutes 60     for so long at most, 20 by default

The core's mutants are those of cargo-mutants, judged by the crate's tests. Those that survive are judged again by
tests in Python, see mutants.py. Python's are those of mutmut in changed lines, judged by the unit tests that import the
changed module. The tree is never changed: both work on copies.

The tools are installed into build/mutation at first use (minutes). Exits with 1 if a mutant survives, with 2 if the
time was over before all were judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "framework"))

# isort: split
import mutants
from roots import ROOTS, python_path
from seeded_bugs import BUGS, CORE

ROOT = mutants.ROOT
TOOLS = ROOT / "build" / "mutation"
CARGO_MUTANTS, MUTMUT = "27.0.0", "2.5.1"
PYTHON_SUITES = ["examples", "machine"]
MUTANT_TIMEOUT_S = 120
SURVIVED, IS_OVER = 1, 2


class TimeIsOver(Exception):
    """Not all mutants were judged."""


class Budget:
    """The time limit of the run."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left_s(self) -> float:
        """Raises TimeIsOver if nothing is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeIsOver
        return left


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """The output of a command that has to succeed. Raises subprocess.CalledProcessError."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def run_within(budget: Budget, *command: str | Path, folder: Path, environment: dict[str, str]) -> int:
    """The exit code of a command that shows its progress by itself. Raises TimeIsOver."""
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, start_new_session=True)
    try:
        return process.wait(timeout=budget.left_s())
    except subprocess.TimeoutExpired:
        raise TimeIsOver from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def install_cargo_mutants() -> Path:
    """Return its path; install it first if it is missing in this version."""
    command = TOOLS / "bin" / "cargo-mutants"
    if not command.exists() or run(command, "mutants", "--version").split()[-1] != CARGO_MUTANTS:
        print(f"installing cargo-mutants {CARGO_MUTANTS} into {TOOLS}", flush=True)
        install = ("cargo", "install", "cargo-mutants", "--version", CARGO_MUTANTS)
        run(*install, "--locked", "--debug", "--quiet", "--force", "--root", TOOLS)
    return command


def install_mutmut() -> Path:
    """Return its path; install it first if it is missing."""
    command = TOOLS / f"mutmut-{MUTMUT}" / "bin" / "mutmut"
    if not command.exists():
        print(f"installing mutmut {MUTMUT} into {TOOLS}", flush=True)
        run(sys.executable, "-m", "venv", command.parents[1])
        pip = command.with_name("pip")
        run(pip, "install", "--quiet", "--disable-pip-version-check", f"mutmut[patch]=={MUTMUT}", "setuptools<81")
    return command


def changed_files(base: str) -> list[str]:
    """Paths of files that the working tree adds or changes since `base`."""
    tracked = run("git", "diff", "--name-only", "--diff-filter=d", base).splitlines()
    return tracked + run("git", "ls-files", "--others", "--exclude-standard").splitlines()


def diff(base: str, *paths: str, relative_to: str = ".") -> str:
    """A unified diff without context, new files included, with paths relative to a folder."""
    text = run(
        "git",
        "diff",
        "--unified=0",
        f"--relative={relative_to}" if relative_to != "." else "--no-relative",
        base,
        "--",
        *paths,
    )
    known = set(run("git", "ls-files", *paths).splitlines())
    for path in paths:
        if path not in known:
            name = Path(path).relative_to(relative_to)
            lines = (ROOT / path).read_text().splitlines(keepends=True)
            text += f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
            text += f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}" for line in lines)
    return text


# -- the core ---------------------------------------------------------------------------------------------------------


def judge_core(base: str, budget: Budget, *, num_jobs: int) -> int:
    """The number of surviving mutants of the core's diff. Prints them."""
    crate = mutants.CRATE.relative_to(ROOT).as_posix()
    paths = [path for path in changed_files(base) if path.startswith(f"{crate}/src/") and path.endswith(".rs")]
    if not paths:
        print("the core is as it was")
        return 0
    tool = install_cargo_mutants()
    with tempfile.TemporaryDirectory() as scratch:
        changes = Path(scratch, "changes.diff")
        changes.write_text(diff(base, *paths, relative_to=crate))
        command = [tool, "mutants", "--in-diff", changes, "--output", scratch, "--jobs", str(num_jobs), "--no-shuffle"]
        command += ["--profile", "mutant", "--no-default-features", "--cargo-arg=--locked"]
        command += ["--timeout", str(MUTANT_TIMEOUT_S), "--colors", "never"]
        code = run_within(budget, *command, folder=mutants.CRATE, environment={})
        if code not in (0, 2, 3):  # 2: some survived; 3: some hung, which is noticed
            raise SystemExit(f"cargo-mutants ended with {code}")
        return judge_again(Path(scratch, "mutants.out"), Path(scratch), budget)


def judge_again(out: Path, scratch: Path, budget: Budget) -> int:
    """The number of mutants, surviving the crate's tests, that survive the tests in Python, too."""
    patches = patches_of(out)
    if not patches:
        return 0
    print(f"{len(patches)} mutants are noticed by no test of the crate: the tests in Python judge them", flush=True)
    os.environ |= mutants.ENVIRONMENT
    mutants.build_dependencies(PYTHON_SUITES)
    survivors = 0
    for patch in patches:
        budget.left_s()
        killer = mutants.killer_of(CORE, partial(apply, patch), PYTHON_SUITES, scratch)
        print(f"{killer or 'SURVIVED'!s:9} {patch.stem}", flush=True)
        if killer is None:
            survivors += 1
            print(patch.read_text(), flush=True)
    return survivors


def apply(patch: Path, folder: Path) -> None:
    """Changes a copy of the crate by a mutant's diff."""
    run("patch", "--quiet", "-p0", "-i", patch, folder=folder)


def patches_of(out: Path) -> list[Path]:
    """The diffs of the mutants that survived."""
    outcomes = json.loads((out / "outcomes.json").read_text())["outcomes"]
    return [out / outcome["diff_path"] for outcome in outcomes if outcome["summary"] == "MissedMutant"]


# -- Python -----------------------------------------------------------------------------------------------------------


def judge_python(base: str, budget: Budget) -> int:
    """The number of surviving mutants of changed lines of Python. Prints them."""
    paths = [path for path in changed_files(base) if path.endswith(".py") and path.split("/")[0] in ROOTS]
    if not paths:
        print("Python's packages are as they were")
        return 0
    tool = install_mutmut()
    survivors = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        copy_tree(copy)
        for path in paths:
            tests = tests_of(path)
            if not tests:
                print(f"NO TESTS  {path}: no unit test imports it", flush=True)
                survivors += 1
                continue
            survivors += judge_file(tool, copy, path, tests, diff(base, path), budget)
    return survivors


def copy_tree(copy: Path) -> None:
    """The files of the working tree, and the built core."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in [*names, f"cachemgr/quire/cachemgr/{mutants.LIBRARY}"]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def tests_of(path: str) -> list[str]:
    """Unit tests that import the module of this path."""
    module = path.partition("/")[2].removesuffix(".py").replace("/", ".")
    parent, _, name = module.rpartition(".")
    words = (f"{module} ", f"{module}\n", f"from {parent} import {name}")
    return [
        test.relative_to(ROOT).as_posix()
        for test in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if any(word in test.read_text() for word in words)
    ]


def judge_file(tool: Path, copy: Path, path: str, tests: Sequence[str], changes: str, budget: Budget) -> int:
    """The number of surviving mutants of the changed lines of one file. Prints them."""
    print(f"{path}: judged by {' '.join(tests)}", flush=True)
    patch = copy / "changes.diff"
    patch.write_text(changes)
    (copy / ".mutmut-cache").unlink(missing_ok=True)
    environment = {"PYTHONPATH": python_path(copy), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    runner = (
        f"timeout {MUTANT_TIMEOUT_S} {sys.executable} -m pytest -x -q -p no:cacheprovider --tb=no {' '.join(tests)}"
    )
    command = [tool, "run", "--paths-to-mutate", path, "--use-patch-file", patch.name, "--runner", runner]
    code = run_within(budget, *command, "--no-progress", "--simple-output", folder=copy, environment=environment)
    if code & 1:  # a fatal error; 2: some survived, 4: some hung, 8: some were slow
        raise SystemExit(f"mutmut ended with {code}")
    num_noticed, found = 0, run(tool, "result-ids", "survived", folder=copy).split()
    for status in ("killed", "timeout", "suspicious"):
        num_noticed += len(run(tool, "result-ids", status, folder=copy).split())
    print(f"{path}: {num_noticed} mutants are noticed, {len(found)} are not", flush=True)
    for number in found:
        print(f"SURVIVED  {path} ({number})\n{run(tool, 'show', number, folder=copy)}", flush=True)
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="the revision that the working tree is compared with")
    parser.add_argument("--seeded", action="store_true", help="judge the seeded bugs first")
    parser.add_argument("--minutes", type=float, default=20.0, help="for so long at most, the seeded bugs left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    survivors = (
        mutants.judge_all(BUGS, suites=mutants.SUITES, core_suites=mutants.SUITES, num_jobs=options.jobs)
        if options.seeded
        else 0
    )
    budget = Budget(options.minutes)
    base = run("git", "merge-base", options.base, "HEAD").strip()
    try:
        survivors += judge_core(base, budget, num_jobs=options.jobs)
        survivors += judge_python(base, budget)
    except TimeIsOver:
        print(f"the {options.minutes:g} minutes are over: not all mutants were judged", file=sys.stderr)
        return IS_OVER
    print(f"{survivors} mutants survived")
    return SURVIVED if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
